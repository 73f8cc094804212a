"""Two server processes and one session: nothing is lost, nothing doubled, the loser is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import anyio
import pytest

import perdure
from perdure.records.keys import SessionKey
from perdure.store import Store
from tests.integration.journeys.backends import BACKENDS, store_of, url_of
from tests.integration.journeys.writer import AGENT

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGSTOP"),
]

ROUNDS = 6


class Writer:
    """One of the processes."""

    def __init__(self, url: str, name: str, how: str, count: int) -> None:
        command = [sys.executable, "-m", "tests.integration.journeys.writer"]
        self.process = subprocess.Popen(
            [*command, url, name, how, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.events: list[list[Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with self.process:
            self.process.kill()

    def until(self, event: str) -> list[Any]:
        """Read up to an event, and return it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1][0] == event:
                return self.events[-1]
        raise AssertionError(f"it ended without {event}: {self.events}")

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def through(self) -> None:
        """Let it come to its end in order."""
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.events += map(json.loads, self.process.stdout)
        assert self.process.wait() == 0

    def ops(self, event: str) -> list[str]:
        return [facts[0] for what, *facts in self.events if what == event]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def said(store: Store) -> list[str]:
    """Return what the log holds of what was written."""

    async def read() -> list[str]:
        async with perdure.connect(store) as sessions:
            view = await sessions.load(AGENT)
            assert view is not None
            history = await view.history(limit=1000)
            return [item.value.text for item in history if item.kind == "message"]

    return anyio.run(read)


def holders(store: Store) -> int:
    """Return how often the session was taken."""

    async def look() -> int:
        await store.open()
        holder = await store.holder(SessionKey(AGENT))
        await store.aclose()
        return 0 if holder is None else holder.epoch

    return anyio.run(look)


@pytest.mark.parametrize("kind", [*BACKENDS, "encrypted+sqlite"])
def test_turns_of_two_servers_are_all_there_once(
    kind: str, tmp_path: Path, stack: ExitStack
) -> None:
    url = url_of(kind, tmp_path)
    both = [stack.enter_context(Writer(url, name, "handover", ROUNDS)) for name in "ab"]
    for one in both:
        one.until("ready")
    for _ in range(ROUNDS):  # In each of them both want the session at once.
        for one in both:
            one.tell("go")
        for one in both:
            one.until("durable")
    for one in both:
        one.through()
    assert holders(store_of(kind, tmp_path)) > ROUNDS
    found = said(store_of(kind, tmp_path))
    assert sorted(found) == sorted(f"{name}-{n}" for name in "ab" for n in range(ROUNDS))
    for name, one in zip("ab", both, strict=True):
        assert one.ops("durable") == [op for op in found if op.startswith(name)]


@pytest.mark.parametrize("kind", [*BACKENDS, "encrypted+sqlite"])
def test_a_server_that_was_stopped_beyond_its_lease_is_told_and_goes_on(
    kind: str, tmp_path: Path, stack: ExitStack
) -> None:
    url = url_of(kind, tmp_path)
    first = stack.enter_context(Writer(url, "a", "steal", 2))
    first.until("kept")
    os.kill(first.process.pid, signal.SIGSTOP)
    second = stack.enter_context(Writer(url, "b", "steal", 2))
    second.until("kept")
    os.kill(first.process.pid, signal.SIGCONT)
    first.tell("behind")
    _, op, error = first.until("lost")
    assert op == "behind"
    assert "open" in error
    assert "again" in error
    first.tell("a-2")
    first.until("durable")
    first.tell("end")
    first.through()
    second.tell("end")
    second.through()
    assert said(store_of(kind, tmp_path)) == ["a-0", "a-1", "b-0", "b-1", "a-2"]
