"""Memory of an agent over its session: what is kept, what the model sees, what is compacted.

Keeping is synchronous and cheap, as `Session.append` is. Durability comes at boundaries:
before the model or a tool is called, and when the turn ends, the caller awaits
``persist_working_context_snapshot``. A compaction is one group of records: after a kill it has
happened, or it has not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Final, final

import msgspec

from perdure.agent.compaction import Compacted, ExistingMemories, LogCompaction, TurnBlocks, trimmer
from perdure.agent.llm.failures import Overflow
from perdure.agent.llm.model import ToolSpec
from perdure.agent.tools import storable
from perdure.errors import NotStorableError, SessionError
from perdure.memory.compaction import (
    Compaction,
    CompactionPolicy,
    Compactor,
    EpisodicItem,
    SemanticItem,
    blocks_of,
    item_entry,
)
from perdure.memory.context import WorkingContextSnapshot, tokens_of
from perdure.memory.documents import TurnPayload
from perdure.memory.retrieval import Retriever
from perdure.memory.traces import (
    SOURCE,
    RawTrace,
    RawTurn,
    find_turn,
    newest_turns,
    read_turns,
    traces_of,
)
from perdure.providers.tool_pairs import interrupted_result
from perdure.records.json import encode
from perdure.records.media import decode_held, decode_read, lifted, text_bytes
from perdure.records.messages import REDACTED_AT, Message, ToolCall, encode_message
from perdure.records.records import TURN, Entry
from perdure.records.values import redact
from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
from perdure.restore.rebuild import (
    CompactionSnapshotBuilder,
    context_entry,
    prompt_sha256,
    raw_part,
    repair,
    system_prompt_of,
)
from perdure.restore.report import Source
from perdure.restore.snapshot_store import WorkingContextSnapshotStore
from perdure.session import internals
from perdure.session.base import entry_of
from perdure.session.session import Session
from perdure.session.stored import followed

if TYPE_CHECKING:
    from perdure.store import Store


# The running turn, and which of its tool calls have no result yet
#
# Turns are numbered by the session, whose counter continues after a restore, so no id is ever used
# twice. A result is identified by turn and call id, since providers number their calls anew for
# each answer.


@final
class TurnTracker:
    """Keep track of one agent's turn.

    Args:
        number: The newest turn's number, 0 before the first.

    """

    __slots__ = ("_calls", "_number", "turn_id")

    def __init__(self, number: int = 0) -> None:
        self.turn_id: str = ""
        """The turn that is running; empty between turns."""
        self._number = number
        self._calls: list[ToolCall] = []

    @property
    def number(self) -> int:
        """The newest turn's number; counting continues after a restore."""
        return self._number

    def begin(self, turn_id: str, number: int) -> None:
        """A turn has begun."""
        self.turn_id, self._number = turn_id, number
        self._calls = []

    def end(self) -> None:
        """It is over."""
        self.turn_id = ""
        self._calls = []

    def asked(self, turn_id: str, calls: Sequence[ToolCall]) -> None:
        """The model wants tools to be called."""
        self.check(turn_id)
        self._calls.extend(calls)

    def answered(self, turn_id: str, call_id: str) -> bool:
        """A result has come; False if no call of this turn waits for it."""
        self.check(turn_id)
        for at, call in enumerate(self._calls):
            if call.id == call_id:
                del self._calls[at]
                return True
        return False

    def open_calls(self) -> tuple[ToolCall, ...]:
        """Return the calls without a result, in their order."""
        return tuple(self._calls)

    def check(self, turn_id: str) -> None:
        """Refuse what belongs to a turn that is not the running one.

        Raises:
            SessionError: It is another turn's.

        """
        if turn_id != self.turn_id:
            running = repr(self.turn_id) if self.turn_id else "no turn"
            raise SessionError(
                f"this belongs to turn {turn_id!r}, but {running} is running",
                turn=turn_id,
                running=self.turn_id,
            )


# Turns, blocks and traces, read back from the log


