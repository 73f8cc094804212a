"""Replies and histories of providers, read as plain values: what all formats have in common."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from math import isfinite
from typing import Any, Final

import msgspec

from perdure.errors import FormatError
from perdure.providers.context_fit import (
    LISTS,
    STYLE,
    Format,
    RenderedContext,
    clean,
    read_json,
    style_of,
)
from perdure.providers.issued import (
    Issuer,
    fields_of,
    items_said,
    raw,
    sent_stamp,
    stamp_of,
    stamped,
)
from perdure.records.messages import Extra, Message, ToolCall

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
        raise FormatError(
            f"a reply of type {type(reply).__name__} cannot be read: give the response as a dict, "
            "or as the object that the SDK returns; a list of messages is a history, which "
            "session.extend(history, format) takes",
            type=type(reply).__name__,
        )
    fields: dict[str, Any] = dump(mode="json", by_alias=True, exclude_unset=True, warnings=False)
    return _sendable(fields)


def _sendable(reply: dict[str, Any]) -> dict[str, Any]:
    """Return a reply without halves of surrogate pairs, which can be neither stored nor sent."""
    try:
        # Most replies have none: an attempt costs less than a look at every text.
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
    return FormatError(
        f"this is no reply in the format {format!r}: {reason}; give the whole response",
        format=format,
    )


def check_role(format: str, answer: Mapping[str, Any], own: str) -> None:
    """Refuse a message that is not the model's; a reply may leave its role out.

    Raises:
        FormatError: Its role is another one.

    """
    role = answer.get("role")
    if role is None or role == own:
        return
    raise FormatError(
        f"a message with the role {role!r} is no reply in the format {format!r}, whose replies "
        f"have the role {own!r}: append it with {_CALLS.get(str(role), _OTHER_CALL)}, "
        f"or a whole history with session.extend(history, {format!r})",
        format=format,
        role=role,
    )


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
    # A JSON string is no object of arguments: it stays as the model wrote it.
    return text if isinstance(decoded, str) else decoded


def plain_text(value: Any) -> str:
    """Return text, or nothing for what is none."""
    return value if isinstance(value, str) else ""


# Two messages of one reply, as one


BETWEEN: Final = "\n\n"
"""Separator between the texts of two messages that are joined."""


def joined(first: Message, second: Message) -> Message:
    """Return one message that says what both say: text, reasoning, calls and media in order."""
    return msgspec.structs.replace(
        first,
        content=_content(first.content, second.content),
        reasoning="".join(filter(None, (first.reasoning, second.reasoning))) or None,
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
        return f"{first}{BETWEEN}{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _extra(first: Message, second: Message) -> Extra:
    extra = {**second.extra, **first.extra}
    left, right = stamp_of(first), stamp_of(second)
    stamp = left or right
    if stamp is None:
        return extra
    # Each part keeps its place; what another provider signed is of no use in this answer.
    same = right is None or (right.provider, right.format, right.model) == (
        stamp.provider,
        stamp.format,
        stamp.model,
    )
    items = list(items_said(second, right if same else None))
    gap = isinstance(first.content, str) and isinstance(second.content, str)
    for at, item in enumerate(items):
        # Only between two plain texts was a separator put in.
        if item.texts and gap and first.content and second.content:
            items[at] = msgspec.structs.replace(item, apart=len(BETWEEN))
            break
    items = [*items_said(first, left), *items]
    return stamped(msgspec.structs.replace(stamp, items=tuple(items)), extra)


# Histories of other programs, as plain values with their positions


Entry = dict[str, Any]

_INSTRUCTIONS: Final = {
    "openai": (),
    "openai-responses": ("instructions",),
    "anthropic": ("system",),
    "gemini": ("systemInstruction", "system_instruction"),
}
"""The names of the instructions in a request."""


class PlainHistory(msgspec.Struct):
    """A history as plain values."""

    entries: list[Any]
    system: Any
    """The instructions, where they came apart from the conversation; None for none."""
    name: str = "history"
    """Its name in errors: the field of a request that has the entries, such as ``messages``."""


def entries_of(history: object, format: Format) -> PlainHistory:
    """Return a history, or the conversation of a whole request, as plain values.

    Raises:
        FormatError: It is none, or holds what is neither JSON nor an SDK's object.

    """
    system: Any = None
    called = "history"
    if isinstance(history, RenderedContext):
        history = history.request
    if isinstance(history, Mapping):
        name = LISTS[format]
        entries_found = history.get(name)
        if entries_found is None:
            wanted = f"a list of messages, or a request with {name!r}"
            raise misfit(format, "history", f"is a dict without {name!r}", f"give {wanted}")
        for name in _INSTRUCTIONS[format]:
            system = history.get(name) if system is None else system
        called = LISTS[format]
        # The Responses API takes a single text as the whole input.
        history = [entries_found] if isinstance(entries_found, str) else entries_found
    if isinstance(history, (str, bytes)) or not isinstance(history, Iterable):
        raise misfit(
            format,
            called,
            f"is a {type(history).__name__}",
            "give the list of messages that a request has",
        )
    entries = [_entry(entry, format, f"{called}[{at}]") for at, entry in enumerate(history)]
    plain_system = None if system is None else _plain(system, format, "system")
    return PlainHistory(entries, plain_system, called)


def _entry(value: object, format: str, path: str) -> Any:
    if isinstance(value, Message):
        raise misfit(
            format,
            path,
            "is a Message of perdure's",
            "append what is a Message already with session.append(*messages)",
        )
    plain = _plain(value, format, path)
    if isinstance(plain, dict):
        return plain
    if isinstance(plain, str) and format in {"gemini", "openai-responses"}:
        return plain
    raise misfit(format, path, f"is a {type(value).__name__}", "give each message as a dict")


def _plain(value: object, format: str, path: str) -> Any:
    """Return what a dict, or an object of an SDK, holds."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bytes):
        value = base64.b64encode(value).decode()
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float) and not isfinite(value):
        cure = "a request cannot have that, so leave it out, or give it as text"
        raise misfit(format, path, f"is {value}, which JSON lacks", cure)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        value = dump(by_alias=True, exclude_unset=True, warnings=False)
    if isinstance(value, Mapping):
        odd = next((name for name in value if not isinstance(name, str)), "")
        if odd != "":
            raise misfit(format, path, f"has the key {odd!r}", "give text as keys")
        return {clean(name): _plain(item, format, f"{path}.{name}") for name, item in value.items()}
    if isinstance(value, Iterable):
        return [_plain(item, format, f"{path}[{at}]") for at, item in enumerate(value)]
    raise misfit(
        format,
        path,
        f"is a {type(value).__name__}, which is no JSON",
        "give text, numbers, lists and dicts, or the SDK's objects",
    )


