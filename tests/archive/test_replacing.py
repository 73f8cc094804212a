"""What a restore replaces may be anything that an agent has made: it is moved away, and removed."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import perdure
from perdure.archive import Archives
from perdure.errors import ConfigError, StoreUnavailableError
from tests.archive import hostile
from tests.archive.trees import look, make
from tests.users import as_nobody

DEEP = 1200
OLD = {
    "data/a.txt": "1",
    "data/.cache": "mine",
    ".config/app/x": "1",
    "gone/b.txt": "1",
    "other/c.txt": "1",
}
PATHS = (".config/app",)


@asynccontextmanager
async def archives_of(home: Path, *paths: str) -> AsyncIterator[Archives]:
    async with perdure.connect(f"file:{home}-store") as sessions:
        async with sessions.open("agent") as session:
            yield Archives(session, home, paths=paths)


@pytest.fixture
async def imported(tmp_path: Path) -> None:
    """Import all that the calls of a test import: another user may not read root's Python."""
    async with archives_of(make(tmp_path / "imported", {"data/a.txt": "1"})) as archives:
        await archives.save()
        await archives.restore()


def dig(top: Path, steps: int) -> None:
    """Make a tree deeper than any path that the system takes in one piece."""
    here = os.open(top, os.O_RDONLY)
    for _ in range(steps):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


@pytest.mark.skipif(os.name != "posix", reason="Windows opens no folders")
async def test_a_tree_deeper_than_any_stack_is_replaced_and_removed(tmp_path: Path) -> None:
    """RELIABILITY S8: what an agent digs keeps nobody from saving, restoring or starting again."""
    home = make(tmp_path / "home", {"data/a.txt": "1"})
    async with archives_of(home) as archives:
        await archives.save()
        dig(home / "data", DEEP)
        done = await archives.restore()
        assert done.kept
        assert (await archives.save()).new is False
    assert look(home, control=True).keys() == {
        *("data", "data/a.txt"),
        *(".perdure", ".perdure/home.json", ".perdure/lock"),
    }


@pytest.mark.usefixtures("imported")
@pytest.mark.skipif(os.name != "posix", reason="on Windows a mode holds no rights")
async def test_folders_that_nobody_may_write_are_removed_in_the_end(short_tmp: Path) -> None:
    with as_nobody(short_tmp):
        home = make(short_tmp / "home", {"go/pkg/mod/x": "1"})
        async with archives_of(home) as archives:
            await archives.save()
            (home / "go/pkg/mod/sub").mkdir()
            for path in ("go/pkg/mod/sub", "go/pkg/mod"):
                (home / path).chmod(0o555)
            done = await archives.restore()
            await archives.save()
        assert not Path(done.kept).exists()


@pytest.mark.usefixtures("imported")
@pytest.mark.skipif(os.name != "posix", reason="on Windows a mode holds no rights")
@pytest.mark.parametrize("stuck", ["data", ".config/app", "gone", "other"])
async def test_a_restore_that_the_system_refuses_half_way_is_undone(
    short_tmp: Path, stuck: str
) -> None:
    """Nothing was changed: neither by the restore, nor for whoever opens the home next."""
    with as_nobody(short_tmp):
        home = make(short_tmp / "home", {name: one for name, one in OLD.items() if "b" not in name})
        async with archives_of(home, *PATHS) as archives:
            await archives.save(label="first")
            make(home, {**dict.fromkeys(OLD, "2"), "gone/b.txt": "2"})
            (home / stuck).chmod(0o555)
            before = look(home)
            with pytest.raises(StoreUnavailableError, match=r"cannot be moved.*nothing was chang"):
                await archives.restore("first")
            assert look(home) == before
            (home / stuck).chmod(0o755)
            assert not list((home / ".perdure").glob("restor*"))
            await archives.save()
            await archives.restore("first")
        assert look(home)["data/a.txt"] == b"1"
        assert look(home)["data/.cache"] == b"2"
        assert "gone/b.txt" not in look(home)


async def test_what_cannot_be_removed_is_left_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make(tmp_path / "home", {"a.txt": "1"})
    real = os.unlink

    def refusing(path: str, *, dir_fd: int | None = None) -> None:
        if path == "a.txt":
            raise PermissionError(1, "Operation not permitted", path)
        real(path, dir_fd=dir_fd)

    async with archives_of(home) as archives:
        await archives.save()
        (home / "a.txt").write_text("2")
        await archives.restore()
        monkeypatch.setattr(os, "unlink", refusing)
        with caplog.at_level(logging.WARNING, "perdure"):
            await archives.save()
        assert "replaced files not removed" in caplog.text
        monkeypatch.undo()
        await archives.save()
    assert not list((home / ".perdure").glob("restore-*"))


async def test_an_older_archive_that_was_asked_for_stays_at_the_next_start(tmp_path: Path) -> None:
    """S4-17: restored at start is what was saved elsewhere since; nobody's choice is undone."""
    home, other = make(tmp_path / "home", {"a": "1"}), tmp_path / "other"
    async with archives_of(home) as archives:
        await archives.save(label="first")
        await archives.write(tmp_path / "first.tar")
        (home / "a").write_text("2")
        await archives.save(label="second")
        await archives.restore("first")
        assert (await archives.resume()).changed is False
        assert look(home) == {"a": b"1"}
        await Archives(archives._session, other).read(tmp_path / "first.tar")
        assert (await Archives(archives._session, other).resume()).changed is False
        assert look(other) == {"a": b"1"}
        (home / "a").write_text("3")
        await archives.save()
        assert (await Archives(archives._session, other).resume()).changed
    assert look(other) == {"a": b"3"}


async def test_hidden_folders_of_a_file_have_to_be_named_here_too(tmp_path: Path) -> None:
    """S4-G7: naming a dot folder is its opt-in; a file from elsewhere cannot opt in for itself."""
    mine = {".ssh/keys": "mine", ".bashrc": "mine", "data/a.txt": "mine"}
    home, path = make(tmp_path / "home", mine), tmp_path / "file"
    lines = (hostile.folder(".ssh"), hostile.file(".ssh/keys"), hostile.file(".bashrc"))
    path.write_bytes(hostile.of(*lines, head={"paths": [".ssh", ".bashrc"]}))
    async with archives_of(home) as archives:
        await archives.save()
        before = look(home)
        for paths in ((), ("data", ".ssh"), (".ssh/other", ".bashrc")):
            with pytest.raises(ConfigError, match=r"'\.(ssh|bashrc)'.*nothing was changed"):
                await Archives(archives._session, home, paths=paths).read(path)
            assert look(home) == before
        await Archives(archives._session, home, paths=[".ssh", ".bashrc"]).read(path)
    assert look(home)[".ssh/keys"] == hostile.DATA


async def test_a_file_with_too_many_paths_is_refused_at_once(tmp_path: Path) -> None:
    """RELIABILITY S9: a hundred thousand of them would be compared with one another, and all."""
    path = tmp_path / "file"
    many = [f"{number:x}" for number in range(100_000)]
    path.write_bytes(hostile.of(hostile.file("a.txt"), head={"paths": many}))
    async with archives_of(make(tmp_path / "home", {})) as archives:
        with pytest.raises(perdure.CorruptRecordError, match="over the limit of 100"):
            await archives.read(path)
