"""The inbox's blocking part: items in the order of their posts, each op id once while it waits."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import msgspec

from perdure.errors import TooLargeError
from perdure.records import json
from perdure.records.frames import open_sealed, seal
from perdure.records.keys import SessionKey
from perdure.records.posts import UNREADABLE, decode_dead_letter, encode_dead_letter, oldest_first
from perdure.store import DeadLetter, InboxLimit, PendingItem
from perdure.stores.postgres.connections import Connection
from perdure.stores.postgres.leases import channel_of, locked
from perdure.stores.postgres.log import lost, require, state_of
from perdure.stores.postgres.rows import MAX_RECORD_BYTES
from perdure.stores.postgres.statements import Statements


def post(
    connection: Connection,
    sql: Statements,
    key: SessionKey,
    items: Sequence[PendingItem],
    limit: InboxLimit | None,
) -> int:
    """Leave items for a session."""
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
        given = (state.id, ops, sealed, state.id, limit is not None)
        found = connection.execute(sql["post"], given).fetchone()
        new, added, count, size = map(int, found or (0, 0, 0, 0))
        if limit is not None:  # too many: the transaction is given up
            limit.require_room(key, waiting=count, size=size, new=new, added=added)
        if new and state.epoch and not state.released:
            channel = channel_of(sql.schema, state.owner)
            told = {"owner": state.owner, "id": state.id, "channel": channel}
            connection.execute(sql["tell"], told)
    return new


def take(
    connection: Connection, sql: Statements, key: SessionKey, epoch: int, limit: int
) -> list[PendingItem]:
    """Return what waits for a session."""
    state = state_of(connection, sql, key)
    if state is None and not epoch:
        return []
    if state is None or state.epoch != epoch:
        raise lost(key, epoch, state)
    rows = connection.execute(sql["waiting"], (state.id, max(limit, 0)), binary=True).fetchall()
    items = [_opened(*row) for row in rows]
    return [_named(item, items) if item.op_id.startswith(UNREADABLE) else item for item in items]


def _opened(number: int, op: bytes, item: bytes) -> PendingItem:
    body = open_sealed(item)
    if body is not None:
        posted = json.decode(body, PendingItem)
        if _hash(posted.op_id) == op:
            return posted
    damage = f"item {number} of the table inbox does not fit its checksum"
    return PendingItem(f"{UNREADABLE}{op.hex()}", "", item, 0.0, damage)


def _named(damaged: PendingItem, page: Sequence[PendingItem]) -> PendingItem:
    """Return a damaged item by its op id if its post's other items tell it.

    Half a post is not to be delivered, and all that is left of this one's id is its hash.
    """
    for item in page:
        for place in range(len(page) + 1):
            op_id = f"{item.key}/{place}"
            if _unreadable(op_id) == damaged.op_id:
                return msgspec.structs.replace(damaged, op_id=op_id)
    return damaged


def _unreadable(op_id: str) -> str:
    return f"{UNREADABLE}{_hash(op_id).hex()}"


def settle(
    connection: Connection, sql: Statements, key: SessionKey, epoch: int, op_ids: Collection[str]
) -> None:
    """Remove items."""
    with connection.transaction():
        row_id = require(connection, sql, key, epoch)
        connection.execute(sql["settle"], (row_id, [_op(op_id) for op_id in op_ids]))


def reject(
    connection: Connection,
    sql: Statements,
    key: SessionKey,
    epoch: int,
    letters: Sequence[DeadLetter],
) -> None:
    """Move items to the dead letters."""
    newest = {_op(one.item.op_id): encode_dead_letter(key, one) for one in letters}
    with connection.transaction():
        row_id = require(connection, sql, key, epoch)
        values = {"id": row_id, "ops": list(newest), "letters": list(newest.values())}
        connection.execute(sql["reject"], values)


def dead_letters(connection: Connection, sql: Statements, key: SessionKey) -> list[DeadLetter]:
    """Return a session's dead letters."""
    place = (key.tenant, key.agent, key.session)
    rows = connection.execute(sql["dead_letters"], place, binary=True).fetchall()
    return oldest_first(
        [decode_dead_letter(key, f"{UNREADABLE}{op.hex()}", letter) for op, letter in rows]
    )


def drop_dead_letters(
    connection: Connection, sql: Statements, key: SessionKey, op_ids: Collection[str]
) -> int:
    """Remove dead letters, and return how many there were."""
    ops = [_op(op_id) for op_id in op_ids]
    place = (key.tenant, key.agent, key.session, ops)
    found = connection.execute(sql["drop_dead_letters"], place).fetchone()
    return int(found[0]) if found else 0


def waiting(connection: Connection, sql: Statements, dead_letters: bool) -> list[SessionKey]:  # noqa: FBT001  # passed on by position
    """List the sessions for which something waits."""
    rows = connection.execute(sql["with_dead_letters" if dead_letters else "inboxes"])
    return sorted(SessionKey(agent, session, tenant) for tenant, agent, session in rows)


def _op(op_id: str) -> bytes:
    """Return what a row is found by."""
    if op_id.startswith(UNREADABLE):
        try:
            return bytes.fromhex(op_id.removeprefix(UNREADABLE))
        except ValueError:
            pass  # somebody's own op id
    return _hash(op_id)


def _hash(op_id: str) -> bytes:
    return hashlib.sha256(op_id.encode("utf-8", "surrogatepass")).digest()
