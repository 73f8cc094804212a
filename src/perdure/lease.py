"""The right to write a session: when it may be taken, taking it, and who has gone silent."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeVar, final

import anyio
import msgspec

from perdure.errors import ConfigError, LeaseHeldError, StoreError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.store import HeartbeatRequests, HeldLease, LeaseState, Store

# When a session may be taken from whoever had it: pure decisions
#
# A lease is an owner process and an epoch. Owners renew one heartbeat each; all of an owner's
# leases are expired when its heartbeat has not moved for ``ttl`` on the taker's own monotonic
# clock (`perdure.lease`), so that no two clocks are ever compared.


OnHeld = Literal["handover", "raise", "steal"]
"""What to do about a session that somebody else holds: ask and wait, give up, or take it."""


class LeaseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the right to write is kept.

    Args:
        heartbeat: Seconds between two renewals of this process.
        ttl: Seconds without a renewal after which others may take over.

    Raises:
        ConfigError: A value does not fit.

    """

    heartbeat: float = 2.0
    ttl: float = 8.0

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat < self.ttl < float("inf"):
            message = (
                f"lease: heartbeat={self.heartbeat!r} and ttl={self.ttl!r} do not fit: "
                "choose 0 < heartbeat < ttl, best with several heartbeats in a ttl"
            )
            raise ConfigError(message, heartbeat=self.heartbeat, ttl=self.ttl)


def may_take(holder: LeaseState | None, *, me: str, silent: bool) -> bool:
    """Say whether a session may be taken now.

    >>> may_take(None, me="me", silent=False)
    True
    >>> may_take(LeaseState(epoch=1, owner="other", alive=True), me="me", silent=False)
    False
    """
    if holder is None or holder.released or holder.deleted or holder.alive is False:
        return True
    # Ours: an open that was abandoned half-way.
    return silent or holder.owner == me


# The watch of owners: which of them have not renewed their heartbeat for the lease's ttl
#
# One watch for a connected manager. Each own heartbeat brings the counters of other owners, each
# look at a session its holder's. So by the time somebody opens a session, it is mostly known
# whether its holder is silent, and what one open has found out serves all others.
# A counter proves nothing about when it was written, so only this process's clock counts, and only
# as long as its own heartbeats arrive: while it was stopped, or the store took no writes, others
# could not be seen beating, or could not beat. Checked against a model, which also says what each
# rule is for (tests/properties/watch_model.py). Should a live owner be taken over all the same,
# the store's fence keeps its records from being lost or doubled.


_GAP = 1.75
"""Heartbeats between two own ones from which on the time between them does not count. Whoever
fails to beat in as long an outage does so again within the ttl, if that is four heartbeats."""
_FORGET = 2
"""Ttls after which an owner is forgotten that heartbeats do not tell of, and nobody looked at."""
_MOST = 10_000
"""Owners that are remembered."""


class _HeartbeatSeen(msgspec.Struct):
    """An owner's counter, in time that counts."""

    beat: int
    since: float
    looked: float
    silent: bool = False


