"""Raw traces: the log's messages, turn by turn.

Reads the store only, and so sees what is durable; whoever needs the newest saves first.
Messages that were appended outside of any turn make turns of their own, each opened by
a user message.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import Literal

import msgspec

from perdure.codec.json import decode
from perdure.memory.documents import Turned
from perdure.model.keys import SessionKey
from perdure.model.records import MESSAGE_KINDS, TURN, Record
from perdure.store import Store

__all__ = ["RawTurn", "Turns", "newest_turns", "read_turns"]


class _Role(msgspec.Struct):
    role: str = ""


class RawTurn(msgspec.Struct, kw_only=True):
    """One turn's messages, still encoded."""

    id: str = ""
    """Empty for messages outside of any turn."""
    messages: list[bytes] = msgspec.field(default_factory=list)
    last: int = 0
    """The seq of its last record."""
    phase: Literal["open", "end", "interrupted"] = "open"


class Turns:
    """Group records into turns, fed oldest first."""

    def __init__(self) -> None:
        self._turn: RawTurn | None = None

    def feed(self, record: Record) -> RawTurn | None:
        """Take in the next record; return the turn that is over by it, if any."""
        if record.kind == TURN:
            return self._boundary(record)
        if record.kind not in MESSAGE_KINDS:
            return None
        turn, over = self._turn, None
        if turn is None or (not turn.id and turn.messages and _opens(record)):
            turn, over = RawTurn(), turn
            self._turn = turn
        turn.messages.append(record.payload)
        turn.last = record.seq
        return over

    def rest(self) -> RawTurn | None:
        """Return the turn that is not over, if there is one."""
        return self._turn

    def _boundary(self, record: Record) -> RawTurn | None:
        turned, turn = decode(record.payload, Turned), self._turn
        if turned.phase == "begin":
            self._turn = RawTurn(id=turned.turn, last=record.seq)
            return turn  # a process was killed within it, or it has no end of its own
        self._turn = None
        if turn is None or turn.id != turned.turn:  # its beginning was not read
            return turn
        turn.last = record.seq
        turn.phase = "end" if turned.phase == "end" else "interrupted"
        return turn


async def read_turns(
    store: Store, key: SessionKey, *, after: int = 0
) -> AsyncGenerator[RawTurn, None]:
    """Read the turns behind a record, oldest first; the last one may still be open."""
    turns = Turns()
    async with contextlib.aclosing(store.read_log(key, after=after)) as log:
        async for chunk in log:
            for record in chunk.records:
                over = turns.feed(record)
                if over is not None:
                    yield over
    rest = turns.rest()
    if rest is not None:
        yield rest


async def newest_turns(
    store: Store, key: SessionKey, count: int, *, exclude: str | None = None
) -> list[RawTurn]:
    """Return the newest turns, oldest first, without the one of an id."""
    wanted = count + (exclude is not None)
    newest: deque[Record] = deque()
    begins = users = 0
    async with contextlib.aclosing(store.read_log(key, reverse=True)) as log:
        async for chunk in log:
            for record in chunk.records:
                newest.appendleft(record)
                begins += record.kind == TURN and decode(record.payload, Turned).phase == "begin"
                users += record.kind in MESSAGE_KINDS and _opens(record)
            if begins >= wanted or (begins == 0 and users >= wanted):
                break
    found = [turn for turn in _grouped(newest) if turn.messages and turn.id != (exclude or None)]
    return found[-count:] if count > 0 else []


def _grouped(records: Iterable[Record]) -> list[RawTurn]:
    turns = Turns()
    found = [turns.feed(record) for record in records]
    return [turn for turn in (*found, turns.rest()) if turn is not None]


def _opens(record: Record) -> bool:
    return decode(record.payload, _Role).role == "user"
