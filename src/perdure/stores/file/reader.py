"""Reader of a session's log, without a lease, and salvage reads of a damaged one.

A plan lists the spans of the chain that hold the requested records, each with the length that
counts. It is made between two reads of the epoch: if a takeover is under way, the newest records
may be missing, and the plan is not ``settled``. The bytes of a plan never change afterwards, so
they can be streamed while another process writes.

`plan` blocks: one call into a thread. Nothing is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping

import anyio.to_thread
import msgspec

from perdure._lib.files import Folder, read_part, store_errors
from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records import records as frames
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, RETRACT, Position, Record, Scanner
from perdure.stores.file import documents, segments
from perdure.stores.file.documents import Manifests
from perdure.stores.file.layout import (
    ASIDE,
    LOG,
    QUARANTINE,
    RELEASED,
    is_tail,
    segment_name,
    segment_of,
    session_path,
)
from perdure.stores.file.leases import Owners, newest_epoch, newest_lease
from perdure.stores.file.segments import DurablePosition, LogSegment, SegmentSpan, starts

SMALL = 1024 * 1024
"""A tip of at most this many bytes is read once, for the plan and for its records."""


class ReadPlan(msgspec.Struct):
    """The parts of the log that hold the requested records, oldest first."""

    spans: tuple[SegmentSpan, ...] = ()
    head: int = 0
    epoch: int = 0
    """The newest epoch that has a record."""
    settled: bool = True
    after: int = 0
    """Only records after this one are requested, which for a page follows from its length."""


def plan(
    root: Folder,
    key: SessionKey,
    after: int,
    before: int | None,
    durable: Callable[[], DurablePosition | None],
    owners: Owners,
    *,
    reverse: bool = False,
    limit: int | None = None,
) -> ReadPlan:
    """Plan a read of the log as it is now; a plan that is not settled should be made again.

    A page of the newest records is mostly small, and then it is read here: each epoch has a file of
    its own, and opening one later is several calls into a thread.

    Args:
        root: The store's folder.
        key: The session.
        after: Only records after this one are requested.
        before: Only records before this one are requested.
        durable: Returns how far the log is durable by now, if this store holds the session.
        owners: Shows whether the newest epoch's owner is alive.
        reverse: Whether the read begins with the newest of the requested records.
        limit: How many of these are requested at most, if it does; None for all.

    Raises:
        CorruptRecordError: The log is damaged before its tail.

    """
    try:
        folder = root.enter(*session_path(key))
    except FileNotFoundError:
        return ReadPlan()
    with folder:
        newest = newest_lease(folder, key)
        if newest.deleted:
            return ReadPlan()
        epoch = newest.epoch
        try:
            read_plan = _plan(
                folder,
                key,
                newest.since,
                after,
                durable,
                epoch,
                before=before,
                limit=limit if reverse else None,
            )
        except CorruptRecordError:
            if newest_epoch(folder) != epoch:
                return ReadPlan(settled=False)  # it was deleted meanwhile
            raise
        after = read_plan.after
        read_plan.spans = _narrowed(folder, read_plan.spans, after, before, reverse=reverse)
        if reverse and limit is not None:
            read_plan.spans = _read_early(folder, read_plan.spans)
        # No takeover is under way: the newest epoch has its record, or never will.
        lease = newest.lease
        read_plan.settled = newest_epoch(folder) == epoch and (
            lease is None
            or read_plan.epoch == epoch
            or folder.has(RELEASED.name(epoch))
            or owners.is_alive(lease.owner, lease.boot) is False
        )
        return read_plan


def _narrowed(
    folder: Folder, spans: tuple[SegmentSpan, ...], after: int, before: int | None, *, reverse: bool
) -> tuple[SegmentSpan, ...]:
    """Return the spans to read, of which the first one begins close to the requested records."""
    if before is not None:
        spans = tuple(span for span in spans if span.start.seq + 1 < before)
    if spans and reverse and before is not None:
        _, stop = _bracket(folder, spans[-1], before - 1)
        spans = (*spans[:-1], msgspec.structs.replace(spans[-1], stop=stop))
    if spans:
        start, _ = _bracket(folder, spans[0], after)
        spans = (msgspec.structs.replace(spans[0], start=start), *spans[1:])
    return spans


def _bracket(folder: Folder, span: SegmentSpan, seq: int) -> tuple[Position, Position]:
    """Return positions in a span close to the end of a record, its own if it is not in there."""
    if span.records is None and span.start.seq < seq < span.stop.seq:
        # If it was trimmed meanwhile, or is lost, reading it shows that.
        with contextlib.suppress(FileNotFoundError, CorruptRecordError), folder.enter(LOG) as log:
            return segments.bracket(log, span.segment, span.start, span.stop, seq)
    return span.start, span.stop


def _read_early(folder: Folder, spans: tuple[SegmentSpan, ...]) -> tuple[SegmentSpan, ...]:
    """Return the spans with the records of the newest ones, if they are few."""
    read, left = list(spans), PART
    # What was trimmed meanwhile, or is damaged, is found when it is streamed.
    with contextlib.suppress(FileNotFoundError, CorruptRecordError), folder.enter(LOG) as log:
        for at, span in reversed(list(enumerate(spans))):
            left -= span.stop.offset - span.start.offset
            if left < 0:
                break
            if span.records is None:
                read[at] = msgspec.structs.replace(span, records=records_of(log, span))
    return tuple(read)


def _plan(
    folder: Folder,
    key: SessionKey,
    since: int,
    after: int,
    durable: Callable[[], DurablePosition | None],
    epoch: int,
    *,
    before: int | None,
    limit: int | None,
) -> ReadPlan:
    """Plan a read without its positions; with a limit, of so many records before one."""
    # First: what is folded was durable in the log by then, and the log may have grown since.
    manifests = documents.read_manifests(folder, key, since=since)
    position = durable()
    # Its epoch was overtaken: only the seal says how far it counts.
    if position is not None and position.epoch != epoch:
        position = None
    read_plan = ReadPlan(after=after)
    with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
        tip = segments.find_tip(log, key, since=since)
        if tip is not None:
            newest = _newest_span(log, tip, after, manifests.mark_in(tip), position)
            if limit is not None:
                last = newest.stop.seq if before is None else min(before - 1, newest.stop.seq)
                after = max(after, last - limit)
            spans = spans_to(log, key, newest, after, manifests)
            read_plan = ReadPlan(tuple(spans), newest.stop.seq, tip.epoch, after=after)
    documents.require_folded(folder, key, manifests.files, read_plan.head)
    return read_plan


def spans_to(
    log: Folder, key: SessionKey, newest: SegmentSpan, after: int, manifests: Manifests
) -> list[SegmentSpan]:
    """Return the spans that hold the records after *after*, up to the newest, oldest first.

    Raises:
        CorruptRecordError: A segment in the chain is missing or damaged.

    """
    spans = [newest]
    if newest.start.seq > after:
        for segment in segments.walk(log, newest.segment, key, down_to=after)[1:]:
            prev = spans[-1].segment.first.prev
            assert prev is not None  # the walk followed it
            stop = Position(prev.length, prev.seq, prev.crc)
            start = manifests.mark_in(segment)
            # A mark helps only if it is before the records that are asked for.
            if not segment.start.seq <= start.seq <= min(after, stop.seq):
                start = segment.start
            spans.append(SegmentSpan(segment, start, stop))
    return spans[::-1]


def records_of(
    log: Folder, span: SegmentSpan, keep_bytes: int = SMALL
) -> tuple[Record, ...] | None:
    """Return an earlier segment's records, None if they are many, or not those that were sealed."""
    up_to = span.stop.offset
    read = segments.scan(log, span.segment, span.start, up_to=up_to, keep_bytes=keep_bytes)
    return read.records if read.stop == span.stop else None


