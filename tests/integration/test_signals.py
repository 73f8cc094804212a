"""SIGTERM in programs of every kind, and hooks that end their program."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Shutdown

ROOT = Path(__file__).parents[2]
GUARD = 60
"""Seconds after which a program hangs."""
RUNNERS = ["asyncio", "trio"]

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's"),
]

HEAD = """
import asyncio, functools, multiprocessing, os, signal, sys, threading, time
import anyio
import perdure
from perdure import Autosave, Message, Shutdown
from tests.runners import run as run_on

RUNNER, ROOT = sys.argv[1:]
PATIENT = Autosave(debounce=1000, max_delay=1000)  # so that nothing but the end saves
connect = functools.partial(perdure.connect, autosave=PATIENT)

def run(main):
    run_on(RUNNER, main)

def term():
    os.kill(os.getpid(), signal.SIGTERM)

def tell(*words):
    print(*words, flush=True)
"""
HANGING = """
from perdure.session import spill
from perdure.stores.file.log import LogWriter

spill.PATIENCE = 0.1
spilling = threading.Event()

def hang(*_, **__):
    threading.Event().wait()

def hang_spilling(*_, **__):
    spilling.set()
    hang()

def hang_disk():
    LogWriter.append, spill.write = hang, hang_spilling

def connect(root):
    shutdown = Shutdown(deadline=0.2, turn_grace=0.1, hard_grace=0.1, spill=ROOT + "/spill")
    return perdure.connect(root, autosave=PATIENT, shutdown=shutdown)
"""


def program(code: str, runner: str, root: Path) -> tuple[int, str, str]:
    """Run a program to its end; return its status, and what it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code, runner, str(root)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=GUARD,
    )
    return done.returncode, done.stdout, done.stderr


def kept(root: Path, *ids: str) -> list[list[str]]:
    """Return what the store holds of each session."""
    return anyio.run(_kept, root, *ids)


async def _kept(root: Path, *ids: str) -> list[list[str]]:
    async with perdure.connect(root, shutdown=Shutdown(signals=False)) as sessions:
        views = [await sessions.load(id) for id in ids]
        return [[] if one is None else [item.text for item in one.context()] for one in views]


# one registry for all managers


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("order", ["first, second", "second, first"])
def test_the_last_manager_to_close_puts_the_handler_back(
    order: str, runner: str, tmp_path: Path
) -> None:
    code = f"""
async def main():
    def own(*_): tell("own")
    signal.signal(signal.SIGTERM, own)
    first, second = await connect(ROOT + "/1"), await connect(ROOT + "/2")
    for one in ({order}):
        assert signal.getsignal(signal.SIGTERM) is not own
        await one.aclose()
    assert signal.getsignal(signal.SIGTERM) is own
    again = await connect(ROOT + "/1")
    term()
    await again.aclose()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    first, second = await connect(ROOT + "/1"), await connect(ROOT + "/2")
    for one in ({order}):
        await one.aclose()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    tell("closed")
    term()
run(main)
"""
    assert program(code, runner, tmp_path) == (-signal.SIGTERM, "own\nclosed\n", "")


@pytest.mark.parametrize("runner", RUNNERS)
def test_sigterm_saves_what_every_manager_has_and_the_last_one_ends_the_process(
    runner: str, tmp_path: Path
) -> None:
    code = """
async def main():
    async with connect(ROOT) as first, connect(ROOT) as second:
        third = await connect(ROOT)  # nobody closes it
        await (await connect(ROOT)).aclose()
        for id, sessions in zip("abc", (first, second, third)):
            (await sessions.open(id)).append(Message.user(id))
        term()
        await anyio.sleep_forever()
run(main)
"""
    status, _, said = program(code, runner, tmp_path)
    assert status == -signal.SIGTERM, said
    assert kept(tmp_path, "a", "b", "c") == [["a"], ["b"], ["c"]]


