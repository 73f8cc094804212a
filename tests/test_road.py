"""The table of docs/architecture.md is the way that the code takes: traced on the file store."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import perdure
from perdure import Message

ROOT = Path(perdure.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
ROW = re.compile(r"^\| (append|save|turn|open) \| (.*) \| (.*) ?\|$", re.MULTILINE)
QUIET = perdure.Shutdown(signals=False)
LATER = perdure.Autosave(debounce=3600, max_delay=3600)


class Trace:
    """The modules that perdure's calls reach while it is on, in the order of their first call."""

    def __init__(self) -> None:
        self._modules: dict[str, None] | None = None

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self._modules is not None and event == "call":
            file = frame.f_code.co_filename
            if file.startswith(f"{ROOT}/"):
                self._modules[file.removeprefix(f"{ROOT}/")] = None

    @contextmanager
    def on(self) -> Iterator[dict[str, None]]:
        modules: dict[str, None] = {}
        self._modules = modules
        try:
            yield modules
        finally:
            self._modules = None


@pytest.fixture
def trace() -> Iterator[Trace]:
    trace, before = Trace(), sys.getprofile()
    gc.collect()
    gc.disable()  # what other tests have left behind is not on the road
    threading.setprofile(trace)
    sys.setprofile(trace)
    yield trace
    sys.setprofile(before)
    threading.setprofile(None)
    gc.enable()


def packages(modules: Iterable[str]) -> set[str]:
    return {module.partition("/")[0] for module in modules} - {"_lib"}


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
            with trace.on() as roads["save"]:
                await session.save()
            await say(session)
            with trace.on() as roads["turn"]:
                await say(session)
    async with perdure.connect(folder, shutdown=QUIET, autosave=LATER) as sessions:
        async with sessions.open("other") as session:
            await say(session)
        with trace.on() as roads["open"]:
            async with sessions.open("ada") as session:
                session.context()
    return roads


async def test_the_road_is_as_the_page_shows_it(trace: Trace, tmp_path: Path) -> None:
    await drive(trace, tmp_path / "first")  # imports what is imported when it is first used
    roads = await drive(trace, tmp_path / "second")

    page = {act: (stations, also) for act, stations, also in ROW.findall(PAGE.read_text())}
    assert page.keys() == roads.keys()
    for act, road in roads.items():
        stations, also = (re.findall(r"`([^`]+)`", column) for column in page[act])
        assert [module for module in road if module in stations] == stations, act
        assert packages(road) == packages(stations) | set(also), act
