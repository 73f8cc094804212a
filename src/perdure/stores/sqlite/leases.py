"""Who may write a session, and what owners tell one another. Blocking; in transactions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from perdure._lib.ids import first_beat
from perdure._lib.locks import Presence, PresenceReader
from perdure.errors import LeaseHeldError
from perdure.records.keys import SessionKey
from perdure.store import HeartbeatRequests, HeldLease, LeaseState
from perdure.stores.sqlite.log import (
    DELETED,
    HELD,
    RELEASED,
    LogTail,
    find,
    held,
    make,
    opened,
    save,
)
from perdure.stores.sqlite.sql import Q

if TYPE_CHECKING:
    import sqlite3


def enter(con: sqlite3.Connection, owner: str, host: str, pid: int, presence: Presence) -> None:
    """Become known, and forget the owners that are gone."""
    me = {"owner": owner, "beat": first_beat(), "host": host, "pid": pid}
    con.execute(Q["put_owner"], me)
    for (other,) in con.execute(Q["owners"]).fetchall():
        if not isinstance(other, str):
            continue  # damaged: nobody has such an id, and nobody asks for it
        if other != owner and presence.is_present(other) is False:
            leave(con, other)


def leave(con: sqlite3.Connection, owner: str) -> None:
    """Forget an owner, and what it was to be told."""
    con.execute(Q["delete_owner"], {"owner": owner})
    con.execute(Q["delete_all_letters"], {"owner": owner})


def look(
    con: sqlite3.Connection, key: SessionKey, presence: Presence | PresenceReader
) -> LeaseState | None:
    """Say who has, or last had, a session."""
    row = find(con, key)
    if row is None or not row.epoch:
        return None
    known = con.execute(Q["owner"], {"owner": row.owner}).fetchone()
    beat, host, pid = known or (0, "", 0)
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
    """Take a session with the next epoch, and append the epoch's record.

    Raises:
        LeaseHeldError: The newest epoch is not ``after``.

    """
    row = find(con, key)
    newest = row.epoch if row else 0
    if newest != after:
        message = (
            f"{key} is at epoch {newest}, not {after}: look again who holds it, then ask for a "
            "handover or wait"
        )
        raise LeaseHeldError(message, key=str(key), epoch=newest)
    row = row or make(con, key, at)
    epoch = after + 1
    fresh = row.state == DELETED or not row.epoch
    if fresh:
        row = msgspec.structs.replace(row, born=epoch, low=1, head=0, crc=0)
        con.execute(Q["created_now"], {"id": row.id, "now": at})
    created = row.head == 0
    row = msgspec.structs.replace(row, epoch=epoch, owner=owner, state=HELD)
    row = opened(con, row, msgspec.json.encode({"owner": owner, "at": at}), at)
    return HeldLease(key, epoch, row.head, created), LogTail(row)


def release(con: sqlite3.Connection, key: SessionKey, epoch: int, at: float) -> None:
    """Say that the epoch's holder writes no more, if it still is the holder."""
    row = find(con, key)
    if row is not None and row.epoch == epoch and row.state == HELD:
        save(con, msgspec.structs.replace(row, state=RELEASED), at)


def beat(con: sqlite3.Connection, owner: str, told: int) -> tuple[HeartbeatRequests, int]:
    """Renew a heartbeat; return what it brings, and the number of the last letter.

    Its letters are those since ``told``.

    A letter goes only with the heartbeat after the one that told it: what a caller was not
    there to hear is not lost.
    """
    con.execute(Q["delete_letters"], {"owner": owner, "told": told})
    con.execute(Q["beat"], {"owner": owner})
    asked: dict[int, list[SessionKey]] = {0: [], 1: []}
    for number, mail, *key in con.execute(Q["letters"], {"owner": owner, "told": told}):
        tenant, agent, session = key
        asked[mail].append(SessionKey(agent, session, tenant))
        told = number
    beats = dict(con.execute(Q["beats"], {"owner": owner}))
    return HeartbeatRequests(tuple(asked[0]), tuple(asked[1]), beats), told


def ask(con: sqlite3.Connection, owner: str, key: SessionKey) -> None:
    """Leave a letter for an owner, unless it is gone."""
    row = find(con, key)
    if row is not None and con.execute(Q["owner"], {"owner": owner}).fetchone():
        con.execute(Q["send_letter"], {"owner": owner, "id": row.id, "mail": 0})


def delete(con: sqlite3.Connection, key: SessionKey, epoch: int, at: float) -> None:
    """End a session's life, as its holder; its epoch stays.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    row = held(con, key, epoch)
    of: dict[str, Any] = {"id": row.id}
    for what in ("log", "manifest", "documents", "inbox", "dead_letters"):
        con.execute(Q[f"delete_{what}"], of)
    save(con, msgspec.structs.replace(row, state=DELETED, head=0, low=1, crc=0), at)


def trim(
    con: sqlite3.Connection, key: SessionKey, epoch: int, below: int, at: float
) -> tuple[int, LogTail]:
    """Remove the rows that lie below a record; return how many bytes they had.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    row = held(con, key, epoch)
    where = {"id": row.id, "below": below}
    _, last, freed = con.execute(Q["rows_below"], where).fetchone()
    if last is None:
        return 0, LogTail(row)
    con.execute(Q["trim"], where)
    row = msgspec.structs.replace(row, low=last + 1)
    save(con, row, at)
    return freed, LogTail(row)
