"""A real Jupyter kernel that is shut down, restarted and interrupted with records unsaved."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_left_open import stored
from tests.servers.postgres import schema_of, shared

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]
GUARD = 60
"""Seconds after which a kernel hangs."""

OPEN = """
import perdure
from perdure import Autosave, Message
patient = Autosave(debounce=1000, max_delay=1000)  # so that nothing but the end saves
sessions = await perdure.connect({url!r}, autosave=patient)
session = await sessions.open("ada")
for number in range(3):
    session.append(Message.user(str(number)))
"""
READ = """
import perdure
sessions = await perdure.connect({url!r})
session = await sessions.open("ada")
print(*(message.text for message in session.context()))
"""
THREE = ["0", "1", "2"]


class Kernel:
    """A kernel, and what its cells print."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import KernelManager

        self.manager: Any = KernelManager(kernel_name="python3")
        self.manager.shutdown_wait_time = GUARD  # before it is killed
        paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": paths, "XDG_STATE_HOME": str(folder / "state")}
        env |= {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_RUNTIME_DIR": str(folder / "run")}
        self.manager.start_kernel(env=env, cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(GUARD)

    def run(self, code: str) -> str:
        """Run a cell to its end; return what it printed, or the error's name."""
        printed: list[str] = []

        self.client.execute_interactive(
            code,
            output_hook=lambda one: printed.append(_told(one)),
            timeout=GUARD,
            allow_stdin=False,
            stop_on_error=False,
        )
        return "".join(printed).strip()


def _told(message: dict[str, Any]) -> str:
    content = message["content"]
    return str(content.get("text") or content.get("ename") or "")


@contextlib.contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    one = Kernel(folder)
    try:
        yield one
    finally:
        one.client.stop_channels()
        if one.manager.is_alive():
            one.manager.shutdown_kernel(now=True)


def url_of(kind: str, folder: Path) -> str:
    return {
        "file": lambda: f"file:{folder / 'data'}",
        "sqlite": lambda: f"sqlite:///{folder / 'x.db'}",
        "postgres": lambda: f"{shared().url}?schema={schema_of(folder)}",
    }[kind]()


@pytest.mark.parametrize("kind", ["file", "sqlite", "postgres"])
def test_a_kernel_that_is_shut_down_has_saved(kind: str, tmp_path: Path) -> None:
    url = url_of(kind, tmp_path)
    with kernel(tmp_path) as one:
        assert one.run(OPEN.format(url=url)) == ""
        assert stored(url) == []
        one.manager.shutdown_kernel(now=False)
    assert stored(url) == THREE
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("kind", ["file", "sqlite", "postgres"])
def test_a_kernel_that_was_restarted_goes_on_with_everything(kind: str, tmp_path: Path) -> None:
    url = url_of(kind, tmp_path)
    with kernel(tmp_path) as one:
        assert one.run(OPEN.format(url=url)) == ""
        assert stored(url) == []
        one.manager.restart_kernel(now=False)
        one.client.wait_for_ready(GUARD)
        assert one.run(READ.format(url=url)) == "0 1 2"


@pytest.mark.parametrize("kind", ["file", "sqlite", "postgres"])
def test_a_kernel_that_is_interrupted_goes_on_with_its_sessions(kind: str, tmp_path: Path) -> None:
    url = url_of(kind, tmp_path)
    wait = "print('waiting', flush=True)\n{how}"
    with kernel(tmp_path) as one:
        assert one.run(OPEN.format(url=url)) == ""
        for how in ("import time; time.sleep(1000)", "import anyio; await anyio.sleep(1000)"):
            heard: list[str] = []

            def hear(message: dict[str, Any], heard: list[str] = heard) -> None:
                text = _told(message)
                heard.extend([text] * bool(text))
                if "waiting" in text:
                    one.manager.interrupt_kernel()

            one.client.execute_interactive(
                wait.format(how=how), output_hook=hear, timeout=GUARD, allow_stdin=False
            )
            assert heard[-1] in {"KeyboardInterrupt", "CancelledError"}
            assert one.run("session.append(Message.user('and on')); print(session.version > 0)")
        assert one.run("await session.save(); print(sessions.health().status)") == "ok"
        assert one.run("session.append(Message.user('unsaved'))") == ""
        one.manager.shutdown_kernel(now=False)
    assert stored(url) == [*THREE, "and on", "and on", "unsaved"]