def test_managers_of_other_threads_are_saved_before_the_process_ends(tmp_path: Path) -> None:
    code = """
import perdure.sync
opened = [threading.Event(), threading.Event()]
async def beside():
    async with connect(ROOT) as sessions:
        (await sessions.open("b")).append(Message.user("b"))
        opened[0].set()
        await anyio.sleep_forever()
def blocking():
    with perdure.sync.connect(ROOT, autosave=PATIENT) as sessions:
        sessions.open("c").append(Message.user("c"))
        opened[1].set()
        threading.Event().wait()
threading.Thread(target=asyncio.run, args=(beside(),), daemon=True).start()
threading.Thread(target=blocking, daemon=True).start()
async def main():
    for one in opened:
        await anyio.to_thread.run_sync(one.wait)
    async with connect(ROOT) as sessions:
        (await sessions.open("a")).append(Message.user("a"))
        term()
        await anyio.sleep_forever()
run(main)
"""
    status, _, said = program(code, "asyncio", tmp_path)
    assert status == -signal.SIGTERM, said
    assert kept(tmp_path, "a", "b", "c") == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_handler_put_on_top_stays_and_has_the_say(runner: str, tmp_path: Path) -> None:
    code = """
async def main():
    ended = anyio.Event()
    async with connect(ROOT) as sessions:
        below = signal.getsignal(signal.SIGTERM)
        def own(number, frame):
            tell("own")
            ended.set()
        signal.signal(signal.SIGTERM, own)
        drained = anyio.Event()
        sessions.on("drain", lambda _: drained.set())
        async with connect(ROOT) as others:
            others.on("drain", lambda _: tell("drained"))
            (await others.open("a")).append(Message.user("a"))
            term()
            await drained.wait()
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, below)  # as a server does that ends
    term()
run(main)
"""
    status, told, said = program(code, runner, tmp_path)
    assert (status, sorted(told.split())) == (-signal.SIGTERM, ["drained", "own"]), said
    assert kept(tmp_path, "a") == [["a"]]


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_async_drain_hook_is_called_at_sigterm(runner: str, tmp_path: Path) -> None:
    code = """
async def main():
    signal.signal(signal.SIGTERM, lambda *_: None)
    async with connect(ROOT) as sessions:
        drained = anyio.Event()
        async def hook(_):
            await anyio.sleep(0)
            drained.set()
        sessions.on("drain", hook)
        term()
        await drained.wait()
        tell("drained")
run(main)
"""
    assert program(code, runner, tmp_path) == (0, "drained\n", "")


# a forked child


@pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="Windows has no fork")
def test_a_forked_child_ends_by_sigterm(tmp_path: Path) -> None:
    code = """
def work(): time.sleep(1000)
async def main():
    fork = multiprocessing.get_context("fork")
    async with connect(ROOT) as sessions:
        (await sessions.open("a")).append(Message.user("a"))
        child = fork.Process(target=work)
        child.start()
        child.terminate()
        await anyio.to_thread.run_sync(child.join)
        tell(child.exitcode)
        pool = fork.Pool(2)
        pool.terminate()
        await anyio.to_thread.run_sync(pool.join)
        term()
        await anyio.sleep_forever()
run(main)
"""
    assert program(code, "asyncio", tmp_path) == (-signal.SIGTERM, "-15\n", "")


@pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="Windows has no fork")
def test_a_forked_child_that_ends_by_itself_keeps_nothing_of_its_parent_s(tmp_path: Path) -> None:
    code = """
async def main():
    spill = ROOT + "/spill"
    async with connect(ROOT + "/store", autosave=None, shutdown=Shutdown(spill=spill)) as sessions:
        (await sessions.open("a")).append(Message.user("a"))
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.exit(5)
        _, status = await anyio.to_thread.run_sync(os.waitpid, child, 0)
        tell(os.waitstatus_to_exitcode(status))
        tell(os.path.exists(spill))
run(main)
"""
    assert program(code, "asyncio", tmp_path)[:2] == (0, "5\nFalse\n")


# a loop that stands still


def test_sigterm_ends_a_process_whose_loop_was_stopped(tmp_path: Path) -> None:
    code = """
loop = asyncio.new_event_loop()
spill = ROOT + "/spill"
async def main():
    sessions = await connect(ROOT + "/store", shutdown=Shutdown(spill=spill))
    (await sessions.open("a")).append(Message.user("a"))
    return sessions
left_open = loop.run_until_complete(main())
term()
tell("goes on")
"""
    status, told, logged = program(code, "asyncio", tmp_path)
    assert (status, told) == (-signal.SIGTERM, "")
    assert f"kept 1 record of a (1) in {tmp_path / 'spill'}" in logged
    assert list((tmp_path / "spill").iterdir())


