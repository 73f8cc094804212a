"""Taking the right to write a session: look, ask, wait, take.

The caller gets a `Grant`, or a LeaseHeldError that says who has the session and what
to do. Cancelling is safe at any point: an epoch that was taken and not used is
simply taken over by the next open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import anyio

from perdure.errors import LeaseHeldError
from perdure.lease.terms import Lease, OnHeld, Watch, may_take, watched
from perdure.model.keys import SessionKey
from perdure.store import Grant, Holder, Store

__all__ = ["obtain"]

POLL = 0.05
"""Seconds between two looks at a session that somebody else holds."""


async def obtain(
    store: Store,
    key: SessionKey,
    *,
    me: str,
    lease: Lease,
    on_held: OnHeld,
    wait: float,
    clock: Callable[[], float],
) -> Grant:
    """Take the lease of a session, by handover where somebody else holds it.

    Args:
        store: Where the session is.
        key: Which session.
        me: This owner's id.
        lease: The heartbeat's terms.
        on_held: ``handover`` asks the holder and waits, ``raise`` gives up at once,
            ``steal`` waits for the holder's expiry without asking.
        wait: Seconds to wait at most.
        clock: A monotonic clock.

    Raises:
        LeaseHeldError: The holder is alive and did not hand over in time.

    """
    start = clock()
    watch: Watch | None = None
    asked: set[int] = set()
    while True:
        holder = await store.holder(key)
        now = clock()
        if holder is not None:
            watch = watched(watch, holder, now)
        if may_take(holder, watch, me=me, on_held=on_held, ttl=lease.ttl, now=now):
            with contextlib.suppress(LeaseHeldError):  # somebody else was faster: look again
                return await store.acquire(key, after=0 if holder is None else holder.epoch)
        elif holder is not None:
            if on_held == "raise" or now - start >= wait:
                raise held(key, holder, on_held, now - start)
            if on_held == "handover":
                await _ask(store, key, holder, asked)
            await anyio.sleep(min(POLL, max(wait - (now - start), 0.001)))


async def _ask(store: Store, key: SessionKey, holder: Holder, asked: set[int]) -> None:
    """Ask each holder once."""
    if holder.epoch not in asked:
        asked.add(holder.epoch)
        await store.request_handover(key, holder)


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
