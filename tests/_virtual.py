"""Virtual time for both event loops: waiting costs nothing, and the clock says it took place.

``run(backend, fn)`` runs an async function in virtual time; ``virtual(backend)`` is what
the ``anyio_backend`` fixture returns for the same. Two budgets make a lost wake-up fail
instead of hang: virtual seconds (a scope around the whole run) and scheduler steps (a run
that spins without its clock moving).

No threads in here: either clock may jump past one that works.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import trio
import trio.testing

T = TypeVar("T")

BACKENDS = ("asyncio", "trio")
SECONDS = 1e6
STEPS = 200_000


class BudgetExceededError(AssertionError):
    """The run went on for longer, or did more, than anything in it could need."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to its next timer when it has nothing else to do."""

    def __init__(self) -> None:
        self._now = 0.0
        self._steps = 0
        super().__init__(_Jumping(self))
        # Timers of exactly now are due; without this a jump might stop just short of one.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds

    def step(self) -> None:
        self._steps += 1
        if self._steps > STEPS:
            message = f"{STEPS} steps at {self._now} virtual seconds: something spins"
            raise BudgetExceededError(message)


class _Jumping(selectors.DefaultSelector):
    """Polls, and moves the loop's clock instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.step()
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            message = f"nothing will ever happen again at {self._loop.time()} virtual seconds"
            raise BudgetExceededError(message)
        self._loop.jump(max(timeout, 0))
        return ready


class _StepCount(trio.abc.Instrument):
    def __init__(self) -> None:
        self.left = STEPS
        self.scope: trio.CancelScope | None = None

    def before_io_wait(self, timeout: float) -> None:
        self.left -= 1
        if self.left < 0 and self.scope is not None:
            self.scope.cancel()


def virtual(backend: str) -> tuple[str, dict[str, Any]]:
    """Return the backend with the options that make its time virtual."""
    if backend == "asyncio":
        return backend, {"loop_factory": VirtualLoop}
    return backend, {"clock": trio.testing.MockClock(autojump_threshold=0)}


def run(
    backend: str,
    fn: Callable[..., Awaitable[T]],
    *args: object,
    seconds: float = SECONDS,
    **options: object,
) -> T:
    """Run ``fn(*args, **options)`` in virtual time, within the budgets."""
    name, backend_options = virtual(backend)
    count = _StepCount()
    main = functools.partial(_bounded, fn, count, seconds, *args, **options)
    if name == "trio":  # anyio.run of 4.11 passes no options on to it
        return trio.run(main, **backend_options, instruments=[count])
    return anyio.run(main, backend=name, backend_options=backend_options)


async def _bounded(
    fn: Callable[..., Awaitable[T]],
    count: _StepCount,
    seconds: float,
    *args: object,
    **options: object,
) -> T:
    with anyio.move_on_after(seconds):
        if not trio.lowlevel.in_trio_run():
            return await fn(*args, **options)
        with trio.CancelScope() as count.scope:
            return await fn(*args, **options)
    message = f"not done after {anyio.current_time()} virtual seconds, {count.left} steps left"
    raise BudgetExceededError(message)
