"""A home folder is saved with a session, and comes back as it was."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

import perdure
from perdure.archive import ArchiveLimits, Archives
from perdure.archive.limits import CHUNK_BYTES
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    NotStorableError,
    SessionError,
    StoreUnavailableError,
    TooLargeError,
)
from perdure.session.session import Session
from perdure.stores import StateStore
from tests.archive.trees import look, make
from tests.stores.test_state import KeptStates, OwnStorage


@asynccontextmanager
async def session_in(root: Path, id: str = "agent") -> AsyncIterator[Session]:
    async with perdure.connect(f"file:{root}") as sessions, sessions.open(id) as session:
        yield session


OLDER = '{"key":{"agent":"agent"},"archive":"older"}'


# what is archived


async def test_the_home_of_a_session_comes_back_on_another_machine(tmp_path: Path) -> None:
    """S4-17: a snapshot of the home at the end of a session, restored at the next start."""
    files = {"data/notes.txt": "hello", "data/empty": None, "top.bin": os.urandom(3_000_000)}
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session)
        assert archives.home == str(tmp_path / "store/agents/agent/files")
        home = make(Path(archives.home), files)
        before = look(home)
        saved = await archives.save()
    assert (saved.archive.files, saved.archive.folders, saved.new) == (2, 2, True)
    async with session_in(tmp_path / "store") as session:
        done = await Archives(session, tmp_path / "elsewhere").resume()
    assert done.changed
    assert look(tmp_path / "elsewhere") == before


async def test_hidden_and_system_folders_are_left_out_unless_they_are_named(
    tmp_path: Path,
) -> None:
    """S4-8, S4-17, S4-G7: persist_paths take in what the default leaves out, and only that."""
    home = make(
        tmp_path / "home",
        {
            ".bashrc": "poison",
            ".config/app/settings": "kept",
            ".config/app/.cache/x": "kept",
            ".config/other": "poison",
            "data/.env": "poison",
            "data/a.txt": "kept",
            "node_modules/x.js": "made anew",
            "code/__pycache__/x.pyc": "made anew",
        },
    )
    async with session_in(tmp_path / "store") as session:
        saved = await Archives(session, home, paths=["data/", "./.config/app/"]).save()
        await Archives(session, tmp_path / "new").restore()
    assert {path for path, data in look(tmp_path / "new").items() if data == b"kept"} == {
        ".config/app/settings",
        ".config/app/.cache/x",
        "data/a.txt",
    }
    assert b"poison" not in look(tmp_path / "new").values()
    assert {(one.path, one.why) for one in saved.skipped} == {
        (".bashrc", "hidden"),
        (".config/other", "hidden"),
        ("data/.env", "hidden"),
        ("node_modules", "system"),
        ("code/__pycache__", "system"),
    }


async def test_a_named_path_that_is_missing_is_well(tmp_path: Path) -> None:
    """S4-G7: a missing folder is no error, and none is made of it."""
    home = make(tmp_path / "home", {"a.txt": "x"})
    async with session_in(tmp_path / "store") as session:
        saved = await Archives(session, home, paths=["data/", ".config/app"], whole=False).save()
        assert saved.archive.files == 0
        await Archives(session, tmp_path / "new").restore()
    assert look(tmp_path / "new") == {}


@pytest.mark.parametrize("path", ["../x", "/etc", "data/../../x", "", "a//b", ".perdure", "a\\b"])
async def test_a_path_that_leaves_the_home_is_refused(tmp_path: Path, path: str) -> None:
    """S4-G7: persist_paths must be relative, without `..`."""
    async with session_in(tmp_path / "store") as session:
        with pytest.raises(ConfigError, match="persist_paths"):
            Archives(session, tmp_path, paths=[path])


async def test_one_text_for_the_paths_is_refused(tmp_path: Path) -> None:
    async with session_in(tmp_path / "store") as session:
        with pytest.raises(ConfigError, match="a list of paths"):
            Archives(session, tmp_path, paths="data")


@pytest.mark.parametrize("path", ["data", "data/inner"])
async def test_a_named_path_through_a_link_is_refused(tmp_path: Path, path: str) -> None:
    """S4-G7: no escape through a symbolic link."""
    make(tmp_path / "outside", {"inner/secret": "x"})
    home = make(tmp_path / "home", {})
    (home / "data").symlink_to(tmp_path / "outside")
    async with session_in(tmp_path / "store") as session:
        with pytest.raises(ConfigError, match="symbolic link"):
            await Archives(session, home, paths=[path]).save()


async def test_links_pipes_and_sockets_are_passed_over_and_stay(
    tmp_path: Path, short_tmp: Path
) -> None:
    """S4-G7: links are not followed. They stay where they are when the rest comes back."""
    make(tmp_path / "outside", {"secret": "x"})
    home = make(short_tmp / "home", {"data/a.txt": "1", "data/.hidden": "mine"})
    (home / "data/link").symlink_to(tmp_path / "outside")
    (home / "data/inside").symlink_to("a.txt")
    os.mkfifo(home / "data/pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(home / "data/socket"))
        async with session_in(tmp_path / "store") as session:
            archives = Archives(session, home)
            saved = await archives.save()
            before = look(home)
            (home / "data/a.txt").write_text("2")
            assert (await archives.restore()).changed
    assert look(home) == before
    assert {one.path: one.why for one in saved.skipped} == {
        "data/.hidden": "hidden",
        "data/inside": "a symbolic link",
        "data/link": "a symbolic link",
        "data/pipe": "no regular file",
        "data/socket": "no regular file",
    }
    assert (saved.archive.files, saved.archive.folders) == (1, 1)


async def test_modes_and_times_come_back_within_bounds(tmp_path: Path) -> None:
    """The owner's rights, reading and running stay; writing by others and set-user-id do not."""
    home = make(tmp_path / "home", {"run.sh": "#!", "plain": "x", "open": "x", "folder/x": "x"})
    (home / "run.sh").chmod(0o4755)
    (home / "plain").chmod(0o640)
    (home / "open").chmod(0o666)
    (home / "folder").chmod(0o750)
    os.utime(home / "plain", ns=(1_700_000_000_123_456_789,) * 2)
    async with session_in(tmp_path / "store") as session:
        await Archives(session, home).save()
        await Archives(session, tmp_path / "new").restore()
        assert not (await Archives(session, tmp_path / "new").restore()).changed
    modes = {one.name: oct(one.stat().st_mode & 0o7777) for one in (tmp_path / "new").iterdir()}
    del modes[".perdure"]
    assert modes == {"run.sh": "0o755", "plain": "0o640", "open": "0o644", "folder": "0o750"}
    assert (tmp_path / "new/plain").stat().st_mtime_ns == 1_700_000_000_123_456_789


