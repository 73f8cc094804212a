"""Limits and targets of providers: names, ids, arguments, results as text, alternating roles."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

from perdure.providers.issued import Issued, Issuer, opaque
from perdure.records.json import MAX_VALUE_DEPTH, is_deeper
from perdure.records.media import may_hold_media, noted
from perdure.records.messages import Message, ToolCall, ToolResult

_IN_NAMES: Final = frozenset(string.ascii_letters + string.digits + "_-")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
MAX_NAME: Final = 64
"""The most characters of a tool's name with most providers."""


def clean(text: str) -> str:
    """Return text that can be sent: half a surrogate pair cannot."""
    return _SURROGATE.sub("\ufffd", text)


def function_name(name: str, most: int = MAX_NAME, *, more: str = "") -> str:
    """Return a tool's name as every provider takes it: models make up others at times.

    Args:
        name: The name as the model wrote it.
        most: The most characters.
        more: Characters that are valid besides letters, digits, ``_`` and ``-``.

    >>> function_name("multi_tool_use.parallel")
    'multi_tool_use_parallel'
    """
    fit = "".join(char if char in _IN_NAMES or char in more else "_" for char in name)
    return fit[:most] or "unnamed"


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Return a call's arguments as an object, even if the model wrote something else.

    >>> arguments_of(ToolCall("a", "look", '{"at": "harbor"}'))
    {'at': 'harbor'}
    >>> arguments_of(ToolCall("a", "look", '{"at": "har'))
    {'invalid_json': '{"at": "har'}
    """
    arguments: Any = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else {}
        except msgspec.DecodeError:
            return {"invalid_json": arguments}
    else:
        arguments = json_value(arguments)
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else {"value": arguments}


STYLE: Final = "perdure_arguments"
"""The field of a call that says how its arguments were written, if not as perdure writes JSON."""
_LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "spaced": {},
    "compact": {"separators": (",", ":")},
    "indent-2": {"indent": 2},
    "indent-4": {"indent": 4},
}
_STYLES: Final[dict[str, dict[str, Any]]] = {
    **{f"{name}-utf8": {**one, "ensure_ascii": False} for name, one in _LAYOUTS.items()},
    **_LAYOUTS,
}


def style_of(text: str, value: Any) -> str | None:
    """Return the name of the style in which a value gives this very text; None for the usual one.

    Raises:
        ValueError: There is none.

    >>> style_of('{"at":"harbor"}', {"at": "harbor"}), style_of('{"at": 1}', {"at": 1})
    (None, 'spaced-utf8')
    """
    if text_of(value) == text:
        return None
    for name, style in _STYLES.items():
        if json.dumps(value, **style) == text:
            return name
    raise ValueError(text)


def sent_arguments(call: ToolCall) -> str:
    """Return a call's arguments in their original text, if they are an object in JSON.

    A provider finds the beginning of a request in its cache only if it is the same to the letter.
    """
    given, arguments = call.arguments, arguments_of(call)
    if isinstance(given, str):
        is_object = given.lstrip().startswith("{") and "invalid_json" not in arguments
        return given if is_object else text_of(arguments)
    name = call.extra.get(STYLE)
    style = None if name is None else _STYLES.get(msgspec.json.decode(name))
    return text_of(arguments) if style is None else json.dumps(arguments, **style)


def read_json(text: str) -> Any:
    """Return what a text says as JSON; a model may write anything.

    Raises:
        msgspec.DecodeError: It is no JSON, or nested deeper than a session stores.

    """
    data = text.encode("utf-8", "surrogatepass")
    if is_deeper(data, MAX_VALUE_DEPTH):
        raise msgspec.DecodeError("nested too deep")
    return msgspec.json.decode(data)


def text_of(value: Any) -> str:
    """Return a value as text: JSON, unless it is text already."""
    if isinstance(value, str):
        return clean(value)
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except (TypeError, ValueError, RecursionError):
        return clean(str(value))


def result_text(result: ToolResult) -> str:
    """Return what came of a call as text: the error, and the result if there is one."""
    value = without_media(result.result)
    if result.error is None:
        return text_of(value)
    error = clean(result.error) or "failed"
    return error if value is None else f"{error}\n\n{text_of(value)}"


NOT_SHOWN: Final = "which cannot be shown here"


def without_media(value: Any) -> Any:
    """Return a tool's result with notes where it holds images or other media as base64."""
    if not may_hold_media(value):
        return value
    result = noted(Message.tool("", value), NOT_SHOWN).tool_result
    return None if result is None else result.result


def json_value(value: Any) -> Any:
    """Return a value as plain JSON values."""
    try:
        return msgspec.to_builtins(value, enc_hook=str, str_keys=True)
    except (TypeError, ValueError, RecursionError):
        return str(value)


