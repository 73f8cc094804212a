"""The tags of values: what JSON cannot tell, what it becomes, and who knows more types.

A table of tags maps JSON pointers to labels. A label is one of perdure's own tags
("bytes"), or that of a registered type with its version ("x:Point@2").

Pure.
"""

from __future__ import annotations

import datetime as dt
from base64 import b64decode, b64encode
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias
from uuid import UUID

import msgspec

__all__ = [
    "LIFTS",
    "NATIVE",
    "NO_TYPES",
    "UNKNOWN",
    "Native",
    "Opaque",
    "Tags",
    "Types",
    "escape",
    "label_of",
    "parse_label",
    "unescape",
]

Tags: TypeAlias = dict[str, str]


class Opaque(msgspec.Struct, frozen=True):
    """A value whose type is not registered here; encodes to exactly what it was."""

    tag: str
    version: int
    """0 for a tag of perdure's own that this release does not know."""
    data: msgspec.Raw
    types: Tags = {}

    def __hash__(self) -> int:
        return hash((self.tag, self.version, bytes(self.data)))

    @property
    def label(self) -> str:
        """The tag as it stands in a table."""
        return label_of(self.tag, self.version) if self.version else self.tag


class Types(Protocol):
    """The registered types, as far as values need them: `perdure.codec.registry.Registry`."""

    def dump(self, value: Any) -> tuple[str, Any] | None:
        """Return label and data of an instance of a registered type, else None."""

    def part(self, value: Any) -> Any:
        """Return the data of an instance that only occurs inside of registered types."""

    def knows(self, label: str) -> bool:
        """Tell whether ``load`` can read what has this label."""

    def load(self, label: str, data: Any) -> Any:
        """Return the instance. Raises FormatError where the data does not fit."""

    def same(self, one: Any, other: Any) -> bool:
        """Tell whether an instance came back as itself."""


class _NoTypes:
    def dump(self, value: Any) -> None: ...
    def part(self, value: Any) -> Any:
        return UNKNOWN

    def knows(self, label: str) -> bool:
        return False

    def load(self, label: str, data: Any) -> Any: ...
    def same(self, one: Any, other: Any) -> bool:
        return bool(one == other)


UNKNOWN = object()
"""What ``Types.part`` returns for a value of which it knows nothing."""
NO_TYPES: Types = _NoTypes()


def label_of(tag: str, version: int) -> str:
    """Return how a registered type stands in a table of tags."""
    return f"x:{tag}@{version}"


def parse_label(label: str) -> tuple[str, int]:
    """Return tag and version of a registered type's label; version 0 for any other tag."""
    if label.startswith("x:"):
        tag, _, version = label[2:].rpartition("@")
        if tag and version.isdecimal() and int(version) > 0:
            return tag, int(version)
    return label, 0


class Native(NamedTuple):
    """How values of one type of Python's own go down to JSON and come back."""

    tag: str
    lower: Callable[[Any], Any]
    lift: Callable[[Any], Any]


def _base64(value: bytes | bytearray) -> str:
    return b64encode(value).decode("ascii")


def _unbase64(text: str) -> bytes:
    return b64decode(text, validate=True)


_MICROSECOND = dt.timedelta(microseconds=1)

NATIVE: dict[type, Native] = {
    bytes: Native("bytes", _base64, _unbase64),
    bytearray: Native("bytearray", _base64, lambda text: bytearray(_unbase64(text))),
    dt.datetime: Native("datetime", dt.datetime.isoformat, dt.datetime.fromisoformat),
    dt.date: Native("date", dt.date.isoformat, dt.date.fromisoformat),
    dt.time: Native("time", dt.time.isoformat, dt.time.fromisoformat),
    dt.timedelta: Native(
        "timedelta",
        lambda span: span // _MICROSECOND,
        lambda number: dt.timedelta(microseconds=number),
    ),
    Decimal: Native("decimal", str, Decimal),
    UUID: Native("uuid", str, UUID),
    tuple: Native("tuple", list, tuple),
    set: Native("set", list, set),
    frozenset: Native("frozenset", list, frozenset),
    type(Path()): Native("path", str, Path),
}
LIFTS: dict[str, Callable[[Any], Any]] = {native.tag: native.lift for native in NATIVE.values()}
LIFTS["repr"] = str


def escape(key: str) -> str:
    """Return a key as one token of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def unescape(token: str) -> str:
    """Return the key of a pointer's token."""
    return token.replace("~1", "/").replace("~0", "~")
