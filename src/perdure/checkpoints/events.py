"""Kernel events of a session: emit, read and replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any, final

from perdure.checkpoints.journal import Journal, JournalReader
from perdure.checkpoints.replay import ReplayReport, TimelineRow
from perdure.checkpoints.replay_session import diverged, event_of, replayed
from perdure.errors import InvalidArgumentError, NotStorableError
from perdure.records.checkpoints import SNAPSHOT_CREATED, KernelEvent
from perdure.records.json import encode
from perdure.records.records import EVENT, Entry
from perdure.records.values import lower


class KernelEventReader:
    """Read access to a session's kernel events."""

    __slots__ = ("_reading",)

    def __init__(self, reading: JournalReader) -> None:
        self._reading: JournalReader = reading

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
    upto = reading.head + 1 if before is None else min(before, reading.head + 1)
    events: list[KernelEvent] = []
    log = reading.store.read_log(reading.key, after=after, before=upto)
    async with aclosing(log):
        async for chunk in log:
            decoded = (event_of(record.payload) for record in chunk.records if record.kind == EVENT)
            events += [event for event in decoded if event is not None]
    return sorted(events, key=lambda event: event.timestamp)
