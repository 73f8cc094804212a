"""The log's blocking part: appends as one statement, and rows read in pages.

The statement moves each session's head only from where the sender says it is, under the
sender's epoch, so it fences, and a batch that is sent again finds the head moved. What
moved is answered with OK; only for the rest the session is looked up, and what the log holds
compared with what was sent.
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
from perdure.records.frames import encode
from perdure.records.keys import SessionKey
from perdure.records.records import Entry, Record
from perdure.store import Batch, Outcome, Status
from perdure.stores.postgres.connections import Connection, Connections
from perdure.stores.postgres.errors import is_broken, outcome_of
from perdure.stores.postgres.prepared import bigints, byteas
from perdure.stores.postgres.rows import (
    CommitRow,
    Holding,
    OwnedSession,
    RowReader,
    SessionState,
    as_sent,
    fresh,
    missing,
)
from perdure.stores.postgres.statements import Statements

ROUNDS = 4
"""How often a batch is tried whose session changes under it, before the engine waits a little."""
STATEMENT_BYTES = 32 * 1024 * 1024
PAGE_BYTES = 4 * 1024 * 1024
PAGE_ROWS = 256


class EncodedBatch(NamedTuple):
    """A batch, or what is left of it, encoded for where its log should end."""

    place: int
    held: OwnedSession
    lines: bytes
    last: int
    crc: int
    written: int


class RowSpan(NamedTuple):
    """Which records to read."""

    key: SessionKey
    state: SessionState
    low: int
    high: int
    reverse: bool = False
    rows: int = PAGE_ROWS


class RecordPage(NamedTuple):
    """Records in a row, and where the next page goes on; None behind the last."""

    records: list[Record]
    on: int | None


def state_of(connection: Connection, sql: Statements, key: SessionKey) -> SessionState | None:
    """Return a session's row; None when it has none."""
    found = connection.execute(sql["state"], _named(key), binary=True).fetchone()
    return SessionState(*found) if found else None


def _named(key: SessionKey) -> tuple[str, str, str]:
    return key.tenant, key.agent, key.session


def lost(key: SessionKey, epoch: int, state: SessionState | None) -> LeaseLostError:
    """Return the error for an epoch that is not the newest."""
    newest = state.epoch if state else 0
    message = (
        f"epoch {epoch} of {key} may not write: the newest is {newest}"
        f"{', and it was deleted' if state and state.deleted else ''}; open the session again"
    )
    return LeaseLostError(message, key=key, epoch=epoch, newest=newest)