class CallIds:
    """Ids of calls within a conversation, as a provider takes them; the same for the same one.

    Args:
        allowed: What an id has to look like in full.
        unique: Whether an id may stand for one call only in the whole conversation.

    """

    def __init__(self, allowed: str, *, unique: bool = False) -> None:
        self._allowed = re.compile(allowed)
        self._unique = unique
        self._used: set[str] = set()
        self._renamed: dict[str, int] = {}

    def of(self, calls: tuple[ToolCall, ...]) -> list[str]:
        """Return the ids of a message's calls, in their order."""
        used = self._used if self._unique else set[str]()
        ids: list[str] = []
        for call in calls:
            fit = call.id
            if fit in used or not self._allowed.fullmatch(fit):
                number = self._renamed.get(call.id, 0) if self._unique else 0
                while (fit := _made_of(call.id, number)) in used:
                    number += 1
                self._renamed[call.id] = number
            used.add(fit)
            ids.append(fit)
        return ids


def _made_of(call_id: str, number: int) -> str:
    text = f"{number}:{call_id}".encode("utf-8", "surrogatepass")
    return f"call_{hashlib.sha256(text).hexdigest()[:24]}"


# Conversations in which two roles take turns, as Anthropic and Gemini want them


OPENING: Final = "[The beginning of this conversation is not shown.]"
"""The user's text where a conversation begins with the model."""
EMPTY: Final = "[empty message]"
"""Stand-in for an empty message of the user's."""


class MessageBlocks(list[dict[str, Any]]):
    """The blocks of one message of a history: it is not joined with another one of it."""

    def __init__(
        self, blocks: Iterable[dict[str, Any]], fields: dict[str, Any], *, text: bool = False
    ) -> None:
        super().__init__(blocks)
        self.fields = fields
        """The message's fields besides role and content."""
        self.text = text
        """True if it was given as text, and not as a list with text in it."""


Turns = list[tuple[str, list[dict[str, Any]]]]
"""Roles, and the blocks that each says at a time."""


def alternating(
    turns: Iterable[tuple[str, list[dict[str, Any]]]], opening: dict[str, Any]
) -> Turns:
    """Join what one role says in a row, leave out who says nothing, and let the user begin.

    What a history had in messages of their own stays so.
    """
    turns_found: Turns = []
    for role, blocks in turns:
        if not blocks:
            continue
        is_whole = isinstance(blocks, MessageBlocks)
        if (
            turns_found
            and turns_found[-1][0] == role
            and not (is_whole and isinstance(turns_found[-1][1], MessageBlocks))
        ):
            turns_found[-1][1].extend(blocks)
        else:
            turns_found.append((role, blocks if is_whole else list(blocks)))
    if turns_found and turns_found[0][0] != "user":
        turns_found.insert(0, ("user", [opening]))
    return turns_found


def as_sent(
    message: Message, own: Issued | None, blocks: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return blocks as those of one message, if a history had them in one."""
    if own is None or not own.sent or own.follows or not blocks:
        return blocks
    is_text = isinstance(message.content, str) and not own.items
    return MessageBlocks(blocks, opaque(message.extra), text=is_text)


# Targets of a rendered context, and the result


Format = Literal["openai", "openai-responses", "anthropic", "gemini"]
"""The shape of a provider's API: Chat Completions, Responses, Messages, generateContent."""

LISTS: Final[dict[Format, str]] = {
    "openai": "messages",
    "openai-responses": "input",
    "anthropic": "messages",
    "gemini": "contents",
}
"""The name of the conversation in a request."""

ReasoningPolicy = Literal["keep", "strip_foreign", "strip_all"]
"""Readers of reasoning, signatures and unknown fields: sent to every model with the format
they came in, only to the one that issued them, or to none."""


class ContextTarget(msgspec.Struct, frozen=True):
    """Reader of a context."""

    format: Format
    issuer: Issuer
    reasoning: ReasoningPolicy = "strip_foreign"

    def own(self, stamp: Issued | None) -> Issued | None:
        """Return a message's stamp if what it holds may be sent; None if it is to be stripped."""
        if stamp is None or stamp.format != self.format or self.reasoning == "strip_all":
            return None
        if self.reasoning == "keep" or self.issuer.wrote(stamp):
            return stamp
        return None


class RenderedContext(msgspec.Struct, frozen=True):
    """A context as a provider takes it."""

    format: Format
    messages: list[dict[str, Any]]
    """The conversation: messages, items (Responses) or contents (Gemini)."""
    system: str | list[dict[str, Any]] | None = None
    """The instructions, where the provider takes them apart from the conversation."""

    @property
    def request(self) -> dict[str, Any]:
        """Part of the request's body, by its names: ``create(model=…, **context.request)``.

        For Gemini these are the names of the REST API. Its SDK takes ``contents=context.messages``
        and ``config={"system_instruction": context.system}``.
        """
        request: dict[str, Any] = {LISTS[self.format]: self.messages}
        if self.system is None:
            return request
        if self.format != "gemini":
            return {**request, "system": self.system}
        parts = [{"text": self.system}] if isinstance(self.system, str) else self.system
        return {**request, "systemInstruction": {"parts": parts}}
