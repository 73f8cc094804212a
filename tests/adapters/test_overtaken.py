"""A worker that was stopped and overtaken, on every adapter: its next write names who has it now."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.lease import LeaseOptions
from tests.adapters.acts import ADAPTERS, GUARD

LEASE = LeaseOptions(heartbeat=0.1, ttl=1)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The SDKs run on asyncio."""
    return "asyncio"


async def write_twice(adapter: Any, url: str, pipe: Connection) -> None:
    async with perdure.connect(url, lease=LEASE) as sessions:
        write = adapter(sessions).write
        await write("mine")
        pipe.send("ready")
        pipe.recv()  # it is stopped here, and overtaken
        try:
            await write("late")
        except Exception as error:  # whatever it is, it is looked at
            pipe.send(f"{error}")
        pipe.send([lost.id for lost in sessions.lost])
        for lost in sessions.lost:
            await lost.discard_unsaved()
    pipe.send(sessions.shutdown_report is not None and sessions.shutdown_report.lost)


def worker(adapter: Any, url: str, pipe: Connection) -> None:
    asyncio.run(write_twice(adapter, url, pipe))


@pytest.mark.deep
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
async def test_a_stopped_worker_is_refused_and_told_who_continued(
    tmp_path: Path, adapter: Any
) -> None:
    async with perdure.connect("memory:") as sessions:
        adapter(sessions)  # or skip, where its SDK is missing
    url = str(tmp_path)  # SQLite would stay locked if it were stopped amid a heartbeat
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=worker, args=(adapter, url, there), daemon=True)
    process.start()
    there.close()
    assert await asyncio.to_thread(here.recv) == "ready"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    async with perdure.connect(url, lease=LEASE) as sessions:
        acts = adapter(sessions)
        await acts.write("taken over")
        os.kill(process.pid, signal.SIGCONT)
        here.send("go on")
        told = await asyncio.to_thread(here.recv)
        assert f"process {os.getpid()} on" in told
        lost = await asyncio.to_thread(here.recv)
        assert len(lost) == 1  # it may be more than the adapter has appended
        assert await asyncio.to_thread(here.recv) == ()
        assert await acts.read() == ["mine", "taken over"]
    await asyncio.to_thread(process.join, GUARD)
