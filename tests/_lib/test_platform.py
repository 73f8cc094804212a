"""What differs between platforms: locks that end with their holder, mounts, and missing parts."""

from __future__ import annotations

import subprocess
import sys
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
    with (tmp_path / "lock").open("w+b") as file:
        assert platform.try_lock(file.fileno()) is None


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
    assert platform.open_files_limit() > 32


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
    assert done.stdout.split() == ["None", "None"]
