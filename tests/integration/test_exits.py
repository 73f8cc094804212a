"""Each way out of a program: docs/exit.md says what is saved, and this sees whether it is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import perdure
from perdure import Shutdown

pytestmark = pytest.mark.deep

CHILD = """
import os, signal, sys
import anyio
import perdure
from perdure import Autosave, Message

PATIENT = Autosave(debounce=1000, max_delay=1000)  # so that nothing but the exit saves

async def work(sessions):
    session = await sessions.open("ada")
    async with session.turn():
        session.append(Message.user("a turn"))
    session.append(Message.user("behind it"))
    {way}

async def inside():
    async with perdure.connect(sys.argv[1], autosave=PATIENT) as sessions:
        await work(sessions)

async def never_closed():
    await work(await perdure.connect(sys.argv[1], autosave=PATIENT))

async def cancelled():
    with anyio.CancelScope() as scope:
        async with perdure.connect(sys.argv[1], autosave=PATIENT) as sessions:
            await work(sessions)
            scope.cancel()
            await anyio.sleep_forever()

from tests.runners import run
run(sys.argv[2], {main})
"""

ROOT = Path(__file__).parents[2]
BOTH = ["a turn", "behind it"]
WAYS = {
    "the block is left": ("inside", "pass", 0, BOTH),
    "an exception leaves it": ("inside", "raise LookupError('on purpose')", 1, BOTH),
    "it is cancelled": ("cancelled", "pass", 0, BOTH),
    "sys.exit": ("inside", "sys.exit(3)", 3, BOTH),
    "Ctrl-C": ("inside", "os.kill(os.getpid(), signal.SIGINT); await anyio.sleep_forever()", None, BOTH),
    "SIGTERM": ("inside", "os.kill(os.getpid(), signal.SIGTERM); await anyio.sleep_forever()", -15, BOTH),
    "os._exit": ("inside", "os._exit(4)", 4, ["a turn"]),
    "SIGKILL": ("inside", "os.kill(os.getpid(), signal.SIGKILL)", -9, ["a turn"]),
}  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize("way", WAYS)
async def test_a_way_out_saves_what_the_page_says(
    way: str, tmp_path: Path, anyio_backend: str
) -> None:
    main, how, status, kept = WAYS[way]
    ended, held = await left(tmp_path / "store", anyio_backend, main, how)
    assert held == kept
    assert status in (None, ended)


async def test_a_manager_that_nobody_closed_is_closed_with_its_loop(
    tmp_path: Path, anyio_backend: str
) -> None:
    assert await left(tmp_path / "store", anyio_backend, "never_closed", "pass") == (0, BOTH)


async def left(root: Path, backend: str, main: str, way: str) -> tuple[int, list[str]]:
    """Leave a program in some way; return its status, and what the store holds then."""
    code = CHILD.format(main=main, way=way)
    done = subprocess.run(
        [sys.executable, "-c", code, str(root), backend], capture_output=True, text=True, cwd=ROOT
    )
    async with perdure.connect(root, shutdown=Shutdown(signals=False)) as sessions:
        view = await sessions.load("ada")
        assert view is not None, done.stderr
        return done.returncode, [message.text for message in view.context()]