# twice


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_second_sigterm_behind_a_close_by_hand_leaves_the_status_to_the_program(
    runner: str, tmp_path: Path
) -> None:
    code = """
async def main():
    sessions = await connect(ROOT)
    try:
        term()
        await anyio.sleep_forever()
    except BaseException:
        term()
        await sessions.aclose()
    term()
try:
    run(main)
finally:
    term()
    tell("the program's own end")
    os._exit(5)
"""
    assert program(code, runner, tmp_path)[:2] == (5, "the program's own end\n")


def test_a_second_sigterm_ends_a_process_that_is_stuck_when_its_time_is_over(
    tmp_path: Path,
) -> None:
    code = """
async def main():
    shutdown = Shutdown(deadline=0.2, turn_grace=0.1, hard_grace=0.1)
    async with connect(ROOT, shutdown=shutdown) as sessions:
        term()
        until = time.monotonic() + 2
        while time.monotonic() < until:  # blocks its loop, so that nobody can close anything
            pass
        tell("stuck")
        term()
        tell("goes on")
run(main)
"""
    assert program(code, "asyncio", tmp_path)[:2] == (-signal.SIGTERM, "stuck\n")


@pytest.mark.parametrize("runner", RUNNERS)
def test_sigterm_ends_a_process_whose_disk_hangs(runner: str, tmp_path: Path) -> None:
    code = """
async def main():
    async with connect(ROOT) as sessions:
        (await sessions.open("a")).append(Message.user("a"))
        hang_disk()
        term()
        await anyio.sleep_forever()
run(main)
"""
    assert program(HANGING + code, runner, tmp_path)[0] == -signal.SIGTERM


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_second_sigterm_ends_a_process_that_spills_to_a_disk_that_hangs(
    runner: str, tmp_path: Path
) -> None:
    code = """
from perdure._lib import signals
spill.PATIENCE = 1000
def again():
    spilling.wait()
    while signals.time_left() > 0:
        time.sleep(0.02)
    spill.PATIENCE = 0.1
    tell("again")
    term()
async def main():
    async with connect(ROOT) as sessions:
        (await sessions.open("a")).append(Message.user("a"))
        hang_disk()
        threading.Thread(target=again, daemon=True).start()
        term()
        await anyio.sleep_forever()
run(main)
"""
    status, told, said = program(HANGING + code, runner, tmp_path)
    assert (status, told) == (-signal.SIGTERM, "again\n")
    assert "LOST 1 record of a (1)" in said


@pytest.mark.parametrize("runner", RUNNERS)
def test_sigterm_ends_a_process_whose_closing_is_stuck(runner: str, tmp_path: Path) -> None:
    code = """
from perdure.stores.delegate import DelegatingStore
class Stuck(DelegatingStore):
    async def release(self, *_):
        with anyio.CancelScope(shield=True):
            await anyio.sleep_forever()
async def main():
    async with connect(Stuck(perdure.store_for(ROOT))) as sessions:
        (await sessions.open("a")).append(Message.user("a"))
        term()
        await anyio.sleep_forever()
run(main)
"""
    assert program(HANGING + code, runner, tmp_path)[0] == -signal.SIGTERM
    assert kept(tmp_path, "a") == [["a"]]


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_a_loop_of_another_thread_has_that_hangs_is_spilled(
    runner: str, tmp_path: Path
) -> None:
    code = """
opened = threading.Event()
async def beside():
    async with connect(ROOT + "/store") as sessions:
        (await sessions.open("b")).append(Message.user("b"))
        opened.set()
        hang()
threading.Thread(target=asyncio.run, args=(beside(),), daemon=True).start()
async def main():
    async with connect(ROOT + "/store") as sessions:
        opened.wait()
        spill.PATIENCE = 60
        term()
        await anyio.sleep_forever()
run(main)
"""
    status, _, said = program(HANGING + code, runner, tmp_path)
    assert status == -signal.SIGTERM
    assert f"kept 1 record of b (1) in {tmp_path / 'spill'}" in said
    assert len(list((tmp_path / "spill").iterdir())) == 1


