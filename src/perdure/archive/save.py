"""Saving an archive: scan of a home folder, and its files as blobs; only new blobs are put."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import aclosing
from typing import IO, Final, final

import msgspec

from perdure import errors
from perdure._lib.files import Folder, LinkFoundError, NoFileError
from perdure.archive.blobs import (
    BATCH_BYTES,
    ITEM_BYTES,
    batches,
    entries_of,
    hop,
    put,
)
from perdure.archive.limits import (
    CHUNK_BYTES,
    CONTROL,
    ArchiveLimits,
    Checker,
    Selection,
    mode_of,
    pages_of,
    too_large,
)
from perdure.records.archives import Archive, Entry, FileEntry, FolderEntry, blobs_of
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.store import Store

# Scan of a home folder: no link is followed, and no open waits on a pipe


TRIES: Final = 3
"""Number of times that a file is read again if it changes meanwhile."""
_ENTERED: Final = 0o700
"""The mode of a folder of which only a part is archived: its own is not kept."""


class FileChunk(msgspec.Struct, frozen=True):
    """A piece of the file whose entry comes next."""

    name: str
    data: bytes


class ArchiveSkipped(msgspec.Struct, frozen=True):
    """Names that an archive passes over; a restore leaves them where they are."""

    path: str
    why: str


class ScannedEntry(msgspec.Struct, frozen=True):
    """An entry, and whether it changed while it was read."""

    entry: Entry
    changing: bool = False


Found = FileChunk | ScannedEntry | ArchiveSkipped


def scan(home: Folder, selection: Selection, limits: ArchiveLimits) -> Generator[Found, None, None]:
    """Give what a home folder has, parents first, in the order of names.

    Raises:
        ConfigError: A path that is named leads through a symbolic link.
        NotStorableError: A name is one that an archive cannot have; TooLargeError: over a limit.

    """
    yield from _Scan(home, selection, limits).folder(home, "")


class _Scan:
    def __init__(self, home: Folder, selection: Selection, limits: ArchiveLimits) -> None:
        self._selection = selection
        self._limit = limits.file_bytes
        self._checker = Checker(home.path, limits, refusal=errors.NotStorableError)
        status = home.stat(".")
        self._device = None if status is None else status.st_dev

    def folder(self, folder: Folder, above: str) -> Iterator[Found]:
        for name in sorted(folder.names()):
            path = f"{above}/{name}" if above else name
            if path == CONTROL:
                continue
            status = folder.stat(name)
            if status is None:
                continue  # removed meanwhile
            fate = self._selection.fate(path)
            reason = self._passed_over(fate, status)
            if reason is not None:
                if stat.S_ISLNK(status.st_mode) and self._selection.leads_through(path):
                    raise errors.ConfigError(
                        f"persist_paths: {path!r} is a symbolic link, and may lead out of the home "
                        "folder: name the folder itself",
                        option="persist_paths",
                        path=path,
                    )
                yield ArchiveSkipped(path, reason)
            elif stat.S_ISDIR(status.st_mode):
                mode = mode_of(status.st_mode, folder=True) if fate == "taken" else _ENTERED
                yield from self._inner(folder, name, FolderEntry(path, mode))
            elif fate == "taken":
                self._checker.require_path(path)
                yield from self._file(folder, name, path)

    def _passed_over(self, fate: str, status: os.stat_result) -> str | None:
        if fate in {"hidden", "system", "unnamed"}:
            return fate
        if stat.S_ISLNK(status.st_mode):
            return "a symbolic link"
        if stat.S_ISDIR(status.st_mode):
            return None if status.st_dev == self._device else "another file system"
        return None if stat.S_ISREG(status.st_mode) else "no regular file"

    def _inner(self, folder: Folder, name: str, entry: FolderEntry) -> Iterator[Found]:
        try:
            inner = folder.enter(name)
        except (FileNotFoundError, NotADirectoryError, LinkFoundError):
            yield ArchiveSkipped(entry.path, "changed while it was read")
            return
        with inner:
            self._checker.add(entry)
            yield ScannedEntry(entry)
            yield from self.folder(inner, entry.path)

    def _file(self, folder: Folder, name: str, path: str) -> Iterator[Found]:
        for remaining in reversed(range(TRIES)):
            try:
                fd = folder.open(name)
            except (FileNotFoundError, LinkFoundError, NoFileError):  # no file any more
                yield ArchiveSkipped(path, "changed while it was read")
                return
            except PermissionError as error:
                raise errors.NotStorableError(
                    f"{folder.path}/{name} cannot be read: {error.strerror}; chmod u+r it",
                    path=path,
                ) from error
            with os.fdopen(fd, "rb") as file:
                before = os.fstat(fd)
                entry = yield from self._chunks(file, path, before)
                changing = _marks(before) != _marks(os.fstat(fd))
            if not changing or not remaining:
                self._checker.add(entry)
                yield ScannedEntry(entry, changing)
                return

    def _chunks(
        self, file: IO[bytes], path: str, status: os.stat_result
    ) -> Generator[Found, None, FileEntry]:
        """Yield a file's chunks, and return the entry of what was read."""
        digest, size, names = hashlib.sha256(), 0, list[str]()
        while data := file.read(CHUNK_BYTES):
            digest.update(data)
            size += len(data)
            if size > self._limit:
                raise too_large(path, "its bytes:", size, "file_bytes", self._limit)
            names.append(name_of(data))
            yield FileChunk(names[-1], data)
        return FileEntry(
            path,
            size,
            digest.hexdigest(),
            mode_of(status.st_mode, folder=False),
            status.st_mtime_ns,
            tuple(names) if len(names) > 1 else (),
        )


