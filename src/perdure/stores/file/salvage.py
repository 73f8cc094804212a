"""What can still be read of a damaged log, for whoever salvages it.

A plan of the log is all or nothing; here each file is read by itself, and each line counts that
is proven by the one before it. Where records are lost, reading stops with the number of the next
one that is not, so that a caller can go on there.

Blocking: one hop into a thread. Nothing is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from perdure._lib.files import Folder
from perdure.errors import CorruptRecordError
from perdure.records import frames
from perdure.records.keys import SessionKey
from perdure.records.records import Record
from perdure.stores.file.layout import LOG, segment_name, segment_of, session_path
from perdure.stores.file.leases import newest_epoch, read_lease
from perdure.stores.file.segments import read_first, starts


def readable(root: Folder, key: SessionKey) -> tuple[int, list[Record]]:
    """Return the number with which a log begins, and all of its records that can be proven."""
    found: dict[int, Record] = {}
    low = 0
    try:
        folder = root.enter(*session_path(key))
    except FileNotFoundError:
        return 1, []
    with folder:
        since = _since(folder)
        with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
            begin = max(starts(log), default=(0, 0))
            for epoch, number in sorted(filter(None, map(segment_of, log.names()))):
                if epoch < since or (epoch, number) < begin:
                    continue
                limit, records = _segment(log, epoch, number, key)
                if limit is None:
                    continue
                low = low or (limit if begin > (0, 0) else 1)
                # A later file begins where the one before it was sealed.
                found = {seq: one for seq, one in found.items() if seq < limit}
                found |= {record.seq: record for record in records}
    records = sorted(found.values(), key=lambda record: record.seq)
    while records and not records[-1].end:  # a group that was never whole
        records.pop()
    return max(low, 1), records


def _since(folder: Folder) -> int:
    try:
        lease = read_lease(folder, newest_epoch(folder))
    except CorruptRecordError:
        return 1
    return 1 if lease is None else lease.since


def _segment(
    log: Folder, epoch: int, number: int, key: SessionKey
) -> tuple[int | None, list[Record]]:
    """Return the number with which a file begins, None if nobody knows, and its records."""
    data = _bytes(log, segment_name(epoch, number))
    try:
        segment = read_first(log, epoch, number, key)
    except CorruptRecordError:
        segment = None
    if segment is None:
        records = frames.salvaged(data, epoch=epoch, seq=0, crc=0)
        return (records[0].seq if records else None), records
    start = segment.start
    rest = data[start.offset :]
    records = frames.salvaged(rest, epoch=epoch, seq=start.seq, crc=start.crc)
    return start.seq + 1, records


def _bytes(log: Folder, name: str) -> bytes:
    try:
        fd = log.open(name)
    except FileNotFoundError:
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read()


def run_of(
    key: SessionKey, found: tuple[int, list[Record]], after: int, before: int | None
) -> Iterator[Record]:
    """Yield the records between two, and raise where some are lost.

    Raises:
        CorruptRecordError: With the next record that can be read as its fact ``next``.

    """
    low, records = found
    at = max(after, low - 1)
    for record in records:
        if record.seq <= at:
            continue
        if before is not None and at + 1 >= before:
            return
        if record.seq != at + 1:
            message = (
                f"a file of the log of {key} is damaged: its next sound record is {record.seq}"
            )
            raise CorruptRecordError(message, key=str(key), seq=at + 1, next=record.seq)
        yield record
        at = record.seq
