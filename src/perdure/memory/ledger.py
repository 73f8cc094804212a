"""The ledger: what an agent has begun and not ended. Messages, tool effects and approvals.

Folded from the log, and pure: a record opens an entry, changes it, or ends it, and ended entries
are dropped. So the ledger is as small as the work in progress, however long the history is. Fields
of a newer release are preserved. A fork begins with an empty ledger: work in progress belongs to
its origin, and a record of the fork ends it there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, TypeVar

import msgspec

from perdure.records.json import decode, decode_with, decoder_of, encode
from perdure.records.manifest import Origin
from perdure.records.records import ADMITTED, APPROVAL, BASE, EFFECT, GAP, Entry, Record, gap_in

LEDGER: Final = "ledger.json"
"""The document that the records fold to."""
LEDGER_KINDS: Final = frozenset({ADMITTED, APPROVAL, EFFECT, BASE, GAP})
OVER: Final = "over"
"""The state of an entry that has ended."""
MOST: Final = 1000
"""Number of entries of a kind that are kept; the oldest are dropped. More messages are refused."""

Policy = Literal["replay", "skip", "ask"]
"""Policy for a tool's effect that a crash left unknown: call the tool again with the same
idempotency key, skip it, or ask."""


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was posted to an agent, and whose turn has not ended."""

    id: str
    message: msgspec.Raw = msgspec.Raw(b"")
    """As stored; empty if only its turn has it."""
    seq: int | None = None
    """The seq of its record in that case."""
    at: float
    """Seconds since 1970."""
    asked: str | None = None
    """The turn's id, if the sender chose one."""
    turn: str | None = None
    """The turn that was begun for it."""
    attempts: int = 0
    """Number of times its turn was begun."""
    error: str | None = None
    """The error that the turn failed with, if it did."""


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool with side effects whose outcome is not known yet."""

    id: str
    """Also the idempotency key that the tool gets, the same each time."""
    turn: str
    """The turn's id."""
    call: str
    """The tool call's id."""
    tool: str
    policy: Policy
    at: float
    """Seconds since 1970."""
    state: Literal["planned", "begun", "unknown", "decided"] = "planned"
    """Not begun; begun: it runs, or its process was killed; unknown; decided by a person."""
    decision: Literal["replay", "skip", "done"] | None = None
    """The decision: call again, skip it, or that it was done."""
    result: msgspec.Raw = msgspec.Raw(b"null")
    """With "done": the result."""
    told: bool = False
    """True if the model knows that the outcome is unknown: its turn does not wait for it."""


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call that waits for approval."""

    id: str
    turn: str
    """The turn's id."""
    call: str
    """The tool call's id."""
    tool: str
    at: float
    """Seconds since 1970."""
    answer: Literal["approved", "denied"] | None = None
    """None until it is answered."""
    why: str | None = None
    """Reason for which it was denied."""


E = TypeVar("E", Admitted, Effect, Approval)

Fields = dict[str, msgspec.Raw]
_FIELDS: Final = decoder_of(Fields)


class _Document(msgspec.Struct, omit_defaults=True):
    messages: dict[str, Fields] = {}
    effects: dict[str, Fields] = {}
    approvals: dict[str, Fields] = {}


class Ledger:
    """The entries, oldest first."""

    __slots__ = ("_document",)

    def __init__(self, data: bytes | None = None) -> None:
        decoder = decoder_of(_Document)
        self._document = _Document() if data is None else decode_with(decoder, data)

    def feed(self, kind: str, payload: bytes) -> None:
        """Apply the next record of one of the ledger's kinds."""
        if kind in {BASE, GAP}:
            is_fork = (
                decode(payload, Origin).begins_fork if kind == BASE else gap_in(payload).is_fork
            )
            # A fork did not begin its parent's open work, and must not finish it.
            if is_fork:
                self._document = _Document()
            return
        change = decode_with(_FIELDS, payload)
        entries = self._of(kind)
        name = _text(change, "id")
        # Finished entries leave, so that the document stays as small as the open work.
        if _text(change, "state") == OVER:
            entries.pop(name, None)
        elif name in entries:
            entries[name] = {**entries[name], **change}
        elif "at" in change:  # else a change to a dropped entry
            entries[name] = change
            if len(entries) > MOST:
                del entries[next(iter(entries))]

    def open_entries(self) -> list[tuple[str, str]]:
        """Return the kinds and ids of what is in progress."""
        return [(kind, name) for kind in (ADMITTED, EFFECT, APPROVAL) for name in self._of(kind)]

    def has_room(self, more: int) -> bool:
        """Return True if so many more messages would not drop the oldest."""
        return len(self._document.messages) + more <= MOST

    def messages(self) -> tuple[Admitted, ...]:
        """Return the unanswered messages; the one whose turn has begun comes first."""
        admitted = [_typed(message, Admitted) for message in self._document.messages.values()]
        # A message that is answered at once is noted with its turn, and so after waiting ones.
        return tuple(sorted(admitted, key=lambda message: message.turn is None))

    def fill(self, id: str, message: bytes | None) -> None:
        """Set a message that was read from its turn; None if it is not there any more."""
        entries = self._document.messages
        if message is None:
            entries.pop(id, None)
        else:
            entries[id] = {**entries[id], "message": msgspec.Raw(message)}

    def effects(self) -> tuple[Effect, ...]:
        """Return the effects whose outcome is not known."""
        return tuple(_typed(effect, Effect) for effect in self._document.effects.values())

    def approvals(self) -> tuple[Approval, ...]:
        """Return the approvals of calls that have no result."""
        return tuple(_typed(approval, Approval) for approval in self._document.approvals.values())

    def document(self) -> bytes | None:
        """Return ledger.json; None for an empty one."""
        document = self._document
        if not (document.messages or document.effects or document.approvals):
            return None
        return msgspec.json.format(encode(document), indent=2)

    def _of(self, kind: str) -> dict[str, Fields]:
        document = self._document
        if kind == ADMITTED:
            return document.messages
        return document.effects if kind == EFFECT else document.approvals


def fold_ledger(old: bytes | None, records: Iterable[Record]) -> bytes | None:
    """Return ledger.json after ``records``; None if no work is in progress."""
    ledger = Ledger(old)
    for record in records:
        ledger.feed(record.kind, record.payload)
    return ledger.document()


def change_entry(kind: str, id: str, **fields: Any) -> Entry:
    """Return the record that changes an entry."""
    return Entry(kind, encode({"id": id, **fields}))


def _typed(fields: Fields, type: type[E]) -> E:
    return decode_with(decoder_of(type), encode(fields))


def _text(fields: Fields, name: str) -> str:
    raw = fields.get(name)
    return "" if raw is None else str(msgspec.json.decode(raw))
