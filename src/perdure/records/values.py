"""Application values: JSON as it is, more than JSON with tags, and redaction of credentials.

``encode_value`` gives the value's JSON and a table ``{JSON pointer: tag}`` of the places
that JSON cannot represent. The caller stores the table next to the value, never inside, so
that no dict of an application can be mistaken for a tag. In a message the table is
``arguments_types`` next to ``arguments`` and ``tool_result_types`` next to ``tool_result``;
plain JSON has no table, and costs one pass over its containers.

    {"at": datetime(2026, 1, 2), "raw": b"x"}
    value  {"at": "2026-01-02T00:00:00", "raw": "eA=="}
    types  {"/at": "datetime", "/raw": "bytes"}

Comes back as itself: None, bool, int (any size up to 4,300 digits), finite float, str, list,
dict with str keys; bytes, bytearray, datetime, date, time, timedelta (a zone comes back as
its offset), Decimal, UUID, Path, tuple, set, frozenset; instances of registered types. An
instance of a subclass of str, int, float, list or dict comes back as that. Everything else
raises NotStorableError, which names the path, the type and the cure; so do NaN, infinities,
lone surrogates, circular references and values that nest too deep. With
``on_unstorable="repr"`` such a part becomes its repr instead, under the tag ``repr``.

For registered types the round trip is checked before storing (a field may hold what its
annotation does not allow); for the others it holds by construction. A tag that is unknown on
reading gives an `OpaqueValue`, which encodes to the same bytes.

Pure.
"""

from __future__ import annotations

import datetime as dt
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from math import isfinite
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias
from unicodedata import normalize
from uuid import UUID

import msgspec

from perdure.errors import CorruptRecordError, NotStorableError, TooLargeError
from perdure.records import json
from perdure.records.json import (
    LONE_SURROGATE,
    MAX_CONTAINERS,
    MAX_RECORD_BYTES,
    MAX_VALUE_DEPTH,
    is_deeper,
    not_storable,
    step,
    too_deep,
)

# A table of tags maps JSON pointers to labels. A label is one of perdure's own tags ("bytes"), or
# that of a registered type with its version ("x:Point@2").


Tags: TypeAlias = dict[str, str]


class OpaqueValue(msgspec.Struct, frozen=True):
    """A value whose type is not registered here; encodes to exactly the bytes that were stored."""

    tag: str
    version: int
    """0 for a tag of perdure's own that this release does not know."""
    data: msgspec.Raw
    types: Tags = {}

    def __hash__(self) -> int:
        return hash((self.tag, self.version, bytes(self.data)))

    @property
    def label(self) -> str:
        """The tag's label in a table."""
        return label_of(self.tag, self.version) if self.version else self.tag


class Types(Protocol):
    """The registered types, as far as values need them: `perdure.records.types.Registry`."""

    def dump(self, value: Any) -> tuple[str, Any] | None:
        """Return label and data of an instance of a registered type, else None."""

    def part(self, value: Any) -> Any:
        """Return the data of an instance that only occurs inside of registered types."""

    def knows(self, label: str) -> bool:
        """Return whether ``load`` can read data with this label."""

    def load(self, label: str, data: Any) -> Any:
        """Return the instance; raise FormatError if the data does not match the type."""

    def same(self, left: Any, right: Any) -> bool:
        """Return whether an instance came back equal to itself."""


class _NoTypes:
    def dump(self, value: Any) -> None: ...
    def part(self, value: Any) -> Any:
        return UNKNOWN

    def knows(self, label: str) -> bool:
        return False

    def load(self, label: str, data: Any) -> Any: ...
    def same(self, left: Any, right: Any) -> bool:
        return bool(left == right)


UNKNOWN = object()
"""Result of ``Types.part`` for a value of an unknown type."""
NO_TYPES: Types = _NoTypes()


def label_of(tag: str, version: int) -> str:
    """Return the label of a registered type."""
    return f"x:{tag}@{version}"


def parse_label(label: str) -> tuple[str, int]:
    """Return tag and version of a registered type's label; version 0 for any other tag."""
    if label.startswith("x:"):
        tag, _, version = label[2:].rpartition("@")
        if tag and version.isdecimal() and int(version) > 0:
            return tag, int(version)
    return label, 0


