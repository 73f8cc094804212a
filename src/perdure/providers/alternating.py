"""Conversations in which two roles take turns, as Anthropic and Gemini want them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from perdure.model.messages import Message

__all__ = ["EMPTY", "OPENING", "Turns", "Whole", "alternating", "system_texts"]

OPENING: Final = "[The beginning of this conversation is not shown.]"
"""What the user says where a conversation begins with the model."""
EMPTY: Final = "[empty message]"
"""What stands for a message of the user's with nothing in it."""


class Whole(list[dict[str, Any]]):
    """The blocks of one message of a history: it is not joined with another one of it."""

    def __init__(
        self, blocks: Iterable[dict[str, Any]], fields: dict[str, Any], *, text: bool = False
    ) -> None:
        super().__init__(blocks)
        self.fields = fields
        """What the message says beside role and content."""
        self.text = text
        """Whether it was given as text, and not as a list with text in it."""


Turns = list[tuple[str, list[dict[str, Any]]]]
"""Roles, and the blocks that each says at a time."""


def alternating(
    turns: Iterable[tuple[str, list[dict[str, Any]]]], opening: dict[str, Any]
) -> Turns:
    """Join what one role says in a row, leave out who says nothing, and let the user begin.

    What a history had in messages of their own stays so.
    """
    found: Turns = []
    for role, blocks in turns:
        if not blocks:
            continue
        is_whole = isinstance(blocks, Whole)
        if found and found[-1][0] == role and not (is_whole and isinstance(found[-1][1], Whole)):
            found[-1][1].extend(blocks)
        else:
            found.append((role, blocks if is_whole else list(blocks)))
    if found and found[0][0] != "user":
        found.insert(0, ("user", [opening]))
    return found


def system_texts(messages: Iterable[Message]) -> list[str]:
    """Return the instructions among messages, in their order."""
    return [one.text for one in messages if one.role == "system" and one.text.strip()]
