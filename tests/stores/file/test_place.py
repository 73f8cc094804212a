"""The store's folder: where it is, who may write to it, and what is said when it will not do."""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import stat
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import perdure
from perdure import Message
from perdure._lib import platform
from perdure.errors import ConfigError, StoreUnavailableError
from perdure.store import Batch, Status
from perdure.stores.file import FileStore, store as place
from perdure.testing.conformance._kit import append_ok, group, take
from tests.stores.file.kit import KEY

posix = pytest.mark.skipif(sys.platform == "win32", reason="modes and links are POSIX's")


async def opened(root: object = None) -> FileStore:
    store = FileStore(root)  # type: ignore[arg-type]
    await store.open()
    return store


async def test_the_argument_decides_then_the_environment_then_the_user_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    for root, wanted in (
        (tmp_path / "here", "here"),
        (str(tmp_path / "here"), "here"),
        (None, "home"),
    ):
        store = await opened(root)
        assert store.location == str(tmp_path / wanted)
        await store.aclose()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg" / "deep"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in (False, True):
        monkeypatch.setenv("PERDURE_HOME", "")
        if unset:
            monkeypatch.delenv("PERDURE_HOME")
        store = await opened()
        assert store.location.startswith(str(tmp_path))
        assert store.location.endswith("perdure")
        await store.aclose()


async def test_a_tilde_is_the_user_s_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = await opened("~/agents")
    assert store.location == str(tmp_path / "agents")
    await store.aclose()
    for bad in ("", "~nobody-of-this-name/x"):
        with pytest.raises(ConfigError, match="names no folder"):
            await opened(bad)


async def test_the_environment_is_asked_when_the_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore()
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "late"))
    await store.open()
    assert store.location == str(tmp_path / "late")
    await store.aclose()


@posix
@pytest.mark.parametrize("umask", [0, 0o177])
async def test_everything_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = await opened(tmp_path / "store")
        await append_ok(store, await take(store), 2, *group("a"))
        await store.put_blobs("", {})
    finally:
        os.umask(before)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    await store.aclose()


@posix
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
async def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ConfigError, match="chmod go-w"):
        await opened(root)
    assert list(root.iterdir()) == []
    root.chmod(0o755)
    await (await opened(root)).aclose()


async def used(root: Path) -> None:
    """Make a store with a session, closed again."""
    async with (
        perdure.connect(str(root), autosave=None) as sessions,
        sessions.open("agent") as session,
    ):
        session.append(Message.user("hello"))


async def context(root: Path) -> list[str]:
    async with (
        perdure.connect(str(root), autosave=None) as sessions,
        sessions.open("agent") as session,
    ):
        return [message.text for message in session.context()]


@posix
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
@pytest.mark.parametrize(
    "name", ["agents", "owners", "agents/agent", "agents/agent/log", "agents/agent/log/1-0.jsonl"]
)
async def test_what_others_can_write_to_in_the_store_is_refused(
    tmp_path: Path, name: str, mode: int
) -> None:
    root = tmp_path / "store"
    await used(root)
    (root / name).chmod(mode)
    with pytest.raises(StoreUnavailableError, match=f"mode {mode:04o}") as caught:
        await context(root)
    cure = re.search(r"chmod -R go-w \S+(?=,)", str(caught.value))
    assert cure is not None
    assert shlex.split(cure[0])[-1] == str(root / name)
    subprocess.run(shlex.split(cure[0]), check=True)
    assert await context(root) == ["hello"]


@posix
@pytest.mark.parametrize("folder", ["agents", "agents/agent"])
async def test_a_session_that_others_could_have_put_there_is_not_left_out_of_a_list(
    tmp_path: Path, folder: str
) -> None:
    root = tmp_path / "store"
    await used(root)
    store = await opened(root)
    (root / folder).chmod(0o777)
    with pytest.raises(StoreUnavailableError, match="can be written by others"):
        await store.sessions()
    await store.aclose()


