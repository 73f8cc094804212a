"""Session rows and log rows: both carry checksums, which are verified before a row counts.

A commit of many sessions is one statement: it moves each session's head from what its holder last
knew to the new one, and inserts the log rows. If the epoch, the head or the checksum of one
session is not what its holder knew, everything is rolled back and each session is handled alone.

Blocking: the writing functions are called in the writer's thread, within its transaction.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from perdure.errors import CorruptRecordError, LeaseLostError, PerdureError
from perdure.records import records as frames
from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.keys import SessionKey, salvage_cure
from perdure.records.manifest import lease_lost, new_entries, refusal_of
from perdure.records.records import EPOCH, Entry, Position, Record, open_sealed
from perdure.records.rows import NO_END, CommitRow, LogExtent, LogPart, LogReader, rest_of_log
from perdure.store import About, Batch, Outcome, Status, past_damage
from perdure.stores.sqlite.errors import is_undecodable
from perdure.stores.sqlite.sql import MAX_ROWS, ROWS_AT_ONCE, Q, at_once

HELD, RELEASED, DELETED, DRAFT, COPY = 0, 1, 2, 4, 8
"""Bits of a row's state. A draft is a copy, too."""
HIDDEN = DELETED | DRAFT

_ID_BITS = 62
_FIELDS = 13
"""Columns of a session's row that its checksum covers, and the checksum."""


class SessionRow(msgspec.Struct, frozen=True):
    """A session's row."""

    id: int
    key: SessionKey
    epoch: int = 0
    born: int = 0
    owner: str = ""
    state: int = RELEASED
    start: int = 0
    low: int = 1
    head: int = 0
    crc: int = 0

    def base(self) -> int:
        """Return the checksum of all but the log's end, which seeds `total`."""
        key = self.key
        fields = (key.tenant, key.agent, key.session)
        lease = (self.epoch, self.born, self.owner, self.state, self.start, self.low)
        return zlib.crc32(msgspec.json.encode((fields, lease)))

    @property
    def is_deleted(self) -> bool:
        """True if it has no holder any more."""
        return bool(self.state & DELETED)

    @property
    def is_hidden(self) -> bool:
        """True if there is no session for readers: it was deleted, or is a draft."""
        return bool(self.state & HIDDEN)

    @property
    def seed(self) -> int:
        """The checksum that seeds the first record: no row fits into another log."""
        key = self.key
        return zlib.crc32(msgspec.json.encode((key.tenant, key.agent, key.session, self.born)))

    @property
    def log(self) -> LogExtent:
        """Its log, as who reads the rows has to know it."""
        return LogExtent(self.id, self.born, self.low, self.head, self.crc, self.seed)


def total(base: int, head: int, crc: int) -> int:
    """Return a row's checksum."""
    return zlib.crc32(b"%d %d" % (head, crc), base)


def find(con: sqlite3.Connection, key: SessionKey) -> SessionRow | None:
    """Return a session's row, None if it does not exist.

    Raises:
        CorruptRecordError: The row is damaged, or missing while its log exists.

    """
    return _find(con, key, "session")[1]


def find_to_open(
    con: sqlite3.Connection, key: SessionKey
) -> tuple[SessionRow | None, object, bool]:
    """Return a session's row, its manifest's bytes, and whether its inbox has items.

    Raises:
        CorruptRecordError: As `find`.

    """
    _, row, more = _find(con, key, "opening")
    if row is None:
        return None, None, False
    data, is_waiting = more
    return row, data, bool(is_waiting)


def _find(
    con: sqlite3.Connection, key: SessionKey, query: str
) -> tuple[int, SessionRow | None, tuple[Any, ...]]:
    """Return a session's row with its id, or None with the id that it would get; and the rest."""
    id_ = _number_of(key)
    while True:
        row, more = _load(con, key, id_, query)
        if row is None or row.key == key:
            return id_, row, more
        id_ += 1  # another key of the same hash


def _number_of(key: SessionKey) -> int:
    name = msgspec.json.encode((key.tenant, key.agent, key.session))
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> (64 - _ID_BITS)


def _load(
    con: sqlite3.Connection, key: SessionKey, id_: int, query: str
) -> tuple[SessionRow | None, tuple[Any, ...]]:
    damage = "its row does not match its checksum"
    try:
        values = con.execute(Q[query], {"id": id_}).fetchone()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if not is_undecodable(error):
            raise
    else:
        if values is not None:
            row = _checked(values[:_FIELDS], key)
            if row is not None and row.id == id_:
                return row, values[_FIELDS:]
        elif con.execute(Q["log_exists"], {"id": id_}).fetchone():
            damage = "its row is missing, and its log exists"
        else:
            return None, ()
    if past_damage.get():
        return _load_from_log(con, key, id_)
    raise _row_damage_error(key, id_, damage)


