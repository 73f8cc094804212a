"""The core of autosave: what to save, and what follows from the store's answers. Does no I/O.

No clock, loop, store or randomness in here: each method takes ``now``, the caller passes
``chance``, and what to do is a return value or an event in ``registry.events``. So it behaves the
same on every event loop, and is tested without one.

An append makes a session due (`Core.append`, `schedule`). ``capture`` takes the sessions with the
earliest deadlines, and everything that each of them has by then. ``completed`` takes the store's
answer; what was appended meanwhile makes the session due again.

* A session is captured only while no save of it is in flight. One that was given up is in doubt,
  and still in flight: until the store has answered, or failed, nothing of the session is sent.
* Unsaved records wait in exactly one place: in the schedule, with the store, for contributors, or
  for a job; unless the session is quarantined, lost, or has no timers.
* Nothing leaves memory before the store has answered OK.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, Literal, NamedTuple, final

from perdure._lib.backoff import backoff
from perdure.autosave import tracked
from perdure.autosave.events import (
    BreakerOpened,
    Lost,
    Quarantined,
    Saved,
    SaveFailed,
)
from perdure.autosave.options import (
    INHERIT,
    Autosave,
    AutosaveStatus,
    EngineOptions,
    Inherit,
)
from perdure.autosave.schedule import Schedule
from perdure.autosave.tracked import NEVER, OVERHEAD, SessionRegistry, State, Tracked, Wake
from perdure.errors import (
    AcknowledgedRecordsLostError,
    ConfigError,
    FormatError,
    LeaseError,
    NotStorableError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey
from perdure.records.records import Entry
from perdure.store import Batch, Capabilities, Outcome, Status

BreakerState = Literal["closed", "open", "recovering"]

MOST_DOUBLED: Final = 32
_HURRIED_RESET: Final = 1.0


@final
class Breaker:
    """A circuit breaker with a slow start, one per store.

    Closed, everything may be sent. After ``failures`` failed batches in a row it opens: only a
    probe is sent now and then, so that a store that is down does not get every session's retry.
    The first probes come soon, since most outages are short. The first success begins a slow
    start: two sessions at once, four, eight, up to ``full``, because everything that has queued
    up is sent at the same time.

    Args:
        failures: Failed batches in a row that open it.
        base: Seconds until the first probe, at most; each failed probe doubles it. At least half.
        reset: Seconds between probes, at most.
        full: How many sessions can be with the store at once.
        chance: Returns a random number from 0 up to 1.

    """

    __slots__ = (
        "_base",
        "_chance",
        "_failures",
        "_full",
        "_probes",
        "_reset",
        "_window",
        "failed_in_a_row",
        "probe_at",
        "state",
    )

    def __init__(
        self, *, failures: int, base: float, reset: float, full: int, chance: Callable[[], float]
    ) -> None:
        self.state: BreakerState = "closed"
        # When the next probe may be sent; infinite unless open.
        self.probe_at: float = float("inf")
        self._base = base
        self._failures = failures
        # Failed probes in a row.
        self._probes = 0
        self._reset = reset
        self._full = full
        self._chance = chance
        # Failed batches since the last that was answered.
        self.failed_in_a_row: int = 0
        self._window = full

    def allowance(self, now: float, in_flight: int) -> int:
        """Return how many more sessions may be sent while ``in_flight`` are with the store."""
        if self.state == "closed":
            return self._full
        if self.state == "recovering":
            return max(0, self._window - in_flight)
        # Open: one probe at a time. Its answer decides for all that wait.
        return 1 if now >= self.probe_at and not in_flight else 0

    def succeeded(self, *, waiting: bool) -> None:
        """Note that the store answered.

        It closes when the store gets all that it can take, or when nothing is ``waiting`` for it.
        """
        self.failed_in_a_row = self._probes = 0
        if self.state == "closed":
            return
        self._window = 2 if self.state == "open" else self._window * 2
        self.probe_at = float("inf")
        self.state = "recovering" if waiting and self._window < self._full else "closed"

    def failed(self, now: float) -> bool:
        """Note that the store did not answer; return whether this opened the breaker."""
        self.failed_in_a_row += 1
        if self.state == "closed" and self.failed_in_a_row < self._failures:
            return False
        opened = self.state == "closed"
        self.state = "open"
        # A random half, or the processes of one store would all probe it in the same moment.
        pause = min(self._reset, self._base * 2.0 ** min(self._probes, MOST_DOUBLED))
        self._probes += 1
        self.probe_at = now + pause * (0.5 + 0.5 * self._chance())
        return opened

    def hurry(self, now: float) -> None:
        """Probe at least once a second from now on: the process is shutting down."""
        self._reset = min(self._reset, _HURRIED_RESET)
        if self.state == "open":
            self.probe_at = min(self.probe_at, now + self._reset * self._chance())


def size_of(entries: Sequence[Entry]) -> int:
    """Return how many unsaved bytes entries count as."""
    return sum([len(entry.payload) for entry in entries]) + OVERHEAD * len(entries)


def as_group(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return entries as one group: the last has ``end``, and none but that."""
    last = len(entries) - 1
    return tuple(
        [
            entry if entry.end is (n == last) else entry._replace(end=n == last)
            for n, entry in enumerate(entries)
        ]
    )