# what is stored


async def test_unchanged_files_are_not_stored_again(tmp_path: Path) -> None:
    """S4-17: each session's end costs what has changed, and no more."""
    big = os.urandom(4 * CHUNK_BYTES)
    home = make(tmp_path / "home", {"big": big, "copy": big, "small": "1"})
    store = tmp_path / "store"

    def stored() -> int:
        return sum(one.stat().st_size for one in (store / "blobs").rglob("*") if one.is_file())

    async with session_in(store) as session:
        archives = Archives(session, home)
        first = await archives.save()
        assert first.stored_bytes == len(big) + 1
        once = stored()
        assert once < len(big) + 10_000
        second = await archives.save()
        assert (second.new, second.stored_bytes, second.archive) == (False, 0, first.archive)
        assert stored() == once
        with (home / "big").open("ab") as file:
            file.write(b"appended")
        third = await archives.save()
        assert (third.new, third.stored_bytes) == (True, len(b"appended"))
        assert stored() < once + 10_000
        assert [one.id for one in await archives.all()] == [third.archive.id, first.archive.id]


async def test_what_is_saved_is_durable_and_was_read_back(tmp_path: Path) -> None:
    """S4-17: (2.4) verify after saving: an archive that was said to be saved can be restored."""
    home = make(tmp_path / "home", {"a.txt": "x"})
    async with session_in(tmp_path / "store") as session:
        saved = await Archives(session, home).save()
        assert session.durable_version == session.version
        assert (await Archives(session, home).verify()) == saved.archive


