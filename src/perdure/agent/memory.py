"""Memory of an agent over its session: what is kept, what the model sees, what is compacted.

Keeping is synchronous and cheap, as `Session.append` is. Durability comes at boundaries:
before the model or a tool is called, and when the turn ends, the caller awaits
``persist_working_context_snapshot``. A compaction is one group of records: after a kill it has
happened, or it has not.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import final

import msgspec

from perdure.agent.compaction import ContextBudget, LogCompaction, decoded, trimmed
from perdure.agent.effects import close_call
from perdure.agent.tools import storable
from perdure.errors import NotStorableError, SessionError
from perdure.memory.compaction import (
    Compaction,
    CompactionPolicy,
    Compactor,
    MemoryBundle,
    item_entry,
)
from perdure.memory.context import WorkingContextSnapshot
from perdure.memory.documents import TurnPayload
from perdure.memory.retrieval import Retriever
from perdure.memory.traces import (
    SOURCE,
    RawTrace,
    find_turn,
    newest_turns,
    read_turns,
    traces_of,
)
from perdure.providers.tool_pairs import interrupted_result, paired
from perdure.records.json import encode
from perdure.records.media import decode_held, decode_read, lifted
from perdure.records.messages import REDACTED_AT, Message, ToolCall, encode_message
from perdure.records.records import TURN, Entry
from perdure.records.values import redact
from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
from perdure.restore.rebuild import (
    CompactionSnapshotBuilder,
    context_entry,
    prompt_sha256,
    raw_part,
    system_prompt_of,
)
from perdure.restore.report import Source
from perdure.restore.snapshot_store import WorkingContextSnapshotStore
from perdure.session import internals
from perdure.session.base import entry_of
from perdure.session.session import Session

# The running turn, and which of its tool calls have no result yet
#
# Turns are numbered by the session, whose counter continues after a restore, so no id is ever used
# twice. A result is identified by turn and call id, since providers number their calls again for
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
        return close_call(self._calls, call_id)

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
        self.budget: ContextBudget = ContextBudget(session, self.compaction_policy)
        """The tokens that the model may be asked with."""
        self._opened: tuple[str, int, Message | None] = ("", 0, None)  # by what, and at which seq
        self.compactor: Compactor = compactor or Compactor()
        self.builder: CompactionSnapshotBuilder = builder or CompactionSnapshotBuilder()
        self.retriever: Retriever = retriever or Retriever(
            lambda name: internals.contents_of(session).lines(name),
            trim=partial(trimmed, policy=self.budget.policy, builder=self.builder),
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
        """True if the next request compacts first."""
        self._history = history  # else nothing that is said leaves a record
        self._redact = tuple(redact_arguments)
        self._options = options or WorkingContextSnapshotBootstrapOptions()
        self._clock = clock
        self._by_hand = ""  # the turn that began with a message that named it
        if working_context_snapshot is not None:
            given = working_context_snapshot
            prompt = system_prompt_of(given.messages)
            entry = context_entry(
                given.messages,
                epoch_id=given.epoch_id,
                last_compaction_ts=given.last_compaction_ts,
                system_prompt_sha256=prompt_sha256(prompt) if prompt else None,
                reason="given",
                types=internals.registry_of(session),
            )
            self._accept(entry)

    def __repr__(self) -> str:
        return f"<MemoryManager of {self.session.key}>"

    # what it is

    @property
    def agent_id(self) -> str:
        """The agent's id."""
        return self.session.id

    @property
    def restored_from(self) -> Source:
        """Source of the session's context when it was opened."""
        source = self.session.restore_report.source
        if source == "snapshot" and not self.get_working_context_messages():
            return "catch_up"  # it was emptied since, and the snapshot must not fill it again
        return source

    @property
    def snapshot_was_written(self) -> bool:
        """True if a fold has written the snapshot, even if it was lost since."""
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
        """Bytes of the working context."""
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

    def ingest_late_result(self, message: Message) -> int:
        """Keep the result of a call whose turn has gone on, or ended, without it."""
        return self._append(message)

    def ingest_assistant_response(
        self, message: Message, turn_id: str, source_event: str | None = None
    ) -> int:
        """Keep the model's answer."""
        self._enter(turn_id)
        return self._append(with_source(message, source_event))

    def _enter(self, turn_id: str) -> None:
        """Begin a turn that no worker runs, since its first message names it; refuse another's."""
        tracker, session = self.turn_tracker, self.session
        # Where another caller has begun one, that caller ends it.
        is_new = tracker.turn_id != turn_id and tracker.turn_id == self._by_hand
        if is_new and not internals.has_worker(session):
            number = internals.running_turn(session)
            if not number:
                number = internals.next_turn(session)
                turned = TurnPayload(turn=turn_id, number=number, phase="begin", at=self._clock())
                self._accept(Entry(TURN, encode(turned)))
            tracker.begin(turn_id, number)
            self._by_hand = turn_id
        tracker.check(turn_id)

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
        turn = await find_turn(internals.store_of(self.session), self.session.key, turn_id)
        types = internals.registry_of(self.session)
        for payload in () if turn is None else reversed(turn.messages):
            message = decode_read(payload, types)
            if message.role == "assistant":
                return message
        return Message.assistant("")

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
        store, key = internals.store_of(self.session), self.session.key
        turns = await newest_turns(store, key, tail_turns, exclude=exclude_turn_id)
        return [message for turn in turns for message in decoded(turn, self.session)]

    async def raw_traces(self, *, after: int = 0) -> AsyncGenerator[RawTrace, None]:
        """Yield the messages after a record one by one, oldest first, compacted or not.

        What is not durable yet, what was retracted, and what a new beginning set aside is
        not among it. Close it if you leave it early.
        """
        store, key = internals.store_of(self.session), self.session.key
        async with aclosing(read_turns(store, key, after=after)) as turns:
            async for turn in turns:
                numbered = zip(turn.seqs, decoded(turn, self.session), strict=True)
                for trace in traces_of(turn.id, numbered):
                    yield trace

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

    def note_usage(self, asked_with: Sequence[Message], tokens: int | None) -> None:
        """Take note of how many tokens the model has read: more than is counted here.

        Of a model that does not say it, what it would read next is counted.
        """
        if tokens is None:
            is_due = self.budget.is_over(self.safe_messages())
        else:
            is_due = self.budget.note_usage(asked_with, tokens)
        if is_due:
            self.request_compaction()

    def is_due(self, messages: Sequence[Message]) -> bool:
        """Say whether a request with these messages compacts first.

        It does if that was requested, if they are over the budget, and if the session has
        cut its context: what it has left out is to be summed up, not just gone.
        """
        was_cut = self._history and internals.working_context(self.session).cut
        return self.compaction_required or was_cut or self.budget.is_over(messages)

    async def leave_out_turn(self, turn_id: str) -> None:
        """Take back what was said in the running turn; the log has it.

        The context is what it was before the turn, also if it was compacted meanwhile; what that
        has put into long-term memory stays there. A turn that was resumed is left as it is, and so
        is one in which tools have answered, since what they did must not be forgotten: the next
        compaction sums it up.
        """
        said_in, seq, opening = self._opened
        if said_in != turn_id:
            return
        context = internals.contents_of(self.session).stored()
        shown = self.get_working_context_messages()
        begins = [
            at
            for at, message in enumerate(shown)
            if opening is not None
            and msgspec.structs.replace(message, created_at=opening.created_at) == opening
        ]
        turn_messages = context[begins[-1] :] if begins else context
        if any(message.tool_result is not None for message in turn_messages):
            return
        await self.session.retract(after=seq - 1)
        # It was asked for by what is gone; what is left is compacted if it is over the budget.
        self.compaction_required = False

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
        head = [Message.system(text) for text in (system_prompt, notes) if text]
        parts = (self.session, self.budget, self.compactor, self.builder, self._clock)
        if not self._history:  # there is no log: the oldest messages go
            said = raw_part(internals.contents_of(self.session).stored())
            messages = LogCompaction(*parts).cut(said, head=head)
            if messages != said:
                prompt = (Message.system(system_prompt),) if system_prompt else ()
                self.replace_context(
                    (*prompt, *messages), system_prompt=system_prompt or None, reason="cut"
                )
            self.compaction_required = False
            return Compaction()
        while True:
            upto = internals.working_context(self.session).seq
            await self.session.save()  # the turns are read from the store
            known = MemoryBundle(
                tuple(await self.retriever.episodic()), tuple(await self.retriever.semantic())
            )
            compacted = await LogCompaction(*parts).run(
                known,
                upto=upto,
                head=head,
                current=exclude_turn_id,
                limits=(self._options.max_episodic, self._options.max_semantic),
            )
            late = internals.working_context(self.session).since(upto)  # as they are stored
            if late is not None:  # else what was summed up is not what the session holds by now
                break
        types = internals.registry_of(self.session)
        said_since = [decode_held(payload, types) for payload in late]
        done, dangling = compacted.done, self._options.dangling_calls
        raw = (*compacted.raw, *said_since)
        messages = self.builder.build(system_prompt, compacted.bundle, raw, dangling=dangling)
        stored = paired(internals.contents_of(self.session).stored(), dangling)
        context = internals.working_context(self.session)
        # A context that was cut was so by something larger than all of it.
        if done.episodic or not (context.cut or messages == stored.messages):
            items = (*map(item_entry, done.episodic), *map(item_entry, done.semantic))
            replaced = context_entry(
                messages,
                epoch_id=context.epoch_id + 1,
                last_compaction_ts=self._clock(),
                system_prompt_sha256=prompt_sha256(system_prompt) if system_prompt else None,
                reason="compaction",
                types=types,
            )
            self._accept(*items, replaced)
        await self.persist_working_context_snapshot()
        self.compaction_required = False
        internals.fold_soon(self.session)
        return done

    def safe_messages(self) -> tuple[Message, ...]:
        """Return the working context as every provider takes it."""
        return paired(self.get_working_context_messages(), self._options.dangling_calls).messages


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