def whole_groups(
    pending: Sequence[Entry], *, limit: int, most_records: int, most_bytes: int
) -> tuple[int, int]:
    """Return how many records of ``pending[:limit]`` to take, and their bytes.

    As many whole groups as ``most_records`` and ``most_bytes`` allow, but at least one.
    """
    size = count_taken = taken_bytes = 0
    for count, entry in enumerate(islice(pending, limit), 1):
        size += len(entry.payload) + OVERHEAD
        # The first group goes at any size: nothing smaller could be sent in its place.
        if count_taken and (count > most_records or size > most_bytes):
            break
        if entry.end:
            count_taken, taken_bytes = count, size
    return count_taken, taken_bytes


SPREAD = 64
"""Number of different delays over which jitter spreads a burst."""


class Save(NamedTuple):
    """A session, and what of it goes to the store."""

    t: Tracked
    batch: Batch


@final
class Core:
    """Decide for all sessions of one store.

    Args:
        autosave: When sessions save that have no setting of their own.
        engine: The finer options.
        capabilities: What the store prefers.
        chance: Returns a random number from 0 up to 1.

    """

    def __init__(
        self,
        *,
        autosave: Autosave | None,
        engine: EngineOptions,
        capabilities: Capabilities,
        chance: Callable[[], float],
    ) -> None:
        self.autosave = autosave
        self.engine = engine
        self.batch_max: int = engine.batch_max or capabilities.batch_max
        self.parallel: int = engine.max_concurrent_batches or capabilities.parallelism
        # Calls that may wait in the store's own queue.
        self.queue_depth: int = 0 if engine.max_concurrent_batches else capabilities.queue_depth
        # Sessions with a save in flight that was not given up.
        self.in_flight: int = 0
        # No save will begin any more.
        self.stopped = False
        self.registry: SessionRegistry = SessionRegistry(engine)
        self.schedule: Schedule = Schedule(engine, chance)
        self.breaker: Breaker = Breaker(
            failures=engine.breaker_failures,
            base=engine.backoff_base,
            reset=engine.breaker_reset,
            full=self.batch_max * self.parallel,
            chance=chance,
        )
        # Few different numbers that all sessions share: an append fetches one of them.
        self._earliness = [1.0 - engine.jitter * n / SPREAD for n in range(SPREAD)]
        self._chance = chance

    # Sessions come and go.

    def track(
        self,
        key: SessionKey,
        *,
        epoch: int,
        head: int,
        autosave: Autosave | Inherit | None = INHERIT,
        now: float,
    ) -> Tracked:
        """Start to track a session whose log ends with ``head``."""
        options = self.autosave if isinstance(autosave, Inherit) else autosave
        earliness = self._earliness[int(self._chance() * len(self._earliness))]
        t = Tracked(key, epoch=epoch, head=head, options=options, earliness=earliness)
        t.inherits = isinstance(autosave, Inherit)
        t.last_at = t.idle_since = now
        self.registry.sessions.add(t)
        return t

    def drop(self, t: Tracked, *, keep_lost: bool = False) -> list[Wake]:
        """Stop tracking a session, saved or not; return the waiters to wake.

        With ``keep_lost``, records of a session that was taken over stay until `discard` or
        `settle_lost` is called for it.
        """
        # A caller that waits for a session that was taken over gets that error, not "closed".
        self._leave(t, State.LOST if t.end is State.LOST else State.CLOSED)
        self.schedule.forget(t)
        if not (keep_lost and t.undecided):
            self.registry.stuck.pop(t, None)
        self.registry.sessions.discard(t)
        return t.take_waiters()

    def tune(self, autosave: Autosave | None) -> None:
        """Change the setting of all sessions that have none of their own."""
        self.autosave = autosave
        for t in self.registry.sessions:
            if t.inherits:
                t.options = autosave
        self.schedule.review(self.registry.unsaved)

    def tune_one(self, t: Tracked, autosave: Autosave | Inherit | None) -> None:
        """Give a session a setting of its own, or the one of all."""
        t.inherits = isinstance(autosave, Inherit)
        t.options = self.autosave if isinstance(autosave, Inherit) else autosave
        self.schedule.review([t])

    def status(self, t: Tracked | None) -> AutosaveStatus:
        """Return the setting of a session, or of all, and what of it is in force."""
        setting = self.autosave if t is None else t.options
        return AutosaveStatus(
            setting=setting,
            in_force=self.schedule.in_force(setting),
            inherited=t is not None and t.inherits,
        )

    # Records.

    def append(self, t: Tracked, entries: tuple[Entry, ...], now: float) -> int:
        """Accept entries as one group, or refuse them all; return the version.

        The hottest path of the library: an agent calls it for each message, a server for
        thousands of sessions. One comparison decides whether anything is unusual; only then does
        it look closer. The session has already checked that the store can take each record.
        """
        count = len(entries)
        if count == 1:
            size = len(entries[0][1]) + OVERHEAD
        elif count:
            size = size_of(entries)
        else:
            return t.version
        registry = self.registry
        if t.refuses or registry.dirty_bytes >= registry.ceiling:
            self._admit(t, now)
        if count > 1 or not entries[0][2]:
            entries = as_group(entries)
        if t.records is None:
            t.records = [*entries]
        else:
            t.records += entries
        t.version += count
        t.pending_bytes += size
        registry.dirty_bytes += size
        t.last_at = now
        if t.first_at is None:
            self._begin(t, now)
        elif (
            not t.ticket
            and (o := t.options) is not None
            and (t.pending_bytes >= o.max_bytes or t.version - t.durable >= o.max_records)
        ):
            self._fill(t, now)
        return t.version

    def _admit(self, t: Tracked, now: float) -> None:
        """Raise for entries that cannot be accepted; called only when something is unusual."""
        sealed = self.registry.sealed and not t.contributing
        if sealed or not t.writable:
            raise tracked.ended(t)
        if t.end is not None and t.pending_bytes >= self.engine.quarantine_bytes:
            raise tracked.ended(t)
        if self.registry.rises():
            self.schedule.rush(self.registry.unsaved, rushed=True)
            self.registry.note_pressure(now)
        if self.registry.blocking and not t.contributing:
            if not t.granted:
                raise self.registry.overloaded(t, now)
            t.granted = False

    def _begin(self, t: Tracked, now: float) -> None:
        """Note the first change that no save has captured, and schedule the session."""
        t.first_at = now
        if t.oldest_at is None:
            t.oldest_at = now
            if t.end is None:
                self.registry.unsaved[t] = None
        o = t.options
        if o is not None and (
            t.pending_bytes >= o.max_bytes or t.version - t.durable >= o.max_records
        ):
            self._fill(t, now)
        # With a save in flight, its answer arms the session.
        if t.inflight is None:
            self.schedule.begin(t, now)

    def _fill(self, t: Tracked, now: float) -> None:
        """Make a session due now if much of it is in no save."""
        o = t.options
        if o is None:
            return
        captured = t.durable if t.inflight is None else t.inflight
        size = t.pending_bytes - t.captured_bytes
        if size >= o.max_bytes or t.version - captured >= o.max_records:
            self.schedule.make_due(t, now)

    def group(self, t: Tracked, after: int) -> None:
        """Make one group of the records after a version, while no save of them has begun."""
        if t.records is not None and t.version > after:
            # `records` begins after the durable version.
            first = after - t.durable
            t.records[first:] = as_group(t.records[first:])

    def seal(self, t: Tracked | None) -> None:
        """Accept no more records, for one session or for all; contributors still may append."""
        if t is None:
            self.registry.seal()
        else:
            t.sealed = t.refuses = True

    def unseal(self, t: Tracked) -> None:
        """Accept records of one session again."""
        t.sealed, t.refuses = False, t.end is not None

    # To the store.

    def may_capture(self, now: float) -> bool:
        """Return whether `capture` would return something."""
        if self.stopped or not len(self.schedule.ready):
            return False
        return self.breaker.allowance(now, self.in_flight) > 0

    def capture(self, now: float) -> tuple[list[Save], list[Tracked]]:
        """Take the next batch, and sessions whose contributors must be asked first."""
        saves: list[Save] = []
        unprepared: list[Tracked] = []
        size = 0
        room = 0 if self.stopped else self.breaker.allowance(now, self.in_flight)
        room = min(room, self.batch_max)
        while len(saves) < room and len(unprepared) < room and size < self.engine.batch_bytes:
            t = self.schedule.ready.pop()
            if t is None:
                break
            # Its hooks run first, and take no slot: it comes back through `prepared`.
            if t.before_capture is not None and not t.prepared:
                t.preparing = True
                unprepared.append(t)
            else:
                saves.append(Save(t, self._take(t)))
                size += t.captured_bytes
        self.in_flight += len(saves)
        return saves, unprepared

    def capture_alone(self, t: Tracked, version: int) -> Save | None:
        """Take a session whose save is the only one that waits; None if it is not.

        A save of the usual kind, which passes no queue.

        Args:
            t: The session.
            version: What a caller waits for; 0 if none does.

        """
        if t.first_at is None or t.refuses or t.inflight is not None:
            return None  # with the store, or nothing to save, or not to be saved now
        if t.holds or t.preparing or t.before_capture is not None:
            return None
        if self.stopped or len(self.schedule.ready) or self.breaker.state != "closed":
            return None
        # A caller that waits does not sit out a back-off.
        if version:
            t.urgent_to, t.retry_at = version, 0.0
        elif t.retry_at:
            return None  # it has failed: its back-off continues
        self.in_flight += 1
        return Save(t, self._take(t))

    def _take(self, t: Tracked) -> Batch:
        """Capture a session in one synchronous step: its whole groups, as many as a batch takes."""
        limit = t.version - t.durable
        count, size = limit, t.pending_bytes
        if t.narrow or size > self.engine.batch_bytes:
            count, size = whole_groups(
                t.pending,
                limit=limit,
                most_records=t.narrow or limit,
                most_bytes=self.engine.batch_bytes,
            )
        # The records stay in memory until `_ok`: only these numbers say that they are with the
        # store.
        t.inflight = t.durable + count
        t.captured_bytes = size
        t.hurry = count < limit
        t.prepared = False
        # Else the rest has waited since then, and keeps its place.
        if count == limit:
            t.first_at = None
        records: Sequence[Entry] = t.records or ()
        if count < len(records):
            records = records[:count]
        turns = about = None
        if count == limit:  # else what they say is not all saved with it
            turns, about = t.turns, t.labels if t.labels_due else None
        t.carried = batch = Batch(t.key, t.epoch, t.durable + 1, tuple(records), turns, about)
        return batch

    def prepared(self, t: Tracked, now: float) -> None:
        """Note that a session's contributors were asked."""
        t.preparing = False
        t.prepared = t.first_at is not None  # else nothing is due that they were asked for
        # It was due before they were asked: what they appended starts no new debounce.
        self.schedule.make_due(t, now)

    def hold(self, t: Tracked) -> None:
        """Begin no save of a session until it is released; one in flight continues."""
        t.holds += 1
        self.schedule.ready.drop(t)

    def release(self, t: Tracked, now: float) -> None:
        """Allow a session's saves to begin again."""
        t.holds -= 1
        self.schedule.arm(t, now)

    # And back.

    def completed(self, t: Tracked, outcome: Outcome, now: float, took: float) -> list[Wake]:
        """Apply the store's answer for a captured session; return the waiters to wake.

        One that comes after the save was given up counts as well.
        """
        is_late, t.given_up = t.given_up, False
        if not is_late:
            self.in_flight -= 1
        sent, batch = t.inflight or t.durable, t.carried
        t.inflight = t.carried = None
        if outcome.status is Status.OK:
            # Labels that were given since the capture are another object, and stay due.
            if t.labels_due and batch is not None and batch.about is t.labels:
                t.labels_due = False
            return self._ok(t, sent, outcome.written, now, took)
        # They count as not captured again, and have waited since the oldest of them came.
        t.captured_bytes = 0
        t.first_at = t.oldest_at
        if t.options is None:  # no timer brings them again, and a turn's end had made them due
            t.hurry = True
        if t.end is not None:
            return []
        if is_late and outcome.status not in REFUSALS:
            self.schedule.arm(t, now)  # it has failed already, and may be sent again
            return []
        t.last_error = outcome.error
        if outcome.status is Status.CONFLICT:
            return self.lose(t)
        if outcome.status is Status.PERMANENT:
            return self._refused(t, sent, now)
        self._failed(t, sent, now, in_doubt=outcome.status is Status.IN_DOUBT)
        return []

    def give_up(self, t: Tracked, error: Exception | None, now: float) -> None:
        """Let others have the slot of a save that has taken too long, and is in doubt.

        Nothing of the session is sent before `completed` is called for it.
        """
        self.in_flight -= 1
        t.given_up = True
        if t.end is None:
            t.last_error = error
            self._failed(t, t.inflight or t.durable, now, in_doubt=True)

    def reclaim(self, sessions: Iterable[Tracked]) -> None:
        """Have unsaved sessions checked that are not with the store, and in no queue."""
        for t in sessions:
            if t.inflight is None and not t.ticket and t.slot == NEVER:
                t.first_at = t.oldest_at if t.first_at is None else t.first_at
                self.schedule.review([t])

    def _ok(self, t: Tracked, sent: int, written: int, now: float, took: float) -> list[Wake]:
        records, size = sent - t.durable, t.captured_bytes
        since = now if t.oldest_at is None else t.oldest_at
        if t.records is not None:
            del t.records[:records]
            t.records = t.records or None
        t.pending_bytes -= size
        t.captured_bytes = 0
        t.durable = sent
        t.oldest_at = t.first_at
        if t.end is not None:
            # A late answer: the records are in the log, but the session is not ours any more.
            if not t.undecided:
                self.settle_lost(t)
            return []
        self.registry.dirty_bytes -= size
        t.last_error = None
        # The store took this many: twice as many next time, until nothing is left.
        t.narrow = t.narrow * 2 if t.records else 0
        if t.attempt:
            self.registry.clear_failures(t)
        t.retry_at = 0.0
        # Removed and added again: the sessions that wait longest stay in front.
        self.registry.unsaved.pop(t, None)
        if t.first_at is not None:
            self.registry.unsaved[t] = None
            self.schedule.arm(t, now)
        else:
            # Here and not at the next append, which would have to fetch the old number.
            t.idle_since, t.last_at = t.last_at, 0.0
        if self.registry.reports_saves:
            self.registry.events.append(
                Saved(
                    key=t.key,
                    durable=sent,
                    records=records,
                    written=written,
                    took=took,
                    window=now - since,
                )
            )
        return t.take_waiters(sent) if t.waiters else []

    def _failed(self, t: Tracked, sent: int, now: float, *, in_doubt: bool) -> None:
        t.attempt += 1
        if in_doubt:
            # The log may have records up to here, although their save failed.
            t.doubt_to = max(t.doubt_to, sent)
        wait = backoff(
            t.attempt,
            base=self.engine.backoff_base,
            cap=self.schedule.backoff_cap(),
            chance=self._chance(),
        )
        t.retry_at = now + wait
        first = not self.registry.failed
        self.registry.failed[t] = None
        self.registry.events.append(
            SaveFailed(
                key=t.key,
                attempt=t.attempt,
                in_doubt=in_doubt,
                error=t.last_error,
                retry_in=wait,
                first=first,
            )
        )
        self.schedule.arm(t, now)

    @property
    def is_calm(self) -> bool:
        """True if the store works, and keeps up: `answered` would change nothing if it did well."""
        breaker, registry = self.breaker, self.registry
        if breaker.failed_in_a_row or breaker.state != "closed":
            return False
        return not (registry.failed or registry.rising or registry.overdue)

    def answered(self, *, well: bool, error: Exception | None, now: float) -> None:
        """Note for the breaker whether the store answered a batch at all."""
        self.schedule.nudged = True  # the next probe may be due earlier
        if well:
            if self.breaker.state == "open":  # failed sessions need not wait out their back-off
                for t in self.registry.failed:
                    t.retry_at = 0.0
                self.schedule.review(self.registry.failed)
            waiting = bool(self.registry.failed or self.in_flight or len(self.schedule.ready))
            self.breaker.succeeded(waiting=waiting)
        elif self.breaker.failed(now):
            opened = BreakerOpened(error=error, unsaved=len(self.registry.unsaved))
            self.registry.events.append(opened)
        probe = None
        if self.breaker.state == "open":
            probe = next((t for t in self.registry.failed if t.inflight is None), None)
        if probe is not None and probe.retry_at > self.breaker.probe_at:
            # Its own back-off may be longer: the probe would have nothing to send.
            probe.retry_at = self.breaker.probe_at
            self.schedule.arm(probe, now)
        rushed = self.registry.rising
        self.registry.note_age(now)
        if rushed and not self.registry.rising:
            self.schedule.rush((), rushed=False)

    # Permanent failures.

    def _refused(self, t: Tracked, sent: int, now: float) -> list[Wake]:
        """Bisect for the group that the store refuses; once found, quarantine the session."""
        count = sent - t.durable
        half, _ = whole_groups(
            t.pending,
            limit=count,
            most_records=count // 2,
            most_bytes=self.engine.batch_bytes,
        )
        # At least one group was taken: if that is all there is, it is the one that is refused.
        if half < count:
            t.narrow = half
            self.schedule.make_due(t, now)
            return []
        self._leave(t, State.QUARANTINED)
        # The first record was refused: nothing after it can be in the log.
        t.doubt_to = t.durable
        self.registry.stuck[t] = None
        self.registry.events.append(
            Quarantined(
                key=t.key,
                seq=t.durable + 1,
                unsaved=t.version - t.durable,
                error=t.last_error,
            )
        )
        return t.take_waiters()

    def lose(self, t: Tracked) -> list[Wake]:
        """End a session that another process has, or whose store has lost records of it."""
        if t.end in (State.LOST, State.CLOSED):
            return []
        self._leave(t, State.LOST)
        self.registry.stuck[t] = None
        self.registry.events.append(
            Lost(
                key=t.key,
                epoch=t.epoch,
                unsaved=t.version - t.durable,
                missing=t.missing,
                error=t.last_error,
            )
        )
        return t.take_waiters()

    def _leave(self, t: Tracked, end: State) -> None:
        # Only records that may still be saved, or are kept for that, count as unsaved bytes.
        if end is not State.QUARANTINED and t.end not in (State.LOST, State.CLOSED):
            self.registry.dirty_bytes -= t.pending_bytes
        t.end, t.refuses = end, True
        self.schedule.ready.drop(t)
        self.registry.unsaved.pop(t, None)
        self.registry.clear_failures(t)

    def retry(self, t: Tracked, now: float) -> None:
        """Send a session's records again: out of quarantine, or before its back-off ends."""
        if t.end is State.QUARANTINED:
            self._readmit(t)
            if t.first_at is not None:
                self.registry.unsaved[t] = None
        t.retry_at = 0.0
        self.schedule.make_due(t, now)

    def discard(self, t: Tracked) -> int:
        """Drop a stuck session's unsaved records; return how many. It leaves quarantine."""
        count = t.version - t.durable
        t.dropped += count
        if t.end is State.LOST:
            self.settle_lost(t)
        if t.end is State.QUARANTINED:
            self.registry.dirty_bytes -= t.pending_bytes
            self._readmit(t)
        t.records = None
        t.pending_bytes = t.captured_bytes = t.urgent_to = 0
        t.inflight = None if t.inflight is None else t.durable  # its answer brings nothing
        t.version = t.durable
        t.first_at = t.oldest_at = None
        t.hurry = False
        return count

    def settle_lost(self, t: Tracked) -> None:
        """Note that a lost session's records were forked, spilled or discarded."""
        if t.end is State.LOST:
            self.registry.stuck.pop(t, None)

    def _readmit(self, t: Tracked) -> None:
        t.end, t.refuses = None, t.sealed
        t.narrow = 0
        t.last_error = None
        self.registry.stuck.pop(t, None)


