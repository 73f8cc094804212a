"""Rules of each provider for a request, field by field, and the repair where it would refuse.

One table, read by three: the renderers keep its limits, docs/contexts.md shows it, and the tests
judge each rendered request by it. `broken` returns which values of a request break a rule.

A field is named by its path in the request: ``messages[].name`` is the name of each message,
``messages[role=user].name`` that of the user's, ``content[type=text|image]`` parts of two types,
``content[*]`` those within parts as well.

Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import msgspec

Cure = Literal[
    "rendered",
    "sent",
    "renamed",
    "left out",
    "note",
    "shaped",
    "as text",
    "blank",
    "newest",
    "shortened",
    "apart",
    "no id",
]
"""Means of keeping a rule. ``rendered``: the provider's renderer, which writes nothing else.
``sent``: not at all, the field goes as it came. The others: by `perdure.providers.repairs`."""

TOOL_NAME: Final = r"[a-zA-Z0-9_-]{1,64}"
ANTHROPIC_NAME: Final = r"[a-zA-Z0-9_-]{1,128}"
GEMINI_NAME: Final = r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,63}"
CHAT_CALL_ID: Final = r"[\x21-\x7e]{1,40}"
RESPONSES_CALL_ID: Final = r"[\x21-\x7e]{1,64}"
ANTHROPIC_CALL_ID: Final = r"[a-zA-Z0-9_-]{1,64}"
ITEM_ID: Final = r"[a-zA-Z0-9_-]{1,64}"
IMAGES: Final = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
"""The images that OpenAI and Anthropic read; each other type is an error, at each request."""
GEMINI_IMAGES: Final = frozenset(
    {"image/jpeg", "image/png", "image/webp", "image/heic", "image/heif"}
)
MARKERS: Final = 4
"""The most cache markers in a request to Anthropic."""

SHAPES: Final = frozenset(
    {"text", "input_text", "output_text", "refusal", "image_url", "input_image", "input_audio"}
    | {"file", "input_file", "image", "document", "audio", "video", "computer_screenshot"}
)
"""The types of parts that perdure reads; one of another type is known to its provider alone."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule for some fields of a provider's requests."""

    fields: tuple[str, ...]
    """Their paths."""
    takes: str
    """Values that the provider accepts."""
    otherwise: str
    """The repair where a message has something else, and the reason."""
    cure: Cure
    pattern: str | None = None
    """Regular expression that text has to match in full."""
    names: frozenset[str] | None = None
    """The fields that an object may have."""
    types: frozenset[str] | None = None
    """The types that a part may have, of those in `SHAPES`."""
    is_closed: bool = False
    """True if types other than those in `SHAPES` are refused as well."""
    images: frozenset[str] | None = None
    """The media types of images."""
    is_object: bool = False
    """True if it is an object, or text that is one in JSON."""
    is_filled: bool = False
    """True if it, or the text of a part, may be neither blank nor empty."""
    is_listed: bool = False
    """True if a list of parts may not be empty, though text may be."""
    is_plain_error: bool = False
    """True if it is a tool's result that says nothing but text where it is an error."""
    never: bool = False
    """True if every value is refused."""
    most: int | None = None
    """The most that there may be in a request."""
    is_unique: bool = False
    """True if no two may be the same in a request."""
    is_falling: bool = False
    """True if a cache marker may not outlast one before it."""
    official: bool = False
    """True if only the provider itself has the rule, and not all who speak its format."""

    def accepts(self, value: Any) -> bool:
        """Say whether a value by itself keeps the rule."""
        if self.never or (self.is_filled and _is_blank(value)) or (self.is_listed and value == []):
            return False
        if self.pattern is not None:
            return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None
        if self.names is not None and not self.names.issuperset(value):
            return False
        if self.types is not None and not self._has_type(value):
            return False
        if self.images is not None and not _is_image(self.images, value):
            return False
        if self.is_object and not _is_object(value):
            return False
        return not self.is_plain_error or _is_plain_error(value)

    def _has_type(self, part: Any) -> bool:
        """Say whether a part, or each part of a message, has one of the types."""
        if isinstance(part, Mapping) and "role" in part:
            parts = part.get("content")
            return not isinstance(parts, list) or all(map(self._has_type, parts))
        kind = _type(part)
        assert self.types is not None
        return kind in self.types or (not self.is_closed and kind not in SHAPES)


