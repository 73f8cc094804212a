"""What differs between platforms: locks that end with their holder, mounts, and missing parts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure._lib import platform

posix = pytest.mark.skipif(sys.platform == "win32", reason="flock is POSIX's")


def test_a_lock_excludes_others_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open("r+b") as one, path.open("r+b") as other:
        assert platform.try_lock(one.fileno()) is True
        assert platform.try_lock(other.fileno()) is False
        assert platform.try_lock(other.fileno(), shared=True) is False
        one.close()
        assert platform.try_lock(other.fileno()) is True


@posix
def test_two_who_only_look_do_not_hinder_each_other(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open("r+b") as one, path.open("r+b") as other:
        assert platform.try_lock(one.fileno(), shared=True) is True
        assert platform.try_lock(other.fileno(), shared=True) is True


def test_a_platform_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "fcntl", None)
    monkeypatch.setattr(platform, "msvcrt", None)
    with (tmp_path / "lock").open("w+b") as file:
        assert platform.try_lock(file.fileno()) is None
    assert platform.fcntl is platform.msvcrt is None


class Msvcrt:
    """What Windows' module does with a lock: one byte, from where the file stands."""

    LK_NBLCK = 2

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error
        self.locked: list[tuple[int, int, int]] = []

    def locking(self, fd: int, mode: int, count: int) -> None:
        if self.error is not None:
            raise self.error
        self.locked.append((os.lseek(fd, 0, os.SEEK_CUR), mode, count))


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (None, True),
        (PermissionError(errno.EACCES, "busy"), False),
        (OSError(errno.EDEADLK, "busy"), False),
        (OSError(errno.EINVAL, "cannot be locked"), None),
    ],
)
def test_windows_locks_its_first_byte(
    error: OSError | None, answer: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    means = Msvcrt(error)
    monkeypatch.setattr(platform, "fcntl", None)
    monkeypatch.setattr(platform, "msvcrt", means)
    with (tmp_path / "lock").open("w+b") as file:
        file.write(b"something")
        file.flush()
        assert platform.try_lock(file.fileno(), shared=True) is answer
    assert means.locked == ([] if error else [(0, 2, 1)])
    assert platform.fcntl is None


class Fcntl:
    """What macOS' module does with a full sync."""

    F_FULLFSYNC = 51

    def __init__(self, code: int | None = None) -> None:
        self.code = code
        self.asked: list[int] = []

    def fcntl(self, fd: int, what: int) -> None:
        self.asked.append(what)
        if self.code is not None:
            raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize(
    ("code", "synced"), [(None, 0), (errno.ENOTSUP, 1), (errno.EINVAL, 1), (errno.ENOTTY, 1)]
)
@pytest.mark.parametrize("sync", [platform.sync_file, platform.sync_data])
def test_macos_syncs_down_to_the_disk_where_its_file_system_can(
    sync: Callable[[int], None],
    code: int | None,
    synced: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    means, calls = Fcntl(code), []
    monkeypatch.setattr(platform, "fcntl", means)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "fsync", calls.append)
    sync(5)
    assert (means.asked, calls) == ([51], [5] * synced)


def test_a_full_sync_that_fails_is_not_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(platform, "fcntl", Fcntl(errno.EIO))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "fsync", calls.append)
    with pytest.raises(OSError, match="Input/output"):
        platform.sync_file(5)
    assert calls == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_folder_that_has_nothing_to_sync_is_well(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def fsync(fd: int) -> None:
        asked.append(fd)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    platform.sync_folder(5)
    platform.sync_folder(None)
    assert asked == [5]


MOUNTS = [
    ("/", "ext4"),
    ("/home", "nfs4"),
    ("/home/me/local", "xfs"),
    ("/mnt/with\\040space", "cifs"),
    ("/mnt/twice", "nfs"),
    ("/mnt/twice", "tmpfs"),
]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/data", None),
        ("/home", "nfs4"),
        ("/home/me/agents", "nfs4"),
        ("/homework", None),
        ("/home/me/local/agents", None),
        ("/mnt/with space/x", "cifs"),
        ("/mnt/twice/x", None),
    ],
)
def test_the_innermost_and_last_mount_decides(path: str, kind: str | None) -> None:
    assert platform.network_type_of(path, MOUNTS) == kind


def test_this_machine_has_a_name_and_room_for_files() -> None:
    assert platform.host_name()
    assert (platform.descriptor_limit() or 1024) > 32


def test_boot_id_is_the_same_twice() -> None:
    assert platform.boot_id() == platform.boot_id()


@posix
def test_the_file_store_imports_without_fcntl() -> None:
    code = (
        "import sys; sys.modules['fcntl'] = None\n"
        "import perdure._lib.platform as p, perdure.stores.file\n"
        "print(p.fcntl, p.try_lock(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "None"]  # and there is no msvcrt here
