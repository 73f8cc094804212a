"""Choice of a setting by what each one costs a store, and what it risks.

Pure. Of the settings that fit, the best is the knee of the trade-off: where saves and the records
that a crash loses, each as a share of the most in the table, add up to the least. Beyond it, a few
saves less are paid for with many records, and the other way round. Given the most that a crash may
cost, the best setting within it is the one that asks the least of the store. Saving each change
at once is recommended only where nothing else is allowed. (Where a save interrupts the work, as
with checkpoints of batch jobs, the interval of Young, 1974, and Daly, 2006, balances the two; here
saves run in the background.) A setting that gives a debounce is replayed as it is; the default
gives none, and is replayed with the one that the engine fits to the store's load. Where the choice
does not matter, on a store that is idle under every setting, or with turns that save when they
end, the default is kept.

A workload is when changes came. Whether its log was written in a minute or in a year, what counts
is the time in which its session was active: until `QUIET` after each change, and no longer than
anything at all was recorded.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, final

import msgspec

from perdure.autosave.core import Core, Save
from perdure.autosave.options import DEBOUNCE, Autosave, EngineOptions
from perdure.autosave.schedule import BUSY, RESTORE, SHRINK, SLOT
from perdure.autosave.tracked import Tracked
from perdure.memory.documents import time_of
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.records import HOLDER_KINDS, MESSAGE, TURN, Entry, Record
from perdure.store import Capabilities, Outcome, Status

QUIET: Final = 60.0
"""Seconds without a change after which a session is not active any more."""
BRIEF: Final = 10.0
"""Seconds for which a session counts as active at least: a script is faster than people."""


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
    ends: tuple[float, ...]
    """Until when each session was active: some time after its last change."""
    source: str
    """Its source, in words."""

    @property
    def seconds(self) -> float:
        """For how long sessions were active, all together."""
        return sum(self.ends)

    @property
    def changes(self) -> int:
        """Number of changes."""
        return sum(map(len, self.sessions))

    @property
    def size(self) -> int:
        """Bytes of a change, on average; 0 without any."""
        total = sum(change.size for session in self.sessions for change in session)
        return round(total / self.changes) if self.changes else 0


class _Turn(msgspec.Struct):
    phase: str | None = None


def changes_of(records: Iterable[Record]) -> list[WorkloadChange]:
    """Return the changes of a log: when each record was given, and its size.

    A record that does not say when came with the one before. What a store writes itself, the
    records of new holders, is left out.

    Raises:
        CorruptRecordError: A record is damaged.

    """
    changes: list[WorkloadChange] = []
    at: float | None = None
    for record in records:
        if record.kind in HOLDER_KINDS:
            continue
        known = time_of(record)
        at = known if at is None else max(at, at if known is None else known)
        if at is not None:
            ends = record.kind == TURN and decode(record.payload, _Turn).phase != "begin"
            changes.append(WorkloadChange(at, len(record.payload), ends))
    return changes


def workload_of(sessions: Iterable[Sequence[WorkloadChange]], source: str) -> Workload:
    """Return a workload of sessions that changed at these times, each in order."""
    known = [changes for changes in sessions if changes]
    active = tuple(_active(changes) for changes in known)
    ends = [
        max(changes[-1].at + tail, BRIEF)
        for changes, tail in zip(active, _tails(known), strict=True)
    ]
    return Workload(sessions=active, ends=tuple(ends), source=source)


def _active(changes: Sequence[WorkloadChange]) -> tuple[WorkloadChange, ...]:
    """Begin at 0, and shorten pauses."""
    at, active = 0.0, [changes[0]._replace(at=0.0)]
    for earlier, later in pairwise(changes):
        at += min(later.at - earlier.at, QUIET)
        active.append(later._replace(at=at))
    return tuple(active)


def _tails(sessions: Sequence[Sequence[WorkloadChange]]) -> Iterator[float]:
    """Yield for how long each session stayed active after its last change.

    Until all of them fell quiet, for a recording that ends tells nothing of the time after it.
    The one that changed last has the mean pause after a change of its kind instead.
    """
    times = sorted(change.at for changes in sessions for change in changes)
    ends = [earlier for earlier, later in pairwise(times) if later - earlier > QUIET] + times[-1:]
    pauses: dict[bool, list[float]] = {True: [], False: []}
    for changes in sessions:
        for earlier, later in pairwise(changes):
            pauses[earlier.ends_turn].append(min(later.at - earlier.at, QUIET))
    for changes in sessions:
        last = changes[-1]
        rest = ends[bisect_left(ends, last.at)] - last.at
        similar = pauses[last.ends_turn]
        usual = sum(similar) / len(similar) if similar else 0.0
        yield min(rest or usual or QUIET, QUIET)


# A workload replayed through the engine's own decisions, in virtual time


_ENGINE: Final = EngineOptions(jitter=0.0, eager=False, dirty_soft=1 << 60, dirty_hard=1 << 60)


class SettingCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost and risk of a setting; each for one active session."""

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
    workload: Workload, autosave: Autosave, *, save_time: float = 0.0, debounce: float = DEBOUNCE
) -> SettingCost:
    """Return what a setting does with a workload.

    Args:
        workload: What came when.
        autosave: The setting.
        save_time: Seconds that a save takes.
        debounce: The debounce in force where the setting gives none.

    """
    runs = [_Run(session, autosave, save_time, debounce) for session in workload.sessions]
    for run, end in zip(runs, workload.ends, strict=True):
        run.to_the_end(end)
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
    """One session, from its first change to its last save, or to the recording's end."""

    def __init__(
        self,
        changes: Sequence[WorkloadChange],
        autosave: Autosave,
        save_time: float,
        debounce: float,
    ) -> None:
        self._changes = changes
        self._save_time = save_time
        self._core = Core(
            autosave=autosave,
            engine=_ENGINE,
            capabilities=Capabilities(durability=""),
            chance=lambda: 0.0,
        )
        self._core.schedule.debounce = debounce
        self._t: Tracked = self._core.track(SessionKey("a"), epoch=1, head=0, now=0.0)
        self._flight: Save | None = None
        self._lands_at = float("inf")
        self._dirty_since: float | None = None
        self.saves = self.timed = 0
        self.exposed = 0.0
        self.ages: list[float] = []

    def to_the_end(self, end: float) -> None:
        """Give the session its changes, and see what is saved.

        One that went quiet saves everything at some time. Of one that was recorded while it was
        active, nothing is known after that: what is unsaved then was so up to there.
        """
        for change in self._changes:
            self._until(change.at)
            self._accept(change)
        went_quiet = end - self._changes[-1].at >= QUIET
        self._until(float("inf") if went_quiet else end)
        self.ages += [end - change.at for change in self._changes[len(self.ages) :]]
        if self._dirty_since is not None:
            self.exposed += end - self._dirty_since

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


