"""What to save and when: every decision of autosave, without doing anything.

No clock, loop, store or randomness in here: each method takes ``now``, ``chance`` is
brought by the caller, and what is to be done comes back as a value or waits in
``events``. So it behaves the same on every event loop, and is tested without one.

An append makes a session due (`schedule` says when). ``capture`` takes those with the
earliest deadlines, and everything that each of them has by then. ``completed`` takes the
store's answer, and what was appended meanwhile makes the session due again.

* A session is captured only while nothing of it is with the store.
* Whatever is unsaved waits in exactly one way: in the wheel, in the ready lanes, with the
  store, for its contributors, for a job, or for the end of a group; unless it is
  quarantined, lost, or has no timers.
* Nothing leaves memory before the store has said OK.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

from perdure._lib.backoff import backoff
from perdure.autosave import refusals
from perdure.autosave.breaker import Breaker
from perdure.autosave.capture import as_group, size_of, whole_groups
from perdure.autosave.events import Degraded, Event, Lost, Quarantined, Recovered
from perdure.autosave.events import Saved, SaveFailed
from perdure.autosave.options import INHERIT, Autosave, Engine, Inherit
from perdure.autosave.pressure import Pressure
from perdure.autosave.schedule import Schedule
from perdure.autosave.tracked import OVERHEAD, State, Tracked, Waiter
from perdure.model.keys import SessionKey
from perdure.model.records import Entry
from perdure.store import Batch, Capabilities, Outcome, Status

__all__ = ["INHERIT", "Core", "Inherit", "Save", "State", "Tracked"]


class Save(NamedTuple):
    """A session, and what of it goes to the store."""

    t: Tracked
    batch: Batch


@final
class Core:
    """Decide for all sessions of one store.

    Args:
        autosave: When sessions save that have no setting of their own.
        engine: The finer knobs.
        capabilities: What the store prefers.
        chance: Returns a random number from 0 up to 1.

    """

    def __init__(
        self,
        *,
        autosave: Autosave | None,
        engine: Engine,
        capabilities: Capabilities,
        chance: Callable[[], float],
    ) -> None:
        self.autosave = autosave
        self.engine = engine
        self.batch_max = engine.batch_max or capabilities.batch_max
        self.parallel = engine.max_concurrent_batches or capabilities.parallelism
        self.events: list[Event] = []
        """What has happened and was not reported yet."""
        self.sessions: set[Tracked] = set()
        self.unsaved: dict[Tracked, None] = {}
        """Sessions with changes that can still become durable."""
        self.failed: dict[Tracked, None] = {}
        """Those of them whose last save did not succeed, the longest failing first."""
        self.stuck: dict[Tracked, None] = {}
        """Quarantined and lost sessions."""
        self.in_flight = 0
        """Sessions that are with the store."""
        self.stopped = False
        """No save will begin any more."""
        self.pressure = Pressure(engine)
        self.schedule = Schedule(engine, self.pressure, self.events, chance)
        self.breaker = Breaker(
            failures=engine.breaker_failures,
            reset=engine.breaker_reset,
            full=self.batch_max * self.parallel,
            chance=chance,
        )
        self._chance = chance
        self._record_max = capabilities.max_record_bytes
        self._arm = self.schedule.arm

    # sessions come and go

    def track(
        self,
        key: SessionKey,
        *,
        epoch: int,
        head: int,
        autosave: Autosave | None | Inherit = INHERIT,
        now: float,
    ) -> Tracked:
        """Begin to keep track of a session whose log ends with ``head``."""
        inherits = isinstance(autosave, Inherit)
        options = self.autosave if isinstance(autosave, Inherit) else autosave
        earliness = 1.0 - self.engine.jitter * self._chance()
        t = Tracked(key, epoch=epoch, head=head, options=options, earliness=earliness)
        t.inherits = inherits
        t.last_at = t.idle_since = now
        self.sessions.add(t)
        return t

    def drop(self, t: Tracked) -> list[Waiter]:
        """Let go of a session, whatever it holds; return who is to be woken."""
        self._leave(t, State.CLOSED)
        self.stuck.pop(t, None)
        self.sessions.discard(t)
        return t.take_waiters()

    def tune(self, autosave: Autosave | None, t: Tracked | None) -> None:
        """Change the setting of one session, or of all that have none of their own."""
        if t is not None:
            t.options, t.inherits = autosave, False
            self.schedule.review([t])
            return
        self.autosave = autosave
        for each in self.sessions:
            if each.inherits:
                each.options = autosave
        self.schedule.review(self.unsaved)

    # records come in

    def append(self, t: Tracked, entries: tuple[Entry, ...], now: float) -> int:
        """Accept entries as one group, or refuse them all; return the version."""
        count = len(entries)
        if count == 1:
            size = len(entries[0][1]) + OVERHEAD
        elif count:
            size = size_of(entries)
        else:
            return t.version
        pressure = self.pressure
        if t.refuses or pressure.dirty_bytes >= pressure.ceiling or size > self._record_max:
            self._admit(t, entries, now)
        if count > 1 or t.groups or not entries[0][2]:
            t.pending += as_group(entries, closed=not t.groups)
        else:
            t.pending += entries
        t.version += count
        t.pending_bytes += size
        pressure.dirty_bytes += size
        t.last_at = now
        if t.first_at is None or t.groups:
            self._begin(t, now)
        elif not t.ticket and (o := t.options) is not None:
            if t.pending_bytes >= o.max_bytes or t.version - t.durable >= o.max_records:
                self._fill(t, o, now)
        return t.version

    def _admit(self, t: Tracked, entries: tuple[Entry, ...], now: float) -> None:
        """Refuse what cannot be accepted. Slow, and only asked when something is unusual."""
        if self.pressure.sealed or not t.writable:
            raise refusals.ended(t)
        if t.end is not None and t.pending_bytes >= self.engine.quarantine_bytes:
            raise refusals.ended(t)
        largest = max([len(entry.payload) for entry in entries])
        if largest > self._record_max:
            raise refusals.too_large(t, size=largest, limit=self._record_max)
        if self.pressure.rises():
            self.schedule.review(self.unsaved)
            self._note_pressure(now)
        if self.pressure.blocking:
            if not t.granted:
                raise self.overloaded(t, now)
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
                self.unsaved[t] = None
        if t.inflight is None:
            self._arm(t, now)

    def _fill(self, t: Tracked, o: Autosave, now: float) -> None:
        """Make a session due if much of it is with no save."""
        captured = t.durable if t.inflight is None else t.inflight
        size = t.pending_bytes - t.captured_bytes
        if size >= o.max_bytes or t.version - captured >= o.max_records:
            self.schedule.hasten(t, now)

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
        if t.version > t.group_from:
            t.pending[-1] = t.pending[-1]._replace(end=True)
        t.group_at, t.group_warned = None, False
        self._arm(t, now)

    def seal(self, t: Tracked | None) -> None:
        """Accept nothing more, for one session or for all."""
        if t is None:
            self.pressure.seal()
        else:
            t.sealed = t.refuses = True

    # to the store and back

    def may_capture(self, now: float) -> bool:
        """Whether `capture` would find something."""
        if self.stopped or not len(self.schedule.ready):
            return False
        return self.breaker.allowance(now, self.in_flight) > 0

    def capture(self, now: float) -> tuple[list[Save], list[Tracked]]:
        """Take the next batch, and sessions whose contributors have to be asked before."""
        saves: list[Save] = []
        unprepared: list[Tracked] = []
        size = 0
        room = min(self.batch_max, self.breaker.allowance(now, self.in_flight))
        if self.stopped:
            room = 0
        while len(saves) < room and len(unprepared) < room and size < self.engine.batch_bytes:
            t = self.schedule.ready.pop()
            if t is None:
                break
            if t.before_capture is not None and not (t.prepared or t.groups):
                t.preparing = True
                unprepared.append(t)
            else:
                saves.append(Save(t, self._take(t)))
                size += t.captured_bytes
        self.in_flight += len(saves)
        return saves, unprepared

    def _take(self, t: Tracked) -> Batch:
        """Capture a session in one synchronous step: everything whole that it has now."""
        limit = t.capturable - t.durable
        count, size = limit, t.pending_bytes
        if t.groups or t.narrow or size > self.engine.batch_bytes:
            count, size = whole_groups(
                t.pending,
                limit=limit,
                most_records=t.narrow or limit,
                most_bytes=self.engine.batch_bytes,
            )
        first = t.durable + 1
        t.inflight = t.durable + count
        t.captured_bytes = size
        t.hurry = count < limit
        t.prepared = False
        if count == limit:
            t.first_at = t.group_at
        return Batch(t.key, t.epoch, first, tuple(t.pending[:count]))

    def prepared(self, t: Tracked, now: float) -> None:
        """Take note that a session's contributors were asked."""
        t.preparing = False
        t.prepared = True
        self._arm(t, now)

    def hold(self, t: Tracked) -> None:
        """Begin no save of a session until it is released; one under way goes on."""
        t.holds += 1
        self.schedule.ready.drop(t)

    def release(self, t: Tracked, now: float) -> None:
        """Let a session's saves begin again."""
        t.holds -= 1
        self._arm(t, now)

    def completed(self, t: Tracked, outcome: Outcome, now: float, took: float) -> list[Waiter]:
        """Take the store's answer for a captured session; return who is to be woken."""
        self.in_flight -= 1
        sent, t.inflight = t.inflight or t.durable, None
        size, t.captured_bytes = t.captured_bytes, 0
        if outcome.status is Status.OK:
            return self._ok(t, sent, size, outcome.written, now, took)
        t.first_at = t.oldest_at
        if t.end is not None:
            return []
        t.error = outcome.error
        if outcome.status is Status.CONFLICT:
            return self.lose(t)
        if outcome.status is Status.PERMANENT:
            return self._refused(t, sent, now)
        self._failed(t, sent, now, in_doubt=outcome.status is Status.IN_DOUBT)
        return []

    def _ok(
        self, t: Tracked, sent: int, size: int, written: int, now: float, took: float
    ) -> list[Waiter]:
        records = sent - t.durable
        window = now - (now if t.oldest_at is None else t.oldest_at)
        del t.pending[:records]
        t.pending_bytes -= size
        t.durable = sent
        t.oldest_at = t.first_at
        if t.end is not None:
            # Late: it is in the log, but the session is not ours any more.
            return []
        self.pressure.dirty_bytes -= size
        t.error = None
        t.narrow = t.narrow * 2 if t.pending else 0
        self._heal(t)
        # Taken out and put back: those that wait longest stay in front.
        self.unsaved.pop(t, None)
        if t.first_at is not None:
            self.unsaved[t] = None
            self._arm(t, now)
        self.events.append(
            Saved(
                key=t.key,
                durable=sent,
                records=records,
                written=written,
                took=took,
                window=window,
            )
        )
        return _reached(t)

    def _failed(self, t: Tracked, sent: int, now: float, *, in_doubt: bool) -> None:
        t.attempt += 1
        if in_doubt:
            t.doubt_to = max(t.doubt_to, sent)
        wait = backoff(
            t.attempt,
            base=self.engine.backoff_base,
            cap=self.schedule.backoff_cap(),
            chance=self._chance(),
        )
        t.retry_at = now + wait
        first = not self.failed
        self.failed[t] = None
        self.events.append(
            SaveFailed(
                key=t.key,
                attempt=t.attempt,
                in_doubt=in_doubt,
                error=t.error,
                retry_in=wait,
                first=first,
            )
        )
        self._arm(t, now)

    def _heal(self, t: Tracked) -> None:
        t.attempt = 0
        t.retry_at = 0.0
        if t in self.failed:
            del self.failed[t]
            if not self.failed:
                self.events.append(Recovered())

    def answered(self, *, well: bool, error: Exception | None, now: float) -> None:
        """Take note whether the store answered a batch at all: the breaker's concern."""
        if well:
            since = self.breaker.opened_at
            if self.breaker.succeeded():
                outage = now - (now if since is None else since)
                self.events.append(BreakerClosed(outage=outage, unsaved=len(self.unsaved)))
        elif self.breaker.failed(now):
            self.events.append(BreakerOpened(error=error, unsaved=len(self.unsaved)))
        oldest = next(iter(self.failed), None)
        if self.pressure.age(None if oldest is None else oldest.oldest_at, now):
            self._note_pressure(now)

    # what goes wrong for good

    def _refused(self, t: Tracked, sent: int, now: float) -> list[Waiter]:
        """Look for the group that the store refuses; found, quarantine the session."""
        count = sent - t.durable
        half, _ = whole_groups(
            t.pending,
            limit=count,
            most_records=count // 2,
            most_bytes=self.engine.batch_bytes,
        )
        if half < count:
            t.narrow = half
            self.schedule.hasten(t, now)
            return []
        self._leave(t, State.QUARANTINED)
        t.doubt_to = t.durable
        self.stuck[t] = None
        unsaved = t.version - t.durable
        self.events.append(
            Quarantined(key=t.key, seq=t.durable + 1, unsaved=unsaved, error=t.error)
        )
        return t.take_waiters()

    def lose(self, t: Tracked) -> list[Waiter]:
        """Another process has the session: nothing of it is sent any more."""
        if t.end in (State.LOST, State.CLOSED):
            return []
        self._leave(t, State.LOST)
        self.stuck[t] = None
        unsaved = t.version - t.durable
        self.events.append(Lost(key=t.key, epoch=t.epoch, unsaved=unsaved, error=t.error))
        return t.take_waiters()

    def _leave(self, t: Tracked, end: State) -> None:
        # What cannot be saved any more presses on nobody; a quarantined session still may be.
        if end is not State.QUARANTINED and t.end not in (State.LOST, State.CLOSED):
            self.pressure.dirty_bytes -= t.pending_bytes
        t.end, t.refuses = end, True
        self.schedule.ready.drop(t)
        self.unsaved.pop(t, None)
        self._heal(t)

    def retry(self, t: Tracked, now: float) -> None:
        """Take a session out of quarantine and send its records again."""
        self._readmit(t)
        if t.first_at is not None:
            self.unsaved[t] = None
            self.schedule.hasten(t, now)

    def discard(self, t: Tracked) -> int:
        """Take a session out of quarantine without its unsaved records; return how many."""
        count = t.version - t.durable
        self.pressure.dirty_bytes -= t.pending_bytes
        t.pending.clear()
        t.pending_bytes = t.urgent_to = 0
        t.version = t.group_from = t.durable
        t.first_at = t.oldest_at = t.group_at = None
        t.hurry = False
        self._readmit(t)
        return count

    def _readmit(self, t: Tracked) -> None:
        t.end, t.refuses = None, t.sealed
        t.narrow = 0
        t.error = None
        self.stuck.pop(t, None)

    # how it stands

    def oldest_age(self, now: float) -> float:
        """Return for how long the oldest change has been unsaved."""
        return now - min([t.oldest_at for t in self.unsaved if t.oldest_at is not None], default=now)

    def overloaded(self, t: Tracked, now: float) -> Exception:
        """Return the error of an append while too much is unsaved."""
        failing = next(iter(self.failed), None)
        return refusals.overloaded(
            t,
            dirty_bytes=self.pressure.dirty_bytes,
            oldest_age=self.oldest_age(now),
            cause=None if failing is None else failing.error,
        )

    def _note_pressure(self, now: float) -> None:
        self.events.append(
            Degraded(
                dirty_bytes=self.pressure.dirty_bytes,
                oldest_age=self.oldest_age(now),
                blocking=self.pressure.blocking,
            )
        )


def _reached(t: Tracked) -> list[Waiter]:
    """Take out the waiters whose version is durable."""
    if not t.waiters:
        return []
    durable = t.durable
    reached = [waiter for waiter in t.waiters if waiter.version <= durable]
    if reached:
        t.waiters = [waiter for waiter in t.waiters if waiter.version > durable]
    return reached
