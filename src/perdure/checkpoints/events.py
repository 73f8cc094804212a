"""Kernel events of a session: emit, read, and replay out of the log."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, final

import anyio.to_thread
import msgspec

from perdure.checkpoints.audit_files import replay_folder
from perdure.checkpoints.chain import CHAIN_KINDS, CheckpointChain
from perdure.checkpoints.journal import Journal, JournalReader
from perdure.checkpoints.replay import MOST, Replay, ReplayReport, TimelineRow, event_of
from perdure.checkpoints.verify import Verification, verified
from perdure.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    NotStorableError,
    ReplayDivergedError,
)
from perdure.records.checkpoints import (
    GROUP,
    PRUNED,
    SNAPSHOT_CREATED,
    Checkpoint,
    KernelEvent,
    TimestampPayload,
)
from perdure.records.json import decode, encode
from perdure.records.keys import require_whole
from perdure.records.messages import ToolCall, ToolResult, decode_message
from perdure.records.records import (
    CHECKPOINT,
    EVENT,
    MESSAGE_KINDS,
    Entry,
    Record,
)
from perdure.records.values import lower


async def replayed(
    reading: JournalReader,
    *,
    since: int | None = None,
    on_row: Callable[[TimelineRow], object] | None = None,
) -> ReplayReport:
    """Feed a session's events to a dry run; return what it has seen.

    Args:
        reading: The session.
        since: A checkpoint to begin after; None for the beginning.
        on_row: Called with each decision and each use of a capability, in order.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        CorruptRecordError: The log itself is damaged.

    """
    chain = await reading.chain()
    after, clock = await _start(reading, chain, since)
    run = Replay("record", gapless=True, clock=clock)
    checked = await verified(reading)
    for problem in checked.problems:
        if since is None or problem.id is None or problem.id > since:
            run.problem(f"checkpoint {problem.id}: {problem.what}")
    newest: Checkpoint | None = None
    calls = _ToolCalls()
    log = reading.store.read_log(reading.key, after=after, before=reading.head + 1)
    async with aclosing(log):
        async for chunk in log:
            for record in chunk.records:
                if record.kind == CHECKPOINT:
                    newest = decode(record.payload, Checkpoint)
                calls.note(record)
                event = event_of(record.payload) if record.kind == EVENT else None
                if event is not None:
                    time = event.timestamp
                elif record.kind in CHAIN_KINDS:
                    time = decode(record.payload, TimestampPayload).timestamp
                else:
                    continue
                row = run.feed(record.seq, time, event)
                if row is not None and on_row is not None:
                    on_row(calls.completed(row))
                if event is not None and event.kind == SNAPSHOT_CREATED:
                    _tell_of_checkpoint(run, record.seq, event, newest, chain, checked)
    return run.report(str(reading.key), since=since)


class _ToolCalls:
    """Tool calls in the messages next to the events: arguments, results and times."""

    def __init__(self) -> None:
        self._arguments: OrderedDict[str, list[ToolCall]] = OrderedDict()
        self._results: OrderedDict[str, ToolResult] = OrderedDict()
        self._at: float | None = None

    def note(self, record: Record) -> None:
        """Remember a message's calls or its result, and its time."""
        if record.kind not in MESSAGE_KINDS:
            return
        message = decode_message(record.payload)
        self._at = message.created_at or self._at
        # An id may come again, also within one message: the newest message counts.
        for call in message.tool_calls:
            self._arguments.pop(call.id, None)
        for call in message.tool_calls:
            self._arguments.setdefault(call.id, []).append(call)
        if message.tool_result is not None:
            self._results[message.tool_result.call_id] = message.tool_result
        for known in (self._arguments, self._results):
            while len(known) > MOST:
                known.popitem(last=False)

    def completed(self, row: TimelineRow) -> TimelineRow:
        """Return a row with what is known of its call, which its detail names."""
        row = msgspec.structs.replace(row, at=self._at)
        id_ = row.detail.get("call")
        if not isinstance(id_, str):
            return row
        if row.what == "requested":
            calls = self._arguments.get(id_, [])
            call = next((one for one in calls if one.name == row.name), None)
            if call is None:
                return row
            calls.remove(call)
            return msgspec.structs.replace(row, arguments=call.arguments)
        result = self._results.pop(id_, None) if row.what in _ENDS else None
        if result is None:
            return row
        return msgspec.structs.replace(row, result=result.result, error=result.error)


_ENDS = ("used", "failed", "denied")


async def _start(
    reading: JournalReader, chain: CheckpointChain, since: int | None
) -> tuple[int, int | None]:
    """Return the record to begin after, and the time that it was."""
    if since is None:
        return 0, None if await reading.cut() else 0
    checkpoint = chain.by_id.get(since)
    if checkpoint is None:
        raise CheckpointNotFoundError(
            f"session {reading.key} has no checkpoint {since}: see checkpoints.states()",
            key=str(reading.key),
            checkpoint=since,
        )
    return checkpoint.event_seq + GROUP, checkpoint.timestamp + 1


def _tell_of_checkpoint(
    run: Replay,
    place: int,
    event: KernelEvent,
    newest: Checkpoint | None,
    chain: CheckpointChain,
    checked: Verification,
) -> None:
    """Count an event's checkpoint: the *newest* checkpoint is the one before it."""
    number = event.detail.get("snapshot")
    is_made = newest is not None and newest.id == number
    if event.detail.get(PRUNED) and not is_made:
        run.unverified += 1  # it was imported so
    elif newest is None or not is_made or event.label not in {newest.label, None}:
        run.problem(f"checkpoint {number} does not stand before its event", place)
    elif number not in chain.by_id or number in checked.unchecked:
        run.unverified += 1
    else:
        run.snapshots += number not in {problem.id for problem in checked.problems}