@final
class OwnerWatch:
    """What one process has seen of the heartbeats of others.

    Args:
        lease: The heartbeat's terms.
        clock: A monotonic clock.

    """

    def __init__(self, lease: LeaseOptions, clock: Callable[[], float]) -> None:
        self.clock: Callable[[], float] = clock
        self._ttl = lease.ttl
        self._gap = _GAP * lease.heartbeat
        self._beaten = clock()
        self._counted = 0.0
        self._seen: dict[str, _HeartbeatSeen] = {}

    def attended(self) -> float:
        """Return the seconds that count by now. Asked for before each look."""
        since = self.clock() - self._beaten
        return self._counted + since if 0 <= since < self._gap else self._counted

    def beaten(self) -> None:
        """Note that an own heartbeat has arrived."""
        self._counted = self.attended()
        self._beaten = self.clock()

    def saw(self, owner: str, beat: int, asked: float) -> bool:
        """Note an owner's counter; return whether the owner is silent.

        Args:
            owner: Whose counter.
            beat: The counter, as it was read after ``asked``.
            asked: What ``attended`` was before the look.

        """
        seen = self._seen.get(owner)
        now = self.attended()
        if seen is None or seen.beat != beat:
            if seen is None and len(self._seen) >= _MOST:
                del self._seen[next(iter(self._seen))]
            seen = self._seen[owner] = _HeartbeatSeen(beat, now, now)
        # Once proven, it holds for as long as the counter is the same, whatever was missed.
        seen.silent = seen.silent or asked - seen.since >= self._ttl
        seen.looked = now
        return seen.silent

    def saw_all(self, beats: Mapping[str, int], asked: float) -> None:
        """Note what a heartbeat told of other owners; forget those that are gone."""
        for owner, counter in beats.items():
            self.saw(owner, counter, asked)
        before = self.attended() - _FORGET * self._ttl
        gone = [owner for owner, seen in self._seen.items() if seen.looked < before]
        for owner in gone:
            del self._seen[owner]


async def beat(store: Store, watch: OwnerWatch) -> HeartbeatRequests:
    """Renew this owner's heartbeat, and note what it tells of others."""
    began = watch.attended()
    asked = await store.heartbeat()
    watch.beaten()
    if asked.beats is not None:
        watch.saw_all(asked.beats, began)
    return asked


async def look(store: Store, key: SessionKey, watch: OwnerWatch) -> tuple[LeaseState | None, bool]:
    """Say who has a session, and whether that owner is silent."""
    began = watch.attended()
    holder = await store.holder(key)
    if holder is None:
        return None, False
    return holder, watch.saw(holder.listed or holder.owner, holder.beat, began)


# Taking the right to write a session: look, ask, wait, take
#
# The caller gets a `HeldLease`, or a LeaseHeldError that says who has the session and what to do.
# Cancelling is safe at any point: an epoch that was taken and not used is simply taken over by the
# next open.


SOON, LATE, SLOWER = 0.002, 0.05, 1.6
"""Seconds between two looks at a session that somebody else holds: at first, at most; and what
each pause is longer than the one before. It begins anew with each new holder."""
AGAIN = 1.0
"""Seconds after which a holder is asked again: it may have lost a letter with its store."""
COURTESY = 0.25
"""Seconds for which a session that was just given away is left to whoever asked for it."""


async def acquire_lease(
    store: Store,
    key: SessionKey,
    *,
    me: str,
    watch: OwnerWatch,
    on_held: OnHeld,
    wait: float,
    given: int = 0,
) -> HeldLease:
    """Take the lease of a session, by handover where somebody else holds it.

    Args:
        store: Where the session is.
        key: Which session.
        me: This owner's id.
        watch: Tells whether its holder has fallen silent; it goes by own heartbeats, so
            somebody has to beat meanwhile.
        on_held: ``handover`` asks the holder and waits, ``raise`` gives up at once,
            ``steal`` waits for the holder's expiry without asking. One that is known to be
            silent is not waited for.
        wait: Seconds to wait at most, by the watch's clock.
        given: The epoch in which we gave the session to somebody who asked, if we did: then
            whoever asked comes first.

    Raises:
        LeaseHeldError: The holder is alive and did not hand over in time.

    """
    start = watch.clock()
    asking = _Asking(store, key)
    while True:
        holder, silent = await look(store, key, watch)
        now = watch.clock()
        if _is_due(holder, given) and now - start < COURTESY:
            await asking.pause(given)
        elif may_take(holder, me=me, silent=silent):
            grant = await asking.take(holder, in_time=now - start < wait + AGAIN)
            if grant is not None:
                return grant
        elif holder is not None:
            if on_held == "raise" or now - start >= wait:
                raise held(key, holder, on_held, now - start)
            if on_held == "handover":
                await asking.ask(holder, now)
            await asking.pause(holder.epoch, at_most=max(wait - (now - start), 0.001))