class Place(NamedTuple):
    """Place of a value in a request."""

    owner: Any
    """A dict or a list."""
    key: Any

    @property
    def value(self) -> Any:
        """Return the value that is here."""
        return self.owner[self.key]


def places(request: Any, path: str) -> list[Place]:
    """Return the places in a request that a path names, in their order.

    >>> [place.value for place in places({"messages": [{"name": "ada"}, {}]}, "messages[].name")]
    ['ada']
    """
    return [Place(*place) for place in Walk(request).places(_steps(path))]


def broken(rule: Rule, request: Any, walk: Walk | None = None) -> list[Place]:
    """Return the places in a request that break a rule; a field that is None breaks none.

    Args:
        rule: The rule.
        request: The request.
        walk: One through this request, as it is, that was begun for other rules.

    """
    walk = walk or Walk(request)
    found = [place for path in rule.fields for place in walk.places(_steps(path))]
    given = [place for place in found if place[0][place[1]] is not None]
    values = [owner[key] for owner, key in given]
    wrong = {at for at, value in enumerate(values) if not rule.accepts(value)}
    if rule.is_unique:
        seen: set[str] = set()
        for at, value in enumerate(values):
            if isinstance(value, str):
                wrong |= {at} if value in seen else set()
                seen.add(value)
    if rule.is_falling:
        lasting = [isinstance(one, Mapping) and one.get("ttl") == "1h" for one in values]
        short = lasting.index(False) if False in lasting else len(lasting)
        wrong |= {at for at, lasts in enumerate(lasting) if lasts and at > short}
    if rule.most is not None and len(given) > rule.most:
        wrong = set(range(len(given)))
    return [Place(*given[at]) for at in sorted(wrong)]


class _Step(NamedTuple):
    name: str
    is_list: bool
    is_deep: bool
    field: str | None
    values: frozenset[str]
    is_other: bool
    """True if the field must have none of the values."""

    def takes(self, member: Any) -> bool:
        """Say whether a member of the list has one of the kinds."""
        kind = member.get(self.field) if isinstance(member, dict) else None
        return ((kind if isinstance(kind, str) else "") in self.values) != self.is_other


class Walk:
    """A walk through a request, in which paths that begin alike are followed once."""

    def __init__(self, request: Any) -> None:
        self._found: dict[tuple[_Step, ...], list[tuple[Any, Any]]] = {(): [([request], 0)]}

    # Each rendering walks, so nothing but a bare tuple is made of a place.
    def places(self, steps: tuple[_Step, ...]) -> list[tuple[Any, Any]]:
        """Return the places that steps lead to, in their order: each an owner, and a key in it."""
        found = self._found.get(steps)
        if found is None:
            before, step = steps[:-1], steps[-1]
            if step.field is not None:  # some of what is in the list
                every = self.places((*before, *_steps(f"{step.name}[]")))
                found = [(owner, key) for owner, key in every if step.takes(owner[key])]
            else:
                found = _members([owner[key] for owner, key in self.places(before)], step)
            self._found[steps] = found
        return found


_STEP: Final = re.compile(r"(\w+)(\[(?:(\w+)(!?)=([\w|]+)|(\*))?\])?\.?")


@lru_cache
def _steps(path: str) -> tuple[_Step, ...]:
    return tuple(
        _Step(
            found[1],
            bool(found[2]),
            bool(found[6]),
            found[3],
            frozenset((found[5] or "").split("|")),
            bool(found[4]),
        )
        for found in _STEP.finditer(path)
    )