@final
class RawTurns:
    """The turns of one session.

    Args:
        session: Whose.

    """

    def __init__(self, session: Session) -> None:
        self._session = session

    async def opening_of(self, turn_id: str) -> Message | None:
        """Return the user message that opened a turn, as it is stored; None if there is none."""
        turn = await find_turn(self._stored, self._session.key, turn_id)
        messages = [] if turn is None else self._decoded(turn)
        return messages[0] if messages and messages[0].role == "user" else None

    async def answer_of(self, turn_id: str) -> Message | None:
        """Return the last that the model said in a turn, None if it said nothing."""
        answers = [
            message for message in await self._said_in(turn_id) if message.role == "assistant"
        ]
        return answers[-1] if answers else None

    async def newest(self, count: int, *, exclude: str | None = None) -> list[Message]:
        """Return what was said in the newest turns, without the one of an id."""
        store, key = internals.store_of(self._session), self._session.key
        turns = await newest_turns(store, key, count, exclude=exclude)
        return [message for turn in turns for message in self._decoded(turn)]

    async def traces(self, after: int) -> AsyncGenerator[RawTrace, None]:
        """Yield the messages after a record, oldest first."""
        turns_read = read_turns(
            internals.store_of(self._session), self._session.key, after=after, upto=None
        )
        async with aclosing(turns_read) as turns:
            async for turn in turns:
                numbered = zip(turn.seqs, self._decoded(turn), strict=True)
                for trace in traces_of(turn.id, numbered):
                    yield trace

    async def count(self, after: int, upto: int) -> int:
        """Return how many turns there are between two records."""
        count = 0
        async with aclosing(self._read(after, upto)) as turns:
            async for _ in turns:
                count += 1
        return count

    async def blocks(
        self, after: int, upto: int, running_id: str | None, compacting: LogCompaction
    ) -> AsyncGenerator[TurnBlocks, None]:
        """Give the turns between two records as blocks; all from the running one on is running."""
        waiting: RawTurn | None = None
        running = False
        async with aclosing(self._read(after, upto)) as turns:
            async for turn in turns:
                if waiting is not None:
                    running = running or waiting.id == running_id
                    yield self._blocks_of(waiting, compacting, running=running)
                waiting = turn
        if waiting is not None:
            # The rest of a turn whose beginning is compacted has no id yet: it can only be last.
            running = running or (running_id is not None and waiting.id in {running_id, ""})
            yield self._blocks_of(waiting, compacting, running=running)

    def _blocks_of(self, turn: RawTurn, compacting: LogCompaction, *, running: bool) -> TurnBlocks:
        numbered = zip(turn.seqs, self._decoded(turn), turn.messages, strict=True)
        parts = [
            (seq, message, compacting.share_of(message, text_bytes(payload)))
            for seq, message, payload in numbered
        ]
        return TurnBlocks(blocks_of(turn.id, parts, last=turn.last), running)

    @property
    def _stored(self) -> Store:
        """The store that has messages as they are stored: with references to media."""
        return followed(internals.store_of(self._session))

    def _read(self, after: int, upto: int | None = None) -> AsyncGenerator[RawTurn, None]:
        """Yield turns as they are stored: a compaction needs no media."""
        return read_turns(self._stored, self._session.key, after=after, upto=upto)

    async def _said_in(self, turn_id: str) -> list[Message]:
        turn = await find_turn(internals.store_of(self._session), self._session.key, turn_id)
        types = internals.registry_of(self._session)
        return [] if turn is None else [decode_read(payload, types) for payload in turn.messages]

    def _decoded(self, turn: RawTurn) -> list[Message]:
        types = internals.registry_of(self._session)
        return [decode_held(payload, types) for payload in turn.messages]


log: logging.Logger = logging.getLogger("perdure.agent")

SPARE: Final = 0.85
"""How much of a window may be asked with: the rest is the answer's, and for miscounting."""
NEAR: Final = 0.75
"""Of how much of it to warn."""
HALF: Final = 0.5
"""How much of a request that was too long to keep, if nobody says how much too long it was."""


