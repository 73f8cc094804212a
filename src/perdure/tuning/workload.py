"""Workloads: when changes came, and their replay through the engine's decisions in virtual time.

Pure. Whether a log was written in a minute or in a year, what counts here is the time in
which its session was active: a longer pause than `QUIET` counts as `QUIET`, and as long the
session stays active after its last change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, final

import msgspec

from perdure.autosave.core import Core, Save
from perdure.autosave.options import Autosave, EngineOptions
from perdure.autosave.tracked import Tracked
from perdure.records.json import decoder_of
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, MESSAGE, TURN, Entry, Record
from perdure.store import Capabilities, Outcome, Status

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


# A workload replayed through the engine's own decisions, in virtual time


_ENGINE: Final = EngineOptions(jitter=0.0, eager=False, dirty_soft=1 << 60, dirty_hard=1 << 60)
_EVERYTHING: Final = 1 << 40


class SettingCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a setting costs, and what it risks; each for one active session."""

    autosave: Autosave
    saves: float
    """Saves in a second."""
    timed: float
    """Those of them that a timer began, and not the end of a turn."""
    bytes: float
    """Bytes in a second."""
    exposed: float
    """The share of its time in which a session has anything unsaved."""
    lost: float
    """Records that a crash costs, on average over its moments."""
    p99: float
    """Seconds for which a record is unsaved: all but a hundredth of them for less."""
    worst: float
    """The most seconds for which a record was unsaved."""


def replay(
    workload: Workload, autosave: Autosave, *, save_time: float = 0.0, shrink: float = 1.0
) -> SettingCost:
    """Return what a setting does with a workload.

    Args:
        workload: What came when.
        autosave: The setting.
        save_time: Seconds that a save takes.
        shrink: The share of its debounce that is used, because the store has room.

    """
    runs = [_Run(session, autosave, save_time, shrink) for session in workload.sessions]
    for run in runs:
        run.to_the_end()
    ages = sorted(age for run in runs for age in run.ages)
    seconds = workload.seconds or 1.0
    return SettingCost(
        autosave=autosave,
        saves=sum(run.saves for run in runs) / seconds,
        timed=sum(run.timed for run in runs) / seconds,
        bytes=sum(change.size for session in workload.sessions for change in session) / seconds,
        exposed=min(sum(run.exposed for run in runs) / seconds, 1.0),
        lost=sum(ages) / seconds,
        p99=ages[int(len(ages) * 0.99)] if ages else 0.0,
        worst=ages[-1] if ages else 0.0,
    )


@final
class _Run:
    """One session, from its first change to its last save."""

    def __init__(
        self,
        changes: Sequence[WorkloadChange],
        autosave: Autosave,
        save_time: float,
        shrink: float,
    ) -> None:
        self._changes = changes
        self._save_time = save_time
        capabilities = Capabilities(durability="", max_record_bytes=_EVERYTHING)
        self._core = Core(
            autosave=autosave, engine=_ENGINE, capabilities=capabilities, chance=lambda: 0.0
        )
        self._core.schedule.shrink = shrink
        self._t: Tracked = self._core.track(SessionKey("a"), epoch=1, head=0, now=0.0)
        self._flight: Save | None = None
        self._lands_at = float("inf")
        self._dirty_since: float | None = None
        self.saves = self.timed = 0
        self.exposed = 0.0
        self.ages: list[float] = []

    def to_the_end(self) -> None:
        """Give the session its changes, and let everything be saved."""
        for change in self._changes:
            self._until(change.at)
            self._accept(change)
        self._until(float("inf"))

    def _accept(self, change: WorkloadChange) -> None:
        core, t, now = self._core, self._t, change.at
        if self._dirty_since is None:
            self._dirty_since = now
        core.append(t, (Entry(MESSAGE, bytes(change.size)),), now)
        if change.ends_turn and t.options is not None and t.options.on_turn_end:
            core.schedule.make_due(t, now)
        self._begin(now)

    def _until(self, end: float) -> None:
        """Do what is due before a moment."""
        while (now := self._next_at()) < end:
            if self._flight is not None and self._lands_at <= now:
                self._land(self._flight, now)
            else:
                self._core.schedule.advance(now, 1024)
            self.timed += self._begin(now)

    def _next_at(self) -> float:
        return min(self._core.schedule.next_at(0.0), self._lands_at)

    def _begin(self, now: float) -> int:
        """Send what is due, and return how many saves that are; there is one at a time."""
        saves, _ = self._core.capture(now)
        if saves:
            (self._flight,) = saves
            self._lands_at = now + self._save_time
        self.saves += len(saves)
        return len(saves)

    def _land(self, save: Save, now: float) -> None:
        self._flight, self._lands_at = None, float("inf")
        self._core.completed(save.t, Outcome(Status.OK), now, self._save_time)
        self._core.registry.events.clear()
        first = len(self.ages)
        for change in self._changes[first : first + len(save.batch.records)]:
            self.ages.append(now - change.at)
        if save.t.durable == save.t.version and self._dirty_since is not None:
            self.exposed += now - self._dirty_since
            self._dirty_since = None
