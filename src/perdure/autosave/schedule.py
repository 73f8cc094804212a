"""Due times and order of sessions: the timer wheel and the ready queue.

Decisions only: every method takes ``now``, and nothing waits here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Final, Generic, TypeAlias, TypeVar, final

from msgspec import structs

from perdure.autosave.options import DEBOUNCE, Autosave, EngineOptions
from perdure.autosave.tracked import NEVER, Tracked

T = TypeVar("T")


@final
class Wheel(Generic[T]):
    """A lazy timer wheel; cost and memory grow with its entries, not with the time.

    An entry goes into the slot that contains its time, and is popped when that slot *begins*, so
    rounding never makes it late. Moving a time later costs nothing: the owner of the entry checks
    it when it is popped, and handles it or adds it again. An entry that no longer matters is
    removed at once, so that the wheel does not keep it in memory.

    Args:
        width: Seconds that a slot lasts.

    """

    __slots__ = ("_buckets", "_order", "next_at", "width")

    def __init__(self, width: float) -> None:
        self.width: float = width
        # When the first slot with entries begins.
        self.next_at: float = float("inf")
        self._buckets: dict[int, dict[T, None]] = {}
        self._order: list[int] = []

    def slot(self, at: float) -> int:
        """Return the slot that contains a time."""
        return int(at / self.width)

    def add(self, entry: T, slot: int) -> bool:
        """Add an entry to a slot; return whether that slot is now the first one."""
        bucket = self._buckets.get(slot)
        if bucket is not None:
            bucket[entry] = None
            return False
        self._buckets[slot] = {entry: None}
        heapq.heappush(self._order, slot)
        self.next_at = self._order[0] * self.width
        return self._order[0] == slot

    def discard(self, entry: T, slot: int) -> None:
        """Remove an entry from a slot, if it is there; the slot itself stays."""
        bucket = self._buckets.get(slot)
        if bucket is not None:
            bucket.pop(entry, None)

    def pop(self, now: float, limit: int) -> tuple[int, list[T]]:
        """Remove at most ``limit`` entries from the first slot that has begun.

        Returns the slot and the entries; none if no slot has begun, or the slot is empty.
        """
        if self.next_at > now:
            return NEVER, []
        slot = self._order[0]
        bucket = self._buckets[slot]
        popped = [bucket.popitem()[0] for _ in range(min(limit, len(bucket)))]
        if not bucket:
            del self._buckets[slot]
            heapq.heappop(self._order)
            self.next_at = self._order[0] * self.width if self._order else float("inf")
        return slot, popped


# Deadline, bytes, ticket.
_Place: TypeAlias = tuple[float, int, int]


@final
class ReadyQueue:
    """Sessions that wait for a place in a batch, earliest deadline first, in two lanes.

    Sessions with a waiting caller have a lane of their own; while both lanes hold something they
    take turns, so that callers of ``save`` get at most every other place and cannot starve
    autosave. Within a lane the earliest deadline comes first, then the smaller session, then the
    one that was due first.

    Pushing a session again moves it between lanes: its ticket names its only valid place. The
    old place is a number without a session, and is skipped.
    """

    __slots__ = ("_calm", "_last", "_tickets", "_urgent", "_urgent_next")

    def __init__(self) -> None:
        self._urgent: list[_Place] = []
        self._calm: list[_Place] = []
        self._urgent_next = True
        self._last = 0
        # The tickets that are valid.
        self._tickets: dict[int, Tracked] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def push(self, t: Tracked, deadline: float, *, urgent: bool) -> None:
        """Add a session, or move it; sets its ticket."""
        if t.ticket:
            self.drop(t)
        self._last = t.ticket = ticket = self._last + 1
        self._tickets[ticket] = t
        jobs = self._urgent if urgent else self._calm
        heapq.heappush(jobs, (deadline, t.pending_bytes, ticket))

    def drop(self, t: Tracked) -> None:
        """Remove a session, if it is here."""
        if t.ticket:
            del self._tickets[t.ticket]
            t.ticket = 0

    def pop(self) -> Tracked | None:
        """Remove and return the next session; None if there is none."""
        urgent, calm = self._urgent, self._calm
        while urgent or calm:
            takes_turns = bool(urgent and calm)
            is_urgent = self._urgent_next if takes_turns else bool(urgent)
            t = self._tickets.pop(heapq.heappop(urgent if is_urgent else calm)[2], None)
            if t is not None:
                if takes_turns:
                    self._urgent_next = not is_urgent
                t.ticket = 0
                return t
        return None


SLOT: Final = 0.05
"""Seconds that a slot of the wheel lasts: a save starts up to this much early."""

PATIENT: Final = 0.1
"""With a debounce from this on, a session can wait a slot before its due time is computed."""

DRAIN_BACKOFF_CAP: Final = 1.0
"""The longest back-off while the process shuts down."""

NO_TIMERS_DEADLINE: Final = 30.0
"""The deadline of sessions without timers, relative to their first change."""

BUSY: Final = 0.5
"""The share of its time from which a store counts as busy."""

SHRINK: Final = 0.85
RESTORE: Final = 1.3
"""By what `Schedule.debounce` is multiplied at a look at the store that finds it idle, or not."""


@final
class Schedule:
    """Keep track of what is due when.

    A session with changes is due at ``min(last + debounce, first + max_delay)``, a little earlier
    by jitter and by the wheel's rounding. A back-off makes it later; a caller, a full session or a
    flush makes it now. It is in the wheel at most once, and is
    checked when its slot begins: if it is not due any more, it goes into a later slot; if it is
    due, into the ready lanes. A change that makes it due later moves nothing; one that makes it
    due earlier moves it at once.

    Args:
        engine: The finer options.
        chance: Returns a random number from 0 up to 1.

    """

    def __init__(self, engine: EngineOptions, chance: Callable[[], float]) -> None:
        self.ready: ReadyQueue = ReadyQueue()
        self.wheel: Wheel[Tracked] = Wheel(SLOT)
        # The debounce of settings that give none.
        self.debounce: float = DEBOUNCE
        # Something may be due earlier than `next_at` returned; the caller clears it.
        self.nudged: bool = False
        self.draining: bool = False
        self._engine = engine
        self._chance = chance
        self._review: dict[Tracked, None] = {}
        self._fresh: dict[Tracked, None] = {}
        self._fresh_until = float("inf")
        self._flushed_at = float("-inf")
        # Changes up to this time are due at once, without debounce.
        self._due_before = float("-inf")

    def begin(self, t: Tracked, now: float) -> None:
        """Arm a session that has just become dirty, together with all others of the next slot.

        Nothing can be due within a slot if the debounce is longer, so that an append need not
        compute when.
        """
        o = t.options
        if o is None or self._quiet(o) < PATIENT or now <= self._due_before or t.end is not None:
            self.arm(t, now)
            return
        if not self._fresh:
            self._fresh_until = now + SLOT
            self.nudged = True
        self._fresh[t] = None

    def arm(self, t: Tracked, now: float) -> None:
        """Queue the session so that it is checked when it is due."""
        if t.first_at is None or t.inflight is not None or t.ticket or t.end is not None:
            return
        if t.holds or t.preparing:
            return
        due = self.due_at(t, t.first_at, now)
        slot = int(due / SLOT)
        # Its slot has begun: early by less than a slot, rather than late.
        if due <= now or slot * SLOT <= now:
            self.ready.push(t, deadline(t), urgent=t.urgent_to > t.durable)
            self.nudged = True
        # One that has moved later stays: its old slot finds it not due, and moves it on.
        elif slot < t.slot:
            self.wheel.discard(t, t.slot)
            t.slot = slot
            if self.wheel.add(t, slot):
                self.nudged = True

    def forget(self, t: Tracked) -> None:
        """Remove a session from all queues."""
        self.ready.drop(t)
        self.wheel.discard(t, t.slot)
        t.slot = NEVER
        self._review.pop(t, None)
        self._fresh.pop(t, None)
        if not self._fresh:
            self._fresh_until = float("inf")

    def due_at(self, t: Tracked, first: float, now: float) -> float:
        """Return when to save changes of which ``first`` is the oldest that is not captured."""
        o = t.options
        if first <= self._due_before or t.hurry or t.urgent_to > t.durable:
            due = now
        elif o is None:
            return NEVER * SLOT
        else:
            due = t.last_at + self._quiet(o) * t.earliness
            due = min(due, first + o.max_delay * t.earliness)
        return max(due, t.retry_at)

    def _quiet(self, o: Autosave) -> float:
        """Return the debounce in force: the one that was given, as it is."""
        return min(self.debounce, o.max_delay) if o.debounce is None else o.debounce

    def in_force(self, o: Autosave | None) -> Autosave | None:
        """Return a setting with the times that are in force now."""
        if o is None:
            return None
        if self._due_before == float("inf"):
            return structs.replace(o, debounce=0.0, max_delay=0.0)
        return structs.replace(o, debounce=self._quiet(o))

    def make_due(self, t: Tracked, now: float) -> None:
        """Make changes that no save has captured due now."""
        if t.first_at is not None:
            t.hurry = True
            self.arm(t, now)

    def make_urgent(self, t: Tracked, version: int, now: float) -> None:
        """Make a version due now because a caller waits for it, without back-off."""
        known = t.urgent_to > t.durable
        t.urgent_to = max(t.urgent_to, version)
        t.retry_at = 0.0
        if not t.ticket:
            self.arm(t, now)
        # In the calm lane so far: now a caller waits for it.
        elif not known:
            self.ready.push(t, deadline(t), urgent=True)
            self.nudged = True

    def review(self, sessions: Iterable[Tracked]) -> None:
        """Check sessions again soon: what makes them due has changed."""
        self._review.update(dict.fromkeys(sessions))
        self.nudged = True

    def flush(self, sessions: Iterable[Tracked], now: float) -> None:
        """Make these sessions due now, with everything appended so far."""
        self._flushed_at = now
        self._due_before = max(self._due_before, now)
        self.review(sessions)

    def drain(self, sessions: Iterable[Tracked], now: float) -> None:
        """Make everything due at once from now on, and retry more often."""
        self.draining = True
        self.rush(sessions, rushed=True)
        self._flushed_at = now

    def rush(self, sessions: Iterable[Tracked], *, rushed: bool) -> None:
        """Make everything due at once, these sessions first; or apply debounces again."""
        self._due_before = float("inf") if rushed or self.draining else self._flushed_at
        if rushed:
            self.review(sessions)

    def advance(self, now: float, limit: int) -> bool:
        """Arm the sessions whose time has come, at most ``limit``; return whether more are due."""
        if self._fresh:
            if self._review:
                self._review.update(self._fresh)
                self._fresh.clear()
            else:
                self._review, self._fresh = self._fresh, self._review
            self._fresh_until = float("inf")
        for _ in range(min(limit, len(self._review))):
            t, _ = self._review.popitem()
            # A back-off from before may be longer than the time that is left.
            if self.draining and t.retry_at > now + DRAIN_BACKOFF_CAP:
                t.retry_at = now + DRAIN_BACKOFF_CAP * self._chance()
            self.arm(t, now)
        _, begun = self.wheel.pop(now, limit)
        for t in begun:
            t.slot = NEVER
            self.arm(t, now)
        return self.next_at(now) <= now

    def next_at(self, now: float) -> float:
        """Return when `advance` has something to do."""
        return now if self._review else min(self.wheel.next_at, self._fresh_until)

    def backoff_cap(self) -> float:
        """Return the longest time between two attempts."""
        cap = self._engine.backoff_cap
        return min(cap, DRAIN_BACKOFF_CAP) if self.draining else cap

    def control(self, utilization: float) -> None:
        """Adapt the debounce of settings that give none to the store's load, every few seconds.

        An idle store shortens it, which costs nothing: one that is less than half busy, with
        nothing due at this moment. A busy one restores it, so that the bounds hold.
        """
        if utilization < BUSY and not len(self.ready):
            least = min(self._engine.debounce_min, DEBOUNCE)
            self.debounce = max(least, self.debounce * SHRINK)
        else:
            self.debounce = min(DEBOUNCE, self.debounce * RESTORE)


def deadline(t: Tracked) -> float:
    """Return the time by which the session's save should have begun: its order in a lane."""
    longest = NO_TIMERS_DEADLINE if t.options is None else t.options.max_delay
    return (t.first_at or 0.0) + longest


