"""Bringing an archive back: its files beside the home first, then in its place at once.

From the store's blobs or from a file, it is the same road: a manifest that is judged before a
byte is written, a stage whose files are checked as they are written, one commit.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import Folder
from perdure._lib.tasks import each
from perdure.archive.atomic_swap import StagingTree, commit, recover, require_room
from perdure.archive.blobs import BATCH_BYTES, ITEM_BYTES, batches, fetched, hop, next_batch
from perdure.archive.limits import CHUNK_BYTES, ArchiveLimits, Selection
from perdure.archive.save import ArchiveProgress, Progress, ScannedEntry, scan, weight
from perdure.archive.tar import Content
from perdure.errors import NotStorableError
from perdure.records.archives import Archive, Entry, FileEntry, blobs_of
from perdure.records.keys import SessionKey
from perdure.store import Store

AT_ONCE: Final = 16
"""Threads that sync files, and files in one hop of each."""


class ArchiveRestored(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a restore."""

    archive: Archive | None
    """None: there was none to restore."""
    changed: bool
    """False where the home was as the archive has it."""
    replaced: tuple[str, ...] = ()
    """Paths in the home that were written or removed."""
    kept: str = ""
    """Folder of the replaced files until the next save or restore; empty for none."""
    why: str = ""
    """Reason, in words, why nothing was done where something could have been."""


class ExtractPlan(msgspec.Struct, frozen=True):
    """A whole manifest that was judged."""

    entries: tuple[Entry, ...]
    selection: Selection

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(entry.size for entry in self.entries if isinstance(entry, FileEntry))

    @property
    def files(self) -> int:
        """Number of files."""
        return sum(isinstance(entry, FileEntry) for entry in self.entries)


async def is_same(home: Folder, plan: ExtractPlan, limits: ArchiveLimits) -> bool:
    """Say whether a home has just what a manifest lists; times may differ."""
    wanted = await hop(home.path, _contents, plan.entries, plan.selection)
    at = 0
    scanned = scan(home, plan.selection, limits)
    try:
        async with aclosing(batches(home.path, scanned, weight, BATCH_BYTES)) as given:
            async for batch in given:
                entries = [item.entry for item in batch if isinstance(item, ScannedEntry)]
                contents = _contents(entries, plan.selection)
                if wanted[at : at + len(contents)] != contents:
                    return False
                at += len(contents)
    except NotStorableError:
        return False  # it has what no archive can have
    return at == len(wanted)


def _contents(entries: Sequence[Entry], selection: Selection) -> list[tuple[str, int, str]]:
    return [
        (entry.path, entry.mode, entry.sha256 if isinstance(entry, FileEntry) else "")
        for entry in entries
        if selection.fate(entry.path) == "taken"
    ]


async def put_back(
    store: Store,
    key: SessionKey,
    home: Folder,
    control: Folder,
    plan: ExtractPlan,
    *,
    description: str,
    progress: Progress = None,
) -> list[str]:
    """Restore a manifest out of the store's blobs; return what was replaced.

    Raises:
        CorruptRecordError: A blob is lost or damaged.
        StoreUnavailableError: The disk has no room, or refuses.

    """

    async def write(stage: StagingTree) -> AsyncGenerator[None, None]:
        async with aclosing(_fetched(store, key, plan, description)) as parts:
            async for pieces, blobs in parts:
                await hop(home.path, _write, stage, pieces, blobs)
                yield

    return await _replace(home, control, plan, write, description=description, progress=progress)


async def _replace(
    home: Folder,
    control: Folder,
    plan: ExtractPlan,
    write: Callable[[StagingTree], AsyncGenerator[object, None]],
    *,
    description: str,
    progress: Progress,
) -> list[str]:
    """Write a stage beside a home, by steps, and put it in its place; return what was replaced."""
    totals = (plan.files, plan.bytes)
    await hop(home.path, require_room, home, plan.bytes)
    stage = await hop(home.path, StagingTree, control, description)
    try:
        async with aclosing(write(stage)) as steps:
            async for _ in steps:
                if progress is not None:
                    progress(ArchiveProgress(len(stage.files), stage.bytes, *totals))
        parts = [stage.files[at : at + AT_ONCE] for at in range(0, len(stage.files), AT_ONCE)]
        await each(parts, partial(hop, home.path, stage.sync), at_once=AT_ONCE)
        await hop(home.path, stage.finish)
        replaced: list[str] = []
        with anyio.CancelScope(shield=True):  # begun, it is finished
            replaced += await hop(home.path, commit, home, control, stage.name, plan.selection)
        return replaced
    finally:
        with anyio.CancelScope(shield=True), suppress(OSError):  # what is left goes next time
            await anyio.to_thread.run_sync(stage.close)
            await anyio.to_thread.run_sync(recover, home, control)


def _write(stage: StagingTree, pieces: list[_Piece], blobs: dict[str, bytes]) -> None:
    for entry, name in pieces:
        stage.add(entry, blobs[name] if name else b"")


_Piece = tuple[Entry, str]
"""An entry, and the name of its next chunk; empty for a folder, or a file without bytes."""


async def _fetched(
    store: Store, key: SessionKey, plan: ExtractPlan, description: str
) -> AsyncGenerator[tuple[list[_Piece], dict[str, bytes]], None]:
    """Give all pieces of a manifest in their order, some at a time, with their chunks."""
    remaining = ((entry, name) for entry in plan.entries for name in blobs_of(entry) or ("",))
    while pieces := next_batch(remaining, _most_bytes, BATCH_BYTES):
        names = [name for _, name in pieces if name]
        yield pieces, await fetched(store, key.blobs, names, description)


def _most_bytes(piece: _Piece) -> int:
    entry, _ = piece
    return ITEM_BYTES + (min(entry.size, CHUNK_BYTES) if isinstance(entry, FileEntry) else 0)


async def verify(store: Store, key: SessionKey, plan: ExtractPlan, description: str) -> None:
    """Read every blob of a manifest.

    Raises:
        CorruptRecordError: One is lost or damaged.

    """
    async with aclosing(_fetched(store, key, plan, description)) as parts:
        async for _ in parts:
            pass


async def put_back_from(
    path: Path,
    home: Folder,
    control: Folder,
    limits: ArchiveLimits,
    *,
    check: Callable[[ExtractPlan], None],
    progress: Progress = None,
) -> list[str]:
    """Restore a file that was exported; return what was replaced.

    ``check`` may refuse what its manifest would replace.

    Raises:
        CorruptRecordError: It is no such file, it is damaged, or has what no archive has.
        TooLargeError: It is over a limit.

    """
    file = await hop(str(path), path.open, "rb")
    try:
        content = await hop(str(path), Content, file, str(path), limits)
        plan = ExtractPlan(*await hop(str(path), content.manifest))
        await hop(home.path, check, plan)

        def write(stage: StagingTree) -> AsyncGenerator[list[int], None]:
            sizes = content.into(stage, plan.entries)
            return batches(home.path, sizes, lambda size: ITEM_BYTES + size, BATCH_BYTES)

        return await _replace(home, control, plan, write, description=str(path), progress=progress)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(file.close)
