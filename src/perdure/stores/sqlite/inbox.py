"""Inbox and dead letters of a session. Blocking; called within a transaction."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from perdure.records.keys import SessionKey
from perdure.records.posts import (
    UNREADABLE,
    acked_ids,
    decode_dead_letter,
    encode_dead_letter,
    oldest_first,
)
from perdure.store import DeadLetter, InboxLimit, PendingItem
from perdure.stores.sqlite.log import (
    SessionRow,
    find,
    find_or_create,
    held_row,
    lease_lost_error,
)
from perdure.stores.sqlite.sql import Q


def enqueue(
    con: sqlite3.Connection,
    key: SessionKey,
    items: Sequence[PendingItem],
    now: float,
    limit: InboxLimit | None,
) -> tuple[int, str]:
    """Insert items, and a request for the holder; return how many were new, and the holder.

    Raises:
        InboxFullError: The new items would go over the limit; the transaction is rolled back.

    """
    if not items:
        return 0, ""
    row = find_or_create(con, key, now)
    before = con.execute(Q["inbox_size"], {"id": row.id}).fetchone() if limit else (0, 0)
    values = [
        (row.id, item.op_id, item.kind, item.payload, item.posted_at, _sum(row, item))
        for item in items
    ]
    new = max(con.executemany(Q["post"], values).rowcount, 0)
    if limit is not None:
        after = con.execute(Q["inbox_size"], {"id": row.id}).fetchone()
        limit.require_room(
            key, waiting=before[0], size=before[1], new=new, added=after[1] - before[1]
        )
    if row.epoch and not row.is_hidden:
        con.execute(Q["send_letter"], {"owner": row.owner, "id": row.id, "mail": 1})
    return new, row.owner


def receive(con: sqlite3.Connection, key: SessionKey, epoch: int, limit: int) -> list[PendingItem]:
    """Return the pending items, oldest first.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    row = find(con, key)
    if row is None and not epoch:
        return []
    if row is None or row.epoch != epoch:
        raise lease_lost_error(key, epoch, row)
    return [
        _decoded(row, values) for values in con.execute(Q["inbox"], {"id": row.id, "limit": limit})
    ]


def _decoded(row: SessionRow, values: tuple[Any, ...]) -> PendingItem:
    number, op_id, kind, payload, posted_at, sum_ = values
    try:
        item = PendingItem(op_id.decode(), kind.decode(), payload, posted_at)
    except UnicodeDecodeError:
        item = PendingItem(f"{UNREADABLE}{number}", "", payload, 0.0)
    else:
        if _sum(row, item) == sum_:
            return item
    damage = f"row {number} of the table inbox does not match its checksum"
    return msgspec.structs.replace(item, posted_at=0.0, damage=damage)


def ack(
    con: sqlite3.Connection,
    key: SessionKey,
    epoch: int | None,
    op_ids: Collection[str],
    dead: Sequence[DeadLetter],
) -> None:
    """Remove items, some of which become dead letters; without an epoch, dead letters.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    if epoch is None:
        if (found := find(con, key)) is not None:
            con.executemany(Q["drop_dead_letter"], [(found.id, op_id) for op_id in op_ids])
        return
    row, done = held_row(con, key, epoch), acked_ids(op_ids, dead)
    letters = [(row.id, letter.item.op_id, encode_dead_letter(key, letter)) for letter in dead]
    con.executemany(Q["put_dead_letter"], letters)
    con.executemany(Q["settle"], [(row.id, op_id) for op_id in done])
    numbers = [op_id.removeprefix(UNREADABLE) for op_id in done if op_id.startswith(UNREADABLE)]
    rows = [(row.id, int(number)) for number in numbers if number.isdecimal()]
    con.executemany(Q["settle_row"], rows)


def dead_letters(con: sqlite3.Connection, key: SessionKey) -> list[DeadLetter]:
    """Return a session's dead letters."""
    row = find(con, key)
    if row is None:
        return []
    return oldest_first(
        [
            decode_dead_letter(key, op_id.decode(errors="replace"), data)
            for op_id, data in con.execute(Q["dead_letters"], {"id": row.id})
        ]
    )


def sessions_with_pending_items(con: sqlite3.Connection, *, dead_letters: bool) -> list[SessionKey]:
    """List the sessions that have pending items, or dead letters, by key."""
    rows = con.execute(Q["with_dead_letters" if dead_letters else "waiting"])
    return sorted(SessionKey(agent, session, tenant) for tenant, agent, session in rows)


def _sum(row: SessionRow, item: PendingItem) -> int:
    head = msgspec.json.encode((row.id, item.op_id, item.kind, item.posted_at))
    return zlib.crc32(item.payload, zlib.crc32(head))
