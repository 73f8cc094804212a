"""Taking, showing and giving up the right to write a session.

Taking it publishes a higher epoch by a link that only one can make, and appends an epoch
record that seals the predecessor: a late append of the old holder finds that its place
lies behind the seal. Nobody waits for a holder that has stopped, and nobody writes to,
cuts or goes on in another epoch's segment.

The order matters, and is checked against a model (tests/properties). Fencing rests on two
facts: `lease-<E+1>.json` is published before anything of E is sealed, and a holder removes
lower leases in ascending order. So ``E+1 is absent``, then ``E is mine``, proves that
nobody had taken over when the first of the two was asked.

Blocking; each function is part of one hop into a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time

import msgspec

from perdure._lib.files import Folder, write_all
from perdure._lib.platform import drop_cache, sync_data, sync_file
from perdure.errors import LeaseHeldError, UnsupportedVersionError
from perdure.records import frames
from perdure.records.frames import Position
from perdure.records.keys import SessionKey
from perdure.records.manifest import FORMAT
from perdure.records.records import EPOCH, Entry
from perdure.store import LeaseState
from perdure.stores.file import segments
from perdure.stores.file.documents import (
    read_manifests,
    remove_owned,
    remove_unfinished,
    require_folded,
)
from perdure.stores.file.layout import (
    LOG,
    QUARANTINE,
    lease_epoch,
    lease_name,
    manifest_epoch,
    released_name,
    segment_name,
    segment_of,
    session_path,
)
from perdure.stores.file.owners import FileOwner, Owners
from perdure.stores.file.sealed import decoded, sealed, unsealed
from perdure.stores.file.segments import DurablePosition, LogSegment, SegmentEnd, SegmentHeader

_log = logging.getLogger("perdure")


class LeaseFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What ``lease-<epoch>.json`` says."""

    format: int
    key: SessionKey
    epoch: int
    owner: str
    host: str = ""
    pid: int = 0
    boot: str = ""
    at: float = 0.0
    since: int = 1
    """The epoch that this life of the session began with; what is older was deleted."""
    deleted: bool = False


class Fence(msgspec.Struct, frozen=True):
    """The proof that an epoch is still the newest: which lease file is mine."""

    epoch: int
    own: str
    next: str
    inode: int
    modified: int

    def holds(self, folder: Folder) -> bool:
        """Say whether nobody had taken over when this was called."""
        if folder.has(self.next):
            return False
        own = folder.stat(self.own)
        # A taker that overslept may publish a number that has come and gone: not this file.
        return own is not None and (own.st_ino, own.st_mtime_ns) == (self.inode, self.modified)


class AcquiredSession(msgspec.Struct, frozen=True):
    """A session that was just acquired."""

    fence: Fence
    end: Position
    """Behind the epoch record."""
    created: bool


def newest_epoch(folder: Folder) -> int:
    """Return the highest epoch that was ever published here, 0 for none."""
    names = folder.names()
    newest = max(map(lease_epoch, names), default=0)
    if newest:
        return newest
    # A copy that left the leases out: its epochs still may not start again.
    manifests = [found[0] for found in map(manifest_epoch, names) if found]
    with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
        manifests += [found[0] for found in map(segment_of, log.names()) if found]
    return max(manifests, default=0)


def read_lease(folder: Folder, epoch: int) -> LeaseFile | None:
    """Return a lease, None if it is not there or not whole."""
    return unsealed(folder.read(lease_name(epoch)), LeaseFile)


def look(root: Folder, key: SessionKey, owners: Owners) -> LeaseState | None:
    """Say who has, or last had, a session."""
    try:
        folder = root.enter(*session_path(key))
    except FileNotFoundError:
        return None
    with folder:
        epoch = newest_epoch(folder)
        if not epoch:
            return None
        lease = read_lease(folder, epoch)
        released = folder.has(released_name(epoch))
        if lease is None:
            return LeaseState(epoch, "", released=released or not folder.has(lease_name(epoch)))
    require_key(folder, key, lease)
    return LeaseState(
        epoch,
        lease.owner,
        released=released or lease.deleted,
        alive=owners.alive(lease.owner, lease.boot),
        beat=owners.beat_of(lease.owner),
        deleted=lease.deleted,
        host=lease.host,
        pid=lease.pid,
    )