class NativeType(NamedTuple):
    """Conversion of one built-in type's values to JSON, and back."""

    tag: str
    lower: Callable[[Any], Any]
    lift: Callable[[Any], Any]


def _base64(value: bytes | bytearray) -> str:
    return b64encode(value).decode("ascii")


def _unbase64(text: str) -> bytes:
    return b64decode(text, validate=True)


_MICROSECOND = dt.timedelta(microseconds=1)

NATIVE: dict[type, NativeType] = {
    bytes: NativeType("bytes", _base64, _unbase64),
    bytearray: NativeType("bytearray", _base64, lambda text: bytearray(_unbase64(text))),
    dt.datetime: NativeType("datetime", dt.datetime.isoformat, dt.datetime.fromisoformat),
    dt.date: NativeType("date", dt.date.isoformat, dt.date.fromisoformat),
    dt.time: NativeType("time", dt.time.isoformat, dt.time.fromisoformat),
    dt.timedelta: NativeType(
        "timedelta",
        lambda span: span // _MICROSECOND,
        lambda number: dt.timedelta(microseconds=number),
    ),
    Decimal: NativeType("decimal", str, Decimal),
    UUID: NativeType("uuid", str, UUID),
    tuple: NativeType("tuple", list, tuple),
    set: NativeType("set", list, set),
    frozenset: NativeType("frozenset", list, frozenset),
    type(Path()): NativeType("path", str, Path),
}
LIFTS: dict[str, Callable[[Any], Any]] = {native.tag: native.lift for native in NATIVE.values()}
LIFTS["repr"] = str


def escape(key: str) -> str:
    """Return a key as one token of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def unescape(token: str) -> str:
    """Return the key of a pointer's token."""
    return token.replace("~1", "/").replace("~0", "~")


# Decoding is data only: a tag picks from a fixed table or from the types that the application has
# registered, never a name to import.


def lift(value: Any, tags: Mapping[str, str] | None, types: Types = NO_TYPES) -> Any:
    """Return the value that `lower` was given; ``value`` itself is modified.

    Raises:
        CorruptRecordError: A tag's place does not exist, or its data does not match the tag.

    """
    if not tags:
        return value
    root = [value]
    if max(map(_depth, tags)) > MAX_VALUE_DEPTH:
        raise _no_such_place(max(map(len, tags)))
    # The outermost places of unknown types, each with the tags below it in their order: what is
    # kept encodes to the same bytes again.
    unknown: dict[str, Tags] = {}
    for pointer in sorted(tags, key=_depth):
        is_known = tags[pointer] in LIFTS or types.knows(tags[pointer])
        if not is_known and _outermost(pointer, unknown) is None:
            unknown[pointer] = {}
    known: list[str] = []
    for pointer, tag in tags.items():
        above = _outermost(pointer, unknown)
        if above is not None:
            unknown[above][pointer[len(above) :]] = tag
        elif pointer not in unknown:
            known.append(pointer)
    for pointer, below in unknown.items():
        parent, last = _place(root, pointer)
        tag, version = parse_label(tags[pointer])
        parent[last] = OpaqueValue(tag, version, msgspec.Raw(json.encode(parent[last])), below)
    for pointer in sorted(known, key=_depth, reverse=True):  # inner places first
        parent, last = _place(root, pointer)
        parent[last] = _lift_one(tags[pointer], parent[last], types, pointer)
    return root[0]


def _depth(pointer: str) -> int:
    return pointer.count("/")


def _outermost(pointer: str, places: Mapping[str, object]) -> str | None:
    """Return the one of some places that a pointer is below; none is below another."""
    end = pointer.find("/") if places else -1
    while end >= 0:
        if pointer[:end] in places:
            return pointer[:end]
        end = pointer.find("/", end + 1)
    return None


def _place(root: list[Any], pointer: str) -> tuple[Any, Any]:
    """Return the container of a place, and the key or index in it."""
    parent: Any = root
    key: Any = 0
    try:
        if pointer and not pointer.startswith("/"):
            raise LookupError(pointer)  # noqa: TRY301
        for token in pointer.split("/")[1:]:
            parent = parent[key]
            key = int(token) if isinstance(parent, list) else unescape(token)
        parent[key]
    except (LookupError, TypeError, ValueError):
        raise _no_such_place(len(pointer)) from None
    return parent, key