def _newest_span(
    log: Folder,
    tip: LogSegment,
    after: int,
    start: Position,
    durable: DurablePosition | None,
) -> SegmentSpan:
    """Find up to where the tip counts, reading from a known position on."""
    end = durable.at if durable is not None and durable.number == tip.number else None
    if end is not None:
        if after >= end.seq:
            return SegmentSpan(tip, end, end, ())
        if start.offset > end.offset:
            start = tip.start
        if end.offset - start.offset > SMALL:
            return SegmentSpan(tip, start if start.seq <= after else tip.start, end)
    up_to = None if end is None else end.offset
    span = segments.scan_from(log, tip, start, up_to=up_to, keep_bytes=SMALL)
    # It is shorter than what a manifest has proven.
    if span.size < start.offset:
        raise segments.damage_error(f"{log.path}/{tip.name}", span.size, start.offset)
    return SegmentSpan(tip, tip.start, span.stop) if span.start.seq > after else span


# Bytes at the end of a log that do not count


class CutTail(msgspec.Struct, frozen=True):
    """Bytes at a log's end that are no whole records: of a write that a crash cut, or damage."""

    path: str
    """The file that holds them."""
    bytes: int
    is_kept: bool
    """True once they were set aside, so that the log continues without them."""

    def __str__(self) -> str:
        if self.path.endswith(ASIDE):
            return f"a damaged log of {self.bytes} bytes, kept in {self.path}"
        what = "kept in" if self.is_kept else "at the end of"
        return f"{self.bytes} bytes that are no whole records, {what} {self.path}"


