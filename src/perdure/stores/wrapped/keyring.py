"""Keyring in the inner store: data keys, each wrapped by a master key.

A session's wrapped key is one of its own documents. The first holder creates it, and deleting the
session destroys it. A tenant's wrapped key is a document of a session that only holds that key. A
key's document is never overwritten: when a key is wrapped again, its document gets a new name.

A wrapped key authenticates itself. So it is usable even if the manifest is damaged and the inner
store returns only the remains; the next fold writes a new manifest.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from contextlib import aclosing

import anyio
import msgspec

from perdure._lib.ids import random_id
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    LeaseHeldError,
    LeaseLostError,
    PerdureError,
)
from perdure.records.keys import KEYRING, SessionKey, keyring_of
from perdure.records.manifest import KEYS, FoldedDocument, Manifest
from perdure.records.records import EPOCH
from perdure.store import HeldLease, Store
from perdure.stores.wrapped.keys import KEY_BYTES, MasterKeys

_ATTEMPTS = 100
_PAGE = 100
_PAUSE = 0.02
"""Seconds between two attempts to read a key that another process creates."""


class SessionKeyEntry(msgspec.Struct, frozen=True):
    """A data key as found in the inner store."""

    key: bytes
    is_current: bool
    """Whether the newest master key wraps it, and a manifest names it."""
    manifest: Manifest | None
    name: str
    chained: int
    """The first record with a link hash, 0 for none."""
    below: int
    """The record before which a trim removed all."""


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
        data_key = masters.unwrap(document.data, associated_data(key), f"session {key}")
        return SessionKeyEntry(
            data_key.key, data_key.is_current, manifest, name, data_key.chained, data_key.below
        )
    if read.manifest is None or not set(names).intersection(read.manifest.documents):
        return await find(store, key, masters)  # wrapped again or deleted in between
    message = f"the wrapped key of session {key} is lost: restore its documents from a copy"
    raise CorruptRecordError(message, key=str(key))


async def _find_without_manifest(
    store: Store, key: SessionKey, masters: MasterKeys
) -> SessionKeyEntry | None:
    """Return the data key of a session whose manifest is damaged, None if it has none."""
    documents = await store.read_documents(key)
    if documents.manifest is not None:
        return await find(store, key, masters)  # it was written in between
    failure: PerdureError | None = None
    entries: list[SessionKeyEntry] = []
    for name in filter(is_key, documents.remains):
        try:
            data_key = masters.unwrap(
                documents.remains[name], associated_data(key), f"session {key}"
            )
        except (ConfigError, CorruptRecordError) as error:
            failure = error  # another document may hold the same key, wrapped earlier
        else:
            # Not current: no manifest names it.
            entries.append(
                SessionKeyEntry(data_key.key, False, None, name, data_key.chained, data_key.below)
            )
    if failure is not None and not entries:
        raise failure
    return max(entries, key=lambda entry: entry.chained, default=None)


def wrap_key(
    key: SessionKey, data_key: bytes, masters: MasterKeys, chained: int = 0, below: int = 0
) -> tuple[str, bytes]:
    """Return the document of a session's wrapped key: its name and its bytes."""
    wrapped = masters.wrap(data_key, associated_data(key), chained, below)
    return f"{KEYS}{random_id()}.json", wrapped


async def write(store: Store, key: tuple[str, bytes], manifest: Manifest) -> None:
    """Make the document of a session's wrapped key durable, in place of the earlier one.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    name, data = key
    entry = FoldedDocument(manifest.as_of_seq, hashlib.sha256(data).hexdigest(), len(data))
    others = {name: other for name, other in manifest.documents.items() if not is_key(name)}
    manifest = msgspec.structs.replace(manifest, documents={**others, name: entry})
    await store.write_documents(manifest.key, {name: data}, manifest)


async def require_new(store: Store, key: SessionKey) -> None:
    """Check that a session without a key has no records.

    Raises:
        ConfigError: It was written without encryption, or its key is lost.

    """
    if await holds_records(store, key):
        message = (
            f"session {key} has records and no key: it was written without encryption, so "
            "open it without, and copy it (perdure export, perdure import) into an encrypted "
            "store; if it was encrypted, restore its documents from a copy"
        )
        raise ConfigError(message, key=str(key))


async def holds_records(store: Store, key: SessionKey) -> bool:
    """Return whether a session's log has records other than epoch records."""
    async with aclosing(store.read_log(key)) as chunks:
        async for chunk in chunks:
            if any(record.kind != EPOCH for record in chunk.records):
                return True
    return False


async def require_encrypted(store: Store) -> None:
    """Check that a store without the mark of encryption holds nothing in plain text.

    The mark is the key of the unnamed tenant. Encrypted stores that are older than the mark have
    session keys: the first session with content decides.

    Raises:
        ConfigError: The store was written without encryption.

    """
    if await store.holder(keyring_of("")) is not None:
        return
    tenants = sorted({"", *await store.tenants()})
    for tenant in tenants:
        after: SessionKey | None = None
        while page := await store.sessions(tenant=tenant, after=after, limit=_PAGE):
            for info in page:
                if info.key.agent == KEYRING or await _has_key(store, info.key):
                    return
            after = page[-1].key
    blobs = [tenant for tenant in tenants if await store.blob_names(tenant)]
    waiting = await store.waiting()
    if blobs or waiting:
        what = f"what was posted to {waiting[0]}" if waiting else f"blobs of tenant {blobs[0]!r}"
        raise _not_encrypted(store, what)


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
    if manifest is None:
        try:
            await require_new(store, key)
        except ConfigError as error:
            raise _not_encrypted(store, f"session {key}") from error
        return False
    raise _not_encrypted(store, f"session {key}")


def _not_encrypted(store: Store, what: str) -> ConfigError:
    message = (
        f"{store.location} is not encrypted, it holds {what} in plain text: leave encrypted+ (or "
        "the EncryptedStore) out to continue with it, or copy it into a new encrypted store with "
        "perdure migrate SOURCE encrypted+TARGET"
    )
    return ConfigError(message, option="store", location=store.location)


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
        # Every tenth attempt acquires the lease although it is held.
        is_held = holder is not None and not holder.released and attempt % 10 != 9
        if is_held and holder is not None and holder.alive is not False:
            # The holder is about to write the key.
            await anyio.sleep(_PAUSE * random.uniform(0.5, 1.5))
            continue
        try:
            lease = await store.acquire(key, after=holder.epoch if holder else 0)
            await _create_key(store, lease, masters)
        except (LeaseHeldError, LeaseLostError):
            continue
    message = (
        f"the key of tenant {tenant!r} was not created in {_ATTEMPTS} attempts, since other "
        "processes held its lease: try again"
    )
    raise LeaseHeldError(message, tenant=tenant)


def empty_manifest(lease: HeldLease) -> Manifest:
    """Return the manifest of a session of which nothing was folded."""
    return Manifest(key=lease.key, epoch=lease.epoch, as_of_seq=lease.head)


async def _create_key(store: Store, lease: HeldLease, masters: MasterKeys) -> None:
    try:
        if await find(store, lease.key, masters) is None:
            document = wrap_key(lease.key, secrets.token_bytes(KEY_BYTES), masters)
            await write(store, document, empty_manifest(lease))
    finally:
        with anyio.CancelScope(shield=True):
            await store.release(lease.key, lease.epoch)