def _no_such_place(length: int) -> CorruptRecordError:
    return CorruptRecordError(
        "a table of types names a place that its value does not have; it was left as it is",
        pointer_length=length,
    )


def _lift_one(tag: str, value: Any, types: Types, pointer: str) -> Any:
    lift_native = LIFTS.get(tag)
    if lift_native is None:
        return types.load(tag, value)
    try:
        return lift_native(value)
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        raise CorruptRecordError(
            f"a stored value at {pointer or '/'} is no {tag}; it was left as it is",
            path=pointer,
            tag=tag,
        ) from None


OnUnstorable: TypeAlias = Literal["raise", "repr"]

MAX_REPR = 16_384
"""The most characters of a repr that is stored in place of a value."""
MAX_INT_BITS = 14_284
"""An int of so many bits has at most 4,300 digits, the most that Python parses by default."""

_ATOMS = frozenset({str, int, bool, type(None)})

# More do not fit into a record: each takes at least two bytes.
_MOST_ITEMS = MAX_RECORD_BYTES // 2


def is_plain(value: Any) -> bool:
    """Return whether a value has JSON's own types only, is finite, and not too deep or large."""
    level: list[Any] = [[value]]
    containers, items = MAX_CONTAINERS, _MOST_ITEMS
    for _ in range(MAX_VALUE_DEPTH + 1):  # level by level, so that a circle ends too
        below: list[Any] = []
        for node in level:
            items -= len(node)
            if items < 0 or len(below) > containers or not _look(node, below):
                return False
        if not below:
            return True
        containers -= len(below)
        level = below
    return False


def _look(node: Any, below: list[Any]) -> bool:
    """Return whether a list's or dict's own items are plain; add containers to ``below``."""
    if type(node) is dict:
        for key in node:
            if type(key) is not str:
                return False
        node = node.values()
    for item in node:
        kind = type(item)
        if kind in _ATOMS:
            continue
        if kind is dict or kind is list:
            below.append(item)
        elif kind is not float or not isfinite(item):
            return False
    return True


