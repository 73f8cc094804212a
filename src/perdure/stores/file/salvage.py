"""Salvage reads of a damaged log: the records that can still be proven.

`reader.plan` is all or nothing. Here each file is read independently, and each line counts that
the line before it proves. Where records are lost, reading stops with the seq of the next
readable one, so that the caller can continue there.

Blocking: one call into a thread. Nothing is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from perdure._lib.files import Folder
from perdure.errors import CorruptRecordError
from perdure.records import records as frames
from perdure.records.keys import SessionKey
from perdure.records.records import Record
from perdure.stores.file.layout import LOG, segment_name, segment_of, session_path
from perdure.stores.file.leases import newest_epoch, read_lease
from perdure.stores.file.segments import read_first, starts


def salvageable_records(root: Folder, key: SessionKey) -> tuple[int, list[Record]]:
    """Return the seq that a log begins with, and all of its records that can be proven."""
    by_seq: dict[int, Record] = {}
    low = 0
    try:
        folder = root.enter(*session_path(key))
    except FileNotFoundError:
        return 1, []
    with folder:
        since = _since(folder)
        with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
            first_segment = max(starts(log), default=(0, 0))
            for epoch, number in sorted(filter(None, map(segment_of, log.names()))):
                if epoch < since or (epoch, number) < first_segment:
                    continue
                limit, records = _segment(log, epoch, number, key)
                if limit is None:
                    continue
                low = low or (limit if first_segment > (0, 0) else 1)
                # A later file begins where the one before it was sealed.
                by_seq = {seq: record for seq, record in by_seq.items() if seq < limit}
                by_seq |= {record.seq: record for record in records}
    records = sorted(by_seq.values(), key=lambda record: record.seq)
    while records and not records[-1].end:  # an incomplete group
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
    """Return the seq that a file begins with, None if unknown, and its records."""
    data = _bytes(log, segment_name(epoch, number))
    try:
        segment = read_first(log, epoch, number, key)
    except CorruptRecordError:
        segment = None
    if segment is None:
        records = frames.salvaged(data, epoch=epoch, seq=0, crc=0)
        return (records[0].seq if records else None), records
    start = segment.start
    body = data[start.offset :]
    records = frames.salvaged(body, epoch=epoch, seq=start.seq, crc=start.crc)
    return start.seq + 1, records


def _bytes(log: Folder, name: str) -> bytes:
    try:
        fd = log.open(name)
    except FileNotFoundError:
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read()


def contiguous_run(
    key: SessionKey, salvaged: tuple[int, list[Record]], after: int, before: int | None
) -> Iterator[Record]:
    """Yield records with ``after < seq < before``, and raise where some are lost.

    Raises:
        CorruptRecordError: With the next record that can be read as its fact ``next``.

    """
    low, records = salvaged
    seq = max(after, low - 1)
    for record in records:
        if record.seq <= seq:
            continue
        if before is not None and seq + 1 >= before:
            return
        if record.seq != seq + 1:
            message = (
                f"a file of the log of {key} is damaged: its next readable record is {record.seq}"
            )
            raise CorruptRecordError(message, key=str(key), seq=seq + 1, next=record.seq)
        yield record
        seq = record.seq
