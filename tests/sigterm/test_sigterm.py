from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.servers import free_port, until_up
from tests.sigterm import hanging
from tests.sigterm.cycles import FIRST, ROOT, lost, run_child, run_cycles

pytestmark = pytest.mark.deep

RUNNERS = ["asyncio", "trio"]
"""``python -m tests.sigterm`` has more."""


@pytest.mark.parametrize("runner", RUNNERS)
def test_nothing_accepted_is_lost_by_sigterm_amid_load(runner: str, tmp_path: Path) -> None:
    summary = run_cycles(tmp_path, runner, cycles=3, sessions=10)
    assert summary["ok"], summary


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_second_sigterm_does_not_cut_the_drain_short(runner: str, tmp_path: Path) -> None:
    cycle = run_child(tmp_path / "store", runner, sessions=20, after=300, terms=3)
    assert cycle.status == -signal.SIGTERM, cycle.said
    assert len(cycle.accepted) > 200
    assert lost(tmp_path / "store", cycle.accepted) == []
    assert cycle.said == ""


def test_the_count_sees_what_a_kill_takes(tmp_path: Path) -> None:
    cycle = run_child(tmp_path / "store", "asyncio", sessions=20, after=300, by=signal.SIGKILL)
    assert cycle.status == -signal.SIGKILL
    assert lost(tmp_path / "store", cycle.accepted) != []


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("after", [1, 2, 3, 8])
def test_sigterm_while_starting_ends_the_process_and_harms_no_session(
    runner: str, after: int, tmp_path: Path
) -> None:
    cycle = run_child(tmp_path / "store", runner, sessions=12, after=after)
    assert cycle.status == -signal.SIGTERM, cycle.said
    assert cycle.said == ""
    again = run_child(tmp_path / "store", runner, sessions=12, after=60)
    assert again.status == -signal.SIGTERM, again.said
    assert lost(tmp_path / "store", [*cycle.accepted, *again.accepted]) == []


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_body_that_does_not_end_is_ended_and_what_it_had_is_saved(
    runner: str, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    cycle = run_child(root, runner, sessions=1, after=50, program="stubborn")
    assert cycle.status == -signal.SIGTERM, cycle.said
    assert len(cycle.accepted) > 50
    assert lost(root, cycle.accepted) == []


def may_be_first() -> bool:
    """Say whether this user may run a process that is the first of a namespace."""
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None:
        return False
    return subprocess.run([*FIRST, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not may_be_first(), reason="this user may not make namespaces")
@pytest.mark.parametrize("runner", RUNNERS)
def test_the_first_process_of_a_container_ends_with_the_status_of_sigterm(
    runner: str, tmp_path: Path
) -> None:
    cycle = run_child(tmp_path / "store", runner, sessions=3, after=50, first=True)
    assert cycle.status == 128 + signal.SIGTERM, cycle.said
    assert cycle.said == ""
    assert lost(tmp_path / "store", cycle.accepted) == []


@pytest.mark.parametrize("runner", RUNNERS)
def test_sigterm_while_the_manager_closes_waits_for_that_and_ends_by_the_signal(
    runner: str, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    cycle = run_child(root, runner, sessions=1, after=2, terms=2, program="leaving")
    assert cycle.status == -signal.SIGTERM, cycle.said
    assert cycle.said == ""
    assert lost(root, ["s0:1"]) == []


def test_sigterm_under_uvicorn_with_endless_streams_loses_nothing_accepted(
    tmp_path: Path,
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "tests.sigterm.endless:app", "--port", str(port)]
    command += ["--timeout-graceful-shutdown", "1", "--log-level", "warning"]
    env = {**os.environ, "ENDLESS_STORE": str(tmp_path / "store")}
    server = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    readers = [Reader(port, f"s{number}") for number in range(5)]
    try:
        until_up(port, server)
        for reader in readers:
            reader.start()
        for reader in readers:
            assert reader.many.wait(60)
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate()
    finally:
        server.kill()
        server.wait()
    for reader in readers:
        reader.join()
    assert server.returncode == -signal.SIGTERM, said
    accepted = [text for reader in readers for text in reader.seen]
    assert len(accepted) >= 5 * Reader.MANY
    assert lost(tmp_path / "store", accepted) == []


class Reader(threading.Thread):
    """A client that reads an endless stream until it breaks."""

    MANY = 50

    def __init__(self, port: int, id: str) -> None:
        super().__init__()
        self.url = f"http://127.0.0.1:{port}/{id}"
        self.seen: list[str] = []
        self.many = threading.Event()

    def run(self) -> None:
        try:
            with httpx.stream("GET", self.url, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.seen.append(line.removeprefix("data: "))
                    if len(self.seen) >= self.MANY:
                        self.many.set()
        except httpx.HTTPError:
            return


@pytest.mark.parametrize("method", ["append_many", "write_documents", "release", "aclose"])
def test_a_store_that_hangs_ends_no_process_late_and_loses_nothing(
    method: str, tmp_path: Path
) -> None:
    wanted = hanging.runs([method], RUNNERS)
    roots = [tmp_path / str(number) for number in range(len(wanted))]
    assert [hanging.wrong(root, *one) for root, one in zip(roots, wanted, strict=True)] == [
        "" for _ in wanted
    ]
