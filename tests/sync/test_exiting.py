"""Processes that end without closing, in each of the ways a process can: nothing accepted is lost.

Each runs in a process of its own; what it left behind is read by the next manager.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import perdure.sync
from perdure import Shutdown

pytestmark = pytest.mark.skipif(
    (3, 12, 0) <= sys.version_info[:3] < (3, 12, 2),
    reason="this Python starts no thread when the main one has ended: what is unsaved is spilled",
)

BEGIN = """
import os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import perdure.sync
from perdure import Message, Shutdown

sessions = perdure.sync.connect(sys.argv[1], autosave=None)
session = sessions.open("mia")
session.append(Message.user("accepted"))
"""


def run(body: str, store: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", BEGIN + textwrap.dedent(body), str(store)],
        capture_output=True,
        text=True,
        check=False,
    )


def texts(store: Path) -> list[str]:
    with perdure.sync.connect(store, shutdown=Shutdown(signals=False)) as sessions:
        view = sessions.load("mia")
        return [] if view is None else [message.text for message in view.context()]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("1 / 0", 1),
        ("del session, sessions", 0),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", 128 + signal.SIGTERM),
    ],
)
def test_what_was_accepted_is_saved(body: str, status: int, tmp_path: Path) -> None:
    ended = run(body, tmp_path / "agents")
    assert ended.returncode == status, ended.stderr
    assert texts(tmp_path / "agents") == ["accepted"]


def test_sigterm_leaves_the_blocks_and_ends_with_its_own_status(tmp_path: Path) -> None:
    body = """
    with sessions, session.turn():
        session.append(Message.user("in a turn"))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """
    ended = run(body, tmp_path / "agents")
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert texts(tmp_path / "agents") == ["accepted", "in a turn"]


@pytest.mark.deep
def test_a_program_that_goes_on_after_sigterm_is_ended_by_the_deadline(tmp_path: Path) -> None:
    body = """
    sessions.close()
    shutdown = Shutdown(deadline=0.4, turn_grace=0.1, hard_grace=0.2)
    with perdure.sync.connect(sys.argv[1], autosave=None, shutdown=shutdown) as sessions:
        sessions.open("mia").append(Message.user("late"))
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        while True:
            try:
                time.sleep(60)
            except SystemExit:
                pass
    """
    ended = run(body, tmp_path / "agents")
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert texts(tmp_path / "agents") == ["accepted", "late"]


def test_sigterm_runs_the_handler_that_was_there(tmp_path: Path) -> None:
    body = """
    sessions.close()
    signal.signal(signal.SIGTERM, lambda number, frame: print("mine"))
    with perdure.sync.connect(sys.argv[1]) as sessions:
        drained = threading.Event()
        sessions.on("drain", lambda _: drained.set())
        os.kill(os.getpid(), signal.SIGTERM)
        assert drained.wait(30)
    """
    ended = run(body, tmp_path / "agents")
    assert (ended.returncode, ended.stdout) == (0, "mine\n"), ended.stderr


def test_sigterm_is_left_alone_when_that_is_asked_for(tmp_path: Path) -> None:
    body = """
    sessions.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with perdure.sync.connect(sys.argv[1], shutdown=Shutdown(signals=False)):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    """
    ended = run(body, tmp_path / "agents")
    assert ended.returncode == 0, ended.stderr


def test_a_thread_that_is_still_at_work_is_waited_for(tmp_path: Path) -> None:
    body = """
    def work():
        while threading.main_thread().is_alive():
            time.sleep(0.001)
        for number in range(20):
            with session.turn():
                session.append(Message.user(str(number)))
        session.append(Message.user("last"))

    threading.Thread(target=work).start()
    """
    ended = run(body, tmp_path / "agents")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert texts(tmp_path / "agents")[-2:] == ["19", "last"]


def test_an_executor_that_was_never_shut_down_does_not_hold_it_up(tmp_path: Path) -> None:
    body = """
    executor = ThreadPoolExecutor(2)
    for _ in range(4):
        executor.submit(session.append, Message.user("from a worker"))
    """
    ended = run(body, tmp_path / "agents")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert texts(tmp_path / "agents") == ["accepted", *["from a worker"] * 4]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_child_that_ends_leaves_the_parent_alone(tmp_path: Path) -> None:
    body = """
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)
    child = os.fork()
    if child == 0:
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    session.append(Message.user("after the child"))
    """
    ended = run(body, tmp_path / "agents")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert texts(tmp_path / "agents") == ["accepted", "after the child"]


def test_a_store_that_is_gone_does_not_hold_up_the_end(tmp_path: Path) -> None:
    body = """
    import perdure._connect
    from perdure.testing.faulty import FaultyStore
    from perdure.stores.memory import MemoryStore

    sessions.close()
    store = FaultyStore(MemoryStore(), fail_on="append_many", how="hang", times=None)
    shutdown = Shutdown(deadline=0.2, turn_grace=0, hard_grace=0.1)
    sessions = perdure.sync.connect(store, autosave=None, shutdown=shutdown)
    sessions.open("mia").append(Message.user("lost"))
    """
    ended = run(body, tmp_path / "agents")
    assert ended.returncode == 0
    assert "unsaved" in ended.stderr or "in doubt" in ended.stderr


LATE = """
import atexit, sys, threading
import perdure
from perdure import Message

def late():
    import perdure.sync  # for the first time, behind the main thread's end

    {use}

def work():
    threading.main_thread().join()
    late()

{begin}
"""
CLOSED = """
    with perdure.sync.connect(sys.argv[1]) as sessions, sessions.open("mia") as session:
        session.append(Message.user("late"))
"""
LEFT_OPEN = """
    global sessions, session
    sessions = perdure.sync.connect(sys.argv[1], autosave=None)
    session = sessions.open("mia")
    session.append(Message.user("late"))
"""


@pytest.mark.deep
@pytest.mark.parametrize(
    ("use", "begin"),
    [
        (CLOSED, "threading.Thread(target=work).start()"),
        (LEFT_OPEN, "threading.Thread(target=work).start()"),
        # Later Pythons start no thread for an exit handler.
        *([(CLOSED, "atexit.register(late)")] if sys.version_info < (3, 12) else []),
    ],
    ids=["closed", "left open", "in an exit handler"][: 3 if sys.version_info < (3, 12) else 2],
)
def test_a_first_use_behind_the_end_of_the_main_thread_is_saved(
    use: str, begin: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LATE.format(use=use.strip(), begin=begin), str(tmp_path / "agents")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert texts(tmp_path / "agents") == ["late"]
