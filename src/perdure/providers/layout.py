"""A stamped message, taken apart again into the parts of the reply that it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from perdure.model.messages import Message, ToolCall
from perdure.providers.issued import Issued, Item, pieces

__all__ = ["Placed", "laid_out"]


class Placed(msgspec.Struct, frozen=True):
    """A part of a reply, and what of the message stands in it."""

    block: dict[str, Any]
    """The part in the provider's shape; empty for what was added to the message since."""
    texts: tuple[str, ...] = ()
    reasoning: str | None = None
    call: int | None = None
    """The place of the tool call among the message's calls."""


def laid_out(message: Message, own: Issued) -> list[Placed]:
    """Return the parts of a message in the order in which its issuer wrote them.

    Text that has changed since stands where the first text was; reasoning that has changed, and
    calls that are gone, are left out, for no signature fits them any more.
    """
    texts = _texts(message, own.items)
    thoughts = _thoughts(message, own.items)
    left: list[ToolCall | None] = list(message.tool_calls)
    found: list[Placed] = []
    if message.text and not any(item.texts for item in own.items):
        found.append(Placed({}, (message.text,)))
    for item in own.items:
        placed = _placed(item, texts, thoughts, left)
        if placed is not None:
            found.append(placed)
    added = (Placed({}, call=at) for at, call in enumerate(left) if call is not None)
    return [*found, *added]


def _placed(
    item: Item, texts: Iterator[str], thoughts: Iterator[str] | None, left: list[ToolCall | None]
) -> Placed | None:
    block = msgspec.json.decode(item.block)
    if item.texts:
        return Placed(block, tuple(next(texts) for _ in item.texts))
    if item.reasoning is not None:
        return None if thoughts is None else Placed(block, reasoning=next(thoughts))
    if item.call is None:
        return Placed(block)
    for at, call in enumerate(left):
        if call is not None and call.id == item.call:
            left[at] = None
            return Placed(block, call=at)
    return None


def _texts(message: Message, items: Sequence[Item]) -> Iterator[str]:
    lengths = list(chain.from_iterable(item.texts for item in items))
    cut = pieces(message.text, lengths)
    return iter([message.text, *("" for _ in lengths[1:])] if cut is None else cut)


def _thoughts(message: Message, items: Sequence[Item]) -> Iterator[str] | None:
    lengths = [item.reasoning for item in items if item.reasoning is not None]
    cut = pieces(message.reasoning or "", lengths)
    return None if cut is None else iter(cut)
