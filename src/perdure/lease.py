"""Leases: their options, acquiring one, and which owners have stopped renewing their heartbeat.

A lease is an owner process and an epoch. An owner renews one heartbeat for all of its leases; all
of them are expired once that heartbeat has not moved for ``ttl`` seconds on the monotonic clock of
the process that wants a session, so that two clocks are never compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, TypeVar, final

import anyio
import msgspec
from msgspec.structs import replace

from perdure._lib.options import Options
from perdure.errors import (
    InvalidArgumentError,
    LeaseHeldError,
    SessionError,
    SessionNotFoundError,
    StoreError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey
from perdure.records.manifest import published_already
from perdure.records.records import HOLDER_KINDS
from perdure.store import (
    HeartbeatRequests,
    Held,
    LeaseState,
    Store,
    Taken,
    Terms,
    first_record,
)

T = TypeVar("T")

OnHeld = Literal["handover", "raise", "steal"]
"""Ways to treat a session that another process holds: ask for it and wait, raise, or wait until
its lease has expired."""

OnDamage = Literal["raise", "fresh"]
"""Ways to treat a session whose log is damaged: raise, or set it aside and begin a new one."""


class LeaseOptions(Options, frozen=True, kw_only=True):
    """The options of one manager's leases.

    Args:
        heartbeat: Seconds between two renewals of this process.
        ttl: Seconds without a renewal after which another process may take over.

    Raises:
        InvalidArgumentError: A value is invalid.

    """

    heartbeat: float = 2.0
    ttl: float = 8.0

    def __post_init__(self) -> None:
        times: tuple[object, ...] = (self.heartbeat, self.ttl)
        are_numbers = all(isinstance(time, int | float) and time is not True for time in times)
        if not are_numbers or not 0 < self.heartbeat < self.ttl < float("inf"):
            message = (
                f"lease: invalid heartbeat={self.heartbeat!r} and ttl={self.ttl!r}: "
                "choose numbers of seconds with 0 < heartbeat < ttl, best with several heartbeats "
                "in a ttl"
            )
            raise InvalidArgumentError(message, heartbeat=self.heartbeat, ttl=self.ttl)


# One watch serves a connected manager. Each of its own heartbeats returns the counters of other
# owners, and each read of a session's holder returns one more. So when a session is opened, it is
# mostly known already whether its holder is silent, and all opens share that knowledge.
# A counter does not prove when it was written. So only this process's clock counts, and only while
# its own heartbeats arrive: while this process was stopped, or the store accepted no writes, it
# could not see others renew, or they could not renew. tests/properties/watch_model.py is a model of
# it that explains each rule. If a live owner is taken over nevertheless, the store's fence prevents
# lost or doubled records.


# The gap between two own heartbeats, in heartbeat intervals, from which on its time does not count.
# An owner that misses its heartbeat in such an outage renews it within a ttl of four intervals.
_GAP = 1.75
# Ttls after which an owner is forgotten that no heartbeat or holder has named.
_FORGET = 2
# Owners remembered at most.
_MOST = 10_000


class _HeartbeatSeen(msgspec.Struct):
    """An owner's heartbeat counter; times are those of `OwnerWatch.counted`."""

    beat: int
    since: float
    looked: float


@final
class OwnerWatch:
    """The heartbeats of other owners, as one process has seen them.

    Args:
        lease: The options.
        clock: A monotonic clock.

    """

    def __init__(self, lease: LeaseOptions, clock: Callable[[], float]) -> None:
        self.clock: Callable[[], float] = clock
        self._ttl = lease.ttl
        self._gap = _GAP * lease.heartbeat
        self._renewed_at = clock()
        self._pause = 0.0, 0.0
        self._counted = 0.0
        self._owners: dict[str, _HeartbeatSeen] = {}
        self.silent: dict[str, int] = {}
        """Owners that are silent, with the counter that proved it."""

    def counted(self) -> float:
        """Return the seconds that count so far; call it before each read of a holder."""
        since = self.clock() - self._renewed_at
        return self._counted + since if 0 <= since < self._gap else self._counted

    def renewed(self) -> None:
        """Note that an own heartbeat has arrived."""
        self._counted = self.counted()
        now = self.clock()
        if now - self._renewed_at > self._ttl:
            self._pause = now, now - self._renewed_at
        self._renewed_at = now

    def since_renewal(self) -> float:
        """Return the seconds since an own heartbeat has arrived."""
        return self.clock() - self._renewed_at

    def missed(self) -> float:
        """Return for how many seconds, now or lately, no own heartbeat came; 0 if within a ttl."""
        since = self.since_renewal()
        if since > self._ttl:
            return since
        ended_at, pause = self._pause
        return pause if self.clock() - ended_at < self._ttl else 0.0

    def note_beat(self, owner: str, beat: int, looked_at: float) -> bool:
        """Note an owner's counter; return whether the owner is silent.

        Args:
            owner: Whose counter.
            beat: The counter, read after ``looked_at``.
            looked_at: What ``counted`` returned before the read.

        """
        known = self._owners.get(owner)
        now = self.counted()
        if known is None or known.beat != beat:
            if known is None and len(self._owners) >= _MOST:
                self._forget(next(iter(self._owners)))
            self.silent.pop(owner, None)
            known = self._owners[owner] = _HeartbeatSeen(beat, now, now)
        # Once proven, silence holds for as long as the counter stays the same.
        if looked_at - known.since >= self._ttl:
            self.silent[owner] = beat
        known.looked = now
        return owner in self.silent

    def _forget(self, owner: str) -> None:
        del self._owners[owner]
        self.silent.pop(owner, None)

    def note_beats(self, beats: Mapping[str, int], looked_at: float) -> None:
        """Note the counters that a heartbeat returned; forget owners not seen for long."""
        for owner, counter in beats.items():
            self.note_beat(owner, counter, looked_at)
        before = self.counted() - _FORGET * self._ttl
        forgotten = [owner for owner, known in self._owners.items() if known.looked < before]
        for owner in forgotten:
            self._forget(owner)


