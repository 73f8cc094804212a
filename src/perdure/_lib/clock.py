"""The running event loop's clock and its timers, as plain functions.

The clock is looked up once and then called for each record, so it has to be cheap. It is
the one that the loop's own timers and cancel scopes use, virtual clocks of tests included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["loop_clock", "loop_timer", "on_trio"]


def loop_clock() -> Callable[[], float]:
    """Return the clock of the event loop that runs now: seconds that only grow.

    Raises:
        RuntimeError: No event loop is running here.

    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        current: Callable[[], float] = trio.lowlevel.current_clock().current_time
        return current
    import asyncio
    import time

    loop = asyncio.get_running_loop()
    # The standard loops only pass on to time.monotonic: spare the step in between.
    if type(loop).time is asyncio.BaseEventLoop.time:
        return time.monotonic
    return loop.time


def on_trio() -> bool:
    """Say whether trio runs this."""
    trio = sys.modules.get("trio")
    return trio is not None and trio.lowlevel.in_trio_run()


def loop_timer() -> Callable[[float, Callable[[], None]], Callable[[], None]]:
    """Return what has the event loop that runs now call a function after so many seconds.

    No task of anybody's is needed for it on asyncio. What it returns takes the call back.
    The function must not raise. It sees no context variables of whoever asks for it: a timer that
    goes on would keep them alive.

    Raises:
        RuntimeError: No event loop is running here.

    """
    if on_trio():
        return _later_on_trio
    import asyncio
    from contextvars import Context

    loop = asyncio.get_running_loop()
    return lambda seconds, call: loop.call_later(seconds, call, context=Context()).cancel


def _later_on_trio(seconds: float, call: Callable[[], None]) -> Callable[[], None]:
    import trio

    scope = trio.CancelScope()

    async def wait() -> None:
        with scope:
            await trio.sleep(seconds)
            call()

    trio.lowlevel.spawn_system_task(wait, name="perdure timer")
    return scope.cancel
