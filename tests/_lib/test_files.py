"""Files that last: private, never through a link, whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure._lib import files
from perdure._lib.files import Folder, LinkFoundError, read_part, write_all
from tests.users import as_nobody

posix = pytest.mark.skipif(sys.platform == "win32", reason="modes and links are POSIX's")


@pytest.fixture(params=["descriptor", "path"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Folder]:
    """A folder as POSIX has it, and as platforms without directory descriptors do."""
    if request.param == "path":
        monkeypatch.setattr(files, "_POSIX", False)
    with Folder.root(str(tmp_path)) as folder:
        yield folder


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_what_is_written_is_read(folder: Folder, tmp_path: Path) -> None:
    folder.replace("a", b"one")
    folder.replace("a", b"two")
    assert folder.read("a") == b"two"
    assert folder.read("nothing") is None
    assert folder.names() == ["a"]
    assert (tmp_path / "a").read_bytes() == b"two"


@posix
@pytest.mark.parametrize("umask", [0, 0o177, 0o277])
def test_files_and_folders_are_private_whatever_the_umask(
    umask: int, folder: Folder, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        with folder.make("inner", "most") as inner:
            inner.replace("a", b"")
            inner.publish("b", b"")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "inner") == mode_of(tmp_path / "inner/most") == 0o700
    assert mode_of(tmp_path / "inner/most/a") == mode_of(tmp_path / "inner/most/b") == 0o600


@posix
def test_a_link_is_not_followed(folder: Folder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "file").symlink_to(outside / "secret")
    for step in (folder.enter, folder.make):
        with pytest.raises(LinkFoundError):
            step("link")
    if files._POSIX:
        with pytest.raises(LinkFoundError):
            folder.read("file")
    folder.replace("file", b"mine")
    assert (outside / "secret").read_bytes() == b"secret"
    assert not (tmp_path / "file").is_symlink()


def test_a_missing_step_or_a_file_in_the_way_is_told(folder: Folder) -> None:
    folder.replace("file", b"")
    with pytest.raises(FileNotFoundError):
        folder.enter("nothing", "below")
    with pytest.raises(NotADirectoryError):
        folder.enter("file")


@posix
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (Folder.enter, "closed"),
        (Folder.make, "new"),
        (Folder.open, "file"),
        (Folder.stat, "file"),
        (Folder.names, ""),
    ],
)
def test_an_error_names_the_whole_path(
    call: Callable[..., object], name: str, short_tmp: Path
) -> None:
    """The system is given a name in an open folder, which does not tell a user where it is."""
    inner = short_tmp / "inner"
    with (
        as_nobody(short_tmp),
        Folder.root(str(short_tmp)) as folder,
        folder.make("inner") as opened,
    ):
        opened.make("closed").close()
        opened.replace("file", b"")
        (inner / "closed").chmod(0)
        (inner / "file").chmod(0)
        inner.chmod(0o500 if call in {Folder.enter, Folder.make, Folder.open} else 0)
        with pytest.raises(PermissionError) as caught:
            call(opened, *filter(None, [name]))
        inner.chmod(0o700)
        (inner / "closed").chmod(0o700)
    assert caught.value.filename == os.path.join(inner, name).rstrip("/")


def test_only_one_of_several_publishes(folder: Folder) -> None:
    assert folder.publish("name", b"first") is True
    assert folder.publish("name", b"second") is False
    assert folder.read("name") == b"first"
    assert folder.names() == ["name"]


def test_publishing_works_where_there_are_no_links(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_link)
    assert folder.publish("name", b"first") is True
    assert folder.publish("name", b"second") is False
    assert folder.read("name") == b"first"
    assert folder.names() == ["name"]


def test_a_failed_write_leaves_the_old_and_no_litter(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.replace("a", b"old")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            folder.replace("a", b"new")
    assert folder.read("a") == b"old"
    assert folder.names() == ["a"]


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data[:3])))
    fd = os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
    assert write_all(fd, b"0123456789") == 10
    os.close(fd)
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_a_folder_that_was_closed_leads_nowhere(tmp_path: Path) -> None:
    folder = Folder.root(str(tmp_path))
    folder.close()
    folder.close()
    if files._POSIX:
        with pytest.raises(OSError, match="Bad file descriptor"):
            folder.names()
        with pytest.raises(OSError, match="Bad file descriptor"):
            folder.has("name")  # not being able to look is no absence


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(folder: Folder) -> None:
    folder.write_temporary(b"half")
    folder.replace("kept", b"")
    folder.replace(".hidden", b"")
    folder.remove_temporary()
    assert sorted(folder.names()) == [".hidden", "kept"]


def test_removing_says_what_was_there(folder: Folder) -> None:
    folder.replace("a", b"")
    assert folder.remove("a") is True
    assert folder.remove("a") is False
    folder.make("full").close()
    with folder.enter("full") as full:
        full.replace("a", b"")
    assert folder.remove_folder("full") is False
    with folder.enter("full") as full:
        full.remove("a")
    assert folder.remove_folder("full") is True
    assert folder.remove_folder("full") is True


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has /proc")
def test_touching_leaves_no_file_open(folder: Folder) -> None:
    folder.replace("a", b"")
    before = os.listdir("/proc/self/fd")
    for _ in range(8):  # a thread of before may close one
        folder.touch("a", 1234.5)
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_touching_sets_the_time(folder: Folder) -> None:
    folder.replace("a", b"")
    folder.touch("a", 1234.5)
    found = folder.stat("a")
    assert found is not None
    assert found.st_mtime == 1234.5
    assert folder.has("a")
    assert not folder.has("b")


async def test_parts_of_a_large_file_are_read_on_either_loop(tmp_path: Path) -> None:
    data = os.urandom(3 * files.CHUNK + 17)
    (tmp_path / "large").write_bytes(data)
    opened: list[int] = []

    def opener(_: str, flags: int) -> int:
        opened.append(os.open(tmp_path / "large", flags))
        return opened[-1]

    for start, stop in ((0, len(data)), (5, 9), (files.CHUNK - 1, 2 * files.CHUNK + 1)):
        assert await read_part(opener, start, stop) == data[start:stop]
    assert await read_part(opener, len(data) - 3, len(data) + 99) == data[-3:]
    for fd in set(opened):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_where_an_open_file_cannot_be_replaced_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows a reader is in the way for as long as it reads."""
    refusals, replace = [3], os.replace

    def refusing(*args: Any, **options: Any) -> None:
        if refusals[0]:
            refusals[0] -= 1
            raise PermissionError(errno.EACCES, "in use")
        replace(*args, **options)

    monkeypatch.setattr(files, "_POSIX", False)
    monkeypatch.setattr(files, "_PAUSE", 0.0)
    monkeypatch.setattr(os, "replace", refusing)
    with Folder.root(str(tmp_path)) as folder:
        folder.replace("name", b"one")
        assert folder.read("name") == b"one"
        refusals[0] = 1000
        with pytest.raises(PermissionError):
            folder.replace("name", b"other")
        assert folder.names() == ["name"]
        assert folder.read("name") == b"one"


