"""The store is gone until shutdown: what was accepted is spilled, and replayed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure import (
    ConfigError,
    Message,
    Shutdown,
    UnsavedChangesError,
    connect,
)
from perdure.autosave.reports import ShutdownReport
from perdure.records.keys import SessionKey
from perdure.session import spill as spilling
from perdure.session.manager import SessionManager
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore, SwitchedStore

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="perdure")


def manager(backing: MemoryBacking, spill: Path, how: str | None = None) -> SessionManager:
    store = MemoryStore(backing=backing)
    shutdown = Shutdown(deadline=0.2, turn_grace=0, hard_grace=0.2, signals=False, spill=str(spill))
    if how is None:
        return connect(store, shutdown=shutdown)
    faulty = FaultyStore(store, fail_on="append_many", nth=2, how=how, times=10**9)  # type: ignore[arg-type]
    return connect(faulty, autosave=None, shutdown=shutdown)


def said(session: object) -> list[object]:
    return [message.content for message in session.context()]  # type: ignore[attr-defined]


async def lose_the_store(backing: MemoryBacking, spill: Path, how: str) -> ShutdownReport:
    sessions = await manager(backing, spill, how)
    session = await sessions.open("a")
    session.append(Message.user("saved"))
    await session.save()
    session.append(Message.user("spilled 1"), Message.user("spilled 2"))
    session.append(Message.user("spilled 3"))
    return await sessions.aclose()


@pytest.mark.parametrize("how", ["transient", "in_doubt_lost", "in_doubt_applied"])
async def test_spill_is_replayed_by_the_next_open(tmp_path: Path, how: str) -> None:
    backing = MemoryBacking()
    report = await lose_the_store(backing, tmp_path, how)
    assert report.clean
    assert [one.key.agent for one in report.spilled] == ["a"]
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    for _ in range(2):
        async with manager(backing, tmp_path) as sessions, sessions.open("a") as session:
            assert said(session) == ["saved", "spilled 1", "spilled 2", "spilled 3"]
            assert session.durable_version == session.version
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("begun", ["saved", "spilled"])
@pytest.mark.parametrize("died", [False, True])
async def test_a_cut_attempt_is_whole_once_its_spill_is_replayed(
    tmp_path: Path, begun: str, resume: bool, died: bool
) -> None:
    backing = MemoryBacking()
    store = SwitchedStore(MemoryStore(backing=backing))
    shutdown = Shutdown(
        deadline=0.2, turn_grace=0, hard_grace=0.2, signals=False, spill=str(tmp_path)
    )
    sessions = await connect(store, autosave=None, shutdown=shutdown)
    session = await sessions.open("a")
    session.append(Message.user("before"))
    await session.save()
    if begun == "spilled":
        store.down()
    with anyio.CancelScope() as scope:
        async with session.turn("request-17"):
            session.append(Message.user("Q"))
            if begun == "saved":
                await session.save()
                store.down()
            session.append(Message.assistant("half"))
            session.append(Message.assistant("an"))
            scope.cancel()
            await anyio.sleep_forever()
    session.append(Message.user("outside"))
    assert len((await sessions.aclose()).spilled) == 1
    [file] = tmp_path.iterdir()
    if died:  # amid an open, before the file was removed
        spilled = file.read_bytes()
        async with manager(backing, tmp_path) as sessions, sessions.open("a"):
            pass
        file.write_bytes(spilled)
    async with manager(backing, tmp_path) as sessions, sessions.open("a") as session:
        assert list(tmp_path.iterdir()) == []
        assert said(session) == ["before", "Q", "half", "an", "outside"]
        async with session.turn("request-17", resume=resume) as turn:
            assert [message.text for message in turn.messages] == ["Q", "half", "an"]
            assert turn.resumed is resume
        kept = ["Q", "half", "an"] if resume else []
        assert said(session) == ["before", *kept, "outside"]


async def test_what_no_turn_had_is_of_none_once_it_is_replayed(tmp_path: Path) -> None:
    backing = MemoryBacking()
    async with manager(backing, tmp_path) as sessions, sessions.open("a") as session:
        with pytest.raises(ConnectionError):
            async with session.turn("request-17"):
                session.append(Message.user("Q"))
                raise ConnectionError
    assert (await lose_the_store(backing, tmp_path, "transient")).spilled
    async with manager(backing, tmp_path) as sessions, sessions.open("a") as session:
        async with session.turn("request-17"):
            assert said(session) == ["saved", "spilled 1", "spilled 2", "spilled 3"]


async def test_conflicting_spill_is_kept_and_named(tmp_path: Path) -> None:
    backing = MemoryBacking()
    await lose_the_store(backing, tmp_path, "transient")
    async with connect(MemoryStore(backing=backing), shutdown=Shutdown(signals=False)) as other:
        async with other.open("a") as session:
            session.append(Message.user("somebody else's"))
    async with manager(backing, tmp_path) as sessions, sessions.open("a") as session:
        assert said(session) == ["saved", "somebody else's"]
        assert "spill kept" in [step.what for step in session.restore_report.steps]
    [file] = tmp_path.iterdir()
    assert file.name in str(session.restore_report)


async def test_a_spill_of_a_life_that_was_deleted_stays_out_of_the_next(tmp_path: Path) -> None:
    backing = MemoryBacking()
    await lose_the_store(backing, tmp_path, "transient")
    async with connect(MemoryStore(backing=backing), shutdown=Shutdown(signals=False)) as other:
        await other.delete("a")
        for _ in range(3):  # its log ends where the other one's did
            await (await other.open("a")).aclose()
    async with manager(backing, tmp_path) as sessions, sessions.open("a") as session:
        assert said(session) == []
        assert "spill kept" in [step.what for step in session.restore_report.steps]
    assert len(list(tmp_path.iterdir())) == 1


async def test_a_spill_of_a_store_that_was_here_before_stays_out_of_the_new_one(
    tmp_path: Path,
) -> None:
    await lose_the_store(MemoryBacking(), tmp_path, "transient")
    anew = MemoryBacking()  # at the same place, with a log that ends where the other one's did
    async with manager(anew, tmp_path / "none") as sessions, sessions.open("a") as session:
        session.append(Message.user("saved"))
    for _ in range(2):
        async with manager(anew, tmp_path) as sessions, sessions.open("a") as session:
            assert said(session) == ["saved"]
            steps = [step.detail for step in session.restore_report.steps]
            assert any("it is of another store" in str(detail) for detail in steps)
    assert len([one for one in tmp_path.iterdir() if one.is_file()]) == 1


async def test_one_spill_that_fails_costs_the_others_nothing(tmp_path: Path) -> None:
    class Sealing(MemoryStore):
        def transform_spill(self, key: SessionKey, *where: object) -> object:
            if key.agent == "a":
                raise RuntimeError("the key service's own error")
            return where[-1]

        async def restore_session_records(self, key: SessionKey, records: object) -> object:
            return records

    store = FaultyStore(Sealing(), fail_on="append_many", times=None)
    store.transform_spill = Sealing().transform_spill  # type: ignore[attr-defined]
    store.restore_session_records = Sealing().restore_session_records  # type: ignore[attr-defined]
    shutdown = Shutdown(deadline=0.1, turn_grace=0, signals=False, spill=str(tmp_path))
    sessions = await connect(store, shutdown=shutdown)
    for id in ("a", "b"):
        (await sessions.open(id)).append(Message.user("unsaved"))
    report = await sessions.aclose()
    assert [one.key.agent for one in report.spilled] == ["b"]
    assert [one.key.agent for one in report.unsaved] == ["a"]


LEFT = """
import asyncio, sys
import perdure
from perdure import Message, Shutdown