# What a store has shown, as values. Pure


class LoadLevel(msgspec.Struct, frozen=True):
    """So many sessions that are due at once."""

    sessions: int
    seconds: float
    """Until all of them were durable: the median."""
    rounds: int

    @property
    def rate(self) -> float:
        """Saves in a second."""
        return self.sessions / self.seconds


class StoreMeasurement(msgspec.Struct, frozen=True):
    """Measurements of a store."""

    levels: tuple[LoadLevel, ...]
    size: int
    """Bytes of each save's record."""
    batches: bool = True
    """True if it takes the saves of several sessions together."""

    @property
    def rate(self) -> float:
        """The most saves in a second."""
        return max(level.rate for level in self.levels)

    @property
    def save_time(self) -> float:
        """Seconds that the save of one session takes on an idle store."""
        return self.levels[0].seconds


# Which setting to take: what each one costs a store, and what it risks


GRID: Final = (
    (0.0, 0.0),
    (0.5, 2.0),
    (1.0, 5.0),
    (2.0, 10.0),
    (5.0, 15.0),
    (10.0, 60.0),
    (30.0, 120.0),
    (60.0, 300.0),
)
"""Debounce and longest delay, in seconds; `Autosave()` is tried beside them."""

ROOM: Final = 0.6
"""The share of what a store can take that its saves may use; beyond it, delays grow fast."""
IDLE: Final = 0.01
"""The share of what a store can take up to which it counts as idle."""
SHORTEST: Final = EngineOptions().debounce_min
DEBOUNCES: Final = tuple(sorted(DEBOUNCE * SHRINK ** (n / 4) for n in range(73)))
"""To what the engine fits the default's debounce, from nearly that of an idle store on."""
MOST_TIMED: Final = -math.log1p(math.log(SHRINK) / math.log(RESTORE / SHRINK)) / SLOT
"""Saves in a second, begun by timers, at which that stays as it is on a store of batches.

The engine looks in some slot of its wheel: so many find something due that both steps balance. A
store that takes each session by itself has been given what was due when the engine looks.
"""
TIMED: Final = 0.1
"""The share of saves that timers begin up to which turns' ends count as all of them."""
MONTH: Final = 730 * 3600.0
"""Seconds."""
FEW: Final = 200
"""Fewer changes tell little."""


