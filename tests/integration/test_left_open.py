"""Programs that end without closing what they connected, in every way but a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Shutdown
from tests.servers.postgres import schema_of, shared

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]
GUARD = 60
"""Seconds after which a program hangs."""

HEAD = """
import asyncio, sys, threading
import anyio
import perdure
from perdure import Autosave, Message

URL = sys.argv[1]
PATIENT = Autosave(debounce=1000, max_delay=1000)  # so that nothing but the end saves

async def opened():
    sessions = await perdure.connect(URL, autosave=PATIENT)
    session = await sessions.open("ada")
    await anyio.to_thread.run_sync(int)  # anyio's threads wait for the end of their loop
    session.append(Message.user("accepted"))
    return sessions
"""
IN_A_LOOP = "loop = asyncio.new_event_loop()\nleft_open = loop.run_until_complete(opened())\n"
WAYS = {
    "the loop was stopped": (IN_A_LOOP, 0),
    "an exception ended the program": (f"{IN_A_LOOP}raise SystemExit(3)", 3),
    "sys.exit in a task": (
        """
async def main():
    await opened()
    sys.exit(4)

asyncio.new_event_loop().run_until_complete(main())
""",
        4,
    ),
    "the main thread ended first": (
        """
async def main():
    sessions = await opened()
    while threading.main_thread().is_alive():
        await asyncio.sleep(0.01)
    (await sessions.open("ada")).append(Message.user("and later"))

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_until_complete, args=(main(),)).start()
""",
        0,
    ),
    "the loop ran in a daemon thread": (
        """
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
asyncio.run_coroutine_threadsafe(opened(), loop).result()
""",
        0,
    ),
    "a thread went on with a daemon's loop": (
        """
async def later(sessions):
    (await sessions.open("ada")).append(Message.user("and later"))

def work():
    threading.main_thread().join()
    asyncio.run_coroutine_threadsafe(later(sessions), loop).result()

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
sessions = asyncio.run_coroutine_threadsafe(opened(), loop).result()
threading.Thread(target=work).start()
""",
        0,
    ),
    "trio ran in a daemon thread": (
        """
import trio
there = threading.Event()
async def main():
    await opened()
    there.set()
    await trio.sleep_forever()

threading.Thread(target=trio.run, args=(main,), daemon=True).start()
there.wait()
""",
        0,
    ),
}


@pytest.mark.parametrize(
    ("scheme", "way"), [*(("file", way) for way in WAYS), ("sqlite", "the loop was stopped")]
)
def test_what_nobody_closed_is_saved_at_exit_and_told(
    scheme: str, way: str, tmp_path: Path
) -> None:
    code, status = WAYS[way]
    url = f"file:{tmp_path / 'data'}" if scheme == "file" else f"sqlite:///{tmp_path / 'x.db'}"
    ended, told = program(code, url, tmp_path)
    texts = ["accepted", "and later"] if "and later" in code else ["accepted"]
    assert (ended, stored(url)) == (status, texts), told
    noun = "1 record" if len(texts) == 1 else "2 records"
    assert told.endswith(f": saved {noun} of ada ({len(texts)}) at exit\n")
    assert not (tmp_path / "state").exists()


def test_what_nobody_closed_is_saved_on_a_server(tmp_path: Path) -> None:
    url = f"{shared().url}?schema={schema_of(tmp_path)}"
    ended, told = program(IN_A_LOOP, url, tmp_path)
    assert (ended, stored(url)) == (0, ["accepted"]), told
    assert "saved 1 record of ada (1) at exit" in told


def test_the_prompt_of_asyncio_ends_and_saves(tmp_path: Path) -> None:
    lines = """
import perdure
sessions = await perdure.connect(URL)
session = await sessions.open("ada")
number = session.append(perdure.Message.user("accepted"))
"""
    url = str(tmp_path / "data")
    done = subprocess.run(
        [sys.executable, "-m", "asyncio"],
        input=lines.replace("URL", repr(url)),
        **run_with(tmp_path),
    )
    assert stored(url) == ["accepted"], done.stderr
    assert done.returncode == 0
    assert "saved 1 record of ada (1) at exit" in done.stderr


def test_behind_a_closed_loop_it_is_spilled_and_the_next_open_appends_it(tmp_path: Path) -> None:
    url = str(tmp_path / "data")
    ended, told = program(f"{IN_A_LOOP}loop.close()", url, tmp_path)
    assert ended == 0
    [folder] = (tmp_path / "state" / "perdure" / "spill").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert f"kept 1 record of ada (1) in {folder}" in told
    assert stored(url) == []
    code = "async def main():\n    await (await opened()).aclose()\n\nasyncio.run(main())"
    assert program(code, str(tmp_path / "other"), tmp_path)[0] == 0  # not this store's
    assert stored(str(tmp_path / "other")) == ["accepted"]
    assert program(code, url, tmp_path)[0] == 0
    assert stored(url) == ["accepted", "accepted"]
    assert list(folder.iterdir()) == []


def test_without_a_folder_the_loss_is_told(tmp_path: Path) -> None:
    code = f"""