class ValueEncoder:
    """Lower one value to JSON, part by part, with the path for errors."""

    def __init__(self, types: Types, on_unstorable: OnUnstorable, at: str) -> None:
        self.tags: Tags = {}
        self._types = types
        self._on_unstorable = on_unstorable
        self._at = at
        self._trail: list[str | int] = []
        self._open: set[int] = set()
        self._inside = 0  # registered instances around the place
        self._room = MAX_CONTAINERS

    def run(self, value: Any) -> tuple[Any, Tags | None]:
        """Return the whole value as JSON can hold it, and the table of its tags, if any."""
        try:
            return self.lower(value), self.tags or None
        except RecursionError:
            # The depth is limited: the caller has no stack left.
            raise NotStorableError(
                f"the value at {self._at} cannot be stored: the call stack is too deep here",
                path=self._at,
            ) from None

    def lower(self, value: Any) -> Any:
        """Return a value at the current place as JSON can hold it, and add its tags."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in NATIVE:
            return self._native(value, NATIVE[kind])
        if isinstance(value, OpaqueValue):
            return self._opaque(value)
        dumped = self._types.dump(value)
        if dumped is not None:
            return self._registered(value, *dumped)
        return self._json(value)

    def _json(self, value: Any) -> Any:
        """Lower JSON's own types, and their subclasses as these types."""
        match value:
            case Enum():
                return self._part(value)  # also where it is text or a number too
            case str():
                text = str.__str__(value)
                return text if _is_text(text) else self._unstorable(value, LONE_SURROGATE)
            case int() if value.bit_length() > MAX_INT_BITS:
                return self._unstorable(value, "it has too many digits: store it as text")
            case int():
                return int(value)
            case float() if isfinite(value):
                return float(value)
            case float():
                return self._unstorable(value, "JSON has no NaN or infinity: use None or text")
            case dict():
                return self._dict(value)
            case list():
                return self._list(value)
        return self._part(value)

    def _part(self, value: Any) -> Any:
        """Lower a type that only registered instances contain, whose annotations name it."""
        data = self._types.part(value) if self._inside else UNKNOWN
        return (
            self._unstorable(value, _cure(value, self._types))
            if data is UNKNOWN
            else self.lower(data)
        )

    # Lists and dicts recurse by two frames a level: within any sane stack at the deepest value.

    def _list(self, value: Iterable[Any]) -> Any:
        refused = self._enter(value)
        if refused:
            return self._unstorable(value, refused)
        lowered = []
        for at, item in enumerate(value):
            self._trail.append(at)
            lowered.append(self.lower(item))
            self._trail.pop()
        self._open.discard(id(value))
        return lowered

    def _dict(self, value: dict[Any, Any]) -> Any:
        refused = _key_problem(value) or self._enter(value)
        if refused:
            return self._unstorable(value, refused)
        lowered = {}
        for key, item in value.items():
            text = str.__str__(key)
            self._trail.append(text)
            lowered[text] = self.lower(item)
            self._trail.pop()
        self._open.discard(id(value))
        return lowered

    def _enter(self, value: Any) -> str:
        """Enter a container; or return why it cannot be entered."""
        if id(value) in self._open:
            return "it refers to itself: leave the circle out"
        self._room -= 1
        if self._room < 0:
            raise TooLargeError(
                f"the value at {self._at} holds more than {MAX_CONTAINERS} lists and dicts, each "
                "counted as often as it would be written: split it",
                path=self._at,
                limit=MAX_CONTAINERS,
            )
        if len(self._trail) < MAX_VALUE_DEPTH:
            self._open.add(id(value))
            return ""
        if self._on_unstorable == "raise":
            raise too_deep(self._at, MAX_VALUE_DEPTH)
        return "it is too deep"

    def _native(self, value: Any, native: NativeType) -> Any:
        data = native.lower(value)
        if isinstance(value, set | frozenset):
            data.sort(key=self._order)  # the same set gives the same bytes, in every process
        if isinstance(data, str) and not _is_text(data):
            return self._unstorable(value, LONE_SURROGATE)
        self.tags[self._pointer()] = native.tag
        return self._list(data) if isinstance(data, list) else data

    def _order(self, item: Any) -> bytes:
        work = ValueEncoder(self._types, "repr", self._at)
        return json.encode([work.lower(item), work.tags])

    def _opaque(self, value: OpaqueValue) -> Any:
        pointer, data = self._pointer(), bytes(value.data)
        if is_deeper(data, MAX_VALUE_DEPTH - len(self._trail)):
            raise too_deep(self._at, MAX_VALUE_DEPTH)
        try:
            decoded = json.decode(data)
        except CorruptRecordError:
            return self._unstorable(value, "its data is not JSON")
        self.tags[pointer] = value.label
        self.tags.update({pointer + below: tag for below, tag in value.types.items()})
        return decoded if b"\n" in data or b"\r" in data else value.data  # a record is one line

    def _registered(self, value: Any, label: str, data: Any) -> Any:
        refused = self._enter(value)
        if refused:
            return self._unstorable(value, refused)
        around, self.tags = self.tags, {self._pointer(): label}
        self._inside += 1
        lowered = self.lower(data)
        self._inside -= 1
        own, self.tags = self.tags, around
        self._open.discard(id(value))
        if not self._inside and not self._comes_back(value, lowered, own):
            return self._unstorable(value, _DIFFERENT)
        self.tags.update(own)
        return lowered

    def _comes_back(self, value: Any, lowered: Any, own: Tags) -> bool:
        decoded = len(self._pointer())
        tags = {at[decoded:]: tag for at, tag in own.items()}
        try:
            back = lift(json.decode(json.encode(lowered)), tags, self._types)
        except CorruptRecordError:
            return False
        return self._types.same(value, back)

    def _unstorable(self, value: Any, reason: str) -> Any:
        if self._on_unstorable == "raise":
            raise not_storable(self._path(), value, reason)
        self.tags[self._pointer()] = "repr"
        return _repr(value)

    def _pointer(self) -> str:
        return "".join(f"/{escape(at) if isinstance(at, str) else at}" for at in self._trail)

    def _path(self) -> str:
        steps = (f"[{at}]" if isinstance(at, int) else step(at) for at in self._trail)
        return self._at + "".join(steps)


_DIFFERENT = (
    "it would not come back equal to itself: let its fields hold what their annotations say, "
    "give it an __eq__, and register the types of its fields too"
)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _key_problem(value: dict[Any, Any]) -> str:
    for key in value:
        if not isinstance(key, str):
            return f"it has a key of type {type(key).__name__}: use text for keys"
        if not _is_text(key):
            return LONE_SURROGATE
    return ""


