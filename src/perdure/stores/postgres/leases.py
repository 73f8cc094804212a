"""Leases, handover requests and the owners' heartbeats. Blocking.

An epoch is granted in the statement that changes the session's row and appends the epoch record.
Nothing here compares clocks: a heartbeat is a counter.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from perdure._lib.ids import first_beat
from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import epoch_payload
from perdure.records.records import EPOCH, Entry, Record, encode, open_sealed, seal
from perdure.store import (
    Documents,
    Draft,
    DraftInfo,
    HeartbeatRequests,
    Held,
    LeaseState,
    RestoreData,
    Taken,
    Terms,
)
from perdure.stores.postgres.connections import Connection, Statement, bigint, execute_all
from perdure.stores.postgres.documents import opened, opening_query
from perdure.stores.postgres.log import (
    UNKNOWN,
    SessionState,
    label_values,
    lease_lost_error,
    lock_session,
    named,
    state_of,
)
from perdure.stores.postgres.schema import Statements


def channel_of(schema: str, owner: str) -> str:
    """Return the channel on which an owner is notified."""
    return "perdure_" + hashlib.sha256(f"{schema}\0{owner}".encode()).hexdigest()[:32]


def register_owner(connection: Connection, sql: Statements, owner: str) -> None:
    """Register an owner."""
    connection.execute(sql["enter"], _process(owner))


def _process(owner: str) -> dict[str, object]:
    names = {"owner": owner, "host": socket.gethostname()}
    return {**names, "first": first_beat(), "pid": os.getpid()}


def unregister_owner(connection: Connection, sql: Statements, owner: str) -> None:
    """Record that an owner has closed its store."""
    connection.execute(sql["leave"], (owner,))


Holder: TypeAlias = tuple[LeaseState | None, SessionState | None]
"""The current or last holder of a session, and its row; None if there is none."""


def holders(
    connection: Connection, sql: Statements, keys: Sequence[SessionKey]
) -> list[LeaseState | Exception | None]:
    """Return who holds, or last held, sessions."""
    found = execute_all(connection, [(sql["holder"], named(key)) for key in keys])
    return [_holder(rows)[0] for rows in found]


def _holder(rows: Sequence[tuple[Any, ...]]) -> Holder:
    if not rows:
        return None, None
    (row,) = rows
    closed, beat, host, pid = row[11:15]
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


Acquired: TypeAlias = tuple[Taken, SessionState]


class Acquire(msgspec.Struct, eq=False):
    """A session that a caller wants, and the answer as soon as there is one."""

    key: SessionKey
    terms: Terms
    answer: Held | Acquired | None = None


def acquire(
    connection: Connection, sql: Statements, wanted: Sequence[Acquire]
) -> list[Held | Acquired | Exception]:
    """Take sessions with their next epochs, append the epoch records, and read for the restores.

    One round trip for those that never were or may not be taken, two for the others.
    """
    # Some have their answer already if the server refused others of this call, and it is repeated.
    pending = [one for one in wanted if one.answer is None]
    # 1. See who has them; those without a row begin. Rows are inserted in the order of their keys.
    pending.sort(key=lambda one: (one.key.tenant, one.key))
    seen = execute_all(connection, [_look(sql, one) for one in pending])
    takes: list[_Epoch] = []
    for one, rows in zip(pending, seen, strict=True):
        holder, state = _holder(rows)
        if state is not None and rows[0][15]:
            one.answer = _Epoch(one).begun(state)
        elif not one.terms.allows(holder):
            one.answer = Held(holder)
        elif state is not None and not state.is_draft:
            takes.append(_Epoch(one, state))
    # 2. Take them from the state that was seen, in the order of their ids. What is read after
    # that, in the same transaction, no other process can change any more.
    takes.sort(key=lambda epoch: epoch.state.id)
    found = execute_all(connection, [each for epoch in takes for each in epoch.take(sql)])
    for epoch, taken, read in zip(takes, found[::2], found[1::2], strict=True):
        epoch.wanted.answer = epoch.taken(taken, read)
    # 3. Under the row's lock: another process was faster; or a draft goes, perhaps just published.
    for one in pending:
        one.answer = one.answer or _acquire_locked(connection, sql, one)
    return [one.answer for one in wanted if one.answer is not None]


def _look(sql: Statements, wanted: Acquire) -> Statement:
    """Return the statement that reads a holder, and begins the session if it may and has no row."""
    names = named(wanted.key)
    if not wanted.terms.allows(None):
        return sql["holder"], names
    return sql["begin"], {**names, **_Epoch(wanted).values}


def _acquire_locked(connection: Connection, sql: Statements, wanted: Acquire) -> Held | Acquired:
    key = wanted.key
    with connection.transaction():
        state = lock_session(connection, sql, key)
        rows = connection.execute(sql["holder"], named(key), binary=True).fetchall()
        holder, _ = _holder(rows)
        if not wanted.terms.allows(holder):
            return Held(holder)
        if state.is_draft:
            connection.execute(sql["wipe"], {"id": state.id})
        epoch = _Epoch(wanted, state)
        acquired = epoch.taken(*execute_all(connection, epoch.take(sql)))
    if acquired is None:
        raise StoreUnavailableError(f"the row of {key} changed under its lock: try again", key=key)
    return acquired


class _Epoch:
    """The next epoch of a session in a state of it."""

    def __init__(self, wanted: Acquire, was: SessionState = UNKNOWN) -> None:
        self.wanted = wanted
        self._was = was
        self._created = created = not was.epoch or was.deleted
        new = wanted.terms.beginning
        epoch, head, seed, draft = was.epoch + 1, was.head + 1, was.crc, was.draft
        if created:
            head, seed = new.first, 0
            draft = seal(msgspec.json.encode(new.draft)) if new.draft else None
        self._seed = seed
        self._payload = payload = epoch_payload(wanted.terms.me, new.base if created else None)
        self._lines, crc = encode([Entry(EPOCH, payload)], first=head, epoch=epoch, crc=seed)
        is_draft = created and draft is not None
        self.state = SessionState(
            was.id, epoch, head, crc, head, 0, 0, is_draft, wanted.terms.me, draft=draft
        )

    @property
    def values(self) -> dict[str, object]:
        """The values of a row."""
        state, about = self.state, self.wanted.terms.beginning.about
        labels = label_values(about)
        return {
            "owner": state.owner,
            "head": bigint(state.head),
            "crc": bigint(state.crc),
            "draft": state.draft if self._created else None,
            "lines": self._lines,
            "turns": None if about is None else bigint(0),
            "belongs": labels["owner"],
            "title": labels["title"],
            "tags": labels["tags"],
        }

    def take(self, sql: Statements) -> tuple[Statement, Statement]:
        """Return the statements that begin the epoch, and read what a restore needs."""
        was = self._was
        numbers = {"id": was.id, "after": was.epoch, "was": was.head, "sum": was.crc}
        numbers |= {"epoch": self.state.epoch, "seed": self._seed}
        places = {name: bigint(number) for name, number in numbers.items()}
        take = sql["take"], {**self.values, **places, "created": self._created}
        return take, opening_query(sql, [self.wanted.key], self.wanted.terms.names)

    def taken(
        self, taken: Sequence[tuple[Any, ...]], read: Sequence[tuple[Any, ...]]
    ) -> Acquired | None:
        """Return what was acquired; None if the session was in another state by then."""
        if not taken:
            return None
        number, born, low = taken[0]
        state = self.state._replace(id=number, born=born, low=low)
        found = opened(self.wanted.key, self.wanted.terms.names, state, read)
        return self._acquired(state, found)

    def begun(self, state: SessionState) -> Acquired:
        """Return a session that has begun: all that it has is known."""
        record = Record(state.head, state.epoch, EPOCH, self._payload, end=True)
        found = RestoreData(Documents(), records=(record,), may_have_items=False)
        return self._acquired(state, found)

    def _acquired(self, state: SessionState, found: RestoreData | None) -> Acquired:
        key, created = self.wanted.key, self._created
        taken = Taken(key, state.epoch, state.head, created, self._payload, found)
        return taken, state


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


def release(
    connection: Connection, sql: Statements, leases: Sequence[tuple[int, SessionKey, int]]
) -> list[None]:
    """Mark sessions as released whose epochs still hold them.

    *leases* are the ids of their rows, 0 if not known, their keys and the epochs.
    """
    ordered = sorted(leases)  # rows are always locked in the order of their ids
    names = [(key.tenant, key.agent, key.session, epoch) for _, key, epoch in ordered]
    execute_all(connection, [(sql["release"], values) for values in names])
    return [None] * len(leases)


def renew_heartbeat(
    connection: Connection, sql: Statements, owner: str, reported: tuple[int, ...]
) -> tuple[HeartbeatRequests, tuple[int, ...]]:
    """Renew a heartbeat; return requests not reported yet, and their ids for the next one."""
    values = {**_process(owner), "heard": list(reported)}
    rows = connection.execute(sql["beat"], values).fetchall()
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
    return HeartbeatRequests(tuple(by_kind[False]), tuple(by_kind[True]), beats), tuple(ids)


def request_handover(connection: Connection, sql: Statements, key: SessionKey, owner: str) -> None:
    """Ask an owner to hand over a session."""
    values = {**named(key), "owner": owner, "channel": channel_of(sql.schema, owner)}
    connection.execute(sql["ask"], values)
