"""A record that the user has encoded: checked once, appended for nothing.

Pure.
"""

from __future__ import annotations

import re
from typing import Any, Final, final

from perdure.codec import json
from perdure.codec.limits import (
    MAX_PAYLOAD_DEPTH,
    MAX_RECORD_BYTES,
    check_size,
    is_deeper,
    too_deep,
)
from perdure.codec.messages import decode_message
from perdure.errors import CorruptRecordError, NotStorableError
from perdure.model.records import MESSAGE_KINDS, Entry

__all__ = ["RESERVED_KINDS", "Encoded"]

RESERVED_KINDS = frozenset(
    {"base", "checkpoint", "checkpoints_pruned", "context", "effect", "ending", "epoch"}
    | {"event", "foreign", "fork", "item"}
    | {"memory_drop", "memory_set", "meta", "retract", "segment", "state", "taken", "turn"}
    | {"admitted", "approval", "usage"}
)
"""Kinds whose records perdure writes itself, now or in a later release."""

_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_:.-]{0,63}")


@final
class Encoded:
    """A record of a kind of one's own, as the bytes that are stored.

    A payload is one JSON value in one line. Under a message's kind ("message", "tool_call",
    "tool_result") it must be a stored message. perdure carries other kinds through, and gives
    them back in the history as they are.

    >>> Encoded("app:rating", b'{"stars": 5}').kind
    'app:rating'

    Raises:
        NotStorableError: The kind or the payload does not fit.
        TooLargeError: The payload is deeper, or takes more bytes, than fits.

    """

    __slots__ = ("entry",)

    entry: Final[Entry]
    """The record as the log takes it."""

    def __init__(self, kind: str, payload: bytes) -> None:
        _check_kind(kind)
        _check_payload(payload)
        if kind in MESSAGE_KINDS:
            _check_message(payload)
        self.entry = Entry(kind, payload)

    @property
    def kind(self) -> str:
        """What kind of record it is."""
        return self.entry.kind

    @property
    def payload(self) -> bytes:
        """Its JSON."""
        return self.entry.payload

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Encoded) and self.entry == other.entry

    def __hash__(self) -> int:
        return hash(self.entry)

    def __repr__(self) -> str:
        return f"Encoded({self.kind!r}, <{len(self.payload)} bytes>)"


def _check_kind(kind: Any) -> None:
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        message = (
            f"kind={kind!r} does not fit: use 1 to 64 letters, digits, '_', ':', '.', '-', "
            "a letter first"
        )
        raise NotStorableError(message, option="kind")
    if kind in RESERVED_KINDS or kind.startswith("x:"):
        message = (
            f"kind={kind!r} is perdure's own: choose another, such as 'app:{kind}' "
            "(an instance of a registered type is appended as it is)"
        )
        raise NotStorableError(message, option="kind", kind=kind)


def _check_payload(payload: Any) -> None:
    if type(payload) is not bytes:
        raise json.not_storable("payload", payload, "give it as bytes")
    check_size(len(payload), MAX_RECORD_BYTES, at="payload")
    if b"\n" in payload or b"\r" in payload:
        raise json.not_storable("payload", payload, "it has line breaks: encode it without indent")
    if is_deeper(payload, MAX_PAYLOAD_DEPTH):
        raise too_deep("payload", MAX_PAYLOAD_DEPTH)
    try:
        json.decode(payload)
    except CorruptRecordError as error:
        message = f"the payload is not JSON that can be read back: {error}"
        raise NotStorableError(message, size=len(payload)) from None


def _check_message(payload: bytes) -> None:
    try:
        decode_message(payload)
    except CorruptRecordError as error:
        message = f"the payload is not a stored message: {error}; append a Message instead"
        raise NotStorableError(message, size=len(payload)) from None
