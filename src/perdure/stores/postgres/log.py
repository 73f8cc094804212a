"""Log of a session: appends of many sessions as one statement, and reads in pages. Blocking.

The statement moves each session's head only from where the sender expects it, under the sender's
epoch: so it fences, and a batch that is sent again finds the head moved. Sessions whose head moved
are OK; each of the others is looked up, and its log compared with the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from perdure.errors import (
    CorruptRecordError,
    LeaseLostError,
    NotStorableError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey
from perdure.records.records import Entry, Record, encode
from perdure.store import Batch, Outcome, Status
from perdure.stores.postgres.connections import Connection, Connections
from perdure.stores.postgres.errors import is_broken, outcome_of
from perdure.stores.postgres.rows import (
    CommitRow,
    HeldSessionsByKey,
    OwnedSession,
    RowReader,
    SessionState,
    missing_rows_error,
    new_entries,
    refusal_of,
)
from perdure.stores.postgres.statements import Statements, bigints, byteas

ROUNDS = 4
"""How often a batch is tried whose session changes meanwhile, before the caller backs off."""
STATEMENT_BYTES = 32 * 1024 * 1024
PAGE_BYTES = 4 * 1024 * 1024
PAGE_ROWS = 256


class EncodedBatch(NamedTuple):
    """A batch, or its remaining records, encoded for where its log is expected to end."""

    place: int
    session: OwnedSession
    lines: bytes
    last: int
    crc: int
    written: int


class RowSpan(NamedTuple):
    """The records to read."""

    key: SessionKey
    state: SessionState
    low: int
    high: int
    reverse: bool = False
    rows: int = PAGE_ROWS


class RecordPage(NamedTuple):
    """Consecutive records, and where the next page begins; None after the last."""

    records: list[Record]
    next: int | None


def state_of(connection: Connection, sql: Statements, key: SessionKey) -> SessionState | None:
    """Return a session's row, None if it has none."""
    row = connection.execute(sql["state"], _names_of(key), binary=True).fetchone()
    return SessionState(*row) if row else None


def _names_of(key: SessionKey) -> tuple[str, str, str]:
    return key.tenant, key.agent, key.session


def lease_lost_error(key: SessionKey, epoch: int, state: SessionState | None) -> LeaseLostError:
    """Return the error for an epoch that is not the newest."""
    newest = state.epoch if state else 0
    message = (
        f"epoch {epoch} of {key} may not write: the newest is {newest}"
        f"{', and it was deleted' if state and state.deleted else ''}; open the session again"
    )
    return LeaseLostError(message, key=key, epoch=epoch, newest=newest)


