"""What the providers' own SDKs say of a rendered context: their types are the judges."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from perdure.providers import RenderedContext


@cache
def _adapter(format: str) -> TypeAdapter[Any]:
    if format == "openai":
        from openai.types.chat import ChatCompletionMessageParam

        return TypeAdapter(ChatCompletionMessageParam)
    if format == "openai-responses":
        from openai.types.responses import ResponseInputItemParam

        return TypeAdapter(ResponseInputItemParam)
    if format == "anthropic":
        from anthropic.types import MessageParam

        return TypeAdapter(MessageParam)
    from google.genai.types import Content

    return TypeAdapter(Content)


def assert_accepted(context: RenderedContext) -> None:
    """Fail unless the SDK's type of a message takes each of them, and each of its fields."""
    for message in context.messages:
        found = _adapter(context.format).validate_python(message)
        if context.format == "gemini":  # its models forbid what they do not know
            continue
        assert _read(found) == message


def _read(value: Any) -> Any:
    """Read what pydantic validates only as it is read."""
    if isinstance(value, dict):
        return {name: _read(one) for name, one in value.items()}
    if isinstance(value, Iterator | list | tuple) or type(value).__name__ == "ValidatorIterator":
        return [_read(one) for one in value]
    return (
        value.model_dump(mode="json", exclude_unset=True) if hasattr(value, "model_dump") else value
    )
