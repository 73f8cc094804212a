"""All that a restore reads of a session, in one snapshot. Blocking; called within a transaction."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey
from perdure.records.records import Record
from perdure.store import RestoreData
from perdure.stores.sqlite import documents
from perdure.stores.sqlite.connections import PART_BYTES, next_page
from perdure.stores.sqlite.log import SessionRow, find
from perdure.stores.sqlite.sql import Q

if TYPE_CHECKING:
    import sqlite3


def read(con: sqlite3.Connection, key: SessionKey, names: Collection[str] | None) -> RestoreData:
    """Read documents, the log after them, and whether the inbox is empty.

    Raises:
        UnsupportedVersionError: The manifest has a newer format.

    """
    row = find(con, key)
    have = documents.read_of(con, key, row, names)
    if row is None:
        return RestoreData(have, may_have_items=False)
    after, records = 0, None
    if not have.damaged:
        folded = [document.as_of_seq for document in have.found.values()]
        after = 0 if have.manifest is None else min([have.manifest.as_of_seq, *folded])
        records = _records_after(con, row, after)
    pending = con.execute(Q["inbox"], {"id": row.id, "limit": 1}).fetchone()
    return RestoreData(have, after, records, pending is not None)


def _records_after(
    con: sqlite3.Connection, row: SessionRow, after: int
) -> tuple[Record, ...] | None:
    """Return the rest of a log; None if it is long or damaged."""
    if not row.epoch:
        return ()
    try:
        page = next_page(con, row, None, after, PART_BYTES, PART_BYTES)
    except CorruptRecordError:  # raised when the log is read
        return None
    if page is None:
        return ()
    return None if page.more else tuple([one for one in page.records if one.seq > after])