def sent_message(format: str, entry: Entry, path: str, by: Issuer) -> Message:
    """Return a message of a user or the instructions, of whose role `role_in` knows."""
    content = content_in(format, entry, path)
    extra = fields_of(entry, frozenset({"role", "content"}))
    is_developer = entry["role"] == "developer"
    stamp = sent_stamp(by, format, extra, role="developer" if is_developer else None)
    return Message(role="system" if is_developer else entry["role"], content=content, extra=stamp)


def misfit(format: str, path: str, reason: str, cure: str) -> FormatError:
    """Return the error for what does not fit into a history."""
    message = f"invalid history in the format {format!r}: {path} {reason}; {cure}"
    index = path.partition("[")[2].partition("]")[0]
    field = path.partition("].")[2]
    return FormatError(
        message, format=format, index=int(index) if index else None, field=field or None
    )


def role_in(format: str, entry: Mapping[str, Any], path: str, roles: Sequence[str]) -> str:
    """Return the role of a message, one of those that its provider knows."""
    role = entry.get("role")
    if role in roles:
        return str(role)
    reason = f"is {role!r}" if "role" in entry else "is missing"
    other = _other_format(format, entry)
    cure = f"give one of {', '.join(map(repr, roles))}"
    raise misfit(format, f"{path}.role", reason, f"{cure}, or say {other!r}" if other else cure)


