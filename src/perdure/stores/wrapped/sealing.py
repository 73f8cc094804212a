"""What a wrapper does to bytes, and where it gets the means from: the two ports of `layer`.

A *place* says where bytes belong: what they are, whose, and which. A seal may bind bytes to
their place, so that they fit nowhere else.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Protocol

from perdure.errors import CorruptRecordError
from perdure.model.keys import SessionKey
from perdure.store import Grant, Store

__all__ = ["Place", "Seal", "Seals", "from_text", "said", "to_text"]

Place = tuple[str | int | bool, ...]


class Seal(Protocol):
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


class Seals(Protocol):
    """Bring the seals, with whatever the inner store keeps for them."""

    kind: str
    """What this does to a store, for people."""
    hidden: str | None
    """An agent id that is the wrapper's own."""
    takes_plain: bool
    """Whether what was kept without the wrapper is read as it is."""

    def fits(self, most: int) -> int:
        """Return the largest payload whose sealed form has at most so many bytes."""
        ...

    def overhead(self) -> int:
        """Return how many bytes a small blob grows by."""
        ...

    async def require_fit(self, store: Store) -> None:
        """Raise for a store whose contents this wrapper would not read, or would mix."""
        ...

    async def check(self, store: Store, key: SessionKey) -> None:
        """Raise before a session is taken that could not be read."""
        ...

    async def begin(self, store: Store, grant: Grant) -> None:
        """Prepare a session that was just acquired."""
        ...

    async def of_session(self, store: Store, key: SessionKey, data: bytes = b"") -> Seal | None:
        """Return the seal of a session, which opens ``data``; None if it has none."""
        ...

    async def of_tenant(self, store: Store, tenant: str, *, make: bool) -> Seal | None:
        """Return the seal of a tenant's blobs, listings and inboxes; None if it has none."""
        ...

    def at_hand(self, key: SessionKey) -> Seal | None:
        """Return the seal of a session that was used before, without waiting."""
        ...

    def is_own(self, name: str) -> bool:
        """Say whether a document of this name is the wrapper's own."""
        ...

    def own_anew(self, key: SessionKey, seal: Seal) -> dict[str, bytes]:
        """Return the wrapper's own documents of a session that no manifest names any more."""
        ...

    def forget(self, key: SessionKey) -> None:
        """Drop what is remembered of a session."""
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
