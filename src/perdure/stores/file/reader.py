"""Planning how to read a session's log, without a lease.

A plan names the parts of the chain that hold what is asked for, each with the length that
counts. It is made between two looks at the epoch: if a takeover is under way, the newest
records may be missing, and it says so. What a plan names never changes afterwards, so
that its bytes can be read in peace, whoever writes meanwhile.

Blocking: one hop into a thread. Nothing is written.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque

import anyio.to_thread
import msgspec

from perdure._lib.files import Folder, read_part
from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records import frames
from perdure.records.frames import Position, Scanner
from perdure.records.keys import SessionKey
from perdure.records.records import Record
from perdure.stores.file import documents, segments
from perdure.stores.file.layout import LOG, released_name, session_path
from perdure.stores.file.leases import LeaseFile, newest_epoch, read_lease, require_key
from perdure.stores.file.owners import Owners
from perdure.stores.file.sealed import decoded
from perdure.stores.file.segments import DurablePosition, LogSegment

# Planning how to read a session's log, without a lease


SMALL = 1024 * 1024
"""A tip of this size is read once, for the plan and for its records."""


class SegmentSpan(msgspec.Struct, frozen=True):
    """A part of one segment that is in the log."""

    segment: LogSegment
    start: Position
    stop: Position
    records: tuple[Record, ...] | None = None
    """Its records, where the plan had to read them anyway."""


class ReadPlan(msgspec.Struct):
    """Where the records that are asked for lie, oldest first."""

    spans: tuple[SegmentSpan, ...] = ()
    head: int = 0
    epoch: int = 0
    """The newest one that has a record."""
    settled: bool = True


def plan(
    root: Folder,
    key: SessionKey,
    after: int,
    before: int | None,
    held: DurablePosition | None,
    owners: Owners,
) -> ReadPlan:
    """Look where the log is now; a plan that is not settled is worth another look.

    Args:
        root: The store's folder.
        key: Which session.
        after: Records up to this one are not asked for.
        before: Nor are those from this one on.
        held: How far the log lasts, if this store holds the session.
        owners: Who can tell whether a taker is alive.

    Raises:
        CorruptRecordError: The log is damaged before its tail.

    """
    try:
        folder = root.enter(*session_path(key))
    except FileNotFoundError:
        return ReadPlan()
    with folder:
        epoch = newest_epoch(folder)
        lease = read_lease(folder, epoch)
        if lease is not None:
            require_key(folder, key, lease)
            if lease.deleted:
                return ReadPlan()
        since = 1 if lease is None else lease.since
        if held is not None and held.epoch != epoch:
            held = None
        try:
            found = _plan(folder, key, since, after, held)
        except CorruptRecordError:
            if newest_epoch(folder) != epoch:
                return ReadPlan(settled=False)  # it was deleted under our eyes
            raise
        if before is not None:
            found.spans = tuple(span for span in found.spans if span.start.seq + 1 < before)
        found.settled = newest_epoch(folder) == epoch and _is_over(folder, found, lease, owners)
        return found


def _is_over(folder: Folder, found: ReadPlan, lease: LeaseFile | None, owners: Owners) -> bool:
    """Say whether no takeover is under way: the newest epoch has its record, or never will."""
    if lease is None or found.epoch == lease.epoch:
        return True
    if folder.stat(released_name(lease.epoch)) is not None:
        return True
    return owners.alive(lease.owner, lease.boot) is False


def _plan(
    folder: Folder, key: SessionKey, since: int, after: int, held: DurablePosition | None
) -> ReadPlan:
    # First: what is folded was in the log by then, and may have moved on since.
    manifests = documents.read_manifests(folder, key, since=since)
    found = ReadPlan()
    with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
        tip = segments.find_tip(log, key, since=since)
        if tip is not None:
            spans = _spans(log, key, tip, after, _marks(manifests), held)
            found = ReadPlan(tuple(spans), spans[-1].stop.seq, tip.epoch)
    documents.require_folded(folder, key, manifests, found.head)
    return found


def _marks(manifests: list[documents.ManifestFile]) -> dict[tuple[int, int], Position]:
    """Return the positions that manifests vouch for, by segment."""
    marks: dict[tuple[int, int], Position] = {}
    for one in manifests:
        known = position_of(one.manifest.position)
        if known is not None:
            marks.setdefault((known.epoch, known.number), known.at)
    return marks


def position_of(raw: msgspec.Raw) -> DurablePosition | None:
    """Return what a manifest says of where the log goes on, None if it says nothing."""
    return decoded(
        raw, DurablePosition
    )  # another release's is passed over: reading more is as good


def _spans(
    log: Folder,
    key: SessionKey,
    tip: LogSegment,
    after: int,
    marks: dict[tuple[int, int], Position],
    held: DurablePosition | None,
) -> list[SegmentSpan]:
    newest = _newest_span(log, tip, after, marks, held)
    spans = [newest]
    below = newest.segment
    if newest.start.seq > after:
        for segment in segments.walk(log, tip, key, down_to=after)[1:]:
            prev = below.first.prev
            assert prev is not None  # this is how the walk came here
            stop = Position(prev.length, prev.seq, prev.crc)
            mark = marks.get((segment.epoch, segment.number))
            near = mark is not None and segment.start.seq <= mark.seq <= min(after, stop.seq)
            spans.append(SegmentSpan(segment, mark if near and mark else segment.start, stop))
            below = segment
    return spans[::-1]


def _newest_span(
    log: Folder,
    tip: LogSegment,
    after: int,
    marks: dict[tuple[int, int], Position],
    held: DurablePosition | None,
) -> SegmentSpan:
    """Find out how far the tip counts, reading from as near its end as is known."""
    start = marks.get((tip.epoch, tip.number), tip.start)
    end = held.at if held is not None and held.number == tip.number else None
    if end is not None:
        if after >= end.seq:
            return SegmentSpan(tip, end, end, ())
        if start.offset > end.offset:
            start = tip.start
        if end.offset - start.offset > SMALL:
            return SegmentSpan(tip, start if start.seq <= after else tip.start, end)
    upto = None if end is None else end.offset
    found = segments.scan(log, tip, start, upto=upto, keep=SMALL)
    if found.size < start.offset:
        raise segments.damaged(f"{log.path}/{tip.name}", found.size, start.offset)
    if start is not tip.start and found.end == start and found.size > start.offset:
        # Nothing sound follows: a torn write, or a wrong mark. Only the beginning can tell.
        start = tip.start
        found = segments.scan(log, tip, start, upto=upto, keep=SMALL)
    if start.seq > after:
        return SegmentSpan(tip, tip.start, found.end)
    return SegmentSpan(tip, start, found.end, found.records)


# Streaming the records of a plan, a part of a file at a time
#
# The bytes come through aiofiles on asyncio and through trio's own files on trio. No file is open
# while the caller has a chunk in hand, so a reader that is dropped leaves nothing behind. What
# does not match the plan is damage, and raises before it is returned.


PART = 256 * 1024
_SEED = 11
"""The last bytes of a line that hold its checksum: 8 digits, ``"}`` and the newline."""


