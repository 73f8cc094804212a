"""Master keys, data keys and the keyring: key wrapping and encryption (AES-256-GCM).

A data key encrypts one session, or what the sessions of a tenant share. The store holds it only
wrapped by the master key, which you keep elsewhere. Destroying the wrapped key destroys what the
data key encrypted. A rotation of the master key wraps the data keys again and changes nothing else.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import random
import secrets
import shlex
import stat
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Self, final

import anyio
import msgspec

from perdure._lib.ids import random_id
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    FormatError,
    LeaseHeldError,
    LeaseLostError,
    MissingExtraError,
    PerdureError,
    UnsupportedVersionError,
)
from perdure.records.json import decode
from perdure.records.keys import KEYRING, SessionKey, keyring_of
from perdure.records.manifest import KEYS, FoldedDocument, Manifest
from perdure.records.records import EPOCH
from perdure.store import SessionQuery, Store, Taken, first_record, is_begun, take_after
from perdure.stores.wrapped.chain import ManifestProof
from perdure.stores.wrapped.compressed import Compression
from perdure.stores.wrapped.manifests import HiddenManifest, proven_part
from perdure.stores.wrapped.transform import Place, Transform, describe_place, from_text, to_text

KEY_VARIABLE = "PERDURE_KEY"
KEY_FILE_VARIABLE = "PERDURE_KEY_FILE"
KEY_BYTES = 32
FORMAT = 3
"""2: records are linked. 3: documents' names are hidden, and blobs are the session's own."""
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
        raise MissingExtraError(
            "encryption needs cryptography: pip install 'perdure[encryption]'", extra="encryption"
        ) from error
    return aead


class WrappedKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """A wrapped data key, as the store holds it."""

    format: int
    master: str
    """The id of the master key that unwraps it."""
    key: str
    """Nonce and encrypted key, in base64."""
    chained: int = 0
    """The first record with a link hash; 0 in format 1, which has none."""
    below: int = 0
    """The record before which a trim removed all."""


class UnwrappedKey(msgspec.Struct, frozen=True):
    """A data key, and what was stored with it."""

    key: bytes
    is_current: bool
    """True if the current master key wraps it, in the current format."""
    chained: int
    """The first record with a link hash, 0 for none."""
    below: int
    """The record before which a trim removed all."""


@final
class MasterKeys:
    """The master key, and older ones that are still needed for reading.

    Args:
        current: 32 bytes, or their base64 or hex; it wraps each new data key.
        older: Earlier master keys.

    Raises:
        ConfigError: A key is not 32 bytes.

    Example:
        >>> keys = MasterKeys(MasterKeys.new())
    """

    def __init__(self, current: bytes | str, *older: bytes | str) -> None:
        keys = [_key(key) for key in (current, *older)]
        self._keys: dict[str, bytes] = {_id(key): key for key in reversed(keys)}
        self.current: str = _id(keys[0])
        """The id of the key that wraps; it reveals nothing about the key."""

    def __repr__(self) -> str:
        return f"MasterKeys(<{self.current} and {len(self._keys) - 1} older>)"

    @staticmethod
    def new() -> str:
        """Return a new key, in base64: keep it apart from the store."""
        return base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Return the keys of ``PERDURE_KEY``, or of the file that ``PERDURE_KEY_FILE`` names.

        Several keys are separated by commas or white space, the current one first.

        Raises:
            ConfigError: Neither is set, the value is not a key, or users other than its owner
                have access to the file.

        """
        values = os.environ if environment is None else environment
        text = values.get(KEY_VARIABLE, "")
        if not text and (path := values.get(KEY_FILE_VARIABLE)):
            text = _text_of(path)
        keys = text.replace(",", " ").split()
        if not keys:
            raise ConfigError(
                f"an encrypted store needs its key: set {KEY_VARIABLE}, or {KEY_FILE_VARIABLE} to "
                "a file, to 32 bytes in base64 (openssl rand -base64 32)",
                option=KEY_VARIABLE,
            )
        return cls(*keys)

    def wrap(self, key: bytes, place: bytes, chained: int = 0, below: int = 0) -> bytes:
        """Return a data key wrapped by the current master key.

        Args:
            key: The data key.
            place: The associated data that identifies the key's owner.
            chained: The first record with a link hash, 0 for none.
            below: The record before which a trim removed all.

        """
        nonce = secrets.token_bytes(_NONCE)
        associated = _associated_data(place, chained, below)
        encrypted = ciphers().AESGCM(self._keys[self.current]).encrypt(nonce, key, associated)
        text = base64.b64encode(nonce + encrypted).decode()
        return msgspec.json.encode(
            WrappedKey(FORMAT if chained else 1, self.current, text, chained, below)
        )

    def unwrap(self, data: bytes, place: bytes, what: str) -> UnwrappedKey:
        """Return a data key.

        Raises:
            ConfigError: None of the master keys unwraps it.
            CorruptRecordError: It is damaged.
            UnsupportedVersionError: A newer release wrapped it.

        """
        try:
            wrapped = decode(data, WrappedKey)
            encrypted = base64.b64decode(wrapped.key, validate=True)
        except (FormatError, binascii.Error, ValueError) as error:
            raise _damaged(what) from error
        if wrapped.format > FORMAT:
            raise UnsupportedVersionError(
                f"the key of {what} has format {wrapped.format}: use a newer perdure",
                format=wrapped.format,
            )
        master = self._keys.get(wrapped.master)
        if master is None:
            raise ConfigError(
                f"{what} is encrypted with the master key {wrapped.master}, which is not among "
                f"those that were given ({', '.join(self._keys)}): give that key, or add it as an "
                f"older one ({KEY_VARIABLE}=NEW,OLD)",
                option=KEY_VARIABLE,
                master=wrapped.master,
            )
        from cryptography.exceptions import InvalidTag

        associated = _associated_data(place, wrapped.chained, wrapped.below)
        try:
            key = (
                ciphers().AESGCM(master).decrypt(encrypted[:_NONCE], encrypted[_NONCE:], associated)
            )
        except (InvalidTag, ValueError) as error:
            raise _damaged(what) from error
        is_current = wrapped.master == self.current and wrapped.format in (1, FORMAT)
        return UnwrappedKey(key, is_current, wrapped.chained, wrapped.below)


