"""Platform differences: file locks, syncs, and the types of file systems.

Each function has one meaning everywhere; where a platform lacks it, the result says so, and
nothing is silently weaker. Only here may the import of a platform's module fail.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from typing import Any

# fmt: off
_NETWORK = frozenset({
    "9p", "afs", "afpfs", "ceph", "cifs", "coda", "davfs", "fuse.glusterfs",
    "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs",
    "nfs", "nfs3", "nfs4", "smb", "smb2", "smb3", "smbfs", "sshfs", "vboxsf", "virtiofs",
})
# fmt: on
"""Types of file systems whose locks and syncs may not reach other machines, or the disk."""
_BUSY = frozenset({errno.EACCES, errno.EAGAIN, errno.EDEADLK})


def _optional(name: str) -> Any:
    """Import a module that only some platforms have."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


fcntl = _optional("fcntl")
resource = _optional("resource")
msvcrt = _optional("msvcrt")
"""Windows' own; where neither is there, files cannot be locked."""


def try_lock(fd: int, *, shared: bool = False) -> bool | None:
    """Try to lock a file against other opens of it, without waiting.

    The lock ends with the descriptor, or the process. Returns None where files cannot be
    locked. Windows has no shared locks: there, two concurrent checks exclude each other.
    """
    try:
        if fcntl is not None:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        elif msvcrt is not None:
            os.lseek(fd, 0, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            return None
    except OSError as error:
        return False if error.errno in _BUSY else None
    return True


def sync_file(fd: int) -> None:
    """Make a file's bytes and its size durable, down to the disk itself."""
    if sys.platform == "darwin" and fcntl is not None:  # pragma: no cover  # macOS only
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        except OSError as error:
            # Some file systems do not have it; a real I/O error must not be asked twice.
            if error.errno not in {errno.ENOTSUP, errno.EINVAL, errno.ENOTTY}:
                raise
        else:
            return
    os.fsync(fd)


def sync_data(fd: int) -> None:
    """Make a file's bytes durable, and of its metadata what reading them needs."""
    if sys.platform == "darwin" or not hasattr(os, "fdatasync"):
        sync_file(fd)
    else:
        os.fdatasync(fd)


def sync_folder(fd: int | None) -> None:
    """Make a folder's entries durable, where the platform supports it."""
    if fd is None:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        # A file system that has nothing to sync for a folder says so.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise


def synced_by() -> tuple[str, bool]:
    """Return what files are synced by here, and whether folders are synced as well."""
    if sys.platform == "darwin" and fcntl is not None:
        return "F_FULLFSYNC", True
    return ("fdatasync" if hasattr(os, "fdatasync") else "fsync"), os.name == "posix"


def drop_cache(fd: int) -> None:
    """Drop a file from the page cache, so that the next read comes from the disk."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # only advice
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def boot_id() -> str:
    """Return the id of this machine's current boot; "" if unknown."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def host_name() -> str:
    """Return this machine's name, for people."""
    import socket

    return socket.gethostname()


def network_file_system(path: str) -> str | None:
    """Return the type of the network file system that *path* is on, None for a local one.

    Also None if unknown, which is everywhere except on Linux.
    """
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split(" ") for line in file]
    except OSError:
        return None
    return network_type_of(os.path.realpath(path), [(m[1], m[2]) for m in mounts if len(m) > 2])


def network_type_of(path: str, mounts: list[tuple[str, str]]) -> str | None:
    """Return the type of the mount that *path* is on, if it is a network file system.

    >>> network_type_of("/home/me/agents", [("/", "ext4"), ("/home", "nfs4")])
    'nfs4'
    """
    best, mount = -1, ""
    for escaped, kind in mounts:
        point = escaped.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        within = point in {"/", path} or path.startswith(point + "/")
        if within and len(point) >= best:  # a later mount covers an earlier one
            best, mount = len(point), kind
    return mount if mount in _NETWORK else None


def descriptor_limit() -> int | None:
    """Return how many files this process may have open, None where that is not limited."""
    if resource is None:
        return None
    limit: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit
