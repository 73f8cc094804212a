"""The running event loop: its clock and timers, one-shot events, and which objects belong to it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal, Protocol, final

from perdure.errors import StoreUnavailableError

if TYPE_CHECKING:
    import asyncio


# The running event loop's clock and its timers, as plain functions
#
# The clock is looked up once and then called for each record, so it has to be cheap. It is the one
# that the loop's own timers and cancel scopes use, virtual clocks of tests included.


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


# A bell: was_set once, heard by the one who waits for it
#
# What ``anyio.Event`` is for everything else, for where every save needs several of them: one
# waiter, and the running event loop is looked up once for all bells, not once for each.


class OneShotEvent(Protocol):
    """Wait, or let the one who waits go on. Ring it on the event loop that it is for."""

    was_set: bool

    def set(self) -> None:
        """Let the one who waits, or will wait, go on."""

    def wait(self) -> Awaitable[None]:
        """Wait for the bell; at most one may."""
        ...


def event_maker() -> Callable[[], OneShotEvent]:
    """Return what makes bells for the running event loop.

    Raises:
        RuntimeError: No event loop is running here.

    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        return _OnTrio
    import asyncio

    loop = asyncio.get_running_loop()
    return lambda: _OnAsyncio(loop)


def soon_maker() -> Callable[..., object]:
    """Return what calls a function, with arguments, in the next step of the running event loop.

    The function must not raise.

    Raises:
        RuntimeError: No event loop is running here.

    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        return trio.lowlevel.current_trio_token().run_sync_soon  # type: ignore[no-any-return]  # trio may be missing
    import asyncio

    return asyncio.get_running_loop().call_soon


@final
class _OnAsyncio:
    __slots__ = ("_future", "was_set")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[None] = loop.create_future()
        self.was_set = False

    def set(self) -> None:
        self.was_set = True
        if not self._future.done():  # it is, if the one who waited was cancelled
            self._future.set_result(None)

    def wait(self) -> Awaitable[None]:
        return self._future


@final
class _OnTrio:
    __slots__ = ("_event", "was_set")

    def __init__(self) -> None:
        import trio

        self._event = trio.Event()
        self.was_set = False

    def set(self) -> None:
        self.was_set = True
        self._event.set()

    def wait(self) -> Awaitable[None]:
        return self._event.wait()


# Where an object belongs: one event loop, one thread, one process
#
# Cheap enough for every call: a thread id, a fork counter and the running loop are compared,
# nothing is looked up by name.


Stray = Literal["fork", "thread", "loop"]

_forks = 0


def _forked() -> None:
    global _forks  # noqa: PLW0603  # counted once per fork, by the interpreter
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Affinity:
    """Remember the loop, thread and process that made this; ask ``stray`` before use."""

    __slots__ = ("_forks", "_thread", "loop", "running")

    def __init__(self) -> None:
        self._forks = _forks
        self._thread = threading.get_ident()
        self.running: Callable[[], object] = _running_loop()
        """Returns the loop that the caller runs in, None in a forked child."""
        self.loop: object = self.running()
        """Where this was made: who is at home if ``running() is loop``, most cheaply asked."""

    def stray(self) -> Stray | None:
        """Return how the caller is elsewhere, None when it is at home."""
        # No two threads run the same loop: who runs it is in its thread.
        if self.running() is self.loop is not None and self._forks == _forks:
            return None
        if self._forks != _forks:
            return "fork"
        if self._thread != threading.get_ident():
            return "thread"
        return None if self.running() is self.loop else "loop"


def _running_loop() -> Callable[[], object]:
    """Return a function that returns the running loop, None when there is none."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        lowlevel = trio.lowlevel
        forks = _forks

        def token() -> object:
            loop = forks == _forks and lowlevel.in_trio_run()
            return lowlevel.current_trio_token() if loop else None

        return token
    # Knows a forked child by itself.
    from asyncio import _get_running_loop

    return _get_running_loop


# What is said to whoever uses a store that is not open in this process


def unopened(place: str, *, elsewhere: bool) -> StoreUnavailableError:
    """Return the error for a store that was not opened, or in another process *elsewhere*."""
    message = (
        f"the store at {place} was opened in another process: open a store of its own in this one"
        if elsewhere
        else f"the store at {place} is not open: await its open() first"
    )
    return StoreUnavailableError(message, path=place)
