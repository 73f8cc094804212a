"""A session's row, sealed: what the database says of a session is verified before it counts."""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.errors import CorruptRecordError, LeaseLostError
from perdure.model.keys import SessionKey, salvage_cure
from perdure.stores.sqlite.sql import Q

if TYPE_CHECKING:
    import sqlite3

__all__ = ["DELETED", "HELD", "RELEASED", "Row", "damaged", "find", "held", "lost", "make", "save"]

HELD, RELEASED, DELETED = range(3)

_ID_BITS = 62


class Row(msgspec.Struct, frozen=True):
    """A session as the database has it."""

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
        rest = (self.epoch, self.born, self.owner, self.state, self.start, self.low)
        return zlib.crc32(msgspec.json.encode((fields, rest)))

    @property
    def seed(self) -> int:
        """What the log's first record is chained to: no row fits into another session's log."""
        key = self.key
        return zlib.crc32(msgspec.json.encode((key.tenant, key.agent, key.session, self.born)))


def total(base: int, head: int, crc: int) -> int:
    """Return a row's checksum."""
    return zlib.crc32(b"%d %d" % (head, crc), base)


def find(con: sqlite3.Connection, key: SessionKey) -> Row | None:
    """Return a session's row, None if there is none.

    Raises:
        CorruptRecordError: The row is damaged, or lost while its log is there.

    """
    id_ = _first_id(key)
    while True:
        row = _load(con, key, id_)
        if row is None or row.key == key:
            return row
        id_ += 1  # another key of the same hash


def _first_id(key: SessionKey) -> int:
    name = msgspec.json.encode((key.tenant, key.agent, key.session))
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> (64 - _ID_BITS)


def _load(con: sqlite3.Connection, key: SessionKey, id_: int) -> Row | None:
    found = con.execute(Q["session"], {"id": id_}).fetchone()
    if found is None:
        if con.execute(Q["log_exists"], {"id": id_}).fetchone():
            raise damaged(key, "its row is lost, and its log is there")
        return None
    row = _checked(found)
    if row is None or row.id != id_:
        raise damaged(key, "its row does not match its checksum")
    return row


def _checked(found: tuple[Any, ...]) -> Row | None:
    id_, tenant, agent, session, epoch, born, owner, state, start, low, head, crc, sum_ = found
    try:
        key = msgspec.convert({"tenant": tenant, "agent": agent, "session": session}, SessionKey)
        row = Row(id_, key, epoch, born, owner, state, start, low, head, crc)
        whole = total(row.base(), head, crc) == sum_
    except (ValueError, TypeError, UnicodeError, msgspec.MsgspecError):
        return None
    return row if whole else None


def make(con: sqlite3.Connection, key: SessionKey, now: float) -> Row:
    """Return a session's row; a new one has epoch 0."""
    row = find(con, key)
    if row is not None:
        return row
    id_ = _first_id(key)
    while con.execute(Q["session"], {"id": id_}).fetchone():
        id_ += 1
    row = Row(id_, key)
    con.execute(Q["insert_session"], _values(row, now))
    return row


def save(con: sqlite3.Connection, row: Row, now: float) -> None:
    """Write a row."""
    con.execute(Q["update_session"], _values(row, now))


def _values(row: Row, now: float) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in Row.__struct_fields__ if name != "key"}
    key = row.key
    return {
        **values,
        "tenant": key.tenant,
        "agent": key.agent,
        "session": key.session,
        "sum": total(row.base(), row.head, row.crc),
        "now": now,
    }


def held(con: sqlite3.Connection, key: SessionKey, epoch: int) -> Row:
    """Return a session's row, for the holder of this epoch.

    Raises:
        LeaseLostError: The epoch is not the newest, or the session was deleted.

    """
    row = find(con, key)
    if row is None or row.epoch != epoch or row.state == DELETED or not epoch:
        raise lost(key, epoch, row)
    return row


def lost(key: SessionKey, epoch: int, row: Row | None) -> LeaseLostError:
    """Return the error for a write under an epoch that is over."""
    newest = row.epoch if row else 0
    gone = ", and it was deleted" if row and row.state == DELETED else ""
    message = f"epoch {epoch} of {key} may not write: the newest is {newest}{gone}; open it again"
    return LeaseLostError(message, key=str(key), epoch=epoch, newest=newest)


def damaged(key: SessionKey, what: str) -> CorruptRecordError:
    """Return the error for damage to one session."""
    message = (
        f"session {key} is damaged in the database: {what}; nothing was changed: restore it from "
        f"a copy, or {salvage_cure(key)}"
    )
    return CorruptRecordError(message, key=str(key))