def log_tails(root: Folder, key: SessionKey, owners: Owners) -> list[CutTail]:
    """Return the tails that were set aside and not accepted, and what the next holder sets aside.

    The end of a log that a process may be writing to is not looked at.
    """
    tails: list[CutTail] = []
    with (
        contextlib.suppress(FileNotFoundError, CorruptRecordError),
        root.enter(*session_path(key)) as folder,
    ):
        tails = kept_tails(folder)
        epoch, lease, names = newest = newest_lease(folder)
        if (
            lease is not None
            and RELEASED.name(epoch) not in names
            and (lease.deleted or owners.is_alive(lease.owner, lease.boot) is not False)
        ):
            return tails
        with folder.enter(LOG) as log:
            names, since = log.names(), newest.since
            tip = segments.find_tip(log, key, since=since, names=names)
            ends = dict.fromkeys(segments.unbegun(log, tip, names, since=since), 0)
            if tip is not None:
                mark = documents.read_manifests(folder, key, since=since).mark_in(tip)
                ends[tip.name] = segments.scan_from(log, tip, mark).stop.offset
            found = _tails_in(log, ends, is_kept=False)
            if newest_epoch(folder) == epoch:
                tails += found
    return tails


def _tails_in(folder: Folder, ends: Mapping[str, int], *, is_kept: bool) -> list[CutTail]:
    """Return the bytes of files after their ends."""
    tails: list[CutTail] = []
    for name, end in sorted(ends.items()):
        status = folder.stat(name)
        if status is not None and status.st_size > end:
            tails.append(CutTail(f"{folder.path}/{name}", status.st_size - end, is_kept))
    return tails


def kept_tails(folder: Folder) -> list[CutTail]:
    """Return the tails in a session's quarantine that were not accepted."""
    with contextlib.suppress(FileNotFoundError), folder.enter(QUARANTINE) as quarantine:
        kept = dict.fromkeys(filter(is_tail, quarantine.names()), 0)
        return _tails_in(quarantine, kept, is_kept=True)
    return []


def accept_tails(root: Folder, key: SessionKey) -> bool:
    """Mark the tails in a session's quarantine as accepted; return whether there were any."""
    accepted = False
    with (
        contextlib.suppress(FileNotFoundError),
        root.enter(*session_path(key), QUARANTINE) as quarantine,
    ):
        for name in filter(is_tail, quarantine.names()):
            quarantine.rename(name, f"{name}.accepted")
            accepted = True
        quarantine.sync()
    return accepted


