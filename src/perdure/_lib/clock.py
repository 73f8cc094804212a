"""The running event loop's clock, as a plain function.

Looked up once and then called for each record, so it has to be cheap. It is the clock
that the loop's own timers and cancel scopes use, virtual clocks of tests included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["loop_clock"]


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