@posix
async def test_what_was_to_be_saved_meanwhile_is_saved_when_the_folder_is_cured(
    tmp_path: Path,
) -> None:
    root = tmp_path / "store"
    async with perdure.connect(str(root)) as sessions, sessions.open("agent") as session:
        (root / "agents/agent/log").chmod(0o770)
        session.append(Message.user("hello"))
        with anyio.fail_after(60):
            while sessions.health().status == "ok":
                await anyio.sleep(0.01)
            assert session.durable_version < session.version
            (root / "agents/agent/log").chmod(0o700)
            await session.save()
    assert await context(root) == ["hello"]


@posix
@pytest.mark.parametrize("folder", ["", "agents"])
async def test_a_folder_of_another_user_is_warned_about_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    folder: str,
) -> None:
    """As root, in a container, a volume is often another user's: that is told, and no error."""
    root = tmp_path / "store"
    await used(root)
    user = os.geteuid() + 4242
    given_to(user, root / folder, monkeypatch)
    with caplog.at_level(logging.WARNING, "perdure"):
        assert await context(root) == ["hello"]
        assert await context(root) == ["hello"]
    (record,) = [one for one in caplog.records if "belongs to user" in one.message]
    assert record.message.startswith(f"{root / folder} belongs to user {user}, ")
    assert record.message.endswith(f"chown -R {os.geteuid()} {root / folder}")


def given_to(user: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file look as if it belonged to a user; only root could give it away."""
    inode = path.stat().st_ino

    def as_if(real):
        def look(*args, **options):
            status = real(*args, **options)
            fields = list(status[:10])
            fields[stat.ST_UID] = user
            return os.stat_result(fields) if status.st_ino == inode else status

        return look

    monkeypatch.setattr(os, "stat", as_if(os.stat))
    monkeypatch.setattr(os, "fstat", as_if(os.fstat))


@posix
async def test_who_cannot_change_a_shared_folder_is_told_to_use_one_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "volume"
    root.mkdir()
    root.chmod(0o2775)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: root.stat().st_uid + 4242)
        with pytest.raises(ConfigError, match="of your own below it, such as") as caught:
            await opened(root)
    await (await opened(str(caught.value).split()[-1])).aclose()


@posix
@pytest.mark.parametrize("url", ["{}", "sqlite:///{}/agents.db"])
async def test_a_folder_that_all_share_is_not_to_be_changed_for_one(
    tmp_path: Path, url: str
) -> None:
    """Such as /tmp: to take the others' right to write would break their programs."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    below = shared / "perdure"
    with pytest.raises(ConfigError, match=f"own below it, such as {below}"):
        await perdure.connect(url.format(shared))
    async with perdure.connect(url.format(below)) as sessions:
        await sessions.open("a")


async def test_a_missing_parent_is_told_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="mkdir -p"):
        await opened(tmp_path / "typo" / "store")
    assert list(tmp_path.iterdir()) == []


async def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    for root in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(ConfigError, match="choose another folder"):
            await opened(root)
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
async def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), path)
        return real(path, flags, *args, **kwargs)

    (tmp_path / "store").mkdir(0o700)
    (tmp_path / "store/owners").mkdir(0o700)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreUnavailableError, match="another") as caught:
        await opened(tmp_path / "store")
    assert isinstance(caught.value.__cause__, OSError)
    assert str(tmp_path / "store") in str(caught.value)


@posix
async def test_a_link_may_lead_to_the_store_and_not_lead_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = await opened(tmp_path / "link")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "real/agents").mkdir()
    (tmp_path / "real/agents/agent").symlink_to(elsewhere)
    for call in (lambda: take(store), lambda: store.head(KEY), lambda: store.read_documents(KEY)):
        with pytest.raises(ConfigError, match="symbolic link"):
            await call()
    assert list(elsewhere.iterdir()) == []
    assert await store.sessions() == []
    await store.aclose()


async def test_a_network_file_system_is_warned_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(place, "network_file_system", lambda _: "nfs4")
    with caplog.at_level(logging.WARNING, "perdure"):
        for _ in range(3):
            await (await opened(tmp_path / "store")).aclose()
    (record,) = [one for one in caplog.records if "network file system" in one.message]
    assert record.type == "nfs4"
    assert platform.network_file_system("/proc") is None


