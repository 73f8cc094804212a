"""Difference of two JSON values, by path. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec


class ValueChange(msgspec.Struct, frozen=True):
    """A value before and after a change."""

    before: Any
    after: Any


class Difference(msgspec.Struct, frozen=True):
    """Changes between two values; paths are JSON pointers, "" for the root."""

    added: dict[str, Any] = {}
    removed: dict[str, Any] = {}
    changed: dict[str, ValueChange] = {}

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


def difference(before: Any, after: Any) -> Difference:
    """Return the changes that turn one JSON value into another.

    >>> difference({"a": 1, "b": [1, 2]}, {"b": [1, 3], "c": 0})  # doctest: +NORMALIZE_WHITESPACE
    Difference(added={'/c': 0}, removed={'/a': 1},
               changed={'/b/1': ValueChange(before=2, after=3)})
    """
    result = Difference(added={}, removed={}, changed={})
    _compare(before, after, "", result)
    return result


def _compare(before: Any, after: Any, path: str, result: Difference) -> None:
    if type(before) is not type(after) or not isinstance(before, dict | list):
        if not _same(before, after):
            result.changed[path] = ValueChange(before, after)
        return
    theirs, ours = dict(_items(before)), dict(_items(after))
    for step, value in theirs.items():
        if step in ours:
            _compare(value, ours[step], path + step, result)
        else:
            result.removed[path + step] = value
    result.added.update({path + step: value for step, value in ours.items() if step not in theirs})


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of a dict or a list, each with its step of the path."""
    if isinstance(value, list):
        yield from ((f"/{at}", item) for at, item in enumerate(value))
        return
    for key, item in value.items():
        yield "/" + key.replace("~", "~0").replace("/", "~1"), item


def _same(before: Any, after: Any) -> bool:
    """Whether two values have the same JSON text: 1 equals neither 1.0 nor true."""
    return repr(before) == repr(after)
