"""Small files of the store's own: JSON with a checksum, read as a value or not at all."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from perdure.errors import ConfigError, FormatError
from perdure.records import json
from perdure.records.frames import open_sealed, seal

T = TypeVar("T")


def sealed(value: msgspec.Struct) -> bytes:
    """Return what to write for a value."""
    return seal(msgspec.json.encode(value))


def unsealed(data: bytes | None, type_: type[T]) -> T | None:
    """Return the value of a file's bytes, None if they are not whole."""
    body = None if data is None else open_sealed(data)
    return None if body is None else decoded(body, type_)


def decoded(body: bytes | msgspec.Raw, type_: type[T]) -> T | None:
    """Return a value out of JSON, None if it is no JSON or of another shape."""
    try:
        return json.decode(bytes(body), type_)
    except (FormatError, ConfigError):  # ConfigError: ids that nobody could have given
        return None