async def test_a_store_that_forgets_is_noticed_when_saving(tmp_path: Path) -> None:
    """S4-17: (2.4) a save that stored nothing went unnoticed for long: now it is an error."""
    home = make(tmp_path / "home", {"a.txt": "x"})
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session, home)

        async def nothing(tenant: str, blobs: object) -> None: ...

        backend = archives._store.inner
        backend.put_blobs = nothing
        with pytest.raises(perdure.StoreError, match="just been given"):
            await archives.save()
        del backend.put_blobs
        assert await archives.latest() is None
        await archives.save()


async def test_a_blob_that_was_lost_is_stored_again_by_the_next_save(tmp_path: Path) -> None:
    home = make(tmp_path / "home", {"a.txt": "x", "b.txt": "y"})
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session, home)
        await archives.save()
        for blob in (tmp_path / "store/blobs").rglob("*"):
            if blob.is_file() and blob.read_bytes() == b"x":
                blob.unlink()
        with pytest.raises(CorruptRecordError, match="nothing was changed"):
            await Archives(session, tmp_path / "new").restore()
        assert look(tmp_path / "new") == {}
        await archives.save()
        await Archives(session, tmp_path / "new").restore()
        assert look(tmp_path / "new") == {"a.txt": b"x", "b.txt": b"y"}


@pytest.mark.parametrize("change", [b"", b"other"])
async def test_a_damaged_blob_is_refused_and_the_old_tree_stays(
    tmp_path: Path, change: bytes
) -> None:
    home = make(tmp_path / "home", {"a.txt": "what is saved", "b.txt": "y"})
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session, home)
        await archives.save()
        (home / "a.txt").write_text("changed")
        for blob in (tmp_path / "store/blobs").rglob("*"):
            if blob.is_file() and blob.read_bytes() == b"what is saved":
                blob.write_bytes(change)
        for act in (archives.restore, archives.verify, archives.resume):
            if act == archives.resume:
                (home / ".perdure/home.json").write_text(OLDER)
            with pytest.raises(CorruptRecordError):
                await act()
    assert look(home) == {"a.txt": b"changed", "b.txt": b"y"}
    assert not list((home / ".perdure").glob("restore-*"))


# what is brought back


async def test_deleted_files_stay_deleted(tmp_path: Path) -> None:
    """S4-17: (2.4) extracting over the old folder brought deleted files back."""
    home = make(tmp_path / "home", {"data/gone": "x", "data/kept": "x", "whole/gone": "x"})
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session, home)
        await archives.save(label="before")
        (home / "data/gone").unlink()
        (home / "whole/gone").unlink()
        (home / "whole").rmdir()
        await archives.save(label="after")
        (home / "later").write_text("x")
        await archives.restore("before")
        assert sorted(look(home)) == ["data", "data/gone", "data/kept", "whole", "whole/gone"]
        await archives.restore("after")
    assert look(home) == {"data": None, "data/kept": b"x"}


async def test_the_second_restore_changes_nothing(tmp_path: Path) -> None:
    home = make(tmp_path / "home", {"data/a": "1", ".config/app/x": "2"})
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session, home, paths=[".config/app/"])
        await archives.save()
        (home / "data/a").write_text("changed")
        first = await archives.restore()
        assert (first.changed, first.replaced) == (True, (".config/app", "data"))
        inodes = {one: one.stat().st_ino for one in home.rglob("*") if one.name != "home.json"}
        second = await archives.restore()
        assert (second.changed, second.replaced, second.kept) == (False, (), "")
        assert {one: one.stat().st_ino for one in home.rglob("*") if one in inodes} == inodes


async def test_a_home_that_could_not_be_saved_can_be_replaced(tmp_path: Path) -> None:
    home = make(tmp_path / "home", {"a.txt": "saved"})
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session, home)
        await archives.save()
        make(home, {"A.txt": "x", "bad\x1bname": "x", "caf\u00e9": "x"})
        Path(os.fsdecode(os.fsencode(home) + b"/\xff")).write_text("x")
        assert (await archives.restore()).changed
    assert look(home) == {"a.txt": b"saved"}