def _cure(value: Any, types: Types) -> str:
    name = type(value).__name__
    if isinstance(value, PurePath):
        return "store a Path, or str(path)"
    if isinstance(value, tuple | set | frozenset | bytes | dt.date | dt.time):
        return f"it is a subclass that would come back as another type: convert the {name} first"
    if isinstance(value, msgspec.Raw):
        return "decode it first"
    if types is NO_TYPES:  # where none can be registered, such as in a file of plain JSON
        return "it is not JSON: convert it first"
    return "it is neither JSON nor registered: register it, connect(types=[…]), or convert it first"


def _repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  # a repr is the user's code: any error may come
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_REPR else text[:MAX_REPR] + "…"


def encode_value(
    value: Any, types: Types = NO_TYPES, *, on_unstorable: OnUnstorable = "raise", at: str = "$"
) -> tuple[bytes, Tags | None]:
    """Return a value's JSON, and the table of its tags; None if it needs no tags.

    Raises:
        NotStorableError: Some part of it cannot be stored.
        TooLargeError: It has too many items or levels.

    """
    lowered, tags = lower(value, types, on_unstorable=on_unstorable, at=at)
    try:
        return json.encode(lowered), tags
    except NotStorableError:
        # Raises an error that names the place from the value's own root.
        ValueEncoder(types, on_unstorable, at).run(value)
        raise


def decode_value(data: bytes, tags: Mapping[str, str] | None, types: Types = NO_TYPES) -> Any:
    """Return the value that `encode_value` was given.

    Raises:
        CorruptRecordError: The bytes, or the table, are damaged.

    """
    return lift(json.decode(data), tags, types)


def lower(
    value: Any, types: Types = NO_TYPES, *, on_unstorable: OnUnstorable = "raise", at: str = "$"
) -> tuple[Any, Tags | None]:
    """Return a value as JSON can hold it, and the table of tags; errors as `encode_value`.

    Text is checked only if the value is not plain JSON: in plain JSON, encoding finds a lone
    surrogate.
    """
    if on_unstorable == "raise" and is_plain(value):
        return value, None
    return ValueEncoder(types, on_unstorable, at).run(value)


REDACTED = "[redacted]"
"""The replacement of a credential."""

DENY_KEYS = frozenset(
    {
        "access_key",
        "access_token",
        "api_key",
        "api_token",
        "auth_token",
        "authorization",
        "bearer",
        "bearer_token",
        "client_secret",
        "connection_string",
        "cookie",
        "credential",
        "credentials",
        "passphrase",
        "passwd",
        "password",
        "private_key",
        "pwd",
        "refresh_token",
        "secret",
        "secret_key",
        "secrets",
        "session_token",
        "token",
    }
)
"""Keys that hold credentials. A key matches if it ends with one of them, in any spelling:
``OPENAI_API_KEY``, ``openaiApiKey`` and ``openai-api-key`` all end with ``api_key``. A plural
counts, and a number or a form after it: ``api_keys``, ``api_key_2``, ``private_key_pem``."""

_WHOLE = frozenset({"auth", "tokens"})
"""Keys that hold credentials where nothing comes before them: ``max_tokens`` does not."""
_VARIABLE = re.compile(r"(?!.*PUBLIC)[A-Z][A-Z0-9_]*_KEY")
"""An environment variable with a key: ``OPENAI_KEY``."""
_FORM = re.compile(r"(?:v?\d+|pem|b64|base64|hash|json|value)+$")
_PASSWORD = re.compile(r"(://[^/@\s:?#]*:)[^/@\s]+@")
_PARAMETER = re.compile(r"(?<=[?&;])([^=&#;\s]+)=([^&#;\s]+)")
_ASSIGNED = re.compile(r"((?:export )?([A-Za-z][\w.-]*)=)\S.*", re.DOTALL)
_SIGNATURES = frozenset({"sig", "signature", "xamzsignature"})
"""Parameters of a URL that are as good as a password."""


