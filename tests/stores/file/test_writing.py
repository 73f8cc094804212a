"""Appending: what OK means, and what a failing disk or a takeover does to it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import pytest

from perdure._lib.files import Folder
from perdure.errors import CorruptRecordError, LeaseLostError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.records import Entry
from perdure.store import Batch, Outcome, Status, Taken, Terms, take_after
from perdure.stores.file import FileStore, acquire, leases, log
from perdure.testing.conformance._kit import append, append_ok, entries, group, read, take
from tests.stores.file.kit import KEY, lease_of, log_folder, open_folders, segments


def texts(count: int, size: int = 100) -> list[str]:
    return [f"{n}".ljust(size, ".") for n in range(count)]


async def test_the_log_is_readable_lines(store, root: Path) -> None:
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a", "b"))
    lines = [json.loads(line) for line in (log_folder(root) / "1-0.jsonl").read_text().splitlines()]
    assert [line["n"] for line in lines] == [1, 2, 3]
    assert [line.get("end") for line in lines] == [True, None, True]
    assert lines[0]["k"] == "epoch"
    assert lines[0]["r"]["owner"] == "one"
    assert lines[0]["r"]["key"] == {"agent": "agent", "session": "default", "tenant": ""}
    assert lines[1]["r"] == {"text": "a"}


async def test_what_was_written_is_counted(store, root: Path) -> None:
    grant = await take(store)
    before = (log_folder(root) / "1-0.jsonl").stat().st_size
    outcome = await append(store, grant, 2, *group("a", "b"))
    assert before + outcome.written == (log_folder(root) / "1-0.jsonl").stat().st_size


async def test_a_full_segment_is_followed_by_another(
    store, open_store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "SEGMENT_BYTES", 2000)
    grant = await take(store)
    for seq, text in enumerate(texts(60), 2):
        await append_ok(store, grant, seq, *group(text))
    assert len(segments(root)) > 3
    assert all(path.stat().st_size <= 2000 for path in log_folder(root).iterdir())
    records = await read(store)
    assert [record.seq for record in records] == list(range(1, 62))
    assert entries(records) == [entry for text in texts(60) for entry in group(text)]
    other = await open_store("other")
    assert await read(other) == records
    assert await read(other, reverse=True) == records[::-1]
    grant = await take(other)
    assert grant.head == 62
    await append_ok(other, grant, 63, *group("after"))
    assert len(await read(store)) == 63


async def test_sending_again_is_known_over_segments(store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "SEGMENT_BYTES", 1000)
    grant = await take(store)
    sent = [entry for text in texts(20) for entry in group(text)]
    for seq, entry in enumerate(sent, 2):
        await append_ok(store, grant, seq, entry)
    for first in (2, 10, 21):
        await append_ok(store, grant, first, *sent[first - 2 :])
    assert (await append(store, grant, 10, *group("other"))).status is Status.PERMANENT
    assert entries(await read(store)) == sent


async def test_a_large_batch_gets_a_segment_to_itself(
    store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "SEGMENT_BYTES", 1000)
    grant = await take(store)
    head = 1
    for size in (10, 5000, 10, 5000):
        head = await append_ok(store, grant, head + 1, *group("x" * size))
    assert len(await read(store)) == 5
    assert len(segments(root)) == 4


# a disk that fails


async def test_a_sync_that_fails_once_costs_nothing(store, open_store, disk, root: Path) -> None:
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    disk.bad_syncs = 1
    await append_ok(store, grant, 3, *group("b", "c"))
    await append_ok(store, grant, 5, *group("d"))
    assert segments(root) == ["1-0.jsonl", "1-1.jsonl"]
    for reader in (store, await open_store("other")):
        assert tuple(entries(await read(reader))) == group("a") + group("b", "c") + group("d")


@pytest.mark.parametrize("failures", [2, 3, 7])
async def test_syncs_that_go_on_failing_leave_the_batch_in_doubt(
    store, open_store, disk, failures: int
) -> None:
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    disk.bad_syncs = failures
    outcomes = []
    while not outcomes or outcomes[-1].status is not Status.OK:
        outcomes.append(await append(store, grant, 3, *group("b", "c")))
    for outcome in outcomes[:-1]:
        assert outcome.status is Status.IN_DOUBT
        assert isinstance(outcome.error, StoreUnavailableError)
        assert isinstance(outcome.error.__cause__, OSError)
    assert len(outcomes) == 1 + failures // 2
    await append_ok(store, grant, 5, *group("d"))
    wanted = group("a") + group("b", "c") + group("d")
    assert tuple(entries(await read(store))) == wanted
    other = await open_store("other")
    grant = await take(other)
    assert grant.head == 6
    assert tuple(entries(await read(other))) == wanted


async def test_a_batch_in_doubt_may_be_changed_by_the_sender(store, open_store, disk) -> None:
    grant = await take(store)
    disk.bad_syncs = 2
    assert (await append(store, grant, 2, *group("a"))).status is Status.IN_DOUBT
    await append_ok(store, grant, 2, *group("b"), *group("c"))
    for reader in (store, await open_store("other")):
        assert tuple(entries(await read(reader))) == group("b") + group("c")


@pytest.mark.parametrize("released", [True, False])
async def test_what_a_failed_sync_has_lost_is_nothing_that_others_go_on_behind(
    store, open_store, disk, root: Path, released: bool
) -> None:
    """F5: memory shows what is not on the disk; nobody may build on it."""
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    disk.bad_syncs, disk.remembers = 2, not released
    assert (await append(store, grant, 3, *group("lost"))).status is Status.IN_DOUBT
    if released:
        await store.release(KEY, grant.epoch)
    disk.remembers = False
    other = await open_store("other")
    grant = await take(other)
    await append_ok(other, grant, grant.head + 1, *group("b"))
    disk.cut(log_folder(root))
    reader = await open_store("reader")
    assert tuple(entries(await read(reader))) == group("a") + group("b")


async def test_an_error_while_looking_for_a_successor_is_no_absence(
    store, open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = await take(store)
    real = os.stat

    def look(path, *args, **options):
        if path == "lease-2.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", look)
        outcome = await append(store, grant, 2, *group("a"))
        assert outcome.status is Status.IN_DOUBT
    await append_ok(store, grant, 2, *group("a"))


async def test_an_append_that_is_begun_is_fenced_as_well(store) -> None:
    old = await take(store)
    new = await take(store)
    outcomes = []
    batch = Batch(KEY, old.epoch, new.head + 1, group("zombie"))
    assert not store.begin_append([batch], outcomes.append)
    assert (await append(store, old, new.head + 1, *group("zombie"))).status is Status.CONFLICT
    assert len(await read(store)) == 2


async def test_appends_that_hang_leave_threads_for_others(
    store, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = store.capabilities.parallelism
    hung = [await take(store, SessionKey(f"hung{n}")) for n in range(slots)]
    other = await take(store)
    append_to, released = log.LogWriter.append, threading.Event()

    def hang(writer: log.LogWriter, batch: Batch) -> Outcome:
        if writer.key != KEY:
            released.wait(60)
        return append_to(writer, batch)

    monkeypatch.setattr(log.LogWriter, "append", hang)
    outcomes: list[Outcome] = []
    for grant in hung:
        batch = Batch(grant.key, grant.epoch, 2, group("late"))
        assert store.begin_append([batch], outcomes.extend)
    try:
        with anyio.fail_after(30):
            await append_ok(store, other, 2, *group("a"))
        assert outcomes == []
    finally:
        released.set()
    with anyio.fail_after(30):
        while len(outcomes) < len(hung):
            await anyio.sleep(0.01)
    assert {outcome.status for outcome in outcomes} == {Status.OK}


def test_a_writer_that_is_busy_keeps_its_files_and_nobody_waits_for_it() -> None:
    class Writer:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.is_open = True

        def close_files(self) -> None:
            self.is_open = False

    files, busy, idle, other = log.OpenFiles(2), Writer(), Writer(), Writer()
    for writer in (busy, idle):
        with writer.lock:
            files.touch(writer)  # type: ignore[arg-type]  # as much of one as it uses
    with busy.lock, other.lock:
        closing = threading.Thread(target=files.touch, args=[other], daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
        assert (busy.is_open, idle.is_open, other.is_open) == (True, True, True)
    files.close_all()
    assert (busy.is_open, idle.is_open, other.is_open) == (False, False, False)


SENT = group("first", "second") + group("third")


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
async def test_a_full_disk_loses_nothing_and_saving_goes_on(
    store, open_store, disk, root: Path, full: int
) -> None:
    grant = await take(store)
    head = await append_ok(store, grant, 2, *group("before"))
    disk.full = full
    size = 320  # of what SENT amounts to, at least
    for room in range(0, size, 37):
        disk.room = room
        outcome = await append(store, grant, head + 1, *SENT)
        if outcome.status is Status.OK:
            break
        assert outcome.status in (Status.TRANSIENT, Status.IN_DOUBT)
        assert isinstance(outcome.error, StoreUnavailableError)
        assert "continues by itself" in str(outcome.error) or "ulimit" in str(outcome.error)
        found = entries(await read(store))
        assert tuple(found[:1]) == group("before")
    disk.room = None
    await append_ok(store, grant, head + 1, *SENT)
    await append_ok(store, grant, head + 4, *group("after"))
    for reader in (store, await open_store("other")):
        assert tuple(entries(await read(reader))) == group("before") + SENT + group("after")
    assert segments(root) == ["1-0.jsonl"]


async def test_nothing_whole_was_written_means_transient(store, disk) -> None:
    grant = await take(store)
    disk.room = 10
    outcome = await append(store, grant, 2, *SENT)
    assert outcome.status is Status.TRANSIENT
    assert len(await read(store)) == 1


async def test_another_batch_behind_a_torn_one_leaves_it_behind_a_seal(
    store, open_store, disk, root: Path
) -> None:
    grant = await take(store)
    disk.room = 150  # the first group and a part of the second
    outcome = await append(store, grant, 2, *group("torn"), *group("x" * 200))
    assert outcome.status is Status.IN_DOUBT
    disk.room = None
    await append_ok(store, grant, 2, *group("other"))
    assert segments(root) == ["1-0.jsonl", "1-1.jsonl"]
    for reader in (store, await open_store("other")):
        assert tuple(entries(await read(reader))) == group("other")


async def test_a_disk_that_is_full_at_a_new_segment_is_waited_for(
    store, open_store, disk, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "SEGMENT_BYTES", 500)
    grant = await take(store)
    head = await append_ok(store, grant, 2, *group("x" * 100))
    for room in (0, 1, 100, 150):
        disk.room = room
        assert (await append(store, grant, head + 1, *group("y" * 200))).status is Status.TRANSIENT
    disk.room = None
    head = await append_ok(store, grant, head + 1, *group("y" * 200))
    assert segments(root) == ["1-0.jsonl", "1-1.jsonl"]
    other = await open_store("other")
    grant = await take(other)
    assert grant.head == head + 1
    assert tuple(entries(await read(other))) == group("x" * 100) + group("y" * 200)


async def test_an_error_of_the_disk_while_writing_leads_to_a_new_segment(
    store, open_store, disk
) -> None:
    grant = await take(store)
    disk.full, disk.room = errno.EIO, 40
    outcome = await append(store, grant, 2, *SENT)
    assert outcome.status is Status.TRANSIENT
    disk.room = None
    await append_ok(store, grant, 2, *SENT)
    for reader in (store, await open_store("other")):
        assert tuple(entries(await read(reader))) == SENT


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
async def test_limits_of_the_kernel_s_own_are_met_and_lifted(root: Path) -> None:
    program = f"""
