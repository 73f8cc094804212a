"""Blobs: files under the name of their content, shared by a tenant's sessions.

A sweep never removes what it has just found unreachable: it moves it into
``quarantine/<milliseconds>/``, where reads still find it, and a later sweep removes it
there, one grace period after the move, if it is neither reachable nor put again by then.
Putting bytes that are there renews their age, and brings them back from quarantine.

Blocking; each function is one hop into a thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping

from perdure._lib.files import TEMPORARY, Folder
from perdure.records.blob_names import is_name, require_named, verified
from perdure.store import BlobSweep
from perdure.stores.file.layout import QUARANTINE, blobs_of

_SHELF = re.compile(r"[0-9a-fx][0-9a-f]\Z")


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
        for shelf_name in sorted({name[:2] for name in blobs}):
            with folder.make(shelf_name) as shelf:
                for name in [name for name in blobs if name[:2] == shelf_name]:
                    _put(folder, shelf, name, blobs[name], now)
                # Whoever put it first may have died before its name was durable.
                shelf.sync()
        folder.sync()
    root.sync_path(*path)


def _put(folder: Folder, shelf: Folder, name: str, data: bytes, now: float) -> None:
    for moved in _moved(folder, name):
        with moved:
            if moved.read(name) == data:
                moved.rename(name, name, to=shelf)
            else:
                moved.remove(name)
    if shelf.read(name) == data:
        with contextlib.suppress(FileNotFoundError):  # a sweep has just moved it
            shelf.touch(name, now)
            return
    shelf.replace(name, data)


def get(root: Folder, tenant: str, name: str) -> bytes | None:
    """Return a blob, None if there is none.

    Raises:
        CorruptRecordError: Its bytes are not those of its name.

    """
    if not is_name(name):
        return None
    try:
        folder = root.enter(*blobs_of(tenant))
    except FileNotFoundError:
        return None
    with folder:
        data = _read(folder, name)
        where = f"{folder.path}/{name[:2]}/{name}"
        return None if data is None else verified(name, data, at=where)


def _read(folder: Folder, name: str) -> bytes | None:
    for _ in range(2):  # a sweep may move it between two looks
        with contextlib.suppress(FileNotFoundError), folder.enter(name[:2]) as shelf:
            data = shelf.read(name)
            if data is not None:
                return data
        for moved in _moved(folder, name):
            with moved:
                data = moved.read(name)
            if data is not None:
                return data
    return None


def _moved(folder: Folder, name: str) -> Iterator[Folder]:
    """Give the quarantine's folders that hold a blob, each to be closed by whoever gets it."""
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
        return sorted({n for place in _places(folder) for n in place.names() if is_name(n)})


def remove_blobs(root: Folder, tenant: str, names: Collection[str]) -> int:
    """Remove blobs, wherever they lie, and return how many bytes were freed."""
    try:
        folder = root.enter(*blobs_of(tenant))
    except FileNotFoundError:
        return 0
    freed = 0
    with folder:
        for place in _places(folder):
            for name in filter(is_name, place.names()):
                found = place.stat(name) if name in names else None
                if found is not None and place.remove(name):
                    freed += found.st_size
            place.sync()
    return freed


def _places(folder: Folder) -> Iterator[Folder]:
    """Give the folders that hold blobs, quarantine's too; each is closed behind its turn."""
    steps = [(shelf,) for shelf in folder.names() if _SHELF.match(shelf)]
    for path in (*steps, *((QUARANTINE, str(stamp)) for stamp in _stamps(folder))):
        with contextlib.suppress(FileNotFoundError), folder.enter(*path) as place:
            yield place


def sweep(
    root: Folder, tenant: str, reachable: Collection[str], older_than: float, now: float
) -> BlobSweep:
    """Remove what was moved away long enough ago, then move away what nobody reaches."""
    try:
        folder = root.enter(*blobs_of(tenant))
    except FileNotFoundError:
        return BlobSweep()
    keep = frozenset(reachable)
    with folder:
        sizes = [
            size for stamp in _stamps(folder) for size in _end(folder, stamp, keep, older_than, now)
        ]
        moved = _move_away(folder, keep, older_than, now)
    return BlobSweep(moved, len(sizes), sum(sizes))


def _end(
    folder: Folder, stamp: int, keep: frozenset[str], older_than: float, now: float
) -> Iterator[int]:
    """Bring back, or remove, what an earlier sweep moved; give the sizes that were freed."""
    with contextlib.suppress(FileNotFoundError):  # another sweep is faster
        with folder.enter(QUARANTINE, str(stamp)) as moved:
            for name in moved.names():
                found = moved.stat(name)
                if found is None:
                    continue
                # Looked at again: it may have been reached, or put anew, since it was moved.
                if name in keep or found.st_mtime > stamp / 1000:
                    _bring_back(folder, moved, name)
                elif now - stamp / 1000 >= older_than and moved.remove(name):
                    yield found.st_size
        with folder.enter(QUARANTINE) as quarantine:
            quarantine.remove_folder(str(stamp))


def _bring_back(folder: Folder, moved: Folder, name: str) -> None:
    with contextlib.suppress(FileNotFoundError), folder.make(name[:2]) as shelf:
        moved.rename(name, name, to=shelf)
        shelf.sync()


def _move_away(folder: Folder, keep: frozenset[str], older_than: float, now: float) -> int:
    names = [
        (shelf, name)
        for shelf in folder.names()
        if _SHELF.match(shelf)
        for name in _old(folder, shelf, keep, older_than, now)
    ]
    if not names:
        return 0
    count = 0
    with folder.make(QUARANTINE, str(int(now * 1000))) as moved:
        for shelf_name, name in names:
            with contextlib.suppress(FileNotFoundError), folder.enter(shelf_name) as shelf:
                shelf.rename(name, name, to=moved)
                count += 1
        moved.sync()
    return count


def _old(
    folder: Folder, shelf_name: str, keep: frozenset[str], older_than: float, now: float
) -> list[str]:
    old = []
    with folder.enter(shelf_name) as shelf:
        for name in shelf.names():
            found = shelf.stat(name)
            if found is None or now - found.st_mtime < older_than:
                continue
            if name.endswith(TEMPORARY):
                shelf.remove(name)  # a writer that was killed long ago
            elif is_name(name) and name not in keep:
                old.append(name)
    return old