async def replay_files(
    folder: str | os.PathLike[str], *, on_row: Callable[[TimelineRow], object] | None = None
) -> ReplayReport:
    """Feed the events of ``events.jsonl`` and ``checkpoints.jsonl`` to a dry run.

    Args:
        folder: Where the two files lie; what other kernels wrote will do.
        on_row: Called with each decision and each use of a capability, in a thread.

    Raises:
        ReplayError: There are no events there, or a line is larger than any event.

    """
    remaining = threading.Event()
    play = partial(replay_folder, Path(folder), on_row=on_row, go_on=lambda: not remaining.is_set())
    try:
        return await anyio.to_thread.run_sync(play, abandon_on_cancel=True)
    finally:
        remaining.set()  # the thread of a cancelled replay ends soon


def diverged(report: ReplayReport) -> ReplayDivergedError:
    """Return the error for a replay that found something, for those who asked for an error."""
    return ReplayDivergedError(
        f"the replay of {report.source} found {report.problem_count} problems, the first: "
        f"{report.problems[0]}; the report has the others",
        source=report.source,
        problems=report.problem_count,
    )


class KernelEventReader:
    """Read access to a session's kernel events."""

    __slots__ = ("_reading",)

    def __init__(self, reading: JournalReader) -> None:
        self._reading: JournalReader = reading

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._reading.key}>"

    async def read(self, *, after: int = 0, before: int | None = None) -> list[KernelEvent]:
        """Return the durable events with ``after < seq < before``, by their times.

        Args:
            after: A record's number, such as a checkpoint's ``event_seq``.
            before: A record's number; None for the end.

        """
        return await read_events(self._reading, after=after, before=before)

    async def replay(
        self,
        *,
        since: int | None = None,
        on_row: Callable[[TimelineRow], object] | None = None,
        strict: bool = False,
    ) -> ReplayReport:
        """Replay the durable events in a dry run, without side effects, and return its report.

        It checks that no event is missing or moved, compares each checkpoint with what was
        recorded, and counts decisions and uses of capabilities. Memory use is bounded.

        Args:
            since: A checkpoint's id, to begin after it; None for the beginning.
            on_row: Called with each decision (events of the kind "custom") and each use of a
                capability, in order.
            strict: Whether to raise if the replay finds a problem.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            ReplayDivergedError: With *strict*: the replay found a problem.

        """
        report = await replayed(self._reading, since=since, on_row=on_row)
        if strict and not report.ok:
            raise diverged(report)
        return report


@final
class KernelEventStream(KernelEventReader):
    """A session's kernel events: ``session.events``."""

    __slots__ = ("_journal",)

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal)
        self._journal = journal

    def emit(
        self, kind: str, label: str | None = None, detail: dict[str, Any] | None = None
    ) -> KernelEvent:
        """Append an event, and return it; as cheap as `append`.

        Its timestamp is the next value of the session's logical clock; its token is the number of
        the running turn.

        Args:
            kind: What happened, such as "custom" or "tool_call".
            label: A name for people.
            detail: More about it, as JSON.

        Raises:
            InvalidArgumentError: The kind or the label is not text, the detail is not a dict, or
                the kind is "snapshot_created", which only checkpoints emit.
            NotStorableError: The detail is not JSON; the error names its path and type.

        """
        _check(kind, label, detail)
        plain, tags = lower(detail or {}, at="detail")
        if tags:
            raise NotStorableError(
                f"the detail at {next(iter(tags))} is a {next(iter(tags.values()))}, which is not "
                "JSON: convert it first",
                path=next(iter(tags)),
            )
        event = KernelEvent(
            token_id=self._journal.token,
            timestamp=self._journal.clock + 1,
            kind=kind,
            label=label,
            detail=plain,
        )
        self._journal.accept((Entry(EVENT, encode(event)),))
        return event


def _check(kind: object, label: object, detail: object) -> None:
    """Refuse what could be written but not decoded as an event."""
    if not isinstance(kind, str) or not kind:
        raise InvalidArgumentError(
            f"an event's kind must be text of at least one character, not {kind!r}", option="kind"
        )
    if kind == SNAPSHOT_CREATED:
        raise InvalidArgumentError(
            f"only checkpoints emit {kind}: use session.checkpoints.create", option="kind"
        )
    if label is not None and not isinstance(label, str):
        raise InvalidArgumentError(
            f"an event's label must be text or None, not {label!r}", option="label"
        )
    if detail is not None and not isinstance(detail, dict):
        raise InvalidArgumentError(
            f"an event's detail must be a dict, not a {type(detail).__name__}", option="detail"
        )


async def read_events(
    reading: JournalReader, *, after: int = 0, before: int | None = None
) -> list[KernelEvent]:
    """Return a session's events by timestamp; ties are in the order of the log."""
    require_whole(after=after, before=before)
    upto = reading.head + 1 if before is None else min(before, reading.head + 1)
    events: list[KernelEvent] = []
    log = reading.store.read_log(reading.key, after=after, before=upto)
    async with aclosing(log):
        async for chunk in log:
            decoded = (event_of(record.payload) for record in chunk.records if record.kind == EVENT)
            events += [event for event in decoded if event is not None]
    return sorted(events, key=lambda event: event.timestamp)