async def test_opening_and_closing_twice_is_fine(tmp_path: Path) -> None:
    store = await opened(tmp_path / "store")
    await store.open()
    await store.aclose()
    await store.aclose()
    await store.open()
    assert (await take(store)).epoch == 1
    await store.aclose()


async def test_it_says_what_it_is(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    assert store.location == str(tmp_path / "store")
    assert store.capabilities.durability == "fsync"
    assert not store.capabilities.shared
    assert not store.capabilities.memory_bound


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_connection_to_a_disk_that_hangs_can_be_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: bool
) -> None:
    root = tmp_path / "store"
    await (await opened(root)).aclose()
    began, go_on, open_root, roots = threading.Event(), threading.Event(), place.open_root, []

    def hang(*args, **options):
        began.set()
        go_on.wait(30)
        roots.append(open_root(*args, **options))
        return roots[0]

    monkeypatch.setattr(place, "open_root", hang)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(perdure.connect(root, read_only=read_only).__aenter__)
            await anyio.to_thread.run_sync(began.wait, 30)
            scope.cancel()
    assert roots == []  # the disk still hangs
    go_on.set()
    with anyio.fail_after(60):
        while not roots or roots[0]._fd not in {-1, None} or any((root / "owners").iterdir()):
            await anyio.sleep(0.001)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio has no other cancellation
async def test_an_open_that_nobody_waits_for_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A native cancellation passes any shield: the thread goes on, and has to tidy up."""
    import asyncio

    store = FileStore(tmp_path / "store", owner="me")
    began, go_on, entered = threading.Event(), threading.Event(), threading.Event()
    enter = place._open

    def slow(*args, **options):
        began.set()
        go_on.wait(60)
        try:
            return enter(*args, **options)
        finally:
            entered.set()

    monkeypatch.setattr(place, "_open", slow)
    task = asyncio.create_task(store.open())
    await anyio.to_thread.run_sync(began.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await anyio.to_thread.run_sync(entered.wait)
    monkeypatch.setattr(place, "_open", enter)
    with anyio.fail_after(30):
        while True:
            try:
                await store.open()  # under the same id
                break
            except ConfigError:
                await anyio.sleep(0.001)
    await store.aclose()
    assert list((tmp_path / "store/owners").iterdir()) == []


# closing, and threads


async def test_calls_that_hang_do_not_keep_the_store_from_being_closed(
    tmp_path: Path,
) -> None:
    store = await opened(tmp_path / "store")
    assert store._opened is not None
    release, ended = threading.Event(), []

    def hang() -> None:
        ended.append(release.wait(10.0))

    async with anyio.create_task_group() as tasks:
        for _ in range(place.THREADS):
            tasks.start_soon(store._opened.run_in_thread, "read", hang)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    await store.aclose()
    assert not ended
    release.set()


@pytest.mark.parametrize("seconds", [0.0, 0.01])
async def test_a_disk_that_hangs_does_not_keep_the_store_from_being_closed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seconds: float,
) -> None:
    release, close_files, closed = threading.Event(), place.Home._close_files, threading.Event()

    def hang(self: place.Home) -> None:
        release.wait(30.0)
        close_files(self)
        closed.set()

    monkeypatch.setattr(place.Home, "_close_files", hang)
    store = await opened(tmp_path / "store")
    with anyio.move_on_after(seconds):
        await store.aclose()
    assert not closed.is_set()
    assert "the disk did not answer while the store was closed" in caplog.text
    release.set()
    assert await anyio.to_thread.run_sync(closed.wait, 10.0)


async def test_without_a_thread_it_fails_for_now_and_is_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "store", owner="one")
    await store.open()
    grant = await take(store)

    def start_no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    batch = Batch(KEY, grant.epoch, 2, group("a"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_no_thread)
        assert not store.begin_append([batch], lambda outcomes: None)
        (outcome,) = await store.append_many([batch])
        assert outcome.status is Status.TRANSIENT
        with pytest.raises(StoreUnavailableError, match="perdure:heartbeat"):
            await store.heartbeat()
    await store.heartbeat()
    await append_ok(store, grant, 2, *group("a"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_no_thread)
        await store.aclose()
    again = FileStore(tmp_path / "store", owner="one")  # the name is free
    await again.open()
    await again.aclose()
