"""Log of a session: appends of many sessions as one statement, and reads in pages. Blocking.

The statement moves each session's head only from where the sender expects it, under the sender's
epoch: so it fences, and a batch that is sent again finds the head moved. Sessions whose head moved
are OK; each of the others is looked up, and its log compared with the batch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import msgspec

from perdure.errors import (
    CorruptRecordError,
    LeaseLostError,
    NotStorableError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey
from perdure.records.manifest import lease_lost, new_entries, refusal_of
from perdure.records.records import Entry, Record, encode
from perdure.records.rows import CommitRow, LogExtent, LogPart, LogReader, in_parts, rest_of_log
from perdure.store import About, Batch, Outcome, Status
from perdure.stores.postgres.connections import (
    Connection,
    Connections,
    Statement,
    bigint,
    execute_all,
)
from perdure.stores.postgres.errors import is_broken, outcome_of
from perdure.stores.postgres.schema import Statements, bigints, byteas


class SessionState(NamedTuple):
    """A session's row: its lease, and where its log ends."""

    id: int
    epoch: int
    head: int
    crc: int
    epoch_start: int
    born: int
    low: int
    deleted: bool
    owner: str = ""
    released: bool = False
    draft: bytes | None = None
    """The session that it is a copy of, sealed."""

    @property
    def log(self) -> LogExtent:
        """Its log, as who reads the rows has to know it."""
        return LogExtent(self.id, self.born, self.low, self.head, self.crc)

    @property
    def is_draft(self) -> bool:
        """True if it is a draft that is not published."""
        return self.deleted and self.draft is not None

    @property
    def is_over(self) -> bool:
        """True if it was deleted, and is not hidden as a draft only."""
        return self.deleted and self.draft is None


class OwnedSession(msgspec.Struct):
    """A held session: where this store expects its log to end, which each append checks."""

    id: int
    epoch: int
    head: int
    crc: int
    owner: str


HeldSessionsByKey: TypeAlias = dict[SessionKey, OwnedSession]


# Appends and reads


ROUNDS = 4
"""Attempts at a batch whose session changes meanwhile, before the caller backs off."""
STATEMENT_BYTES = 32 * 1024 * 1024
PAGE_BYTES = 4 * 1024 * 1024
PAGE_ROWS = 256
_TABLE = "commits"


class EncodedBatch(NamedTuple):
    """A batch, or its remaining records, encoded for where its log is expected to end."""

    place: int
    session: OwnedSession
    lines: bytes
    last: int
    crc: int
    turns: int | None
    about: About | None


UNKNOWN = SessionState(0, 0, 0, 0, 0, 0, 1, False)
"""The state of a session whose row is not read yet."""


def state_of(connection: Connection, sql: Statements, key: SessionKey) -> SessionState | None:
    """Return a session's row, None if it has none."""
    row = connection.execute(sql["state"], named(key), binary=True).fetchone()
    return SessionState(*row) if row else None


def named(key: SessionKey) -> dict[str, object]:
    """Return the values by which a statement finds a session."""
    return {"tenant": key.tenant, "agent": key.agent, "session": key.session}


def digest_of(name: str) -> bytes:
    """Return what a row is found by whose name may be any text."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()


def tenant_id(connection: Connection, sql: Statements, tenant: str) -> int:
    """Return a tenant's number, assigned on first use."""
    return int(_found_or_added(connection, sql["tenant"], sql["add_tenant"], (tenant,))[0])


def lock_session(connection: Connection, sql: Statements, key: SessionKey) -> SessionState:
    """Lock a session's row until the transaction ends; insert it if it is missing."""
    values = (tenant_id(connection, sql, key.tenant), key.agent, key.session)
    row = _found_or_added(connection, sql["lock_session"], sql["add_session"], values)
    return SessionState(*row)


def _found_or_added(
    connection: Connection, find: bytes, add: bytes, values: Sequence[object]
) -> tuple[Any, ...]:
    row = connection.execute(find, values).fetchone()
    if row is None:
        connection.execute(add, values)
        row = connection.execute(find, values).fetchone()
    if row is None:
        raise StoreUnavailableError("a row that was just added is missing: try again")
    return row


def lease_lost_error(key: SessionKey, epoch: int, state: SessionState | None) -> LeaseLostError:
    """Return the error for an epoch that is not the newest."""
    deleted = state is not None and state.is_over
    return lease_lost(key, epoch, state.epoch if state else 0, deleted=deleted)