def _is_due(holder: LeaseState | None, given: int) -> bool:
    """Say whether somebody to whom we gave a session has not taken it yet."""
    return holder is not None and holder.released and holder.epoch == given


class _Asking:
    """Whom we have asked, and how long to wait until the next look."""

    def __init__(self, store: Store, key: SessionKey) -> None:
        self._store = store
        self._key = key
        self._asked: tuple[int, float] = (0, 0.0)
        self._epoch = 0
        self._pause = SOON
        self._doubted = False

    async def take(self, holder: LeaseState | None, *, in_time: bool) -> HeldLease | None:
        """Take it; None if somebody else was faster, or nobody knows, and to be looked at again."""
        after = 0 if holder is None else holder.epoch
        try:
            return await self._store.acquire(self._key, after=after)
        except LeaseHeldError:
            if not in_time:
                raise
        except StoreUnavailableError:
            # It may be ours already, only the answer was lost: look once more who has it.
            if self._doubted:
                raise
            self._doubted = True
        await self.pause(after)
        return None

    async def ask(self, holder: LeaseState, now: float) -> None:
        """Ask each holder at once, and again from time to time."""
        epoch, at = self._asked
        if epoch != holder.epoch or now - at >= AGAIN:
            self._asked = (holder.epoch, now)
            await self._store.request_handover(self._key, holder)

    async def pause(self, epoch: int, *, at_most: float = LATE) -> None:
        """Wait: the longer, the longer this epoch has lasted."""
        if epoch != self._epoch:
            self._epoch, self._pause = epoch, SOON
        await anyio.sleep(min(self._pause, at_most))
        self._pause = min(self._pause * SLOWER, LATE)


def held(key: SessionKey, holder: LeaseState, on_held: OnHeld, waited: float) -> LeaseHeldError:
    """Return the error for a session that somebody else goes on holding."""
    cure = (
        'open it with on_held="handover" to ask for it'
        if on_held == "raise"
        else "close it there, wait longer (wait=…), or read it with load(), which needs no lease"
    )
    who = f"process {holder.pid} on {holder.host}" if holder.pid else f"owner {holder.owner}"
    message = f"session {key} is held by {who} (waited {waited:.1f} s): {cure}"
    return LeaseHeldError(message, key=str(key), owner=holder.owner, epoch=holder.epoch)


# Heartbeats while leases are held for long, so that nobody takes for dead who is only busy


T = TypeVar("T")


async def while_beating(
    stores: Sequence[Store],
    act: Callable[[], Awaitable[T]],
    *,
    watches: Mapping[str, OwnerWatch] | None = None,
    every: float = LeaseOptions().heartbeat,
) -> T:
    """Do something, and renew this owner's heartbeat in each store until it is done.

    Who asks for a session meanwhile gets it when it is released.

    Args:
        stores: Open stores.
        act: What is done; its errors are raised as they are.
        watches: By a store's owner: what is to note the heartbeats of others.
        every: Seconds between two heartbeats.

    """
    done: list[T] = []
    failed: Exception | None = None
    async with anyio.create_task_group() as group:
        for store in stores:
            watch = (
                watches[store.owner] if watches else OwnerWatch(LeaseOptions(), anyio.current_time)
            )
            group.start_soon(_beat, store, watch, every)
        try:
            done.append(await act())
        except Exception as error:  # noqa: BLE001  # raised below, outside of the group
            failed = error
        group.cancel_scope.cancel()
    if failed is not None:
        raise failed
    return done[0]


async def _beat(store: Store, watch: OwnerWatch, every: float) -> None:
    while True:
        with contextlib.suppress(StoreError):  # what is under way will say so, if it does not pass
            await beat(store, watch)
        await anyio.sleep(every)
