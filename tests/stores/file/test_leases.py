"""Leases on files: who is alive, what a deletion leaves, and takers that overslept."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyio
import pytest

from perdure import Message, Shutdown, connect
from perdure._lib.files import Folder
from perdure.errors import (
    ConfigError,
    LeaseHeldError,
    LeaseLostError,
    SessionError,
    StoreUnavailableError,
)
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE
from perdure.store import PendingItem, Status, Terms, take_after
from perdure.stores.file import FileStore, acquire, documents, leases
from perdure.stores.file.store import THREADS, Home
from perdure.testing.conformance._kit import (
    append,
    append_ok,
    entries,
    group,
    manifest_of,
    read,
    take,
)
from tests.stores.file.kit import KEY, contents, log_folder, rewrite_lease, segments, writers

HOLD = """
import anyio, sys
from perdure.stores.file import FileStore
from perdure.testing.conformance._kit import append_ok, group, take
async def main():
    store = FileStore(sys.argv[1])
    await store.open()
    grant = await take(store)
    await append_ok(store, grant, grant.head + 1, *group("from a process"))
    print("ready", flush=True)
    await anyio.to_thread.run_sync(sys.stdin.read)
    {end}
anyio.run(main)
"""


def holder_process(root: Path, end: str = "pass") -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(end=end), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def finish(process: subprocess.Popen[bytes]) -> None:
    process.communicate()


async def test_a_killed_process_is_known_to_be_dead_at_once(store, root: Path) -> None:
    process = holder_process(root)
    holder = await store.holder(KEY)
    assert holder is not None
    assert (holder.alive, holder.pid) == (True, process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finish(process)
    holder = await store.holder(KEY)
    assert holder is not None
    assert holder.alive is False
    grant = await take_after(store, KEY, after=holder.epoch)
    assert grant.head == 3
    assert tuple(entries(await read(store))) == group("from a process")


FORK_AND_DIE = """
    import os, signal, time
    child = os.fork()
    if child:
        os.kill(os.getpid(), signal.SIGKILL)
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(60)
    os._exit(0)"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
async def test_a_forked_child_does_not_keep_its_parent_alive(store, root: Path) -> None:
    process = holder_process(root, FORK_AND_DIE.strip())
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.wait()
    child = int(process.stdout.readline())
    try:
        holder = await store.holder(KEY)
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()
    assert holder is not None
    assert holder.alive is False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
async def test_a_store_is_of_no_use_in_a_forked_child(store) -> None:
    grant = await take(store)
    here = store._opened
    # What a child sees: the process that opened the store was another.
    here._pid += 1
    try:
        with pytest.raises(StoreUnavailableError, match="another process"):
            await store.holder(KEY)
        outcome = await append(store, grant, 2, *group("a"))
        assert outcome.status is Status.CONFLICT
    finally:
        here._pid -= 1
    await append_ok(store, grant, 2, *group("a"))


async def test_a_store_that_is_not_open_says_so(root: Path) -> None:
    store = FileStore(root)
    with pytest.raises(StoreUnavailableError, match="not open"):
        await store.holder(KEY)
    with pytest.raises(StoreUnavailableError, match="not open"):
        await read(store)
    await store.aclose()
    assert not root.exists()


async def test_an_owner_s_id_is_its_own(open_store, root: Path) -> None:
    await open_store("me")
    other = FileStore(root, owner="me")
    with pytest.raises(ConfigError, match="in use"):
        await other.open()
    assert FileStore(root).owner != FileStore(root).owner


async def test_an_id_may_be_used_again_when_its_owner_is_gone(open_store, root: Path) -> None:
    first = await open_store("me")
    await take(first)
    await first.aclose()
    again = await open_store("me")
    holder = await again.holder(KEY)
    assert holder is not None
    assert holder.alive is True


