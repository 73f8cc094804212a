"""Raw traces and long-term memory into files, as they are read from a log: nothing is kept.

Into a folder that has none of them yet. What a compaction took goes into the archive: its
manifest first calls all segments pending, and complete when each of them is durable.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from pathlib import Path
from typing import Final, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import Folder
from perdure._lib.new_file import NewFile
from perdure.codec.messages import decode_message
from perdure.codec.values import NO_TYPES, Types
from perdure.interchange.trace_archive import (
    ARCHIVE,
    ARCHIVE_MANIFEST,
    Planned,
    Segment,
    filled,
    manifest_of,
    planned_segments,
)
from perdure.interchange.traces import TraceLine, trace_lines
from perdure.memory.context import SNAPSHOT
from perdure.memory.documents import EPISODIC, SEMANTIC
from perdure.memory.items import EpisodicItem, items_of
from perdure.memory.traces import RawTurn

__all__ = ["COMPACTED_MANIFEST", "TRACES", "Memories", "write_memories"]

TRACES: Final = "raw_traces.jsonl"
COMPACTED_MANIFEST: Final = "compacted_memory_manifest.json"

_COMPACTED: Final = msgspec.json.encode({"schema_version": 3, "last_reset_ts": None}) + b"\n"
PART: Final = 1024 * 1024
"""Bytes that go to the disk at a time."""


class Memories(msgspec.Struct, frozen=True, kw_only=True):
    """What a session remembers, beside what was said."""

    episodic: bytes = b""
    """Its document: a line an item."""
    semantic: bytes = b""
    snapshot: bytes = b""
    """The working context; its watermark is the last record that is written."""
    upto: int
    """The last record that counts."""


async def write_memories(
    folder: Path, turns: AsyncIterable[RawTurn], memories: Memories, *, types: Types = NO_TYPES
) -> list[str]:
    """Write the files; return their names.

    Args:
        folder: Where; it is there, and has none of these files.
        turns: What was said, oldest first.
        memories: What is remembered of it.
        types: The application's own.

    Raises:
        ConfigError: A file of these names is there.
        CorruptRecordError: A message or an item is damaged.

    """
    items = items_of(memories.episodic.splitlines(), EpisodicItem)
    lines = _lines(turns, memories.upto, types)
    async with aclosing(lines):
        names = await _Archiving(folder, planned_segments(items)).write(lines)
    names += await _write_documents(folder, memories)
    return names


async def _lines(
    turns: AsyncIterable[RawTurn], upto: int, types: Types
) -> AsyncGenerator[TraceLine, None]:
    async for turn in turns:
        messages = [decode_message(payload, types) for payload in turn.messages]
        for line in trace_lines(turn.id, zip(turn.seqs, messages, strict=True)):
            if line.seq <= upto:
                yield line


async def _write_documents(folder: Path, memories: Memories) -> list[str]:
    documents = {EPISODIC: memories.episodic, SEMANTIC: memories.semantic}
    if any(documents.values()):
        documents[COMPACTED_MANIFEST] = _COMPACTED
    documents[SNAPSHOT] = memories.snapshot
    written = [name for name, data in documents.items() if data]
    for name in written:
        async with _Filling(folder / name) as file:
            await file.add(documents[name])
    return written


@final
class _Archiving:
    """Writes the lines in their order: segment by segment, and the rest as active ones."""

    def __init__(self, folder: Path, planned: list[Planned]) -> None:
        self._folder = folder
        self._planned = planned
        self._names: list[str] = []
        self._done: list[Segment] = []
        self._ahead: TraceLine | None = None

    async def write(self, lines: AsyncGenerator[TraceLine, None]) -> list[str]:
        if self._planned:
            await self._say([one.segment for one in self._planned])
        self._ahead = await anext(lines, None)
        for planned in self._planned:
            if self._ahead is not None and self._ahead.seq <= planned.upto:
                await self._segment(planned, lines)
        async with _Filling(self._folder / TRACES) as file:
            await self._run(file, lines, None)
        if self._planned:
            await self._say(self._done)
            self._names.append(ARCHIVE_MANIFEST)
        return [*self._names, TRACES]

    async def _segment(self, planned: Planned, lines: AsyncGenerator[TraceLine, None]) -> None:
        first, name = self._ahead, planned.segment.file_name
        async with _Filling(self._folder / ARCHIVE / name) as file:
            last, count = await self._run(file, lines, planned.upto)
        assert first is not None
        assert last is not None
        self._done.append(filled(planned.segment, first, last, count))
        self._names.append(f"{ARCHIVE}/{name}")

    async def _run(
        self, file: _Filling, lines: AsyncGenerator[TraceLine, None], upto: int | None
    ) -> tuple[TraceLine | None, int]:
        """Write lines up to a record; return the last one, and how many they are."""
        last, count = None, 0
        while (line := self._ahead) is not None and (upto is None or line.seq <= upto):
            await file.add(line.data)
            last, count = line, count + 1
            self._ahead = await anext(lines, None)
        return last, count

    async def _say(self, segments: list[Segment]) -> None:
        await anyio.to_thread.run_sync(_publish_manifest, self._folder, manifest_of(segments))


def _publish_manifest(path: Path, data: bytes) -> None:
    with Folder.root(str(path)) as folder:
        folder.make(ARCHIVE).close()
        folder.replace(ARCHIVE_MANIFEST, data)
        folder.sync()


@final
class _Filling:
    """A new file that is published when its block ends well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: NewFile | None = None

    async def __aenter__(self) -> _Filling:
        self._file = await anyio.to_thread.run_sync(NewFile, self._path)
        return self

    async def add(self, data: bytes) -> None:
        """Take in a line, or all of it."""
        assert self._file is not None
        if self._file.add(data) >= PART:
            await anyio.to_thread.run_sync(self._file.write)

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        file = self._file
        assert file is not None
        try:
            if kind is None:
                await anyio.to_thread.run_sync(file.publish)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(file.close)
