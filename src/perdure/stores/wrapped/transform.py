"""Reversible transform of bytes: the protocol between a wrapper store and its codec.

Encryption and compression implement `Transform`; `layer` applies it to every call of the store
port. A *place* says where bytes belong: their kind, their owner and their name. Encryption binds
bytes to their place as associated data, so that they decrypt nowhere else.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Protocol

from perdure.errors import CorruptRecordError

Place = tuple[str | int | bool, ...]


class Transform(Protocol):
    """Transform the bytes of one session or of one tenant, and restore them."""

    def transform(self, place: Place, data: bytes) -> bytes:
        """Return the bytes to store; the same place and bytes always give the same result."""
        ...

    def restore(self, place: Place, data: bytes) -> bytes:
        """Return the original bytes.

        Raises CorruptRecordError when they are damaged or belong to another place.
        """
        ...

    def transform_payload(self, place: Place, payload: bytes) -> bytes:
        """Transform a JSON payload; the result is JSON too."""
        ...

    def restore_payload(self, place: Place, payload: bytes) -> bytes:
        """Return the original payload."""
        ...

    def token(self, text: str) -> str:
        """Return the form of a text that listings filter by."""
        ...

    def inner_name(self, name: str) -> str:
        """Return a blob's name in the inner store."""
        ...

    def outer_name(self, inner: str) -> str | None:
        """Return a blob's name from its inner name; None if this transform did not name it."""
        ...


def to_text(data: bytes) -> bytes:
    """Return bytes as a JSON string, in base64."""
    return b'"%b"' % base64.b64encode(data)


def from_text(payload: bytes, what: str, start: int = 1) -> bytes:
    """Return the bytes of a JSON string, whose base64 begins at ``start``.

    Raises:
        CorruptRecordError: The payload is not such a string.

    """
    try:
        if payload[:1] != b'"' or payload[-1:] != b'"':
            raise ValueError  # noqa: TRY301  # the same damage as invalid base64
        return base64.b64decode(payload[start:-1], validate=True)
    except (ValueError, binascii.Error) as error:
        raise CorruptRecordError(
            f"{what} is damaged, or was never encrypted: restore it from a copy"
        ) from error


def describe_place(place: Sequence[str | int | bool]) -> str:
    """Return a place as text for error messages."""
    return " ".join(str(part) for part in place if part != "")
