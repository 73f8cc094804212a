"""Cutting off the oldest part of a log, which is a matter of its segments alone.

The places of commits stay taken, as they do after merging; only records go.

Blocking; for the holder, who has the head to itself.
"""

from __future__ import annotations

from perdure._lib.ids import random_id
from perdure.codec.frames import Position
from perdure.stores.objects import framing
from perdure.stores.objects.bucket import Bucket
from perdure.stores.objects.heads import Head, Mark, Segment
from perdure.stores.objects.writing import Writer

__all__ = ["cut_below"]


def cut_below(bucket: Bucket, writer: Writer, head: Head, below: int) -> tuple[Segment, ...] | None:
    """Return the segments that hold what is left, one of them written anew; None: all stay.

    Raises:
        CorruptRecordError: What would be left is not what was written; nothing has changed.

    """
    left = [segment for segment in head.segments if segment.last >= below]
    if left and left[0].first < below:
        left[0] = _shortened(bucket, writer, left[0], below)
    return None if len(left) == len(head.segments) and left == list(head.segments) else tuple(left)


def _shortened(bucket: Bucket, writer: Writer, segment: Segment, below: int) -> Segment:
    """Write what a segment has from a seq on."""
    data = bucket.part(segment.object, 0, segment.size)
    if data is None:
        raise framing.damaged(segment.object, "it is gone or cut")
    start = segment.marks[0]
    framing.records_of(segment.object, data, Position(0, start.seq, start.crc))
    offset = 0
    for _ in range(below - segment.first):
        offset = data.index(b"\n", offset) + 1
    crc = int(data[offset - 11 : offset - 3], 16)
    marks = [Mark(below - 1, 0, crc)]
    marks += [
        Mark(mark.seq, mark.offset - offset, mark.crc)
        for mark in segment.marks
        if mark.offset > offset
    ]
    name = f"{writer.folder}/seg/{writer.epoch:010d}-{below:016d}-{random_id(10)}"
    bucket.put(name, data[offset:])
    return Segment(name, segment.last, segment.size - offset, tuple(marks))
