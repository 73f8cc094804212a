"""An agent's memory over its session: what is kept, what the model sees, what is compacted.

Keeping is synchronous and cheap, as `Session.append` is. Durability comes at boundaries:
before the model or a tool is called, and when the turn ends, the caller awaits
``persist_working_context_snapshot``. A compaction is one group of records: after a kill it has
happened, or it has not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import msgspec

from perdure.agent.turns import TurnTracker
from perdure.codec.json import encode
from perdure.codec.messages import decode_message, encode_message
from perdure.codec.redaction import redact
from perdure.errors import NotStorableError
from perdure.memory.compaction import Compaction, CompactionPolicy, Compactor, TurnTrace
from perdure.memory.items import EpisodicItem, MemoryBundle, SemanticItem, item_entry
from perdure.memory.retrieval import Retriever, select
from perdure.memory.traces import RawTurn, find_turn, newest_turns, read_turns
from perdure.model.messages import Message, ToolCall
from perdure.model.records import Entry
from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
from perdure.restore.rebuild import (
    CompactionSnapshotBuilder,
    context_entry,
    prompt_sha256,
    raw_part,
)
from perdure.restore.repair import interrupted_result, repair
from perdure.restore.report import Source
from perdure.restore.snapshot_store import WorkingContextSnapshotStore
from perdure.session.entries import entry_of
from perdure.session.inside import lines_of, overhear, registry_of, store_of, working_context
from perdure.session.session import Session

__all__ = ["MemoryManager"]


@final
class MemoryManager:
    """Keep an agent's messages and memories in its session.

    Everything but the session may be left out, or replaced.
    """

    def __init__(
        self,
        session: Session,
        *,
        turn_tracker: TurnTracker | None = None,
        compaction_policy: CompactionPolicy | None = None,
        compactor: Compactor | None = None,
        retriever: Retriever | None = None,
        working_context_snapshot_store: WorkingContextSnapshotStore | None = None,
        builder: CompactionSnapshotBuilder | None = None,
        options: WorkingContextSnapshotBootstrapOptions | None = None,
        history: bool = True,
        redact_arguments: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.session = session
        self.turn_tracker: TurnTracker = turn_tracker or TurnTracker()
        self.compaction_policy: CompactionPolicy = compaction_policy or CompactionPolicy()
        self.compactor: Compactor = compactor or Compactor()
        self.retriever: Retriever = retriever or Retriever(lambda name: lines_of(session, name))
        self.working_context_snapshot_store: WorkingContextSnapshotStore = (
            working_context_snapshot_store
            or WorkingContextSnapshotStore(store_of(session), session.key, epoch=session.epoch)
        )
        self.builder: CompactionSnapshotBuilder = builder or CompactionSnapshotBuilder()
        self.compaction_required: bool = False
        """Whether the next request compacts first."""
        self._history = history  # else nothing that is said leaves a record
        self._redact = tuple(redact_arguments)
        self._options = options or WorkingContextSnapshotBootstrapOptions()
        self._clock = clock

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
    def system_prompt_sha256(self) -> str | None:
        """The hash of the prompt that the context was made with."""
        return working_context(self.session).system_prompt_sha256

    @property
    def context_bytes(self) -> int:
        """How large the working context is."""
        return working_context(self.session).size

    # keeping

    def ingest_user_message(self, message: Message, turn_id: str) -> int:
        """Keep what the user said; return the session's version."""
        self.turn_tracker.check(turn_id)
        return self._append(message)

    def ingest_tool_intent(self, message: Message, turn_id: str) -> int:
        """Keep the model's wish to call tools, before anybody calls them."""
        self.turn_tracker.asked(turn_id, message.tool_calls)
        return self._append(without_credentials(message, self._redact))

    def ingest_tool_result(self, message: Message, turn_id: str) -> bool:
        """Keep what came of a tool call; False if that call has its result already.

        What cannot be stored is kept as an error that says so.
        """
        result = message.tool_result
        if result is None or not self.turn_tracker.answered(turn_id, result.call_id):
            return False
        try:
            self._append(message)
        except NotStorableError as error:
            why = f"the tool's result cannot be stored: {error}"
            self._append(Message.tool(result.call_id, name=result.name, error=why))
        return True

    def ingest_assistant_response(self, message: Message, turn_id: str) -> int:
        """Keep the model's answer."""
        self.turn_tracker.check(turn_id)
        return self._append(message)

    def _append(self, message: Message) -> int:
        if self._history:
            return self.session.append(message)
        self._accept(entry_of(message, registry_of(self.session)))
        return self.session.version

    def _accept(self, *entries: Entry) -> None:
        if self._history:
            self.session.accept(entries)
        else:
            overhear(self.session, *entries)

    def close_open_calls(self) -> int:
        """Give each call of this turn without a result one that says so; return how many."""
        open_calls = self.turn_tracker.open_calls()
        for call in open_calls:
            self.ingest_tool_result(interrupted_result(call), self.turn_tracker.turn_id)
        return len(open_calls)

    async def persist_working_context_snapshot(self) -> None:
        """Make everything that the working context is made of durable.

        After a kill right behind this, the context comes back the same. The snapshot's file
        follows at the next fold. Without a store, there is nothing to do.
        """
        await self.session.save()

    # what the model sees

    def get_working_context_messages(self) -> list[Message]:
        """Return the working context, as it is."""
        return self.session.context()

    async def answer_of(self, turn_id: str) -> Message:
        """Return the last answer of a turn that has ended."""
        turn = await find_turn(store_of(self.session), self.session.key, turn_id)
        said = [] if turn is None else self._decoded(turn)
        answers = [message for message in said if message.role == "assistant"]
        return answers[-1] if answers else Message.assistant("")

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
        turns = await newest_turns(
            store_of(self.session), self.session.key, tail_turns, exclude=exclude_turn_id
        )
        return [message for turn in turns for message in self._decoded(turn)]

    async def reset_working_context_snapshot(
        self, messages: Sequence[Message], *, system_prompt: str | None, reason: str
    ) -> None:
        """Replace the working context, durably; history stays. No counter moves."""
        self.replace_context(messages, system_prompt=system_prompt, reason=reason)
        await self.persist_working_context_snapshot()

    def replace_context(
        self, messages: Sequence[Message], *, system_prompt: str | None, reason: str
    ) -> None:
        """Replace the working context; durable with what comes next."""
        context = working_context(self.session)
        entry = context_entry(
            messages,
            epoch_id=context.epoch_id,
            last_compaction_ts=context.last_compaction_ts,
            system_prompt_sha256=prompt_sha256(system_prompt) if system_prompt else None,
            reason=reason,
            types=registry_of(self.session),
        )
        self._accept(entry)

    async def append_repairs(self, messages: Sequence[Message]) -> None:
        """Append the results that a restore made up for calls that have none."""
        types = registry_of(self.session)
        self._accept(*(encode_message(message, types) for message in messages))
        await self.persist_working_context_snapshot()

    # compaction

    def request_compaction(self) -> None:
        """Ask that the next request compacts first. Nothing else happens now."""
        self.compaction_required = True

    async def compact(self, system_prompt: str, exclude_turn_id: str | None = None) -> Compaction:
        """Turn the turns but the newest into long-term memory, and build the context anew.

        The items and the new context are one group of records. What was said stays in
        the log. An exception leaves everything as it was, and the request stays.
        """
        await self.session.save()  # the turns are read from the store
        known = await self.retriever.episodic()
        after = max((item.as_of_seq for item in known), default=0)
        done, tail = await self._compact_turns(after, exclude_turn_id)
        if done.episodic:
            bundle = select(
                [*known, *done.episodic],
                [*await self.retriever.semantic(), *done.semantic],
                max_episodic=self._options.max_episodic,
                max_semantic=self._options.max_semantic,
            )
            self._write(done, bundle, tail, system_prompt)
            await self.persist_working_context_snapshot()
        self.compaction_required = False
        return done

    async def _compact_turns(
        self, after: int, current: str | None
    ) -> tuple[Compaction, list[RawTurn]]:
        """Compact a batch of turns at a time; return the items, and the turns that stay raw."""
        policy = self.compaction_policy
        kept: deque[RawTurn] = deque()
        batch: list[TurnTrace] = []
        done = Compaction()
        async for turn in read_turns(store_of(self.session), self.session.key, after=after):
            if not turn.messages:
                continue
            kept.append(turn)
            if turn.id == current or len(kept) <= policy.keep_turns:
                continue
            batch.append(self._trace(kept.popleft()))
            if len(batch) == policy.episode_turns:
                done = _joined(done, await self.compactor.compact(batch, now=self._clock()))
                batch = []
        done = _joined(done, await self.compactor.compact(batch, now=self._clock()))
        return done, list(kept)

    def _write(
        self, done: Compaction, bundle: MemoryBundle, tail: Sequence[RawTurn], prompt: str
    ) -> None:
        raw = [message for turn in tail for message in self._decoded(turn)]
        messages = self.builder.build(prompt, bundle, raw, dangling=self._options.dangling_calls)
        replaced = context_entry(
            messages,
            epoch_id=working_context(self.session).epoch_id + 1,
            last_compaction_ts=self._clock(),
            system_prompt_sha256=prompt_sha256(prompt) if prompt else None,
            reason="compaction",
            types=registry_of(self.session),
        )
        items: list[EpisodicItem | SemanticItem] = [*done.episodic, *done.semantic]
        self._accept(*map(item_entry, items), replaced)

    def safe_messages(self) -> tuple[Message, ...]:
        """Return the working context as every provider takes it."""
        return repair(self.get_working_context_messages(), self._options.dangling_calls).messages

    def _trace(self, turn: RawTurn) -> TurnTrace:
        return TurnTrace(turn.id, tuple(self._decoded(turn)), turn.last)

    def _decoded(self, turn: RawTurn) -> list[Message]:
        types = registry_of(self.session)
        return [decode_message(payload, types) for payload in turn.messages]


def without_credentials(message: Message, keys: Sequence[str]) -> Message:
    """Return a message whose tool arguments lack the values of these keys, and say where."""
    if not keys:
        return message
    calls = tuple(_redacted(call, keys) for call in message.tool_calls)
    return msgspec.structs.replace(message, tool_calls=calls)


def _redacted(call: ToolCall, keys: Sequence[str]) -> ToolCall:
    arguments, where = redact(call.arguments, keys)
    if not where:
        return call
    extra = {**call.extra, "redacted": msgspec.Raw(encode(where))}
    return msgspec.structs.replace(call, arguments=arguments, extra=extra)


def _joined(first: Compaction, second: Compaction) -> Compaction:
    return Compaction(
        (*first.episodic, *second.episodic),
        (*first.semantic, *second.semantic),
        (*first.turn_ids, *second.turn_ids),
    )
