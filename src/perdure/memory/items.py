"""Long-term memory: what is kept of turns that have left the working context.

Episodic items sum up past turns, semantic items are facts distilled from them. Each is
a record of the log, and a line of ``episodic.jsonl`` or ``semantic.jsonl`` once it is
folded; the field names are the format. Values and their encoding, nothing that acts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar

import msgspec

from perdure.records.json import decode, encode
from perdure.records.records import ITEM, Entry

T = TypeVar("T")


class EpisodicItem(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of some turns."""

    id: str
    ts: float
    """Seconds since 1970."""
    turn_ids: tuple[str, ...] = ()
    summary: str
    salience: float = 0.0
    as_of_seq: int = 0
    """The last record that is summed up: all turns up to it are in long-term memory."""


class SemanticItem(msgspec.Struct, frozen=True, kw_only=True):
    """A fact."""

    id: str
    ts: float
    category: str = "durable_fact"
    fact: str
    salience: float = 0.0


class MemoryBundle(msgspec.Struct, frozen=True):
    """What was retrieved for a working context: oldest episode first, weightiest fact first."""

    episodic: tuple[EpisodicItem, ...] = ()
    semantic: tuple[SemanticItem, ...] = ()


def item_entry(item: EpisodicItem | SemanticItem) -> Entry:
    """Return the record that remembers an item."""
    memory: Literal["episodic", "semantic"] = (
        "episodic" if isinstance(item, EpisodicItem) else "semantic"
    )
    return Entry(ITEM, encode({"memory": memory, "item": item}))


def items_of(lines: Iterable[bytes], kind: type[T]) -> list[T]:
    """Return the items that a document's lines hold, each id once: the newest line counts.

    Raises:
        CorruptRecordError: A line is damaged.

    """
    items = [decode(line, kind) for line in lines if line.strip()]
    return list({getattr(item, "id", at): item for at, item in enumerate(items)}.values())
