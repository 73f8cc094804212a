"""Attempts at a turn: the records that one owns, and the request in it.

It decides what a retry takes back of a turn that was cut, and what it gets of one that has ended:
what the turn owns, and nothing from outside of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, Self

import msgspec

from perdure.memory.context import RetractionPayload, Retractions
from perdure.memory.documents import TurnPayload
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.messages import MADE_UP
from perdure.records.records import (
    MESSAGE_KINDS,
    OUTSIDE,
    RETRACT,
    TAKEN,
    TOOL_CALL,
    TOOL_RESULT,
    TURN,
    Entry,
    Record,
    begins_epoch,
)
from perdure.store import Store, first_record

_OUTSIDE_KINDS: Final = frozenset({OUTSIDE, TAKEN})
"""Kinds that say that their group is no part of a turn."""
_MADE_UP: Final = b'"%b":' % MADE_UP.encode()


class _Call(msgspec.Struct):
    id: Any = None


class _Payload(msgspec.Struct):
    tool_calls: list[_Call] = []
    tool_call_id: Any = None


class _Said(msgspec.Struct):
    tool_payload: _Payload = msgspec.field(default_factory=_Payload)


class Attempt(msgspec.Struct):
    """The newest attempt at a turn, with the attempts that resumed it."""

    number: int
    request: str | None = None
    """The fingerprint of what was asked in it."""
    messages: list[Record] = []
    seqs: list[int] = []
    """Its own records, its begin and its end among them."""
    shown: bool = False
    """False if all of it was taken back."""

    @classmethod
    def of(cls, newest_first: Sequence[Record]) -> Self:
        """Find it in a log from its begin on, in which no other turn begins."""
        retractions = Retractions()
        shown = {record.seq for record in newest_first if retractions.shows(record)}
        attempt = cls(decode(newest_first[-1].payload, TurnPayload).attempt)
        runs, calls = False, set[Any]()
        for group in _groups(reversed(newest_first)):
            outside = any(record.kind in _OUTSIDE_KINDS for record in group)
            for record in group:
                if record.kind == TURN:
                    turned = decode(record.payload, TurnPayload)
                    attempt.request = turned.request or attempt.request
                    runs = turned.phase == "begin"
                # What another holder wrote is not the attempt's, until a record resumes it.
                elif begins_epoch(record):
                    runs = False
                is_own = record.kind == TURN or (runs and not outside)
                if record.kind == TOOL_CALL and is_own:
                    payload = decode(record.payload, _Said).tool_payload
                    calls.update(call.id for call in payload.tool_calls)
                if is_own or _repairs(record, calls):
                    attempt.seqs.append(record.seq)
                    if record.kind in MESSAGE_KINDS and record.seq in shown:
                        attempt.messages.append(record)
        attempt.shown = not shown.isdisjoint(attempt.seqs)
        return attempt

    def retraction(self, turn_id: str) -> RetractionPayload:
        """Return what takes it back."""
        spans: list[tuple[int, int]] = []
        for seq in self.seqs:
            begins = not spans or seq > spans[-1][1] + 1
            spans.append((seq, seq) if begins else (spans.pop()[0], seq))
        return RetractionPayload(of=(turn_id, self.number), spans=tuple(spans))


async def cut_attempt(newest_first: AsyncIterable[Record], turn_id: str) -> Attempt | None:
    """Return what a turn of this id left that was cut, if no other turn has begun since."""
    newer: list[Record] = []
    async for record in newest_first:
        newer.append(record)
        if record.kind == TURN:
            turned = decode(record.payload, TurnPayload)
            if turned.turn != turn_id or not turned.given or turned.phase == "end":
                return None
            if turned.phase == "begin" and not turned.resumed:
                attempt = Attempt.of(newer)
                # Before 0.1.0 attempts had no number. A retraction among their records was for
                # someone else's, and which ones it spared is not known.
                retracts = any(record.kind == RETRACT for record in newer)
                return attempt if attempt.shown and (attempt.number or not retracts) else None
    return None


async def ended_attempt(newest_first: AsyncIterable[Record], turn_id: str) -> Attempt | None:
    """Return the attempt with which a turn of this id ended; None if the log has lost it."""
    own: list[Record] = []  # from its end on, so that nothing later takes back what it said
    async for record in newest_first:
        phase = ""
        if record.kind == TURN:
            turned = decode(record.payload, TurnPayload)
            if turned.given and turned.turn == turn_id and not turned.resumed:
                phase = turned.phase
        if own or phase == "end":
            own.append(record)
        if own and phase == "begin":
            return Attempt.of(own)
    return None


async def continued(
    store: Store, key: SessionKey, epoch: int, before: int | None = None
) -> tuple[Entry, ...]:
    """Return what goes before a former holder's records where they follow another one's epoch.

    If a named turn ran where the log ended for that holder, it says that they continue that turn.
    """

    def decides(record: Record) -> bool:
        return record.kind == TURN or (begins_epoch(record) and record.epoch <= epoch)

    found = await first_record(store.read_log(key, before=before, reverse=True), decides)
    if found is None or found.kind != TURN:
        return ()
    turned = decode(found.payload, TurnPayload)
    if not turned.given or turned.phase != "begin":
        return ()
    return (Entry(TURN, encode(msgspec.structs.replace(turned, resumed=True)), end=False),)


def _repairs(record: Record, calls: Collection[Any]) -> bool:
    """Return True for the result that a restore made up for one of these calls."""
    if record.kind != TOOL_RESULT or _MADE_UP not in record.payload:
        return False
    return decode(record.payload, _Said).tool_payload.tool_call_id in calls


def _groups(records: Iterable[Record]) -> Iterator[list[Record]]:
    group: list[Record] = []
    for record in records:
        group.append(record)
        if record.end:
            yield group
            group = []
    yield group