def redact(value: Any, deny_keys: Iterable[str] = DENY_KEYS) -> tuple[Any, tuple[str, ...]]:
    """Return the value without credentials, and JSON pointers to where they were.

    A credential is what has a key of `DENY_KEYS`, or such a name next to it: in a list of pairs, in
    an object with ``name`` and ``value``, in ``NAME=value``; and the password or a key in a URL.
    With keys of your own, only what has one of them. Empty values, None and bools stay.

    >>> redact({"model": "m", "api_key": "k"})
    ({'model': 'm', 'api_key': '[redacted]'}, ('/api_key',))
    >>> redact(["postgres://me:secret@db/x", {"headers": [["Authorization", "Bearer x"]]}])[0]
    ['postgres://me:[redacted]@db/x', {'headers': [['Authorization', '[redacted]']]}]
    """
    endings = tuple(filter(None, map(_letters, deny_keys)))
    redaction = _Redaction(endings, looks_at_values=deny_keys is DENY_KEYS)
    clean = redaction.of(value, "", MAX_VALUE_DEPTH) if endings else value
    return clean, tuple(redaction.paths)


class _Redaction:
    def __init__(self, endings: tuple[str, ...], *, looks_at_values: bool) -> None:
        self._endings = endings
        self._looks_at_values = looks_at_values
        self.paths: list[str] = []

    def of(self, value: Any, at: str, room: int, *, is_pair: bool = False) -> Any:
        if isinstance(value, Mapping):
            items = [(key, item, f"{at}/{escape(str(key))}") for key, item in value.items()]
        elif isinstance(value, list | tuple):
            items = [(index, item, f"{at}/{index}") for index, item in enumerate(value)]
        else:
            return self._text(value, at) if isinstance(value, str) else value
        if not room:
            raise too_deep("$", MAX_VALUE_DEPTH)
        before = len(self.paths)
        names: dict[Any, Any] = {}
        are_pairs = False
        if self._looks_at_values and isinstance(value, Mapping):
            names = {"value": value.get("name", value.get("key", "value"))}
        elif self._looks_at_values:
            names = {1: value[0]} if is_pair else {}
            are_pairs = all(isinstance(item, list | tuple) and len(item) == 2 for item in value)
        clean = {}
        for key, item, path in items:
            if self._is_credential(names.get(key, key), item):
                self.paths.append(path)
                clean[key] = REDACTED
            else:
                clean[key] = self.of(item, path, room - 1, is_pair=are_pairs)
        if len(self.paths) == before:
            return value
        if isinstance(value, Mapping):
            return clean
        return list(clean.values()) if isinstance(value, list) else tuple(clean.values())

    def _text(self, text: str, at: str) -> str:
        if not self._looks_at_values:
            return text
        clean = text
        if "://" in text:
            clean = _PASSWORD.sub(rf"\g<1>{REDACTED}@", text)
            clean = _PARAMETER.sub(self._parameter, clean)
        elif (assigned := _ASSIGNED.fullmatch(text)) and self._is_name(assigned[2]):
            clean = f"{assigned[1]}{REDACTED}"
        if clean != text:
            self.paths.append(at)
        return clean

    def _parameter(self, found: re.Match[str]) -> str:
        is_secret = self._is_name(found[1]) or _letters(found[1]) in _SIGNATURES
        return f"{found[1]}={REDACTED}" if is_secret else found[0]

    def _is_credential(self, key: Any, value: Any) -> bool:
        if (
            not isinstance(key, str)
            or value is None
            or isinstance(value, bool)
            or value == REDACTED
        ):
            return False
        if isinstance(value, str | bytes | Mapping | list | tuple) and not value:
            return False
        if isinstance(value, Mapping) and _letters(key) == "auth":
            return False  # a group: {"user": …, "password": …}
        return self._is_name(key)

    def _is_name(self, key: str) -> bool:
        letters = _letters(key)
        if letters.endswith(self._endings):
            return True
        if not self._looks_at_values:
            return False
        if letters in _WHOLE or _VARIABLE.fullmatch(key):
            return True
        stem = _FORM.sub("", letters)
        if stem.endswith("s") and not stem.endswith("tokens"):
            stem = stem[:-1]
        return stem != letters and stem.endswith(self._endings)


@lru_cache(maxsize=1024)
def _letters(key: str) -> str:
    """Return a key's letters and digits, in one spelling."""
    return "".join(char for char in normalize("NFKC", key).lower() if char.isalnum())
