"""Leases, handover requests and the owners' heartbeats. Blocking.

An epoch is granted in the transaction that locks the session's row and appends the epoch record.
Nothing here compares clocks: a heartbeat is a counter.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from perdure._lib.ids import first_beat
from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import epoch_payload, lease_held, published_already
from perdure.records.records import EPOCH, Entry, encode, open_sealed, seal
from perdure.store import Draft, DraftInfo, HeartbeatRequests, LeaseState, Origin, Taken
from perdure.stores.postgres.connections import Connection, Statement, bigint, execute_all
from perdure.stores.postgres.log import SessionState, lease_lost_error, state_of
from perdure.stores.postgres.schema import Statements


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


class Acquire(NamedTuple):
    """A session to acquire, and its row as it was seen; None for no row."""

    key: SessionKey
    after: int
    owner: str
    seen: SessionState | None
    first: int = 1
    base: Origin | None = None
    draft: Draft | None = None


Acquired: TypeAlias = tuple[Taken, SessionState]


def acquire(
    connection: Connection, sql: Statements, wanted: Sequence[Acquire]
) -> list[Acquired | Exception]:
    """Acquire sessions with their next epochs, and append the epoch records.

    One round trip for the sessions that are still in the state that was seen.
    """
    acquired: list[Acquired | Exception | None] = [None] * len(wanted)
    # Rows are locked in one order: those that are new by their keys, then the others by their ids.
    fresh = [
        place
        for place, one in enumerate(wanted)
        if one.after == (0 if one.seen is None else one.seen.epoch) and not _needs_lock(one)
    ]
    fresh.sort(key=lambda place: _lock_order(wanted[place]))
    takes = [_Take(sql, wanted[place], wanted[place].seen) for place in fresh]
    found = execute_all(connection, [take.statement for take in takes]) if takes else []
    for place, take, rows in zip(fresh, takes, found, strict=True):
        acquired[place] = take.result(rows)
    return [
        _acquire_locked(connection, sql, one) if done is None else done
        for one, done in zip(wanted, acquired, strict=True)
    ]


def _needs_lock(wanted: Acquire) -> bool:
    """Return whether it has to be decided under the row's lock: a draft may just be published."""
    seen = wanted.seen
    if seen is None or not seen.epoch:
        return False
    return seen.draft is not None if seen.deleted else wanted.draft is not None


def _lock_order(wanted: Acquire) -> tuple[int, str, SessionKey]:
    return (wanted.seen.id if wanted.seen else 0), wanted.key.tenant, wanted.key


def _acquire_locked(
    connection: Connection, sql: Statements, wanted: Acquire
) -> Acquired | Exception:
    """Acquire a session under its row's lock; return the error if another one was faster."""
    key, after = wanted.key, wanted.after
    with connection.transaction():
        previous = lock_session(connection, sql, key)
        if previous.epoch != after:
            return lease_held(key, after, previous.epoch)
        if wanted.draft is not None and after and not previous.deleted:
            return published_already(key, after)
        if previous.deleted and previous.draft is not None:
            connection.execute(sql["wipe"], {"id": previous.id})
        take = _Take(sql, wanted, previous)
        query, values = take.statement
        acquired = take.result(connection.execute(query, values, binary=True).fetchall())
    if acquired is None:
        return StoreUnavailableError(f"the row of {key} changed under its lock: try again", key=key)
    return acquired