def require_held(connection: Connection, sql: Statements, key: SessionKey, epoch: int) -> int:
    """Lock a session for its holder until the transaction ends, and return its row's id.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    values = (key.tenant, key.agent, key.session, epoch)
    row = connection.execute(sql["lock_epoch"], values).fetchone()
    if row is None:
        raise lease_lost_error(key, epoch, state_of(connection, sql, key))
    return int(row[0])


@final
class AppendMany:
    """The state of one ``append_many``."""

    def __init__(
        self, sql: Statements, held_sessions: HeldSessionsByKey, batches: Sequence[Batch]
    ) -> None:
        self._sql = sql
        self._held_sessions = held_sessions
        self._batches = batches
        self.size: int = sum([len(entry.payload) for one in batches for entry in one.records])
        """Bytes of payload."""
        self.outcomes: list[Outcome | None] = [None] * len(batches)

    def encode_ready(self) -> tuple[list[EncodedBatch], list[int]]:
        """Encode batches that follow a log's known end; return them, and the others' places.

        Those that have an outcome are neither.
        """
        ready: list[EncodedBatch] = []
        unknown: list[int] = []
        keys = set()
        for index, batch in enumerate(self._batches):
            refusal = refusal_of(batch)
            session = self._held_sessions.get(batch.key)
            if self.outcomes[index] is not None:
                continue
            if refusal is not None:
                self.outcomes[index] = Outcome(Status.PERMANENT, refusal)
            elif (
                session is None
                or (session.epoch, session.head + 1) != (batch.epoch, batch.first)
                or not batch.records
                or batch.key in keys
            ):
                unknown.append(index)
            else:
                keys.add(batch.key)
                self._add(ready, index, session, batch.records)
        return ready, unknown

    def _add(
        self, ready: list[EncodedBatch], index: int, session: OwnedSession, records: Sequence[Entry]
    ) -> None:
        first = session.head + 1
        try:
            lines, crc = encode(records, first=first, epoch=session.epoch, crc=session.crc)
        except NotStorableError as error:
            self.outcomes[index] = Outcome(Status.PERMANENT, error)
            return
        last = first + len(records) - 1
        batch = self._batches[index]
        ready.append(EncodedBatch(index, session, lines, last, crc, batch.turns, batch.about))

    def send(self, connection: Connection, ready: list[EncodedBatch]) -> list[int]:
        """Append encoded batches, in parts; return the places of those that were not appended."""
        # Rows are always locked in the order of their ids, or two statements could wait for each
        # other.
        ready.sort(key=lambda batch: batch.session.id)
        unmoved: list[int] = []
        for part in in_parts(ready, lambda batch: len(batch.lines), STATEMENT_BYTES):
            unmoved += self.mark_appended(part, self._sql.append.run(connection, arrays(part)))
        return unmoved

    def mark_appended(self, part: list[EncodedBatch], moved: set[int]) -> list[int]:
        """Record what was appended; return the places of the others."""
        unmoved: list[int] = []
        for batch in part:
            if batch.session.id in moved:
                batch.session.head, batch.session.crc = batch.last, batch.crc
                self.outcomes[batch.place] = Outcome(Status.OK, None, len(batch.lines))
            else:
                unmoved.append(batch.place)
        return unmoved

    def look_up(self, connection: Connection, index: int) -> list[EncodedBatch]:
        """Read a batch's session again; return the remaining records, encoded."""
        batch = self._batches[index]
        state = state_of(connection, self._sql, batch.key)
        known = self._held_sessions.get(batch.key)
        # On a server restored from a backup, another owner may have been given the same epoch.
        is_other_owner = known is not None and state is not None and known.owner != state.owner
        if state is None or state.epoch != batch.epoch or state.is_over or is_other_owner:
            self._held_sessions.pop(batch.key, None)
            error = lease_lost_error(batch.key, batch.epoch, state)
            self.outcomes[index] = Outcome(Status.CONFLICT, error)
            return []
        session = OwnedSession(state.id, state.epoch, state.head, state.crc, state.owner)
        self._held_sessions[batch.key] = session
        remaining = self._remaining(connection, batch, state)
        if isinstance(remaining, Exception):
            self.outcomes[index] = Outcome(Status.PERMANENT, remaining)
        elif not remaining:
            self.outcomes[index] = Outcome(Status.OK)
        else:
            ready: list[EncodedBatch] = []
            self._add(ready, index, session, remaining)
            return ready
        return []

    def _remaining(
        self, connection: Connection, batch: Batch, state: SessionState
    ) -> tuple[Entry, ...] | Exception:
        logged: list[Entry] = []
        try:
            if state.low <= batch.first <= state.head:
                part = LogPart(batch.first - 1, batch.first + len(batch.records))
                reader = LogReader(batch.key, state.log, part, table=_TABLE)
                while not reader.is_done:
                    page = read_page(connection, self._sql, reader, PAGE_ROWS)
                    logged += [Entry(record.kind, record.payload, record.end) for record in page]
        except CorruptRecordError as error:
            return error
        return new_entries(batch, state.head, max(state.epoch_start, state.low - 1), logged)

    def run(self, connections: Connections) -> None:
        """Append what has no outcome yet, in a thread. Every error becomes an outcome."""
        changed = "others wrote to these sessions meanwhile: they are sent again"
        try:
            with (
                connections.borrow() as connection,
                self.answering(connections, connection),
            ):
                self._send_and_look_up(connection)
        except Exception as error:  # noqa: BLE001  # append_many raises nothing
            is_unsent = isinstance(error, StoreUnavailableError)
            self.fill_outcomes(Outcome(Status.TRANSIENT if is_unsent else Status.IN_DOUBT, error))
        self.fill_outcomes(Outcome(Status.TRANSIENT, StoreUnavailableError(changed)))

    def _send_and_look_up(self, connection: Connection) -> None:
        """Send, look up what was not appended, and send its remaining records."""
        ready, unknown = self.encode_ready()
        for _ in range(ROUNDS):
            unknown += self.send(connection, ready) if ready else []
            if not unknown:
                return
            ready, repeated = [], []
            ids: set[int] = set()
            for index in unknown:
                encoded = self.look_up(connection, index)
                # A session's batches are sent one by one.
                if encoded and encoded[0].session.id in ids:
                    repeated.append(index)
                    continue
                ids.update(batch.session.id for batch in encoded)
                ready += encoded
            unknown = repeated

    @contextlib.contextmanager
    def answering(self, connections: Connections, connection: Connection) -> Iterator[None]:
        """Make the driver's errors the outcome of each batch that has none."""
        try:
            yield
        except connections.errors as error:
            is_lost = is_broken(error, connection)
            converted = connections.handle_error(error, connection, "write to")
            self.fill_outcomes(outcome_of(converted, is_lost=is_lost))

    def fill_outcomes(self, default: Outcome) -> list[Outcome]:
        """Give *default* to batches that have no outcome, and return all of them."""
        filled = [default if outcome is None else outcome for outcome in self.outcomes]
        self.outcomes = [*filled]  # which a thread that was given up on may still change
        return filled


