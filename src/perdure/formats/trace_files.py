"""Raw traces and long-term memory as files: written from a log, and read line by line."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import os
import re
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import Folder, NoFileError, new_file, read_line
from perdure.errors import CorruptRecordError, FormatError
from perdure.formats.json_folder import pretty
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
# A segment counts when the manifest calls it complete. Other programs call one pending while they
# move traces to it, which still lie among the active ones until it is complete. Pure.


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


def segment_of(index: int, item: EpisodicItem) -> TraceSegment:
    """Return the segment of what a compaction took; nothing is in it yet."""
    key = hashlib.sha256(item.id.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    at = datetime.datetime.fromtimestamp(item.ts, datetime.UTC)
    stamp = f"{at:%Y%m%dT%H%M%S}{at.microsecond // 1000:03d}Z"
    return TraceSegment(
        index=index,
        file_name=f"{index:06d}_{stamp}_{key}.jsonl",
        boundary_key=f"{_BOUNDARY}:{key}",
        archived_at=item.ts,
    )


def is_segment_name(name: str) -> bool:
    """Say whether a name that a manifest gives stays within the archive.

    >>> is_segment_name("000001_a1b2c3d4.jsonl"), is_segment_name("../session.json")
    (True, False)
    """
    return _NAME.match(name) is not None


# Raw traces and long-term memory into files, as they are read from a log: nothing is kept
#
# Into a folder that has none of them yet. What a compaction took goes into the archive, whose
# manifest comes last; without it, a reader takes the segments that are there, and says so.


TRACES: Final = "raw_traces.jsonl"
COMPACTED_MANIFEST: Final = "compacted_memory_manifest.json"

_COMPACTED: Final = msgspec.json.encode({"schema_version": 3, "last_reset_ts": None}) + b"\n"


async def write_memories(
    folder: Path,
    turns: AsyncIterable[RawTurn],
    *,
    episodic: bytes,
    semantic: bytes,
    snapshot: bytes,
    upto: int,
    types: Types = NO_TYPES,
) -> list[str]:
    """Write the files; return their names.

    Args:
        folder: Where; it is there, and has none of these files.
        turns: What was said, oldest first.
        episodic: The document of that memory: a line an item.
        semantic: The other one.
        snapshot: The working context; its watermark is the last record that is written.
        upto: The last record that counts.
        types: The application's own.

    Raises:
        ConfigError: A file of these names is there.
        CorruptRecordError: A message or an item is damaged.

    """
    items = items_of(episodic.splitlines(), EpisodicItem)
    newest = {item.as_of_seq: item for item in items if item.as_of_seq > 0}
    async with contextlib.aclosing(_lines(turns, upto, types)) as lines:
        names = await _write_traces(folder, lines, [newest[seq] for seq in sorted(newest)])
    documents = {EPISODIC: episodic, SEMANTIC: semantic}
    if any(documents.values()):
        documents[COMPACTED_MANIFEST] = _COMPACTED
    documents[SNAPSHOT] = snapshot
    for name, data in documents.items():
        if data:
            async with new_file(folder / name) as file:
                await file.take(data)
            names.append(name)
    return names


async def _lines(
    turns: AsyncIterable[RawTurn], upto: int, types: Types
) -> AsyncGenerator[TraceLine, None]:
    async for turn in turns:
        messages = [decode_read(payload, types) for payload in turn.messages]
        for line in trace_lines(turn.id, zip(turn.seqs, messages, strict=True)):
            if line.seq <= upto:
                yield line


async def _write_traces(
    folder: Path, lines: AsyncGenerator[TraceLine, None], compactions: Sequence[EpisodicItem]
) -> list[str]:
    """Write the lines in their order: a segment for each compaction, and the rest as active."""
    names: list[str] = []
    segments: list[TraceSegment] = []
    if compactions:
        await anyio.to_thread.run_sync(_make_archive, folder)
    line = await anext(lines, None)
    for index, item in enumerate(compactions, 1):
        if line is None or line.seq > item.as_of_seq:
            continue
        segment = segment_of(index, item)
        first = last = line
        count = 0
        async with new_file(folder / ARCHIVE / segment.file_name) as file:
            while line is not None and line.seq <= item.as_of_seq:
                await file.take(line.data)
                last, count = line, count + 1
                line = await anext(lines, None)
        segments.append(
            msgspec.structs.replace(
                segment,
                first_trace_id=first.id,
                last_trace_id=last.id,
                first_ts=first.ts,
                last_ts=last.ts,
                record_count=count,
                status="complete",
            )
        )
        names.append(f"{ARCHIVE}/{segment.file_name}")
    async with new_file(folder / TRACES) as file:
        while line is not None:
            await file.take(line.data)
            line = await anext(lines, None)
    if compactions:
        newest = max((segment.index for segment in segments), default=0)
        manifest = ArchiveManifest(next_segment_index=newest + 1, segments=tuple(segments))
        async with new_file(folder / ARCHIVE_MANIFEST) as file:
            await file.take(pretty(msgspec.json.encode(manifest)))
        names.append(ARCHIVE_MANIFEST)
    return [*names, TRACES]


def _make_archive(path: Path) -> None:
    with Folder.root(str(path)) as folder:
        folder.make(ARCHIVE).close()


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
        with contextlib.suppress(FileNotFoundError), self._folder.enter(ARCHIVE) as archive:
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
        try:
            fd = folder.open(name)
        except FileNotFoundError:
            return
        except NoFileError:
            self._tell(shown or name, "it is no regular file")
            return
        bad: list[str] = []
        with os.fdopen(fd, "rb") as file:
            for number in itertools.count(1):
                line = read_line(file, LINE)
                if line is None:
                    bad.append(f"line {number}: it has more than {LINE} bytes")
                if not line:
                    break
                try:
                    if line.strip():
                        yield decode(as_utf8(line) if number == 1 else line, kind)
                except FormatError as error:
                    bad.append(f"line {number}: {error}")
        if bad:
            self._tell(shown or name, f"{len(bad)} lines cannot be read, the first is {bad[0]}")


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