async def test_what_a_restore_replaces_is_kept_until_the_next_save(tmp_path: Path) -> None:
    home = make(tmp_path / "home", {"a.txt": "saved"})
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session, home)
        await archives.save()
        (home / "a.txt").write_text("not saved")
        done = await archives.restore()
        assert look(Path(done.kept)) == {"a.txt": b"not saved"}
        await archives.save()
    assert not Path(done.kept).exists()


async def test_a_home_with_files_that_nobody_saved_is_not_replaced(tmp_path: Path) -> None:
    mine = make(tmp_path / "mine", {"thesis.txt": "the only copy"})
    async with session_in(tmp_path / "store") as session:
        await Archives(session, make(tmp_path / "home", {"a": "x"})).save()
        archives = Archives(session, mine)
        with pytest.raises(SessionError, match=r"thesis\.txt.*--force"):
            await archives.restore()
        resumed = await archives.resume()
        assert (resumed.changed, "never archived" in resumed.why) == (False, True)
        other = make(
            tmp_path / "other", {".perdure/home.json": '{"key":{"agent":"b"},"archive":""}'}
        )
        make(other, {"theirs.txt": "of another agent"})
        with pytest.raises(SessionError, match=r"in no archive of agent"):
            await Archives(session, other).restore()
        assert look(mine) == {"thesis.txt": b"the only copy"}
        done = await archives.restore(force=True)
    assert look(mine) == {"a": b"x"}
    assert look(Path(done.kept)) == {"thesis.txt": b"the only copy"}


async def test_a_start_goes_on_with_what_was_written_after_the_last_save(tmp_path: Path) -> None:
    """S4-17: restored at the next start, unless the home is newer than the archive."""
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session)
        assert (await archives.resume()).archive is None
        home = make(Path(archives.home or ""), {"a": "saved"})
        await archives.save()
        (home / "a").write_text("written before a crash")
        assert not (await archives.resume()).changed
        assert look(home) == {"a": b"written before a crash"}


async def test_a_home_that_another_session_uses_goes_on_as_it_is(tmp_path: Path) -> None:
    """The home is the agent's: its sessions share it, and each has archives of its own."""
    home = make(tmp_path / "home", {"a": "1"})
    async with perdure.connect(f"file:{tmp_path}/store") as sessions:
        async with sessions.open("agent") as one, sessions.open("agent", session="two") as two:
            await Archives(one, home).save()
            (home / "a").write_text("2")
            await Archives(two, home).save()
            done = await Archives(one, home).resume()
            assert (done.changed, "another session" in done.why) == (False, True)
    assert look(home) == {"a": b"2"}


async def test_a_start_takes_over_what_was_saved_elsewhere_meanwhile(tmp_path: Path) -> None:
    here, there = make(tmp_path / "here", {"a": "1"}), tmp_path / "there"
    async with session_in(tmp_path / "store") as session:
        await Archives(session, here).save()
        await Archives(session, there).resume()
        (there / "a").write_text("2")
        await Archives(session, there).save()
        done = await Archives(session, here).resume()
    assert (done.changed, look(here)) == (True, {"a": b"2"})
    assert look(Path(done.kept)) == {"a": b"1"}


async def test_an_archive_is_found_by_id_label_or_as_the_newest(tmp_path: Path) -> None:
    """S4-17: (2.4) resume by name."""
    home = make(tmp_path / "home", {"a": "1"})
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session, home)
        with pytest.raises(ConfigError, match="has no archive: it has none"):
            await archives.restore()
        first = (await archives.save(label="draft")).archive
        (home / "a").write_text("2")
        second = (await archives.save(label="draft")).archive
        assert await archives.find(first.id) == first
        assert await archives.find("draft") == await archives.find() == second
        with pytest.raises(ConfigError, match="no archive 'final': it has draft, draft"):
            await archives.find("final")


async def test_only_so_many_archives_stay_listed(tmp_path: Path) -> None:
    home = make(tmp_path / "home", {})
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session, home)
        for number in range(5):
            (home / "a").write_text(str(number))
            await archives.save(label=f"v{number}", keep=2)
        assert [one.label for one in await archives.all()] == ["v4", "v3"]
        with pytest.raises(ConfigError, match="keep"):
            await archives.save(keep=0)
    async with session_in(tmp_path / "store") as session:
        assert [one.label for one in await Archives(session, home).all()] == ["v4", "v3"]


