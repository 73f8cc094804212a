"""A clock for autosave that stands still until it is moved: what tests give to a manager.

Only autosave goes by it: debounce, ceiling, backoff, the breaker's probes, hibernation.
Leases, timeouts and deadlines are agreements with others, and stay with the loop's clock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from anyio.lowlevel import checkpoint

from perdure.session.base import SessionBase
from perdure.session.runtime import Runtime


class Clock(Protocol):
    """Seconds that only grow, and only when somebody says so."""

    def __call__(self) -> float:
        """Return the time."""
        ...

    def drive(self, catch_up: Callable[[], Awaitable[float]]) -> None:
        """Await ``catch_up`` from now on each time that the clock was moved.

        It returns when there will be more to do.
        """
        ...


async def catch_up(runtime: Runtime) -> float:
    """Do what autosave has to do by now, and return when it will have more to do."""
    due = await runtime.saver.catch_up()
    # Sessions that became idle leave memory in tasks of their own. Those begin by the
    # second checkpoint: trio runs what is ready in any order.
    await checkpoint()
    await checkpoint()
    for key, pending_load in list(runtime.pending_loads.items()):
        session = runtime.sessions.get(key)
        if session is not None and _at_rest(session):
            await pending_load.done.wait()
    return due


def _at_rest(session: SessionBase) -> bool:
    """Whether leaving memory needs nothing of anybody: no turn's end, and no save."""
    return not session._pins and not session._turns.busy and session._tracked.clean