def arrays(part: list[EncodedBatch]) -> list[bytes]:
    """Return the statement's parameters, one array for each column."""
    return [
        bigints([batch.session.id for batch in part]),
        bigints([batch.session.epoch for batch in part]),
        bigints([batch.session.head for batch in part]),
        bigints([batch.session.crc for batch in part]),
        bigints([batch.last for batch in part]),
        bigints([batch.crc for batch in part]),
        bigints([batch.turns for batch in part]),
        byteas([batch.lines for batch in part]),
        byteas([_labels(batch.about) for batch in part]),
    ]


def _labels(about: About | None) -> bytes:
    return b"" if about is None else msgspec.json.encode(label_values(about))


def label_values(about: About | None) -> dict[str, Any]:
    """Return labels as the tables have them: their texts hold no NUL."""
    about = about or About()
    return {
        "owner": without_nul(about.owner),
        "title": without_nul(about.title),
        "tags": [without_nul(tag) for tag in about.tags],
    }


def without_nul(text: str | None) -> str | None:
    """Return a text in the form that a text column can hold: without NUL.

    >>> without_nul("a" + chr(0) + "b") == "a" + chr(0xFFFD) + "b"
    True
    """
    return None if text is None else text.replace("\0", "\N{REPLACEMENT CHARACTER}")


# Reading the rows


def read_start(
    connection: Connection, sql: Statements, key: SessionKey, part: LogPart, max_rows: int
) -> tuple[LogReader, list[Record]] | None:
    """Read a session's row, and the first page of a part of its log, in one round trip.

    Return None if there is no session.
    """
    query = _page_query(sql, key, part.after + 1, part.before - 1, part.reverse, max_rows)
    states, found = execute_all(connection, [(sql["state"], named(key)), query])
    state = SessionState(*states[0]) if states else None
    if state is None or state.deleted:
        return None
    reader = LogReader(key, state.log, part, table=_TABLE)
    # A row that was added after the session's row was read is not part of this log yet.
    rows = [row for row in found if row[0] <= reader.high]
    # All of these were appended since: for this reader the log ends before them.
    if found and not rows:
        return reader, []
    return reader, _page(connection, sql, reader, rows)


def read_page(
    connection: Connection, sql: Statements, reader: LogReader, max_rows: int
) -> list[Record]:
    """Read the next page of a log, of whole rows.

    Raises:
        CorruptRecordError: A row is damaged or missing.

    """
    count = min(max_rows, reader.remaining)
    query = _page_query(sql, reader.key, reader.low, reader.high, reader.reverse, count)
    rows = connection.execute(*query, binary=True).fetchall()
    return _page(connection, sql, reader, rows)


def _page_query(
    sql: Statements,
    key: SessionKey,
    low: int,
    high: int,
    reverse: bool,  # noqa: FBT001  # passed on by position
    max_rows: int,
) -> Statement:
    numbers = {"low": bigint(low), "high": bigint(high), "rows": bigint(max_rows)}
    values = {**named(key), **numbers, "bytes": PAGE_BYTES}
    return sql["backward" if reverse else "forward"], values


def _page(
    connection: Connection, sql: Statements, reader: LogReader, rows: Sequence[tuple[Any, ...]]
) -> list[Record]:
    def look() -> LogExtent | None:
        state = state_of(connection, sql, reader.key)
        return None if state is None or state.deleted else state.log

    return reader.take_page(map(CommitRow._make, rows), look)


def records_after(
    key: SessionKey, state: SessionState, after: int, rows: Sequence[tuple[Any, ...]]
) -> tuple[Record, ...] | None:
    """Return the rest of a log; None if the rows do not have all of it, or are damaged."""
    reader = LogReader(key, state.log, LogPart(after), table=_TABLE)
    return rest_of_log(reader, map(CommitRow._make, rows))
