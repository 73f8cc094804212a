"""The ways in which people start an event loop.

``run(runner, main)`` starts ``main`` as such a program does. Nothing here goes through
pytest's or anyio's own runner unless the runner is called so.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

__all__ = ["LOOPS", "SERVERS", "run"]

Main = Callable[[], Coroutine[Any, Any, Any]]

SERVERS: Final = {"uvicorn": "asyncio", "uvicorn-uvloop": "uvloop"}
"""Runners that own the loop and its signals: the program is an application; with its loop."""


def _asyncio(main: Main) -> None:
    import asyncio

    asyncio.run(main())


def _anyio(main: Main) -> None:
    import anyio

    anyio.run(main)


def _anyio_trio(main: Main) -> None:
    import anyio

    anyio.run(main, backend="trio")


def _trio(main: Main) -> None:
    import trio

    trio.run(main)


def _uvloop(main: Main) -> None:
    import uvloop

    uvloop.run(main())


def _notebook(main: Main) -> None:
    """Run it as a cell: a task with a context of its own, on a loop that goes on behind it."""
    import asyncio
    import contextvars
    import sys
    import types

    sys.modules["ipykernel"] = types.ModuleType("ipykernel")  # by which a kernel is known
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    failed: list[BaseException] = []

    async def cell() -> None:
        try:
            await main()
        except BaseException as error:  # raised where the kernel was started
            failed.append(error)
        finally:
            loop.call_later(0.2, loop.stop)

    loop.call_soon(lambda: tasks.append(loop.create_task(cell(), context=contextvars.Context())))
    tasks: list[object] = []
    try:
        loop.run_forever()
    finally:
        loop.close()
    if failed:
        raise failed[0]


LOOPS: Final[dict[str, Callable[[Main], None]]] = {
    "asyncio": _asyncio,
    "anyio": _anyio,
    "anyio-trio": _anyio_trio,
    "trio": _trio,
    "uvloop": _uvloop,
    "notebook": _notebook,
}


def run(runner: str, main: Main) -> None:
    """Run ``main()`` under one of `LOOPS`."""
    LOOPS[runner](main)
