"""One door for all formats: messages out, replies in."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, cast, get_args

import msgspec

from perdure.errors import InvalidArgumentError
from perdure.memory.media import LIMITS, TOO_MUCH, kept_of
from perdure.providers.context_fit import ContextTarget, Format, ReasoningPolicy, RenderedContext
from perdure.providers.issued import Issuer, stamp_of
from perdure.providers.parts import Media, Part, Unknown, plain, read_part, shown
from perdure.providers.repairs import repaired
from perdure.providers.replies import PlainHistory, entries_of
from perdure.providers.tool_pairs import Exchange, ReadExchange, paired, read_by
from perdure.records.media import LOST, Medium, media_of_all, noted, with_media
from perdure.records.messages import Message

FORMATS: Final[tuple[Format, ...]] = get_args(Format)
"""The formats that there are."""

_POLICIES: Final = get_args(ReasoningPolicy)


class Rules(Protocol):
    """A provider's module."""

    def render(self, said: Sequence[ReadExchange], target: ContextTarget) -> RenderedContext:
        """Return a conversation as the provider takes it."""
        ...

    def part_block(self, part: Part, source: Any) -> dict[str, Any]:
        """Return a part of a user's content, read from `source`, as the provider takes it."""
        ...

    def parse(self, reply: object, *, issuer: Issuer | str | None = None) -> Message:
        """Return a reply as a message."""
        ...

    def parse_history(self, given: PlainHistory, by: Issuer) -> list[Message]:
        """Return the messages of another program's history."""
        ...


def render(
    messages: Sequence[Message],
    format: Format,
    *,
    to: Issuer | str | None = None,
    reasoning: ReasoningPolicy = "strip_foreign",
) -> RenderedContext:
    """Return messages exactly as a provider's API takes them.

    Args:
        messages: A conversation, oldest first; it may have been cut off anywhere.
        format: Whose API it is.
        to: Who reads it, if that is not the one whose format it is: ``"deepseek"``, or an
            `Issuer` with a model, if reasoning must not go from one model to another.
        reasoning: Who gets reasoning, signatures and unknown fields.

    Raises:
        InvalidArgumentError: There is no such format or policy.

    """
    rules_of(format)  # refuses a format that there is not
    return rendered(within_limits(messages, format), format, to=to, reasoning=reasoning)


def rendered(
    messages: Sequence[Message],
    format: Format,
    *,
    to: Issuer | str | None,
    reasoning: ReasoningPolicy,
) -> RenderedContext:
    """Return messages that hold no media, or no more than the format takes; as `render`."""
    if reasoning not in _POLICIES:
        raise InvalidArgumentError(
            f"invalid reasoning={reasoning!r}: choose {', '.join(_POLICIES)}", option="reasoning"
        )
    target = ContextTarget(format, _issuer(format, to), reasoning)
    rules = rules_of(format)
    readable = [_readable(message, format) for message in messages]
    exchanges: Sequence[Exchange] = paired(readable).exchanges
    if format in {"openai", "gemini"}:
        exchanges = tuple(beside_results(exchanges, target))
    said = [read_by(exchange, target) for exchange in exchanges]
    return repaired(rules.render(said, target), target, rules.part_block)


def parse(
    reply: Mapping[str, Any] | object, format: Format, *, issuer: Issuer | str | None = None
) -> Message:
    """Return a provider's reply as a message, with everything that it said.

    Args:
        reply: The response as a dict, or as the SDK's object. The assistant's message
            alone will do too.
        format: Whose API it came from.
        issuer: Who wrote it, if that is not the one whose format it is.

    Raises:
        InvalidArgumentError: There is no such format.
        FormatError: It is no reply of this format.

    """
    return rules_of(format).parse(reply, issuer=issuer)


def parse_history(
    history: Iterable[Any], format: Format, *, issuer: Issuer | str | None = None
) -> list[Message]:
    """Return the messages of another program's history, with everything that they say.

    `render` makes the same history of them again for the same provider, and one that is taken
    for any other.

    Args:
        history: The list of messages as the provider's API takes it: dicts, or the SDK's
            objects. A whole request with its instructions, as a dict, will do too.
        format: Whose API it is for.
        issuer: Who wrote its answers, if that is not the one whose format it is.

    Raises:
        InvalidArgumentError: There is no such format.
        FormatError: Something in it is invalid; the error has its index and the field.

    """
    rules = rules_of(format)
    return rules.parse_history(entries_of(history, format), _issuer(format, issuer))


def rules_of(format: str) -> Rules:
    """Return the module of a format."""
    if format not in FORMATS:
        raise InvalidArgumentError(
            f"format {format!r} is unknown: choose {', '.join(FORMATS)}",
            option="format",
            value=format,
        )
    module = importlib.import_module(f"perdure.providers.{format.replace('-', '_')}")
    return cast(Rules, module)


def _issuer(format: Format, to: Issuer | str | None) -> Issuer:
    return to if isinstance(to, Issuer) else Issuer(to or format)


def _readable(message: Message, format: Format) -> Message:
    """Return a message of another provider's history with notes for what only that one reads."""
    content = message.content
    if not isinstance(content, list):
        return message
    stamp = stamp_of(message)
    if stamp is None or not stamp.sent or stamp.format == format:
        return message
    read = [(read_part(part), part) for part in content]
    if not any(isinstance(part, Unknown) for part, _ in read):
        return message
    content = [
        {"type": "text", "text": plain(part)} if isinstance(part, Unknown) else source
        for part, source in read
    ]
    return msgspec.structs.replace(message, content=content)


# Images and other media in requests: as many as a provider takes, and those that tools return
#
# Chat Completions and Gemini take no images in a tool's result: there they follow in a message of
# the user's, and the result says so. What a request has no room for leaves a note, the oldest
# first.


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
        with_media(message, decide, lambda medium: LOST if medium.name else TOO_MUCH)
        if at in with_some
        else message
        for at, message in enumerate(messages)
    ]


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
            below = noted(message, BELOW).tool_result
            assert below is not None
            parts = below.result if isinstance(below.result, list) else [below.result]
            said = "\n".join(map(plain, map(read_part, parts)))
            result_said = msgspec.structs.replace(result, result=said)
            results.append(msgspec.structs.replace(message, tool_result=result_said))
            name = result.name or "the tool"
            media.append({"type": "text", "text": f"[what {name} has returned:]"})
            media += [block for part, block in blocks if isinstance(part, Media)]
        yield Exchange(exchange.head, tuple(results))
        if media:
            yield Exchange(Message.user(media))