def require_key(folder: Folder, key: SessionKey, lease: LeaseFile) -> None:
    """Raise unless a session's folder holds that session, in a format that is known."""
    if lease.format > FORMAT:
        message = (
            f"{folder.path} has format {lease.format}, this release reads up to {FORMAT}: "
            "use a newer release of perdure"
        )
        raise UnsupportedVersionError(message, path=folder.path, format=lease.format)
    segments.require_key(folder.path, lease.key, key)


def held(key: SessionKey, after: int, newest: int) -> LeaseHeldError:
    """Return the error for a race that was lost."""
    message = (
        f"session {key} is at epoch {newest}, not at {after}: somebody else was faster; look "
        "again who holds it, then ask for a handover or wait"
    )
    return LeaseHeldError(message, key=str(key), epoch=newest, after=after)


def take(root: Folder, key: SessionKey, after: int, me: FileOwner) -> AcquiredSession:
    """Take a session with epoch ``after + 1``.

    Raises:
        LeaseHeldError: Somebody else was faster.
        CorruptRecordError: The log is damaged before its tail.

    """
    path = session_path(key)
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(root.enter(*path))
        except FileNotFoundError:
            folder = None
        newest = newest_epoch(folder) if folder else 0
        if newest != after:
            raise held(key, after, newest)
        folder = folder or stack.enter_context(root.make(*path))
        before = read_lease(folder, after)
        if before is not None:
            require_key(folder, key, before)
        reborn = before is not None and before.deleted
        since = after + 1 if reborn else before.since if before else 1
        fence = publish(folder, key, after + 1, me, since=since)
        if fence is None:
            raise held(key, after, newest_epoch(folder))
        return _after_publishing(root, folder, key, fence, since, me)


def _after_publishing(
    root: Folder, folder: Folder, key: SessionKey, fence: Fence, since: int, me: FileOwner
) -> AcquiredSession:
    try:
        if since > 1:  # the end of a deletion that was cut short
            remove_owned(folder, key, below=since, evidence=since == fence.epoch)
        end, created = _begin(root, folder, key, fence.epoch, since, me)
        newest = newest_epoch(folder)
        if newest != fence.epoch:
            raise held(key, fence.epoch - 1, newest)  # noqa: TRY301  # undone below, as all else
        with contextlib.suppress(OSError):  # litter keeps nobody out
            _tidy(folder, key, fence.epoch - 1)
        _remove_lower(folder, fence.epoch)
    except BaseException:
        _let_go(folder, fence.epoch)
        raise
    return AcquiredSession(fence, end, created)


def _tidy(folder: Folder, key: SessionKey, before: int) -> None:
    if folder.has(released_name(before)):
        folder.remove_temporary()
    else:  # its holder may have died anywhere
        remove_unfinished(folder, key)


def _let_go(folder: Folder, epoch: int) -> None:
    """Leave an epoch that is ours, and that nobody will use, to the next one who wants it."""
    with contextlib.suppress(OSError):  # else it simply expires
        folder.replace(released_name(epoch), b"", durable=False)


def publish(
    folder: Folder, key: SessionKey, epoch: int, me: FileOwner, *, since: int, deleted: bool = False
) -> Fence | None:
    """Publish an epoch; None if somebody else has it, or a higher one."""
    lease = LeaseFile(
        format=FORMAT,
        key=key,
        epoch=epoch,
        at=time.time(),
        since=since,
        deleted=deleted,
        **msgspec.structs.asdict(me),
    )
    name, data = lease_name(epoch), sealed(lease)
    try:
        while not folder.publish(name, data):
            if newest_epoch(folder) != epoch - 1:
                return None
            # Nobody was faster: the holder below us, tidying up, took our file for a dead one's.
        found = folder.stat(name)
        if found is None or newest_epoch(folder) != epoch:
            return None
    except OSError:
        with contextlib.suppress(OSError):
            if folder.read(name) == data:  # it is there all the same
                _let_go(folder, epoch)
        raise
    return Fence(epoch, name, lease_name(epoch + 1), found.st_ino, found.st_mtime_ns)


