"""Leases, owners and the requests between them. Blocking; called within a transaction."""

from __future__ import annotations

import sqlite3

import msgspec
from msgspec.structs import replace

from perdure._lib.ids import first_beat
from perdure._lib.locks import Presence
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import epoch_payload
from perdure.records.records import EPOCH, Record, open_sealed, seal
from perdure.store import Draft, DraftInfo, HeartbeatRequests, Held, LeaseState, Taken, Terms
from perdure.stores.sqlite.documents import restore_data
from perdure.stores.sqlite.log import (
    COPY,
    DELETED,
    DRAFT,
    HELD,
    RELEASED,
    LogTail,
    SessionRow,
    append_epoch_record,
    damage_error,
    find,
    find_or_create,
    find_to_open,
    held_row,
    labels_of,
    save,
)
from perdure.stores.sqlite.sql import Q


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


def lease_state(con: sqlite3.Connection, key: SessionKey, presence: Presence) -> LeaseState | None:
    """Return who holds, or last held, a session; None if it never had a holder."""
    row = find(con, key)
    if row is None or not row.epoch:
        return None
    return _state_of(con, row, presence)


def _state_of(con: sqlite3.Connection, row: SessionRow, presence: Presence) -> LeaseState:
    alive, beat, host, pid = None, 0, "", 0
    if not row.state & (RELEASED | DELETED):  # else it makes no difference
        alive = presence.is_present(row.owner)
        owner_row = con.execute(Q["owner"], {"owner": row.owner}).fetchone()
        beat, host, pid = owner_row or (0, "", 0)
    return LeaseState(
        epoch=row.epoch,
        owner=row.owner,
        released=bool(row.state & RELEASED),
        alive=alive,
        beat=beat,
        deleted=row.is_hidden,
        host=host,
        pid=pid,
        draft=_draft_of(con, row),
    )


def _draft_of(con: sqlite3.Connection, row: SessionRow) -> Draft | None:
    """Return what a session is a copy of; None if it is none.

    Raises:
        CorruptRecordError: It cannot be read.

    """
    if not row.state & COPY:
        return None
    (data,) = con.execute(Q["draft"], {"id": row.id}).fetchone() or (None,)
    body = open_sealed(data) if isinstance(data, bytes) else None
    if body is None:
        raise damage_error(row.key, "what it is a copy of cannot be read")
    return decode(body, Draft)


def drafts(con: sqlite3.Connection, tenant: str) -> list[DraftInfo]:
    """List a tenant's drafts by key."""
    infos: list[DraftInfo] = []
    for tenant_, agent, session in con.execute(Q["drafts"], {"tenant": tenant}).fetchall():
        row = find(con, SessionKey(agent, session, tenant_))
        if row is not None and (draft := _draft_of(con, row)) is not None:
            infos.append(DraftInfo(row.key, row.epoch, draft, row.owner))
    return infos


def acquire(
    con: sqlite3.Connection,
    key: SessionKey,
    terms: Terms,
    owner: str,
    presence: Presence,
    at: float,
) -> tuple[Held | Taken, LogTail | None]:
    """Acquire a session with the next epoch, if the terms allow it, and append the epoch record.

    All that is read is read before the first write, which takes the write lock.

    Raises:
        CorruptRecordError: Its row is damaged.
        UnsupportedVersionError: Its manifest has a newer format.

    """
    # 1. Read everything, without the write lock.
    opened = find_to_open(con, key)
    row = opened[0]
    holder = None if row is None or not row.epoch else _state_of(con, row, presence)
    if not terms.allows(holder):
        return Held(holder), None
    found = restore_data(con, key, opened, terms.names)
    # 2. The first write takes the lock. If another process has written since, all of this runs
    # again.
    row, new = row or find_or_create(con, key, at), terms.beginning
    created, epoch = holder is None or holder.deleted, row.epoch + 1
    if created:
        # A draft that is taken over: nothing of it counts.
        if row.epoch and not row.is_deleted:
            _remove_content(con, row)
        row = replace(row, born=epoch, low=new.first, head=new.first - 1, state=HELD)
        row = replace(row, crc=row.seed)
        said = None if new.about is None else 0
        con.execute(
            Q["created_now"], {"id": row.id, "now": at, "turns": said, **labels_of(new.about)}
        )
        if new.draft is not None:
            row = replace(row, state=DRAFT | COPY)
            data = seal(msgspec.json.encode(new.draft))
            con.execute(Q["put_draft"], {"id": row.id, "data": data})
    row = replace(row, epoch=epoch, owner=owner, state=row.state & ~RELEASED)
    payload = epoch_payload(owner, new.base if created else None, at=at)
    row = append_epoch_record(con, row, payload, at)
    begun = Record(row.head, epoch, EPOCH, payload, end=True)
    records = None if found.records is None else (*found.records, begun)
    found = replace(found, records=records)
    taken = Taken(key, epoch, row.head, created, payload, found.with_low(row.low))
    return taken, LogTail.of(row)


Tails = dict[SessionKey, LogTail]
"""Ends of the logs of the held sessions. After a failed commit a tail matches no row."""


def publish(con: sqlite3.Connection, tails: Tails, key: SessionKey, epoch: int, at: float) -> None:
    """Make a draft a session, as its holder.

    Raises:
        LeaseLostError: The epoch is not the newest, or it was deleted.

    """
    row = held_row(con, key, epoch)
    row = replace(row, state=row.state & ~DRAFT)
    save(con, row, at)
    tails[key] = LogTail.of(row)


def release(con: sqlite3.Connection, tails: Tails, key: SessionKey, epoch: int, at: float) -> None:
    """Mark the session as released, if the epoch still holds it."""
    if (tail := tails.get(key)) is not None and tail.epoch == epoch:
        del tails[key]
    row = find(con, key)
    if row is not None and row.epoch == epoch and not row.state & (RELEASED | DELETED):
        save(con, replace(row, state=row.state | RELEASED), at)


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


def delete(
    con: sqlite3.Connection,
    tails: Tails,
    key: SessionKey,
    epoch: int,
    keep_posts: bool,  # noqa: FBT001  # passed on by position
    at: float,
) -> None:
    """Delete a session, as its holder; its epoch stays.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    row = held_row(con, key, epoch)
    if not row.state & DRAFT and not keep_posts:  # posts are to an id, and outlive a draft
        con.execute(Q["delete_inbox"], {"id": row.id})
    _remove_content(con, row)
    save(con, replace(row, state=DELETED, head=0, low=1, crc=0), at)
    tails.pop(key, None)


def _remove_content(con: sqlite3.Connection, row: SessionRow) -> None:
    for what in ("log", "manifest", "documents", "dead_letters", "draft", "listed"):
        con.execute(Q[f"delete_{what}"], {"id": row.id})


def trim(
    con: sqlite3.Connection, tails: Tails, key: SessionKey, epoch: int, below: int, at: float
) -> int:
    """Remove the rows whose records are all below *below*; return how many bytes they had.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    row = held_row(con, key, epoch)
    values = {"id": row.id, "below": below}
    _, last, freed = con.execute(Q["rows_below"], values).fetchone()
    if last is None:
        return 0
    con.execute(Q["trim"], values)
    row = replace(row, low=last + 1)
    save(con, row, at)
    tails[key] = LogTail.of(row)
    return int(freed)
