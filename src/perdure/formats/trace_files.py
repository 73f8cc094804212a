"""Raw traces and long-term memory as files: written from a log, and read line by line."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import os
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final, Literal, TypeVar, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import Folder, NewFile, NoFileError, new_file, read_line
from perdure.errors import CorruptRecordError, FormatError
from perdure.formats.migrations import Finding
from perdure.formats.records import StateMemories
from perdure.formats.state import SavedTrace, TraceLine, TraceMessage, TraceMessages, trace_lines
from perdure.memory.compaction import EpisodicItem, SemanticItem, items_of
from perdure.memory.context import SNAPSHOT, Snapshot, WorkingContext
from perdure.memory.documents import EPISODIC, SEMANTIC
from perdure.memory.traces import RawTurn
from perdure.records.json import as_utf8, decode
from perdure.records.media import decode_read
from perdure.records.messages import decode_message
from perdure.records.references import spelled
from perdure.records.values import NO_TYPES, Types

# Raw traces as they lie in files, one a line, and the messages that such lines amount to
#
# A message may be several traces. What is read need not have been written here: others number
# traces by turn, write an answer behind the calls that came with it, and have kinds that say how a
# run went, which are no messages. Pure.


# The archive of raw traces: what a compaction took is a segment, which never changes again
#
# A segment counts when the manifest calls it complete. One that is pending was being written when
# somebody was killed: its traces still lie among the active ones, or in a later segment. Pure.


ARCHIVE: Final = "raw_traces_archive"
ARCHIVE_MANIFEST: Final = "raw_traces_archive_manifest.json"

_BOUNDARY: Final = "native_compaction"
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}\Z")


class TraceSegment(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of the manifest for a segment; the field names are the format."""

    index: int
    file_name: str
    boundary_type: str = _BOUNDARY
    boundary_key: str = ""
    boundary_trace_id: str | None = None
    runtime_kind: str = "PERDURE"
    source_event: str | None = _BOUNDARY
    archived_at: float | str | None = None
    """Seconds since 1970."""
    first_trace_id: str | None = None
    last_trace_id: str | None = None
    first_ts: float | None = None
    last_ts: float | None = None
    record_count: int = 0
    status: Literal["pending", "complete"] = "pending"


class ArchiveManifest(msgspec.Struct, frozen=True, kw_only=True):
    """``raw_traces_archive_manifest.json``."""

    schema_version: int = 1
    next_segment_index: int = 1
    segments: tuple[TraceSegment, ...] = ()

    def complete(self) -> list[TraceSegment]:
        """Return the segments that count, in order."""
        segments = [segment for segment in self.segments if segment.status == "complete"]
        return sorted(segments, key=lambda segment: segment.index)


class PlannedSegment(msgspec.Struct, frozen=True):
    """A segment that is to be written."""

    upto: int
    """The last record whose traces belong to it."""
    segment: TraceSegment


def planned_segments(items: Iterable[EpisodicItem]) -> list[PlannedSegment]:
    """Return a segment for each compaction, oldest first; their last records go up."""
    newest = {item.as_of_seq: item for item in items if item.as_of_seq > 0}
    return [
        PlannedSegment(upto, _pending(index, newest[upto]))
        for index, upto in enumerate(sorted(newest), 1)
    ]


