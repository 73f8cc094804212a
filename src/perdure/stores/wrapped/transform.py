"""What a wrapper does to bytes, and the port that does it; `layer` has the one that brings it.

A *place* says where bytes belong: what they are, whose, and which. A seal may bind bytes to
their place, so that they fit nowhere else.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Protocol

from perdure.errors import CorruptRecordError

Place = tuple[str | int | bool, ...]


class Transform(Protocol):
    """Seal bytes of one session, or of one tenant, and open them again."""

    def seal(self, place: Place, data: bytes) -> bytes:
        """Return what to keep; the same for the same place and bytes."""
        ...

    def open(self, place: Place, data: bytes) -> bytes:
        """Return the bytes again.

        Raises CorruptRecordError when they are damaged, or belong elsewhere.
        """
        ...

    def seal_payload(self, place: Place, payload: bytes) -> bytes:
        """Do the same to a payload, which is JSON and stays it."""
        ...

    def open_payload(self, place: Place, payload: bytes) -> bytes:
        """Return the payload again."""
        ...

    def token(self, text: str) -> str:
        """Return a text as what a listing can be asked for."""
        ...

    def name(self, blob: str) -> str:
        """Return the inner name of a blob."""
        ...

    def named(self, inner: str) -> str | None:
        """Return the name of an inner blob, None if it is not ours."""
        ...


def to_text(data: bytes) -> bytes:
    """Return bytes as a JSON string."""
    return b'"%b"' % base64.b64encode(data)


def from_text(payload: bytes, what: str, start: int = 1) -> bytes:
    """Return the bytes of a JSON string.

    Raises:
        CorruptRecordError: It is none.

    """
    try:
        if payload[:1] != b'"' or payload[-1:] != b'"':
            raise ValueError  # noqa: TRY301  # damaged like the rest
        return base64.b64decode(payload[start:-1], validate=True)
    except (ValueError, binascii.Error) as error:
        message = f"{what} is damaged, or was never sealed: restore it from a copy"
        raise CorruptRecordError(message) from error


def said(place: Sequence[str | int | bool]) -> str:
    """Return a place for people."""
    return " ".join(str(part) for part in place if part != "")