async def renew_heartbeat(store: Store, watch: OwnerWatch) -> HeartbeatRequests:
    """Renew this owner's heartbeat, and note the counters of other owners."""
    began = watch.counted()
    requests = await store.heartbeat()
    watch.renewed()
    if requests.beats is not None:
        watch.note_beats(requests.beats, began)
    return requests


# Cancelling is safe at any point: the next open takes over an epoch that was acquired but not used.


SOON, LATE, SLOWER = 0.002, 0.05, 1.6
"""Seconds between two reads of a session's holder: the first pause, the longest, and the factor
from one to the next. A new holder starts with the first pause again."""
AGAIN = 1.0
"""Seconds after which a holder is asked again: its store may have lost the first request."""
COURTESY = 0.25
"""Seconds for which a session that was just handed over is left to the process that asked."""


_NOBODY = LeaseState(epoch=0, owner="")


async def acquire_lease(
    store: Store,
    key: SessionKey,
    terms: Terms,
    *,
    watch: OwnerWatch,
    on_held: OnHeld,
    wait: float,
    on_wait: Callable[[LeaseState], object] = bool,
) -> Taken:
    """Take a session, by handover if another process holds it.

    Args:
        store: The store.
        key: The session.
        terms: On which terms. ``silent`` is the watch's, and ``given`` counts for a moment only.
        watch: Knows which holders are silent. It counts this process's own heartbeats, so they
            must be renewed meanwhile.
        on_held: ``handover`` asks the holder and waits, ``raise`` raises at once,
            ``steal`` waits for the lease to expire without asking. A holder that is known to be
            silent is not waited for.
        wait: Seconds to wait at most, by the watch's clock.
        on_wait: Called with a holder that is waited for, each time that it was read.

    Raises:
        LeaseHeldError: The holder is alive and did not hand over in time.
        SessionError: There is such a session, and the terms want a new one.
        SessionNotFoundError: There is none, and none may begin.

    """
    start, is_new, is_ours = watch.clock(), terms.new, False
    asking = _Asking(store, key)
    while True:
        given = terms.given if watch.clock() - start < COURTESY else 0
        # Before the read: the counter that it returns is no older than this.
        looked_at = watch.counted()
        answer = await asking.answer(replace(terms, silent=watch.silent, given=given))
        # Case 1: taken. If a new one was wanted, it may have been made by a try whose answer was
        # lost.
        if isinstance(answer, Taken):
            is_old = is_new and not answer.created
            if is_old and not (is_ours and await _is_empty(store, key)):
                await store.release(key, answer.epoch)
                raise session_exists(key)
            return answer
        # Case 2: the answer was lost, and the lease may be ours. Ask again.
        if answer is None:
            await asking.pause(0)
            continue
        # Case 3: another process holds it, or this one under an answer that was lost.
        holder = answer.holder or _NOBODY
        if terms.new and not holder.deleted:
            # Taken just now, and the answer was lost; or a process died before its log began.
            is_ours = asking.is_in_doubt and holder.owner == terms.me
            if is_ours or not await store.head(key):
                terms = replace(terms, new=False)
        _require_possible(key, terms, answer.holder)
        if (
            holder.released and holder.epoch == given
        ):  # the process that it was handed to comes first
            await asking.pause(given)
            continue
        watch.note_beat(holder.listed or holder.owner, holder.beat, looked_at)
        waited = watch.clock() - start
        is_free = replace(terms, silent=watch.silent).allows(answer.holder)
        if is_free and waited < wait + AGAIN:  # this answer proved it silent, or a race was lost
            await asking.pause(holder.epoch)
            continue
        if on_held == "raise" or waited >= wait:
            raise lease_held(key, holder, on_held, waited)
        on_wait(holder)
        if on_held == "handover":
            await asking.ask(holder, start + waited)
        await asking.pause(holder.epoch, at_most=max(wait - waited, 0.001))