def _pending(index: int, item: EpisodicItem) -> TraceSegment:
    key = hashlib.sha256(item.id.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    at = datetime.datetime.fromtimestamp(item.ts, datetime.UTC)
    stamp = f"{at:%Y%m%dT%H%M%S}{at.microsecond // 1000:03d}Z"
    return TraceSegment(
        index=index,
        file_name=f"{index:06d}_{stamp}_{key}.jsonl",
        boundary_key=f"{_BOUNDARY}:{key}",
        archived_at=item.ts,
    )


def filled(segment: TraceSegment, first: TraceLine, last: TraceLine, count: int) -> TraceSegment:
    """Return a segment that is complete."""
    return msgspec.structs.replace(
        segment,
        first_trace_id=first.id,
        last_trace_id=last.id,
        first_ts=first.ts,
        last_ts=last.ts,
        record_count=count,
        status="complete",
    )


def manifest_of(segments: Sequence[TraceSegment]) -> bytes:
    """Return the manifest of some segments, as it is written."""
    newest = max((segment.index for segment in segments), default=0)
    manifest = ArchiveManifest(next_segment_index=newest + 1, segments=tuple(segments))
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def is_segment_name(name: str) -> bool:
    """Say whether a name that a manifest gives stays within the archive.

    >>> is_segment_name("000001_a1b2c3d4.jsonl"), is_segment_name("../session.json")
    (True, False)
    """
    return _NAME.match(name) is not None


# Raw traces and long-term memory into files, as they are read from a log: nothing is kept
#
# Into a folder that has none of them yet. What a compaction took goes into the archive: its
# manifest first calls all segments pending, and complete when each of them is durable.


TRACES: Final = "raw_traces.jsonl"
COMPACTED_MANIFEST: Final = "compacted_memory_manifest.json"

_COMPACTED: Final = msgspec.json.encode({"schema_version": 3, "last_reset_ts": None}) + b"\n"


class Memories(msgspec.Struct, frozen=True, kw_only=True):
    """Memories of a session, besides its messages."""

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
        messages = [decode_read(payload, types) for payload in turn.messages]
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
        async with new_file(folder / name) as file:
            await file.take(documents[name])
    return written


@final
class _Archiving:
    """Writes the lines in their order: segment by segment, and the rest as active ones."""

    def __init__(self, folder: Path, planned: list[PlannedSegment]) -> None:
        self._folder = folder
        self._planned = planned
        self._names: list[str] = []
        self._done: list[TraceSegment] = []
        self._ahead: TraceLine | None = None

    async def write(self, lines: AsyncGenerator[TraceLine, None]) -> list[str]:
        if self._planned:
            await self._say([trace.segment for trace in self._planned])
        self._ahead = await anext(lines, None)
        for planned in self._planned:
            if self._ahead is not None and self._ahead.seq <= planned.upto:
                await self._segment(planned, lines)
        async with new_file(self._folder / TRACES) as file:
            await self._run(file, lines, None)
        if self._planned:
            await self._say(self._done)
            self._names.append(ARCHIVE_MANIFEST)
        return [*self._names, TRACES]

    async def _segment(
        self, planned: PlannedSegment, lines: AsyncGenerator[TraceLine, None]
    ) -> None:
        first, name = self._ahead, planned.segment.file_name
        async with new_file(self._folder / ARCHIVE / name) as file:
            last, count = await self._run(file, lines, planned.upto)
        assert first is not None
        assert last is not None
        self._done.append(filled(planned.segment, first, last, count))
        self._names.append(f"{ARCHIVE}/{name}")

    async def _run(
        self, file: NewFile, lines: AsyncGenerator[TraceLine, None], upto: int | None
    ) -> tuple[TraceLine | None, int]:
        """Write lines up to a record; return the last one, and how many they are."""
        last, count = None, 0
        while (line := self._ahead) is not None and (upto is None or line.seq <= upto):
            await file.take(line.data)
            last, count = line, count + 1
            self._ahead = await anext(lines, None)
        return last, count

    async def _say(self, segments: list[TraceSegment]) -> None:
        await anyio.to_thread.run_sync(_publish_manifest, self._folder, manifest_of(segments))


def _publish_manifest(path: Path, data: bytes) -> None:
    with Folder.root(str(path)) as folder:
        folder.make(ARCHIVE).close()
        folder.replace(ARCHIVE_MANIFEST, data)
        folder.sync()


# Raw traces and long-term memory out of files, perdure's or others'. Blocking, line by line
#
# What cannot be read is left out and said; everything else comes in. Files of which one is missing
# are read without it.


T = TypeVar("T")

LINE: Final = 64 * 1024 * 1024
"""Bytes that a line may have."""
_OLD_ARCHIVE: Final = "raw_traces_archive.jsonl"
"""The archive as one file, as it was before there were segments."""
_ANY: Final = (TRACES, ARCHIVE_MANIFEST, _OLD_ARCHIVE, EPISODIC, SEMANTIC, SNAPSHOT)


def has_memories(path: Path) -> bool:
    """Say whether a folder has such files."""
    return any((path / name).is_file() for name in _ANY)


def read_memories(path: Path) -> StateMemories:
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
        self._gathering = TraceMessages()

    def all(self) -> StateMemories:
        archived = tuple(self._archived())
        active = (*self._messages_in(self._folder, TRACES), *self._gathering.rest())
        context, agent_id = self._context()
        return StateMemories(
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

    def _archived(self) -> Iterator[TraceMessage]:
        yield from self._messages_in(self._folder, _OLD_ARCHIVE)
        try:
            archive = self._folder.enter(ARCHIVE)
        except FileNotFoundError:
            archive = None
        if archive is not None:
            with archive:
                for name in self._segments(archive):
                    yield from self._messages_in(archive, name, f"{ARCHIVE}/{name}")
        yield from self._gathering.rest()

    def _segments(self, archive: Folder) -> list[str]:
        """Return the names of the segments that count; without a manifest, all of them."""
        data = self._folder.read(ARCHIVE_MANIFEST)
        try:
            manifest = decode(data or b"", ArchiveManifest)
        except FormatError as error:
            self._tell(ARCHIVE_MANIFEST, f"it cannot be read ({error}): all segments were taken")
            return sorted(name for name in archive.names() if name.endswith(".jsonl"))
        names = [item.file_name for item in manifest.complete()]
        for name in names:
            if not is_segment_name(name) or not archive.has(name):
                self._tell(f"{ARCHIVE}/{name}", "the manifest names it, and it is not there")
        return [name for name in names if is_segment_name(name) and archive.has(name)]

    def _messages_in(self, folder: Folder, name: str, shown: str = "") -> Iterator[TraceMessage]:
        for trace in self._lines(folder, name, SavedTrace, shown):
            yield from self._gathering.feed(trace)

    # what is remembered

    def _items(self, name: str, kind: type[T]) -> tuple[T, ...]:
        items = {getattr(item, "id", ""): item for item in self._lines(self._folder, name, kind)}
        return tuple(items.values())

    def _context(self) -> tuple[WorkingContext | None, str]:
        data = self._folder.read(SNAPSHOT)
        if data is None:
            return None, ""
        try:
            snapshot = decode(spelled(data), Snapshot)
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
        for number, line in _numbered(folder, name, lambda *item: bad.append(item)):
            try:
                yield decode(line, kind)
            except FormatError as error:
                bad.append((number, str(error)))
        if bad:
            number, reason = bad[0]
            first = f"{len(bad)} lines cannot be read, the first is line {number}: {reason}"
            self._tell(shown or name, first if number else reason)


def _numbered(
    folder: Folder, name: str, tell: Callable[[int, str], object]
) -> Iterator[tuple[int, bytes]]:
    """Give a file's lines with their numbers; nothing for a file that is not there."""
    try:
        fd = folder.open(name)
    except FileNotFoundError:
        return
    except NoFileError:
        tell(0, "it is no regular file")
        return
    with os.fdopen(fd, "rb") as file:
        for number in itertools.count(1):
            line = read_line(file, LINE)
            if line is None:
                tell(number, f"it has more than {LINE} bytes")
                return
            if not line:
                return
            if number == 1:
                try:
                    line = as_utf8(line)
                except CorruptRecordError as error:
                    tell(0, str(error))
                    return
            if line.strip():
                yield number, line


def _context_of(snapshot: Snapshot) -> WorkingContext:
    """Return the context that a snapshot of any release holds."""
    is_whole = 2**62
    try:
        return WorkingContext.of_snapshot(snapshot, is_whole)
    except (CorruptRecordError, ValueError):  # its own bookkeeping does not add up
        plain = Snapshot(
            schema_version=snapshot.schema_version,
            agent_id=snapshot.agent_id,
            epoch_id=snapshot.epoch_id,
            last_compaction_ts=snapshot.last_compaction_ts,
            system_prompt_sha256=snapshot.system_prompt_sha256,
            messages=snapshot.messages,
        )
        return WorkingContext.of_snapshot(plain, is_whole)