def _text_of(path: str) -> str:
    """Return the text of a key file, if only its owner has access, as ssh requires of its keys."""
    try:
        with Path(path).expanduser().open(encoding="ascii") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the key file {path} cannot be read: set {KEY_FILE_VARIABLE} to a file with "
            "the key in base64",
            option=KEY_FILE_VARIABLE,
        ) from error
    if sys.platform != "win32" and mode & _OTHERS:
        raise ConfigError(
            f"the key file {path} is accessible to other users (mode {mode:04o}), who may know the "
            f"key: chmod 600 {shlex.quote(path)}, and use a new key if in doubt",
            option=KEY_FILE_VARIABLE,
            mode=mode,
        )
    return text


def _associated_data(place: bytes, chained: int, below: int) -> bytes:
    return b"%b chained from %d, from %d on" % (place, chained, below) if chained else place


def _damaged(what: str) -> CorruptRecordError:
    return CorruptRecordError(
        f"the wrapped key of {what} is damaged or belongs elsewhere: restore it from a copy",
        what=what,
    )


def _key(given: bytes | str) -> bytes:
    key = given if isinstance(given, bytes) else _decoded(given.strip())
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"a master key has {KEY_BYTES} bytes, this one {len(key)}: make one with openssl rand "
            "-base64 32",
            option="keys",
            size=len(key),
        )
    return key


def _decoded(text: str) -> bytes:
    try:
        if len(text) == 2 * KEY_BYTES:
            return bytes.fromhex(text)
        return base64.b64decode(text.translate(_STANDARD).encode("ascii"), validate=True)
    except ValueError:
        raise ConfigError(
            "a master key is neither base64 nor hex: make one with openssl rand -base64 32",
            option="keys",
        ) from None


def _id(key: bytes) -> str:
    return hashlib.blake2b(b"perdure master", key=key, digest_size=6).hexdigest()


# Encryption with a data key
#
# AES-256-GCM is deterministic here: the nonce is a keyed hash of the associated data and the bytes.
# So a batch that is sent again has the same bytes, and two different plaintexts share a nonce only
# by a collision of 96 bits. The store can see only that the same bytes were written to the same
# place twice.


_VERSION = b"\x01"
_ID = 8

_TAG = 16
_HEAD = 1 + _ID + _NONCE
GROWTH = _HEAD + _TAG + 1
"""By how many bytes encryption makes data longer."""