@pytest.mark.parametrize("moves_open", [True, False])
def test_a_file_that_is_held_goes_with_its_descriptor(
    moves_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_POSIX", moves_open)
    with Folder.root(str(tmp_path)) as folder:
        fd = folder.open("lock", os.O_RDWR | os.O_CREAT)
        folder.remove_held("lock", fd)
        assert folder.names() == []
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_part_is_read_where_trio_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"0123456789")
    program = """
        import asyncio, os, sys
        from perdure._lib.files import read_part

        def opener(name, flags):
            return os.open(sys.argv[1], flags)

        assert asyncio.run(read_part(opener, 2, 5)) == b"234"
        assert "trio" not in sys.modules
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "data")]
    subprocess.run(arguments, check=True, timeout=60)


def test_a_new_file_may_have_the_descriptor_of_a_closed_input(tmp_path: Path) -> None:
    """As without a console on Windows, where a folder takes no descriptor."""
    program = """
        import os, pathlib, sys
        from perdure._lib import files

        files._POSIX = False
        os.close(0)
        new = files.NewFile(pathlib.Path(sys.argv[1]))
        os.fstat(0)
        new.add(b"whole")
        assert new.publish() == 5
        new.close()
        try:
            os.fstat(0)
        except OSError:
            raise SystemExit(0) from None
        raise SystemExit("it was not closed")
    """
    path = tmp_path / "new"
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(path)]
    subprocess.run(arguments, check=True, timeout=60)
    assert path.read_bytes() == b"whole"


PLACE = "/srv/store"


@pytest.mark.parametrize(
    ("doing", "path", "message"),
    [
        ("write", None, "cannot write /srv/store: No room: free some room on the disk; saving"),
        ("write", PLACE, "cannot write /srv/store: No room: free some room"),
        ("write", f"{PLACE}/a/log", "cannot write /srv/store: No room at /srv/store/a/log: free"),
        ("write", "/srv", "cannot write /srv/store: No room at /srv: free"),
        ("open", PLACE, "cannot open /srv/store: No room: free some room on the disk; to read"),
    ],
)
def test_an_error_names_the_place_and_once_what_it_was_about(
    doing: str, path: str | None, message: str
) -> None:
    error = files.store_error(OSError(errno.ENOSPC, "No room", path), doing, PLACE)
    assert str(error).startswith(message)
    assert error.facts["path"] == (path or PLACE)


async def test_a_file_that_is_closed_amid_a_write_writes_into_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A native cancellation, which no shield stops, leaves the writing thread behind."""
    writing, may_write = threading.Event(), threading.Event()

    def write_later(fd: int, data: bytes) -> int:
        writing.set()
        may_write.wait(30)
        return write_all(fd, data)

    monkeypatch.setattr(files, "write_all", write_later)
    new = files.NewFile(tmp_path / "new")
    new.add(b"x")
    writer, closer = threading.Thread(target=new.write), threading.Thread(target=new.close)
    writer.start()
    writing.wait(30)
    closer.start()
    with (tmp_path / "other").open("wb") as other:
        may_write.set()
        writer.join(30)
        closer.join(30)
        new.add(b"late")
        new.write()
        assert os.fstat(other.fileno()).st_size == 0
    assert new.publish() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
