"""Print the modules that an append, a save, a turn and an open of a warm session reach.

A program of its own: a profile reaches only threads that were started after it was set.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import anyio

import perdure
from perdure import Message

ROOT = Path(perdure.__file__).parent
QUIET = perdure.Shutdown(signals=False)
LATER = perdure.Autosave(debounce=3600, max_delay=3600)


class Trace:
    """The modules that perdure's calls reach while it is on, in the order of their first call."""

    def __init__(self) -> None:
        self._modules: dict[str, None] | None = None
        self._beside: dict[str, None] | None = None
        self._loop = threading.get_ident()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self._modules is not None and event == "call":
            file = frame.f_code.co_filename
            if file.startswith(f"{ROOT}/"):
                is_beside = self._beside is not None and threading.get_ident() != self._loop
                (self._beside if is_beside else self._modules)[file.removeprefix(f"{ROOT}/")] = None

    @contextmanager
    def on(self, *, apart: bool = False) -> Iterator[dict[str, None]]:
        """Trace; *apart*: the event loop's first, since its thread runs beside it by chance."""
        modules: dict[str, None] = {}
        beside: dict[str, None] = {}
        self._beside = beside if apart else None
        self._modules = modules
        try:
            yield modules
        finally:
            self._modules = None
            for module in beside:
                modules.setdefault(module)


async def say(session: perdure.Session) -> None:
    async with session.turn():
        session.append(Message.user("hello"))


async def drive(trace: Trace, folder: Path) -> dict[str, dict[str, None]]:
    """Append, save, run a turn and open, on a session that is warm; return what each reached."""
    roads: dict[str, dict[str, None]] = {}
    async with perdure.connect(folder, shutdown=QUIET, autosave=LATER) as sessions:
        async with sessions.open("ada") as session:
            await say(session)
            with trace.on() as roads["append"]:
                session.append(Message.user("hello"))
            with trace.on(apart=True) as roads["save"]:
                await session.save()
            await say(session)
            with trace.on(apart=True) as roads["turn"]:
                await say(session)
    async with perdure.connect(folder, shutdown=QUIET, autosave=LATER) as sessions:
        async with sessions.open("other") as session:
            await say(session)
        with trace.on() as roads["open"]:
            async with sessions.open("ada") as session:
                session.context()
    return roads


async def main(folder: Path) -> dict[str, dict[str, None]]:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    await drive(trace, folder / "first")  # imports what is imported when it is first used
    return await drive(trace, folder / "second")


if __name__ == "__main__":
    roads = anyio.run(main, Path(sys.argv[2]), backend=sys.argv[1])
    print(json.dumps({act: list(road) for act, road in roads.items()}))
