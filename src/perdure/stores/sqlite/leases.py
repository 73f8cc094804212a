"""Leases, owners and the requests between them. Blocking; called within a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from perdure._lib.ids import first_beat
from perdure._lib.locks import Presence, PresenceReader
from perdure.records.keys import SessionKey
from perdure.records.manifest import lease_held
from perdure.store import HeartbeatRequests, HeldLease, LeaseState
from perdure.stores.sqlite.log import (
    DELETED,
    HELD,
    RELEASED,
    LogTail,
    append_epoch_record,
    find,
    find_or_create,
    held_row,
    save,
)
from perdure.stores.sqlite.sql import Q

if TYPE_CHECKING:
    import sqlite3


def register_owner(
    con: sqlite3.Connection, owner: str, host: str, pid: int, presence: Presence
) -> None:
    """Register this owner, and remove the dead ones."""
    me = {"owner": owner, "beat": first_beat(), "host": host, "pid": pid}
    con.execute(Q["put_owner"], me)
    for (other,) in con.execute(Q["owners"]).fetchall():
        if not isinstance(other, str):
            continue  # damaged: no owner has such an id
        if other != owner and presence.is_present(other) is False:
            remove_owner(con, other)


def remove_owner(con: sqlite3.Connection, owner: str) -> None:
    """Remove an owner, and the requests for it."""
    con.execute(Q["delete_owner"], {"owner": owner})
    con.execute(Q["delete_all_letters"], {"owner": owner})


def lease_state(
    con: sqlite3.Connection, key: SessionKey, presence: Presence | PresenceReader
) -> LeaseState | None:
    """Return who holds, or last held, a session; None if it never had a holder."""
    row = find(con, key)
    if row is None or not row.epoch:
        return None
    owner_row = con.execute(Q["owner"], {"owner": row.owner}).fetchone()
    beat, host, pid = owner_row or (0, "", 0)
    return LeaseState(
        epoch=row.epoch,
        owner=row.owner,
        released=row.state == RELEASED,
        alive=presence.is_present(row.owner),
        beat=beat,
        deleted=row.state == DELETED,
        host=host,
        pid=pid,
    )


def acquire(
    con: sqlite3.Connection, key: SessionKey, after: int, owner: str, at: float
) -> tuple[HeldLease, LogTail]:
    """Acquire a session with the next epoch, and append the epoch record.

    Raises:
        LeaseHeldError: The newest epoch is not ``after``.

    """
    row = find(con, key)
    newest = row.epoch if row else 0
    if newest != after:
        raise lease_held(key, after, newest)
    row = row or find_or_create(con, key, at)
    epoch = after + 1
    is_new = row.state == DELETED or not row.epoch
    if is_new:
        row = msgspec.structs.replace(row, born=epoch, low=1, head=0, crc=0)
        con.execute(Q["created_now"], {"id": row.id, "now": at})
    created = row.head == 0
    row = msgspec.structs.replace(row, epoch=epoch, owner=owner, state=HELD)
    row = append_epoch_record(con, row, msgspec.json.encode({"owner": owner, "at": at}), at)
    return HeldLease(key, epoch, row.head, created), LogTail(row)


def release(con: sqlite3.Connection, key: SessionKey, epoch: int, at: float) -> None:
    """Mark the session as released, if the epoch still holds it."""
    row = find(con, key)
    if row is not None and row.epoch == epoch and row.state == HELD:
        save(con, msgspec.structs.replace(row, state=RELEASED), at)


def renew_heartbeat(
    con: sqlite3.Connection, owner: str, last: int
) -> tuple[HeartbeatRequests, int]:
    """Renew a heartbeat; return the requests after number ``last``, and the newest number.

    A request is deleted only by the heartbeat after the one that reported it, so a cancelled
    heartbeat cannot drop one.
    """
    con.execute(Q["delete_letters"], {"owner": owner, "told": last})
    con.execute(Q["beat"], {"owner": owner})
    requests: dict[int, list[SessionKey]] = {0: [], 1: []}
    for number, mail, *key in con.execute(Q["letters"], {"owner": owner, "told": last}):
        tenant, agent, session = key
        requests[mail].append(SessionKey(agent, session, tenant))
        last = number
    beats = dict(con.execute(Q["beats"], {"owner": owner}))
    return HeartbeatRequests(tuple(requests[0]), tuple(requests[1]), beats), last


def request_handover(con: sqlite3.Connection, owner: str, key: SessionKey) -> None:
    """Leave a handover request for an owner, if it is registered."""
    row = find(con, key)
    if row is not None and con.execute(Q["owner"], {"owner": owner}).fetchone():
        con.execute(Q["send_letter"], {"owner": owner, "id": row.id, "mail": 0})


def delete(con: sqlite3.Connection, key: SessionKey, epoch: int, at: float) -> None:
    """Delete a session, as its holder; its epoch stays.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    row = held_row(con, key, epoch)
    of: dict[str, Any] = {"id": row.id}
    for what in ("log", "manifest", "documents", "inbox", "dead_letters"):
        con.execute(Q[f"delete_{what}"], of)
    save(con, msgspec.structs.replace(row, state=DELETED, head=0, low=1, crc=0), at)


def trim(
    con: sqlite3.Connection, key: SessionKey, epoch: int, below: int, at: float
) -> tuple[int, LogTail]:
    """Remove the rows whose records are all below *below*; return how many bytes they had.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    row = held_row(con, key, epoch)
    values = {"id": row.id, "below": below}
    _, last, freed = con.execute(Q["rows_below"], values).fetchone()
    if last is None:
        return 0, LogTail(row)
    con.execute(Q["trim"], values)
    row = msgspec.structs.replace(row, low=last + 1)
    save(con, row, at)
    return freed, LogTail(row)
