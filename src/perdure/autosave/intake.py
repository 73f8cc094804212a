"""How records come in: accepted as a group, or refused as one.

Decisions only. ``append`` is the hot path of the whole library: an agent calls it for
each message, and a server for thousands of sessions; so it is written out, and asks the
unusual questions only when one comparison says that something is unusual.
"""

from __future__ import annotations

from typing import final

from perdure.autosave import refusals
from perdure.autosave.books import Books
from perdure.autosave.capture import as_group, size_of
from perdure.autosave.options import Engine
from perdure.autosave.schedule import Schedule
from perdure.autosave.tracked import OVERHEAD, Tracked
from perdure.model.records import Entry

__all__ = ["Intake"]


@final
class Intake:
    """Accept records for sessions.

    Args:
        books: The registers.
        schedule: Told what has become due.
        engine: The finer knobs.
        record_max: The largest payload that the store takes.

    """

    def __init__(
        self, books: Books, schedule: Schedule, engine: Engine, *, record_max: int
    ) -> None:
        self._books = books
        self._pressure = books.pressure
        self._schedule = schedule
        self._engine = engine
        self._record_max = record_max

    def append(self, t: Tracked, entries: tuple[Entry, ...], now: float) -> int:
        """Accept entries as one group, or refuse them all; return the version."""
        count = len(entries)
        if count == 1:
            size = len(entries[0][1]) + OVERHEAD
        elif count:
            size = size_of(entries)
        else:
            return t.version
        pressure = self._pressure
        if t.refuses or pressure.dirty_bytes >= pressure.ceiling or size > self._record_max:
            self._admit(t, entries, now)
        if count > 1 or t.groups or not entries[0][2]:
            entries = as_group(entries, closed=not t.groups)
        if t.records is None:
            t.records = [*entries]
        else:
            t.records += entries
        t.version += count
        t.pending_bytes += size
        pressure.dirty_bytes += size
        t.last_at = now
        if t.first_at is None or t.groups:
            self._begin(t, now)
        elif (
            not t.ticket
            and (o := t.options) is not None
            and (t.pending_bytes >= o.max_bytes or t.version - t.durable >= o.max_records)
        ):
            self._fill(t, now)
        return t.version

    def _admit(self, t: Tracked, entries: tuple[Entry, ...], now: float) -> None:
        """Refuse what cannot be accepted. Slow, and only asked when something is unusual."""
        sealed = self._pressure.sealed and not t.contributing
        if sealed or not t.writable:
            raise refusals.ended(t)
        if t.end is not None and t.pending_bytes >= self._engine.quarantine_bytes:
            raise refusals.ended(t)
        largest = max([len(entry.payload) for entry in entries])
        if largest > self._record_max:
            raise refusals.too_large(t, size=largest, limit=self._record_max)
        if self._pressure.rises():
            self._schedule.rush(self._books.unsaved, rushed=True)
            self._books.note_pressure(now)
        if self._pressure.blocking and not t.contributing:
            if not t.granted:
                raise self._books.overloaded(t, now)
            t.granted = False

    def _begin(self, t: Tracked, now: float) -> None:
        """Note the first change that no save has captured, and make the session due."""
        if t.groups and t.group_at is None:
            t.group_at = now
        if t.first_at is not None:
            return
        t.first_at = now
        if t.oldest_at is None:
            t.oldest_at = now
            if t.end is None:
                self._books.unsaved[t] = None
        o = t.options
        if o is not None and (
            t.pending_bytes >= o.max_bytes or t.version - t.durable >= o.max_records
        ):
            self._fill(t, now)
        if t.inflight is None:
            self._schedule.begin(t, now)

    def _fill(self, t: Tracked, now: float) -> None:
        """Make a session due if much of it is with no save."""
        o = t.options
        if o is None:
            return
        captured = t.durable if t.inflight is None else t.inflight
        size = t.pending_bytes - t.captured_bytes
        if size >= o.max_bytes or t.version - captured >= o.max_records:
            self._schedule.hasten(t, now)

    def open_group(self, t: Tracked) -> None:
        """Hold back what is appended from now on, until the group is closed."""
        if not t.groups:
            t.group_from = t.version
        t.groups += 1

    def close_group(self, t: Tracked, now: float) -> None:
        """Make what was appended since ``open_group`` one group."""
        t.groups -= 1
        if t.groups:
            return
        if t.records and t.version > t.group_from:
            t.records[-1] = t.records[-1]._replace(end=True)
        t.group_at, t.group_warned = None, False
        self._fill(t, now)
        self._schedule.arm(t, now)

    def seal(self, t: Tracked | None) -> None:
        """Accept nothing more, for one session or for all; contributors still may."""
        if t is None:
            self._pressure.seal()
        else:
            t.sealed = t.refuses = True

    def unseal(self, t: Tracked) -> None:
        """Accept records of one session again."""
        t.sealed, t.refuses = False, t.end is not None