IDLE_SLOT: Final = 5.0


@final
class IdleWheel:
    """Find clean sessions that were not used for a while.

    Each session is in the wheel once, for as long as it is tracked; using it moves nothing, it is
    checked when its slot begins.

    Args:
        after: Seconds without use; infinite for never.

    """

    def __init__(self, after: float) -> None:
        self._after = after
        self._wheel: Wheel[Tracked] = Wheel(IDLE_SLOT)
        self._newest = NEVER

    @property
    def next_at(self) -> float:
        """Time of the next `advance` that has something to do."""
        return self._wheel.next_at

    def add(self, t: Tracked, now: float) -> None:
        """Start to watch a session."""
        if isfinite(self._after):
            self._put(t, now + self._after, now)

    def _put(self, t: Tracked, at: float, now: float) -> None:
        # Rounded up, unlike deadlines: late is harmless, and early would be wrong.
        slot = max(self._wheel.slot(at), self._wheel.slot(now)) + 1
        if slot != self._newest:
            self._newest = slot
        t.idle_slot = self._newest  # one int object for all sessions of the slot, to save memory
        self._wheel.add(t, slot)

    def advance(self, now: float, limit: int) -> list[Tracked]:
        """Return sessions that have become idle; checks no more than ``limit``."""
        _, begun = self._wheel.pop(now, limit)
        idle = []
        for t in begun:
            used = max(t.last_at, t.idle_since)
            if t.pins or not t.clean or t.end is not None:
                used = now
            elif used + self._after <= now:
                idle.append(t)
                used = now
            self._put(t, used + self._after, now)
        return idle

    def forget(self, t: Tracked) -> None:
        """Stop watching a session."""
        self._wheel.discard(t, t.idle_slot)
        t.idle_slot = NEVER