async def test_the_files_of_dead_owners_are_swept_and_no_others(open_store, root: Path) -> None:
    alive = await open_store("alive")
    for name in ("dead.lock", "dead.json"):
        (root / "owners" / name).write_bytes(b"")
    (root / "owners/dead.wanted").mkdir()
    (root / "owners/dead.wanted/letter").write_bytes(b"")
    await open_store("new")
    names = {path.name for path in (root / "owners").iterdir()}
    assert names == {
        f"{who}.{part}" for who in ("alive", "new") for part in ("lock", "json", "wanted")
    }
    await alive.aclose()
    names = {path.name for path in (root / "owners").iterdir()}
    assert names == {"new.lock", "new.json", "new.wanted"}


async def test_a_clock_that_jumps_changes_nothing(
    open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases are epochs and counters: no time of day is ever compared."""
    store, other = await open_store("one"), await open_store("other")
    now = time.time()
    data = b"a blob"
    name = name_of(data)
    grant = await take(store)
    for jump in (3600, -3600, 86400, -86400):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        head = await append_ok(store, grant, grant.head + 1, *group("a"))
        await store.write_documents(KEY, {"session.json": b"1"}, manifest_of(grant, head, {}))
        await store.put_blobs("", {name: data})
        await store.sweep("", (), 1800)  # it may be moved out of the way, and can be read
        assert await other.get_blob("", name) == data
        holder = await other.holder(KEY)
        assert holder is not None
        assert (holder.epoch, holder.alive, holder.released) == (grant.epoch, True, False)
        taken = await take(other)
        assert (await append(store, grant, head + 1, *group("late"))).status is Status.CONFLICT
        assert (taken.epoch, taken.head) == (grant.epoch + 1, head + 1)
        grant = await take(store)
    assert [record.seq for record in await read(other)] == list(range(1, grant.head + 1))


async def test_a_heartbeat_waits_for_nothing_else(open_store, root: Path) -> None:
    """However many reads are queued on a slow disk, they cost nobody his leases."""
    store, other = await open_store("one"), await open_store("other")
    await take(store)
    before = await other.holder(KEY)
    go_on = threading.Event()
    async with anyio.create_task_group() as tasks:
        for _ in range(2 * THREADS):
            tasks.start_soon(store._run_in_thread, "read", go_on.wait)
        await anyio.wait_all_tasks_blocked()
        try:
            with anyio.fail_after(60):
                await store.heartbeat()
        finally:
            go_on.set()
    holder = await other.holder(KEY)
    assert holder is not None
    assert before is not None
    assert holder.beat == before.beat + 1


async def test_a_letter_that_comes_while_its_reader_leaves_keeps_no_box(
    open_store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = await open_store("one"), await open_store("other")
    await take(store)
    remove_folder = Folder.remove_folder

    def late(self, name):
        monkeypatch.setattr(Folder, "remove_folder", remove_folder)
        other._owners.send("one", KEY, "handover")
        return remove_folder(self, name)

    monkeypatch.setattr(Folder, "remove_folder", late)
    await store.aclose()
    assert {path.name for path in (root / "owners").iterdir()} == {
        f"other.{part}" for part in ("lock", "json", "wanted")
    }


async def test_an_owner_of_another_boot_is_dead_here(open_store, root: Path) -> None:
    store, other = await open_store("one"), await open_store("other")
    await take(store)
    rewrite_lease(root / "agents/agent/lease-1.json", boot="before the restart")
    holder = await other.holder(KEY)
    assert holder is not None
    assert holder.alive is False


async def test_who_knows_no_boot_of_its_own_goes_by_the_lock(
    open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store("one")
    await take(store)
    with monkeypatch.context() as patch:
        patch.setattr(leases, "boot_id", lambda: "")
        other = await open_store("other")
    holder = await other.holder(KEY)
    assert holder is not None
    assert holder.alive is True
    await store.aclose()
    holder = await other.holder(KEY)
    assert holder is not None
    assert holder.alive is False


async def test_on_a_network_only_the_heartbeat_tells_of_other_machines(
    open_store, root: Path
) -> None:
    store, other = await open_store("one"), await open_store("other")
    await take(store)
    rewrite_lease(root / "agents/agent/lease-1.json", boot="another machine's")
    other._owners._local = False
    holder = await other.holder(KEY)
    assert holder is not None
    assert holder.alive is None
    await store.heartbeat()
    later = await other.holder(KEY)
    assert later is not None
    assert later.beat == holder.beat + 1


async def test_without_locks_only_the_heartbeat_tells(
    open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure._lib import platform

    monkeypatch.setattr(platform, "fcntl", None)
    monkeypatch.setattr(platform, "msvcrt", None)
    store, other = await open_store("one"), await open_store("other")
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    holder = await other.holder(KEY)
    assert holder is not None
    assert holder.alive is None
    assert (await take(other)).head == 3


async def test_a_letter_to_somebody_who_is_gone_is_lost_quietly(open_store) -> None:
    store, other = await open_store("one"), await open_store("other")
    await take(store)
    holder = await other.holder(KEY)
    assert holder is not None
    await store.aclose()
    await other.request_handover(KEY, holder)


async def test_a_letter_that_is_no_letter_is_thrown_away(store, root: Path) -> None:
    (root / "owners/one.wanted/noise").write_bytes(b"\xff\x00")
    asked = await store.heartbeat()
    assert (asked.handovers, asked.mail) == ((), ())
    assert list((root / "owners/one.wanted").iterdir()) == []


async def test_a_lease_that_is_not_whole_can_be_taken_over(open_store, root: Path) -> None:
    store, other = await open_store("one"), await open_store("other")
    await append_ok(store, await take(store), 2, *group("a"))
    (root / "agents/agent/lease-1.json").write_bytes(b'{"torn')
    holder = await other.holder(KEY)
    assert holder is not None
    assert (holder.epoch, holder.alive, holder.released) == (1, None, False)
    assert (await take_after(other, KEY, after=1)).head == 3


async def test_a_store_keeps_nothing_of_a_session_that_it_released(store) -> None:
    others = writers()
    grant = await take(store)
    assert writers() == others + 1
    await store.release(KEY, grant.epoch)
    outcome = await append(store, grant, 2, *group("late"))
    assert outcome.status is Status.CONFLICT
    await until_forgotten(others)


async def until_forgotten(others: int) -> None:
    """Wait until no writer is left but others: a thread keeps its last one for a moment."""
    with anyio.fail_after(60):
        while writers() > others:
            await anyio.sleep(0.001)


async def test_a_file_that_is_no_leftover_of_a_heartbeat_stays_beside_the_owners(
    store, root: Path
) -> None:
    for name in (".keep", ".beat.tmp"):
        (root / "owners" / name).write_bytes(b"x")
        os.utime(root / "owners" / name, (0, 0))
    await store.scrub()
    assert (root / "owners/.keep").exists()
    assert not (root / "owners/.beat.tmp").exists()


async def test_a_store_that_is_closed_leaves_no_file_open(open_store) -> None:
    before = len(os.listdir("/dev/fd"))
    store = await open_store("other")
    for number in range(30):
        key = SessionKey(f"agent-{number}")
        await append_ok(store, await take(store, key), 2, *group("a"))
    assert len(os.listdir("/dev/fd")) > before + 30
    await store.aclose()
    assert len(os.listdir("/dev/fd")) < before + 10


async def test_a_reader_adds_no_file_while_it_is_open(open_store, root: Path) -> None:
    await (await open_store("one")).aclose()
    before = sorted(root.rglob("*"))
    reader = FileStore(root)
    await reader.open_read_only()
    assert sorted(root.rglob("*")) == before
    await reader.aclose()


async def test_only_the_newest_lease_is_kept(open_store, root: Path) -> None:
    for owner in ("a", "b", "c"):
        store = await open_store(owner)
        grant = await take(store)
        await store.release(KEY, grant.epoch)
    names = sorted(path.name for path in (root / "agents/agent").glob("lease-*"))
    assert names == ["lease-3.json", "lease-3.released"]


async def test_a_takeover_leaves_no_litter(store, root: Path) -> None:
    (root / "agents/agent").mkdir(parents=True)
    (root / "agents/agent/.abc.tmp").write_bytes(b"half")
    await take(store)
    assert sorted(path.name for path in (root / "agents/agent").iterdir()) == [
        "lease-1.json",
        "log",
    ]


async def test_a_takeover_from_the_dead_leaves_no_litter_below(store, root: Path) -> None:
    """2.1: what killed holders left half-written goes with the next one who may remove it."""
    grant = await filled(store)
    places = [root / "agents/agent" / name for name in (".", "plugins", "quarantine")]
    places[-1].mkdir()
    for place in places:
        (place / ".abc.tmp").write_bytes(b"half")
    again = await take(store)
    assert [path for place in places for path in place.glob(".*.tmp")] == []
    for place in places:
        (place / ".abc.tmp").write_bytes(b"secret")
    await store.delete(KEY, again.epoch)
    assert grant.epoch < again.epoch
    assert not any(b"secret" in data for data in contents(root).values())


@pytest.mark.parametrize("step", ["publish", "remove_owned"])
async def test_an_acquire_that_fails_half_way_keeps_nobody_out(
    open_store, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Its owner lives and beats on, so nobody could wait for it to expire."""
    store, other = await open_store("one"), await open_store("other")
    await store.delete(KEY, (await filled(store)).epoch)

    def failing(place: object) -> None:
        original = getattr(place, step)

        def fail(*args: object, **options: object) -> None:
            original(*args, **options)
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(place, step, fail)

    with monkeypatch.context():
        failing(Folder if step == "publish" else documents)
        with pytest.raises(StoreUnavailableError):
            await take_after(store, KEY, after=2)
        monkeypatch.undo()
    holder = await other.holder(KEY)
    assert holder is not None
    assert (holder.epoch, holder.released) == (3, True)
    assert (await take(other)).epoch == 4


async def test_who_loses_a_race_to_itself_does_not_release_the_winner(store, monkeypatch) -> None:
    await take(store)
    original = Folder.publish

    def beaten(self, name, data):
        monkeypatch.setattr(Folder, "publish", original)
        acquire.acquire(store._root, KEY, Terms(me=store.owner, after=1), store._owners)
        original(self, name, data)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Folder, "publish", beaten)
    with pytest.raises(StoreUnavailableError):
        await take_after(store, KEY, after=1)
    holder = await store.holder(KEY)
    assert holder is not None
    assert (holder.epoch, holder.released) == (2, False)


