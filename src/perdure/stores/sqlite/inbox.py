"""What others leave for a session until its holder takes it. Blocking; in transactions."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from perdure.model.keys import SessionKey
from perdure.store import Posted
from perdure.stores.sqlite.rows import DELETED, Row, damaged, held, make
from perdure.stores.sqlite.sql import Q

if TYPE_CHECKING:
    import sqlite3

__all__ = ["post", "settle", "take", "waiting"]


def post(
    con: sqlite3.Connection, key: SessionKey, items: Sequence[Posted], now: float
) -> tuple[int, str]:
    """Leave items, and a letter for the holder; return how many were new, and who that is."""
    if not items:
        return 0, ""
    row = make(con, key, now)
    values = [
        (row.id, item.op_id, item.kind, item.payload, item.posted_at, _sum(row, item))
        for item in items
    ]
    new = max(con.executemany(Q["post"], values).rowcount, 0)
    if row.epoch and row.state != DELETED:
        con.execute(Q["send_letter"], {"owner": row.owner, "id": row.id, "mail": 1})
    return new, row.owner


def take(con: sqlite3.Connection, key: SessionKey, epoch: int, limit: int) -> list[Posted]:
    """Return what waits, oldest first.

    Raises:
        LeaseLostError: The epoch is not the newest.
        CorruptRecordError: An item is damaged.

    """
    row = held(con, key, epoch)
    items: list[Posted] = []
    for *values, sum_ in con.execute(Q["inbox"], {"id": row.id, "limit": limit}):
        op_id, kind, payload, posted_at = values
        item = Posted(op_id, kind, payload, posted_at)
        if not isinstance(payload, bytes) or _sum(row, item) != sum_:
            raise damaged(key, "an item of its inbox does not match its checksum")
        items.append(item)
    return items


def settle(con: sqlite3.Connection, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
    """Remove items.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    row = held(con, key, epoch)
    con.executemany(Q["settle"], [(row.id, op_id) for op_id in op_ids])


def waiting(con: sqlite3.Connection) -> list[SessionKey]:
    """List the sessions for which something waits, by key."""
    found = con.execute(Q["waiting"])
    return sorted(SessionKey(agent, session, tenant) for tenant, agent, session in found)


def _sum(row: Row, item: Posted) -> int:
    head = msgspec.json.encode((row.id, item.op_id, item.kind, item.posted_at))
    return zlib.crc32(item.payload, zlib.crc32(head))