class _TrimmedError(Exception):
    """A file was removed by the session's holder, as history that is not kept any more."""


class LogStream:
    """The records of a plan in order, or in reverse; `part` returns the next few."""

    def __init__(self, root: Folder, key: SessionKey, plan: ReadPlan, *, reverse: bool) -> None:
        self._root = root
        self._key = key
        self._path = (*session_path(key), LOG)
        self._reverse = reverse
        self._spans = deque(reversed(plan.spans) if reverse else plan.spans)
        self._open: _ForwardReader | _BackwardReader | None = None

    async def part(self) -> list[Record] | None:
        """Return the next records, None behind the last."""
        while True:
            if self._open is None:
                if not self._spans:
                    return None
                span = self._spans.popleft()
                if span.records is not None:
                    return list(span.records[::-1] if self._reverse else span.records)
                self._open = (_BackwardReader if self._reverse else _ForwardReader)(self, span)
            try:
                records = await self._open.part()
            except _TrimmedError:
                if self._reverse:
                    return None  # what is older is not there any more
                message = (
                    f"the oldest records of {self._key} were removed while they were read: read "
                    "it again"
                )
                raise StoreUnavailableError(message, key=str(self._key)) from None
            if records is not None:
                return records
            self._open = None

    async def read(self, span: SegmentSpan, start: int, stop: int) -> bytes:
        """Return a part of a span's file."""

        def opener(_: str, flags: int) -> int:
            with self._root.enter(*self._path) as log:
                return log.open(span.segment.name, flags & ~os.O_CREAT)

        try:
            return await read_part(opener, start, stop)
        except FileNotFoundError:
            if await anyio.to_thread.run_sync(self._was_trimmed, span.segment):
                raise _TrimmedError from None
            return b""

    def _was_trimmed(self, segment: LogSegment) -> bool:
        with self._root.enter(*self._path) as log:
            return segments.starts(log)[-1:] > [(segment.epoch, segment.number)]

    def damaged(self, span: SegmentSpan, offset: int) -> CorruptRecordError:
        """Return the error for a span that is not what the plan says."""
        path = "/".join((self._root.path, *self._path, span.segment.name))
        return segments.damaged(path, offset, span.stop.offset)