# what is refused


@pytest.mark.parametrize(
    "names", [("A.txt", "a.txt"), ("caf\u00e9", "cafe\u0301"), ("a\\b",), ("bad\x1bname",)]
)
async def test_a_name_that_no_archive_can_have_is_refused_when_saving(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """What is saved can be restored: whatever a restore refuses, a save refuses first."""
    home = make(tmp_path / "home", dict.fromkeys(names, "x"))
    if len(os.listdir(home)) < len(names):
        return  # such a disk cannot have both
    async with session_in(tmp_path / "store") as session:
        with pytest.raises(NotStorableError, match="is refused"):
            await Archives(session, home).save()
        assert await Archives(session, home).latest() is None


async def test_a_name_that_is_not_utf8_is_refused_when_saving(tmp_path: Path) -> None:
    home = make(tmp_path / "home", {})
    Path(os.fsdecode(os.fsencode(home) + b"/\xff")).write_text("x")
    async with session_in(tmp_path / "store") as session:
        with pytest.raises(NotStorableError, match="not UTF-8"):
            await Archives(session, home).save()


@pytest.mark.parametrize(
    ("limits", "option"),
    [
        (ArchiveLimits(file_bytes=3), "file_bytes"),
        (ArchiveLimits(total_bytes=5), "total_bytes"),
        (ArchiveLimits(entries=1), "entries"),
    ],
)
async def test_what_is_over_a_limit_is_refused_when_saving(
    tmp_path: Path, limits: ArchiveLimits, option: str
) -> None:
    home = make(tmp_path / "home", {"a": "1234", "b": "1234"})
    async with session_in(tmp_path / "store") as session:
        with pytest.raises(TooLargeError, match=option):
            await Archives(session, home, limits=limits).save()


def test_a_limit_has_to_be_above_zero() -> None:
    with pytest.raises(ConfigError, match="entries=0"):
        ArchiveLimits(entries=0)


async def test_a_store_without_blobs_is_refused(tmp_path: Path) -> None:
    kept = KeptStates()
    async with perdure.connect(StateStore(lambda key: OwnStorage(kept, key))) as sessions:
        async with sessions.open("agent") as session:
            with pytest.raises(NotStorableError, match="keeps no blobs"):
                await Archives(session, make(tmp_path / "home", {"a": "x"})).save()


async def test_a_store_without_folders_needs_a_home(tmp_path: Path) -> None:
    async with perdure.connect("memory:") as sessions, sessions.open("agent") as session:
        assert Archives(session).home is None
        with pytest.raises(ConfigError, match="give the home folder"):
            await Archives(session).save()
        for home, said in (
            ("/", "no home folder"),
            (make(tmp_path, {"f": "x"}) / "f", "no folder"),
        ):
            with pytest.raises(ConfigError, match=said):
                await Archives(session, home).save()


@pytest.mark.parametrize(
    "journal",
    [
        b"no JSON",
        b'{"stage":"restore-x","puts":["../../evil"],"takes":[],"selection":{}}',
        b'{"stage":"restore-x","puts":[],"takes":[".perdure/lock"],"selection":{}}',
        b'{"stage":"restore-x","puts":[],"takes":["a\\u0000"],"selection":{}}',
        b'{"stage":"../x","puts":[],"takes":["a"],"selection":{}}',
    ],
)
async def test_a_journal_that_perdure_did_not_write_moves_nothing(
    tmp_path: Path, journal: bytes
) -> None:
    """S4-G7: an agent can write in its home; that gives it nothing outside of it."""
    home = make(tmp_path / "home", {"a": "x", ".perdure/restoring.json": journal})
    before = look(tmp_path)
    async with perdure.connect("memory:") as sessions, sessions.open("agent") as session:
        with pytest.raises(CorruptRecordError, match=r"restoring\.json"):
            await Archives(session, home).save()
    assert look(tmp_path).items() >= before.items()


@pytest.mark.parametrize("marker", [b"no JSON", b'{"key":{"agent":""},"archive":"x"}', b"\xff"])
async def test_a_damaged_marker_counts_as_none(tmp_path: Path, marker: bytes) -> None:
    home = make(tmp_path / "home", {"a": "1"})
    async with perdure.connect("memory:") as sessions, sessions.open("agent") as session:
        archives = Archives(session, home)
        await archives.save()
        make(home, {"a": "2", ".perdure/home.json": marker})
        assert "never archived" in (await archives.resume()).why
    assert look(home) == {"a": b"2"}


async def test_a_link_in_place_of_the_own_folder_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "outside", {})
    (make(tmp_path / "home", {"a": "x"}) / ".perdure").symlink_to(tmp_path / "outside")
    async with perdure.connect("memory:") as sessions, sessions.open("agent") as session:
        with pytest.raises(ConfigError, match="symbolic link"):
            await Archives(session, tmp_path / "home").save()
    assert look(tmp_path / "outside") == {}


