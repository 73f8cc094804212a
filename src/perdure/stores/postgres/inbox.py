"""Inbox and dead letters: items in the order of their posts, each pending op id once. Blocking."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure.records import json
from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.keys import SessionKey
from perdure.records.manifest import too_large
from perdure.records.posts import (
    UNREADABLE,
    acked_ids,
    decode_dead_letter,
    encode_dead_letter,
    oldest_first,
)
from perdure.records.records import open_sealed, seal
from perdure.store import DeadLetter, InboxLimit, PendingItem
from perdure.stores.postgres.connections import Connection, bigint
from perdure.stores.postgres.leases import channel_of
from perdure.stores.postgres.log import (
    digest_of,
    lease_lost_error,
    lock_session,
    require_held,
    state_of,
)
from perdure.stores.postgres.schema import Statements


def enqueue(
    connection: Connection,
    sql: Statements,
    key: SessionKey,
    items: Sequence[PendingItem],
    limit: InboxLimit | None,
) -> int:
    """Insert items, and notify the holder; return how many were new."""
    for item in items:
        if len(item.payload) > MAX_RECORD_BYTES:
            raise too_large(key, len(item.payload), what="an item for")
    ops = [digest_of(item.op_id) for item in items]
    sealed = [seal(msgspec.json.encode(item)) for item in items]
    with connection.transaction():
        # Under the session's lock: the next holder finds the items, or is notified of them.
        state = lock_session(connection, sql, key)
        values = (state.id, ops, sealed, state.id, limit is not None)
        counts = connection.execute(sql["post"], values).fetchone()
        new, added, count, size = map(int, counts or (0, 0, 0, 0))
        if limit is not None:  # too many: the transaction is rolled back
            limit.require_room(key, waiting=count, size=size, new=new, added=added)
        if new and state.epoch and not state.released:
            channel = channel_of(sql.schema, state.owner)
            request = {"owner": state.owner, "id": state.id, "channel": channel}
            connection.execute(sql["tell"], request)
    return new


def receive(
    connection: Connection, sql: Statements, key: SessionKey, epoch: int, limit: int
) -> list[PendingItem]:
    """Return a session's pending items, oldest first."""
    state = state_of(connection, sql, key)
    if state is None and not epoch:
        return []
    if state is None or state.epoch != epoch:
        raise lease_lost_error(key, epoch, state)
    values = {"id": bigint(state.id), "limit": bigint(max(limit, 0))}
    items = [_decoded(*row) for row in connection.execute(sql["waiting"], values, binary=True)]
    return [
        _with_op_id(item, items) if item.op_id.startswith(UNREADABLE) else item for item in items
    ]


def _decoded(number: int, op_hash: bytes, item: bytes) -> PendingItem:
    body = open_sealed(item)
    if body is not None:
        pending = json.decode(body, PendingItem)
        if digest_of(pending.op_id) == op_hash:
            return pending
    damage = f"item {number} of the table inbox does not match its checksum"
    return PendingItem(f"{UNREADABLE}{op_hash.hex()}", "", item, 0.0, damage)


def _with_op_id(damaged: PendingItem, page: Sequence[PendingItem]) -> PendingItem:
    """Return a damaged item with its op id, if its post's other items allow to derive it.

    A post must not be delivered in part, and only the hash of this item's id is readable.
    """
    for item in page:
        for index in range(len(page) + 1):
            op_id = f"{item.key}/{index}"
            if f"{UNREADABLE}{digest_of(op_id).hex()}" == damaged.op_id:
                return msgspec.structs.replace(damaged, op_id=op_id)
    return damaged


def ack(
    connection: Connection,
    sql: Statements,
    key: SessionKey,
    epoch: int | None,
    op_ids: Sequence[str],
    dead: Sequence[DeadLetter],
) -> None:
    """Remove items, some of which become dead letters; without an epoch, dead letters."""
    ops = [_row_hash(op_id) for op_id in acked_ids(op_ids, dead)]
    if epoch is None:
        connection.execute(sql["drop_dead_letters"], (key.tenant, key.agent, key.session, ops))
        return
    letters = {_row_hash(letter.item.op_id): encode_dead_letter(key, letter) for letter in dead}
    with connection.transaction():
        row_id = require_held(connection, sql, key, epoch)
        values = {"id": row_id, "ops": ops, "dead": [*letters], "letters": [*letters.values()]}
        connection.execute(sql["settle"], values)


def dead_letters(connection: Connection, sql: Statements, key: SessionKey) -> list[DeadLetter]:
    """Return a session's dead letters."""
    values = (key.tenant, key.agent, key.session)
    rows = connection.execute(sql["dead_letters"], values, binary=True).fetchall()
    return oldest_first(
        [decode_dead_letter(key, f"{UNREADABLE}{op.hex()}", letter) for op, letter in rows]
    )


def sessions_with_pending_items(
    connection: Connection,
    sql: Statements,
    dead_letters: bool,  # noqa: FBT001  # passed on by position
) -> list[SessionKey]:
    """List the sessions that have pending items, or dead letters, by key."""
    rows = connection.execute(sql["with_dead_letters" if dead_letters else "inboxes"])
    return sorted(SessionKey(agent, session, tenant) for tenant, agent, session in rows)


def _row_hash(op_id: str) -> bytes:
    """Return the hash that a row is found by."""
    if op_id.startswith(UNREADABLE):
        try:
            return bytes.fromhex(op_id.removeprefix(UNREADABLE))
        except ValueError:
            pass  # a caller's own op id
    return digest_of(op_id)