def require(connection: Connection, sql: Statements, key: SessionKey, epoch: int) -> int:
    """Lock a session for its holder until the transaction ends, and return its row's id.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    found = connection.execute(sql["lock_epoch"], (*_named(key), epoch)).fetchone()
    if found is None:
        raise lost(key, epoch, state_of(connection, sql, key))
    return int(found[0])


@final
class AppendMany:
    """One ``append_many``."""

    def __init__(self, sql: Statements, held: Holding, batches: Sequence[Batch]) -> None:
        self._sql = sql
        self._held = held
        self._batches = batches
        self.outcomes: list[Outcome | None] = [None] * len(batches)

    def first_round(self) -> tuple[list[EncodedBatch], list[int]]:
        """Return what can be sent as it is, and the places of what has to be looked up."""
        ready: list[EncodedBatch] = []
        unknown: list[int] = []
        keys = set()
        for place, batch in enumerate(self._batches):
            refused = as_sent(batch)
            held = self._held.get(batch.key)
            if refused is not None:
                self.outcomes[place] = Outcome(Status.PERMANENT, refused)
            elif (
                held is None
                or (held.epoch, held.head + 1) != (batch.epoch, batch.first)
                or not batch.records
                or batch.key in keys
            ):
                unknown.append(place)
            else:
                keys.add(batch.key)
                self._add(ready, place, held, batch.records)
        return ready, unknown

    def _add(
        self, ready: list[EncodedBatch], place: int, held: OwnedSession, records: Sequence[Entry]
    ) -> None:
        first = held.head + 1
        try:
            lines, crc = encode(records, first=first, epoch=held.epoch, crc=held.crc)
        except NotStorableError as error:
            self.outcomes[place] = Outcome(Status.PERMANENT, error)
            return
        last = first + len(records) - 1
        ready.append(EncodedBatch(place, held, lines, last, crc, len(lines)))

    def send(self, connection: Connection, ready: list[EncodedBatch]) -> list[int]:
        """Append what is ready, in parts; return the places of what did not move."""
        ready.sort(key=lambda one: one.held.id)
        stayed: list[int] = []
        for part in _parts(ready):
            stayed += self.settle(part, self._sql.append.run(connection, arrays(part)))
        return stayed

    def settle(self, part: list[EncodedBatch], moved: set[int]) -> list[int]:
        """Note what was appended; return the places of the rest."""
        stayed: list[int] = []
        for one in part:
            if one.held.id in moved:
                one.held.head, one.held.crc = one.last, one.crc
                self.outcomes[one.place] = Outcome(Status.OK, None, one.written)
            else:
                stayed.append(one.place)
        return stayed

    def look(self, connection: Connection, place: int) -> list[EncodedBatch]:
        """See what the log holds of a batch; return what is left to send."""
        batch = self._batches[place]
        state = state_of(connection, self._sql, batch.key)
        known = self._held.get(batch.key)
        # Of a server that went back, somebody else may have got the same epoch.
        other = known is not None and state is not None and known.owner != state.owner
        if state is None or state.epoch != batch.epoch or state.deleted or other:
            self._held.pop(batch.key, None)
            error = lost(batch.key, batch.epoch, state)
            self.outcomes[place] = Outcome(Status.CONFLICT, error)
            return []
        held = OwnedSession(state.id, state.epoch, state.head, state.crc, state.owner)
        self._held[batch.key] = held
        left = self._left(connection, batch, state)
        if isinstance(left, Exception):
            self.outcomes[place] = Outcome(Status.PERMANENT, left)
        elif not left:
            self.outcomes[place] = Outcome(Status.OK)
        else:
            ready: list[EncodedBatch] = []
            self._add(ready, place, held, left)
            return ready
        return []

    def _left(
        self, connection: Connection, batch: Batch, state: SessionState
    ) -> tuple[Entry, ...] | Exception:
        if not state.since <= batch.first <= state.head:
            return fresh(batch, state, ())
        try:
            return fresh(batch, state, list(_records(connection, self._sql, batch, state)))
        except CorruptRecordError as error:
            return error

    def run(self, connection: Connection) -> None:
        """Send, look up what did not move, and send what is left of it."""
        ready, unknown = self.first_round()
        for _ in range(ROUNDS):
            unknown += self.send(connection, ready) if ready else []
            if not unknown:
                return
            ready, again = [], []
            ids: set[int] = set()
            for place in unknown:
                found = self.look(connection, place)
                if found and found[0].held.id in ids:  # the same session twice: one by one
                    again.append(place)
                    continue
                ids.update(one.held.id for one in found)
                ready += found
            unknown = again

    def end(self, rest: Outcome) -> list[Outcome]:
        """Return all outcomes, with *rest* for what has none."""
        return [rest if outcome is None else outcome for outcome in self.outcomes]


def append(
    connections: Connections,
    sql: Statements,
    held: Holding,
    batches: Sequence[Batch],
) -> list[Outcome]:
    """Append batches. Every error becomes an outcome."""
    work = AppendMany(sql, held, batches)
    busy = StoreUnavailableError("others wrote to these sessions meanwhile: they are sent again")
    try:
        with connections.borrow() as connection:
            try:
                work.run(connection)
            except connections.errors as error:
                broken = is_broken(error, connection)
                mapped = connections.failed(error, connection, "write to")
                return work.end(outcome_of(mapped, broken=broken))
    except Exception as error:  # noqa: BLE001  # one trouble must not be that of what is written
        status = Status.TRANSIENT if isinstance(error, StoreUnavailableError) else Status.IN_DOUBT
        return work.end(Outcome(status, error))
    return work.end(Outcome(Status.TRANSIENT, busy))


def _parts(ready: list[EncodedBatch]) -> Iterator[list[EncodedBatch]]:
    """Divide what is ready so that no statement is too large."""
    if sum([one.written for one in ready]) <= STATEMENT_BYTES:
        yield ready
        return
    part: list[EncodedBatch] = []
    size = 0
    for one in ready:
        if part and size + one.written > STATEMENT_BYTES:
            yield part
            part, size = [], 0
        part.append(one)
        size += one.written
    yield part


def arrays(part: list[EncodedBatch]) -> list[bytes]:
    """Return the statement's parameters, one array a column."""
    return [
        bigints([one.held.id for one in part]),
        bigints([one.held.epoch for one in part]),
        bigints([one.held.head for one in part]),
        bigints([one.held.crc for one in part]),
        bigints([one.last for one in part]),
        bigints([one.crc for one in part]),
        byteas([one.lines for one in part]),
    ]


def _records(
    connection: Connection, sql: Statements, batch: Batch, state: SessionState
) -> Iterator[Record]:
    """Give the log's records from a batch's first on, as far as the batch reaches."""
    run = RowReader(batch.key, state)
    high = min(state.head, batch.first + len(batch.records) - 1)
    low: int | None = batch.first
    while low is not None:
        records, low = page(connection, sql, run, RowSpan(batch.key, state, low, high))
        yield from (record for record in records if batch.first <= record.seq)


def page(connection: Connection, sql: Statements, run: RowReader, span: RowSpan) -> RecordPage:
    """Read whole rows that hold records of a span, from the end where it begins.

    Raises:
        CorruptRecordError: A row is damaged or missing.

    """
    key, state, low, high, reverse, rows = span
    found = connection.execute(
        sql["backward" if reverse else "forward"],
        {"id": state.id, "low": low, "high": high, "rows": rows, "bytes": PAGE_BYTES},
        binary=True,
    ).fetchall()
    begins = CommitRow._make(found[0]) if found else None
    records: list[Record] = []
    try:
        if begins is None or not begins.first <= (high if reverse else low) <= begins.last:
            raise missing(key, state, low, high)
        for row in map(CommitRow._make, found):
            records += run.records(row)
    except CorruptRecordError:
        now = state_of(connection, sql, key)
        if now is None or now.deleted or now.life != state.life or now.since > low:
            return RecordPage([], None)  # it was deleted or trimmed meanwhile
        raise
    end = records[-1].seq
    if reverse:
        return RecordPage(records, None if end <= low else end - 1)
    return RecordPage(records, None if end >= high else end + 1)
