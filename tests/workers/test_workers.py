"""Four processes fight for one session: none starves, nothing is lost or doubled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from perdure import Message, Shutdown, connect
from tests.workers.worker import AGENT

ROOT = Path(__file__).parents[2]
WORKERS, TURNS = 4, 25


def start(url: str, name: str, turns: int) -> subprocess.Popen[str]:
    """Start a worker, and wait until it is ready."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.workers.worker", url, name, str(turns)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    return worker


def go(worker: subprocess.Popen[str]) -> None:
    """Let a worker begin."""
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()


async def said(url: str) -> list[str]:
    """Return all messages, as somebody who comes later finds them."""
    async with connect(url, shutdown=Shutdown(signals=False)) as sessions:
        view = await sessions.load(AGENT)
        assert view is not None
        history = await view.history(limit=100_000)
    return [item.value.text for item in history if item.kind == "message"]


def urls(tmp_path: Path) -> dict[str, str]:
    return {"file": f"file:{tmp_path / 'data'}", "sqlite": f"sqlite:///{tmp_path / 'data.db'}"}


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_four_processes_take_turns_on_one_session(tmp_path: Path, kind: str) -> None:
    url = urls(tmp_path)[kind]
    workers = [start(url, f"w{place}", TURNS) for place in range(WORKERS)]
    try:
        for worker in workers:
            go(worker)
        told = [json.loads(worker.communicate(timeout=240)[0]) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert [one["done"] for one in told] == [TURNS] * WORKERS  # none starved
    found = anyio.run(said, url)
    for place in range(WORKERS):  # each one's own: once, whole, in order
        mine = [text for text in found if text.startswith(f"w{place}-")]
        wanted = [f"w{place}-{turn}" for turn in range(TURNS)]
        assert mine == [text for one in wanted for text in (one, f"{one}!")]
    assert len(found) == 2 * TURNS * WORKERS
    if kind == "file":  # which tells a holder at once that others want the session
        assert sum(one["epochs"] for one in told) > 2 * WORKERS


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_a_worker_that_is_killed_amid_the_fight_loses_no_turn_of_others(
    tmp_path: Path, kind: str
) -> None:
    url = urls(tmp_path)[kind]
    victim = start(url, "victim", 10_000)
    workers = [start(url, f"w{place}", TURNS) for place in range(2)]
    try:
        for worker in (victim, *workers):
            go(worker)
        told = []
        for number, worker in enumerate(workers):
            told.append(json.loads(worker.communicate(timeout=240)[0]))
            if number == 0:
                victim.kill()
    finally:
        for worker in (victim, *workers):
            worker.kill()
            worker.communicate()
    assert [one["done"] for one in told] == [TURNS] * 2
    found = anyio.run(said, url)
    assert len(found) == len(set(found))
    for place in range(2):
        assert [text for text in found if text.startswith(f"w{place}-")] == [
            text for turn in range(TURNS) for text in (f"w{place}-{turn}", f"w{place}-{turn}!")
        ]


def test_a_post_reaches_whoever_holds_the_session_elsewhere(tmp_path: Path) -> None:
    url = urls(tmp_path)["file"]
    worker = start(url, "w", 200)

    async def post() -> None:
        async with connect(url, shutdown=Shutdown(signals=False)) as sessions:
            for number in range(20):
                await sessions.post(AGENT, Message.user(f"post {number}"), key=str(number))

    try:
        go(worker)
        anyio.run(post)
        told = json.loads(worker.communicate(timeout=240)[0])
    finally:
        worker.kill()
        worker.communicate()
    assert told["done"] == 200

    async def rest() -> None:
        async with connect(url, shutdown=Shutdown(signals=False)) as sessions:
            await sessions.open(AGENT)

    anyio.run(rest)  # whatever came after the worker's last turn
    found = anyio.run(said, url)
    assert [text for text in found if text.startswith("post")] == [f"post {n}" for n in range(20)]