@final
class DataKey:
    """Transform that encrypts the data of one owner: a session or a tenant.

    Args:
        key: 32 random bytes.
        owner: The owner, part of the associated data.
        compression: Applied before encryption, if any.

    """

    def __init__(self, key: bytes, owner: Place, compression: Compression | None) -> None:
        aead = ciphers()
        self._aead: Any = aead.AESGCM(derived(key, b"seal", 32))
        self._names: Any = aead.AESSIV(derived(key, b"names", 64))
        self._nonces = hashlib.blake2b(key=derived(key, b"nonces", 32), digest_size=_NONCE)
        self._owner = owner
        self._compression = compression
        self.key: bytes = key
        self._prefix = _VERSION + derived(key, b"id", _ID)

    def transform(self, place: Place, data: bytes) -> bytes:
        """Return the bytes encrypted, with their place as associated data."""
        data = b"\x00" + data if self._compression is None else self._compression.compress(data)
        associated = self._associated_data(place)
        nonces = self._nonces.copy()
        nonces.update(b"%d " % len(associated))
        nonces.update(associated)
        nonces.update(data)
        nonce = nonces.digest()
        return b"".join((self._prefix, nonce, self._aead.encrypt(nonce, data, associated)))

    def restore(self, place: Place, data: bytes) -> bytes:
        """Return the decrypted bytes.

        Raises:
            CorruptRecordError: They are damaged, or were encrypted for another place or by
                another key.

        """
        from cryptography.exceptions import InvalidTag

        what = describe_place((*self._owner, *place))
        try:
            if not data.startswith(self._prefix):
                raise ValueError  # noqa: TRY301  # the same error as for damaged bytes
            nonce, encrypted = data[_HEAD - _NONCE : _HEAD], data[_HEAD:]
            plain: bytes = self._aead.decrypt(nonce, encrypted, self._associated_data(place))
        except (InvalidTag, ValueError) as error:
            raise CorruptRecordError(
                f"{what} is damaged, or was encrypted for another place or with another key; it "
                "was left unchanged: restore it from a copy",
                what=what,
            ) from error
        if plain[:1] == b"\x00":
            return plain[1:]
        self._compression = self._compression or Compression()  # another writer compresses
        return self._compression.decompress(plain, what, place[0])

    def has_encrypted(self, data: bytes) -> bool:
        """Return whether bytes, or a payload, have this key's id; they may be forged all the same.

        Without bytes, any key fits.
        """
        if data[:1] == b'"':  # a payload: its first 9 bytes name the key
            with suppress(ValueError):
                data = base64.b64decode(data[1:13])
        return not data or data.startswith(self._prefix)

    def transform_payload(self, place: Place, payload: bytes) -> bytes:
        """Return a payload encrypted, as a JSON string."""
        return to_text(self.transform(place, payload))

    def restore_payload(self, place: Place, payload: bytes) -> bytes:
        """Return a decrypted payload."""
        return self.restore(place, from_text(payload, describe_place((*self._owner, *place))))

    def token(self, text: str) -> str:
        """Return a text encrypted deterministically (AES-SIV): equal texts give equal tokens."""
        encrypted: bytes = self._names.encrypt(text.encode("utf-8", "surrogatepass") or b"\0", None)
        return encrypted.hex()

    def inner_name(self, name: str) -> str:
        """Return a blob's inner name: encrypted, since the plain one is a hash of the content."""
        raw = name.encode()
        with suppress(ValueError):
            raw = bytes.fromhex(name)
        encrypted: bytes = self._names.encrypt((raw or b"\0")[:48], None)
        return "x" + encrypted.hex()

    def outer_name(self, inner: str) -> str | None:
        """Return a blob's name from its inner name; None if this key did not name it."""
        from cryptography.exceptions import InvalidTag

        try:
            plain: bytes = self._names.decrypt(bytes.fromhex(inner[1:]), None)
        except (InvalidTag, ValueError):
            return None
        return plain.hex()

    def stored_name(self, name: str) -> str:
        """Return a document's name with all after its folder encrypted, but for the ending."""
        folder, _, rest = name.partition("/")
        if not rest or name.startswith(KEYS):
            return name
        data = rest.encode("utf-8", "surrogatepass")
        token = base64.b32encode(self._names.encrypt(data, [folder.encode()])).decode().lower()
        return f"{folder}/x{token.rstrip('=')}{_ending(rest)}"

    def plain_name(self, stored: str) -> str:
        """Return a document's name from its stored one, which is plain in earlier formats."""
        from cryptography.exceptions import InvalidTag

        folder, _, rest = stored.partition("/")
        token = rest.removeprefix("x").removesuffix(_ending(rest)).upper()
        try:
            data = base64.b32decode(token + "=" * (-len(token) % 8))
            name: bytes = self._names.decrypt(data, [folder.encode()])
        except (InvalidTag, ValueError):
            return stored
        return f"{folder}/{name.decode('utf-8', 'surrogatepass')}"

    def _associated_data(self, place: Place) -> bytes:
        return msgspec.json.encode(("perdure", 1, self._owner, place))


