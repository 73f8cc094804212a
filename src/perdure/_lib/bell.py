"""A bell: rung once, heard by the one who waits for it.

What ``anyio.Event`` is for everything else, for where every save needs several of them:
one waiter, and the running event loop is looked up once for all bells, not once for each.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    import asyncio

__all__ = ["Bell", "bell_maker", "soon_maker"]


class Bell(Protocol):
    """Wait, or let the one who waits go on. Ring it on the event loop that it is for."""

    rung: bool

    def ring(self) -> None:
        """Let the one who waits, or will wait, go on."""

    def wait(self) -> Awaitable[None]:
        """Wait for the bell; at most one may."""
        ...


def bell_maker() -> Callable[[], Bell]:
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
    __slots__ = ("_future", "rung")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[None] = loop.create_future()
        self.rung = False

    def ring(self) -> None:
        self.rung = True
        if not self._future.done():  # it is, if the one who waited was cancelled
            self._future.set_result(None)

    def wait(self) -> Awaitable[None]:
        return self._future


@final
class _OnTrio:
    __slots__ = ("_event", "rung")

    def __init__(self) -> None:
        import trio

        self._event = trio.Event()
        self.rung = False

    def ring(self) -> None:
        self.rung = True
        self._event.set()

    def wait(self) -> Awaitable[None]:
        return self._event.wait()
