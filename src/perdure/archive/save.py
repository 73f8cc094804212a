"""Taking an archive: a home folder into blobs, of which only the new ones are put."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Final, final

import msgspec

from perdure._lib.files import Folder
from perdure.archive.blobs import BATCH_BYTES, batches, entries_of, hop, put, require_blobs
from perdure.archive.entries import Archive, Entry, FileEntry, blobs_of, name_of, pages_of
from perdure.archive.limits import ArchiveLimits
from perdure.archive.scan import ArchiveSkipped, FileChunk, Found, ScannedEntry, scan
from perdure.archive.selection import Selection
from perdure.errors import FormatError
from perdure.records.keys import SessionKey
from perdure.store import Store

SHOWN: Final = 1000
ITEM: Final = 4096
"""What an entry counts beside its bytes, so that many small files do not take one call too long."""


class ArchiveProgress(msgspec.Struct, frozen=True):
    """How far a save or a restore is."""

    files: int
    bytes: int
    total_files: int | None = None
    """None while it is not known."""
    total_bytes: int | None = None


Progress = Callable[[ArchiveProgress], None] | None


class ArchiveSaved(msgspec.Struct, frozen=True, kw_only=True):
    """What a save of an archive did; it is durable."""

    archive: Archive
    new: bool = True
    """False where the home was as the newest archive has it: then that one stands."""
    stored_bytes: int = 0
    """Of files' contents that the store did not have."""
    skipped: tuple[ArchiveSkipped, ...] = ()
    """What was passed over, the first 1000."""
    changing: tuple[str, ...] = ()
    """Files that changed again and again while they were read: their bytes may not fit together."""


class SaveResult(msgspec.Struct):
    """What was found in a home, and put."""

    entries: list[Entry] = []
    pages: tuple[str, ...] = ()
    files: int = 0
    bytes: int = 0
    stored_bytes: int = 0
    skipped: list[ArchiveSkipped] = []
    changing: list[str] = []


async def take(
    store: Store,
    key: SessionKey,
    home: Folder,
    selection: Selection,
    *,
    limits: ArchiveLimits,
    before: Archive | None,
    progress: Progress = None,
) -> SaveResult:
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
    require_blobs(store)
    present = set(await store.blob_names(key.tenant))
    known = await _named_by(store, key, before, limits) & present
    taking = _TreeSave(store, key.tenant, present, known)
    scanned = scan(home, selection, limits)
    async with batches(home.path, scanned, weight, BATCH_BYTES) as given:
        async for batch in given:
            await taking.add(batch)
            if progress is not None:
                progress(ArchiveProgress(taking.result.files, taking.result.bytes))
    pages = await hop(home.path, _named_pages, taking.result.entries)
    await put(store, key.tenant, {name: page for name, page in pages.items() if name not in known})
    taking.result.pages = tuple(pages)
    return taking.result


def _named_pages(entries: list[Entry]) -> dict[str, bytes]:
    return {name_of(page): page for page in pages_of(entries)}


def weight(item: Found) -> int:
    """Return what an item counts of a batch."""
    return len(item.data) + ITEM if isinstance(item, FileChunk) else ITEM


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
    except FormatError:
        return set()  # damaged: whatever is there is put again
    return names


@final
class _TreeSave:
    def __init__(self, store: Store, tenant: str, present: set[str], known: set[str]) -> None:
        self._store = store
        self._tenant = tenant
        self._present = present
        self._known = known
        self.result = SaveResult()

    async def add(self, batch: list[Found]) -> None:
        new: dict[str, bytes] = {}
        for item in batch:
            match item:
                case FileChunk(name, data):
                    if name not in self._known:
                        new[name] = data
                case ScannedEntry(entry, changing):
                    self._count(entry, changing=changing)
                case ArchiveSkipped():
                    if len(self.result.skipped) < SHOWN:
                        self.result.skipped.append(item)
        await put(self._store, self._tenant, new)
        fresh = new.keys() - self._present
        self.result.stored_bytes += sum(len(new[name]) for name in fresh)
        self._present |= fresh
        self._known |= new.keys()

    def _count(self, entry: Entry, *, changing: bool) -> None:
        self.result.entries.append(entry)
        if isinstance(entry, FileEntry):
            self.result.files += 1
            self.result.bytes += entry.size
        if changing:
            self.result.changing.append(entry.path)
