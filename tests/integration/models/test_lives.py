"""From end to end: a real client, a real MCP server, and a kill amid a tool call.

The server of models holds each request against its protocol's rules, so a context that was
restored wrongly would be answered with 400. `python -m tests.integration.models` does it on both loops with each API;
here is one of each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.models import Server, running

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[3]


class Life:
    """A process that is an agent."""

    def __init__(self, backend: str, kind: str, server: Server, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.integration.models.life", backend, kind, server.url]
        self.process = subprocess.Popen(
            [*command, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.ready = self.until("Ready")

    def until(self, *events: str) -> dict[str, Any]:
        """Return the next of these events."""
        for line in self.process.stdout:
            said = json.loads(line)
            if said["event"] in events:
                return said
        raise AssertionError(f"it ended before any of {events}")

    def say(self, text: str) -> None:
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def ask(self, text: str) -> str:
        self.say(text)
        return self.until("TurnEnded", "TurnFailed")["text"]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for pid in self.ready["pids"]:  # stopped, they do not see that nobody is there any more
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        self.process.stdin.close()
        assert self.process.wait() == 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.mark.parametrize(
    ("backend", "kind", "resumed"), [("asyncio", "chat", True), ("trio", "responses", False)]
)
def test_an_agent_that_is_killed_amid_a_tool_call_goes_on(
    backend: str, kind: str, resumed: bool, server: Server, tmp_path: Path
) -> None:
    """S1-1, S1-3, S1-8, S1-9, S1-12: restored, with a context that its provider takes."""
    killed_amid_a_tool_call(backend, kind, server, tmp_path, resumed=resumed)


def killed_amid_a_tool_call(
    backend: str, kind: str, server: Server, tmp_path: Path, *, resumed: bool
) -> None:
    first = Life(backend, kind, server, tmp_path)
    try:
        assert "Europe/Berlin" in first.ask("time in Europe/Berlin")
        first.say("hold")
        first.until("Held")
        first.say("time in Asia/Tokyo and time in Asia/Dubai")
        for _ in range(2):
            first.until("ToolStarted")
        first.kill()
    finally:
        first.close()
    second = Life(backend, kind, server, tmp_path)
    try:
        if resumed:
            second.say("resume")
            (ended,) = second.until("Resumed")["ended"]
            assert ended["event"] == "TurnEnded"
            # Looking at the clock has no effect: it was done again, on a server that answers.
            assert '"timezone":"Asia/Tokyo"' in ended["text"]
            assert '"timezone":"Asia/Dubai"' in ended["text"]
        assert second.ask("Hello again") == "You said: Hello again"
        assert "Africa/Cairo" in second.ask("time in Africa/Cairo")
        second.end()
    finally:
        second.close()
    seen = server.seen()
    assert seen["broken"] == []
    sent = json.dumps(seen["requests"][-1])
    for said in ("Europe/Berlin", "Asia/Tokyo", "Asia/Dubai", "Hello again", "Africa/Cairo"):
        assert said in sent
