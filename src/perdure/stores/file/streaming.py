"""Streaming the records of a plan, a part of a file at a time.

The bytes come through aiofiles on asyncio and through trio's own files on trio. No file is
open while the caller has a chunk in hand, so a reader that is dropped leaves nothing
behind. What does not match the plan is damage, and raises before it is returned.
"""

from __future__ import annotations

import os
from collections import deque

import anyio.to_thread

from perdure._lib.files import Folder, read_part
from perdure.codec import frames
from perdure.codec.frames import Position, Scanner
from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.model.keys import SessionKey
from perdure.model.records import Record
from perdure.stores.file import chain
from perdure.stores.file.chain import Segment
from perdure.stores.file.layout import LOG, session_path
from perdure.stores.file.reading import Plan, Span

__all__ = ["Stream"]

PART = 256 * 1024
_SEED = 11
"""The last bytes of a line that hold its checksum: 8 digits, ``"}`` and the newline."""


class _TrimmedError(Exception):
    """A file was removed by the session's holder, as history that is not kept any more."""


class Stream:
    """The records of a plan in order, or in reverse; `part` returns the next few."""

    def __init__(self, root: Folder, key: SessionKey, plan: Plan, *, reverse: bool) -> None:
        self._root = root
        self._key = key
        self._path = (*session_path(key), LOG)
        self._reverse = reverse
        self._spans = deque(reversed(plan.spans) if reverse else plan.spans)
        self._open: _Forward | _Backward | None = None

    async def part(self) -> list[Record] | None:
        """Return the next records, None behind the last."""
        while True:
            if self._open is None:
                if not self._spans:
                    return None
                span = self._spans.popleft()
                if span.records is not None:
                    return list(span.records[::-1] if self._reverse else span.records)
                self._open = (_Backward if self._reverse else _Forward)(self, span)
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

    async def read(self, span: Span, start: int, stop: int) -> bytes:
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

    def _was_trimmed(self, segment: Segment) -> bool:
        with self._root.enter(*self._path) as log:
            return chain.starts(log)[-1:] > [(segment.epoch, segment.number)]

    def damaged(self, span: Span, offset: int) -> CorruptRecordError:
        """Return the error for a span that is not what the plan says."""
        path = "/".join((self._root.path, *self._path, span.segment.name))
        return chain.damaged(path, offset, span.stop.offset)


class _Forward:
    def __init__(self, stream: Stream, span: Span) -> None:
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


class _Backward:
    """Read a file from its end: each line is sealed to the one before, so both ways prove it."""

    def __init__(self, stream: Stream, span: Span) -> None:
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