class _Take:
    """Acquires a session from a state of it."""

    def __init__(self, sql: Statements, wanted: Acquire, previous: SessionState | None) -> None:
        key, owner = wanted.key, wanted.owner
        self._created = created = previous is None or not previous.epoch or previous.deleted
        after, was, sum_ = previous[1:4] if previous is not None else (0, 0, 0)
        epoch, head, seed = after + 1, was + 1, sum_
        draft = None if previous is None else previous.draft
        if created:
            head, seed = wanted.first, 0
            draft = seal(msgspec.json.encode(wanted.draft)) if wanted.draft else None
        record = Entry(EPOCH, epoch_payload(owner, wanted.base if created else None))
        lines, crc = encode([record], first=head, epoch=epoch, crc=seed)
        is_draft = created and draft is not None
        self._key, self._record = key, record.payload
        self._state = SessionState(0, epoch, head, crc, head, 0, 0, is_draft, owner, draft=draft)
        values = {"owner": owner, "crc": bigint(crc), "lines": lines, "head": bigint(head)}
        values["draft"] = draft if created else None
        self.statement: Statement
        if previous is None:
            names = {"tenant": key.tenant, "agent": key.agent, "session": key.session}
            self.statement = sql["begin"], {**values, **names}
        else:
            place = {"id": previous.id, "after": after, "epoch": epoch, "was": was}
            sums = {"seed": seed, "sum": sum_}
            numbers = {name: bigint(number) for name, number in {**place, **sums}.items()}
            self.statement = sql["take"], {**values, **numbers, "created": created}

    def result(self, rows: Sequence[tuple[Any, ...]]) -> Acquired | None:
        """Return what was acquired; None if the session was in another state by then."""
        if not rows:
            return None
        number, generation, since = rows[0]
        state = self._state._replace(id=number, generation=generation, since=since)
        grant = Taken(self._key, state.epoch, state.head, self._created, self._record)
        return grant, state


Holder: TypeAlias = tuple[LeaseState | None, SessionState | None]
"""Who holds, or last held, a session, and its row; None if there is none."""


def holders(
    connection: Connection, sql: Statements, keys: Sequence[SessionKey]
) -> list[Holder | Exception]:
    """Return the holders of sessions."""
    names = [(key.tenant, key.agent, key.session) for key in keys]
    found = execute_all(connection, [(sql["holder"], values) for values in names])
    return [_holder(rows[0]) if rows else (None, None) for rows in found]


def _holder(row: tuple[Any, ...]) -> Holder:
    closed, beat, host, pid = row[11:]
    state = SessionState(*row[:11])
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
        draft=_draft_of(state.draft),
    )
    return lease, state


def _draft_of(sealed: bytes | None) -> Draft | None:
    """Return what a session is a copy of; None if it is none, or that cannot be read."""
    body = None if sealed is None else open_sealed(sealed)
    return None if body is None else decode(body, Draft)


def publish(connection: Connection, sql: Statements, key: SessionKey, epoch: int) -> None:
    """Make a draft a session, as its holder.

    Raises:
        LeaseLostError: The epoch is not the newest, or it was deleted.

    """
    values = (key.tenant, key.agent, key.session, epoch)
    if connection.execute(sql["publish"], values).fetchone() is None:
        raise lease_lost_error(key, epoch, state_of(connection, sql, key))


def drafts(connection: Connection, sql: Statements, tenant: str) -> list[DraftInfo]:
    """List a tenant's drafts by key.

    Raises:
        CorruptRecordError: What one is a copy of cannot be read.

    """
    infos: list[DraftInfo] = []
    for agent, session, epoch, sealed, owner in connection.execute(sql["drafts"], (tenant,)):
        key, draft = SessionKey(agent, session, tenant), _draft_of(sealed)
        if draft is None:
            raise CorruptRecordError(
                f"what {key} is a copy of cannot be read: open it, which removes what it has",
                key=str(key),
            )
        infos.append(DraftInfo(key, epoch, draft, owner))
    return infos


class Release(NamedTuple):
    """A lease to release."""

    row_id: int
    """0: not known."""
    key: SessionKey
    epoch: int


def release(
    connection: Connection, sql: Statements, leases: Sequence[Release]
) -> list[Exception | None]:
    """Mark sessions as released whose epochs still hold them."""
    ordered = sorted(leases)  # rows are always locked in the order of their ids
    names = [(one.key.tenant, one.key.agent, one.key.session, one.epoch) for one in ordered]
    execute_all(connection, [(sql["release"], values) for values in names])
    return [None] * len(leases)


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