async def _is_empty(store: Store, key: SessionKey) -> bool:
    """Return whether a session has no records but its holders' own."""
    log = store.read_log(key)
    return await first_record(log, lambda record: record.kind not in HOLDER_KINDS) is None


def _require_possible(key: SessionKey, terms: Terms, holder: LeaseState | None) -> None:
    """Raise where no waiting helps."""
    if holder is not None and not holder.deleted:
        if terms.beginning.draft is not None:
            raise published_already(key, holder.epoch)
        if terms.new:
            raise session_exists(key)
    elif not terms.create:
        raise not_found(key)


def session_exists(key: SessionKey) -> SessionError:
    """Return the error for a new session that exists already."""
    message = (
        f"session {key} exists, and a new one was asked for: choose another id, leave out "
        "new=True (an agent: if_exists='resume') to continue it, or delete it first"
    )
    return SessionError(message, key=str(key))


def not_found(key: SessionKey) -> SessionNotFoundError:
    """Return the error for a session that may not be made, and does not exist."""
    message = f"there is no session {key}, or not any more: leave out create=False to make it"
    return SessionNotFoundError(message, key=str(key))


class _Asking:
    """The requests for a session, to its store and its holder, and the pauses between them."""

    def __init__(self, store: Store, key: SessionKey) -> None:
        self._store = store
        self._key = key
        self._last_request: tuple[int, float] = (0, 0.0)
        self._epoch = 0
        self._pause = SOON
        self.is_in_doubt = False
        """True if an answer was lost."""

    async def answer(self, terms: Terms) -> Held | Taken | None:
        """Return the store's answer; None if it was lost, once: the lease may be ours."""
        try:
            return await self._store.acquire(self._key, terms)
        except StoreUnavailableError:
            if self.is_in_doubt:
                raise
            self.is_in_doubt = True
            return None

    async def ask(self, holder: LeaseState, now: float) -> None:
        """Ask a new holder at once, and every holder again each ``AGAIN`` seconds."""
        epoch, at = self._last_request
        if epoch != holder.epoch or now - at >= AGAIN:
            self._last_request = (holder.epoch, now)
            await self._store.request_handover(self._key, holder)

    async def pause(self, epoch: int, *, at_most: float = LATE) -> None:
        """Wait, longer each time as long as the epoch stays the same."""
        if epoch != self._epoch:
            self._epoch, self._pause = epoch, SOON
        await anyio.sleep(min(self._pause, at_most))
        self._pause = min(self._pause * SLOWER, LATE)


def named(holder: LeaseState) -> str:
    """Return a holder as errors name it."""
    return f"process {holder.pid} on {holder.host}" if holder.pid else f"owner {holder.owner}"


def held_by(holder: LeaseState | None) -> str:
    """Return who holds a session's lease, in words."""
    if holder is None or holder.released:
        return "no one"
    if holder.alive is False:
        return f"no one ({named(holder)} ended without releasing it)"
    return named(holder) if holder.alive else f"{named(holder)}, or no one if that has ended"


def lease_held(
    key: SessionKey, holder: LeaseState, on_held: OnHeld, waited: float
) -> LeaseHeldError:
    """Return the error for a session that another process keeps, or is just making."""
    by = f"{named(holder)} (waited {waited:.1f} s)"
    if holder.deleted:  # a draft, which is never handed over
        message = f"session {key} is just being made by {by}: try again in a moment"
    elif on_held == "raise":
        message = f'session {key} is held by {by}: open it with on_held="handover" to ask for it'
    else:
        message = (
            f"session {key} is held by {by}: close it there, wait longer (wait=…), or read it with "
            "load(), which needs no lease"
        )
    return LeaseHeldError(message, key=str(key), owner=holder.owner, epoch=holder.epoch)


async def while_beating(store: Store, watch: OwnerWatch, act: Callable[[], Awaitable[T]]) -> T:
    """Run ``act``, and renew this owner's heartbeat in a store until it has returned.

    For long operations under a lease: otherwise other processes would consider this one dead.

    Args:
        store: An open store.
        watch: Where the heartbeats of other owners are noted.
        act: What to run; its errors are raised as they are.

    """
    done: list[T] = []
    failed: Exception | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(_beat, store, watch, name="perdure:beat")
        try:
            done.append(await act())
        except Exception as error:  # noqa: BLE001  # raised below, outside of the group
            failed = error
        group.cancel_scope.cancel()
    if failed is not None:
        raise failed
    return done[0]


async def _beat(store: Store, watch: OwnerWatch) -> None:
    while True:
        with contextlib.suppress(StoreError):  # ``act`` reports an outage that lasts
            await renew_heartbeat(store, watch)
        await anyio.sleep(LeaseOptions().heartbeat)