@final
class MemoryManager:
    """Keep an agent's messages and memories in its session.

    An agent's worker drives its own. Without an agent, drive one by hand: a turn begins with the
    first message that names it, unless ``session.turn()`` has begun one.

    Args:
        session: Where they are kept.
        turn_tracker: Which turn is running.
        compaction_policy: When to compact, and how much stays.
        compactor: Makes memories of turns.
        retriever: Finds memories.
        working_context_snapshot: The working context to begin with, in place of the session's.
        working_context_snapshot_store: Where the snapshot is.
        builder: Puts a working context together.
        options: How many memories it has.
        history: Whether what is said leaves records.
        redact_arguments: Keys of tool arguments whose values are not kept.
        clock: Seconds since 1970.

    """

    def __init__(
        self,
        session: Session,
        *,
        turn_tracker: TurnTracker | None = None,
        compaction_policy: CompactionPolicy | None = None,
        compactor: Compactor | None = None,
        retriever: Retriever | None = None,
        working_context_snapshot: WorkingContextSnapshot | None = None,
        working_context_snapshot_store: WorkingContextSnapshotStore | None = None,
        builder: CompactionSnapshotBuilder | None = None,
        options: WorkingContextSnapshotBootstrapOptions | None = None,
        history: bool = True,
        redact_arguments: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.session = session
        self.turn_tracker: TurnTracker = turn_tracker or TurnTracker(session.info.turns)
        self.compaction_policy: CompactionPolicy = compaction_policy or CompactionPolicy()
        self._window: int | None = None  # the model's, in its own tokens, if it is known
        self._room: int | None = None  # the same, as tokens are counted here, with room to spare
        self._scale = 1.0  # tokens as they are counted here, for one of the model's
        self._warned = False
        self._opened: tuple[str, int, Message | None] = ("", 0, None)  # by what, and at which seq
        self.compactor: Compactor = compactor or Compactor()
        self.builder: CompactionSnapshotBuilder = builder or CompactionSnapshotBuilder()
        self.retriever: Retriever = retriever or Retriever(
            lambda name: internals.contents_of(session).lines(name),
            trim=trimmer(self.policy, self.builder),
            on_searched=partial(internals.note_search, session),
        )
        self.working_context_snapshot_store: WorkingContextSnapshotStore = (
            working_context_snapshot_store
            or WorkingContextSnapshotStore(
                internals.store_of(session),
                session.key,
                epoch=session.epoch,
                exclusively=partial(internals.exclusively, session),
                primed=internals.contents_of(session).primed_snapshot(),
            )
        )
        self.compaction_required: bool = False
        """Whether the next request compacts first."""
        self._raw = RawTurns(session)
        self._history = history  # else nothing that is said leaves a record
        self._redact = tuple(redact_arguments)
        self._options = options or WorkingContextSnapshotBootstrapOptions()
        self._clock = clock
        self._beside = 0  # tokens of a request that are not counted here
        self._asked_before = False
        self._by_hand = ""  # the turn that began with a message that named it
        if working_context_snapshot is not None:
            self._begin_with(working_context_snapshot)

    # what it is

    @property
    def agent_id(self) -> str:
        """The agent's id."""
        return self.session.id

    @property
    def restored_from(self) -> Source:
        """Where the session's context came from when it was opened."""
        return self.session.restore_report.source

    @property
    def snapshot_was_written(self) -> bool:
        """Whether a fold has written the snapshot, even if it was lost since."""
        return internals.contents_of(self.session).was_folded

    @property
    def working_context_snapshot(self) -> WorkingContextSnapshot:
        """The working context as a value, for a serializer."""
        context = internals.working_context(self.session)
        return WorkingContextSnapshot(
            messages=tuple(self.get_working_context_messages()),
            epoch_id=context.epoch_id,
            last_compaction_ts=context.last_compaction_ts,
        )

    @property
    def system_prompt_sha256(self) -> str | None:
        """The hash of the prompt that the context was made with."""
        return internals.working_context(self.session).system_prompt_sha256

    @property
    def context_bytes(self) -> int:
        """How large the working context is."""
        return internals.working_context(self.session).size

    # keeping

    def ingest_user_message(
        self, message: Message, turn_id: str, source_event: str | None = None
    ) -> int:
        """Keep what the user said; return the session's version.

        Args:
            message: What was said.
            turn_id: The turn.
            source_event: What brought it: its raw traces say so, None for the usual event.

        Raises:
            SessionError: Another turn is running.

        """
        self._enter(turn_id)
        self.turn_tracker.check(turn_id)
        message = with_source(message, source_event)
        seq = self._append(message)
        self._opened = (turn_id, seq, message)
        return seq

    def ingest_tool_intent(
        self, message: Message, turn_id: str, source_event: str | None = None
    ) -> int:
        """Record the model's request to call tools, before they are called."""
        self._enter(turn_id)
        self.turn_tracker.asked(turn_id, message.tool_calls)
        redacted = without_credentials(message, self._redact)
        return self._append(with_source(redacted, source_event))

    def ingest_tool_result(
        self, message: Message, turn_id: str, source_event: str | None = None
    ) -> bool:
        """Keep what came of a tool call; False if that call has its result already.

        Lone surrogates are escaped. What cannot be stored is kept as an error that says so.
        """
        self._enter(turn_id)
        message = with_source(message, source_event)
        result = message.tool_result
        if result is None or not self.turn_tracker.answered(turn_id, result.call_id):
            return False
        try:
            self._append(message)
        except NotStorableError:
            try:
                self._append(msgspec.structs.replace(message, tool_result=storable(result)))
            except (NotStorableError, RecursionError) as error:
                reason = f"the tool's result cannot be stored: {error}"
                self._append(Message.tool(result.call_id, name=result.name, error=reason))
        return True

    def ingest_assistant_response(
        self, message: Message, turn_id: str, source_event: str | None = None
    ) -> int:
        """Keep the model's answer."""
        self._enter(turn_id)
        self.turn_tracker.check(turn_id)
        return self._append(with_source(message, source_event))

    def _enter(self, turn_id: str) -> None:
        """Begin a turn that no worker runs: its first message names it."""
        tracker = self.turn_tracker
        if tracker.turn_id == turn_id or internals.has_worker(self.session):
            return
        if tracker.turn_id != self._by_hand:  # somebody else has begun it, and will end it
            return
        session, number = self.session, internals.running_turn(self.session)
        if not number:
            number = internals.next_turn(session)
            turned = TurnPayload(turn=turn_id, number=number, phase="begin", at=self._clock())
            self._accept(Entry(TURN, encode(turned)))
        tracker.begin(turn_id, number)
        self._by_hand = turn_id

    def _begin_with(self, snapshot: WorkingContextSnapshot) -> None:
        prompt = system_prompt_of(snapshot.messages)
        entry = context_entry(
            snapshot.messages,
            epoch_id=snapshot.epoch_id,
            last_compaction_ts=snapshot.last_compaction_ts,
            system_prompt_sha256=prompt_sha256(prompt) if prompt else None,
            reason="given",
            types=internals.registry_of(self.session),
        )
        self._accept(entry)

    def _append(self, message: Message) -> int:
        self._accept(entry_of(message, internals.registry_of(self.session)))
        return self.session.version

    def _accept(self, *entries: Entry) -> None:
        if self._history:
            internals.accept(self.session, entries)
        else:
            internals.contents_of(self.session).add_unsaved_context(entries)

    def close_open_calls(self) -> int:
        """Give each call of this turn without a result one that says so; return how many."""
        open_calls = self.turn_tracker.open_calls()
        for call in open_calls:
            self.ingest_tool_result(interrupted_result(call), self.turn_tracker.turn_id)
        return len(open_calls)

    async def persist_working_context_snapshot(self) -> None:
        """Make everything that the working context is made of durable.

        After a kill right after this, the context is restored the same. The snapshot's file
        follows at the next fold. Without a store, there is nothing to do.
        """
        await self.session.save()

    # what the model sees

    def get_working_context_messages(self) -> list[Message]:
        """Return the working context, as it is."""
        return self.session.context()

    async def answer_of(self, turn_id: str) -> Message:
        """Return the last answer of a turn that has ended."""
        return await self._raw.answer_of(turn_id) or Message.assistant("")

    async def get_raw_tail(
        self, tail_turns: int | None, exclude_turn_id: str | None = None
    ) -> list[Message]:
        """Return the newest turns' messages, as they were said.

        Args:
            tail_turns: How many turns; None for what the working context holds of them.
            exclude_turn_id: A turn to leave out.

        """
        if tail_turns is None:
            return list(raw_part(self.get_working_context_messages()))
        return await self._raw.newest(tail_turns, exclude=exclude_turn_id)

    def raw_traces(self, *, after: int = 0) -> AsyncGenerator[RawTrace, None]:
        """Yield the messages after a record one by one, oldest first, compacted or not.

        What is not durable yet, what was retracted, and what a new beginning set aside is
        not among it. Close it if you leave it early.
        """
        return self._raw.traces(after)

    async def reset_working_context_snapshot(
        self,
        messages: Sequence[Message],
        *,
        system_prompt: str | None = None,
        reason: str = "reset",
    ) -> None:
        """Replace the working context, durably; history stays. No counter moves.

        Args:
            messages: All that the model sees next, its system prompt included.
            system_prompt: What a later restore compares its own with; None for the message that
                they begin with, if that is a system prompt.
            reason: Is noted.

        """
        system_prompt = system_prompt_of(messages) if system_prompt is None else system_prompt
        self.replace_context(messages, system_prompt=system_prompt, reason=reason)
        await self.persist_working_context_snapshot()

    def replace_context(
        self, messages: Sequence[Message], *, system_prompt: str | None, reason: str
    ) -> None:
        """Replace the working context; durable with what comes next."""
        context = internals.working_context(self.session)
        entry = context_entry(
            messages,
            epoch_id=context.epoch_id,
            last_compaction_ts=context.last_compaction_ts,
            system_prompt_sha256=prompt_sha256(system_prompt) if system_prompt else None,
            reason=reason,
            types=internals.registry_of(self.session),
        )
        payload, media = lifted(entry.payload)
        if context.lifts and media.keys() <= context.media.keys():  # these have records before it
            entry = entry._replace(payload=payload)
        self._accept(entry)

    async def append_repairs(self, messages: Sequence[Message]) -> None:
        """Append the results that a restore made up for calls that have none."""
        types = internals.registry_of(self.session)
        self._accept(*(encode_message(message, types) for message in messages))
        await self.persist_working_context_snapshot()

    # compaction

    def request_compaction(self) -> None:
        """Ask that the next request compacts first. Nothing else happens now."""
        self.compaction_required = True

    def note_window(self, tokens: int | None) -> None:
        """Take note of how many tokens the model may be asked with, if that is known."""
        if tokens is not None and self._room is None:
            self._window, self._room = tokens, int(tokens * SPARE)

    def note_usage(self, asked_with: Sequence[Message], tokens: int | None) -> None:
        """Take note of how many tokens the model has read: more than is counted here.

        Of a model that does not say it, what it would read next is counted.
        """
        policy = self.policy
        if policy.max_tokens is None:
            return
        if tokens is None:
            if self.is_over_budget(self.safe_messages()):
                self.request_compaction()
            return
        counted = tokens_of(asked_with, policy.count_tokens)
        self._beside = max(int(tokens * self._scale) - counted, 0)
        self._asked_before = True
        if policy.is_due(self.context_bytes, int(tokens * self._scale)):
            self.request_compaction()
        near = self._window is not None and tokens > self._window * NEAR
        if near and not self._warned:
            facts = {"agent": self.agent_id, "tokens": tokens, "window": self._window}
            log.warning("the context of %s nears the model's window", self.agent_id, extra=facts)
        self._warned = near

    def note_overflow(self, asked_with: Sequence[Message], overflow: Overflow) -> int:
        """Take note that the model was asked with too much, and return how much that was.

        The next request compacts to what fits: to what the provider says, as tokens are counted
        here; to half of it, where it says nothing.
        """
        count = self.compaction_policy.count_tokens
        tokens = tokens_of(asked_with, count) + self._beside
        if overflow.window and overflow.tokens:
            self._scale = tokens / overflow.tokens
            room = overflow.window * self._scale * SPARE
        elif overflow.window:
            room = min(overflow.window * SPARE, tokens * HALF)
        else:
            room = tokens * HALF
        self._window, self._room = overflow.window or self._window, max(int(room), 1)
        self._beside = 0  # it is part of what the scale was made of
        self.request_compaction()
        return tokens

    def note_tools(self, specs: Sequence[ToolSpec]) -> None:
        """Take note of the tools that the next request has, until the model says what they took."""
        if self._asked_before or self.policy.max_tokens is None:
            return
        shown = Message.system(msgspec.json.encode(specs, enc_hook=repr).decode())
        self._beside = self.compaction_policy.count_tokens(shown) if specs else 0

    def count(self, messages: Sequence[Message]) -> int:
        """Return how many tokens a request with these messages has, as counted here."""
        return tokens_of(messages, self.compaction_policy.count_tokens) + self._beside

    def is_over_budget(self, messages: Sequence[Message]) -> bool:
        """Say whether messages are more than what the model may be asked with."""
        policy = self.policy
        tokens = None if policy.max_tokens is None else self.count(messages)
        return policy.is_due(self.context_bytes, tokens)

    def is_due(self, messages: Sequence[Message]) -> bool:
        """Say whether a request with these messages compacts first.

        It does if that was requested, if they are over the budget, and if the session has
        cut its context: what it has left out is to be summed up, not just gone.
        """
        was_cut = self._history and internals.working_context(self.session).cut
        return self.compaction_required or was_cut or self.is_over_budget(messages)

    @property
    def policy(self) -> CompactionPolicy:
        """When to compact: as was said, and as the session and the model's window allow."""
        policy = self.compaction_policy.within(internals.working_context(self.session).limit)
        if self._room is None or self._room >= (policy.max_tokens or self._room + 1):
            return policy
        return msgspec.structs.replace(policy, max_tokens=self._room)

    async def leave_out_turn(self, turn_id: str) -> None:
        """Take back what was said in the running turn; the log has it.

        What the context was compacted to meanwhile stays. A turn that was resumed is left as it
        is, and so is one in which tools have answered, since what they did must not be forgotten:
        the next compaction sums it up.
        """
        said_in, seq, opening = self._opened
        if said_in != turn_id:
            return
        context = internals.contents_of(self.session).stored()
        shown = self.get_working_context_messages()
        begins = [at for at, message in enumerate(shown) if _is_same(message, opening)]
        turn_messages = context[begins[-1] :] if begins else context
        if any(message.tool_result is not None for message in turn_messages):
            return
        await self.session.retract(after=seq - 1)
        if begins:
            before = context[: begins[-1]]
            self.replace_context(before, system_prompt=None, reason="overflow")

    async def compact(
        self, system_prompt: str, exclude_turn_id: str | None = None, *, notes: str = ""
    ) -> Compaction:
        """Turn old turns into long-term memory, and rebuild the context.

        The items and the new context are one group of records. What was said stays in
        the log. An exception leaves everything as it was, and the request stays; if only the
        last save fails, the group becomes durable with the next one.

        Args:
            system_prompt: What the new context begins with.
            exclude_turn_id: The running turn. It stays raw; only where it does not fit by
                itself, what came before its newest answers to tools is compacted, too.
            notes: What is shown next to the context, and takes some of its budget.

        Raises:
            CompactionError: The summarizer has failed.
            StoreUnavailableError: The store cannot be reached.

        """
        if not self._history:
            return self._cut(system_prompt, notes)
        compacted, late = await self._compacted(_head(system_prompt, notes), exclude_turn_id)
        while late is None:  # what was summed up is not what the session holds by now
            compacted, late = await self._compacted(_head(system_prompt, notes), exclude_turn_id)
        self._write(compacted, late, system_prompt)
        await self.persist_working_context_snapshot()
        self.compaction_required = False
        internals.fold_soon(self.session)
        return compacted.done

    async def _compacted(
        self, head: Sequence[Message], current: str | None
    ) -> tuple[Compacted, list[Message] | None]:
        """Return the outcome, and what was said meanwhile: None if something was taken back."""
        upto = internals.working_context(self.session).seq
        await self.session.save()  # the turns are read from the store
        known = ExistingMemories(await self.retriever.episodic(), await self.retriever.semantic())
        after, policy = known.as_of(upto), self.compaction_policy
        are_many = upto - after > policy.max_summaries * policy.episode_turns
        compacting = self._compacting(await self._raw.count(after, upto) if are_many else 0)
        blocks = self._raw.blocks(after, upto, current, compacting)
        async with aclosing(blocks) as turns:
            compacted = await compacting.run(
                turns,
                known,
                head=head,
                opening=lambda: self._raw.opening_of(current or ""),
                limits=(self._options.max_episodic, self._options.max_semantic),
            )
        late, types = (
            internals.working_context(self.session).since(upto),  # as they are stored
            internals.registry_of(self.session),
        )
        return compacted, late if late is None else [
            decode_held(payload, types) for payload in late
        ]

    def _compacting(self, turns: int = 0) -> LogCompaction:
        parts = (self.policy, self.compactor, self.builder, self._clock)
        return LogCompaction(*parts, turns=turns, beside=self._beside)

    def _cut(self, prompt: str, notes: str) -> Compaction:
        """Let the oldest messages go where nothing that is said is kept: there is no log."""
        context = raw_part(internals.contents_of(self.session).stored())
        messages = self._compacting().cut(context, head=_head(prompt, notes))
        if messages != context:
            head = (Message.system(prompt),) if prompt else ()
            self.replace_context((*head, *messages), system_prompt=prompt or None, reason="cut")
        self.compaction_required = False
        return Compaction()

    def _write(self, compacted: Compacted, late: Sequence[Message], prompt: str) -> None:
        raw = (*compacted.raw, *late)
        dangling = self._options.dangling_calls
        messages = self.builder.build(prompt, compacted.bundle, raw, dangling=dangling)
        was_cut = internals.working_context(self.session).cut  # by something larger than all of it
        stored = repair(internals.contents_of(self.session).stored(), self._options.dangling_calls)
        if not compacted.done.episodic and (was_cut or messages == stored.messages):
            return
        replaced = context_entry(
            messages,
            epoch_id=internals.working_context(self.session).epoch_id + 1,
            last_compaction_ts=self._clock(),
            system_prompt_sha256=prompt_sha256(prompt) if prompt else None,
            reason="compaction",
            types=internals.registry_of(self.session),
        )
        items: list[EpisodicItem | SemanticItem] = [
            *compacted.done.episodic,
            *compacted.done.semantic,
        ]
        self._accept(*map(item_entry, items), replaced)

    def safe_messages(self) -> tuple[Message, ...]:
        """Return the working context as every provider takes it."""
        return repair(self.get_working_context_messages(), self._options.dangling_calls).messages


def _is_same(message: Message, other: Message | None) -> bool:
    """Say whether messages are one, whenever it was kept."""
    if other is None:
        return False
    same_time = msgspec.structs.replace(message, created_at=other.created_at)
    return same_time == other


def _head(*texts: str) -> list[Message]:
    return [Message.system(text) for text in texts if text]


def with_source(message: Message, event: str | None) -> Message:
    """Return a message that says which event brought it; None for the usual one."""
    if event is None:
        return message
    extra = {**message.extra, SOURCE: msgspec.Raw(encode(event))}
    return msgspec.structs.replace(message, extra=extra)


def without_credentials(message: Message, keys: Sequence[str]) -> Message:
    """Return a message whose tool arguments lack the values of these keys, and say where."""
    if not keys:
        return message
    calls = tuple(_redacted(call, keys) for call in message.tool_calls)
    return msgspec.structs.replace(message, tool_calls=calls)


def _redacted(call: ToolCall, keys: Sequence[str]) -> ToolCall:
    arguments, paths = redact(call.arguments, keys)
    if not paths:
        return call
    extra = {**call.extra, REDACTED_AT: msgspec.Raw(encode(paths))}
    return msgspec.structs.replace(call, arguments=arguments, extra=extra)
