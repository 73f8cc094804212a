"""Data keys in the inner store: each wrapped, among the documents of what it seals.

A session's key is a document of the session's own, made by its first holder and removed with
it: deleting the session destroys the key. A tenant's key is a document of a session that only
holds it. A key's document is never written over: wrapped anew, it gets a new name.

A manifest may be damaged, for a fold makes it anew. A wrapped key proves itself, so it is good
without one, where the inner store shows what is left.
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

_TRIES = 100
_PAGE = 100
_PAUSE = 0.02


class SessionKeyEntry(msgspec.Struct, frozen=True):
    """A session's key."""

    key: bytes
    is_current: bool
    """Whether the newest master key wraps it, and a manifest names it."""
    manifest: Manifest | None
    name: str
    chained: int
    """The first record that is linked to those before it, 0 for none."""
    below: int
    """Records before this one were removed by perdure."""


def is_key(name: str) -> bool:
    """Say whether a document holds a key."""
    return name.startswith(KEYS)


def bound(key: SessionKey) -> bytes:
    """Return what a wrapped key is bound to."""
    return msgspec.json.encode(("perdure key", 1, key.tenant, key.agent, key.session))


async def find(store: Store, key: SessionKey, masters: MasterKeys) -> SessionKeyEntry | None:
    """Return a session's key, None if it has none.

    Raises:
        ConfigError: No master key that was given opens it.
        CorruptRecordError: It is damaged.

    """
    manifest = (await store.read_documents(key, ())).manifest
    if manifest is None:
        return await _left(store, key, masters)
    names = [name for name in manifest.documents if is_key(name)]
    if not names:
        return None
    read = await store.read_documents(key, names)
    for name, document in read.found.items():
        one = masters.unwrap(document.data, bound(key), f"session {key}")
        return SessionKeyEntry(one.key, one.is_current, manifest, name, one.chained, one.below)
    if read.manifest is None or not set(names).intersection(read.manifest.documents):
        return await find(store, key, masters)  # wrapped anew, or deleted, in between
    message = f"the wrapped key of session {key} is lost: restore its documents from a copy"
    raise CorruptRecordError(message, key=str(key))


async def _left(store: Store, key: SessionKey, masters: MasterKeys) -> SessionKeyEntry | None:
    """Return the key of a session whose manifest is damaged, None if it has none."""
    there = await store.read_documents(key)
    if there.manifest is not None:
        return await find(store, key, masters)  # it was just begun
    trouble: PerdureError | None = None
    found: list[SessionKeyEntry] = []
    for name in filter(is_key, there.remains):
        try:
            one = masters.unwrap(there.remains[name], bound(key), f"session {key}")
        except (ConfigError, CorruptRecordError) as error:
            trouble = error  # an older one may lie beside it
        else:
            found.append(
                SessionKeyEntry(one.key, False, None, name, one.chained, one.below)
            )  # nothing names it
    if trouble is not None and not found:
        raise trouble
    return max(found, key=lambda one: one.chained, default=None)


def wrapped(
    key: SessionKey, data_key: bytes, masters: MasterKeys, chained: int = 0, below: int = 0
) -> tuple[str, bytes]:
    """Return a session's key as a document, with the document's name."""
    return f"{KEYS}{random_id()}.json", masters.wrap(data_key, bound(key), chained, below)


async def write(store: Store, key: tuple[str, bytes], manifest: Manifest) -> None:
    """Make a session's key durable, in place of one that was wrapped otherwise.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    name, data = key
    folded = FoldedDocument(manifest.as_of_seq, hashlib.sha256(data).hexdigest(), len(data))
    kept = {name: one for name, one in manifest.documents.items() if not is_key(name)}
    listed = msgspec.structs.replace(manifest, documents={**kept, name: folded})
    await store.write_documents(manifest.key, {name: data}, listed)


async def require_new(store: Store, key: SessionKey) -> None:
    """See that a session without a key holds nothing yet.

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
    """Say whether anybody has written into a session that was taken."""
    async with aclosing(store.read_log(key)) as chunks:
        async for chunk in chunks:
            if any(record.kind != EPOCH for record in chunk.records):
                return True
    return False


async def require_sealed(store: Store) -> None:
    """See that a store in which nobody has left the mark of encryption holds nothing plain.

    Stores of before the mark have keys: the first session that holds anything tells.

    Raises:
        ConfigError: It was written without encryption.

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
        raise _plain(store, what)


async def _has_key(store: Store, key: SessionKey) -> bool:
    """Say whether a session has a key; one with neither key nor content says nothing."""
    have = await store.read_documents(key, ())
    names = have.remains if have.manifest is None else have.manifest.documents
    if any(map(is_key, names)):
        return True
    if have.manifest is None:
        try:
            await require_new(store, key)
        except ConfigError as error:
            raise _plain(store, f"session {key}") from error
        return False
    raise _plain(store, f"session {key}")


def _plain(store: Store, what: str) -> ConfigError:
    message = (
        f"{store.location} is not encrypted, it holds {what} in plain text: leave encrypted+ (or "
        "the EncryptedStore) out to go on with it, or copy it into a new encrypted store with "
        "perdure migrate SOURCE encrypted+TARGET"
    )
    return ConfigError(message, option="store", location=store.location)


async def tenant_key(store: Store, tenant: str, masters: MasterKeys) -> bytes:
    """Return a tenant's key, made if there is none; of several who make it, one does."""
    key = keyring_of(tenant)
    for attempt in range(_TRIES):
        found = await find(store, key, masters)
        if found is not None:
            return found.key
        holder = await store.holder(key)
        fresh = holder is not None and not holder.released and attempt % 10 != 9
        if fresh and holder is not None and holder.alive is not False:
            await anyio.sleep(_PAUSE * random.uniform(0.5, 1.5))  # somebody is about to write it
            continue
        try:
            grant = await store.acquire(key, after=holder.epoch if holder else 0)
            await _make(store, grant, masters)
        except (LeaseHeldError, LeaseLostError):
            continue
    message = f"the key of tenant {tenant!r} could not be made, since others kept at it: try again"
    raise LeaseHeldError(message, tenant=tenant)


def begun(grant: HeldLease) -> Manifest:
    """Return the manifest of a session of which nothing was folded."""
    return Manifest(key=grant.key, epoch=grant.epoch, as_of_seq=grant.head)


async def _make(store: Store, grant: HeldLease, masters: MasterKeys) -> None:
    try:
        if await find(store, grant.key, masters) is None:
            made = wrapped(grant.key, secrets.token_bytes(KEY_BYTES), masters)
            await write(store, made, begun(grant))
    finally:
        with anyio.CancelScope(shield=True):
            await store.release(grant.key, grant.epoch)
