"""Images and other media in requests: as many as a provider takes, and those that tools return.

Chat Completions and Gemini take no images in a tool's result: there they follow in a message of the
user's, and the result says so. What a request has no room for leaves a note, the oldest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from perdure.memory.media import LIMITS, TOO_MUCH, kept_of
from perdure.providers.context_fit import ContextTarget
from perdure.providers.issued import stamp_of
from perdure.providers.parts import Media, Text, plain, read_part, shown
from perdure.providers.tool_pairs import Exchange
from perdure.records.media import LOST, Medium, media_of_all, noted, with_media
from perdure.records.messages import Message

BELOW: Final = "shown in the next message"


def within_limits(messages: Sequence[Message], format: str) -> list[Message]:
    """Return messages with notes for media that a request has no room for, or that are lost."""
    limits = LIMITS[format.partition("-")[0]]
    found = [(at, medium, len(text)) for at, medium, text in media_of_all(messages)]
    if not found:
        return list(messages)

    def fits(medium: Medium, size: int) -> bool:
        return not medium.name and (medium.kind != "image" or size <= limits.image)

    shares = [limits.share(size) if fits(medium, size) else 0.0 for _, medium, size in found]
    first, place = kept_of(shares), -1

    def decide(medium: Medium, text: str) -> str | None:
        nonlocal place
        place += 1
        return text if place >= first and fits(medium, len(text)) else None

    with_some = {at for at, _, _ in found}
    return [
        with_media(message, decide, _why) if at in with_some else message
        for at, message in enumerate(messages)
    ]


def _why(medium: Medium) -> str:
    return LOST if medium.name else TOO_MUCH


def _listed(message: Message) -> list[Any]:
    result = None if message.tool_result is None else message.tool_result.result
    return result if isinstance(result, list) else [result]


def beside_results(exchanges: Sequence[Exchange], target: ContextTarget) -> Iterator[Exchange]:
    """Yield exchanges in which media that tools returned follow the results."""
    for exchange in exchanges:
        if not exchange.results:
            yield exchange
            continue
        media: list[Any] = []
        results: list[Message] = []
        for message in exchange.results:
            result = message.tool_result
            own = target.own(stamp_of(message))
            is_sent = own is not None and own.sent
            blocks = None if result is None or result.error or is_sent else shown(result.result)
            if result is None or blocks is None:
                results.append(message)
                continue
            said = "\n".join(
                part.text if isinstance(part, Text) else plain(part)
                for part in map(read_part, _listed(noted(message, BELOW)))
            )
            results.append(
                msgspec.structs.replace(
                    message, tool_result=msgspec.structs.replace(result, result=said)
                )
            )
            name = result.name or "the tool"
            media.append({"type": "text", "text": f"[what {name} has returned:]"})
            media += [block for part, block in blocks if isinstance(part, Media)]
        yield Exchange(exchange.head, tuple(results))
        if media:
            yield Exchange(Message.user(media))
