"""The example tells a slow disk, a lock and a busy loop apart, each of them a real one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

import perdure
from examples.why_slow import watch
from perdure import Autosave, Message, Session, Shutdown
from perdure.store import Store
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing import SwitchedStore

ROOT = Path(__file__).parents[2]
HOLDER = """
import sqlite3, sys
con = sqlite3.connect(sys.argv[1], isolation_level=None)
con.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def told_of(store: Store) -> AsyncGenerator[tuple[Session, list[str]], None]:
    """Open a session of a watched manager; yield what is told with it."""
    told: list[str] = []
    async with perdure.connect(
        store, autosave=Autosave(debounce=0.05), shutdown=Shutdown(signals=False, spill=False)
    ) as sessions:
        watch(sessions, told.append)
        async with sessions.open("ada") as session:
            session.append(Message.user("fast"))
            await session.save()
            assert told == []
            yield session, told


async def test_a_slow_disk() -> None:
    store = SwitchedStore(MemoryStore())
    async with told_of(store) as (session, told):
        store.delay = 0.6
        session.append(Message.user("slow"))
        await session.save()
        store.delay = 0.0
    assert [line.partition(":")[0] for line in told] == ["slow disk"]
    assert "the store took 0.6 s for 1 records" in told[0]


async def test_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "agents.db"
    async with told_of(SqliteStore(path, timeout=0.1)) as (session, told):
        command = [sys.executable, "-c", HOLDER, str(path)]
        with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            session.append(Message.user("waits"))
            with anyio.fail_after(60):
                while not told:
                    await anyio.sleep(0.01)
            holder.communicate("")
        await session.save()
    assert told[0].startswith("lock: session ada is saved again in ")
    assert "another process writes to it" in told[0]


async def test_a_busy_loop() -> None:
    async with told_of(MemoryStore()) as (session, told):
        session.append(Message.user("waits"))
        await anyio.sleep(0)
        time.sleep(1.3)  # noqa: ASYNC251  # that is the fault
        with anyio.fail_after(60):
            while not told:
                await anyio.sleep(0.01)
    assert [line.partition(" for ")[0] for line in told] == [
        "busy loop: something blocked the event loop"
    ]


def test_the_program_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "why_slow.py")]
    done = subprocess.run(
        [*command, str(tmp_path / "agents")], env={**os.environ}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith("records are saved")
