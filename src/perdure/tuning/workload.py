"""When changes came: what a setting is tried on.

Pure. Whether a log was written in a minute or in a year, what counts here is the time in
which its session was active: a longer pause than `QUIET` counts as `QUIET`, and as long the
session stays active after its last change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from perdure.records.json import decoder_of
from perdure.records.records import EPOCH, TURN, Record

QUIET: Final = 60.0
"""Seconds without a change after which a session is not active any more."""


class WorkloadChange(NamedTuple):
    """A record that a session was given."""

    at: float
    """Seconds; since when does not matter."""
    size: int
    """Bytes of its payload."""
    ends_turn: bool = False


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of some sessions, each from its own second 0 on."""

    sessions: tuple[tuple[WorkloadChange, ...], ...]
    seconds: float
    """For how long sessions were active, all together."""
    source: str
    """Where it is from, in words."""

    @property
    def changes(self) -> int:
        """How many changes there are."""
        return sum(map(len, self.sessions))

    @property
    def size(self) -> int:
        """Bytes of a change, on average; 0 without any."""
        total = sum(change.size for session in self.sessions for change in session)
        return round(total / self.changes) if self.changes else 0


class _PayloadTimes(msgspec.Struct):
    """What records say of when they were made."""

    created_at: float | None = None
    at: float | None = None
    phase: str | None = None


def changes_of(records: Iterable[Record]) -> list[WorkloadChange]:
    """Return the changes of a log: when each record was given, and its size.

    A record that does not say when came with the one before. What a store writes itself, the
    records of new holders, is left out.
    """
    decoder = decoder_of(_PayloadTimes)
    changes: list[WorkloadChange] = []
    at: float | None = None
    for record in records:
        if record.kind == EPOCH:
            continue
        try:
            times = decoder.decode(record.payload)
        except msgspec.MsgspecError:  # a kind that uses these names for something else
            times = _PayloadTimes()
        known = times.at if times.created_at is None else times.created_at
        at = known if at is None else max(at, at if known is None else known)
        if at is not None:
            ends = record.kind == TURN and times.phase != "begin"
            changes.append(WorkloadChange(at, len(record.payload), ends))
    return changes


def workload_of(sessions: Iterable[Sequence[WorkloadChange]], source: str) -> Workload:
    """Return a workload of sessions that changed at these times."""
    active = tuple(_active(changes) for changes in sessions if changes)
    seconds = sum(changes[-1].at + QUIET for changes in active)
    return Workload(sessions=active, seconds=seconds, source=source)


def _active(changes: Sequence[WorkloadChange]) -> tuple[WorkloadChange, ...]:
    """Begin at 0, and shorten pauses."""
    at, active = 0.0, [changes[0]._replace(at=0.0)]
    for earlier, later in pairwise(changes):
        at += min(later.at - earlier.at, QUIET)
        active.append(later._replace(at=at))
    return tuple(active)
