"""Kernel events of a session: what it did, told by itself."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, final

from perdure.checkpoints.journal import Journal, Reading
from perdure.codec.json import decode, encode
from perdure.codec.values import lower
from perdure.errors import FormatError, NotStorableError
from perdure.model.events import KernelEvent
from perdure.model.records import EVENT, Entry

__all__ = ["EventReader", "EventStream", "read_events"]


class EventReader:
    """The kernel events of a session, to read."""

    __slots__ = ("_reading",)

    def __init__(self, reading: Reading) -> None:
        self._reading: Reading = reading

    async def read(self, *, after: int = 0, before: int | None = None) -> list[KernelEvent]:
        """Return the durable events with ``after < seq < before``, by their times.

        Args:
            after: A record, such as a checkpoint's ``event_seq``: what came behind it.
            before: A record, None for the end.

        """
        return await read_events(self._reading, after=after, before=before)


@final
class EventStream(EventReader):
    """A session's kernel events: ``session.events``."""

    __slots__ = ("_journal",)

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal)
        self._journal = journal

    def emit(
        self, kind: str, label: str | None = None, detail: dict[str, Any] | None = None
    ) -> KernelEvent:
        """Append an event, and return it; as cheap as an append.

        It gets the next time of the session's logical clock, and the number of the running turn
        as its token.

        Args:
            kind: What happened, such as "custom" or "tool_call".
            label: A name for it, for people.
            detail: What there is to tell of it: JSON.

        Raises:
            NotStorableError: The detail is not JSON; the error names path and type.

        """
        plain, tags = lower(detail or {}, at="detail")
        if tags:
            message = (
                f"the detail at {next(iter(tags))} is a {next(iter(tags.values()))}, which is not "
                "JSON: convert it first"
            )
            raise NotStorableError(message, path=next(iter(tags)))
        event = KernelEvent(
            token_id=self._journal.token,
            timestamp=self._journal.clock + 1,
            kind=kind,
            label=label,
            detail=plain,
        )
        self._journal.accept((Entry(EVENT, encode(event)),))
        return event


async def read_events(
    reading: Reading, *, after: int = 0, before: int | None = None
) -> list[KernelEvent]:
    """Return a session's events in the order of their times, and of the log where those tie."""
    upto = reading.head + 1 if before is None else min(before, reading.head + 1)
    events: list[KernelEvent] = []
    log = reading.store.read_log(reading.key, after=after, before=upto)
    async with aclosing(log):
        async for chunk in log:
            found = (_event(one.payload) for one in chunk.records if one.kind == EVENT)
            events += [event for event in found if event is not None]
    return sorted(events, key=lambda event: event.timestamp)


def _event(payload: bytes) -> KernelEvent | None:
    """Return a record's event; None for one that an application made up before there were any."""
    try:
        return decode(payload, KernelEvent)
    except FormatError:
        return None
