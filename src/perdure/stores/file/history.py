"""What became of an epoch's records: how far a successor sealed it, and what it holds.

For the rare cases only: a batch that is sent again, or that met a takeover.
Blocking; part of one hop into a thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from perdure._lib.files import Folder
from perdure.model.keys import SessionKey
from perdure.model.records import Entry, Record
from perdure.stores.file import chain
from perdure.stores.file.chain import Known, Previous
from perdure.stores.file.layout import LOG

__all__ = ["holds", "sealed_end"]


def sealed_end(folder: Folder, key: SessionKey, epoch: int) -> Previous | None:
    """Return where a later epoch sealed *epoch*, None while none has."""
    with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
        tip = chain.find_tip(log, key)
        while tip is not None and tip.epoch > epoch and tip.first.prev is not None:
            prev = tip.first.prev
            if prev.epoch == epoch:
                return prev
            tip = chain.read_first(log, prev.epoch, prev.number, key)
    return None


def holds(
    folder: Folder, key: SessionKey, end: Known, first: int, records: Sequence[Entry]
) -> bool:
    """Say whether an epoch's log up to *end* has exactly these records from *first* on."""
    found: list[Record] = []
    length = end.at.offset
    with folder.enter(LOG) as log:
        segment = chain.read_first(log, end.epoch, end.number, key)
        while segment is not None:
            scanned = chain.scan(log, segment, segment.start, upto=length, keep=length)
            found[:0] = scanned.records or ()
            prev = segment.first.prev
            if segment.start.seq < first or segment.number == 0 or prev is None:
                break
            length = prev.length
            segment = chain.read_first(log, prev.epoch, prev.number, key)
    there = [record for record in found if record.seq >= first][: len(records)]
    return [Entry(one.kind, one.payload, one.end) for one in there] == list(records)
