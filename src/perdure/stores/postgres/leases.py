"""Who writes a session, who asks for it, and the owners' heartbeats: the blocking part.

An epoch is given in the transaction that locks the session's row and appends the epoch
record. Nothing here compares clocks: a beat is a number that grows.
"""

from __future__ import annotations

import hashlib
import os
import socket
from typing import NamedTuple

import msgspec

from perdure._lib.ids import first_beat
from perdure.errors import LeaseHeldError, StoreUnavailableError
from perdure.records.frames import encode
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Entry
from perdure.store import HeartbeatRequests, HeldLease, LeaseState
from perdure.stores.postgres.connections import Connection
from perdure.stores.postgres.rows import OwnedSession, SessionState
from perdure.stores.postgres.statements import Statements


class HeartbeatReply(NamedTuple):
    """What a heartbeat brought, and the numbers by which to say that it was heard."""

    asked: HeartbeatRequests
    ids: tuple[int, ...]


def channel_of(schema: str, owner: str) -> str:
    """Return the channel on which an owner is told that there is news."""
    return "perdure_" + hashlib.sha256(f"{schema}\0{owner}".encode()).hexdigest()[:32]


def enter(connection: Connection, sql: Statements, owner: str) -> None:
    """Make an owner known."""
    connection.execute(
        sql["enter"],
        {
            "owner": owner,
            "first": first_beat(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        },
    )


def leave(connection: Connection, sql: Statements, owner: str) -> None:
    """Say that an owner has closed its store."""
    connection.execute(sql["leave"], (owner,))


def tenant_id(connection: Connection, sql: Statements, tenant: str) -> int:
    """Return a tenant's number, and give it one if it has none."""
    found = connection.execute(sql["tenant"], (tenant,)).fetchone()
    if found is None:
        connection.execute(sql["add_tenant"], (tenant,))
        found = connection.execute(sql["tenant"], (tenant,)).fetchone()
    if found is None:
        raise StoreUnavailableError("a tenant that was just added is not there: try again")
    return int(found[0])


def locked(connection: Connection, sql: Statements, key: SessionKey) -> SessionState:
    """Lock a session's row until the transaction ends; make it if there is none."""
    place = (tenant_id(connection, sql, key.tenant), key.agent, key.session)
    found = connection.execute(sql["lock_session"], place).fetchone()
    if found is None:
        connection.execute(sql["add_session"], place)
        found = connection.execute(sql["lock_session"], place).fetchone()
    if found is None:
        raise StoreUnavailableError("a session that was just added is not there: try again")
    return SessionState(*found)


def acquire(
    connection: Connection, sql: Statements, key: SessionKey, after: int, owner: str
) -> tuple[HeldLease, OwnedSession]:
    """Take a session with the next epoch, and append the epoch record."""
    with connection.transaction():
        before = locked(connection, sql, key)
        if before.epoch != after:
            message = (
                f"{key} is at epoch {before.epoch}, not {after}: look again who holds it, then "
                "ask for a handover or wait"
            )
            raise LeaseHeldError(message, key=key, epoch=before.epoch)
        epoch, head, created = after + 1, before.head + 1, before.head == 0
        record = Entry(EPOCH, msgspec.json.encode({"owner": owner}))
        lines, crc = encode([record], first=head, epoch=epoch, crc=before.crc)
        connection.execute(
            sql["take"],
            {
                "id": before.id,
                "epoch": epoch,
                "owner": owner,
                "head": head,
                "crc": crc,
                "seed": before.crc,
                "lines": lines,
                "life": epoch if created else before.life,
                "since": 1 if created else before.since,
            },
        )
    return HeldLease(key, epoch, head, created), OwnedSession(before.id, epoch, head, crc, owner)


def holder(connection: Connection, sql: Statements, key: SessionKey) -> LeaseState | None:
    """Say who has a session."""
    found = connection.execute(sql["holder"], (key.tenant, key.agent, key.session)).fetchone()
    if found is None:
        return None
    epoch, owner, released, deleted, closed, counted, host, pid = found
    return LeaseState(
        epoch=epoch,
        owner=owner,
        released=released,
        alive=False if closed else None,
        beat=counted or 0,
        deleted=deleted,
        host=host or "",
        pid=pid or 0,
    )


def release(connection: Connection, sql: Statements, key: SessionKey, epoch: int) -> None:
    """Say that an epoch's holder writes no more."""
    connection.execute(sql["release"], (key.tenant, key.agent, key.session, epoch))


def beat(
    connection: Connection, sql: Statements, owner: str, heard: tuple[int, ...]
) -> HeartbeatReply:
    """Renew a heartbeat; return what others want that was not heard yet, and their counters."""
    rows = connection.execute(
        sql["beat"],
        {
            "owner": owner,
            "first": first_beat(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "heard": list(heard),
        },
    ).fetchall()
    wanted: dict[bool, list[SessionKey]] = {True: [], False: []}
    beats: dict[str, int] = {}
    ids: list[int] = []
    for number, mail, name, agent, session, held in rows:
        if mail is None:
            beats[name] = number
            continue
        ids.append(number)
        if held:
            wanted[mail].append(SessionKey(agent, session, name))
    asked = HeartbeatRequests(tuple(wanted[False]), tuple(wanted[True]), beats)
    return HeartbeatReply(asked, tuple(ids))


def ask(connection: Connection, sql: Statements, key: SessionKey, owner: str) -> None:
    """Ask an owner for a session."""
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