async def main():
    shutdown = Shutdown(spill=sys.argv[2])
    sessions = await perdure.connect(sys.argv[1], autosave=None, shutdown=shutdown)
    for id, texts in (("a", ["saved", "spilled"]), ("b", ["saved"])):
        session = await sessions.open(id)
        session.append(Message.user(texts[0]))
        await session.save()
        for text in texts[1:]:
            session.append(Message.user(text))

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()  # so that nobody can save any more
"""


def test_what_a_loop_that_was_just_left_had_is_spilled_at_the_exit(tmp_path: Path) -> None:
    """The loop is never closed, so nothing tells the manager; only the end of the process does."""
    root, spill = tmp_path / "store", tmp_path / "spill"
    subprocess.run([sys.executable, "-c", LEFT, str(root), str(spill)], check=True)
    assert len(list(spill.iterdir())) == 1

    async def look() -> None:
        shutdown = Shutdown(signals=False, spill=str(spill))
        async with connect(root, shutdown=shutdown) as sessions, sessions.open("a") as session:
            assert said(session) == ["saved", "spilled"]

    anyio.run(look)
    assert list(spill.iterdir()) == []


async def test_without_a_folder_of_ones_own_the_error_names_the_users(tmp_path: Path) -> None:
    store = FaultyStore(FileStore(tmp_path / "a"), fail_on="append_many", nth=2, times=None)
    shutdown = Shutdown(deadline=0.1, turn_grace=0, hard_grace=0.2, signals=False)
    sessions = await connect(store, autosave=None, shutdown=shutdown)
    session = await sessions.open("a")
    session.append(Message.user("saved"))
    await session.save()
    session.append(Message.user("unsaved"))
    report = await sessions.aclose()
    [unsaved] = report.unsaved + report.in_doubt
    with pytest.raises(UnsavedChangesError, match=f"kept in {unsaved.kept_in}, and the next open"):
        report.raise_if_unsaved()
    for root, texts in (("b", []), ("a", ["saved", "unsaved"])):  # each store has its own
        async with connect(tmp_path / root) as sessions, sessions.open("a") as session:
            assert said(session) == texts


async def test_damaged_spill_is_left_as_it_is(tmp_path: Path) -> None:
    backing = MemoryBacking()
    await lose_the_store(backing, tmp_path, "transient")
    [file] = tmp_path.iterdir()
    os.truncate(file, file.stat().st_size - 5)
    async with manager(backing, tmp_path) as sessions, sessions.open("a") as session:
        assert said(session) == ["saved"]
    assert list(tmp_path.iterdir()) == [file]


# a disk that hangs


class Disk:
    """Blocks calls that write to it, until `mend`."""

    def __init__(self) -> None:
        self.answers: threading.Event = threading.Event()
        self.ended: list[str] = []
        """The names of the blocked calls that came to their end."""

    def blocking(self, call: Callable[..., str], *, only: str = "") -> Callable[..., str]:
        def blocked(folder: str, *what: Any) -> str:
            name = what[0].key.agent if what else folder
            if not only or name == only:
                self.answers.wait(60)
                self.ended.append(name)
            return call(folder, *what)

        return blocked

    def mend(self) -> None:
        self.answers.set()
        for thread in threading.enumerate():
            if thread.name == "perdure:spill":
                thread.join()


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.mend()


async def closed_without_store(backing: MemoryBacking, spill: Path, *ids: str) -> ShutdownReport:
    store = FaultyStore(MemoryStore(backing=backing), fail_on="append_many", nth=2, times=None)
    shutdown = Shutdown(deadline=0, turn_grace=0, hard_grace=0, signals=False, spill=str(spill))
    sessions = await connect(store, autosave=None, shutdown=shutdown)
    first = await sessions.open(ids[0])
    first.append(Message.user("saved"))
    await first.save()
    for id in ids:
        (await sessions.open(id)).append(Message.user("unsaved"))
    return await sessions.aclose()


async def test_closing_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spilling, "PATIENCE", 0.1)
    monkeypatch.setattr(spilling, "write", disk.blocking(spilling.write))
    backing = MemoryBacking()
    report = await closed_without_store(backing, tmp_path, "a")
    assert disk.ended == []
    assert not report.clean
    assert report.spilled == ()
    [unsaved] = report.unsaved + report.in_doubt
    assert (unsaved.records, unsaved.kept_in) == (1, None)
    disk.mend()
    for _ in range(2):  # what its thread has written since does no harm
        async with manager(backing, tmp_path) as sessions, sessions.open("a") as session:
            assert said(session) == ["saved", "unsaved"]
        assert list(tmp_path.iterdir()) == []


async def test_a_spill_file_whose_name_may_be_lost_counts_as_unsaved(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spilling, "settle", disk.blocking(spilling.settle))
    report = await closed_without_store(MemoryBacking(), tmp_path, "a")
    assert disk.ended == []
    assert report.spilled == ()
    assert len(report.unsaved + report.in_doubt) == 1
    assert len(list(tmp_path.iterdir())) == 1


async def test_one_spill_that_hangs_costs_the_others_nothing(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spilling, "write", disk.blocking(spilling.write, only="b"))
    report = await closed_without_store(MemoryBacking(), tmp_path, "a", "b", "c")
    assert disk.ended == []
    assert [one.key.agent for one in report.spilled] == ["a", "c"]
    assert [one.key.agent for one in report.unsaved + report.in_doubt] == ["b"]


async def test_all_is_spilled_however_little_time_is_left(tmp_path: Path) -> None:
    ids = [f"a{number}" for number in range(40)]
    report = await closed_without_store(MemoryBacking(), tmp_path, *ids)
    assert report.clean
    assert sorted(one.key.agent for one in report.spilled) == sorted(ids)


def test_without_another_thread_the_callers_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError(f"can't start {thread.name}")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert list(spilling.completed("a folder", [1, 2], str)) == [(1, "1"), (2, "2")]


@pytest.mark.anyio
async def test_a_folder_that_can_hold_no_spill_files_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spill = str(tmp_path / "file" / "spill")
    with pytest.raises(ConfigError, match=f"spill='{spill}' cannot be used: .*file is no folder"):
        await connect("memory:", shutdown=Shutdown(signals=False, spill=spill))
    async with connect("memory:", shutdown=Shutdown(signals=False, spill=str(tmp_path / "a/b"))):
        assert not (tmp_path / "a").exists()
