"""The inbox's blocking part: items in the order of their posts, each op id once while it waits."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import msgspec

from perdure.codec import json
from perdure.codec.frames import open_sealed, seal
from perdure.errors import CorruptRecordError, TooLargeError
from perdure.model.keys import SessionKey
from perdure.store import Posted
from perdure.stores.postgres.connections import Connection
from perdure.stores.postgres.leases import channel_of, locked
from perdure.stores.postgres.log import lost, require, state_of
from perdure.stores.postgres.rows import MAX_RECORD_BYTES
from perdure.stores.postgres.statements import Statements

__all__ = ["post", "settle", "take", "waiting"]


def post(connection: Connection, sql: Statements, key: SessionKey, items: Sequence[Posted]) -> int:
    """Leave items for a session; see the port."""
    for item in items:
        if len(item.payload) > MAX_RECORD_BYTES:
            message = (
                f"an item for {key} has {len(item.payload)} bytes, the limit is "
                f"{MAX_RECORD_BYTES}: keep large values as blobs"
            )
            raise TooLargeError(message, key=str(key), size=len(item.payload))
    ops = [_hash(item.op_id) for item in items]
    sealed = [seal(msgspec.json.encode(item)) for item in items]
    with connection.transaction():
        # Under the session's lock: whoever takes it next finds the items, or is told of them.
        state = locked(connection, sql, key)
        found = connection.execute(sql["post"], (state.id, ops, sealed)).fetchone()
        new = int(found[0]) if found else 0
        if new and state.epoch and not state.released:
            channel = channel_of(sql.schema, state.owner)
            told = {"owner": state.owner, "id": state.id, "channel": channel}
            connection.execute(sql["tell"], told)
    return new


def take(
    connection: Connection, sql: Statements, key: SessionKey, epoch: int, limit: int
) -> list[Posted]:
    """Return what waits for a session; see the port."""
    state = state_of(connection, sql, key)
    if state is None or state.epoch != epoch or state.deleted:
        raise lost(key, epoch, state)
    rows = connection.execute(sql["waiting"], (state.id, max(limit, 0)), binary=True).fetchall()
    return [_opened(key, *row) for row in rows]


def _opened(key: SessionKey, number: int, op: bytes, item: bytes) -> Posted:
    body = open_sealed(item)
    if body is not None:
        posted = json.decode(body, Posted)
        if _hash(posted.op_id) == op:
            return posted
    message = (
        f"item {number} in the inbox of {key} is damaged: its checksum does not hold; it was left "
        "as it is, in the table inbox"
    )
    raise CorruptRecordError(message, key=str(key), item=number, table="inbox")


def settle(
    connection: Connection, sql: Statements, key: SessionKey, epoch: int, op_ids: Collection[str]
) -> None:
    """Remove items; see the port."""
    with connection.transaction():
        row_id = require(connection, sql, key, epoch)
        connection.execute(sql["settle"], (row_id, [_hash(op_id) for op_id in op_ids]))


def waiting(connection: Connection, sql: Statements) -> list[SessionKey]:
    """List the sessions for which something waits; see the port."""
    rows = connection.execute(sql["inboxes"])
    return sorted(SessionKey(agent, session, tenant) for tenant, agent, session in rows)


def _hash(op_id: str) -> bytes:
    return hashlib.sha256(op_id.encode("utf-8", "surrogatepass")).digest()
