"""Each task and thread that perdure starts has a name that says whose it is."""

from __future__ import annotations

import ast
import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import trio

import perdure
import perdure.sync
from perdure import Message, SessionManager
from perdure.observe import Metrics
from tests.source_tree import SRC

STARTS = {"start_soon", "create_task", "spawn_system_task", "threading.Thread", "Threads"}
POOLS = {"ThreadPoolExecutor": "thread_name_prefix"}
NAMED = {"_task_name(act)", "name", "self._name", "THREAD"}
"""Names that their callers give, and begin so as well."""


def starts(path: Path) -> Iterator[tuple[str, ast.expr | None]]:
    """Return the calls in a module that start a task or a thread, with the name that each gives."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            called = called if called in STARTS else called.rpartition(".")[2]
            if called in STARTS or called in POOLS:
                word = POOLS.get(called, "name")
                names = [one.value for one in node.keywords if one.arg == word]
                yield f"{path.relative_to(SRC)}:{node.lineno}", names[0] if names else None


def is_ours(name: ast.expr | None) -> bool:
    if name is None:
        return False
    return ast.unparse(name) in NAMED or ast.unparse(name).lstrip("f'").startswith("perdure:")


def test_every_start_in_the_source_gives_a_name() -> None:
    paths = [path for path in (SRC / "perdure").rglob("*.py") if "testing" not in path.parts]
    found = [start for path in sorted(paths) for start in starts(path)]
    assert len(found) > 30
    assert [place for place, name in found if not is_ours(name)] == []


async def in_use(sessions: SessionManager) -> None:
    """Have a manager start what it starts for a session."""
    Metrics(sessions)
    sessions.on("saved", lambda _: anyio.sleep(0))
    async with sessions.open("ada") as session:
        async with session.turn():
            session.append(Message.user("Hello"))
        session.append(Message.user("unsaved"))
        await anyio.sleep(0)


def is_foreign(name: str) -> bool:
    return not name.startswith(("perdure:", "MainThread", "AnyIO worker thread", "asyncio_"))


@pytest.mark.parametrize("url", ["memory:", "agents", "sqlite:///agents.db"])
def test_asyncio_lists_them(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: set[str] = set()

    async def main() -> None:
        loop, own, before = (
            asyncio.get_running_loop(),
            asyncio.current_task(),
            threading.enumerate(),
        )

        def factory(
            loop: asyncio.AbstractEventLoop, coro: object, **options: object
        ) -> asyncio.Task[object]:
            task = asyncio.Task(coro, loop=loop, **options)  # type: ignore[arg-type]
            started.append(task)
            return task

        started: list[asyncio.Task[object]] = []
        loop.set_task_factory(factory)  # type: ignore[arg-type]
        async with perdure.connect(url) as sessions:
            await in_use(sessions)
            threads = [thread for thread in threading.enumerate() if thread not in before]
            assert own not in started
        names.update(task.get_name() for task in started)
        names.update(thread.name for thread in threads)

    asyncio.run(main())
    assert {name for name in names if is_foreign(name)} == set()
    assert {"perdure:host", "perdure:Metrics._watch_loop"} <= names


def test_trio_lists_them() -> None:
    names: list[str] = []

    class Started(trio.abc.Instrument):
        def task_spawned(self, task: trio.lowlevel.Task) -> None:
            names.append(task.name)

    async def main() -> None:
        trio.lowlevel.add_instrument(Started())
        async with perdure.connect("memory:") as sessions:
            await in_use(sessions)

    trio.run(main)
    assert [name for name in names if is_foreign(name)] == []
    assert {"perdure:host", "perdure:host watch"} <= set(names)


def test_the_threads_of_blocking_code() -> None:
    before = threading.enumerate()
    with perdure.sync.connect("memory:") as sessions:
        sessions.on("saved", lambda _: None)
        with sessions.open("ada") as session:
            session.append(Message.user("Hello"))
            session.save()
        names = {thread.name for thread in threading.enumerate() if thread not in before}
    assert names == {"perdure:loop", "perdure:hooks"}
