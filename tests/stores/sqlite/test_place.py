"""Where the database lies: made whole, private, and never taken for new when it is damaged."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from perdure import store_for
from perdure._lib.files import Folder
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    StoreUnavailableError,
    UnsupportedVersionError,
)
from perdure.stores.sqlite import SqliteStore, connections
from perdure.stores.sqlite.sql import MIGRATIONS
from perdure.testing.conformance._kit import KEY, append_ok, group, read, take


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "x.db"


async def used(path: Path) -> SqliteStore:
    store = SqliteStore(path)
    await store.open()
    grant = await take(store)
    await append_ok(store, grant, grant.head + 1, *group("a"))
    return store


@pytest.mark.skipif(os.name == "nt", reason="on Windows two slashes are a server")
async def test_two_slashes_before_a_path_are_one(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    store = SqliteStore(f"/{path}")
    await store.open()
    await take(store)
    await store.aclose()
    assert path.exists()


def is_open(path: Path) -> bool:
    """Return whether this process has a file open, where the system tells that."""
    here = Path("/proc/self/fd")
    return here.is_dir() and path.resolve() in [one.resolve() for one in here.iterdir()]


async def refused(path: Path, error: type[Exception], match: str) -> None:
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(error, match=match) as caught:
        await SqliteStore(path).open()
    assert caught.value.__traceback__  # keeps alive what the open has left behind
    assert not is_open(path)
    assert (path.read_bytes() if path.is_file() else None) == before


async def test_all_files_are_private_whatever_the_umask(path: Path) -> None:
    before = os.umask(0)
    try:
        store = await used(path)
    finally:
        os.umask(before)
    files = {one.name: one for one in path.parent.iterdir()}
    assert set(files) == {"x.db", "x.db-wal", "x.db-shm", "x.db-owners"}
    assert files.pop("x.db-owners").stat().st_mode & 0o777 == 0o700
    assert {one.stat().st_mode & 0o777 for one in files.values()} == {0o600}
    assert path.parent.stat().st_mode & 0o777 == 0o700
    await store.aclose()


async def test_a_new_database_s_name_survives_a_cut_of_power(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    link, sync = Folder.link, Folder.sync

    def linked(self: Folder, *names: str) -> None:
        link(self, *names)
        done.append(names[-1])

    def synced(self: Folder) -> None:
        sync(self)
        done.append(Path(self.path).name)

    monkeypatch.setattr(Folder, "link", linked)
    monkeypatch.setattr(Folder, "sync", synced)
    (path.parent / "x.db-owners").mkdir(parents=True, mode=0o700)  # of a database that is gone
    path.parent.chmod(0o700)
    store = SqliteStore(path)
    await store.open()
    await store.aclose()
    assert "kept" in done[done.index("x.db") :]


async def test_a_folder_that_others_may_write_to_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)
    await refused(path, ConfigError, "chmod go-w")
    path.parent.chmod(0o700)
    await (await used(path)).aclose()
    path.chmod(0o666)
    await refused(path, ConfigError, "chmod go-w")


async def test_a_link_is_refused(path: Path, tmp_path: Path) -> None:
    await (await used(path)).aclose()
    link = tmp_path / "kept" / "link.db"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="symbolic link"):
        await SqliteStore(link).open()


@pytest.mark.parametrize("size", [0, 1, 100, 511])
async def test_what_lost_its_content_is_not_taken_for_new(path: Path, size: int) -> None:
    await (await used(path)).aclose()
    path.write_bytes(path.read_bytes()[:size])
    await refused(path, CorruptRecordError, "restore it from a copy")


@pytest.mark.parametrize("content", [b"pickle" * 1000, b"\0" * 8192])
async def test_what_is_no_database_is_left_as_it_is(path: Path, content: bytes) -> None:
    path.parent.mkdir(0o700)
    path.write_bytes(content)
    await refused(path, CorruptRecordError, r"x\.db")


async def test_another_programs_database_is_left_as_it_is(path: Path) -> None:
    path.parent.mkdir(0o700)
    con = sqlite3.connect(path)
    con.execute("CREATE TABLE theirs (a)")
    con.commit()
    con.close()
    await refused(path, ConfigError, "another program's")


async def test_a_newer_format_is_left_as_it_is(path: Path) -> None:
    await (await used(path)).aclose()
    con = sqlite3.connect(path)
    con.execute("PRAGMA user_version = 99")
    con.close()
    await refused(path, UnsupportedVersionError, "format 99")


async def test_a_folder_is_no_database(path: Path) -> None:
    path.mkdir(0o700, parents=True)
    await refused(path, ConfigError, "is not a file")


async def test_a_network_file_system_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "network_file_system", lambda _: "nfs4")
    await refused(path, ConfigError, "nfs4")


async def test_a_copy_in_another_mode_is_switched_back(path: Path, tmp_path: Path) -> None:
    await (await used(path)).aclose()
    copy = path.with_name("copy.db")
    con = sqlite3.connect(path)
    con.execute("VACUUM INTO ?", (str(copy),))
    con.close()
    copy.chmod(0o600)
    con = sqlite3.connect(copy)
    assert con.execute("PRAGMA journal_mode").fetchall() == [("delete",)]
    con.close()
    store = await used(copy)
    assert len(await read(store)) == 4
    await store.aclose()
    assert copy.read_bytes()[18:20] == b"\x02\x02"


@pytest.mark.parametrize(
    ("url", "where"),
    [("sqlite:///x.db", "x.db"), ("sqlite:////a/b/x.db", "/a/b/x.db"), ("sqlite:///~/x", "~/x")],
)
def test_urls_are_as_sqlalchemys(url: str, where: str) -> None:
    store = store_for(url)
    assert isinstance(store, SqliteStore)
    assert store.location == os.path.abspath(os.path.expanduser(where))


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:x.db",
        "sqlite://host/x.db",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///x.db?mode=ro",
        "sqlite:///folder/",
    ],
)
def test_a_url_that_names_no_file_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        store_for(url)


def test_a_timeout_is_a_time() -> None:
    for timeout in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="timeout"):
            SqliteStore("x.db", timeout=timeout)


async def test_an_owner_is_one_store(path: Path) -> None:
    store = SqliteStore(path, owner="one")
    await store.open()
    with pytest.raises(ConfigError, match="in use"):
        await SqliteStore(path, owner="one").open()
    await store.aclose()
    with pytest.raises(StoreUnavailableError, match="not open"):
        await store.head(KEY)


_MANY = """
import anyio, os, sys
from perdure.records.keys import SessionKey
from perdure.store import take_after
from perdure.stores.sqlite import SqliteStore, sql
from perdure.stores.sqlite.sql import MIGRATIONS

