"""Requests that are tried again after kills and cancels: each is answered once, and what came from elsewhere stays."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import anyio
import pytest

from perdure import Message, Shutdown, connect
from tests.servers.valkey import valkey
from tests.workers.asker import AGENT
from tests.workers.test_workers import ROOT, urls

TURNS, KILLS = 12, 6


def killed(url: str, seed: int, after: int) -> list[str]:
    """Run the process until it has said so much; return that, and what it said before it died."""
    command = [sys.executable, "-m", "tests.workers.asker", url, str(TURNS), str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        guard = threading.Timer(120, process.kill)
        guard.start()
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.strip())
            if len(lines) == after:
                process.kill()
        guard.cancel()
    return lines


async def found(url: str) -> tuple[list[str], list[str]]:
    async with (
        connect(url, shutdown=Shutdown(signals=False)) as sessions,
        sessions.open(AGENT, wait=60) as session,
    ):
        history = [item.value for item in await session.history(limit=100_000)]
        context = [message.text for message in session.context()]
    return [one.text for one in history if isinstance(one, Message)], context


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_each_request_is_answered_once_and_what_others_say_stays(tmp_path: Path, kind: str) -> None:
    asked(urls(tmp_path)[kind], random.Random(kind))


@pytest.mark.deep
def test_each_request_is_answered_once_on_valkey_too() -> None:
    with valkey() as server:
        asked(server.url, random.Random("valkey"))


def asked(url: str, dice: random.Random) -> None:
    told = [line for seed in range(KILLS) for line in killed(url, seed, dice.randrange(2, 15))]
    told += killed(url, KILLS, 1_000_000)
    assert f"done {TURNS - 1}" in told
    history, context = anyio.run(found, url)
    count = Counter(history)
    for number in range(TURNS):
        own = [f"part {part} of {number}" for part in range(3)]
        assert [count[text] for text in (f"Q {number}", f"A {number}", *own)] == [1] * 5
        assert history.index(f"Q {number}") < history.index(f"A {number}")
    said = [line for line in told if line.startswith("hook")]
    assert [text for text in said if count[text] != 1] == []
    assert [text for text, times in count.items() if times > 1] == []
    assert context == history[-len(context) :]
