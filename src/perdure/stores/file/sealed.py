"""Codec of the store's small files: JSON with a checksum, decoded as a whole value or None.

A file that is torn, damaged, or of another shape than this release writes decodes as None; the
caller knows what a missing value means. Bytes on disk are untrusted and raise nothing else.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from perdure.errors import ConfigError, FormatError
from perdure.records import json
from perdure.records.records import open_sealed, seal

T = TypeVar("T")


def sealed(value: msgspec.Struct) -> bytes:
    """Return the bytes to write for a value."""
    return seal(msgspec.json.encode(value))


def unsealed(data: bytes | None, type_: type[T]) -> T | None:
    """Return the value of a file's bytes, None if they are incomplete or damaged."""
    body = None if data is None else open_sealed(data)
    return None if body is None else decoded(body, type_)


def decoded(body: bytes | msgspec.Raw, type_: type[T]) -> T | None:
    """Return a value decoded from JSON, None if it is not JSON or has another shape."""
    try:
        return json.decode(bytes(body), type_)
    except (FormatError, ConfigError):  # ConfigError: an id that is not valid
        return None