async def one(n):
    store = SqliteStore(sys.argv[1])
    await store.open()
    await take_after(store, SessionKey(f"agent-{n}"), after=0)
    await store.aclose()

if len(sys.argv) > 2:
    sql.MIGRATIONS.append(["ALTER TABLE session ADD COLUMN later INTEGER", "CREATE TABLE later (a)"])
pids = []
for n in range(8):
    pid = os.fork()
    if not pid:
        try:
            anyio.run(one, n)
        except BaseException:
            import traceback; traceback.print_exc(); os._exit(1)
        os._exit(0)
    pids.append(pid)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
"""


def many(path: Path, *more: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _MANY, str(path), *more],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_processes_that_open_at_once_make_one_database(path: Path) -> None:
    many(path)
    con = sqlite3.connect(path)
    assert con.execute("SELECT count(*) FROM session").fetchone() == (8,)
    assert con.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    con.close()
    assert [one.name for one in path.parent.iterdir() if "tmp" in one.name] == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
async def test_processes_that_open_at_once_migrate_once(path: Path) -> None:
    await (await used(path)).aclose()
    many(path, "with a step to the next format")
    con = sqlite3.connect(path)
    assert con.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)
    assert con.execute("SELECT count(*), count(later) FROM session").fetchone() == (9, 0)
    con.close()
    with pytest.raises(UnsupportedVersionError):  # and the older release keeps its hands off
        await SqliteStore(path).open()


async def test_a_sqlite_that_is_too_old_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 31, 1))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.31.1")
    await refused(path, ConfigError, r"is 3\.31\.1, and 3\.32 is needed")


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_open_that_is_cancelled_leaves_nothing_open(steps: int, tmp_path: Path) -> None:
    async def main() -> None:
        store = SqliteStore(tmp_path / "s.db", owner="me")
        opening = asyncio.create_task(store.open())
        for _ in range(steps):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled():  # its thread was faster than those steps
            await store.aclose()
        again = SqliteStore(tmp_path / "s.db", owner="me")
        async with asyncio.timeout(60):
            while True:  # the thread that opens it may take its time
                try:
                    await again.open()
                    break
                except ConfigError:
                    await asyncio.sleep(0.01)
            await again.aclose()
            # SQLite removes them when the last connection is closed.
            while beside := list(tmp_path.glob("s.db-[sw]*")):
                await asyncio.sleep(0.01)
        assert beside == []

    asyncio.run(main())


def page_size(path: Path) -> int:
    con = sqlite3.connect(path)
    ((size,),) = con.execute("PRAGMA page_size")
    con.close()
    return int(size)


async def test_a_database_keeps_the_pages_that_it_was_made_with(path: Path) -> None:
    await (await used(path)).aclose()
    assert page_size(path) == 2048
    con = sqlite3.connect(path, isolation_level=None)
    for step in ("PRAGMA journal_mode = DELETE", "PRAGMA page_size = 4096", "VACUUM"):
        con.execute(step).fetchall()
    con.close()

    store = SqliteStore(path)
    await store.open()
    grant = await take(store)
    await append_ok(store, grant, grant.head + 1, *group("b"))
    assert (await read(store))[-1].payload == group("b")[0].payload
    await store.scrub()
    await store.aclose()
    assert page_size(path) == 4096
