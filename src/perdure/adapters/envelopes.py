"""Envelopes of what another SDK keeps in a session's log: whose it is, and in which shape.

A record of kind ``foreign`` is an envelope. A message has one in a field of its own, with what the
message alone does not give back. An item is one message, or several: one with the results of two
tools has two. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from perdure.errors import (
    CorruptRecordError,
    NotStorableError,
    TooLargeError,
    UnsupportedVersionError,
)
from perdure.records.json import decoder_of
from perdure.records.messages import Message, encode_message
from perdure.records.records import FOREIGN, Entry, Record

ENVELOPE: Final = "perdure_foreign"
"""The field of a message that says whose item it is."""
CUT: Final = 64
"""Length from which a text is not stored a second time in the envelope, in characters."""
TEXTS: Final = ("content", "reasoning", "result")
"""The texts of a message that a piece's number refers to."""

Piece = str | int
"""A part of an item's JSON: as text, or which of the message's `TEXTS`."""


class SdkEnvelope(msgspec.Struct, frozen=True):
    """Fields that everything stored for an SDK has."""

    sdk: str
    v: int
    """The version of the stored shape."""


class PartEnvelope(SdkEnvelope, frozen=True, omit_defaults=True):
    """Fields stored with a message that is an item, or a part of one."""

    id: str
    """The item's."""
    parent: str | None = None
    """The item that it follows, where its SDK has branches."""
    at: int = 0
    """Which of the item's messages."""
    of: int = 1
    """Number of its messages."""
    pieces: tuple[Piece, ...] = ()
    """The item's JSON, from where the message before ended."""


E = TypeVar("E", bound=SdkEnvelope)
P = TypeVar("P", bound=PartEnvelope)

_envelopes = msgspec.json.Decoder(SdkEnvelope)


def read_entry(record: Record, shape: type[E], *, sdk: str, newest: int) -> E | None:
    """Return a record that is an SDK's; None for any other.

    Raises:
        CorruptRecordError: It cannot be read.
        UnsupportedVersionError: A newer release wrote it.

    """
    if record.kind != FOREIGN:
        return None
    what = f"record {record.seq} of {sdk}"
    try:
        return _decoded(record.payload, shape, sdk=sdk, newest=newest, what=what)
    except msgspec.DecodeError as error:
        raise CorruptRecordError(f"{what} cannot be read: {error}", seq=record.seq) from error


def _decoded(
    data: bytes | msgspec.Raw, shape: type[E], *, sdk: str, newest: int, what: str
) -> E | None:
    stored: E | None = None
    failure: msgspec.DecodeError | None = None
    about: SdkEnvelope
    try:
        about = stored = decoder_of(shape).decode(data)
    except msgspec.DecodeError as error:  # also for another SDK's, or a newer shape
        about, failure = _envelopes.decode(data), error
    if about.sdk != sdk:
        return None
    if about.v > newest:
        message = (
            f"{what} has shape {about.v}, and this release reads up to {newest}: upgrade perdure"
        )
        raise UnsupportedVersionError(message, version=about.v)
    if failure is not None:
        raise failure
    return stored


def with_envelope(message: Message, envelope: SdkEnvelope) -> Message:
    """Return a message that is marked as an SDK's item."""
    field = msgspec.Raw(msgspec.json.encode(envelope))
    return msgspec.structs.replace(message, extra={**message.extra, ENVELOPE: field})


def read_envelope(message: Message, shape: type[E], *, sdk: str, newest: int) -> E | None:
    """Return the envelope of one of the SDK's items; None for any other message.

    Raises:
        UnsupportedVersionError: A newer release wrote it.

    """
    field = message.extra.get(ENVELOPE)
    if field is None:
        return None
    try:
        return _decoded(field, shape, sdk=sdk, newest=newest, what=f"an item of {sdk}")
    except msgspec.DecodeError:  # the field is another program's
        return None


# Items of several messages


def encode_parts(
    data: bytes,
    shown: Sequence[Message],
    envelope: Callable[[int, int, tuple[Piece, ...]], PartEnvelope],
    *,
    now: float,
) -> list[Entry]:
    """Return an item as records.

    One that nests deeper than a record may is stored as its text alone, and not shown.

    Args:
        data: Its JSON.
        shown: The messages that show it.
        envelope: Returns the envelope of a message: which it is, of how many, and its pieces.
        now: When the item was made, in seconds since 1970.

    Raises:
        TooLargeError: It is larger than a record may be.

    """

    def records(shown: Sequence[Message]) -> list[Entry]:
        parts = enumerate(zip(shown, pieces_of(data, shown), strict=True))
        return [
            encode_message(with_envelope(message, envelope(at, len(shown), pieces)), now=now)
            for at, (message, pieces) in parts
        ]

    try:
        return records(shown)
    except (NotStorableError, TooLargeError):
        return records([Message(role=shown[0].role)])


def read_parts(
    messages: Iterable[tuple[int, Message]],
    shape: type[P],
    *,
    sdk: str,
    newest: int,
) -> Iterator[tuple[int, Message, tuple[tuple[Message, P], ...]]]:
    """Yield items, each with its last record, that record's message, and all of its messages.

    A message that is no item is yielded without any; an item that began before these is left out.
    """
    parts: list[tuple[Message, P]] = []
    for seq, message in messages:
        envelope = read_envelope(message, shape, sdk=sdk, newest=newest)
        if envelope is None:
            yield seq, message, ()
            continue
        if envelope.at == 0:
            parts = []
        elif len(parts) != envelope.at or parts[0][1].id != envelope.id:
            continue
        parts.append((message, envelope))
        if len(parts) == envelope.of:
            yield seq, message, tuple(parts)


def pieces_of(data: bytes, shown: Sequence[Message]) -> list[tuple[Piece, ...]]:
    """Return an item's JSON in pieces, some for each message that shows it.

    Long texts that a message has as well are references to it, so that they are stored once.
    """
    begin = 0
    pieces: list[tuple[Piece, ...]] = []
    for at, message in enumerate(shown):
        own: list[Piece] = []
        for number in range(len(TEXTS)):
            text = _text_data(message, number)
            place = data.find(text, begin) if len(text) >= CUT else -1
            if place >= 0:
                own += [data[begin:place].decode(), number]
                begin = place + len(text)
        if at == len(shown) - 1:
            own.append(data[begin:].decode())
        pieces.append(tuple(own))
    return pieces


def joined(parts: Iterable[tuple[Message, PartEnvelope]]) -> bytes:
    """Return the JSON of an item: of its messages, each with its pieces."""
    return b"".join(
        piece.encode() if isinstance(piece, str) else _text_data(message, piece)
        for message, envelope in parts
        for piece in envelope.pieces
    )


def _text_data(message: Message, number: int) -> bytes:
    """Return one of a message's texts as JSON, nothing if it is no text."""
    result = message.tool_result
    texts = (message.content, message.reasoning, None if result is None else result.result)
    text = texts[number]
    return msgspec.json.encode(text) if isinstance(text, str) else b""
