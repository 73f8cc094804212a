"""The command line in this process, on a store of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

import perdure
from perdure import Message, Shutdown, ToolCall
from perdure.cli import main


class Ran(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Ran]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``perdure`` with these tokens."""

    def run(*tokens: str) -> Ran:
        capsys.readouterr()
        status = main([str(token) for token in tokens])
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def filled_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `store` is a copy of: filled once, since each save waits for the disk."""
    root = tmp_path_factory.mktemp("filled") / "store"
    anyio.run(_fill, root)
    return root


@pytest.fixture
def store(tmp_path: Path, filled_store: Path) -> Path:
    """A store with two agents: ada with a tool, memory and a state, bob in two sessions."""
    return shutil.copytree(filled_store, tmp_path / "store")


async def _fill(root: Path) -> None:
    async with perdure.connect(root, shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("ada", owner="lovelace", tags=["x"]) as ada:
            async with ada.turn():
                ada.append(Message.user("What is 2 + 3?"))
                ada.append(
                    Message.assistant(tool_calls=[ToolCall("c1", "add", {"a": 2, "b": 3})]),
                    Message.tool("c1", 5, name="add"),
                )
                ada.append(Message.assistant("It is 5."))
            ada.memory.set("favorite", 5)
            ada.state.set("mood", {"is": "good"})
            ada.describe(title="Sums")
        for session in ("default", "second"):
            async with sessions.open("bob", session=session) as bob:
                bob.append(Message.user(f"Hello from {session}"))
        async with sessions.open("eve", tenant="acme") as eve:
            eve.append(Message.user("Hello"))