import anyio, resource
from perdure.errors import StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.store import Status
from perdure.stores.file import FileStore
from perdure.testing.conformance._kit import append, append_ok, entries, group, read, take
async def main():
    store = FileStore({str(root)!r})
    await store.open()
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    for _ in range(3):
        outcome = await append(store, grant, 3, *group("b" * 2000))
        assert outcome.status is Status.TRANSIENT, outcome
        assert len(await read(store)) == 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await append_ok(store, grant, 3, *group("b" * 2000))
    assert tuple(entries(await read(store))) == group("a") + group("b" * 2000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        await take(store, SessionKey("other"))
    except StoreUnavailableError as error:
        assert "ulimit -n" in str(error), error
    else:
        raise AssertionError("it needed no file")
    await append_ok(store, grant, 4, *group("c"))  # its files are open
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (await take(store, SessionKey("other"))).head == 1
    await store.aclose()
    print("all of it is there")
anyio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "all of it is there\n"), done.stderr


@pytest.fixture
async def thrifty(open_store, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    """A store that has three sessions' files open at most."""
    monkeypatch.setattr("perdure.stores.file.store.descriptor_limit", lambda: 12)
    return await open_store("one")


async def closed_file(store, root: Path) -> Taken:
    """Hold a session of which the files were closed, since others were used."""
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    for name in "xyz":
        await append_ok(store, await take(store, SessionKey(name)), 2, *group("a"))
    assert KEY.agent not in open_folders(root)
    return grant


async def test_a_file_that_somebody_cut_is_not_written_to(thrifty, root: Path) -> None:
    grant = await closed_file(store := thrifty, root)
    path = log_folder(root) / "1-0.jsonl"
    os.truncate(path, path.stat().st_size - 5)
    outcome = await append(store, grant, 3, *group("b"))
    assert outcome.status is Status.PERMANENT
    assert isinstance(outcome.error, CorruptRecordError)
    assert str(path) in str(outcome.error)


async def test_a_file_that_somebody_wrote_to_is_not_gone_on_with(thrifty, root: Path) -> None:
    grant = await closed_file(store := thrifty, root)
    path = log_folder(root) / "1-0.jsonl"
    with path.open("ab") as file:
        file.write(b"x\n")
    outcome = await append(store, grant, 3, *group("b"))
    assert outcome.status is Status.PERMANENT
    assert "another process changed it" in str(outcome.error)


async def test_a_folder_that_was_removed_is_nobody_s_session(store, root: Path) -> None:
    grant = await take(store)
    shutil.rmtree(root / "agents" / "agent")
    outcome = await append(store, grant, 2, *group("a"))
    assert outcome.status is Status.CONFLICT
    assert not (root / "agents" / "agent").exists()


async def test_few_files_stay_open_and_every_session_goes_on(thrifty, root: Path) -> None:
    store = thrifty
    keys = [SessionKey(f"s{n}") for n in range(8)]
    grants = [await take(store, key) for key in keys]
    for round_ in range(3):
        for grant in grants:
            await append_ok(store, grant, 2 + round_, *group(str(round_)))
        assert len(open_folders(root)) == 3
    for key in keys:
        assert len(await read(store, key)) == 4


async def test_few_folders_stay_open_when_inboxes_are_read(thrifty) -> None:
    """What a server does all the time for sessions that say nothing."""
    store = thrifty
    grants = [await take(store, SessionKey(f"s{n}")) for n in range(12)]
    before = len(os.listdir("/dev/fd"))
    for grant in grants:
        await store.receive(grant.key, grant.epoch)
    assert len(os.listdir("/dev/fd")) < before + 6


async def test_kinds_of_the_store_s_own_are_refused(store) -> None:
    grant = await take(store)
    for kind in ("epoch", "segment", "no kind"):
        outcome = await append(store, grant, 2, Entry(kind, b"{}"))
        assert outcome.status is Status.PERMANENT
    assert (await append(store, grant, 2, Entry("message", b"{\n}"))).status is Status.PERMANENT
    await append_ok(store, grant, 2, *group("a"))


async def test_an_abandoned_append_is_waited_for_without_a_thread(store, disk) -> None:
    grant = await take(store)
    outcomes, syncing, go_on = [], threading.Event(), threading.Event()

    def hang() -> None:
        syncing.set()
        go_on.wait(60)

    async def send() -> None:
        outcomes.append(await append(store, grant, 2, *group("a")))

    disk.before_sync = hang
    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as given_up:
            given_up.start_soon(send)
            while not syncing.is_set():
                await anyio.sleep(0.001)
            given_up.cancel_scope.cancel()
        threads = threading.active_count()
        tasks.start_soon(send)
        await anyio.wait_all_tasks_blocked()
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        assert threading.active_count() == threads
        assert not outcomes
        go_on.set()
    assert outcomes[0].status is Status.OK


# a takeover in the middle of an append


def take_over(store, after: int = 1):
    """Return what takes the session over at once, as another process would."""
    return lambda: acquire.acquire(
        store._root, KEY, Terms(me=store.owner, after=after), store._owners
    )


async def test_what_was_written_before_the_seal_is_ok_however_late(store, open_store, disk) -> None:
    other = await open_store("other")
    grant = await take(store)
    disk.before_sync = take_over(other)
    outcome = await append(store, grant, 2, *group("a", "b"))
    assert outcome.status is Status.OK
    assert [(one.seq, one.epoch, one.kind) for one in await read(other)] == [
        (1, 1, "epoch"),
        (2, 1, "message"),
        (3, 1, "message"),
        (4, 2, "epoch"),
    ]
    outcome = await append(store, grant, 4, *group("late"))
    assert outcome.status is Status.CONFLICT
    assert isinstance(outcome.error, LeaseLostError)
    assert len(await read(other)) == 4


async def test_what_was_written_behind_the_seal_is_not_in_the_log(store, open_store, disk) -> None:
    other = await open_store("other")
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    disk.before_write = take_over(other)
    outcome = await append(store, grant, 3, *group("late"))
    assert outcome.status is Status.CONFLICT
    assert isinstance(outcome.error, LeaseLostError)
    assert outcome.error.facts["sealed_seq"] == 2
    assert tuple(entries(await read(other))) == group("a")


async def test_a_disk_that_fails_a_holder_who_was_overtaken_gets_no_new_segment(
    store, open_store, disk, root: Path
) -> None:
    """Nobody reads it, and nobody of a later life knows whose it is."""
    other = await open_store("other")
    grant = await take(store)
    folder = store._root.enter("agents", "agent")

    def overtaken() -> None:
        assert leases.publish(folder, lease_of(other._owners.me)) is not None
        disk.bad_syncs = 1

    disk.before_sync = overtaken
    outcome = await append(store, grant, 2, *group("a"))
    assert outcome.status is Status.IN_DOUBT
    assert segments(root) == ["1-0.jsonl"]
    folder.close()


async def test_leases_go_the_lowest_first(
    store, open_store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever holds one of them relies on it: the next one is absent only if all are below it."""
    agent = root / "agents/agent"
    await take(store)
    first = (agent / "lease-1.json").read_bytes()
    other = await open_store("other")
    await take_after(other, KEY, after=1)
    (agent / "lease-1.json").write_bytes(first)  # as a kill in between leaves it
    removed: list[str] = []
    remove = Folder.remove

    def noted(self: Folder, name: str) -> bool:
        removed.append(name)
        return remove(self, name)

    monkeypatch.setattr(Folder, "remove", noted)
    await take_after(store, KEY, after=2)
    gone = [name for name in removed if name in {"lease-1.json", "lease-2.json"}]
    assert gone == ["lease-1.json", "lease-2.json"]


async def test_a_batch_is_in_doubt_until_a_seal_decides(store, open_store, disk) -> None:
    other = await open_store("other")
    grant = await take(store)
    folder = store._root.enter("agents", "agent")
    disk.before_sync = lambda: leases.publish(folder, lease_of(other._owners.me))
    batch = Batch(KEY, grant.epoch, 2, group("a", "b"))
    for _ in range(3):
        (outcome,) = await store.append_many([batch])
        assert outcome.status is Status.IN_DOUBT
    folder.close()
    # The taker died without an epoch record: the next one reads what lies there.
    grant = await take_after(other, KEY, after=2)
    assert grant.head == 4
    (outcome,) = await store.append_many([batch])
    assert outcome.status is Status.OK
    assert tuple(entries(await read(other))) == group("a", "b")


async def test_a_number_that_comes_again_is_not_mistaken_for_the_own_one(
    store, open_store, disk, root: Path
) -> None:
    other = await open_store("other")
    old = await take(store)
    for after in (1, 2):
        await take_after(other, KEY, after=after)
    folder = store._root.enter("agents", "agent")
    # A taker that overslept everything publishes epoch 1 once more: its link finds no file.
    assert leases.publish(folder, lease_of(other._owners.me, 1)) is None
    assert (root / "agents/agent/lease-1.json").exists()
    (root / "agents/agent/lease-3.json").rename(root / "agents/agent/moved")
    folder.close()
    outcome = await append(store, old, 2, *group("zombie"))
    assert outcome.status is Status.CONFLICT


async def test_the_file_that_a_trim_has_left_as_the_first_is_missed(
    store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what lies before the mark of a trim may be gone."""
    monkeypatch.setattr(log, "SEGMENT_BYTES", 1000)
    grant = await take(store)
    for seq in range(2, 42):
        await append_ok(store, grant, seq, *group(str(seq).ljust(100, ".")))
    assert await store.trim(KEY, grant.epoch, 20) > 0
    (mark,) = log_folder(root).glob("*.start")
    first = mark.with_suffix(".jsonl")
    first.unlink()
    with pytest.raises(CorruptRecordError, match=first.name):
        await read(store)


async def test_a_trim_that_removes_no_file_frees_nothing(store) -> None:
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"), *group("b"))
    assert await store.trim(KEY, grant.epoch, 3) == 0