def _other_format(format: str, entry: Mapping[str, Any]) -> str | None:
    """Return the format that a message looks like, if that is another one."""
    if "parts" in entry:
        other = "gemini"
    elif "call_id" in entry or "encrypted_content" in entry:
        other = "openai-responses"
    elif entry.get("role") in {"developer", "tool", "function"}:
        other = "openai"
    else:
        return None
    return None if other == format else other


def content_in(format: str, entry: Mapping[str, Any], path: str, *, may_lack: bool = False) -> Any:
    """Return a message's content: text, or a list of parts."""
    content = entry.get("content")
    if isinstance(content, str) or (content is None and may_lack):
        return content
    if content is None:
        raise misfit(format, f"{path}.content", "is missing", "give text, or a list of parts")
    return objects_in(format, entry, "content", path)


def objects_in(format: str, owner: Mapping[str, Any], name: str, path: str) -> list[Entry]:
    """Return the objects of a list; none if it is not there."""
    objects = owner.get(name)
    if objects is None:
        return []
    if not isinstance(objects, list):
        is_a = f"is a {type(objects).__name__}"
        raise misfit(format, f"{path}.{name}", is_a, "give a list of objects")
    for at, item in enumerate(objects):
        if not isinstance(item, dict):
            is_a = f"is a {type(item).__name__}"
            raise misfit(format, f"{path}.{name}[{at}]", is_a, "give an object, as the API has it")
        if not isinstance(item.get("type", ""), str):
            raise misfit(
                format, f"{path}.{name}[{at}].type", f"is {item['type']!r}", "give the type as text"
            )
    return objects


def text_in(format: str, owner: Mapping[str, Any], name: str, path: str) -> str:
    """Return a field that has to be text."""
    text = owner.get(name)
    if isinstance(text, str) and (text or name not in {"id", "call_id", "tool_call_id", "name"}):
        return text
    reason = "is missing" if text is None else f"is {text!r}"
    raise misfit(format, f"{path}.{name}", reason, "give the text that the provider had there")


class WaitingCalls:
    """Calls of a history that no result has answered yet.

    Where results name functions and not calls, a result answers the first waiting call of its
    name. Those of the newest answers come first: a call that was cut off may wait for ever.
    """

    def __init__(self) -> None:
        self._runs: list[list[ToolCall]] = []
        """The calls of answers that stand in a row, the newest ones last."""
        self._in_row = False

    def ask(self, calls: Sequence[ToolCall]) -> None:
        """Take in an answer's calls; an answer without any changes nothing."""
        if not self._in_row:
            self._runs.append([])
            self._in_row = True
        self._runs[-1] += calls

    def pause(self) -> None:
        """Note that another role spoke: calls that follow belong to another answer."""
        self._in_row = False

    def answered(self, given: Sequence[tuple[object, str]]) -> list[ToolCall | None]:
        """Return which call each result answers; None for one that no call waits for.

        Args:
            given: The ids of results that came together, as far as they have any, and their names.

        """
        found = [self._pop(call_id) for call_id, _ in given]
        for name in {name for at, (_, name) in enumerate(given) if found[at] is None}:
            open_results = [
                at for at, (_, named) in enumerate(given) if named == name and found[at] is None
            ]
            calls: list[ToolCall] = []
            for run in reversed(self._runs):
                if len(calls) < len(open_results):
                    calls = [call for call in run if call.name == name] + calls
            for at, call in zip(open_results, calls, strict=False):
                found[at] = self._pop(call.id)
        return found

    def _pop(self, call_id: object) -> ToolCall | None:
        for run in self._runs:
            for call in run:
                if call.id == call_id:
                    run.remove(call)
                    return call
        return None


def written_call(call_id: str, name: str, text: Any, extra: Extra | None = None) -> ToolCall:
    """Return a call with its arguments, to be written to the letter as they were."""
    value = arguments(text)
    more: Extra = {} if extra is None else extra
    if not isinstance(text, str) or isinstance(value, str):
        return ToolCall(call_id, name, value, more)
    try:
        style = style_of(text, value)
    except ValueError:
        return ToolCall(call_id, name, text, more)
    return ToolCall(call_id, name, value, more if style is None else {**more, STYLE: raw(style)})