# Streaming a plan, a part of a file at a time
#
# The bytes are read through aiofiles on asyncio and through trio's own files on trio. No file is
# open while the caller processes a chunk, so an abandoned stream leaks nothing. Bytes that do not
# match the plan are damage, and raise before they are returned.


PART = 256 * 1024
"""A part at most; a reader that goes backward begins with less, for a page of the newest."""
_FIRST_PART = 32 * 1024


class _TrimmedError(Exception):
    """The session's holder removed a file, by a trim or with the session."""


async def stream(
    root: Folder, key: SessionKey, plan: ReadPlan, *, reverse: bool
) -> AsyncGenerator[list[Record], None]:
    """Yield the records of a plan in order, or in reverse, a part of a file at a time.

    Raises:
        StoreUnavailableError: The next ones were removed meanwhile.

    """
    for span in plan.spans[::-1] if reverse else plan.spans:
        if span.records is not None:
            yield list(span.records[::-1] if reverse else span.records)
            continue
        file = _SpanFile(root, key, span)
        try:
            async with contextlib.aclosing(_backward(file) if reverse else _forward(file)) as parts:
                async for records in parts:
                    yield records
        except _TrimmedError:
            if reverse:
                return  # older records were removed
            raise StoreUnavailableError(
                f"records of {key} were removed while they were read: it was pruned or "
                "deleted; read it again",
                key=str(key),
            ) from None


class _SpanFile:
    """The file of a span, opened for each part."""

    def __init__(self, root: Folder, key: SessionKey, span: SegmentSpan) -> None:
        self._root = root
        self._path = session_path(key)
        self.span = span

    async def read(self, start: int, stop: int) -> bytes:
        """Return a part of the file; nothing if the file is not there."""

        def opener(_: str, flags: int) -> int:
            with self._root.enter(*self._path, LOG) as log:
                return log.open(self.span.segment.name, flags & ~os.O_CREAT)

        with store_errors("read", self._root.path):
            try:
                return await read_part(opener, start, stop)
            except FileNotFoundError:
                if await anyio.to_thread.run_sync(self._was_removed):
                    raise _TrimmedError from None
                return b""

    def _was_removed(self) -> bool:
        segment = self.span.segment
        with self._root.enter(*self._path) as folder:
            newest = newest_lease(folder)
            if newest.deleted or newest.since > segment.epoch:
                return True
            with folder.enter(LOG) as log:
                return starts(log)[-1:] > [(segment.epoch, segment.number)]

    def damage_error(self, offset: int) -> CorruptRecordError:
        """Return the error for bytes that do not match the plan."""
        path = "/".join((self._root.path, *self._path, LOG, self.span.segment.name))
        return segments.damage_error(path, offset, self.span.stop.offset)


async def _forward(file: _SpanFile) -> AsyncGenerator[list[Record], None]:
    span = file.span
    scanner = Scanner(span.segment.epoch, span.start)
    at, stop = span.start.offset, span.stop.offset
    while at < stop:
        data = await file.read(at, min(at + PART, stop))
        at += len(data)
        records = scanner.feed(data)
        if scanner.damage is not None or not data:
            raise file.damage_error(scanner.next.offset)
        yield records
    if scanner.end != span.stop:
        raise file.damage_error(scanner.next.offset)


async def _backward(file: _SpanFile) -> AsyncGenerator[list[Record], None]:
    """Read a file from its end: each line's checksum covers the one before, in both directions."""
    start, end = file.span.start, file.span.stop
    at, size = end.offset, _FIRST_PART
    rest = b""  # the end of a line whose beginning is not read yet
    while at > start.offset:
        low = max(start.offset, at - size)
        data = await file.read(low, at)
        if len(data) < at - low:
            raise file.damage_error(low + len(data))
        at, size = low, min(size * 2, PART)
        data += rest
        begin = 0
        seed: int | None = start.crc
        if low > start.offset:  # from the first line whose predecessor's checksum was read
            begin = data.find(b"\n", frames.SEED_BYTES - 1) + 1 or len(data)
            seed = frames.seed_of(data[:begin])
        rest, data = data[:begin], data[begin:]
        if not data:
            continue
        if seed is None:
            raise file.damage_error(low + begin)
        before = Position(low + begin, end.seq - data.count(b"\n"), seed)
        found = frames.lines(data, epoch=file.span.segment.epoch, start=before)
        if found.end != end:
            raise file.damage_error(found.end.offset)
        end = before
        yield found.records[::-1]


