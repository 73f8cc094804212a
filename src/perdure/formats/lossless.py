"""Structs that keep what they do not know: fields by type, all others as their very bytes.

A struct with a field ``extra: dict[str, Raw]`` is read by `read_open`, and written by
`write_open`: what stands in ``extra`` comes behind the known fields. Pure.
"""

from __future__ import annotations

import types
import typing
from functools import cache
from typing import Any, TypeVar

import msgspec

from perdure.errors import CorruptRecordError
from perdure.records.json import decode, encode

T = TypeVar("T", bound=msgspec.Struct)

Fields = dict[str, msgspec.Raw]
"""A JSON object, its values as they are written."""

_EXTRA = "extra"
_NULL = msgspec.Raw(b"null")


def compact(data: bytes) -> msgspec.Raw:
    """Return JSON without the whitespace between its tokens; the tokens stay as they are."""
    return msgspec.Raw(msgspec.json.format(data, indent=-1))


def fields_of(data: bytes) -> Fields:
    """Return an object's fields.

    Raises:
        CorruptRecordError: It is no object.

    """
    fields: Fields = decode(data, Fields)
    return fields


def read_open(fields: Fields, cls: type[T], at: str = "$") -> T:
    """Return a struct of an object's fields. What is null where that does not fit is absent.

    Raises:
        CorruptRecordError: A known field has another type than it should, or is missing.

    """
    members = dict(fields)
    value: dict[str, Any] = {}
    for name, written, kind in _known(cls):
        raw = members.pop(written, _NULL)
        if raw != _NULL:
            value[name] = _read(bytes(raw), kind, f"{at}.{written}")
    extra = {name: compact(bytes(raw)) for name, raw in members.items()}
    try:
        return cls(**value, extra=extra)
    except TypeError as error:
        message = f"the value at {at} cannot be read: {error}"
        raise CorruptRecordError(message, path=at) from None


def write_open(value: msgspec.Struct) -> bytes:
    """Return a struct as JSON in one line; None is left out."""
    return encode(_written(value))


def _written(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        fields = {
            written: _written(getattr(value, name))
            for name, written, _ in _known(type(value))
            if getattr(value, name) is not None
        }
        return fields | getattr(value, _EXTRA)
    return [_written(member) for member in value] if isinstance(value, list) else value


def _read(data: bytes, kind: Any, at: str) -> Any:
    if _is_open(kind):
        return read_open(_object(data, at), kind, at)
    item = _open_item(kind)
    if item is not None:
        listed = _decode(data, list[msgspec.Raw], at)
        return [_read(bytes(raw), item, f"{at}[{place}]") for place, raw in enumerate(listed)]
    return _compacted(_decode(data, kind, at))


def _compacted(value: Any) -> Any:
    """Return a value with its raw parts in one line, and apart from the bytes around them."""
    if isinstance(value, msgspec.Raw):
        return compact(bytes(value))
    if isinstance(value, dict):
        return {key: _compacted(member) for key, member in value.items()}
    return [_compacted(member) for member in value] if isinstance(value, list) else value


def _object(data: bytes, at: str) -> Fields:
    fields: Fields = _decode(data, Fields, at)
    return fields


def _decode(data: bytes, kind: Any, at: str) -> Any:
    try:
        return decode(data, kind)
    except CorruptRecordError as error:
        message = f"the field at {at} cannot be read: {error}"
        raise CorruptRecordError(message, path=at, size=len(data)) from None


@cache
def _known(cls: type[msgspec.Struct]) -> tuple[tuple[str, str, Any], ...]:
    """Return each known field's name, its written name, and its type, None aside."""
    return tuple(
        (field.name, field.encode_name, _without_none(field.type))
        for field in msgspec.structs.fields(cls)
        if field.name != _EXTRA
    )


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        members = [member for member in typing.get_args(kind) if member is not types.NoneType]
        return members[0] if len(members) == 1 else kind
    return kind


def _is_open(kind: Any) -> bool:
    return isinstance(kind, type) and _EXTRA in getattr(kind, "__struct_fields__", ())


def _open_item(kind: Any) -> Any:
    """Return the struct that a list is of, None if it is something else."""
    if typing.get_origin(kind) is not list:
        return None
    (item,) = typing.get_args(kind)
    return item if _is_open(item) else None