perdure.connect = __import__("functools").partial(
    perdure.connect, shutdown=perdure.Shutdown(spill=False)
)
{IN_A_LOOP}loop.close()"""
    ended, told = program(code, str(tmp_path / "data"), tmp_path)
    assert ended == 0
    assert "LOST 1 record of ada (1) at exit. Close it" in told


def test_a_loop_that_stands_still_holds_no_exit_up(tmp_path: Path) -> None:
    code = """
import time
perdure.connect = __import__("functools").partial(
    perdure.connect, shutdown=perdure.Shutdown(deadline=0.2, turn_grace=0, hard_grace=0.2)
)
loop = asyncio.new_event_loop()
left_open = loop.run_until_complete(opened())
loop.call_soon(time.sleep, 3600)
"""
    ended, told = program(code, str(tmp_path / "data"), tmp_path)
    assert ended == 0
    assert "kept 1 record of ada (1) in " in told


def test_a_guest_of_a_loop_that_was_stopped_is_spilled(tmp_path: Path) -> None:
    code = """
import trio
loop = asyncio.new_event_loop()
async def guest():
    await opened()
    loop.call_soon_threadsafe(loop.stop)
    await trio.sleep_forever()

trio.lowlevel.start_guest_run(
    guest, run_sync_soon_threadsafe=loop.call_soon_threadsafe, done_callback=print
)
loop.run_forever()
"""
    ended, told = program(code, str(tmp_path / "data"), tmp_path)
    assert ended == 0
    assert "kept 1 record of ada (1) in " in told


HANGING = """
import functools
from perdure.session import spill
from perdure.stores.file.log import LogWriter

spill.PATIENCE = 0.1
perdure.connect = functools.partial(
    perdure.connect, shutdown=perdure.Shutdown(deadline=0.2, turn_grace=0, hard_grace=0.2)
)

def hang(*_, **__):
    threading.Event().wait()

def hang_disk():
    LogWriter.append = spill.write = hang

async def main():
    await opened()
    hang_disk()
"""
BLOCKING = """
import perdure.sync
spill.PATIENCE = 2  # longer than the exit waits: exit handlers spill again
shutdown = perdure.Shutdown(deadline=0.2, turn_grace=0, hard_grace=0)
sessions = perdure.sync.connect(URL, autosave=PATIENT, shutdown=shutdown)
session = sessions.open("ada")
hang_disk()
session.append(Message.user("accepted"))
"""
NO_THREAD = """
import atexit

def refused(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

@atexit.register
def start_no_thread():
    threading.Thread.start = refused
"""
HANGING_WAYS = {
    "the loop was stopped": "loop = asyncio.new_event_loop()\nloop.run_until_complete(main())\n",
    "the loop was closed": f"{IN_A_LOOP}loop.close()\nhang_disk()",
    "asyncio.run": "asyncio.run(main())",
    "trio.run": "import trio\ntrio.run(main)",
    "blocking": BLOCKING,
    "blocking, with no thread at the end": BLOCKING + NO_THREAD,
}


@pytest.mark.parametrize("way", HANGING_WAYS)
def test_a_disk_that_hangs_holds_no_exit_up(way: str, tmp_path: Path) -> None:
    ended, told = program(HANGING + HANGING_WAYS[way], str(tmp_path / "data"), tmp_path)
    assert ended == 0
    assert "LOST 1 record of ada (1) at exit" in told


def program(code: str, url: str, folder: Path) -> tuple[int, str]:
    """Run a program to its end; return its status, and what it wrote to stderr."""
    done = subprocess.run([sys.executable, "-c", HEAD + code, url], **run_with(folder))
    return done.returncode, done.stderr


def run_with(folder: Path) -> dict[str, object]:
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    return {"capture_output": True, "text": True, "cwd": ROOT, "env": env, "timeout": GUARD}


def stored(url: str) -> list[str]:
    """Return what the store holds."""
    return anyio.run(_stored, url)


async def _stored(url: str) -> list[str]:
    async with perdure.connect(url, shutdown=Shutdown(signals=False)) as sessions:
        view = await sessions.load("ada")
        return [] if view is None else [message.text for message in view.context()]
