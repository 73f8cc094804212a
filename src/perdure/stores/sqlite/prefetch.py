"""What an open reads of a session after it has acquired its lease, in one snapshot. Blocking."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey
from perdure.store import Documents
from perdure.stores.sqlite import documents
from perdure.stores.sqlite.connections import PART_BYTES, RowPage, next_page
from perdure.stores.sqlite.log import find
from perdure.stores.sqlite.sql import Q

if TYPE_CHECKING:
    import sqlite3


class Prefetched(msgspec.Struct):
    """The log's tail and the inbox, as they were when the documents were read."""

    epoch: int
    head: int
    after: int
    """The record after which the tail begins."""
    tail: RowPage | None
    """None once it was used, or if it could not be read."""
    has_pending_items: bool


def prefetch(
    con: sqlite3.Connection, key: SessionKey, names: Collection[str] | None
) -> tuple[Documents, Prefetched | None]:
    """Return documents, and what an open reads after them; raises as `documents.read`."""
    row = find(con, key)
    found = documents.read_of(con, key, row, names)
    if row is None:
        return found, None
    after = 0
    if found.manifest is not None and not found.damaged:
        folded = [document.as_of_seq for document in found.found.values()]
        after = min([found.manifest.as_of_seq, *folded])
    try:
        tail = next_page(con, row, None, after, PART_BYTES, PART_BYTES)
    except CorruptRecordError:  # raised when it is read again
        tail = None
    pending = con.execute(Q["inbox"], {"id": row.id, "limit": 1}).fetchone()
    return found, Prefetched(row.epoch, row.head, after, tail, pending is not None)