def _load_from_log(
    con: sqlite3.Connection, key: SessionKey, id_: int
) -> tuple[SessionRow | None, tuple[Any, ...]]:
    """Return a session's row as its log has it, and what `opening` has beside it."""
    values = {"id": id_, "low": 0, "high": NO_END}
    ends = [con.execute(Q[query], values).fetchone() for query in ("rows_from", "rows_back")]
    if None in ends:
        return None, ()
    first, last = (_commit_row(key, end) for end in ends)
    start = Position(0, last.first - 1, last.seed)
    crc = frames.lines(last.lines, epoch=last.epoch, start=start).end.crc
    row = SessionRow(id_, key, last.epoch, first.epoch, low=first.first, head=last.last, crc=crc)
    return row, con.execute(Q["beside"], {"id": id_}).fetchone()


def _checked(values: tuple[Any, ...], key: SessionKey) -> SessionRow | None:
    id_, tenant, agent, session, epoch, born, owner, state, start, low, head, crc, sum_ = values
    try:
        if (tenant, agent, session) != (key.tenant, key.agent, key.session):
            fields = {"tenant": tenant, "agent": agent, "session": session}
            key = msgspec.convert(fields, SessionKey)
        row = SessionRow(id_, key, epoch, born, owner, state, start, low, head, crc)
        is_sound = total(row.base(), head, crc) == sum_
    except (ValueError, TypeError, UnicodeError, msgspec.MsgspecError):
        return None
    return row if is_sound else None


def find_or_create(con: sqlite3.Connection, key: SessionKey, now: float) -> SessionRow:
    """Return a session's row; a new one has epoch 0."""
    id_, row, _ = _find(con, key, "session")
    if row is None:
        row = SessionRow(id_, key)
        con.execute(Q["insert_session"], _values(row, now))
    return row


def save(con: sqlite3.Connection, row: SessionRow, now: float) -> None:
    """Write a row."""
    con.execute(Q["update_session"], _values(row, now))


def _values(row: SessionRow, now: float) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in SessionRow.__struct_fields__ if name != "key"}
    key = row.key
    return {
        **values,
        "tenant": key.tenant,
        "agent": key.agent,
        "session": key.session,
        "sum": total(row.base(), row.head, row.crc),
        "now": now,
    }


def held_row(con: sqlite3.Connection, key: SessionKey, epoch: int) -> SessionRow:
    """Return a session's row, for the holder of this epoch.

    Raises:
        LeaseLostError: The epoch is not the newest, or the session was deleted.

    """
    row = find(con, key)
    if row is None or row.epoch != epoch or row.is_deleted or not epoch:
        raise lease_lost_error(key, epoch, row)
    return row


def lease_lost_error(key: SessionKey, epoch: int, row: SessionRow | None) -> LeaseLostError:
    """Return the error for a write under an epoch that is not the newest."""
    deleted = row is not None and row.is_deleted
    return lease_lost(key, epoch, row.epoch if row else 0, deleted=deleted)


def damage_error(key: SessionKey, what: str) -> CorruptRecordError:
    """Return the error for damage to one session."""
    return CorruptRecordError(
        f"session {key} is damaged in the database: {what}; nothing was changed: restore it from "
        f"a copy, or {salvage_cure(key)}",
        key=str(key),
    )


def row_problems(con: sqlite3.Connection) -> Iterator[str]:
    """Yield what is wrong with the rows of sessions, also of those that no listing has."""
    for id_, tenant, agent, session, sealed in con.execute(Q["numbers"]):
        key = _named_by(id_, (tenant, agent, session), sealed)
        try:
            _load(con, key or SessionKey("unknown"), id_, "session")
        except CorruptRecordError as error:
            if key is None:
                yield f"number {id_} in the tables is a session without a sound row, of unknown id"
            else:
                yield str(error)


def _named_by(id_: int, names: tuple[object, ...], sealed: object) -> SessionKey | None:
    """Return the key of a session's number, if its row or its manifest has it."""
    texts = [name.decode(errors="replace") if type(name) is bytes else "" for name in names]
    found = [dict(zip(("tenant", "agent", "session"), texts, strict=True))]
    body = open_sealed(sealed) if type(sealed) is bytes else None
    if body is not None:
        found.append(msgspec.json.decode(body)["key"])
    for fields in found:
        with contextlib.suppress(ValueError, TypeError, msgspec.MsgspecError):
            key = msgspec.convert(fields, SessionKey)
            if _number_of(key) == id_:
                return key
    return None