def require_held(connection: Connection, sql: Statements, key: SessionKey, epoch: int) -> int:
    """Lock a session for its holder until the transaction ends, and return its row's id.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    row = connection.execute(sql["lock_epoch"], (*_names_of(key), epoch)).fetchone()
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
        self.outcomes: list[Outcome | None] = [None] * len(batches)

    def encode_ready(self) -> tuple[list[EncodedBatch], list[int]]:
        """Encode batches that follow a log's known end; return them, and the others' places."""
        ready: list[EncodedBatch] = []
        unknown: list[int] = []
        keys = set()
        for index, batch in enumerate(self._batches):
            refusal = refusal_of(batch)
            session = self._held_sessions.get(batch.key)
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
        ready.append(EncodedBatch(index, session, lines, last, crc, len(lines)))

    def send(self, connection: Connection, ready: list[EncodedBatch]) -> list[int]:
        """Append encoded batches, in parts; return the places of those that were not appended."""
        ready.sort(key=lambda batch: batch.session.id)
        unmoved: list[int] = []
        for part in _parts(ready):
            unmoved += self.mark_appended(part, self._sql.append.run(connection, arrays(part)))
        return unmoved

    def mark_appended(self, part: list[EncodedBatch], moved: set[int]) -> list[int]:
        """Record what was appended; return the places of the others."""
        unmoved: list[int] = []
        for batch in part:
            if batch.session.id in moved:
                batch.session.head, batch.session.crc = batch.last, batch.crc
                self.outcomes[batch.place] = Outcome(Status.OK, None, batch.written)
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
        if state is None or state.epoch != batch.epoch or state.deleted or is_other_owner:
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
        if not state.since <= batch.first <= state.head:
            return new_entries(batch, state, ())
        try:
            return new_entries(batch, state, list(_records(connection, self._sql, batch, state)))
        except CorruptRecordError as error:
            return error

    def run(self, connection: Connection) -> None:
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

    def fill_outcomes(self, default: Outcome) -> list[Outcome]:
        """Return all outcomes, with *default* for batches that have none."""
        return [default if outcome is None else outcome for outcome in self.outcomes]


def append(
    connections: Connections,
    sql: Statements,
    held_sessions: HeldSessionsByKey,
    batches: Sequence[Batch],
) -> list[Outcome]:
    """Append batches. Every error becomes an outcome."""
    appends = AppendMany(sql, held_sessions, batches)
    changed = StoreUnavailableError("others wrote to these sessions meanwhile: they are sent again")
    try:
        with connections.borrow() as connection:
            try:
                appends.run(connection)
            except connections.errors as error:
                is_lost = is_broken(error, connection)
                converted = connections.handle_error(error, connection, "write to")
                return appends.fill_outcomes(outcome_of(converted, is_lost=is_lost))
    except Exception as error:  # noqa: BLE001  # append_many raises nothing
        status = Status.TRANSIENT if isinstance(error, StoreUnavailableError) else Status.IN_DOUBT
        return appends.fill_outcomes(Outcome(status, error))
    return appends.fill_outcomes(Outcome(Status.TRANSIENT, changed))


def _parts(ready: list[EncodedBatch]) -> Iterator[list[EncodedBatch]]:
    """Split encoded batches so that no statement is too large."""
    if sum([batch.written for batch in ready]) <= STATEMENT_BYTES:
        yield ready
        return
    part: list[EncodedBatch] = []
    size = 0
    for batch in ready:
        if part and size + batch.written > STATEMENT_BYTES:
            yield part
            part, size = [], 0
        part.append(batch)
        size += batch.written
    yield part


def arrays(part: list[EncodedBatch]) -> list[bytes]:
    """Return the statement's parameters, one array for each column."""
    return [
        bigints([batch.session.id for batch in part]),
        bigints([batch.session.epoch for batch in part]),
        bigints([batch.session.head for batch in part]),
        bigints([batch.session.crc for batch in part]),
        bigints([batch.last for batch in part]),
        bigints([batch.crc for batch in part]),
        byteas([batch.lines for batch in part]),
    ]


def _records(
    connection: Connection, sql: Statements, batch: Batch, state: SessionState
) -> Iterator[Record]:
    """Yield the log's records in a batch's range."""
    run = RowReader(batch.key, state)
    high = min(state.head, batch.first + len(batch.records) - 1)
    low: int | None = batch.first
    while low is not None:
        records, low = read_page(connection, sql, run, RowSpan(batch.key, state, low, high))
        yield from (record for record in records if batch.first <= record.seq)


def read_page(connection: Connection, sql: Statements, run: RowReader, span: RowSpan) -> RecordPage:
    """Read whole rows that hold records of a span, from its beginning, or reversed from its end.

    Raises:
        CorruptRecordError: A row is damaged or missing.

    """
    key, state, low, high, reverse, rows = span
    rows_read = connection.execute(
        sql["backward" if reverse else "forward"],
        {"id": state.id, "low": low, "high": high, "rows": rows, "bytes": PAGE_BYTES},
        binary=True,
    ).fetchall()
    first_row = CommitRow._make(rows_read[0]) if rows_read else None
    records: list[Record] = []
    try:
        if first_row is None or not first_row.first <= (high if reverse else low) <= first_row.last:
            raise missing_rows_error(key, state, low, high)
        for row in map(CommitRow._make, rows_read):
            records += run.records(row)
    except CorruptRecordError:
        now = state_of(connection, sql, key)
        if now is None or now.deleted or now.generation != state.generation or now.since > low:
            return RecordPage([], None)  # it was deleted or trimmed meanwhile
        raise
    end = records[-1].seq
    if reverse:
        return RecordPage(records, None if end <= low else end - 1)
    return RecordPage(records, None if end >= high else end + 1)