def _ending(name: str) -> str:
    return next((end for end in (".json", ".jsonl") if name.endswith(end)), "")


def derived(key: bytes, use: bytes, size: int) -> bytes:
    """Return a key for one use, derived from another key."""
    return hashlib.blake2b(b"perdure " + use, key=key, digest_size=size).digest()


# Keyring in the inner store: data keys, each wrapped by a master key


_ATTEMPTS = 100
_PAGE = 100
_PAUSE = 0.02
"""Seconds between two attempts to read a key that another process creates."""


class SessionKeyEntry(UnwrappedKey, frozen=True):
    """A data key as found in the inner store; current only if a manifest names it."""

    manifest: Manifest | None
    name: str
    """The document that holds it."""

    @classmethod
    def new(cls, chained: int = 0) -> SessionKeyEntry:
        """Return a new key, which no document holds yet."""
        return cls(secrets.token_bytes(KEY_BYTES), False, chained, 0, None, "")

    def proven_part(self, tenant: Transform | None) -> tuple[HiddenManifest | None, ManifestProof]:
        """Return the manifest's hidden part, and what it proves."""
        return proven_part(self.manifest, tenant, is_chained=bool(self.chained))


def is_key(name: str) -> bool:
    """Return whether a document holds a wrapped key."""
    return name.startswith(KEYS)


def associated_data(key: SessionKey) -> bytes:
    """Return the associated data that a session's wrapped key is bound to."""
    return msgspec.json.encode(("perdure key", 1, key.tenant, key.agent, key.session))


async def find(store: Store, key: SessionKey, masters: MasterKeys) -> SessionKeyEntry | None:
    """Return a session's data key, None if it has none.

    Raises:
        ConfigError: None of the given master keys unwraps it.
        CorruptRecordError: It is damaged.

    """
    manifest = (await store.read_documents(key, ())).manifest
    if manifest is None:
        return await _find_without_manifest(store, key, masters)
    names = [name for name in manifest.documents if is_key(name)]
    if not names:
        return None
    read = await store.read_documents(key, names)
    for name, document in read.found.items():
        return _entry(key, masters, name, document.data, manifest)
    if read.manifest is None or not set(names).intersection(read.manifest.documents):
        return await find(store, key, masters)  # wrapped again or deleted in between
    raise CorruptRecordError(
        f"the wrapped key of session {key} is lost: restore its documents from a copy", key=str(key)
    )


def _entry(
    key: SessionKey, masters: MasterKeys, name: str, data: bytes, manifest: Manifest | None
) -> SessionKeyEntry:
    unwrapped = masters.unwrap(data, associated_data(key), f"session {key}")
    is_current = unwrapped.is_current and manifest is not None
    chained, below = unwrapped.chained, unwrapped.below
    return SessionKeyEntry(unwrapped.key, is_current, chained, below, manifest, name)


async def _find_without_manifest(
    store: Store, key: SessionKey, masters: MasterKeys
) -> SessionKeyEntry | None:
    """Return the data key of a session whose manifest is damaged, None if it has none."""
    documents = await store.read_documents(key)
    if documents.manifest is not None:
        return await find(store, key, masters)  # it was written in between
    failures: list[PerdureError] = []
    entries: list[SessionKeyEntry] = []
    for name in filter(is_key, documents.remains):
        try:
            entries.append(_entry(key, masters, name, documents.remains[name], None))
        except (ConfigError, CorruptRecordError) as error:
            failures.append(error)  # another document may hold the same key, wrapped earlier
    if failures and not entries:
        raise failures[-1]
    return max(entries, key=lambda entry: entry.chained, default=None)


def wrap_key(
    key: SessionKey, data_key: bytes, masters: MasterKeys, chained: int = 0, below: int = 0
) -> tuple[str, bytes]:
    """Return the document of a session's wrapped key: its name and its bytes."""
    wrapped = masters.wrap(data_key, associated_data(key), chained, below)
    return f"{KEYS}{random_id()}.json", wrapped


