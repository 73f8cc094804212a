"""Log of a session: appends of many sessions as one statement, and reads in pages. Blocking.

The statement moves each session's head only from where the sender expects it, under the sender's
epoch: so it fences, and a batch that is sent again finds the head moved. Sessions whose head moved
are OK; each of the others is looked up, and its log compared with the batch.

A row proves itself: each line's checksum covers the one before, the first line's the row's seed. A
run of rows proves that none is missing: each begins where the previous one ended, with that one's
checksum as its seed. A row that fails raises, and is never read past.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import msgspec

from perdure.errors import (
    CorruptRecordError,
    LeaseLostError,
    NotStorableError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey, salvage_cure
from perdure.records.manifest import lease_lost, new_entries, refusal_of
from perdure.records.records import Entry, Position, Record, encode, lines
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
    generation: int
    since: int
    deleted: bool
    owner: str = ""
    released: bool = False
    draft: bytes | None = None
    """What it is a copy of, sealed."""

    @property
    def is_draft(self) -> bool:
        """Whether it is a draft that is not published."""
        return self.deleted and self.draft is not None

    @property
    def is_over(self) -> bool:
        """Whether it was deleted, and is not hidden as a draft only."""
        return self.deleted and self.draft is None


class CommitRow(NamedTuple):
    """A commit's row."""

    first: int
    last: int
    epoch: int
    seed: int
    lines: bytes


class RowReader:
    """Verifier of one session's rows, read in order, forward or backward."""

    def __init__(self, key: SessionKey, state: SessionState, *, reverse: bool = False) -> None:
        self._key = key
        self._state = state
        self._reverse = reverse
        self._next: tuple[int, int] | None = None
        """Forward, the next row's first seq and seed; backward, its last seq and checksum."""

    def records(self, row: CommitRow) -> list[Record]:
        """Return a row's records in the order of reading.

        Raises:
            CorruptRecordError: The row is damaged, or is not the expected one.

        """
        decoded = lines(row.lines, epoch=row.epoch, start=Position(0, row.first - 1, row.seed))
        end = decoded.end
        is_sound = decoded.sound and end.offset == len(row.lines) and end.seq == row.last
        if not is_sound or not decoded.records or not decoded.records[-1].end:
            raise self._damage_error(row, "it does not match its checksum")
        near, far = (row.first, row.seed), (row.last, end.crc)
        if self._reverse:
            near, far = far, near
        if self._next not in (None, near):
            raise self._damage_error(row, "it does not follow the one before it: some are missing")
        head = self._state.head
        if row.last > head or (row.last == head and end.crc != self._state.crc):
            raise self._damage_error(
                row, f"the session's row has another end of the log, record {head}"
            )
        step = -1 if self._reverse else 1
        self._next = (far[0] + step, far[1])
        return decoded.records[::step]

    def _damage_error(self, row: CommitRow, reason: str) -> CorruptRecordError:
        return CorruptRecordError(
            f"the log of {self._key} is damaged in the commit of records {row.first} to "
            f"{row.last}: {reason}; it was left as it is: restore the table commits from a copy, "
            f"or {salvage_cure(self._key)}",
            key=str(self._key),
            first=row.first,
            last=row.last,
            table="commits",
        )


def missing_rows_error(
    key: SessionKey, state: SessionState, low: int, high: int
) -> CorruptRecordError:
    """Return the error for records whose rows are missing."""
    return CorruptRecordError(
        f"the log of {key} ends at record {state.head}, and the rows with its records {low} to "
        f"{high} are missing: restore the table commits from a copy, or {salvage_cure(key)}",
        key=str(key),
        first=low,
        last=high,
        table="commits",
    )


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
"""How often a batch is tried whose session changes meanwhile, before the caller backs off."""
STATEMENT_BYTES = 32 * 1024 * 1024
PAGE_BYTES = 4 * 1024 * 1024
PAGE_ROWS = 256
NO_LIMIT = 2**63 - 1


class EncodedBatch(NamedTuple):
    """A batch, or its remaining records, encoded for where its log is expected to end."""

    place: int
    session: OwnedSession
    lines: bytes
    last: int
    crc: int
    written: int
    turns: int | None
    about: About | None


UNKNOWN = SessionState(0, 0, 0, 0, 0, 0, 1, False)
"""The state of a session whose row is not read yet."""


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
    row = connection.execute(sql["state"], named(key), binary=True).fetchone()
    return SessionState(*row) if row else None


