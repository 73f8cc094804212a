"""Stamp of a message: who issued it, and the parts that only the issuer understands.

A reply has parts that perdure understands (text, tool calls) and parts that only its
provider does (signatures, encrypted reasoning, results of its own tools), in an order that
matters. `parse` puts the first where every reader finds them, and all the rest in a stamp: one
field of ``Message.extra``. Text and arguments are not repeated in it, so that what is redacted
in a message is redacted everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, isnan
from typing import Any, Final

import msgspec

from perdure.records.json import decoder_of
from perdure.records.messages import MESSAGE_FIELDS, RESERVED, Extra, Message, ToolCall

STAMP: Final = "perdure_issued"
"""The field of a message that holds the stamp."""
PLAIN: Final = msgspec.Raw(b"{}")
"""The block of what no provider signed, in a message with parts that one did."""
_THEIRS: Final = f"{RESERVED}theirs:"
"""Prefix of a foreign field whose name begins as those of perdure's own marks do."""


class Issuer(msgspec.Struct, frozen=True):
    """Writer of replies, which reads its own reasoning."""

    provider: str
    """``openai``, ``anthropic``, ``gemini``, or whose API it is: ``deepseek``, ``openrouter`` …"""
    model: str | None = None
    """None fits every model of the provider."""

    def wrote(self, stamp: Issued) -> bool:
        """Say whether a stamp is this issuer's; a model that is not known is no difference."""
        if self.provider != stamp.provider:
            return False
        return self.model is None or stamp.model is None or self.model == stamp.model


class IssuedPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a reply, in the provider's own shape, without what is in the message."""

    block: msgspec.Raw
    texts: tuple[int, ...] = ()
    """Lengths of its text parts in the message's text."""
    reasoning: int | None = None
    """Length of its part of the message's reasoning."""
    call: str | None = None
    """The id of the tool call that is here."""
    apart: int = 0
    """Length of the separator before these, where two messages were joined."""


class Issued(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stamp of a message."""

    provider: str
    format: str
    model: str | None = None
    items: tuple[IssuedPart, ...] = ()
    """The reply's parts in their order; empty if text and then calls is all there was."""
    reasoning_field: str | None = None
    """The name under which the reply brought its reasoning, where that differs by provider."""
    reply: dict[str, msgspec.Raw] = {}
    """Fields of the reply around the message: its id, why it stopped, what it took."""
    sent: bool = False
    """True if it came with a history: it stood in a request, and goes back in the same shape."""
    role: str | None = None
    """The provider's role, where it is not the message's: ``developer``, ``function``."""
    shape: str | None = None
    """Field in which a history said it, where the message does not show that."""
    follows: bool = False
    """True if it stood in one message of the history with the message before."""


def stamped(stamp: Issued, extra: Extra | None = None) -> Extra:
    """Return a message's unknown fields with a stamp among them."""
    return {**(extra or {}), STAMP: raw(stamp)}


def sent_stamp(by: Issuer, format: str, extra: Extra | None = None, **how: Any) -> Extra:
    """Return the unknown fields of a message that came with a history, with its stamp.

    A field that has a name of the message's own is kept in the stamp, and not sent back.
    """
    given = extra or {}
    clash = {name: value for name, value in given.items() if name in MESSAGE_FIELDS}
    own_fields = {name: value for name, value in given.items() if name not in MESSAGE_FIELDS}
    return stamped(Issued(by.provider, format, by.model, reply=clash, sent=True, **how), own_fields)


def stamp_of(message: Message) -> Issued | None:
    """Return a message's stamp; None if it has none."""
    stamp = message.extra.get(STAMP)
    if stamp is None:
        return None
    try:
        return decoder_of(Issued).decode(stamp)
    except msgspec.DecodeError:  # the field is another program's
        return None


def raw(value: object) -> msgspec.Raw:
    """Return a value as raw JSON; NaN and infinities, which JSON lacks, are there as text.

    >>> bytes(raw({"logprob": float("-inf")}))
    b'{"logprob":"-Infinity"}'
    """
    data = msgspec.json.encode(value, enc_hook=str)
    if b"null" in data:  # msgspec writes so what is not finite
        data = msgspec.json.encode(_finite(value), enc_hook=str)
    return msgspec.Raw(data)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(member) for member in value]
    if not isinstance(value, float) or isfinite(value):
        return value
    return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"


def fields_of(values: Mapping[str, Any], known: frozenset[str]) -> Extra:
    """Return the fields that are not known and say something, as raw JSON.

    None of them is taken for a mark of perdure's own, even with the same name.
    """
    return {
        f"{_THEIRS}{name}" if name.startswith(RESERVED) else name: raw(value)
        for name, value in values.items()
        if name not in known and value is not None
    }