def _begin(
    root: Folder, folder: Folder, key: SessionKey, epoch: int, since: int, me: FileOwner
) -> tuple[Position, bool]:
    """Seal what was written so far by the epoch record that follows it."""
    with folder.make(LOG) as log:
        prev = None
        while prev is None and (tip := segments.find_tip(log, key, since=since, below=epoch)):
            prev = _seal(folder, log, tip, key)
        if prev is None:
            # Whoever made these folders may have died before they were durable.
            root.sync_path(*session_path(key), LOG)
        seq, crc = (prev.seq, prev.crc) if prev else (0, 0)
        # Not what a higher epoch folded: it has overtaken us, and its log goes on behind ours.
        seen = [one for one in read_manifests(folder, key) if one.manifest.epoch < epoch]
        require_folded(folder, key, seen, seq)
        first = SegmentHeader(key, prev, owner=me.owner, host=me.host, pid=me.pid, at=time.time())
        entry = Entry(EPOCH, msgspec.json.encode(first))
        line, crc = frames.encode((entry,), first=seq + 1, epoch=epoch, crc=crc)
        create_segment(log, segment_name(epoch, 0), line)
    return Position(len(line), seq + 1, crc), prev is None


def create_segment(log: Folder, name: str, data: bytes) -> None:
    """Make a segment durable, under a name that nobody has."""
    fd = log.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_all(fd, data)
        sync_data(fd)
    finally:
        os.close(fd)
    log.sync()


def _known(folder: Folder, key: SessionKey, tip: LogSegment) -> Position:
    """Return how far a fold vouches for a segment: what is folded was durable before."""
    known = [decoded(one.manifest.position, DurablePosition) for one in read_manifests(folder, key)]
    here = [one.at for one in known if one and (one.epoch, one.number) == (tip.epoch, tip.number)]
    return max([tip.start, *here], key=lambda at: at.offset)


def _seal(folder: Folder, log: Folder, tip: LogSegment, key: SessionKey) -> SegmentEnd | None:
    """Decide how far the predecessor counts, and make sure that it lasts that far.

    None if only memory had it: a sync that failed for the old holder succeeds for us, with its
    bytes lost, so only what the disk gives back is there.
    """
    start = _known(folder, key, tip)
    seen = segments.scan(log, tip, start)
    if seen.end == start and seen.size != start.offset:
        # Nothing sound follows: a torn write, or a wrong position. Only the beginning can tell.
        start = tip.start
        seen = segments.scan(log, tip, start)
    fd = log.open(tip.name, os.O_RDWR)
    try:
        sync_file(fd)
        log.sync()
        if not folder.has(released_name(tip.epoch)):
            drop_cache(fd)
            if segments.read_first(log, tip.epoch, tip.number, key) is None:
                return None
            seen = segments.scan(log, tip, start, upto=seen.end.offset)
    finally:
        os.close(fd)
    end = seen.end
    if seen.size > end.offset:
        _keep_evidence(folder, log, tip, end.offset)
    return SegmentEnd(tip.epoch, tip.number, end.offset, end.seq, end.crc)


def _keep_evidence(folder: Folder, log: Folder, tip: LogSegment, offset: int) -> None:
    """Copy what lies behind the last whole group, and say so; the log goes on without it."""
    name = f"{tip.epoch}-{tip.number}.{offset}.tail"
    tail = (log.read(tip.name) or b"")[offset:]
    _log.warning(
        "an unfinished write at the end of a log does not count",
        extra={"path": f"{log.path}/{tip.name}", "offset": offset, "bytes": len(tail)},
    )
    # The bytes stay where they are in any case: this copy is a help, not a duty.
    with contextlib.suppress(OSError), folder.make(QUARANTINE) as quarantine:
        quarantine.replace(name, tail)


def _remove_lower(folder: Folder, epoch: int) -> None:
    """Remove the leases below mine, lowest first: fences rely on that order."""
    for lower in sorted(filter(None, map(lease_epoch, folder.names()))):
        if lower < epoch:
            folder.remove(lease_name(lower))
            folder.remove(released_name(lower))


def mark_deleted(folder: Folder, key: SessionKey, epoch: int, me: FileOwner) -> bool:
    """Publish the epoch that ends a session's life, then remove what it owned.

    False if another epoch was published before: then nothing was removed.
    """
    end = epoch + 1
    if publish(folder, key, end, me, since=end + 1, deleted=True) is None:
        return False
    remove_owned(folder, key, below=end, evidence=True)
    _remove_lower(folder, end)
    return True