# Salvage reads of a damaged log: the records that can still be proven


class SalvagedLog(msgspec.Struct):
    """All records of a log that can be proven."""

    low: int = 1
    """The seq that the log begins with."""
    records: list[Record] = []
    began_anew: bool = False
    """True if it was begun again over records that could not be read then. They come first, and
    what came later follows them under higher numbers."""


def salvaged_log(root: Folder, key: SessionKey) -> SalvagedLog:
    """Return all records of a log that can be proven."""
    by_seq: dict[int, Record] = {}
    low = shift = 0
    with contextlib.suppress(FileNotFoundError), root.enter(*session_path(key)) as folder:
        newest = newest_lease(folder)
        if newest.deleted:
            return SalvagedLog()
        with folder.enter(LOG) as log:
            begin = starts(log)[-1:]
            for epoch, number in sorted(filter(None, map(segment_of, log.names()))):
                if epoch < newest.since or [(epoch, number)] < begin:
                    continue
                limit, records, begins = _segment(log, epoch, number, key)
                if limit is None:
                    continue
                low = low or (limit if begins or begin else 1)
                # The log begins again at 1: its records follow those before, which keep their
                # numbers.
                if limit == 1 and any(record.kind != EPOCH for record in by_seq.values()):
                    shift = max(by_seq)
                # A later file begins where the one before it was sealed.
                by_seq = {seq: record for seq, record in by_seq.items() if seq < limit + shift}
                by_seq |= {record.seq + shift: record for record in records}
    if shift:
        # A retraction names a record by the number that it had.
        by_seq = {
            seq: msgspec.structs.replace(record, seq=seq)
            for seq, record in by_seq.items()
            if record.seq == seq or record.kind != RETRACT
        }
    records = sorted(by_seq.values(), key=lambda record: record.seq)
    while records and not records[-1].end:  # an incomplete group
        records.pop()
    return SalvagedLog(max(low, 1), records, shift > 0)


def _segment(
    log: Folder, epoch: int, number: int, key: SessionKey
) -> tuple[int | None, list[Record], bool]:
    """Return the seq that a file begins with, None if unknown or the file is of another session;
    its records; and whether the log is known to begin there."""
    data = frames.unconverted(log.read(segment_name(epoch, number)) or b"")
    segment = segments.segment_of_line(data.partition(b"\n")[0], epoch, number)
    if segment is None:
        records = frames.salvaged(data, epoch=epoch, seq=0, crc=0)
        return (records[0].seq if records else None), records, False
    if segment.first.key != key:
        return None, [], False
    start = segment.start
    body = data[start.offset :]
    records = frames.salvaged(body, epoch=epoch, seq=start.seq, crc=start.crc)
    return start.seq + 1, records, segment.first.prev is None


def contiguous_run(
    key: SessionKey, salvaged: SalvagedLog, after: int, before: int | None
) -> Iterator[Record]:
    """Yield records with ``after < seq < before``, and raise where some are lost.

    Raises:
        CorruptRecordError: With the next record that can be read as its fact ``next``.

    """
    seq = max(after, salvaged.low - 1)
    for record in salvaged.records:
        if record.seq <= seq:
            continue
        if before is not None and seq + 1 >= before:
            return
        if record.seq != seq + 1:
            raise CorruptRecordError(
                f"a file of the log of {key} is damaged: its next readable record is {record.seq}",
                key=str(key),
                seq=seq + 1,
                next=record.seq,
            )
        yield record
        seq = record.seq
