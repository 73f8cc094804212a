"""A value on its way up: JSON and its table of tags become what was stored.

Used through `perdure.codec.values`. Data only: a tag picks from a fixed table or from the
types that the application has registered, never a name to import.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from perdure.codec import json
from perdure.codec.limits import MAX_VALUE_DEPTH
from perdure.codec.tags import LIFTS, NO_TYPES, Opaque, Tags, Types, parse_label, unescape
from perdure.errors import CorruptRecordError

__all__ = ["lift"]


def lift(value: Any, tags: Mapping[str, str] | None, types: Types = NO_TYPES) -> Any:
    """Return the value that was lowered; ``value`` itself is used up.

    Raises:
        CorruptRecordError: A tag's place is not there, or what is there does not fit the tag.

    """
    if not tags:
        return value
    root = [value]
    if max(map(_depth, tags)) > MAX_VALUE_DEPTH:
        raise _no_such_place(max(map(len, tags)))
    opaque = _opaque_tables(tags, types)
    for pointer in sorted(tags, key=_depth, reverse=True):  # a part before what it is part of
        above = _outermost(pointer, opaque)
        if above is None:
            parent, last = _place(root, pointer)
            parent[last] = _lift_one(tags[pointer], parent[last], types, pointer)
        elif above == pointer:
            parent, last = _place(root, pointer)
            parent[last] = _as_opaque(tags[pointer], parent[last], opaque[pointer])
    return root[0]


def _depth(pointer: str) -> int:
    return pointer.count("/")


def _opaque_tables(tags: Mapping[str, str], types: Types) -> dict[str, Tags]:
    """Return the places of unknown types, each with the tags below it, relative to it."""
    unknown = {at for at, tag in tags.items() if tag not in LIFTS and not types.knows(tag)}
    tables: dict[str, Tags] = {}
    for at, tag in tags.items() if unknown else ():
        above = _outermost(at, unknown)
        if above is not None:
            table = tables.setdefault(above, {})
            if at != above:
                table[at[len(above) :]] = tag
    return tables


def _outermost(pointer: str, places: Mapping[str, object] | set[str]) -> str | None:
    """Return the outermost of the places that a pointer is at or below."""
    if not places:
        return None
    end = -1
    while (end := pointer.find("/", end + 1)) >= 0:
        if pointer[:end] in places:
            return pointer[:end]
    return pointer if pointer in places else None


def _as_opaque(label: str, value: Any, below: Tags) -> Opaque:
    tag, version = parse_label(label)
    return Opaque(tag, version, msgspec.Raw(json.encode(value)), below)


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
    message = "a table of types names a place that its value does not have; it was left as it is"
    return CorruptRecordError(message, pointer_length=length)


def _lift_one(tag: str, value: Any, types: Types, pointer: str) -> Any:
    lift_native = LIFTS.get(tag)
    if lift_native is None:
        return types.load(tag, value)
    try:
        return lift_native(value)
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        message = f"a stored value at {pointer or '/'} is no {tag}; it was left as it is"
        raise CorruptRecordError(message, path=pointer, tag=tag) from None
