"""A value on its way down: what JSON can hold of it, and the tags for the rest.

Used through `perdure.codec.values`, whose docstring says what can be stored. A plain value
is recognized by a look over its containers and goes as it is; any other is rebuilt part by
part, with the path at hand, so that an error says where.

Pure.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable
from enum import Enum
from math import isfinite
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

import msgspec

from perdure.codec import json
from perdure.codec.json import LONE_SURROGATE, not_storable, step
from perdure.codec.lifting import lift
from perdure.codec.limits import MAX_ITEMS, MAX_VALUE_DEPTH, is_deeper, too_deep
from perdure.codec.tags import NATIVE, UNKNOWN, Native, Opaque, Tags, Types, escape
from perdure.errors import CorruptRecordError, TooLargeError

__all__ = ["Lowering", "OnUnstorable", "is_plain"]

OnUnstorable: TypeAlias = Literal["raise", "repr"]

MAX_REPR = 16_384
"""The most characters of a repr that is stored in place of a value."""
MAX_INT_BITS = 14_284
"""An int of so many bits has at most 4,300 digits, which is what Python reads by default."""

_ATOMS = frozenset({str, int, bool, type(None)})
_are_atoms = _ATOMS.issuperset


def is_plain(value: Any) -> bool:
    """Tell whether a value is of JSON's own types only, finite, and not too deep or large."""
    level: list[Any] = [[value]]
    room = MAX_ITEMS
    for _ in range(MAX_VALUE_DEPTH + 1):  # level by level, so that a circle ends too
        below: list[Any] = []
        for node in level:
            items = node
            if type(node) is dict:
                if not all(type(key) is str for key in node):
                    return False
                items = node.values()
            if not (_are_atoms(map(type, items)) or _descend(items, below)):
                return False
            room -= len(node)
        if not below:
            return room >= 0
        if room < 0:  # what shares its parts can be small in memory, and endless when written
            return False
        level = below
    return False


def _descend(items: Iterable[Any], below: list[Any]) -> bool:
    for item in items:
        kind = type(item)
        if kind is dict or kind is list:
            below.append(item)
        elif kind is float:
            if not isfinite(item):
                return False
        elif kind not in _ATOMS:
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
        self._room = MAX_ITEMS

    def lower(self, value: Any) -> Any:
        """Return what JSON can hold of a value at the current place, and note its tags."""
        kind = type(value)
        self._room -= 1
        if self._room < 0:
            message = f"the value at {self._at} has more than {MAX_ITEMS} items: split it"
            raise TooLargeError(message, path=self._at, limit=MAX_ITEMS)
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

    def _list(self, value: Iterable[Any]) -> Any:
        return self._nested(value, self._items)

    def _items(self, value: Iterable[Any]) -> list[Any]:
        return [self._below(at, item) for at, item in enumerate(value)]

    def _dict(self, value: dict[Any, Any]) -> Any:
        for key in value:
            if not isinstance(key, str) or not _is_text(key):
                why = f"it has a key of type {type(key).__name__}: use text for keys"
                return self._unstorable(value, LONE_SURROGATE if isinstance(key, str) else why)
        return self._nested(value, self._fields)

    def _fields(self, value: dict[str, Any]) -> dict[str, Any]:
        return {str.__str__(key): self._below(str.__str__(key), value[key]) for key in value}

    def _below(self, at: str | int, value: Any) -> Any:
        self._trail.append(at)
        try:
            return self.lower(value)
        finally:
            self._trail.pop()

    def _nested(self, value: Any, lower: Callable[[Any], Any]) -> Any:
        if id(value) in self._open:
            return self._unstorable(value, "it refers to itself: leave the circle out")
        if len(self._open) >= MAX_VALUE_DEPTH:
            if self._on_unstorable == "repr":
                return self._unstorable(value, "")
            raise too_deep(self._at, MAX_VALUE_DEPTH)
        self._open.add(id(value))
        try:
            return lower(value)
        except RecursionError:
            raise too_deep(self._at, MAX_VALUE_DEPTH) from None
        finally:
            self._open.discard(id(value))

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
        if is_deeper(data, MAX_VALUE_DEPTH - len(self._open)):
            raise too_deep(self._at, MAX_VALUE_DEPTH)
        try:
            decoded = json.decode(data)
        except CorruptRecordError:
            return self._unstorable(value, "its data is not JSON")
        self.tags[pointer] = value.label
        self.tags.update({pointer + below: tag for below, tag in value.types.items()})
        return decoded if b"\n" in data or b"\r" in data else value.data  # a record is one line

    def _registered(self, value: Any, label: str, data: Any) -> Any:
        around, self.tags = self.tags, {self._pointer(): label}
        self._inside += 1
        try:
            lowered = self._nested(value, lambda _: self.lower(data))
        finally:
            own, self.tags = self.tags, around
            self._inside -= 1
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
