"""Keys: the master's, which its owner keeps, and data keys, which it wraps.

A data key seals one session, or what a tenant's sessions share. The store holds it only wrapped
by the master key; without that it is worth nothing, and destroying the wrapped key destroys
what it sealed. Rotating the master key wraps the data keys anew and touches nothing else.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
import shlex
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, final

import msgspec

from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    FormatError,
    MissingExtraError,
    UnsupportedVersionError,
)
from perdure.records.json import decode
from perdure.stores.wrapped.compressed import Compression
from perdure.stores.wrapped.transform import Place, from_text, said, to_text

# Keys: the master's, which its owner keeps, and data keys, which it wraps


KEY_VARIABLE = "PERDURE_KEY"
KEY_FILE_VARIABLE = "PERDURE_KEY_FILE"
KEY_BYTES = 32
FORMAT = 2
_NONCE = 12
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_STANDARD = str.maketrans("-_", "+/")


def ciphers() -> Any:
    """Return the module of authenticated ciphers.

    Raises:
        MissingExtraError: cryptography is not installed.

    """
    try:
        from cryptography.hazmat.primitives.ciphers import aead
    except ImportError as error:
        message = "encryption needs cryptography: pip install 'perdure[encryption]'"
        raise MissingExtraError(message, extra="encryption") from error
    return aead


class Wrapped(msgspec.Struct, frozen=True, omit_defaults=True):
    """A data key as the store has it."""

    format: int
    master: str
    """The id of the master key that opens it."""
    key: str
    """Nonce and sealed key, in base64."""
    chained: int = 0
    """The first record that is linked to those before it; 0 in format 1, which links none."""
    below: int = 0
    """Records before this one were removed by perdure."""


class UnwrappedKey(msgspec.Struct, frozen=True):
    """A data key, and what is known of it."""

    key: bytes
    is_current: bool
    """Whether the current master key wraps it."""
    chained: int
    """The first record that is linked, 0 for none."""
    below: int
    """Records before this one were removed by perdure."""


@final
class MasterKeys:
    """The master key, and older ones that may still be needed to read.

    Args:
        current: 32 bytes, or their base64 or hex; it wraps what is written from here on.
        older: Keys that were current before.

    Raises:
        ConfigError: A key is not 32 bytes.

    Example:
        >>> keys = MasterKeys(MasterKeys.new())
    """

    def __init__(self, current: bytes | str, *older: bytes | str) -> None:
        keys = [_key(key) for key in (current, *older)]
        self._keys: dict[str, bytes] = {_id(key): key for key in reversed(keys)}
        self.current: str = _id(keys[0])
        """The id of the key that wraps; says nothing about the key."""

    def __repr__(self) -> str:
        return f"MasterKeys(<{self.current} and {len(self._keys) - 1} older>)"

    @staticmethod
    def new() -> str:
        """Return a new key, in base64: keep it where the store is not."""
        return base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Return the keys of ``PERDURE_KEY``, or of the file that ``PERDURE_KEY_FILE`` names.

        Several keys stand apart by commas or white space, the current one first.

        Raises:
            ConfigError: Neither is set, what they hold is no key, or others than its owner
                have rights to the file.

        """
        values = os.environ if environment is None else environment
        text = values.get(KEY_VARIABLE, "")
        if not text and (path := values.get(KEY_FILE_VARIABLE)):
            text = _text_of(path)
        keys = text.replace(",", " ").split()
        if not keys:
            message = (
                f"an encrypted store needs its key: set {KEY_VARIABLE}, or {KEY_FILE_VARIABLE} to "
                "a file, to 32 bytes in base64 (openssl rand -base64 32)"
            )
            raise ConfigError(message, option=KEY_VARIABLE)
        return cls(*keys)

    def wrap(self, key: bytes, place: bytes, chained: int = 0, below: int = 0) -> bytes:
        """Return a data key as the store may have it, bound to its place and its format."""
        nonce = secrets.token_bytes(_NONCE)
        bound = _bound(place, chained, below)
        sealed = ciphers().AESGCM(self._keys[self.current]).encrypt(nonce, key, bound)
        text = base64.b64encode(nonce + sealed).decode()
        return msgspec.json.encode(Wrapped(2 if chained else 1, self.current, text, chained, below))

    def unwrap(self, data: bytes, place: bytes, what: str) -> UnwrappedKey:
        """Return a data key.

        Raises:
            ConfigError: None of the keys opens it.
            CorruptRecordError: It is damaged.
            UnsupportedVersionError: A newer release wrapped it.

        """
        try:
            wrapped = decode(data, Wrapped)
            sealed = base64.b64decode(wrapped.key, validate=True)
        except (FormatError, binascii.Error, ValueError) as error:
            raise _damaged(what) from error
        if wrapped.format > FORMAT:
            message = f"the key of {what} has format {wrapped.format}: use a newer perdure"
            raise UnsupportedVersionError(message, format=wrapped.format)
        master = self._keys.get(wrapped.master)
        if master is None:
            message = (
                f"{what} is encrypted with the master key {wrapped.master}, which is not among "
                f"those that were given ({', '.join(self._keys)}): give that key, or add it as an "
                f"older one ({KEY_VARIABLE}=NEW,OLD)"
            )
            raise ConfigError(message, option=KEY_VARIABLE, master=wrapped.master)
        from cryptography.exceptions import InvalidTag

        try:
            key = (
                ciphers()
                .AESGCM(master)
                .decrypt(
                    sealed[:_NONCE], sealed[_NONCE:], _bound(place, wrapped.chained, wrapped.below)
                )
            )
        except (InvalidTag, ValueError) as error:
            raise _damaged(what) from error
        return UnwrappedKey(key, wrapped.master == self.current, wrapped.chained, wrapped.below)


