"""Two messages of one reply, as one."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.model.messages import Extra, Message
from perdure.providers.issued import stamp_of, stamped

__all__ = ["joined"]


def joined(first: Message, second: Message) -> Message:
    """Return one message that says what both say: text, reasoning, calls and media in order."""
    return msgspec.structs.replace(
        first,
        content=_content(first.content, second.content),
        reasoning=_reasoning(first.reasoning, second.reasoning),
        tool_calls=(*first.tool_calls, *second.tool_calls),
        image_urls=(*first.image_urls, *second.image_urls),
        audio_urls=(*first.audio_urls, *second.audio_urls),
        video_urls=(*first.video_urls, *second.video_urls),
        extra=_extra(first, second),
        payload_extra={**first.payload_extra, **second.payload_extra},
    )


def _content(first: str | list[Any] | None, second: str | list[Any] | None) -> Any:
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _reasoning(first: str | None, second: str | None) -> str | None:
    return f"{first}{second}" if first is not None and second is not None else first or second


def _extra(first: Message, second: Message) -> Extra:
    extra = {**second.extra, **first.extra}
    one, other = stamp_of(first), stamp_of(second)
    if one is None or other is None:
        return extra
    if (one.provider, one.format, one.model) != (other.provider, other.format, other.model):
        return extra
    return stamped(msgspec.structs.replace(one, items=(*one.items, *other.items)), extra)