ANSWERS: Final = frozenset({Status.OK, Status.CONFLICT, Status.PERMANENT})
"""Answers that only a working store gives."""

REFUSALS: Final = frozenset({Status.CONFLICT, Status.PERMANENT})
"""Answers that are final for a session."""

# Errors caused by the values that were sent: sending them again cannot help.
_PERMANENT: Final = (
    NotStorableError,
    FormatError,
    ConfigError,
    TypeError,
    ValueError,
    OverflowError,
)


def outcome_of(error: Exception) -> Outcome:
    """Return the outcome for an exception from ``append_many``, which should raise nothing.

    An unknown error leaves open what was written: in doubt, so the records are sent again.
    """
    if isinstance(error, (LeaseError, AcknowledgedRecordsLostError)):
        return Outcome(Status.CONFLICT, error)
    if isinstance(error, _PERMANENT):
        return Outcome(Status.PERMANENT, error)
    return Outcome(Status.IN_DOUBT, error)


def in_doubt(reason: str) -> Outcome:
    """Return the outcome of a save that was given up."""
    return Outcome(Status.IN_DOUBT, StoreUnavailableError(reason))


def complete(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """Return one outcome for each batch, even if the store gave fewer."""
    missing = count - len(outcomes)
    if missing <= 0:
        return list(outcomes[:count])
    reason = f"the store answered for {len(outcomes)} of {count} sessions: report it to its author"
    return [*outcomes, *[in_doubt(reason)] * missing]
