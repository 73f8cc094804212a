"""One operation at a time on a session: its load, its close, a change from outside.

The operation is entered in the manager's table under the session's key; others wait for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

import anyio

from perdure.records.keys import SessionKey


class PendingLoad:
    """Something under way with a session, for others to wait for."""

    __slots__ = ("done", "error", "scope")

    def __init__(self) -> None:
        self.done: anyio.Event = anyio.Event()
        self.error: Exception | None = None
        """Why a load has failed."""
        self.scope: anyio.CancelScope = anyio.CancelScope()
        """Around a load, if it is one: nobody wants that any more once its manager stops."""


PendingLoads: TypeAlias = dict[SessionKey, PendingLoad]
"""What is under way, one a session at most."""


async def wait_idle(pending_loads: PendingLoads, key: SessionKey) -> None:
    """Wait until nothing is under way with a session."""
    while (pending_load := pending_loads.get(key)) is not None:
        await pending_load.done.wait()


@asynccontextmanager
async def exclusive(pending_loads: PendingLoads, key: SessionKey) -> AsyncGenerator[None, None]:
    """Be exclusive with a session, once others are done with it."""
    await wait_idle(pending_loads, key)
    with try_exclusive(pending_loads, key):
        yield


@contextmanager
def try_exclusive(pending_loads: PendingLoads, key: SessionKey) -> Iterator[bool]:
    """Be exclusive with a session; False if somebody is already, and then one is not."""
    if key in pending_loads:
        yield False
        return
    pending_load = pending_loads[key] = PendingLoad()
    try:
        yield True
    finally:
        del pending_loads[key]
        pending_load.done.set()
