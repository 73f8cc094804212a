"""The context's budget: how large messages are, and how much of it they take.

Bytes are those of the stored JSON. Tokens are what ``count_tokens`` says; by default a quarter
of the bytes, which is near the truth for English text and too much for most other JSON. Give
your model's own counter where it matters.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from perdure.model.messages import Message

__all__ = ["BYTES_A_TOKEN", "CountTokens", "bytes_of", "estimated_tokens", "share_of", "tokens_of"]

CountTokens = Callable[[Message], int]
"""Return how many tokens a message takes."""

BYTES_A_TOKEN: Final = 4


def bytes_of(message: Message) -> int:
    """Return how many bytes of JSON a message takes, near enough for a budget."""
    fields: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_payload"] = message.tool_calls
    if message.tool_result is not None:
        fields["tool_payload"] = message.tool_result
    for name in ("image_urls", "audio_urls", "video_urls"):
        if getattr(message, name):
            fields[name] = getattr(message, name)
    beside = sum(len(bytes(raw)) for raw in message.extra.values())
    return len(msgspec.json.encode(fields, enc_hook=repr)) + beside


def estimated_tokens(message: Message) -> int:
    """Return a quarter of a message's bytes, rounded up.

    >>> estimated_tokens(Message.user("Where is the harbor?"))
    12
    """
    return -(-bytes_of(message) // BYTES_A_TOKEN)


def tokens_of(messages: Iterable[Message], count: CountTokens) -> int:
    """Return how many tokens messages take together."""
    return sum(count(message) for message in messages)


def share_of(
    message: Message, size: int, *, max_bytes: int, max_tokens: int | None, count: CountTokens
) -> float:
    """Return how much of a budget a message takes, by whichever limit it takes more of.

    Messages whose shares come to 1.0 at most are within both limits.
    """
    share = size / max_bytes
    if max_tokens is None:
        return share
    return max(share, count(message) / max_tokens)