def opaque(extra: Extra, *, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the provider's unknown fields as values; perdure's own marks are left out."""
    return {
        name.removeprefix(_THEIRS): msgspec.json.decode(value)
        for name, value in extra.items()
        if not _is_mark(name) and name not in without
    }


def marks(extra: Extra) -> Extra:
    """Return what perdure noted among the unknown fields; the stamp is left out."""
    return {name: value for name, value in extra.items() if _is_mark(name) and name != STAMP}


def _is_mark(name: str) -> bool:
    return name.startswith(RESERVED) and not name.startswith(_THEIRS)


def pieces(text: str, lengths: Sequence[int]) -> list[str] | None:
    """Cut a text into pieces of these lengths; None if they do not add up to it.

    >>> pieces("Hello world", [5, 6])
    ['Hello', ' world']
    >>> pieces("Hello", [5, 6]) is None
    True
    """
    if sum(lengths) != len(text):
        return None
    texts: list[str] = []
    start = 0
    for length in lengths:
        texts.append(text[start : start + length])
        start += length
    return texts


# A stamped message, taken apart again into the parts of the reply that it was


class PlacedPart(msgspec.Struct, frozen=True):
    """A part of a reply, and what of the message is in it."""

    block: dict[str, Any]
    """The part in the provider's shape; empty for what was added to the message since."""
    texts: tuple[str, ...] = ()
    reasoning: str | None = None
    call: int | None = None
    """The place of the tool call among the message's calls."""


def items_said(message: Message, own: Issued | None) -> tuple[IssuedPart, ...]:
    """Return a message's parts: those of its stamp, or text and then calls.

    >>> len(items_said(Message.assistant("Hi", tool_calls=[ToolCall("a", "look")]), None))
    2
    """
    if own is not None and own.items:
        return own.items
    texts = (len(message.text),) if message.text else ()
    thoughts = None if message.reasoning is None else len(message.reasoning)
    return (
        *(IssuedPart(PLAIN, reasoning=thoughts) for _ in range(thoughts is not None)),
        *(IssuedPart(PLAIN, texts=texts) for _ in texts),
        *(IssuedPart(PLAIN, call=call.id) for call in message.tool_calls),
    )


def laid_out(message: Message, own: Issued) -> list[PlacedPart]:
    """Return the parts of a message in the order in which its issuer wrote them.

    Text that has changed since replaces the first text; reasoning that has changed, and
    calls that are gone, are left out, for no signature fits them any more.
    """
    texts = _texts(message, own.items)
    lengths = [item.reasoning for item in own.items if item.reasoning is not None]
    cut = pieces(message.reasoning or "", lengths)
    thoughts = None if cut is None else iter(cut)
    unplaced: list[ToolCall | None] = list(message.tool_calls)
    parts_placed: list[PlacedPart] = []
    if message.text and not any(item.texts for item in own.items):
        parts_placed.append(PlacedPart({}, (message.text,)))
    for item in own.items:
        placed = _placed(item, texts, thoughts, unplaced)
        if placed is not None:
            parts_placed.append(placed)
    added = (PlacedPart({}, call=at) for at, call in enumerate(unplaced) if call is not None)
    return [*parts_placed, *added]


def _placed(
    item: IssuedPart,
    texts: Iterator[str],
    thoughts: Iterator[str] | None,
    unplaced: list[ToolCall | None],
) -> PlacedPart | None:
    block = msgspec.json.decode(item.block)
    if item.texts:
        return PlacedPart(block, tuple(next(texts) for _ in item.texts))
    if item.reasoning is not None:
        thought = None if thoughts is None else next(thoughts)
        return PlacedPart(block, reasoning=thought) if block and thought is not None else None
    if item.call is None:
        return PlacedPart(block)
    for at, call in enumerate(unplaced):
        if call is not None and call.id == item.call:
            unplaced[at] = None
            return PlacedPart(block, call=at)
    return None


def _texts(message: Message, items: Sequence[IssuedPart]) -> Iterator[str]:
    lengths: list[tuple[int, bool]] = []
    for item in items:
        if item.apart:
            lengths.append((item.apart, False))
        lengths += [(length, True) for length in item.texts]
    cut = pieces(message.text, [length for length, _ in lengths])
    if cut is None:
        return iter([message.text, *("" for _ in lengths[1:])])
    return (text for text, (_, is_own) in zip(cut, lengths, strict=True) if is_own)