@pytest.mark.parametrize("times", [1, 3])
def test_a_blocking_program_ends_by_sigterm_however_often_it_comes(
    times: int, tmp_path: Path
) -> None:
    code = f"""
import perdure.sync
with perdure.sync.connect(ROOT, autosave=PATIENT) as sessions:
    sessions.open("a").append(Message.user("a"))
    try:
        term()
    finally:
        for _ in range({times - 1}):
            term()
"""
    assert program(code, "asyncio", tmp_path)[0] == -signal.SIGTERM
    assert kept(tmp_path, "a") == [["a"]]


# hooks that end the program

HOOKS = {
    "sync": "sessions.on('saved', boom)",
    "async": "sessions.on('saved', aboom)",
    "before_save": "sessions.on('before_save', aboom)",
    "contributor": "await session.attach(Owner())",
}
ENDING = """
def boom(_):
    raise {error}

async def aboom(_):
    raise {error}

class Owner:
    name, version = "own", 1
    async def capture(self): boom(None)
    async def restore(self, state, context): pass

async def main():
    async with connect(ROOT) as before:
        (await before.open("b")).append(Message.user("another manager's"))
        async with connect(ROOT) as sessions:
            session = await sessions.open("a")
            {hook}
            session.append(Message.user("one"))
            await session.save()
            session.append(Message.user("two"))
            await anyio.sleep_forever()
run(main)
"""


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_may_end_the_program_and_all_is_saved(
    kind: str, runner: str, tmp_path: Path
) -> None:
    code = ENDING.format(error="SystemExit(7)", hook=HOOKS[kind])
    status, _, said = program(code, runner, tmp_path)
    assert status == 7, said
    held = kept(tmp_path, "a", "b")
    # The body is left while it saves, or behind that.
    assert held in ([["one"], ["another manager's"]], [["one", "two"], ["another manager's"]])
    assert "TrioInternalError" not in said


@pytest.mark.parametrize("runner", RUNNERS)
def test_ctrl_c_from_a_hook_ends_the_program_as_ctrl_c_does(runner: str, tmp_path: Path) -> None:
    code = ENDING.format(error="KeyboardInterrupt('on purpose')", hook=HOOKS["sync"])
    status, _, said = program(code, runner, tmp_path)
    assert status == -signal.SIGINT, said
    assert "KeyboardInterrupt: on purpose" in said
    assert kept(tmp_path, "b") == [["another manager's"]]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_hook_that_ends_the_program_while_it_closes_cuts_nothing_short(
    runner: str, tmp_path: Path
) -> None:
    code = """
def boom(_): raise SystemExit(7)
async def main():
    sessions = await connect(ROOT)
    for id in "ab":
        (await sessions.open(id)).append(Message.user(id))
    sessions.on("saved", boom)
    sessions.on("closed", boom)
    sessions.on("drain", boom)
    await sessions.aclose()
    tell("goes on")
run(main)
"""
    status, told, said = program(code, runner, tmp_path)
    assert (status, told) == (7, ""), said
    assert kept(tmp_path, "a", "b") == [["a"], ["b"]]


@pytest.mark.parametrize("runner", RUNNERS)
def test_ctrl_c_within_a_save_loses_nothing(runner: str, tmp_path: Path) -> None:
    code = """
from perdure.stores.delegate import DelegatingStore
class Interrupted(DelegatingStore):
    struck = False
    async def append_many(self, batches):
        if not self.struck:
            self.struck = True
            raise KeyboardInterrupt
        return await self.inner.append_many(batches)
async def main():
    async with connect(Interrupted(perdure.store_for(ROOT))) as sessions:
        session = await sessions.open("a")
        session.append(Message.user("one"))
        await session.save()
        await anyio.sleep_forever()
run(main)
"""
    status, _, said = program(code, runner, tmp_path)
    assert status == -signal.SIGINT, said
    assert kept(tmp_path, "a") == [["one"]]


def test_a_hook_of_a_blocking_program_may_end_it(tmp_path: Path) -> None:
    code = """
import perdure.sync
with perdure.sync.connect(ROOT, autosave=PATIENT) as sessions:
    session = sessions.open("a")
    sessions.on("saved", lambda _: sys.exit(7))
    session.append(Message.user("one"))
    session.save()
    session.append(Message.user("two"))
    while True:
        time.sleep(1)
"""
    status, _, said = program(code, "asyncio", tmp_path)
    assert status == 7, said
    assert kept(tmp_path, "a")[0][:1] == ["one"]