class Requirements(msgspec.Struct, frozen=True, kw_only=True):
    """Constraints on a setting.

    Args:
        sessions: How many are active at once.
        max_loss: Seconds of work that a crash may cost at the most; None for no such limit.
        shutdown: Seconds in which everything must be saved when the process is stopped.
        price: What a million saves cost, in any currency.
        budget: What they may cost in a month; None for no such limit.

    """

    sessions: int = 100
    max_loss: float | None = None
    shutdown: float = 20.0
    price: float = 0.0
    budget: float | None = None


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, and what speaks against it."""

    cost: SettingCost
    load: float
    """The share of what the store can take that the saves of all sessions use."""
    stop: float
    """Seconds to save what is unsaved at any moment, on average."""
    price: float
    """Cost of the saves in a month, if the sessions are active all the time."""
    against: tuple[str, ...]
    """Reason why it is unsuitable; empty where it is suitable."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """All settings that were tried, and the one to take."""

    options: tuple[Option, ...]
    """From the safest to the thriftiest."""
    best: Option | None
    """None where none fits, or nothing has changed."""
    idle: bool
    """True if the store is idle under every setting, so that the choice does not matter."""
    settled_by_turns: bool
    """True if turns that end begin nearly every save under every setting with a delay, so that the
    delays hardly matter."""
    warnings: tuple[str, ...]


def advise(workload: Workload, measured: StoreMeasurement, needs: Requirements) -> Advice:
    """Replay a workload with each setting, and weigh what comes out."""
    tried = [_tried(workload, option, measured, needs) for option in _settings(measured, needs)]
    tried.sort(key=lambda it: (it.cost.lost, it.cost.autosave.max_delay))
    fitting = [option for option in tried if not option.against] if workload.changes else []
    default = next((option for option in fitting if option.cost.autosave == Autosave()), None)
    idle = not needs.price and all(option.load <= IDLE for option in tried)
    delayed = _delayed(tried)
    turns = bool(workload.changes and delayed) and all(map(_is_settled, delayed))
    best = default if idle or turns else None
    best = best or _best(fitting, tried, needs)
    idle = idle and best is not None and best is default
    warnings = _warnings(workload, tried, best, idle=idle, turns=turns)
    return Advice(
        options=tuple(tried), best=best, idle=idle, settled_by_turns=turns, warnings=tuple(warnings)
    )


def _delayed(options: Sequence[Option]) -> list[Option]:
    """Return the settings that do not save each change at once."""
    return [option for option in options if option.cost.autosave.max_delay > 0]


def _best(fitting: Sequence[Option], tried: Sequence[Option], needs: Requirements) -> Option | None:
    """Return the knee, or what asks the least of the store within an accepted loss."""
    candidates = _delayed(fitting) or fitting
    if needs.max_loss is not None:
        return min(candidates, key=lambda it: (it.cost.saves, it.cost.lost), default=None)
    saves = max((option.cost.saves for option in _delayed(tried)), default=0.0) or 1.0
    lost = max((option.cost.lost for option in _delayed(tried)), default=0.0) or 1.0
    return min(
        candidates,
        key=lambda it: (it.cost.saves / saves + it.cost.lost / lost, it.cost.worst),
        default=None,
    )


def _is_settled(option: Option) -> bool:
    """Return whether turns that end begin nearly every save."""
    return option.cost.saves > 0 and option.cost.timed <= TIMED * option.cost.saves


def _settled_from(tried: Sequence[Option]) -> Autosave | None:
    """Return the first given setting from which on turns that end begin nearly every save."""
    first = None
    for option in reversed(_delayed(tried)):
        if option.cost.autosave.debounce is None:
            continue
        if not _is_settled(option):
            break
        first = option.cost.autosave
    return first


def _settings(measured: StoreMeasurement, needs: Requirements) -> list[Autosave]:
    most = math.inf if needs.max_loss is None else max(needs.max_loss - measured.save_time, 0.0)
    pairs = {(_down(min(quiet, most)), _down(min(longest, most))) for quiet, longest in GRID}
    settings = [Autosave(debounce=debounce, max_delay=longest) for debounce, longest in pairs]
    settings += [Autosave()] if Autosave().max_delay <= most else []
    return sorted(settings, key=lambda setting: (setting.max_delay, setting.debounce or 0.0))


def _down(seconds: float) -> float:
    """Round down to hundredths.

    >>> _down(0.9996), _down(2.8), _down(0.0)
    (0.99, 2.8, 0.0)
    """
    return math.floor(seconds * 100 + 1e-9) / 100


def _tried(
    workload: Workload, autosave: Autosave, measured: StoreMeasurement, needs: Requirements
) -> Option:
    """Return what a setting does; without a debounce, once the engine has fitted it to the load."""
    options: dict[float, Option] = {}

    def is_idle(debounce: float) -> bool:
        """Return whether the engine lets the debounce be so short."""
        cost = replay(workload, autosave, save_time=measured.save_time, debounce=debounce)
        options[debounce] = option = _option(cost, measured, needs)
        has_waiting = measured.batches and cost.timed * needs.sessions > MOST_TIMED
        return option.load < BUSY and not has_waiting

    if is_idle(SHORTEST) or autosave.debounce is not None:
        return options[SHORTEST]
    at = bisect_left(DEBOUNCES, True, key=is_idle)  # the first that is
    return options[DEBOUNCES[min(at, len(DEBOUNCES) - 1)]]


def label(autosave: Autosave) -> str:
    """Return the two times of a setting.

    >>> label(Autosave.server()), label(Autosave())
    ('2 / 10', 'default / 30')
    """
    quiet = "default" if autosave.debounce is None else f"{autosave.debounce:g}"
    return f"{quiet} / {autosave.max_delay:g}"


def _option(cost: SettingCost, measured: StoreMeasurement, needs: Requirements) -> Option:
    load = cost.saves * needs.sessions / measured.rate
    stop = measured.save_time + cost.exposed * needs.sessions / measured.rate
    price = cost.saves * needs.sessions * MONTH * needs.price / 1e6
    against = []
    if load > ROOM:
        against.append(f"the saves would keep the store {load:.0%} busy")
    if stop > needs.shutdown:
        against.append(f"a stop would take {stop:.0f} s")
    if needs.max_loss and measured.save_time > needs.max_loss:  # 0 asks for each change at once
        against.append(f"a save alone takes {measured.save_time:.2g} s")
    if needs.budget is not None and price > needs.budget:
        against.append(f"the saves would cost {price:,.2f} a month")
    return Option(cost=cost, load=load, stop=stop, price=price, against=tuple(against))


def _warnings(
    workload: Workload, tried: Sequence[Option], best: Option | None, *, idle: bool, turns: bool
) -> Iterator[str]:
    if not workload.changes:
        yield "nothing has changed, so there is nothing to tell a setting by"
        return
    is_default = best is not None and best.cost.autosave == Autosave()
    if idle:
        yield (
            f"the store is at most {IDLE:.0%} busy under every setting: the choice does not "
            "matter, and the default is kept"
        )
    if turns:
        kept = ", and the default is kept" if is_default and not idle else ""
        yield (
            f"turns save when they end: that is at least {1 - TIMED:.0%} of the saves under every "
            f"setting with a delay, so the delays hardly matter{kept}"
        )
    settled = _settled_from(tried)
    if settled and best and not turns and settled.max_delay <= best.cost.autosave.max_delay:
        yield (
            f"from {label(settled)} on, at least {1 - TIMED:.0%} of the saves are those of turns "
            "that end: longer delays hardly matter"
        )
    if workload.changes < FEW:
        yield f"{workload.changes} changes tell little: come back when there are more"
    if best is None:
        yield (
            "no setting fits: accept a larger loss, spread the sessions over more stores, or take "
            "one that saves more together"
        )
