"""Raw traces and long-term memory out of files, perdure's or others'. Blocking, line by line.

What cannot be read is left out and said; everything else comes in. Files of which one is
missing are read without it.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar, final

from perdure._lib.files import Folder
from perdure.codec.json import decode
from perdure.codec.messages import decode_message
from perdure.errors import CorruptRecordError, FormatError
from perdure.interchange.memory_writing import TRACES
from perdure.interchange.reading import Finding
from perdure.interchange.remembering import Remembered
from perdure.interchange.trace_archive import (
    ARCHIVE,
    ARCHIVE_MANIFEST,
    ArchiveManifest,
    is_segment_name,
)
from perdure.interchange.traces import Gathering, SavedTrace, Spoken
from perdure.memory.context import SNAPSHOT, Snapshot, WorkingContext
from perdure.memory.documents import EPISODIC, SEMANTIC
from perdure.memory.items import EpisodicItem, SemanticItem

__all__ = ["has_memories", "read_memories"]

T = TypeVar("T")

_READ: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # a pipe keeps nobody waiting
LINE: Final = 64 * 1024 * 1024
"""Bytes that a line may have."""
_OLD_ARCHIVE: Final = "raw_traces_archive.jsonl"
"""The archive as one file, as it was before there were segments."""
_ANY: Final = (TRACES, ARCHIVE_MANIFEST, _OLD_ARCHIVE, EPISODIC, SEMANTIC, SNAPSHOT)


def has_memories(path: Path) -> bool:
    """Say whether a folder has such files."""
    return any((path / name).is_file() for name in _ANY)


def read_memories(path: Path) -> Remembered:
    """Read what is there; nothing of it is changed.

    Raises:
        OSError: The folder cannot be read.

    """
    with Folder.root(str(path)) as folder:
        return _Reading(folder).all()


@final
class _Reading:
    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._findings: list[Finding] = []
        self._gathering = Gathering()

    def all(self) -> Remembered:
        archived = tuple(self._archived())
        active = (*self._spoken(self._folder, TRACES), *self._gathering.rest())
        context, agent_id = self._context()
        return Remembered(
            archived=archived,
            active=active,
            episodic=self._items(EPISODIC, EpisodicItem),
            semantic=self._items(SEMANTIC, SemanticItem),
            context=context,
            agent_id=agent_id,
            findings=tuple(self._findings),
        )

    def _tell(self, name: str, detail: str) -> None:
        self._findings.append(Finding("left out", os.path.join(self._folder.path, name), detail))  # noqa: PTH118

    # what was said

    def _archived(self) -> Iterator[Spoken]:
        yield from self._spoken(self._folder, _OLD_ARCHIVE)
        try:
            archive = self._folder.enter(ARCHIVE)
        except FileNotFoundError:
            archive = None
        if archive is not None:
            with archive:
                for name in self._segments(archive):
                    yield from self._spoken(archive, name, f"{ARCHIVE}/{name}")
        yield from self._gathering.rest()

    def _segments(self, archive: Folder) -> list[str]:
        """Return the names of the segments that count; without a manifest, all of them."""
        data = self._folder.read(ARCHIVE_MANIFEST)
        try:
            manifest = decode(data or b"", ArchiveManifest)
        except FormatError as error:
            self._tell(ARCHIVE_MANIFEST, f"it cannot be read ({error}): all segments were taken")
            return sorted(name for name in archive.names() if name.endswith(".jsonl"))
        names = [one.file_name for one in manifest.complete()]
        for name in names:
            if not is_segment_name(name) or not archive.has(name):
                self._tell(f"{ARCHIVE}/{name}", "the manifest names it, and it is not there")
        return [name for name in names if is_segment_name(name) and archive.has(name)]

    def _spoken(self, folder: Folder, name: str, shown: str = "") -> Iterator[Spoken]:
        for trace in self._lines(folder, name, SavedTrace, shown):
            yield from self._gathering.feed(trace)

    # what is remembered

    def _items(self, name: str, kind: type[T]) -> tuple[T, ...]:
        found = {getattr(item, "id", ""): item for item in self._lines(self._folder, name, kind)}
        return tuple(found.values())

    def _context(self) -> tuple[WorkingContext | None, str]:
        data = self._folder.read(SNAPSHOT)
        if data is None:
            return None, ""
        try:
            snapshot = decode(data, Snapshot)
            for raw in snapshot.messages:
                decode_message(bytes(raw))
            return _context_of(snapshot), snapshot.agent_id
        except (FormatError, ValueError) as error:
            self._tell(SNAPSHOT, f"it cannot be read ({error}): the context was made anew")
            return None, ""

    # lines

    def _lines(self, folder: Folder, name: str, kind: type[T], shown: str = "") -> Iterator[T]:
        """Give what a file's lines hold; those that are damaged are counted, and passed over."""
        bad: list[tuple[int, str]] = []
        for number, line in _numbered(folder, name, lambda *one: bad.append(one)):
            try:
                yield decode(line, kind)
            except FormatError as error:
                bad.append((number, str(error)))
        if bad:
            number, why = bad[0]
            first = f"{len(bad)} lines cannot be read, the first is line {number}: {why}"
            self._tell(shown or name, first if number else why)


def _numbered(
    folder: Folder, name: str, tell: Callable[[int, str], object]
) -> Iterator[tuple[int, bytes]]:
    """Give a file's lines with their numbers; nothing for a file that is not there."""
    try:
        fd = folder.open(name, _READ)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        tell(0, "it is no regular file")
        return
    with os.fdopen(fd, "rb") as file:
        for number in itertools.count(1):
            line = file.readline(LINE)
            if not line:
                return
            if len(line) == LINE:
                tell(number, f"it has more than {LINE} bytes")
                return
            if line.strip():
                yield number, line


def _context_of(snapshot: Snapshot) -> WorkingContext:
    """Return the context that a snapshot of any release holds."""
    whole = 2**62
    try:
        return WorkingContext.of_snapshot(snapshot, whole)
    except (CorruptRecordError, ValueError):  # its own bookkeeping does not add up
        plain = Snapshot(
            schema_version=snapshot.schema_version,
            agent_id=snapshot.agent_id,
            epoch_id=snapshot.epoch_id,
            last_compaction_ts=snapshot.last_compaction_ts,
            system_prompt_sha256=snapshot.system_prompt_sha256,
            messages=snapshot.messages,
        )
        return WorkingContext.of_snapshot(plain, whole)