def _members(owners: Sequence[Any], step: _Step) -> list[tuple[Any, Any]]:
    """Return the places in some owners that a step leads to."""
    having = [owner for owner in owners if isinstance(owner, dict) and step.name in owner]
    if not step.is_list:
        return [(owner, step.name) for owner in having]
    found: list[tuple[Any, Any]] = []
    for owner in having:
        members = owner[step.name]
        if not isinstance(members, list):
            continue
        for at, member in enumerate(members):
            if step.is_deep and isinstance(member, dict) and step.name in member:
                found += _members([member], step)  # a result's blocks are sent before it ends
            found.append((members, at))
    return found


def _is_object(value: Any) -> bool:
    if not isinstance(value, str):
        return isinstance(value, Mapping)
    try:
        return isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False


def _type(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _is_blank(value: Any) -> bool:
    text = value.get("text", value) if isinstance(value, Mapping) else value
    return not (text.strip() if isinstance(text, str) else text)


def _is_plain_error(result: Mapping[str, Any]) -> bool:
    content = result.get("content")
    if not result.get("is_error"):
        return True
    if not isinstance(content, list):
        return bool(content)
    return bool(content) and all(_type(part) == "text" for part in content)


_OF_IMAGES: Final = frozenset({"image_url", "source", "inlineData", "fileData"})


def _is_image(types: frozenset[str], part: Any) -> bool:
    """Say whether a part is an image of one of these types, or one that is elsewhere."""
    if isinstance(part, dict) and _OF_IMAGES.isdisjoint(part):
        return True
    if not isinstance(part, Mapping):
        return True
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if isinstance(url, str):
        head, _, data = url.partition(",")
        declared = head.removeprefix("data:").partition(";")[0]
        is_data = head.startswith("data:") and head.endswith(";base64")
        return url.startswith(("http://", "https://")) or (
            is_data and bool(data) and declared in types
        )
    source = part.get("source", part.get("inlineData"))
    if not isinstance(source, Mapping):
        file = part.get("fileData")
        declared = str(file.get("mimeType")) if isinstance(file, Mapping) else ""
        return not declared.startswith("image/") or declared in types
    if source.get("type") == "url":
        return str(source.get("url")).startswith("https://")
    declared = source.get("media_type", source.get("mimeType"))
    if source.get("type", "base64") != "base64" or not str(declared).startswith("image/"):
        return True
    return declared in types and bool(source.get("data"))


# The tables

_UNKNOWN: Final = (
    "Sent as it came, to its issuer alone: the provider's own and newer than this release, "
    "or your application's"
)
_NAME: Final = "Other characters become `_`, and the name is cut there"
_IMAGES: Final = "A note in its place; another name of such a type becomes the proper one"
_FOREIGN_PART: Final = (
    "Converted, or a note in its place; a part of a type that perdure does not know is sent as "
    "it came"
)

CHAT: Final = (
    Rule(
        fields=("messages[].name",),
        takes="1 to 64 letters, digits, `_` and `-`",
        otherwise=f"{_NAME}. An empty one is left out",
        cure="renamed",
        pattern=TOOL_NAME,
    ),
    Rule(
        fields=("messages[].tool_calls[].id", "messages[role=tool].tool_call_id"),
        takes="1 to 40 printable ASCII characters",
        otherwise="Another one, always the same, at the call and its result",
        cure="rendered",
        pattern=CHAT_CALL_ID,
    ),
    Rule(
        fields=(
            "messages[].tool_calls[].function.name",
            "messages[].tool_calls[].custom.name",
            "messages[].function_call.name",
        ),
        takes="1 to 64 letters, digits, `_` and `-`",
        otherwise=_NAME,
        cure="rendered",
        pattern=TOOL_NAME,
    ),
    Rule(
        fields=(
            "messages[].tool_calls[].function.arguments",
            "messages[].function_call.arguments",
        ),
        takes="an object in JSON",
        otherwise='`{}` for blank text, `{"invalid_json": …}` for what is no JSON',
        cure="rendered",
        is_object=True,
    ),
    Rule(
        fields=("messages[].tool_calls",),
        takes="a list that is not empty",
        otherwise="Left out",
        cure="rendered",
        is_filled=True,
    ),
    Rule(
        fields=("messages[role=assistant].audio",),
        takes="the id alone",
        otherwise="The id; the log keeps the rest",
        cure="rendered",
        names=frozenset({"id"}),
    ),
    Rule(
        fields=("messages[].content[].cache_control",),
        takes="not there, with OpenAI itself",
        otherwise="Left out; other providers of the format get it",
        cure="left out",
        never=True,
        official=True,
    ),
    Rule(
        fields=("messages[role=system|developer|tool|function].content[]",),
        takes="text, with OpenAI itself",
        otherwise="A note in its place",
        cure="note",
        types=frozenset({"text"}),
        is_closed=True,
        official=True,
    ),
    Rule(
        fields=("messages[role=assistant].content[]",),
        takes="text and refusals, with OpenAI itself",
        otherwise="A note in its place",
        cure="note",
        types=frozenset({"text", "refusal"}),
        is_closed=True,
        official=True,
    ),
    Rule(
        fields=("messages[role=user].content[]",),
        takes="the format's own types of parts, with OpenAI itself",
        otherwise=_FOREIGN_PART,
        cure="shaped",
        types=frozenset({"text", "image_url", "input_audio", "file"}),
        official=True,
    ),
    Rule(
        fields=("messages[role=user].content[type=image_url]",),
        takes="JPEG, PNG, GIF and WebP as data, and web addresses, with OpenAI itself",
        otherwise=_IMAGES,
        cure="shaped",
        images=IMAGES,
        official=True,
    ),
    Rule(
        fields=("messages[].content",),
        takes="no empty list",
        otherwise="Empty text",
        cure="blank",
        is_listed=True,
    ),
    Rule(fields=("…",), takes="any other field", otherwise=_UNKNOWN, cure="sent"),
)
RESPONSES: Final = (
    Rule(
        fields=("input[type!=local_shell_call_output].id",),
        takes="1 to 64 letters, digits, `_` and `-`; no id twice",
        otherwise="Left out, and an answer is sent as its text; a reference is left out",
        cure="no id",
        pattern=ITEM_ID,
        is_unique=True,
    ),
    Rule(
        fields=("input[type=message].id",),
        takes="begins with `msg`",
        otherwise="Left out, and the answer is sent as its text",
        cure="no id",
        pattern=r"msg.*",
    ),
    Rule(
        fields=("input[type=function_call].id",),
        takes="begins with `fc`",
        otherwise="Left out",
        cure="no id",
        pattern=r"fc.*",
    ),
    Rule(
        fields=("input[type=reasoning].id",),
        takes="begins with `rs`",
        otherwise="Left out",
        cure="no id",
        pattern=r"rs.*",
    ),
    Rule(
        fields=(
            "input[type=function_call|custom_tool_call|local_shell_call].call_id",
            "input[type=shell_call|apply_patch_call|computer_call].call_id",
        ),
        takes="1 to 64 printable ASCII characters; no call's twice",
        otherwise="Another one, always the same, at the call and its output",
        cure="rendered",
        pattern=RESPONSES_CALL_ID,
        is_unique=True,
    ),
    Rule(
        fields=("input[type=function_call|custom_tool_call].name",),
        takes="1 to 64 letters, digits, `_` and `-`",
        otherwise=_NAME,
        cure="rendered",
        pattern=TOOL_NAME,
    ),
    Rule(
        fields=("input[type=function_call].arguments",),
        takes="an object in JSON",
        otherwise='`{}` for blank text, `{"invalid_json": …}` for what is no JSON',
        cure="rendered",
        is_object=True,
    ),
    Rule(
        fields=("input[type=reasoning].status",),
        takes="not there",
        otherwise="Left out: it is for reading only",
        cure="rendered",
        never=True,
    ),
    Rule(
        fields=("input[type=reasoning].encrypted_content",),
        takes="what the provider wrote",
        otherwise=(
            "Sent as it came. Reasoning without it is sent if a history had it so (OpenAI keeps "
            "the item for 30 days, if `store` is on), else left out with the ids that need it"
        ),
        cure="sent",
    ),
    Rule(
        fields=("input[role=user|system|developer|assistant]",),
        takes="`type`, `role`, `content`, `id`, `status` and `phase` of a message",
        otherwise="Left out",
        cure="left out",
        names=frozenset({"type", "role", "content", "id", "status", "phase", "tools"}),
    ),
    Rule(
        fields=("input[role=user|system|developer].content[]",),
        takes="the format's own types of parts",
        otherwise=_FOREIGN_PART,
        cure="shaped",
        types=frozenset({"input_text", "input_image", "input_file", "input_audio"}),
    ),
    Rule(
        fields=("input[role=assistant]",),
        takes="`output_text` and refusals in its content",
        otherwise="All of it as text, with notes in the place of media",
        cure="as text",
        types=frozenset({"output_text", "refusal"}),
    ),
    Rule(
        fields=("input[type=function_call_output|custom_tool_call_output].output[]",),
        takes="the format's own types of parts",
        otherwise=_FOREIGN_PART,
        cure="shaped",
        types=frozenset({"input_text", "input_image", "input_file"}),
    ),
    Rule(
        fields=(
            "input[].content[type=input_image]",
            "input[].output[type=input_image]",
        ),
        takes="JPEG, PNG, GIF and WebP as data, web addresses, and files of the provider",
        otherwise=_IMAGES,
        cure="shaped",
        images=IMAGES,
    ),
    Rule(
        fields=("input[role=user|system|developer|assistant].content",),
        takes="no empty list",
        otherwise="Empty text",
        cure="blank",
        is_listed=True,
    ),
    Rule(fields=("…",), takes="any other field", otherwise=_UNKNOWN, cure="sent"),
)
_MARKERS: Final = ("system[].cache_control", "messages[].content[*].cache_control")
ANTHROPIC: Final = (
    Rule(
        fields=("messages[]",),
        takes="`role` and `content`",
        otherwise=(
            "Left out: the id, the usage and the like that a client's object, or a file of Claude "
            "Code's, has beside them"
        ),
        cure="left out",
        names=frozenset({"role", "content"}),
    ),
    Rule(
        fields=("messages[].content[type=thinking|redacted_thinking].cache_control",),
        takes="not there",
        otherwise="Left out",
        cure="left out",
        never=True,
    ),
    Rule(
        fields=_MARKERS,
        takes="at most 4 in a request; those of your `tools` count too",
        otherwise="The last one in the instructions and the newest others; the rest is left out",
        cure="newest",
        most=MARKERS,
    ),
    Rule(
        fields=_MARKERS,
        takes='no `"ttl": "1h"` after a marker of five minutes',
        otherwise="Without `ttl`: the marker holds for five minutes",
        cure="shortened",
        is_falling=True,
    ),
    Rule(
        fields=("messages[].content[type=text].citations[].file_id",),
        takes="not there, though replies have it",
        otherwise="Left out",
        cure="left out",
        never=True,
    ),
    Rule(
        fields=("messages[].content[type=tool_use].id",),
        takes="1 to 64 letters, digits, `_` and `-`; no id twice",
        otherwise="Another one, always the same, at the call and its result",
        cure="rendered",
        pattern=ANTHROPIC_CALL_ID,
        is_unique=True,
    ),
    Rule(
        fields=("messages[].content[type=tool_result].tool_use_id",),
        takes="that of a call",
        otherwise="The call's",
        cure="rendered",
        pattern=ANTHROPIC_CALL_ID,
    ),
    Rule(
        fields=("messages[].content[type=tool_use].name",),
        takes="1 to 128 letters, digits, `_` and `-`",
        otherwise=_NAME,
        cure="rendered",
        pattern=ANTHROPIC_NAME,
    ),
    Rule(
        fields=("messages[].content[type=tool_use].input",),
        takes="an object",
        otherwise='`{"invalid_json": …}` or `{"value": …}`',
        cure="rendered",
        is_object=True,
    ),
    Rule(
        fields=("messages[].content[type=tool_result].content[type=text]",),
        takes="text that is not blank",
        otherwise="The block is left out",
        cure="left out",
        is_filled=True,
    ),
    Rule(
        fields=("messages[].content[type=text].text",),
        takes="text that is not blank",
        otherwise="The block is left out, and `[empty message]` stands for an empty message",
        cure="rendered",
        is_filled=True,
    ),
    Rule(
        fields=("messages[].content[type=thinking].signature",),
        takes="what the provider wrote",
        otherwise="Thinking that was cut off before it is left out",
        cure="rendered",
        is_filled=True,
    ),
    Rule(
        fields=("messages[role=user].content[]", "messages[].content[type=tool_result].content[]"),
        takes="the format's own types of parts",
        otherwise=_FOREIGN_PART,
        cure="shaped",
        types=frozenset({"text", "image", "document"}),
    ),
    Rule(
        fields=("messages[].content[*]",),
        takes="JPEG, PNG, GIF and WebP as data, `https:` addresses, and files of the provider",
        otherwise=_IMAGES,
        cure="shaped",
        images=IMAGES,
    ),
    Rule(
        fields=("messages[].content[type=tool_result]",),
        takes="text alone, and some, where `is_error` is true",
        otherwise="The result's text, or `failed`; its images come after the results",
        cure="apart",
        is_plain_error=True,
    ),
    Rule(fields=("…",), takes="any other field", otherwise=_UNKNOWN, cure="sent"),
)
GEMINI: Final = (
    Rule(
        fields=("contents[]",),
        takes="`role` and `parts`",
        otherwise="Left out",
        cure="left out",
        names=frozenset({"role", "parts"}),
    ),
    Rule(
        fields=("contents[].role",),
        takes="`user`, `model` and `function`",
        otherwise="`user`, for the results of a tool",
        cure="rendered",
        pattern="user|model|function",
    ),
    Rule(
        fields=("contents[].parts[].functionCall.name", "contents[].parts[].functionResponse.name"),
        takes="1 to 64 letters, digits, `_`, `-`, `.` and `:`, a letter or `_` first",
        otherwise=_NAME,
        cure="rendered",
        pattern=GEMINI_NAME,
    ),
    Rule(
        fields=(
            "contents[].parts[].functionCall.args",
            "contents[].parts[].functionResponse.response",
        ),
        takes="an object",
        otherwise='`{"invalid_json": …}`, `{"value": …}`, `{"output": …}`',
        cure="rendered",
        is_object=True,
    ),
    Rule(
        fields=("contents[].parts[].thoughtSignature",),
        takes="what the provider wrote; from Gemini 3 on, at the first call of each answer",
        otherwise="Where the first call has none, the value that Google gives for that",
        cure="left out",
        is_filled=True,
    ),
    Rule(
        fields=("contents[].parts[]",),
        takes="JPEG, PNG, WebP, HEIC and HEIF as images",
        otherwise=_IMAGES,
        cure="shaped",
        images=GEMINI_IMAGES,
    ),
    Rule(fields=("…",), takes="any other field", otherwise=_UNKNOWN, cure="sent"),
)
RULES: Final[Mapping[str, tuple[Rule, ...]]] = {
    "openai": CHAT,
    "openai-responses": RESPONSES,
    "anthropic": ANTHROPIC,
    "gemini": GEMINI,
}
"""The table, by format."""