def named(key: SessionKey) -> dict[str, object]:
    """Return the values by which a statement finds a session."""
    return {"tenant": key.tenant, "agent": key.agent, "session": key.session}


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
        batch = self._batches[index]
        ready.append(
            EncodedBatch(index, session, lines, last, crc, len(lines), batch.turns, batch.about)
        )

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
            if state.since <= batch.first <= state.head:
                logged = list(_entries(connection, self._sql, batch, state))
        except CorruptRecordError as error:
            return error
        return new_entries(batch, state.head, max(state.epoch_start, state.since - 1), logged)

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


def _entries(
    connection: Connection, sql: Statements, batch: Batch, state: SessionState
) -> Iterator[Entry]:
    """Yield the log's entries in a batch's range."""
    run = RowReader(batch.key, state)
    high = min(state.head, batch.first + len(batch.records) - 1)
    low: int | None = batch.first
    while low is not None:
        records, low = read_page(connection, sql, run, RowSpan(batch.key, state, low, high))
        for record in records:
            if batch.first <= record.seq:
                yield Entry(record.kind, record.payload, record.end)


def read_page(connection: Connection, sql: Statements, run: RowReader, span: RowSpan) -> RecordPage:
    """Read whole rows that hold records of a span, from its beginning, or reversed from its end.

    Raises:
        CorruptRecordError: A row is damaged or missing.

    """
    rows = connection.execute(*_page_query(sql, span), binary=True).fetchall()
    return _current_page(connection, sql, run, span, rows)


def _page_query(sql: Statements, span: RowSpan) -> Statement:
    values = named(span.key) | {
        "low": bigint(span.low),
        "high": bigint(span.high),
        "rows": bigint(span.rows),
        "bytes": PAGE_BYTES,
    }
    return sql["backward" if span.reverse else "forward"], values


def _current_page(
    connection: Connection,
    sql: Statements,
    run: RowReader,
    span: RowSpan,
    rows: Sequence[tuple[Any, ...]],
) -> RecordPage:
    """Return the records of rows; none, if the session was deleted or trimmed meanwhile."""
    try:
        return page_of(rows, run, span)
    except CorruptRecordError:
        state = span.state
        now = state_of(connection, sql, span.key)
        if now is None or now.deleted or now.generation != state.generation or now.since > span.low:
            return RecordPage([], None)
        raise


def page_of(rows: Sequence[tuple[Any, ...]], run: RowReader, span: RowSpan) -> RecordPage:
    """Return the records of rows that begin where a span does.

    Raises:
        CorruptRecordError: A row is damaged or missing.

    """
    key, state, low, high, reverse, _ = span
    first_row = CommitRow._make(rows[0]) if rows else None
    if first_row is None or not first_row.first <= (high if reverse else low) <= first_row.last:
        raise missing_rows_error(key, state, low, high)
    records: list[Record] = []
    for row in map(CommitRow._make, rows):
        records += run.records(row)
    end = records[-1].seq
    if reverse:
        return RecordPage(records, None if end <= low else end - 1)
    return RecordPage(records, None if end >= high else end + 1)


class LogStart(NamedTuple):
    """The first page of a log that is read, and how to read on; None for a missing session."""

    run: RowReader
    span: RowSpan
    page: RecordPage


def read_start(connection: Connection, sql: Statements, wanted: RowSpan) -> LogStart | None:
    """Read a session's row, and the first page of a part of its log, in one round trip."""
    key, reverse = wanted.key, wanted.reverse
    state_query = (sql["state"], named(key))
    states, found = execute_all(connection, [state_query, _page_query(sql, wanted)])
    state = SessionState(*states[0]) if states else None
    if state is None or state.deleted:
        return None
    low, high = max(wanted.low, state.since), min(wanted.high, state.head)
    span = wanted._replace(state=state, low=low, high=high)
    run = RowReader(key, state, reverse=reverse)
    if span.low > span.high:
        return LogStart(run, span, RecordPage([], None))
    # A row that was added after the session's row was read is not part of this log yet.
    current = [row for row in found if row[0] <= span.high]
    if reverse and len(current) < len(found):
        return LogStart(run, span, RecordPage([], span.high))
    return LogStart(run, span, _current_page(connection, sql, run, span, current))


def records_after(
    key: SessionKey, state: SessionState, after: int, rows: Sequence[tuple[Any, ...]]
) -> tuple[Record, ...] | None:
    """Return the rest of a log; None if the rows do not have all of it, or are damaged."""
    span = RowSpan(key, state, max(after + 1, state.since), state.head)
    try:
        page = page_of(rows, RowReader(key, state), span)
    except CorruptRecordError:  # raised when the log is read
        return None
    if page.next is not None:
        return None
    return tuple([record for record in page.records if record.seq >= span.low])