async def write(
    store: Store, entry: SessionKeyEntry, manifest: Manifest, masters: MasterKeys
) -> SessionKeyEntry:
    """Write a manifest, and its session's key wrapped by the newest master key, durably.

    The key's document takes the place of the earlier one.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    name, data = wrap_key(manifest.key, entry.key, masters, entry.chained, entry.below)
    others = {name: other for name, other in manifest.documents.items() if not is_key(name)}
    documents = {**others, name: FoldedDocument.of(manifest.as_of_seq, data)}
    manifest = msgspec.structs.replace(manifest, documents=documents)
    await store.write_documents(manifest.key, {name: data}, manifest)
    return msgspec.structs.replace(entry, is_current=True, manifest=manifest, name=name)


async def require_new(store: Store, key: SessionKey) -> None:
    """Check that a session without a key has no records.

    Raises:
        ConfigError: It was written without encryption, or its key is lost.

    """
    if await holds_records(store, key):
        raise ConfigError(
            f"session {key} has records and no key: it was written without encryption, so "
            "open it without, and copy it (perdure export, perdure import) into an encrypted "
            "store; if it was encrypted, restore its documents from a copy",
            key=str(key),
        )


async def holds_records(store: Store, key: SessionKey) -> bool:
    """Return whether a session's log has records other than epoch records."""
    record = await first_record(store.read_log(key), lambda record: record.kind != EPOCH)
    return record is not None


async def all_sessions(store: Store) -> AsyncGenerator[SessionKey, None]:
    """Yield the sessions of all tenants, and those that hold the tenants' keys."""
    for tenant in sorted({"", *await store.tenants()}):
        query = SessionQuery(tenant=tenant, limit=_PAGE)
        while page := await store.sessions(query):
            for info in page:
                yield info.key
            query = query.after_page(page[-1])


async def require_encrypted(store: Store) -> None:
    """Check that a store without the mark of encryption holds nothing in plain text.

    The mark is the key of the unnamed tenant. Encrypted stores that are older than the mark have
    session keys: the first session with content decides.

    Raises:
        ConfigError: The store was written without encryption.

    """
    if await is_begun(store, keyring_of("")):
        return
    async with aclosing(all_sessions(store)) as keys:
        async for key in keys:
            if key.agent == KEYRING or await _has_key(store, key):
                return
    for tenant in await store.tenants():
        if await store.blob_names(tenant):
            raise _not_encrypted(store, f"blobs of tenant {tenant!r}")
    if waiting := await store.sessions_with_pending_items():
        raise _not_encrypted(store, f"what was posted to {waiting[0]}")


async def _has_key(store: Store, key: SessionKey) -> bool:
    """Return whether a session has a key; False if it has no content either.

    Raises:
        ConfigError: It has content in plain text.

    """
    documents = await store.read_documents(key, ())
    manifest = documents.manifest
    names = documents.remains if manifest is None else manifest.documents
    if any(map(is_key, names)):
        return True
    if manifest is None and not await holds_records(store, key):
        return False
    raise _not_encrypted(store, f"session {key}")


def _not_encrypted(store: Store, what: str) -> ConfigError:
    return ConfigError(
        f"{store.location} is not encrypted, it holds {what} in plain text: leave encrypted+ (or "
        "the EncryptedStore) out to continue with it, or copy it into a new encrypted store with "
        "perdure migrate SOURCE encrypted+TARGET",
        option="store",
        location=store.location,
    )


async def tenant_key(store: Store, tenant: str, masters: MasterKeys) -> bytes:
    """Return a tenant's data key; create it if it is missing.

    Processes that create it at the same time compete for the lease of the session that holds it,
    so only one does.
    """
    key = keyring_of(tenant)
    for attempt in range(_ATTEMPTS):
        entry = await find(store, key, masters)
        if entry is not None:
            return entry.key
        holder = await store.holder(key)
        is_held = holder is not None and not holder.released and holder.alive is not False
        # Every tenth attempt acquires the lease although it is held.
        if is_held and attempt % 10 != 9:
            # The holder is about to write the key.
            await anyio.sleep(_PAUSE * random.uniform(0.5, 1.5))
            continue
        with suppress(LeaseHeldError, LeaseLostError):
            lease = await take_after(store, key, after=holder.epoch if holder else 0)
            await _create_key(store, lease, masters)
    raise LeaseHeldError(
        f"the key of tenant {tenant!r} was not created in {_ATTEMPTS} attempts, since other "
        "processes held its lease: try again",
        tenant=tenant,
    )


def empty_manifest(lease: Taken) -> Manifest:
    """Return the manifest of a session of which nothing was folded."""
    return Manifest(key=lease.key, epoch=lease.epoch, as_of_seq=lease.head)


async def _create_key(store: Store, lease: Taken, masters: MasterKeys) -> None:
    try:
        # Under the lease: another process may have created it meanwhile.
        if await find(store, lease.key, masters) is None:
            await write(store, SessionKeyEntry.new(), empty_manifest(lease), masters)
    finally:
        with anyio.CancelScope(shield=True):
            await store.release(lease.key, lease.epoch)
