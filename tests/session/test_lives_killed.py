"""Forks, copies, renames, deletions and prunings that are killed anywhere: done again, they are whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure import Message, PerdureError, Shutdown, connect
from perdure.records.keys import SessionKey
from perdure.session.manager import SessionManager
from perdure.session.retention import Retention
from perdure.store import Store
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore
from tests.session.lives import converse, looks, said

pytestmark = pytest.mark.deep

QUIET = Shutdown(signals=False)
GIVEN_UP = Shutdown(signals=False, deadline=0.1, turn_grace=0, hard_grace=0.1)
Act = Callable[[SessionManager], Awaitable[object]]

ACTS: dict[str, Act] = {
    "fork": lambda sessions: sessions.fork("a", "new", at="turn one"),
    "copy": lambda sessions: sessions.copy("a", "new"),
    "rename": lambda sessions: sessions.rename("a", "new"),
    "delete": lambda sessions: sessions.delete("a"),
    "forget": lambda sessions: sessions.forget(id="a"),
    "prune": lambda sessions: sessions.prune(Retention(keep_turns=1), id="a"),
}
GOES = {"rename", "delete", "forget"}
"""What ends the session of the old name."""
STEP = int(os.environ.get("PERDURE_KILL_STEP", "3"))
"""Kills at every third step of a call; 1 for all of them, which takes its time."""
acts = pytest.mark.parametrize("name", list(ACTS))


async def prepared(sessions: SessionManager) -> dict[str, Any]:
    """Make a session with forks; return what each looks like."""
    await converse(sessions, "a", "one")
    await sessions.fork("a", "fork")
    await converse(sessions, "a", "two")
    await converse(sessions, "fork", "mine")
    await sessions.post("a", Message.user("posted"))
    return {id: await looks(await sessions.load(id)) for id in ("a", "fork")}


async def check_between(sessions: SessionManager, name: str, before: dict[str, Any]) -> None:
    """Nothing is lost, wherever it was killed."""
    assert await looks(await sessions.load("fork")) == before["fork"]
    old, new = await sessions.load("a"), await sessions.load("new")
    if name == "rename":
        whole = [await looks(view) for view in (old, new) if view is not None and said_much(view)]
        assert whole
        assert all(look == before["a"] for look in whole)
    elif name == "prune" or (name not in GOES and old is not None):
        assert old is not None
        look = await looks(old)
        assert look["said"] == before["a"]["said"]
        assert look["memory"] == before["a"]["memory"]


def said_much(view: Any) -> bool:
    return bool(view.context())


async def check_after(sessions: SessionManager, name: str, before: dict[str, Any]) -> None:
    """Done again, it is whole."""
    assert await looks(await sessions.load("fork")) == before["fork"]
    ids = {info.key.agent for info in await sessions.list()}
    assert ids == {"fork"} | ({"a"} - ({"a"} if name in GOES else set())) | (
        {"new"} if name in {"fork", "copy", "rename"} else set()
    )
    if name in {"copy", "rename"}:
        assert await looks(await sessions.load("new")) == before["a"]
        async with sessions.open("new") as session:
            assert said(session).count("posted") == (name == "rename")  # a copy leaves posts
    if name == "fork":
        async with sessions.open("new") as session:
            assert [message.text for message in session.context()] == ["one", "re one"]
    if name == "prune":
        look = await looks(await sessions.load("a"))
        assert look["told"] == before["a"]["told"][-2:]
        assert {**look, "told": 0} == {**before["a"], "told": 0}
    async with sessions.open("fork") as session:
        assert await looks(session) == before["fork"]


@pytest.mark.parametrize("how", ["transient", "in_doubt_applied"])
@acts
async def test_a_store_that_fails_anywhere_leaves_what_can_be_done_again(
    name: str, how: str
) -> None:
    """Each call fails in turn; the process is given up there, as if it had died."""
    nth = 1
    while True:
        backing = MemoryBacking()
        async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
            before = await prepared(sessions)
        store = MemoryStore(backing=backing, owner="doomed")
        faulty = Switched(store, nth, how)
        doomed = await connect(faulty, shutdown=GIVEN_UP)
        faulty.armed = True
        with contextlib.suppress(PerdureError):
            await ACTS[name](doomed)
        failed, faulty.armed = faulty.failed, False
        backing.owners["doomed"].alive = False
        async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
            await check_between(sessions, name, before)
            await ACTS[name](sessions)
            await check_after(sessions, name, before)
            if name == "prune":
                log = store.read_log(SessionKey("a"))
                stored = [record.payload async for chunk in log for record in chunk.records]
                assert not any(b"re one" in payload for payload in stored)
        await doomed.aclose()
        if not failed:
            break
        nth += 1
    assert nth > 5


class Switched:
    """Fail the n-th call that changes or reads anything, and every one after it."""

    def __init__(self, store: Store, nth: int, how: str) -> None:
        self._store = store
        self._how = how
        self._left = nth
        self.armed = False
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        spared = {
            "capabilities",
            "owner",
            "location",
            "aclose",
            "open",
            "heartbeat",
            "wait_for_notification",
        }
        if name in spared or not self.armed:
            return getattr(self._store, name)
        self._left -= 1
        if self._left > 0:
            return getattr(self._store, name)
        how = self._how if not self.failed else "transient"
        self.failed = True
        return getattr(FaultyStore(self._store, how=how, times=None), name)  # type: ignore[arg-type]


# kill -9


class Dying:
    """Kill the process at the n-th call, before it or behind it."""

    def __init__(self, store: Store, nth: int) -> None:
        self._store = store
        self._nth = nth
        self.calls = -1

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in WRITES or self.calls < 0:
            return found

        async def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls * 2 - 1 == self._nth:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = await found(*args, **options)
            if self.calls * 2 == self._nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call


WRITES = {
    "ack",
    "acquire",
    "append_many",
    "delete",
    "enqueue",
    "publish",
    "put_blobs",
    "release",
} | {
    "remove_blobs",
    "scrub",
    "trim",
    "write_documents",
}


def run_and_die(place: Path, name: str, nth: int) -> bool:
    """Do an act in a process of its own, which is killed at a call; False if it ended before."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            anyio.run(act_dying, place, name, nth)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


async def act_dying(place: Path, name: str, nth: int) -> None:
    dying = Dying(FileStore(place), nth)
    async with connect(dying, shutdown=QUIET) as sessions:  # type: ignore[arg-type]
        dying.calls = 0
        await ACTS[name](sessions)
        dying.calls = -1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@acts
def test_a_kill_at_any_call_leaves_what_can_be_done_again(name: str, tmp_path: Path) -> None:
    async def prepare() -> dict[str, Any]:
        async with connect(tmp_path / "0", shutdown=QUIET) as sessions:
            return await prepared(sessions)

    async def finish(place: Path) -> None:
        async with connect(place, shutdown=QUIET) as sessions:
            await check_between(sessions, name, before)
            await ACTS[name](sessions)
            await check_after(sessions, name, before)

    before = anyio.run(prepare)
    nth, killed = 1 - STEP, True
    while killed:
        nth += STEP
        place = tmp_path / str(nth)
        shutil.copytree(tmp_path / "0", place)
        killed = run_and_die(place, name, nth)
        anyio.run(finish, place)
    assert nth > 5
