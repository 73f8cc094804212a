"""Taking the right to write a session: look, ask, wait, take.

The caller gets a `Grant`, or a LeaseHeldError that says who has the session and what
to do. Cancelling is safe at any point: an epoch that was taken and not used is
simply taken over by the next open.
"""

from __future__ import annotations

import anyio

from perdure.errors import LeaseHeldError, StoreUnavailableError
from perdure.lease.terms import OnHeld, may_take
from perdure.lease.watch import OwnerWatch, look
from perdure.model.keys import SessionKey
from perdure.store import Grant, Holder, Store

__all__ = ["obtain"]

SOON, LATE, SLOWER = 0.002, 0.05, 1.6
"""Seconds between two looks at a session that somebody else holds: at first, at most; and what
each pause is longer than the one before. It begins anew with each new holder."""
AGAIN = 1.0
"""Seconds after which a holder is asked again: it may have lost a letter with its store."""
COURTESY = 0.25
"""Seconds for which a session that was just given away is left to whoever asked for it."""


async def obtain(
    store: Store,
    key: SessionKey,
    *,
    me: str,
    watch: OwnerWatch,
    on_held: OnHeld,
    wait: float,
    given: int = 0,
) -> Grant:
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


def _is_due(holder: Holder | None, given: int) -> bool:
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

    async def take(self, holder: Holder | None, *, in_time: bool) -> Grant | None:
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

    async def ask(self, holder: Holder, now: float) -> None:
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


def held(key: SessionKey, holder: Holder, on_held: OnHeld, waited: float) -> LeaseHeldError:
    """Return the error for a session that somebody else goes on holding."""
    cure = (
        'open it with on_held="handover" to ask for it'
        if on_held == "raise"
        else "close it there, wait longer (wait=…), or read it with load(), which needs no lease"
    )
    who = f"process {holder.pid} on {holder.host}" if holder.pid else f"owner {holder.owner}"
    message = f"session {key} is held by {who} (waited {waited:.1f} s): {cure}"
    return LeaseHeldError(message, key=str(key), owner=holder.owner, epoch=holder.epoch)
