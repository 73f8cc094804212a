"""A value on its way down: what JSON can hold of it, and the tags for the rest.

Used through `perdure.codec.values`, whose docstring says what can be stored. A plain value
is recognized by a look over its containers and goes as it is; any other is rebuilt part by
part, with the path at hand, so that an error says where.

Pure.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from enum import Enum
from math import isfinite
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

import msgspec

from perdure.codec import json
from perdure.codec.json import LONE_SURROGATE, not_storable, step
from perdure.codec.lifting import lift
from perdure.codec.limits import (
    MAX_CONTAINERS,
    MAX_RECORD_BYTES,
    MAX_VALUE_DEPTH,
    is_deeper,
    too_deep,
)
from perdure.codec.tags import NATIVE, UNKNOWN, Native, Opaque, Tags, Types, escape
from perdure.errors import CorruptRecordError, NotStorableError, TooLargeError

__all__ = ["Lowering", "OnUnstorable", "is_plain"]

OnUnstorable: TypeAlias = Literal["raise", "repr"]

MAX_REPR = 16_384
"""The most characters of a repr that is stored in place of a value."""
MAX_INT_BITS = 14_284
"""An int of so many bits has at most 4,300 digits, which is what Python reads by default."""

_ATOMS = frozenset({str, int, bool, type(None)})

_MOST_ITEMS = MAX_RECORD_BYTES // 2
"""More do not fit into a record: each takes two bytes at least."""


def is_plain(value: Any) -> bool:
    """Tell whether a value is of JSON's own types only, finite, and not too deep or large."""
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
    """Tell whether a list's or dict's own items are plain; add lists and dicts to ``below``."""
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


class Lowering:
    """One value on its way down: where it is, which tags it has set."""

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
        """Return what JSON can hold of the whole value, and the table of its tags, if any."""
        try:
            return self.lower(value), self.tags or None
        except RecursionError:
            # The depth is limited: it is the caller who has no stack left.
            message = f"the value at {self._at} cannot be stored: the call stack is too deep here"
            raise NotStorableError(message, path=self._at) from None

    def lower(self, value: Any) -> Any:
        """Return what JSON can hold of a value at the current place, and note its tags."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in NATIVE:
            return self._native(value, NATIVE[kind])
        if isinstance(value, Opaque):
            return self._opaque(value)
        dumped = self._types.dump(value)
        if dumped is not None:
            return self._registered(value, *dumped)
        return self._json(value)

    def _json(self, value: Any) -> Any:
        """Lower JSON's own types; of subclasses, what JSON has of them."""
        match value:
            case Enum():
                return self._part(value)  # also where it is text or a number too
            case str():
                return self._text(value)
            case int():
                return self._int(value)
            case float():
                return self._float(value)
            case dict():
                return self._dict(value)
            case list():
                return self._list(value)
        return self._part(value)

    def _part(self, value: Any) -> Any:
        """Lower what only occurs inside of registered instances, whose annotations know it."""
        data = self._types.part(value) if self._inside else UNKNOWN
        return self._unstorable(value, _cure(value)) if data is UNKNOWN else self.lower(data)

    def _text(self, value: str) -> Any:
        text = str.__str__(value)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                return self._unstorable(value, LONE_SURROGATE)
        return text

    def _int(self, value: int) -> Any:
        if value.bit_length() > MAX_INT_BITS:
            return self._unstorable(value, "it has too many digits: store it as text")
        return int(value)

    def _float(self, value: float) -> Any:
        if isfinite(value):
            return float(value)
        return self._unstorable(value, "JSON has no NaN or infinity: use None or text")

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
        """Go one level down; or return why not."""
        if id(value) in self._open:
            return "it refers to itself: leave the circle out"
        self._room -= 1
        if self._room < 0:
            message = (
                f"the value at {self._at} holds more than {MAX_CONTAINERS} lists and dicts, each "
                "counted as often as it would be written: split it"
            )
            raise TooLargeError(message, path=self._at, limit=MAX_CONTAINERS)
        if len(self._trail) < MAX_VALUE_DEPTH:
            self._open.add(id(value))
            return ""
        if self._on_unstorable == "raise":
            raise too_deep(self._at, MAX_VALUE_DEPTH)
        return "it is too deep"

    def _native(self, value: Any, native: Native) -> Any:
        data = native.lower(value)
        if isinstance(value, set | frozenset):
            data.sort(key=self._order)  # the same set gives the same bytes, in every process
        if isinstance(data, str) and not _is_text(data):
            return self._unstorable(value, LONE_SURROGATE)
        self.tags[self._pointer()] = native.tag
        return self._list(data) if isinstance(data, list) else data

    def _order(self, item: Any) -> bytes:
        work = Lowering(self._types, "repr", self._at)
        return json.encode([work.lower(item), work.tags])

    def _opaque(self, value: Opaque) -> Any:
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
        here = len(self._pointer())
        tags = {at[here:]: tag for at, tag in own.items()}
        try:
            back = lift(json.decode(json.encode(lowered)), tags, self._types)
        except CorruptRecordError:
            return False
        return self._types.same(value, back)

    def _unstorable(self, value: Any, why: str) -> Any:
        if self._on_unstorable == "raise":
            raise not_storable(self._path(), value, why)
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


def _cure(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, PurePath):
        return "store a Path, or str(path)"
    if isinstance(value, tuple | set | frozenset | bytes | dt.date | dt.time):
        return f"it is a subclass that would come back as another type: convert the {name} first"
    if isinstance(value, msgspec.Raw):
        return "decode it first"
    return "it is neither JSON nor registered: register it, connect(types=[…]), or convert it first"


def _repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  # a repr is the user's code: any error may come
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_REPR else text[:MAX_REPR] + "…"