def _marks(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


SHOWN: Final = 1000


class ArchiveProgress(msgspec.Struct, frozen=True):
    """Progress of a save or a restore."""

    files: int
    bytes: int
    total_files: int | None = None
    """None while it is not known."""
    total_bytes: int | None = None


Progress = Callable[[ArchiveProgress], None] | None


class ArchiveSaved(msgspec.Struct, frozen=True, kw_only=True):
    """Result of saving an archive; it is durable."""

    archive: Archive
    new: bool = True
    """False where the home was as the newest archive has it: then that one stands."""
    stored_bytes: int = 0
    """Of files' contents that the store did not have."""
    skipped: tuple[ArchiveSkipped, ...] = ()
    """Paths that were passed over, the first 1000."""
    changing: tuple[str, ...] = ()
    """Files that changed again and again while they were read: their bytes may not fit together."""


async def take(
    store: Store,
    key: SessionKey,
    home: Folder,
    selection: Selection,
    *,
    limits: ArchiveLimits,
    before: Archive | None,
    progress: Progress = None,
) -> TreeSave:
    """Make a home's contents and their manifest durable as blobs, and verify them.

    Args:
        store: An open store.
        key: Whose home it is.
        home: The home folder, open.
        selection: What of it.
        limits: How much.
        before: The newest archive: what it names is not put again.
        progress: Called with each batch.

    Raises:
        NotStorableError: The store keeps no blobs, or a name cannot be in an archive.
        TooLargeError: It is over a limit.

    """
    if not store.capabilities.blobs:
        raise errors.NotStorableError(
            f"{store.location} keeps no blobs, which archives need: use another store",
            location=store.location,
        )
    present = set(await store.blob_names(key.blobs))
    known = await _named_by(store, key, before, limits) & present
    saving = TreeSave(store, key.blobs, present, known)
    scanned = scan(home, selection, limits)
    async with aclosing(batches(home.path, scanned, weight, BATCH_BYTES)) as given:
        async for batch in given:
            await saving.add(batch)
            if progress is not None:
                progress(ArchiveProgress(saving.files, saving.bytes))
    pages = await hop(home.path, _named_pages, saving.entries)
    await put(store, key.blobs, {name: page for name, page in pages.items() if name not in known})
    saving.pages = tuple(pages)
    return saving


def _named_pages(entries: list[Entry]) -> dict[str, bytes]:
    return {name_of(page): page for page in pages_of(entries)}


def weight(item: Found) -> int:
    """Return what an item counts of a batch."""
    return ITEM_BYTES + (len(item.data) if isinstance(item, FileChunk) else 0)


async def _named_by(
    store: Store, key: SessionKey, before: Archive | None, limits: ArchiveLimits
) -> set[str]:
    """Return the blobs that the newest archive keeps from being swept."""
    if before is None:
        return set()
    names = set(before.pages)
    try:
        async with aclosing(entries_of(store, key, before, limits)) as entries:
            async for entry in entries:
                names.update(blobs_of(entry))
    except errors.FormatError:
        return set()  # damaged: whatever is there is put again
    return names


@final
class TreeSave:
    """Contents of a home, as far as they are stored."""

    def __init__(self, store: Store, tenant: str, present: set[str], known: set[str]) -> None:
        self._store = store
        self._tenant = tenant
        self._present = present
        self._known = known
        self.entries: list[Entry] = []
        self.pages: tuple[str, ...] = ()
        self.files: int = 0
        self.bytes: int = 0
        self.stored_bytes: int = 0
        self.skipped: list[ArchiveSkipped] = []
        self.changing: list[str] = []

    async def add(self, batch: list[Found]) -> None:
        """Take note of what a batch has, and put the chunks that the newest archive lacks."""
        new: dict[str, bytes] = {}
        for item in batch:
            match item:
                case FileChunk(name, data):
                    if name not in self._known:
                        new[name] = data
                case ScannedEntry(entry, changing):
                    self.entries.append(entry)
                    if isinstance(entry, FileEntry):
                        self.files += 1
                        self.bytes += entry.size
                    if changing:
                        self.changing.append(entry.path)
                case ArchiveSkipped():
                    if len(self.skipped) < SHOWN:
                        self.skipped.append(item)
        await put(self._store, self._tenant, new)
        fresh = new.keys() - self._present
        self.stored_bytes += sum(len(new[name]) for name in fresh)
        self._present |= fresh
        self._known |= new.keys()
