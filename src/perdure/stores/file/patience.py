"""Waiting, without a thread, for what others are about to end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from perdure.stores.file.reading import Plan
from perdure.stores.file.writing import Writer

__all__ = ["idle", "settled"]

_POLL = 0.01
_SETTLE = 1.0
"""Seconds that a reader waits for a takeover to end."""


async def idle(writer: Writer) -> None:
    """Wait until an abandoned write of a session has ended."""
    while writer.lock.locked():  # noqa: ASYNC110  # a thread's lock: nothing to be woken by
        await anyio.sleep(_POLL)


async def settled(look: Callable[[], Awaitable[Plan]]) -> Plan:
    """Look where a log is until no takeover is under way, or for as long as a reader waits."""
    deadline = anyio.current_time() + _SETTLE
    pause = _POLL
    while True:
        found = await look()
        if found.settled or anyio.current_time() >= deadline:
            return found
        await anyio.sleep(pause)
        pause *= 2