def _text_of(path: str) -> str:
    """Return what a key file holds, if it is its owner's alone, as ssh wants its keys."""
    try:
        with Path(path).expanduser().open(encoding="ascii") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read()
    except (OSError, ValueError) as error:
        message = (
            f"the key file {path} cannot be read: set {KEY_FILE_VARIABLE} to a file with "
            "the key in base64"
        )
        raise ConfigError(message, option=KEY_FILE_VARIABLE) from error
    if sys.platform != "win32" and mode & _OTHERS:
        message = (
            f"the key file {path} is open to others than its owner (mode {mode:04o}), so the key "
            f"may be known to them: chmod 600 {shlex.quote(path)}, and take a new key if in doubt"
        )
        raise ConfigError(message, option=KEY_FILE_VARIABLE, mode=mode)
    return text


def _bound(place: bytes, chained: int, below: int) -> bytes:
    return b"%b chained from %d, from %d on" % (place, chained, below) if chained else place


def _damaged(what: str) -> CorruptRecordError:
    message = f"the wrapped key of {what} is damaged or belongs elsewhere: restore it from a copy"
    return CorruptRecordError(message, what=what)


def _key(given: bytes | str) -> bytes:
    key = given if isinstance(given, bytes) else _decoded(given.strip())
    if len(key) != KEY_BYTES:
        message = (
            f"a master key has {KEY_BYTES} bytes, this one {len(key)}: make one with openssl rand "
            "-base64 32"
        )
        raise ConfigError(message, option="keys", size=len(key))
    return key


def _decoded(text: str) -> bytes:
    try:
        if len(text) == 2 * KEY_BYTES:
            return bytes.fromhex(text)
        return base64.b64decode(text.translate(_STANDARD).encode("ascii"), validate=True)
    except ValueError:
        message = "a master key is neither base64 nor hex: make one with openssl rand -base64 32"
        raise ConfigError(message, option="keys") from None


def _id(key: bytes) -> str:
    return hashlib.blake2b(b"perdure master", key=key, digest_size=6).hexdigest()


# A data key at work: AES-256-GCM, bound to a place, the same for the same bytes
#
# The nonce is a keyed hash of place and bytes, so that sending a batch again sends the same bytes,
# and two different ones never share a nonce but by a collision of 96 bits. What this shows is only
# that the same was written to the same place twice.


_VERSION = b"\x01"
_ID = 8

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

    def __init__(self, key: bytes, whose: Place, packing: Compression | None) -> None:
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
        self._packing = self._packing or Compression()  # somebody else packs
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
