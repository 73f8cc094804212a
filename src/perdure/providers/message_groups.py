"""Groups of messages that belong together, for who reads only the end of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perdure.model.messages import Message

__all__ = ["groups", "newest"]


def groups(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Cut a conversation into groups that no provider takes apart: a message and its results.

    A result stands with the message before it that is no result; what stands before the first
    such message is a group of its own. Nothing is left out, and nothing moves.
    """
    found: list[list[Message]] = []
    for message in messages:
        if message.tool_result is None or not found:
            found.append([message])
        else:
            found[-1].append(message)
    return [tuple(group) for group in found]


def newest(
    messages: Sequence[Message], limit: int, size: Callable[[Message], int] = lambda _: 1
) -> tuple[Message, ...]:
    """Return the newest whole groups within a limit; the newest one even if it is larger.

    Args:
        messages: A conversation, oldest first.
        limit: The most that the groups may measure together.
        size: How a message is measured; each counts one if this is not given.

    """
    kept: list[tuple[Message, ...]] = []
    for group in reversed(groups(messages)):
        limit -= sum(map(size, group))
        if kept and limit < 0:
            break
        kept.append(group)
    return tuple(message for group in reversed(kept) for message in group)
