"""The floor of an open on files: the least that keeps what perdure promises of one, in one pass.

It opens a session that its last holder has released, whose log ends in the file that the last fold
names, and that was never a draft: else it raises, and perdure has more to do as well. It writes
what perdure writes, and perdure opens what it leaves. Its steps, each with its checks:

1. **Folder.** Agents and session, each entered by name without following a link, and writable by
   its user alone.
2. **First listing.** The newest lease, whether it was released, the manifests, and that no copy
   is unfinished and nothing waits in an inbox or lies in quarantine.
3. **Lease.** Read once: its checksum, its format, its session, its epoch; not deleted, no draft.
4. **Publish.** The next lease as a temporary file, synced, linked to a name that only one process
   can create, the folder synced.
5. **Second listing.** No higher epoch: the fence rests on its being after the publication. What a
   late holder has appended by now counts, so the log is read only from here on.
6. **Manifest.** The newest one: checksum, format, session.
7. **Log.** Its folder, listed once. Its newest file: the first line proves itself and what it
   follows; from where the fold has proven it, each line's checksum continues that of the line
   before it; it ends with a whole group, and not before what was folded. Those are the tail.
8. **Seal.** That file and its folder are synced: what an epoch follows is durable. (Of a holder
   that did not release it, it would be read again from the disk.)
9. **Begin.** The epoch record, which names and seals the predecessor, in a new file, synced, and
   its folder.
10. **Documents.** The two that a restore needs: the hash in the manifest, and that each is
    well-formed, of this version, of this session and as of its record.
11. **Still held.** The next lease is absent, and the own one is the file that was published.
12. **Clean up.** Lower leases and their marks, lowest first.

To close is to look at the fence as in step 11, and to leave the mark of a release.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from typing import NamedTuple

import msgspec

from perdure._lib.platform import host_name
from perdure.memory.context import SNAPSHOT
from perdure.memory.documents import SESSION
from perdure.records import records as frames
from perdure.records.keys import SessionKey
from perdure.records.manifest import FORMAT, Manifest
from perdure.records.records import EPOCH, Entry, Record, Scanner
from perdure.restore.ladder import problem_of
from perdure.stores.file.layout import (
    DRAFT,
    INBOX,
    LEASE,
    LOG,
    MANIFESTS,
    MARKS,
    QUARANTINE,
    RELEASED,
    decoded,
    epoch_in,
    sealed,
    segment_name,
    segment_of,
    session_path,
    unsealed,
)
from perdure.stores.file.leases import LeaseFile
from perdure.stores.file.segments import (
    DurablePosition,
    SegmentEnd,
    SegmentHeader,
    segment_of_line,
)

__all__ = ["FloorOpened", "close", "take"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_LARGEST = 1 << 24


class FloorOpened(NamedTuple):
    """A session that was opened, and what its restore would be handed."""

    folder: int
    epoch: int
    head: int
    own: tuple[int, int]
    documents: dict[str, bytes]
    tail: tuple[Record, ...]


def take(root: int, key: SessionKey) -> FloorOpened:
    """Take a session over and read what its restore needs; blocking. *root* is an open folder."""
    folder = _entered(root, session_path(key))
    try:
        names = os.listdir(folder)
        epoch = max(map(LEASE.epoch, names))
        _require(RELEASED.name(epoch) in names and DRAFT.name(epoch) not in names, "released")
        _require(not any(map(INBOX.epoch, names)) and QUARANTINE not in names, "at rest")
        lease = unsealed(_read(folder, LEASE.name(epoch)), LeaseFile)
        _require(
            lease is not None and (lease.format, lease.key, lease.epoch) == (1, key, epoch),
            "known by its lease",
        )
        assert lease is not None
        _require(not lease.deleted and lease.draft is None, "no draft")
        own = _publish(folder, key, lease)
        later = os.listdir(folder)
        _require(max(map(LEASE.epoch, later)) == epoch + 1, "not overtaken")
        (name,) = [name for name in later if epoch_in(name, MANIFESTS) >= lease.since]
        manifest = unsealed(_read(folder, name), Manifest)
        _require(
            manifest is not None and manifest.key == key and manifest.format <= FORMAT, "folded"
        )
        assert manifest is not None
        head, tail = _continued(folder, key, manifest, epoch + 1)
        documents = {name: _read(folder, name) for name in (SESSION, SNAPSHOT)}
        for name, data in documents.items():
            listed = manifest.documents[name]
            _require(hashlib.sha256(data).hexdigest() == listed.sha256, "as its manifest says")
            _require(problem_of(name, data, key, listed.as_of_seq) is None, "restorable")
        _require_held(folder, epoch + 1, own)
        for name in sorted(later, key=LEASE.epoch):
            if 0 < epoch_in(name, (LEASE, *MARKS)) <= epoch:
                os.unlink(name, dir_fd=folder)
    except BaseException:
        os.close(folder)
        raise
    return FloorOpened(folder, epoch + 1, head, own, documents, tail)


def close(opened: FloorOpened) -> None:
    """Release a session; blocking."""
    try:
        _require_held(opened.folder, opened.epoch, opened.own)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        os.close(os.open(RELEASED.name(opened.epoch), flags, 0o600, dir_fd=opened.folder))
    finally:
        os.close(opened.folder)


def _require(holds: bool, what: str) -> None:  # a check, by position
    if not holds:
        raise AssertionError(f"the floor needs a session that is {what}")


def _entered(root: int, steps: tuple[str, ...]) -> int:
    folder = os.dup(root)
    for name in steps:
        step = _step(folder, name)
        os.close(folder)
        folder = step
    return folder


def _step(folder: int, name: str) -> int:
    step = os.open(name, _FOLDER, dir_fd=folder)
    _require(not os.fstat(step).st_mode & (stat.S_IWGRP | stat.S_IWOTH), "private")
    return step


def _read(folder: int, name: str) -> bytes:
    file = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
    try:
        _require(stat.S_ISREG(os.fstat(file).st_mode), "of files")
        return os.read(file, _LARGEST)
    finally:
        os.close(file)


def _continued(
    folder: int, key: SessionKey, manifest: Manifest, epoch: int
) -> tuple[int, tuple[Record, ...]]:
    """Seal the log and begin its next epoch; return its head, and the records after the fold."""
    log = _step(folder, LOG)
    try:
        before, number = max(filter(None, map(segment_of, os.listdir(log))))
        file = os.open(segment_name(before, number), os.O_RDWR | _FILE, dir_fd=log)
        try:
            data = os.read(file, _LARGEST)
            segment = segment_of_line(data.partition(b"\n")[0], before, number)
            _require(segment is not None and segment.first.key == key, "begun")
            proven = decoded(manifest.position, DurablePosition)
            assert proven is not None
            _require((proven.epoch, proven.number) == (before, number), "folded in its last file")
            scanner = Scanner(before, proven.at)
            tail = scanner.feed(data[proven.at.offset :])
            end = scanner.end
            _require(scanner.damage is None and end.offset == len(data), "whole")
            _require(proven.at.seq <= manifest.as_of_seq <= end.seq, "folded before its end")
            os.fsync(file)
            os.fsync(log)
        finally:
            os.close(file)
        sealed_at = SegmentEnd(before, number, end.offset, end.seq, end.crc)
        return _begin(log, key, epoch, sealed_at), tuple(tail)
    finally:
        os.close(log)


def _publish(folder: int, key: SessionKey, before: LeaseFile) -> tuple[int, int]:
    epoch = before.epoch + 1
    lease = LeaseFile(
        format=before.format,
        key=key,
        epoch=epoch,
        owner="floor",
        host=host_name(),
        pid=os.getpid(),
        at=time.time(),
        since=before.since,
        inbox=before.inbox,
    )
    temporary, name = f".floor-{epoch}.tmp", LEASE.name(epoch)
    file = os.open(temporary, _NEW, 0o600, dir_fd=folder)
    try:
        os.write(file, sealed(lease))
        os.fsync(file)
    finally:
        os.close(file)
    os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    os.unlink(temporary, dir_fd=folder)
    os.fsync(folder)
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return status.st_ino, status.st_mtime_ns


def _begin(log: int, key: SessionKey, epoch: int, before: SegmentEnd) -> int:
    header = SegmentHeader(
        key, before, owner="floor", host=host_name(), pid=os.getpid(), at=time.time()
    )
    entry = Entry(EPOCH, msgspec.json.encode(header))
    line, _ = frames.encode((entry,), first=before.seq + 1, epoch=epoch, crc=before.crc)
    file = os.open(segment_name(epoch, 0), _NEW, 0o600, dir_fd=log)
    try:
        os.write(file, line)
        os.fdatasync(file)
    finally:
        os.close(file)
    os.fsync(log)
    return before.seq + 1


def _require_held(folder: int, epoch: int, own: tuple[int, int]) -> None:
    try:
        os.stat(LEASE.name(epoch + 1), dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        status = os.stat(LEASE.name(epoch), dir_fd=folder, follow_symlinks=False)
        _require((status.st_ino, status.st_mtime_ns) == own, "its own")
    else:
        _require(False, "not overtaken")  # never holds
