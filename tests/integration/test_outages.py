"""A store is taken away under load, for real: its disk is full, its files may not grow, or it moved."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

import perdure
from perdure import Message, Shutdown
from perdure.stores.file import FileStore
from perdure.testing.faulty import SwitchedStore
from tests.integration.outage import HARD, SESSIONS, SOFT
from tests.source_tree import ROOT

pytestmark = pytest.mark.deep

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def may_mount() -> bool:
    """Say whether this user may have mounts of its own."""
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(not may_mount(), reason="this user may not mount anything")


def taken_away(folder: Path, kind: str, backend: str) -> dict[str, Any]:
    disk = folder / "disk"
    disk.mkdir()
    command = [sys.executable, "-m", "tests.integration.outage", str(disk), kind, backend]
    if kind != "limited":
        command = ["unshare", "-rm", *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@BACKENDS
@pytest.mark.parametrize("kind", [pytest.param("full", marks=needs_mounts), "limited"])
def test_turns_go_on_while_the_disk_is_gone_and_all_is_there_when_it_is_back(
    kind: str, backend: str, tmp_path: Path
) -> None:
    seen = taken_away(tmp_path, kind, backend)
    assert seen["before"] == "ok"
    assert seen["failing"] == "degraded"
    assert seen["at_hard"] == "failing"
    assert SOFT < HARD <= seen["unsaved_bytes"] < 1.2 * HARD
    assert seen["oldest"]
    assert "Nothing accepted is dropped" in seen["refused"]
    assert seen["turn"] == "waited, and was refused"
    assert (seen["after"], seen["clean"]) == ("ok", True)
    assert seen["kept"] == {"same": SESSIONS, "replayed": 0}
    assert seen["spill_left"] == []


@needs_mounts
@BACKENDS
def test_what_a_disk_that_never_came_back_had_to_take_is_spilled_and_replayed(
    backend: str, tmp_path: Path
) -> None:
    seen = taken_away(tmp_path, "full-spill", backend)
    assert len(seen["spilled"]) == SESSIONS
    assert seen["clean"]
    assert seen["kept"] == {"same": SESSIONS, "replayed": SESSIONS}
    assert seen["spill_left"] == []


async def test_a_spill_that_somebody_else_was_faster_than_is_kept_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="perdure")
    root, spill = tmp_path / "store", tmp_path / "spill"
    shutdown = Shutdown(deadline=0.2, turn_grace=0, hard_grace=0.2, signals=False, spill=str(spill))
    store = SwitchedStore(FileStore(root))
    sessions = await perdure.connect(store, shutdown=shutdown)
    session = await sessions.open("ada")
    session.append(Message.user("durable"))
    await session.save()
    store.down()
    session.append(Message.user("spilled"))
    report = await sessions.aclose()
    assert [one.key.agent for one in report.spilled] == ["ada"]
    async with perdure.connect(root, shutdown=Shutdown(signals=False)) as other:
        async with other.open("ada") as session, session.turn():
            session.append(Message.user("somebody else's"))
    (file,) = spill.iterdir()
    for _ in range(2):
        async with perdure.connect(root, shutdown=shutdown) as sessions:
            async with sessions.open("ada") as session:
                said = [message.text for message in session.context()]
                assert said == ["durable", "somebody else's"]
                (kept,) = [s for s in session.restore_report.steps if s.what == "spill kept"]
                assert file.name in kept.detail
        assert list(spill.iterdir()) == [file]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows renames no folder in use")
async def test_a_store_that_is_moved_away_and_back_amid_turns_loses_nothing(
    tmp_path: Path,
) -> None:
    """Its folder is held open, so it is found wherever it lies; what is new at its place is not it."""
    root, away = tmp_path / "store", tmp_path / "away"
    turns = 12

    async def talk(id: str) -> None:
        async with sessions.open(id) as session:
            for number in range(turns):
                async with session.turn():
                    session.append(Message.user(f"{id} {number}"))
                if number == turns // 2:
                    halfway.set()

    async with perdure.connect(root, shutdown=Shutdown(signals=False)) as sessions:
        halfway = anyio.Event()
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(talk, f"a{number}")
            await halfway.wait()
            root.rename(away)
            root.mkdir()
            halfway = anyio.Event()
            for number in range(4):
                group.start_soon(talk, f"b{number}")
            await halfway.wait()
            assert list(root.iterdir()) == []
            root.rmdir()
            away.rename(root)
        assert sessions.health().status == "ok"
    async with perdure.connect(root, shutdown=Shutdown(signals=False)) as sessions:
        for id in [f"{kind}{number}" for kind in "ab" for number in range(4)]:
            view = await sessions.load(id)
            assert view is not None
            assert [message.text for message in view.context()] == [
                f"{id} {n}" for n in range(turns)
            ]


def _kinds() -> list[str]:
    """Modes stop everybody; the rest needs mounts, which not every user may have."""
    if sys.platform == "win32":
        return []
    return ["modes", *(["mounted", "full"] if may_mount() else [])]


@pytest.mark.parametrize("kind", _kinds())
def test_a_store_that_cannot_be_written_to_is_read_by_every_command_that_only_reads(
    kind: str, tmp_path: Path
) -> None:
    """Files and SQLite, killed and copied in the midst, in clear and encrypted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, "-m", "tests.integration.read_only", str(disk), kind]
    if kind != "modes":
        command = ["unshare", "-rm", *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen) == 6
    for name, one in seen.items():
        failed = {what: ran for what, ran in one["ran"].items() if ran[0]}
        assert (name, failed) == (name, {})
        exported = json.loads(one["ran"]["export"][1])
        assert "And 2 + 4?" in str(exported)
        used = one["used"]
        assert used["said"] == ["What is 2 + 3?", "5", "And 2 + 4?", "6"]
        assert used["exists"] == [True, False]
        assert used["listed"][0][0] == "ada"
        for act in ("open", "new", "post", "forget"):
            assert used[act][0] == "SessionError"
            assert "read_only=True" in used[act][1]
        _judge_the_files(kind, name, one)


def _judge_the_files(kind: str, name: str, one: dict[str, Any]) -> None:
    """Reading has changed none; to write, the store says what is wrong and how to mend it."""
    error, message = one["to write"]
    if kind == "full":
        cure = "free some room"
    else:
        cure = "mount it writable" if kind == "mounted" else "chown"
    # A killed store's last connection makes room for itself: what was in its log is then in place.
    if error != "nothing" or kind != "full" or name in {"file", "encrypted", "sqlite"}:
        assert error == "StoreUnavailableError"
        assert cure in message
        assert "connect with read_only=True" in message
    litter = () if kind != "full" else ("-shm", "-wal", "owners")
    assert [path for path, _ in one["changed"] if not path.endswith(litter or "//")] == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows renames no folder in use")
def test_an_outage_is_one_line_of_the_heartbeat_and_says_when_it_is_over(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HEARTBEATS, str(tmp_path / "store")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    said = [line.partition(" (")[0].partition(":")[0] for line in lines]
    assert [said.pop(0), *said[-2:]] == ["INFO connected", "INFO draining", "INFO stopped"]
    assert said[:-2] == [
        "WARNING heartbeat failed, trying again",
        "INFO the heartbeat works again",
    ]
    assert "gone for now" in lines[1]
    assert "Traceback" not in done.stdout + done.stderr


_HEARTBEATS = """
import asyncio, logging, sys
import perdure
from perdure import LeaseOptions, Shutdown
from perdure.stores.file import FileStore

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")


async def main():
    store, failures, over = FileStore(sys.argv[1]), [4], asyncio.Event()
    beat = store.heartbeat

    async def heartbeat():
        if failures[0]:
            failures[0] -= 1
            raise perdure.StoreUnavailableError("gone for now")
        answer = await beat()
        over.set()
        return answer

    store.heartbeat = heartbeat
    lease = LeaseOptions(ttl=1.0, heartbeat=0.02)
    async with perdure.connect(store, lease=lease, shutdown=Shutdown(signals=False)):
        await asyncio.wait_for(over.wait(), 50)
        await asyncio.sleep(0.1)


asyncio.run(main())
"""


LOCKING = """
import sqlite3, sys, time
other = sqlite3.connect(sys.argv[1], isolation_level=None)
other.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
time.sleep(60)
"""


async def test_another_process_that_keeps_sqlite_s_lock_keeps_no_manager_from_closing(
    tmp_path: Path,
) -> None:
    url, ids = f"sqlite:///{tmp_path}/x.db", [f"agent-{number}" for number in range(10)]
    shutdown = Shutdown(signals=False, deadline=0.2, turn_grace=0.1, hard_grace=0.1)
    sessions = await perdure.connect(url, shutdown=shutdown)
    for id in ids:
        session = await sessions.open(id)
        session.append(Message.user("kept"))
        await session.save()
    command = [sys.executable, "-c", LOCKING, f"{tmp_path}/x.db"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            assert (await sessions.aclose()).clean
            assert other.poll() is None  # each fold and each release would wait five seconds
        finally:
            other.kill()
    async with perdure.connect(url, shutdown=Shutdown(signals=False)) as again:
        for id in ids:
            async with again.open(id, wait=60) as session:
                assert [message.text for message in session.context()] == ["kept"]
