"""Programs at a terminal: they end by each way that a person or a service manager ends them."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import perdure.sync
from perdure import Shutdown
from tests.source_tree import ROOT

pty = pytest.importorskip("pty")

PAGE = ROOT / "docs" / "tutorial" / "1-a-session.md"
BLOCKING = """
import asyncio
import perdure
from perdure import Message

async def main():
    spill = perdure.Shutdown(spill="spill")
    async with perdure.connect(autosave=None, shutdown=spill) as sessions:
        async with sessions.open("grace") as session:
            session.append(Message.user("Hello"))
            input("> ")

asyncio.run(main())
"""


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, program: Path) -> None:
        self.said = ""
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.chdir(program.parent)
            os.environ["PERDURE_URL"] = "agents"
            os.execv(sys.executable, [sys.executable, str(program)])

    def until(self, text: str, seconds: float = 30.0) -> None:
        """Read until it has said that."""
        end = time.monotonic() + seconds
        while text not in self.said:
            assert time.monotonic() < end, self.said
            if select.select([self.fd], [], [], 0.1)[0]:
                self.said += os.read(self.fd, 4096).decode()

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def status(self, how: Callable[[], object], seconds: float = 30.0) -> int:
        """End it in a way, and wait for that; a signal's number is negative.

        It is told again and again: a signal that comes between the prompt and the read of the
        terminal is heard by Python at the next one only.
        """
        end, told = time.monotonic() + seconds, 0.0
        while True:
            if time.monotonic() - told > 3:
                how()
                told = time.monotonic()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < end, self.said
            time.sleep(0.02)

    def kill(self, how: signal.Signals) -> None:
        os.kill(self.pid, how)

    def close(self) -> None:
        if self.pid:
            self.kill(signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


@pytest.mark.parametrize("how", ["\x03", "\x04", "\n", "SIGTERM"])
def test_the_loop_of_the_tutorial_ends_with_everything_saved(
    how: str, tmp_path: Path, terminals: list[Terminal]
) -> None:
    [code] = re.findall(
        r"`talk.py`:\n\n```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    (tmp_path / "talk.py").write_text(code)
    terminal = Terminal(tmp_path / "talk.py")
    terminals.append(terminal)
    terminal.until("> ")
    terminal.type("Hello\n")
    terminal.until("You said 5 letters.\r\n> ")
    if how == "SIGTERM":
        assert terminal.status(partial(terminal.kill, signal.SIGTERM)) == -signal.SIGTERM
    else:
        assert terminal.status(partial(terminal.type, how)) == 0
    with perdure.sync.connect(tmp_path / "agents") as sessions:
        view = sessions.load("grace")
        assert view is not None
        assert [message.text for message in view.context()] == ["Hello", "You said 5 letters."]


def test_a_second_sigterm_ends_a_program_whose_loop_is_blocked(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    (tmp_path / "blocking.py").write_text(BLOCKING)
    terminal = Terminal(tmp_path / "blocking.py")
    terminals.append(terminal)
    terminal.until("> ")
    assert terminal.status(partial(terminal.kill, signal.SIGTERM), 20) == -signal.SIGTERM
    terminal.until("kept 1 record of grace (1) in")
    shutdown = Shutdown(signals=False, spill=str(tmp_path / "spill"))
    with perdure.sync.connect(tmp_path / "agents", shutdown=shutdown) as sessions:
        with sessions.open("grace", wait=30) as session:
            assert [message.text for message in session.context()] == ["Hello"]
