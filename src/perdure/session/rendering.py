"""A working context in the shape that a model's client takes: pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from perdure.errors import ConfigError
from perdure.model.messages import Message

__all__ = ["ContextFormat", "render"]

ContextFormat = Literal["openai"] | None
"""None for `Message` objects, "openai" for the dicts of Chat Completions."""


def render(messages: Sequence[Message], format: ContextFormat) -> list[Any]:
    """Return messages in a format.

    Raises:
        ConfigError: There is no such format.

    """
    if format is None:
        return list(messages)
    if format == "openai":
        return [_openai(message) for message in messages]
    message = f"context format {format!r} is unknown: choose None or 'openai'"
    raise ConfigError(message, format=format)


def _openai(message: Message) -> dict[str, Any]:
    if message.tool_result is not None:
        result = message.tool_result
        body = result.result if result.error is None else result.error
        return {"role": "tool", "tool_call_id": result.call_id, "content": _text(body)}
    rendered: dict[str, Any] = {"role": message.role, "content": _parts(message)}
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _text(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return rendered


def _parts(message: Message) -> Any:
    if not message.image_urls:
        return message.content
    text = message.content or []
    parts = [{"type": "text", "text": text}] if isinstance(text, str) else list(text)
    images = ({"type": "image_url", "image_url": {"url": url}} for url in message.image_urls)
    return [*parts, *images]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