async def test_a_taker_that_overslept_touches_nothing_of_its_successor_s_log(
    store, open_store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being written there has no end yet: it is neither cut nor set aside."""
    await append_ok(store, await take(store), 2, *group("a"))
    other, begin = await open_store("other"), acquire._Taking._begin_epoch
    log = log_folder(root)
    rivals = ("3-0.jsonl", "3-1.jsonl", "4-0.jsonl")

    def overtaken(mine, *args):
        monkeypatch.setattr(acquire._Taking, "_begin_epoch", begin)
        acquire.acquire(store._root, KEY, Terms(me=store.owner, after=2), store._owners)
        for name in rivals:
            with (log / name).open("ab") as file:
                file.write(b'{"s":4,"k":"mess')
        return begin(mine, *args)

    monkeypatch.setattr(acquire._Taking, "_begin_epoch", overtaken)
    with pytest.raises(LeaseHeldError, match=r"at epoch 3, not 1"):
        await take_after(other, KEY, after=1)
    assert [name for name in rivals if not (log / name).read_bytes().endswith(b"mess")] == []
    assert not (root / "agents/agent/quarantine").exists()
    assert tuple(entries(await read(other))) == group("a")


async def test_a_fold_of_an_older_epoch_proves_nothing_of_a_file_as_long(
    store, open_store, root: Path
) -> None:
    """The log of a holder that died is read from its own beginning, not from that offset."""
    grant = await take(store)
    head = await append_ok(store, grant, 2, *group("a" * 500))
    await store.write_documents(KEY, {}, manifest_of(grant, head, {}))
    folded = (log_folder(root) / segments(root)[0]).stat().st_size
    grant = await take(store)
    head = await append_ok(store, grant, grant.head + 1, *group("b"))
    newest = log_folder(root) / segments(root)[-1]
    before = newest.stat().st_size
    head = await append_ok(store, grant, head + 1, *group(""))
    line = newest.stat().st_size - before
    head = await append_ok(store, grant, head + 1, *group("c" * (folded - before - 2 * line)))
    assert newest.stat().st_size == folded
    written = await read(store)
    other = await open_store("other")
    assert (await take(other)).head == head + 1
    assert (await read(other))[:-1] == written


async def test_a_fold_of_less_than_the_epoch_has_before_it_keeps_nobody_out(
    store, open_store
) -> None:
    """Its manifest has no position in the log."""
    await append_ok(store, await take(store), 2, *group("a", "b", "c"))
    grant = await take(store)
    await store.write_documents(KEY, {}, manifest_of(grant, 1, {}))
    assert (await take(await open_store("other"))).head == grant.head + 1


async def acquire_abandoned(store, disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel an acquire while its thread has the disk, which has to find that out itself."""
    acquire, calls = Home.acquire, []

    def take_it(self, key, terms, abandoned):
        calls.append(abandoned)
        return acquire(self, key, terms, abandoned)

    monkeypatch.setattr(Home, "acquire", take_it)
    loop = anyio.lowlevel.current_token()
    with anyio.CancelScope() as scope:

        def cancel() -> None:
            anyio.from_thread.run_sync(scope.cancel, token=loop)
            assert calls[0].wait(60)

        disk.before_sync = cancel
        await take_after(store, KEY, after=0)


async def test_an_acquire_that_nobody_waits_for_lets_go(
    store, disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = writers()
    await acquire_abandoned(store, disk, monkeypatch)
    with anyio.fail_after(60):
        while True:
            holder = await store.holder(KEY)
            if holder is not None and holder.released and writers() == others:
                break
            await anyio.sleep(0.001)
    assert (await take(store)).epoch == 2


# releases that fail


def fail_once(monkeypatch: pytest.MonkeyPatch, function: str, code: int, end: str) -> list[str]:
    """Let a call of the system fail the first time that it is for a name with this end."""
    real, failed = getattr(os, function), list[str]()

    def fail(*args, **options):
        name = args[1] if function == "link" else args[0]
        if str(name).endswith(end) and not failed:
            failed.append(str(name))
            raise OSError(code, os.strerror(code), name)
        return real(*args, **options)

    monkeypatch.setattr(os, function, fail)
    return failed


@pytest.mark.parametrize("act", ["release", "delete"])
async def test_a_session_that_was_not_let_go_of_for_once_is_there_for_others_when_they_ask(
    act: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = Shutdown(signals=False)
    async with connect(root, shutdown=quiet) as one, connect(root, shutdown=quiet) as two:
        session = await one.open("agent")
        session.append(Message.user("hello"))
        await session.save()
        if act == "release":
            failed = fail_once(monkeypatch, "open", errno.EMFILE, ".released")
            await session.aclose()
        else:
            failed = fail_once(monkeypatch, "link", errno.ENOSPC, "lease-2.json")
            with pytest.raises(StoreUnavailableError, match="No space left"):
                await one.delete("agent")
        assert len(failed) == 1
        theirs = await two.open("agent", wait=60)
        assert [message.text for message in theirs.context()] == ["hello"]


async def test_an_acquire_that_nobody_waits_for_may_be_released_later(
    store, open_store, disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own release has failed, and nobody has its lease but the store."""
    failed = fail_once(monkeypatch, "open", errno.EMFILE, ".released")
    await acquire_abandoned(store, disk, monkeypatch)
    with anyio.fail_after(60):
        while not failed:
            await anyio.sleep(0.001)
    other = await open_store("other")
    holder = await other.holder(KEY)
    assert holder is not None
    assert not holder.released
    await store.release(KEY, holder.epoch)
    holder = await other.holder(KEY)
    assert holder is not None
    assert holder.released


async def test_releasing_a_session_whose_folder_is_gone_is_nothing(store, root: Path) -> None:
    others = writers()
    grant = await take(store)
    shutil.rmtree(root / "agents")
    with pytest.raises(LeaseLostError):
        await store.delete(KEY, grant.epoch)
    await store.release(KEY, grant.epoch)
    await until_forgotten(others)


# deletion


async def filled(store, key: SessionKey = KEY):
    grant = await take(store, key)
    head = await append_ok(store, grant, 2, *group("secret"))
    new = {"session.json": b"secret", "plugins/x.json": b"secret"}
    await store.write_documents(key, new, manifest_of(grant, head, new))
    return grant


async def test_a_deletion_leaves_the_epoch_and_what_is_not_ours(store, root: Path) -> None:
    grant = await filled(store)
    (root / "agents/agent/custom_instructions.md").write_bytes(b"mine")
    await filled(store, SessionKey("agent", "other"))
    await store.delete(KEY, grant.epoch)
    left = contents(root / "agents/agent")
    assert {name for name in left if not name.startswith("sessions/")} == {
        "lease-2.json",
        "custom_instructions.md",
    }
    assert not any(b"secret" in data for name, data in left.items() if "sessions/" not in name)
    assert tuple(entries(await read(store, SessionKey("agent", "other")))) == group("secret")


async def test_a_deletion_that_was_cut_short_is_finished_by_the_next_life(
    store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = await filled(store)

    def killed(*_: object, **__: object) -> None:
        raise OSError(5, "killed here")

    with monkeypatch.context() as patch:
        patch.setattr(leases, "remove_owned", killed)
        with pytest.raises(StoreUnavailableError):
            await store.delete(KEY, grant.epoch)
    assert await read(store) == []
    assert (await store.read_documents(KEY)).found == {}
    assert await store.sessions() == []
    grant = await take(store)
    assert (grant.epoch, grant.head, grant.created) == (3, 1, True)
    assert segments(root) == ["3-0.jsonl"]
    assert not any(b"secret" in data for data in contents(root).values())


@pytest.mark.parametrize("ended_by", ["a scrub", "the next life"])
async def test_a_deletion_that_was_cut_short_keeps_the_posts_that_it_was_to_keep(
    store, open_store, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    item = PendingItem("posted", MESSAGE, b'{"text":"kept"}', 1000.0)
    for key, keep_posts in (KEY, True), (SessionKey("agent", "other"), False):
        grant = await filled(store, key)
        await store.enqueue(key, [item])

        def killed(*_: object, **__: object) -> None:
            raise OSError(5, "killed here")

        with monkeypatch.context() as patch:
            patch.setattr(leases, "remove_owned", killed)
            with pytest.raises(StoreUnavailableError):
                await store.delete(key, grant.epoch, keep_posts=keep_posts)
        other = await open_store(f"other {keep_posts}")
        if ended_by == "a scrub":
            await other.scrub()
        new = await take(other, key)
        assert await other.receive(key, new.epoch) == ([item] if keep_posts else [])


async def test_scrubbing_finishes_a_deletion_that_was_cut_short(
    store, open_store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may ever open the session again; what was forgotten goes all the same."""
    keys = [KEY, SessionKey("agent", "other"), SessionKey("agent", "third", "tenant")]
    grants = [await filled(store, key) for key in keys]
    for path in list(root.rglob("plugins")):
        (path / ".abc.tmp").write_bytes(b"secret")
    kept = SessionKey("kept")
    await filled(store, kept)

    def killed(*_: object, **__: object) -> None:
        raise OSError(5, "killed here")

    with monkeypatch.context() as patch:
        patch.setattr(leases, "remove_owned", killed)
        for key, grant in zip(keys, grants, strict=True):
            with pytest.raises(StoreUnavailableError):
                await store.delete(key, grant.epoch)
    assert any(b"secret" in data for data in contents(root / "agents/agent").values())
    other = await open_store("other")
    await other.scrub()
    left = {name for name, data in contents(root).items() if b"secret" in data}
    assert all(name.startswith("agents/kept/") for name in left)
    assert tuple(entries(await read(other, kept))) == group("secret")
    assert set((await other.read_documents(kept)).found) == {"session.json", "plugins/x.json"}
    assert (await take(other)).epoch == 3


async def test_a_deleter_that_overslept_cannot_touch_the_next_life(store, root: Path) -> None:
    grant = await filled(store)
    await store.delete(KEY, grant.epoch)
    grant = await take(store)
    head = await append_ok(store, grant, 2, *group("new"))
    new = {"session.json": b"new"}
    await store.write_documents(KEY, new, manifest_of(grant, head, new))
    with store._root.enter("agents", "agent") as folder:
        documents.remove_owned(folder, KEY, below=2, evidence=True)
    assert tuple(entries(await read(store))) == group("new")
    assert (await store.read_documents(KEY)).found["session.json"].data == b"new"


async def test_what_an_old_life_writes_late_is_not_of_the_new_one(store, root: Path) -> None:
    await filled(store)
    old = contents(root / "agents/agent")
    await store.delete(KEY, 1)
    # A holder of the old life that overslept its deletion leaves this behind.
    await take(store)
    for name in ("manifest-1.json", "session.json", "plugins/x.json", "log/1-0.jsonl"):
        path = root / "agents/agent" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(old[name])
    found = await store.read_documents(KEY)
    assert (found.manifest, found.found) == (None, {})
    assert len(await read(store)) == 1
    again = await take(store)
    assert (again.epoch, again.head) == (4, 2)
    assert segments(root) == ["3-0.jsonl", "4-0.jsonl"]


async def test_a_deletion_loses_against_a_taker(open_store, monkeypatch) -> None:
    store, other = await open_store("one"), await open_store("other")
    grant = await filled(store)
    original = leases.mark_deleted

    def overtaken(*args: object, **options: bool):
        acquire.acquire(other._root, KEY, Terms(me=other.owner, after=1), other._owners)
        return original(*args, **options)

    monkeypatch.setattr(leases, "mark_deleted", overtaken)
    with pytest.raises(LeaseLostError):
        await store.delete(KEY, grant.epoch)
    assert tuple(entries(await read(other))) == group("secret")


async def test_a_race_is_lost_with_both_numbers(store) -> None:
    await take(store)
    with pytest.raises(LeaseHeldError, match=r"at epoch 1, not 0"):
        await take_after(store, KEY, after=0)


async def test_a_heartbeat_that_was_cut_short_leaves_nothing_for_good(
    root: Path, open_store
) -> None:
    """What a writer may still be at stays; the rest goes when a store is opened, or scrubbed."""
    leases = root / "owners"
    leases.mkdir(parents=True, mode=0o700)
    root.chmod(0o700)
    old, new = leases / ".old.tmp", leases / ".new.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    store = await open_store("one")
    assert (old.exists(), new.exists()) == (False, True)
    await store.scrub()
    assert new.exists()
    os.utime(new, (0, 0))
    await store.scrub()
    assert not new.exists()


async def test_who_was_killed_before_the_log_began_keeps_no_new_session_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its lease is there: nobody ever had the session."""
    quiet = Shutdown(signals=False)
    killed = FileStore(root, owner="killed")
    await killed.open()
    with monkeypatch.context() as patch:
        patch.setattr(acquire, "create_segment", lambda *_: 1 / 0)
        patch.setattr(leases, "release_unused", lambda *_: None)
        with pytest.raises(ZeroDivisionError):
            await take_after(killed, KEY, after=0)
    await killed.aclose()
    async with connect(root, shutdown=quiet) as sessions:
        async with sessions.open(KEY.agent, new=True) as session:
            assert session.epoch == 2
        with pytest.raises(SessionError, match="exists"):
            await sessions.open(KEY.agent, new=True)