def _row_damage_error(key: SessionKey, id_: int, what: str) -> CorruptRecordError:
    error = damage_error(key, what)
    return CorruptRecordError(
        f"{error}; to remove it, delete with sqlite3 the rows of its number {id_}: `id` in the "
        "table session, `session` in the others",
        **error.facts,
    )


# Log rows


class LogTail(msgspec.Struct, gc=False):
    """The end of a session's log, as its holder in this process last knew."""

    id: int
    epoch: int
    owner: str
    base: int
    head: int
    crc: int
    sum: int
    step: float | None = None
    """Of the last save's time, as the index has it; None if that is not known."""

    @classmethod
    def of(cls, row: SessionRow) -> LogTail:
        """Return the end of a row's log."""
        base = row.base()
        sum_ = total(base, row.head, row.crc)
        return cls(row.id, row.epoch, row.owner, base, row.head, row.crc, sum_)

    def advance(self, plan: PlannedWrite, now: float) -> None:
        """Move the tail to the end of a write that was committed at this time."""
        self.head, self.crc, self.sum = plan.head, plan.crc, plan.sum
        self.step = now // _STEP


class PlannedWrite(NamedTuple):
    """One session's part of a commit."""

    tail: LogTail
    head: int
    crc: int
    sum: int
    data: bytes
    turns: int | None
    about: About | None


def labels_of(about: About | None) -> dict[str, str | None]:
    """Return labels as columns, which are all NULL for None.

    SQLite's JSON ends a text at a NUL, so a tag is compared without.

    >>> labels_of(About(tags=("a" + chr(0),)))["tags"] == '["a' + chr(0xFFFD) + '"]'
    True
    """
    if about is None:
        return {"user": None, "labels": None, "tags": None}
    tags = [comparable_tag(tag) for tag in about.tags]
    return {
        "user": about.owner,
        "labels": msgspec.json.encode(about).decode(),
        "tags": msgspec.json.encode(tags).decode() if tags else None,
    }


def comparable_tag(tag: str) -> str:
    """Return a tag in the form that is compared."""
    return tag.replace("\0", "\N{REPLACEMENT CHARACTER}")


def require_fit(batch: Batch) -> None:
    """Raise if no log can ever accept a batch."""
    refusal = refusal_of(batch)
    if refusal is not None:
        raise refusal


def plan_write(tail: LogTail, batch: Batch) -> PlannedWrite | None:
    """Return the write that appends a batch at a tail, None if it does not begin there.

    Raises:
        NotStorableError: No log can ever accept it.

    """
    records = batch.records
    first = tail.head + 1
    if batch.first != first or batch.epoch != tail.epoch or not records:
        return None
    data, crc = frames.encode(records, first=first, epoch=tail.epoch, crc=tail.crc)
    # Only a batch that may break a rule is checked record by record.
    if len(data) > MAX_RECORD_BYTES or not records[-1].end:
        require_fit(batch)
    head = tail.head + len(records)
    sum_ = total(tail.base, head, crc)
    return PlannedWrite(tail, head, crc, sum_, data, batch.turns, batch.about)


_STEP = 64
"""Seconds of a step, as the statements have it."""
_NO_ROW = (None,) * 12


def save_all(con: sqlite3.Connection, plans: Sequence[PlannedWrite], now: float) -> None:
    """Append all of them, or none; up to `MAX_ROWS` as one statement if no labels change.

    Raises:
        sqlite3.IntegrityError: A log is not where its holder left it.

    """
    step = now // _STEP
    for at in range(0, len(plans), MAX_ROWS):
        part = plans[at : at + MAX_ROWS]
        rows: list[object] = []
        for tail, head, crc, sum_, data, turns, _ in part:
            rows += (tail.id, tail.epoch, tail.head, tail.crc, tail.sum, head, crc, sum_, now, data)
            rows += (turns, None if tail.step == step else step)
        # Few lengths of statements, padded with rows of NULL, so that they stay prepared.
        count = next(count for count in ROWS_AT_ONCE if count >= len(part))
        rows += _NO_ROW * (count - len(part))
        con.execute(at_once("save", count), rows)
    for plan in plans:
        if plan.about is not None:
            con.execute(Q["label"], {"id": plan.tail.id, **labels_of(plan.about)})


