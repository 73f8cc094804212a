"""Leases, handover requests and the owners' heartbeats. Blocking.

An epoch is granted in the transaction that locks the session's row and appends the epoch record.
Nothing here compares clocks: a heartbeat is a counter.
"""

from __future__ import annotations

import hashlib
import os
import socket
from typing import NamedTuple

import msgspec

from perdure._lib.ids import first_beat
from perdure.errors import LeaseHeldError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Entry, encode
from perdure.store import HeartbeatRequests, HeldLease, LeaseState
from perdure.stores.postgres.connections import Connection, bigint
from perdure.stores.postgres.rows import SessionState
from perdure.stores.postgres.statements import Statements


class HeartbeatReply(NamedTuple):
    """The requests that a heartbeat returned, and their ids for the next one to acknowledge."""

    requests: HeartbeatRequests
    ids: tuple[int, ...]


def channel_of(schema: str, owner: str) -> str:
    """Return the channel on which an owner is notified."""
    return "perdure_" + hashlib.sha256(f"{schema}\0{owner}".encode()).hexdigest()[:32]


def register_owner(connection: Connection, sql: Statements, owner: str) -> None:
    """Register an owner."""
    connection.execute(
        sql["enter"],
        {
            "owner": owner,
            "first": first_beat(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        },
    )


def unregister_owner(connection: Connection, sql: Statements, owner: str) -> None:
    """Record that an owner has closed its store."""
    connection.execute(sql["leave"], (owner,))


def tenant_id(connection: Connection, sql: Statements, tenant: str) -> int:
    """Return a tenant's number, assigned on first use."""
    row = connection.execute(sql["tenant"], (tenant,)).fetchone()
    if row is None:
        connection.execute(sql["add_tenant"], (tenant,))
        row = connection.execute(sql["tenant"], (tenant,)).fetchone()
    if row is None:
        raise StoreUnavailableError("a tenant that was just added is missing: try again")
    return int(row[0])


def lock_session(connection: Connection, sql: Statements, key: SessionKey) -> SessionState:
    """Lock a session's row until the transaction ends; insert it if it is missing."""
    values = (tenant_id(connection, sql, key.tenant), key.agent, key.session)
    row = connection.execute(sql["lock_session"], values).fetchone()
    if row is None:
        connection.execute(sql["add_session"], values)
        row = connection.execute(sql["lock_session"], values).fetchone()
    if row is None:
        raise StoreUnavailableError("a session that was just added is missing: try again")
    return SessionState(*row)


def acquire(
    connection: Connection,
    sql: Statements,
    key: SessionKey,
    after: int,
    owner: str,
    seen: SessionState | None,
) -> tuple[HeldLease, SessionState]:
    """Acquire a session with the next epoch, and append the epoch record.

    One statement, if the session is still in the state that was *seen*; None for no row.
    """
    if after == (0 if seen is None else seen.epoch):
        acquired = _take(connection, sql, key, owner, seen)
        if acquired is not None:
            return acquired
    with connection.transaction():
        previous = lock_session(connection, sql, key)
        if previous.epoch != after:
            message = (
                f"{key} is at epoch {previous.epoch}, not {after}: read its holder again, then "
                "request a handover or wait"
            )
            raise LeaseHeldError(message, key=key, epoch=previous.epoch)
        acquired = _take(connection, sql, key, owner, previous)
    if acquired is None:
        raise StoreUnavailableError("a session's row changed under its lock: try again", key=key)
    return acquired


def _take(
    connection: Connection,
    sql: Statements,
    key: SessionKey,
    owner: str,
    previous: SessionState | None,
) -> tuple[HeldLease, SessionState] | None:
    """Acquire a session from a state of it; None if it is in another one by now."""
    after, seed = (0, 0) if previous is None else (previous.epoch, previous.crc)
    epoch, head = after + 1, 1 if previous is None else previous.head + 1
    record = Entry(EPOCH, msgspec.json.encode({"owner": owner}))
    lines, crc = encode([record], first=head, epoch=epoch, crc=seed)
    values = {"owner": owner, "crc": bigint(crc), "lines": lines}
    if previous is None:
        names = {"tenant": key.tenant, "agent": key.agent, "session": key.session}
        cursor = connection.execute(sql["begin"], {**values, **names})
    else:
        place = {"id": previous.id, "after": after, "epoch": epoch, "head": head, "seed": seed}
        numbers = {name: bigint(number) for name, number in place.items()}
        cursor = connection.execute(sql["take"], {**values, **numbers, "created": head == 1})
    row = cursor.fetchone()
    if row is None:
        return None
    number, generation, since = row
    state = SessionState(number, epoch, head, crc, head, generation, since, False, owner)
    return HeldLease(key, epoch, head, head == 1), state


def holder(
    connection: Connection, sql: Statements, key: SessionKey
) -> tuple[LeaseState | None, SessionState | None]:
    """Return who holds, or last held, a session, and its row; None if there is none."""
    row = connection.execute(sql["holder"], (key.tenant, key.agent, key.session)).fetchone()
    if row is None:
        return None, None
    closed, beat, host, pid = row[10:]
    state = SessionState(*row[:10])
    if not state.epoch:  # something was posted to it
        return None, state
    lease = LeaseState(
        epoch=state.epoch,
        owner=state.owner,
        released=state.released,
        alive=False if closed else None,
        beat=beat or 0,
        deleted=state.deleted,
        host=host or "",
        pid=pid or 0,
    )
    return lease, state


def release(connection: Connection, sql: Statements, key: SessionKey, epoch: int) -> None:
    """Mark a session as released, if the epoch still holds it."""
    connection.execute(sql["release"], (key.tenant, key.agent, key.session, epoch))


def renew_heartbeat(
    connection: Connection, sql: Statements, owner: str, reported: tuple[int, ...]
) -> HeartbeatReply:
    """Renew a heartbeat; return requests not yet reported, and the other owners' counters."""
    rows = connection.execute(
        sql["beat"],
        {
            "owner": owner,
            "first": first_beat(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "heard": list(reported),
        },
    ).fetchall()
    by_kind: dict[bool, list[SessionKey]] = {True: [], False: []}
    beats: dict[str, int] = {}
    ids: list[int] = []
    for number, mail, name, agent, session, is_held in rows:
        if mail is None:
            beats[name] = number
            continue
        ids.append(number)
        if is_held:
            by_kind[mail].append(SessionKey(agent, session, name))
    requests = HeartbeatRequests(tuple(by_kind[False]), tuple(by_kind[True]), beats)
    return HeartbeatReply(requests, tuple(ids))


def request_handover(connection: Connection, sql: Statements, key: SessionKey, owner: str) -> None:
    """Ask an owner to hand over a session."""
    connection.execute(
        sql["ask"],
        {
            "owner": owner,
            "tenant": key.tenant,
            "agent": key.agent,
            "session": key.session,
            "channel": channel_of(sql.schema, owner),
        },
    )
