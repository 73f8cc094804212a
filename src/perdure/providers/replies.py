"""What all ways in have in common: the reply as a dict, and its calls' arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from perdure.errors import FormatError
from perdure.providers.context_fit import clean, read_json
from perdure.providers.issued import Issuer, stamp_of, stamped
from perdure.records.messages import Extra, Message

_CALLS: Final = {
    "system": "session.append(Message.system(text))",
    "developer": "session.append(Message.system(text))",
    "tool": "session.append(Message.tool(call_id, result))",
    "function": "session.append(Message.tool(call_id, result))",
}
_OTHER_CALL: Final = (
    "session.append(Message.user(text)), or a tool's result with "
    "session.append(Message.tool(call_id, result))"
)


def as_dict(reply: object) -> dict[str, Any]:
    """Return a reply as a dict: it is one, or the SDK's object can be made into one.

    Raises:
        FormatError: It is neither.

    """
    if isinstance(reply, Mapping):
        return _sendable(dict(reply))
    dump = getattr(reply, "model_dump", None)
    if dump is None:
        message = (
            f"a reply of type {type(reply).__name__} cannot be read: give the response as a dict, "
            "or as the object that the SDK returns; a list of messages is a history, which "
            "session.extend(history, format) takes"
        )
        raise FormatError(message, type=type(reply).__name__)
    fields: dict[str, Any] = dump(mode="json", by_alias=True, exclude_unset=True, warnings=False)
    return _sendable(fields)


def _sendable(reply: dict[str, Any]) -> dict[str, Any]:
    """Return a reply without halves of surrogate pairs, which can be neither stored nor sent."""
    try:
        msgspec.json.encode(reply, enc_hook=str)
    except UnicodeEncodeError:
        cleaned: dict[str, Any] = _cleaned(reply)
        return cleaned
    return reply


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {_cleaned(name): _cleaned(item) for name, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value


def listed(format: str, owner: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the objects of a list in a reply; none if it is not there.

    Raises:
        FormatError: It is no list of objects, or what kind one is of is no text.

    """
    items = owner.get(name)
    if items is None:
        return []
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise not_a_reply(format, f"its {name} is no list of objects")
    if not all(isinstance(item.get("type", ""), str) for item in items):
        raise not_a_reply(format, f"something in its {name} has a type that is no text")
    return items


def not_a_reply(format: str, reason: str) -> FormatError:
    """Return the error for what is no reply of a format."""
    message = f"this is no reply in the format {format!r}: {reason}; give the whole response"
    return FormatError(message, format=format)


def check_role(format: str, answer: Mapping[str, Any], own: str) -> None:
    """Refuse a message that is not the model's; a reply may leave its role out.

    Raises:
        FormatError: Its role is another one.

    """
    role = answer.get("role")
    if role is None or role == own:
        return
    message = (
        f"a message with the role {role!r} is no reply in the format {format!r}, whose replies "
        f"have the role {own!r}: append it with {_CALLS.get(str(role), _OTHER_CALL)}, "
        f"or a whole history with session.extend(history, {format!r})"
    )
    raise FormatError(message, format=format, role=role)


def issuer_of(format: str, issuer: Issuer | str | None, model: Any) -> Issuer:
    """Return who wrote a reply; the model that it names counts where none is given."""
    if isinstance(issuer, Issuer):
        return issuer
    return Issuer(issuer or format, model if isinstance(model, str) else None)


def arguments(text: Any) -> Any:
    """Return a call's arguments: decoded if they are JSON, else as the model wrote them.

    >>> arguments('{"at": "harbor"}'), arguments('{"at": "har'), arguments("")
    ({'at': 'harbor'}, '{"at": "har', {})
    """
    if not isinstance(text, str):
        return {} if text is None else text
    if not text.strip():
        return {}
    try:
        decoded = read_json(text)
    except msgspec.DecodeError:
        return text
    return text if isinstance(decoded, str) else decoded


def plain_text(value: Any) -> str:
    """Return text, or nothing for what is none."""
    return value if isinstance(value, str) else ""


# Two messages of one reply, as one


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
    left, right = stamp_of(first), stamp_of(second)
    if left is None or right is None:
        return extra
    if (left.provider, left.format, left.model) != (right.provider, right.format, right.model):
        return extra
    return stamped(msgspec.structs.replace(left, items=(*left.items, *right.items)), extra)