def append_one(
    con: sqlite3.Connection, batch: Batch, now: float, known: LogTail | None
) -> tuple[Outcome, LogTail | None]:
    """Read a session's row again, and append the records that its log does not have yet."""
    row = find(con, batch.key)
    # In a database restored from a backup, another owner may have been given the same epoch.
    is_other_owner = known is not None and row is not None and known.owner != row.owner
    if row is None or row.epoch != batch.epoch or row.is_deleted or not row.epoch or is_other_owner:
        return Outcome(Status.CONFLICT, lease_lost_error(batch.key, batch.epoch, row)), None
    tail = LogTail.of(row)
    try:
        require_fit(batch)
        entries = _new_entries(con, row, batch)
        if not entries:
            return Outcome(Status.OK), tail
        rest = msgspec.structs.replace(batch, first=row.head + 1, records=entries)
        plan = plan_write(tail, rest)
    except PerdureError as error:
        return Outcome(Status.PERMANENT, error), tail
    assert plan is not None
    save_all(con, [plan], now)
    tail.advance(plan, now)
    return Outcome(Status.OK, None, len(plan.data)), tail


def _new_entries(con: sqlite3.Connection, row: SessionRow, batch: Batch) -> tuple[Entry, ...]:
    """Return the entries that the log does not have yet; the others must be the same."""
    logged: list[Entry] = []
    if row.start < batch.first <= row.head:
        reader = LogReader(row.key, row.log, LogPart(batch.first - 1), table="log")
        with _rows(con, reader) as rows:
            records = reader.take(rows)
        logged = [Entry(record.kind, record.payload, record.end) for record in records]
    entries = new_entries(batch, row.head, row.start, logged)
    if isinstance(entries, Exception):
        raise entries
    return entries


def append_epoch_record(
    con: sqlite3.Connection, row: SessionRow, payload: bytes, now: float
) -> SessionRow:
    """Append the epoch record to a log, save the session's new row, and return it."""
    entry = Entry(EPOCH, payload)
    seq = row.head + 1
    data, crc = frames.encode((entry,), first=seq, epoch=row.epoch, crc=row.crc)
    new = msgspec.structs.replace(row, start=seq, head=seq, crc=crc)
    con.execute(Q["append"], (row.id, seq, seq, row.epoch, row.crc, data))
    save(con, new, now)
    return new


# Reading the rows


PART_BYTES = 1024 * 1024


def read_start(
    con: sqlite3.Connection, key: SessionKey, part: LogPart, max_bytes: int
) -> tuple[LogReader, list[Record]] | None:
    """Return the reader of a part of a log, and the first page; None if there is no session."""
    row = find(con, key)
    if row is None or not row.epoch or row.is_hidden:
        return None
    reader = LogReader(row.key, row.log, part, table="log")
    return reader, read_page(con, reader, max_bytes)


def read_page(con: sqlite3.Connection, reader: LogReader, max_bytes: int) -> list[Record]:
    """Return the next page of a log, up to the row that brings it to ``max_bytes``.

    Raises:
        CorruptRecordError: A row is damaged or missing.

    """

    def look() -> LogExtent | None:
        row = find(con, reader.key)
        return None if row is None or row.is_hidden else row.log

    with _rows(con, reader) as rows:
        return reader.take_page(rows, look, max_bytes=max_bytes)


@contextlib.contextmanager
def _rows(con: sqlite3.Connection, reader: LogReader) -> Iterator[Iterator[CommitRow]]:
    """Yield the rows from the next record on, which are read as they are asked for."""
    if reader.is_done:
        yield iter(())
        return
    query = Q["rows_back" if reader.reverse else "rows_from"]
    values = {"id": reader.state.id, "low": reader.low, "high": reader.high}
    with contextlib.closing(con.execute(query, values)) as cursor:
        yield (_commit_row(reader.key, row) for row in cursor)


def _commit_row(key: SessionKey, values: tuple[object, ...]) -> CommitRow:
    try:
        return msgspec.convert(values, CommitRow)
    except msgspec.ValidationError as error:
        raise damage_error(key, f"a row of its log has other types: {error}") from error


def records_after(
    con: sqlite3.Connection, row: SessionRow | None, after: int
) -> tuple[Record, ...] | None:
    """Return the rest of a log; None if it is long or damaged."""
    if row is None or not row.epoch or row.is_hidden:
        return ()
    reader = LogReader(row.key, row.log, LogPart(after), table="log")
    with _rows(con, reader) as rows:
        return rest_of_log(reader, rows, max_bytes=PART_BYTES)


def newest_records(con: sqlite3.Connection, row: SessionRow, messages: int) -> tuple[Record, ...]:
    """Return a log's records back to its so many newest messages, newest first.

    Fewer if they are long; none if they are damaged.
    """
    reader = LogReader(row.key, row.log, LogPart(reverse=True), table="log")
    try:
        with _rows(con, reader) as rows:
            return tuple(reader.take(rows, max_bytes=PART_BYTES, messages=messages))
    except CorruptRecordError:  # raised when the log is read
        return ()


def read_all(con: sqlite3.Connection, key: SessionKey) -> tuple[Record, ...] | None:
    """Return a session's log; None if it is long or damaged."""
    return records_after(con, find(con, key), 0)
