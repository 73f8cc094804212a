"""A data key at work: AES-256-GCM, bound to a place, the same for the same bytes.

The nonce is a keyed hash of place and bytes, so that sending a batch again sends the same
bytes, and two different ones never share a nonce but by a collision of 96 bits. What this
shows is only that the same was written to the same place twice.
"""

from __future__ import annotations

import hashlib
from typing import Any, final

import msgspec

from perdure.errors import CorruptRecordError
from perdure.stores.wrapped.keys import ciphers
from perdure.stores.wrapped.packing import Packing
from perdure.stores.wrapped.sealing import Place, from_text, said, to_text

__all__ = ["GROWTH", "DataKey", "derived"]

_VERSION = b"\x01"
_ID = 8
_NONCE = 12
_TAG = 16
_HEAD = 1 + _ID + _NONCE
GROWTH = _HEAD + _TAG + 1
"""By how many bytes sealing makes anything longer."""


@final
class DataKey:
    """Seal what belongs to one owner: a session, or a tenant.

    Args:
        key: 32 random bytes.
        whose: The owner, part of every place.
        packing: Applied before sealing, if any.

    """

    def __init__(self, key: bytes, whose: Place, packing: Packing | None) -> None:
        aead = ciphers()
        self._aead: Any = aead.AESGCM(derived(key, b"seal", 32))
        self._names: Any = aead.AESSIV(derived(key, b"names", 64))
        self._nonces = hashlib.blake2b(key=derived(key, b"nonces", 32), digest_size=_NONCE)
        self._whose = whose
        self._packing = packing
        self.key: bytes = key
        self.id: bytes = derived(key, b"id", _ID)
        """Stands in front of what it sealed."""
        self._start = _VERSION + self.id

    def seal(self, place: Place, data: bytes) -> bytes:
        """Return the bytes sealed to a place."""
        data = b"\x00" + data if self._packing is None else self._packing.pack(data)
        bound = self._bound(place)
        nonces = self._nonces.copy()
        nonces.update(b"%d " % len(bound))
        nonces.update(bound)
        nonces.update(data)
        nonce = nonces.digest()
        return b"".join((self._start, nonce, self._aead.encrypt(nonce, data, bound)))

    def open(self, place: Place, data: bytes) -> bytes:
        """Return the bytes again."""
        from cryptography.exceptions import InvalidTag

        what = said((*self._whose, *place))
        try:
            if not data.startswith(self._start):
                raise ValueError  # noqa: TRY301  # damaged like the rest
            nonce, sealed = data[_HEAD - _NONCE : _HEAD], data[_HEAD:]
            opened: bytes = self._aead.decrypt(nonce, sealed, self._bound(place))
        except (InvalidTag, ValueError) as error:
            message = (
                f"{what} is damaged, or was sealed for another place or with another key; it was "
                "left as it is: restore it from a copy"
            )
            raise CorruptRecordError(message, what=what) from error
        if opened[:1] == b"\x00":
            return opened[1:]
        self._packing = self._packing or Packing()  # somebody else packs
        return self._packing.unpack(opened, what, place[0])

    def opens(self, data: bytes) -> bool:
        """Say whether this key sealed the bytes, as far as they say."""
        return data.startswith(self._start)

    def seal_payload(self, place: Place, payload: bytes) -> bytes:
        """Return a payload sealed, as a JSON string."""
        return to_text(self.seal(place, payload))

    def open_payload(self, place: Place, payload: bytes) -> bytes:
        """Return a payload again."""
        return self.open(place, from_text(payload, said((*self._whose, *place))))

    def token(self, text: str) -> str:
        """Return a text sealed so that the same text is the same token."""
        sealed: bytes = self._names.encrypt(text.encode("utf-8", "surrogatepass") or b"\0", None)
        return sealed.hex()

    def name(self, blob: str) -> str:
        """Return the inner name of a blob: sealed, so that it does not tell the content."""
        try:
            raw = bytes.fromhex(blob)
        except ValueError:
            raw = blob.encode()
        sealed: bytes = self._names.encrypt((raw or b"\0")[:48], None)
        return "x" + sealed.hex()

    def named(self, inner: str) -> str | None:
        """Return the name of an inner blob, None if this key did not name it."""
        from cryptography.exceptions import InvalidTag

        try:
            opened: bytes = self._names.decrypt(bytes.fromhex(inner[1:]), None)
        except (InvalidTag, ValueError):
            return None
        return opened.hex()

    def _bound(self, place: Place) -> bytes:
        return msgspec.json.encode(("perdure", 1, self._whose, place))


def derived(key: bytes, use: bytes, size: int) -> bytes:
    """Return a key for one use, made of another."""
    return hashlib.blake2b(b"perdure " + use, key=key, digest_size=size).digest()