class _ForwardReader:
    def __init__(self, stream: LogStream, span: SegmentSpan) -> None:
        self._stream = stream
        self._span = span
        self._scanner = Scanner(span.segment.epoch, span.start)
        self._at = span.start.offset

    async def part(self) -> list[Record] | None:
        span, stop = self._span, self._span.stop.offset
        if self._at == stop:
            if self._scanner.end != span.stop:
                raise self._stream.damaged(span, self._scanner.next.offset)
            return None
        data = await self._stream.read(span, self._at, min(self._at + PART, stop))
        self._at += len(data)
        records = self._scanner.feed(data)
        if self._scanner.damage is not None or not data:
            raise self._stream.damaged(span, self._scanner.next.offset)
        return records


class _BackwardReader:
    """Read a file from its end: each line is sealed to the one before, so both ways prove it."""

    def __init__(self, stream: LogStream, span: SegmentSpan) -> None:
        self._stream = stream
        self._span = span
        self._at = span.stop.offset
        self._end = span.stop
        """Up to here lines are not returned yet; a line's checksum is known from behind it."""
        self._rest = b""
        """The end of a line whose beginning was not read yet."""

    async def part(self) -> list[Record] | None:
        span, start = self._span, self._span.start
        if self._at == start.offset:
            return None
        low = max(start.offset, self._at - PART)
        data = await self._stream.read(span, low, self._at)
        if len(data) < self._at - low:
            raise self._stream.damaged(span, low + len(data))
        self._at = low
        data += self._rest
        begin = self._first_line(data) if low > start.offset else 0
        self._rest = data[:begin]
        return self._records(data[begin:], low + begin)

    def _first_line(self, data: bytes) -> int:
        """Return where the first line begins whose predecessor's checksum is in *data*."""
        return data.find(b"\n", _SEED - 1) + 1 or len(data)

    def _records(self, data: bytes, offset: int) -> list[Record]:
        if not data:
            return []
        count = data.count(b"\n")
        end = self._end
        seed = self._seed()
        if seed is None:
            raise self._stream.damaged(self._span, offset)
        before = Position(offset, end.seq - count, seed)
        found = frames.lines(data, epoch=self._span.segment.epoch, start=before)
        if found.end != end:
            raise self._stream.damaged(self._span, found.end.offset)
        self._end = before
        return found.records[::-1]

    def _seed(self) -> int | None:
        """Return the checksum of the line that ends the rest, which seeds the next one."""
        if self._at == self._span.start.offset and not self._rest:
            return self._span.start.crc
        try:
            return int(self._rest[-_SEED:-3], 16)
        except ValueError:
            return None
