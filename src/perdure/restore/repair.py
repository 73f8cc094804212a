"""What a provider would reject in a working context, and how it is repaired for good."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure.providers.parts import without_reasoning
from perdure.providers.target import ContextTarget
from perdure.providers.tool_pairs import (
    Dangling,
    paired,
)
from perdure.records.messages import Message


class Repair(msgspec.Struct, frozen=True):
    """A working context that no provider rejects."""

    messages: tuple[Message, ...]
    appended: tuple[Message, ...] | None
    """What to append to the original to get ``messages``; None if that is not enough."""
    closed: int = 0
    """Calls that were closed as interrupted."""
    dropped: int = 0
    """Calls that were left out."""
    orphans: int = 0
    """Results without a call, and second results, that were left out."""
    moved: int = 0
    """Results that came late, and now stand behind their call."""
    empty: int = 0
    """Answers with nothing in them that were left out."""
    joined: int = 0
    """Messages that were put back into the reply that they are part of."""
    stripped: int = 0
    """Messages whose reasoning and signatures the reader must not get."""


def repair(
    messages: Sequence[Message],
    policy: Dangling = "interrupted",
    *,
    target: ContextTarget | None = None,
) -> Repair:
    """Return the messages as every provider takes them.

    Mending what is mended changes nothing.

    Args:
        messages: A working context.
        policy: What becomes of tool calls without a result.
        target: Who reads it next, if what others issued is to be stripped for good:
            a provider that has once refused a signature refuses it each time.

    """
    given = tuple(messages)
    repaired = paired(given, policy)
    mended = repaired.messages
    stripped = 0
    if target is not None:
        bare = tuple(without_reasoning(message, target) for message in mended)
        stripped = sum(part is not other for part, other in zip(bare, mended, strict=True))
        mended = bare
    is_longer = mended[: len(given)] == given
    return Repair(
        mended,
        mended[len(given) :] if is_longer else None,
        closed=repaired.closed,
        dropped=repaired.dropped,
        orphans=repaired.orphans,
        moved=repaired.moved,
        empty=repaired.empty,
        joined=repaired.joined,
        stripped=stripped,
    )
