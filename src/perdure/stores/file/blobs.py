"""Blobs: content-addressed files, shared by a tenant's sessions.

A sweep does not remove a blob that it finds unreachable: it moves it into
``quarantine/<milliseconds>/``, where reads still find it. A later sweep removes it from there,
one grace period after the move, if it is neither reachable nor was put again by then. Putting
bytes that exist renews their age, and restores them from quarantine.

Blocking: each function is one call into a thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping

from perdure._lib.files import TEMPORARY, Folder
from perdure.records.chunks import is_name, require_named, verified
from perdure.store import BlobSweep
from perdure.stores.file.layout import QUARANTINE, blobs_of

_SHARD = re.compile(r"[0-9a-fx][0-9a-f]\Z")


def put(root: Folder, tenant: str, blobs: Mapping[str, bytes], now: float) -> None:
    """Make blobs durable.

    Raises:
        NotStorableError: A name is not the SHA-256 of its bytes.

    """
    require_named(blobs)
    if not blobs:
        return
    path = blobs_of(tenant)
    with root.make(*path) as folder:
        for prefix in sorted({name[:2] for name in blobs}):
            with folder.make(prefix) as shard:
                for name in [name for name in blobs if name[:2] == prefix]:
                    _put(folder, shard, name, blobs[name], now)
                # The process that put it first may have died before its name was durable.
                shard.sync()
        folder.sync()
    root.sync_path(*path)


def _put(folder: Folder, shard: Folder, name: str, data: bytes, now: float) -> None:
    for moved in _quarantined(folder, name):
        with moved:
            if moved.read(name) == data:
                moved.rename(name, name, to=shard)
            else:
                moved.remove(name)
    if shard.read(name) == data:
        with contextlib.suppress(FileNotFoundError):  # a sweep has just moved it
            shard.touch(name, now)
            return
    shard.replace(name, data)


def get(root: Folder, tenant: str, name: str) -> bytes | None:
    """Return a blob, None if it does not exist.

    Raises:
        CorruptRecordError: Its bytes do not match its name.

    """
    if not is_name(name):
        return None
    try:
        folder = root.enter(*blobs_of(tenant))
    except FileNotFoundError:
        return None
    with folder:
        data = _read(folder, name)
        path = f"{folder.path}/{name[:2]}/{name}"
        return None if data is None else verified(name, data, at=path)


def _read(folder: Folder, name: str) -> bytes | None:
    for _ in range(2):  # a sweep may move it between the two reads
        with contextlib.suppress(FileNotFoundError), folder.enter(name[:2]) as shard:
            data = shard.read(name)
            if data is not None:
                return data
        for moved in _quarantined(folder, name):
            with moved:
                data = moved.read(name)
            if data is not None:
                return data
    return None


def _quarantined(folder: Folder, name: str) -> Iterator[Folder]:
    """Yield the quarantine folders that hold a blob; the caller closes each."""
    for stamp in _stamps(folder):
        with contextlib.suppress(FileNotFoundError):
            moved = folder.enter(QUARANTINE, str(stamp))
            if moved.stat(name) is None:
                moved.close()
            else:
                yield moved


def _stamps(folder: Folder) -> list[int]:
    try:
        with folder.enter(QUARANTINE) as quarantine:
            return sorted(int(name) for name in quarantine.names() if name.isdecimal())
    except FileNotFoundError:
        return []


def blob_names(root: Folder, tenant: str) -> list[str]:
    """List the blobs that can be read."""
    try:
        folder = root.enter(*blobs_of(tenant))
    except FileNotFoundError:
        return []
    with folder:
        return sorted(
            {n for blob_folder in _blob_folders(folder) for n in blob_folder.names() if is_name(n)}
        )


def remove_blobs(root: Folder, tenant: str, names: Collection[str]) -> int:
    """Remove blobs, from quarantine too, and return how many bytes were freed."""
    try:
        folder = root.enter(*blobs_of(tenant))
    except FileNotFoundError:
        return 0
    freed = 0
    with folder:
        for blob_folder in _blob_folders(folder):
            for name in filter(is_name, blob_folder.names()):
                status = blob_folder.stat(name) if name in names else None
                if status is not None and blob_folder.remove(name):
                    freed += status.st_size
            blob_folder.sync()
    return freed


def _blob_folders(folder: Folder) -> Iterator[Folder]:
    """Yield the folders that hold blobs, quarantine's too; each is closed after its turn."""
    steps = [(shard,) for shard in folder.names() if _SHARD.match(shard)]
    for path in (*steps, *((QUARANTINE, str(stamp)) for stamp in _stamps(folder))):
        with contextlib.suppress(FileNotFoundError), folder.enter(*path) as blob_folder:
            yield blob_folder


def sweep(
    root: Folder, tenant: str, reachable: Collection[str], older_than: float, now: float
) -> BlobSweep:
    """Remove blobs that were quarantined long enough ago, then quarantine unreachable ones."""
    try:
        folder = root.enter(*blobs_of(tenant))
    except FileNotFoundError:
        return BlobSweep()
    keep = frozenset(reachable)
    with folder:
        sizes = [
            size
            for stamp in _stamps(folder)
            for size in _expire(folder, stamp, keep, older_than, now)
        ]
        moved = _move_away(folder, keep, older_than, now)
    return BlobSweep(moved, len(sizes), sum(sizes))


def _expire(
    folder: Folder, stamp: int, keep: frozenset[str], older_than: float, now: float
) -> Iterator[int]:
    """Restore or remove the blobs that an earlier sweep moved; yield the sizes that were freed."""
    with contextlib.suppress(FileNotFoundError):  # another sweep is faster
        with folder.enter(QUARANTINE, str(stamp)) as moved:
            for name in moved.names():
                status = moved.stat(name)
                if status is None:
                    continue
                # Checked again: it may be reachable, or was put again, since it was moved.
                # The stamp is in whole milliseconds, and so is the comparison.
                if name in keep or int(status.st_mtime * 1000) > stamp:
                    _bring_back(folder, moved, name)
                elif now - stamp / 1000 >= older_than and moved.remove(name):
                    yield status.st_size
        with folder.enter(QUARANTINE) as quarantine:
            quarantine.remove_folder(str(stamp))


def _bring_back(folder: Folder, moved: Folder, name: str) -> None:
    with contextlib.suppress(FileNotFoundError), folder.make(name[:2]) as shard:
        moved.rename(name, name, to=shard)
        shard.sync()


def _move_away(folder: Folder, keep: frozenset[str], older_than: float, now: float) -> int:
    names = [
        (shard, name)
        for shard in folder.names()
        if _SHARD.match(shard)
        for name in _sweepable(folder, shard, keep, older_than, now)
    ]
    if not names:
        return 0
    count = 0
    with folder.make(QUARANTINE, str(int(now * 1000))) as moved:
        for prefix, name in names:
            with contextlib.suppress(FileNotFoundError), folder.enter(prefix) as shard:
                shard.rename(name, name, to=moved)
                count += 1
        moved.sync()
    return count


def _sweepable(
    folder: Folder, prefix: str, keep: frozenset[str], older_than: float, now: float
) -> list[str]:
    old = []
    with folder.enter(prefix) as shard:
        for name in shard.names():
            status = shard.stat(name)
            if status is None or now - status.st_mtime < older_than:
                continue
            if name.endswith(TEMPORARY):
                shard.remove(name)  # a writer that was killed long ago
            elif is_name(name) and name not in keep:
                old.append(name)
    return old
