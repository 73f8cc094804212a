"""Bringing an archive back: its files beside the home first, then in its place at once.

From the store's blobs or from a file, it is the same road: a manifest that is judged before a
byte is written, a stage whose files are checked as they are written, one commit.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import Folder
from perdure._lib.tasks import each
from perdure.archive.atomic_swap import StagingTree, commit, recover, require_room
from perdure.archive.blobs import BATCH_BYTES, batches, fetched, hop
from perdure.archive.limits import CHUNK_BYTES, ArchiveLimits, Selection
from perdure.archive.save import ArchiveProgress, Progress, ScannedEntry, scan, weight
from perdure.archive.tar import Content
from perdure.errors import NotStorableError
from perdure.records.archives import Archive, Entry, FileEntry, FolderEntry, blobs_of
from perdure.records.keys import SessionKey
from perdure.store import Store

MOST_CHUNKS: Final = BATCH_BYTES // CHUNK_BYTES
AT_ONCE: Final = 16
"""Threads that sync files, and files in one hop of each."""
MOST_STEPS: Final = 256
"""Folders and small files in one hop."""


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
        """Number of paths."""
        return sum(isinstance(entry, FileEntry) for entry in self.entries)


async def is_same(home: Folder, plan: ExtractPlan, limits: ArchiveLimits) -> bool:
    """Say whether a home has just what a manifest lists; times may differ."""
    wanted = await hop(home.path, _contents, plan)
    at = 0
    scanned = scan(home, plan.selection, limits)
    try:
        async with batches(home.path, scanned, weight, BATCH_BYTES) as given:
            async for batch in given:
                for item in batch:
                    if not isinstance(item, ScannedEntry) or not _counts(plan, item.entry):
                        continue
                    if at == len(wanted) or wanted[at] != _content(item.entry):
                        return False
                    at += 1
    except NotStorableError:
        return False  # it has what no archive can have
    return at == len(wanted)


def _contents(plan: ExtractPlan) -> list[tuple[str, int, str]]:
    return [_content(entry) for entry in plan.entries if _counts(plan, entry)]


def _counts(plan: ExtractPlan, entry: Entry) -> bool:
    return plan.selection.fate(entry.path) == "taken"


def _content(entry: Entry) -> tuple[str, int, str]:
    if isinstance(entry, FolderEntry):
        return entry.path, entry.mode, ""
    return entry.path, entry.mode, entry.sha256


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
    await hop(home.path, require_room, home, plan.bytes)
    count = _Count(plan, progress)
    async with _beside(home, control, description) as stage:
        for steps in _hops(plan.entries):
            names = [name for step in steps for name in step.names]
            blobs = await fetched(store, key.blobs, names, description)
            await hop(home.path, _write, stage, steps, blobs)
            ended = sum(step.last for step in steps if isinstance(step.entry, FileEntry))
            count.add(ended, sum(len(blobs[name]) for name in names))
        return await _committed(home, control, stage, plan)


class _Step(msgspec.Struct, frozen=True):
    """A folder, or some chunks of a file."""

    entry: Entry
    names: tuple[str, ...]
    first: bool
    last: bool


def _hops(entries: tuple[Entry, ...]) -> Iterator[list[_Step]]:
    """Give what is fetched and written at a time."""
    steps: list[_Step] = []
    remaining = MOST_CHUNKS
    for entry in entries:
        names = blobs_of(entry)
        at = 0
        while at < len(names) or not at:
            if not remaining or len(steps) == MOST_STEPS:
                yield steps
                steps, remaining = [], MOST_CHUNKS
            some = names[at : at + remaining]
            end = at + len(some)
            steps.append(_Step(entry, some, first=not at, last=end == len(names)))
            remaining -= len(some)
            at = end
            if not names:
                break
    if steps:
        yield steps


def _write(stage: StagingTree, steps: list[_Step], blobs: dict[str, bytes]) -> None:
    for step in steps:
        if isinstance(step.entry, FolderEntry):
            stage.folder(step.entry)
            continue
        if step.first:
            stage.begin(step.entry)
        for name in step.names:
            stage.write(blobs[name])
        if step.last:
            stage.end()


def _weight(written: tuple[int, int]) -> int:
    return written[1] + 1024


@final
class _Count:
    """Periodic progress reports."""

    def __init__(self, plan: ExtractPlan, progress: Progress) -> None:
        self._totals = (plan.files, plan.bytes)
        self._progress = progress
        self._files = self._bytes = 0

    def add(self, files: int, size: int) -> None:
        self._files += files
        self._bytes += size
        if self._progress is not None:
            self._progress(ArchiveProgress(self._files, self._bytes, *self._totals))


@asynccontextmanager
async def _beside(
    home: Folder, control: Folder, description: str
) -> AsyncGenerator[StagingTree, None]:
    """Give a stage, which is removed in the end unless it was committed."""
    stage = await hop(home.path, StagingTree, control, description)
    try:
        yield stage
    finally:
        with anyio.CancelScope(shield=True), suppress(OSError):  # what is left goes next time
            await anyio.to_thread.run_sync(stage.close)
            await anyio.to_thread.run_sync(recover, home, control)


async def _synced(home: Folder, stage: StagingTree) -> None:
    """Make the files of a stage durable, some at the same time."""
    paths = stage.unsynced()
    parts = [paths[first : first + AT_ONCE] for first in range(0, len(paths), AT_ONCE)]
    await each(parts, partial(hop, home.path, stage.sync), at_once=AT_ONCE)


async def _committed(
    home: Folder, control: Folder, stage: StagingTree, plan: ExtractPlan
) -> list[str]:
    await _synced(home, stage)
    await hop(home.path, stage.finish)
    replaced: list[str] = []
    with anyio.CancelScope(shield=True):  # begun, it is finished
        replaced += await hop(home.path, commit, home, control, stage.name, plan.selection)
    return replaced


async def verify(store: Store, key: SessionKey, plan: ExtractPlan, description: str) -> None:
    """Read every blob of a manifest.

    Raises:
        CorruptRecordError: One is lost or damaged.

    """
    for steps in _hops(plan.entries):
        await fetched(
            store, key.blobs, [name for step in steps for name in step.names], description
        )


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
    content = await hop(str(path), Content, path, limits)
    try:
        plan = ExtractPlan(*await hop(str(path), content.manifest))
        await hop(home.path, check, plan)
        await hop(home.path, require_room, home, plan.bytes)
        count = _Count(plan, progress)
        async with _beside(home, control, str(path)) as stage:
            written = content.into(stage, plan.entries)
            async with batches(home.path, written, _weight, BATCH_BYTES) as given:
                async for batch in given:
                    count.add(sum(files for files, _ in batch), sum(size for _, size in batch))
            return await _committed(home, control, stage, plan)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(content.close)