async def test_two_at_one_home_do_not_meet(tmp_path: Path) -> None:
    home = make(tmp_path / "home", {"a": "x"})
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session, home)
        async with archives._alone():
            with pytest.raises(SessionError, match="just being saved or restored"):
                await Archives(session, home, wait=0.0).save()
        async with anyio.create_task_group() as group:
            for label in ("one", "two", "three"):
                group.start_soon(partial(archives.save, label=label))
        assert {one.label for one in await archives.all()} == {"one", "two", "three"}


async def test_a_session_that_was_loaded_shows_and_exports_its_archives(tmp_path: Path) -> None:
    home = make(tmp_path / "home", {"a": "x"})
    async with perdure.connect(f"file:{tmp_path}/store") as sessions:
        async with sessions.open("agent") as session:
            saved = await Archives(session, home).save()
        view = await sessions.load("agent")
        assert view is not None
        archives = Archives(view)
        assert await archives.all() == [saved.archive]
        assert await archives.write(tmp_path / "out.tar.gz") > 0
        with pytest.raises(SessionError, match="loaded to read"):
            await archives.save()


async def test_an_error_of_the_disk_is_named_and_changes_nothing(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        home = Path("/proc/perdure-home")  # where not even root can make a folder
    else:
        home = make(tmp_path / "locked", {}) / "home"
        home.parent.chmod(0o500)
    async with session_in(tmp_path / "store") as session:
        with pytest.raises(StoreUnavailableError, match=str(home)):
            await Archives(session, home).save()


async def test_a_link_in_the_way_of_a_restore_is_not_followed(tmp_path: Path) -> None:
    """S4-G7: a folder of the archive that is a link by now is replaced, and one above is refused."""
    make(tmp_path / "outside", {"app/x": "outside"})
    home = make(tmp_path / "home", {"data/x": "1", ".config/app/x": "1"})
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session, home, paths=[".config/app"])
        await archives.save()
        os.rename(home / "data", tmp_path / "moved")
        (home / "data").symlink_to(tmp_path / "outside")
        await Archives(session, home).restore()
        assert look(home)["data/x"] == b"1"
        os.rename(home / ".config", tmp_path / "moved too")
        (home / ".config").symlink_to(tmp_path / "outside")
        (home / "data/x").write_text("2")
        with pytest.raises(ConfigError, match="symbolic link"):
            await Archives(session, home).restore()
    assert look(home)["data/x"] == b"2"
    assert look(tmp_path / "outside") == {"app": None, "app/x": b"outside"}


async def test_cancelled_it_has_no_effect(tmp_path: Path) -> None:
    home = make(tmp_path / "home", {f"{n}": os.urandom(CHUNK_BYTES) for n in range(12)})
    async with session_in(tmp_path / "store") as session:
        archives = Archives(session, home)
        with anyio.CancelScope() as scope:
            await archives.save(progress=lambda _: scope.cancel())
        assert scope.cancelled_caught
        assert await archives.latest() is None
        await archives.save()
        before = look(home)
        (home / "0").write_text("changed")
        with anyio.CancelScope() as scope:
            await archives.restore(progress=lambda _: scope.cancel())
        assert scope.cancelled_caught
        assert (home / "0").read_text() == "changed"
        assert not list((home / ".perdure").glob("restore-*"))
        await archives.restore()
    assert look(home) == before
