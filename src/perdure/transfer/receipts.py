"""Receipts of a migration: small blobs in the target that record what an earlier run did.

    equal      a session was found equal to its source, each as it was then
    untouched  only a migration has written a session under an epoch
    life       which of several sessions of the same key was copied
    removed    a migration deleted a copy to write it again; the user did not delete it
    letter     a dead letter was copied from the source

No record references them, so garbage collection of blobs must ask `current` first. A receipt of an
older state of the target, such as before a program opened the session there, is garbage.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec

from perdure.errors import ConfigError, FormatError
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.records.posts import DeadLetter
from perdure.store import Store
from perdure.transfer import bundle_files
from perdure.transfer.bundle import neutral, neutral_record

EQUAL, UNTOUCHED, LIFE, REMOVED, LETTER = "equal", "untouched", "life", "removed", "letter"
_PARTS: Final = {EQUAL: 5, UNTOUCHED: 4, LIFE: 4, REMOVED: 4, LETTER: 5}


class ReceiptState(msgspec.Struct, frozen=True):
    """Summary of a session that changes with every change of it."""

    epoch: int
    head: int
    manifest: Manifest | None


async def state_of(store: Store, key: SessionKey) -> ReceiptState | None:
    """Return the state of a session; None if there is none or it was deleted."""
    manifest = (await store.read_documents(key, ())).manifest
    head = await store.head(key)
    holder = await store.holder(key)
    if holder is None or holder.deleted:
        return None
    return ReceiptState(holder.epoch, head, None if manifest is None else neutral(manifest))


def name(receipt: bytes) -> str:
    """Return the blob name of a receipt."""
    return hashlib.sha256(receipt).hexdigest()


def equal(source: Store, key: SessionKey, original: ReceiptState, copied: ReceiptState) -> bytes:
    """Return the receipt that the original and the copy of a session were equal."""
    return encode([EQUAL, key, source.location, original, copied])


def untouched(source: Store, key: SessionKey, epoch: int) -> bytes:
    """Return the receipt that only a migration has written a session in the target."""
    return encode([UNTOUCHED, key, source.location, epoch])


def life(source: Store, key: SessionKey, mark: object) -> bytes:
    """Return the receipt of a session, with a mark that distinguishes it from others of its key."""
    return encode([LIFE, key, source.location, mark])


def removed(source: Store, key: SessionKey, epoch: int) -> bytes:
    """Return the receipt that a migration deleted a copy, to write it again."""
    return encode([REMOVED, key, source.location, epoch])


def copied_letter(source: Store, key: SessionKey, letter: DeadLetter) -> bytes:
    """Return the receipt of a dead letter that was copied from the source."""
    return encode([LETTER, key, source.location, letter.item.op_id, letter.at])


async def is_untouched(source: Store, target: Store, key: SessionKey, epoch: int) -> bool:
    """Say whether only migrations have written the target's copy of a session.

    A run that is killed between taking its lease and writing its receipt leaves an epoch without a
    receipt, under which nothing was written. So the newest epoch with a record or a fold counts.
    """
    if await _has(target, key, untouched(source, key, epoch)):
        return True
    manifest = (await target.read_documents(key, ())).manifest
    newest = 0 if manifest is None else manifest.epoch
    log = bundle_files.settled_records(target, key, await target.head(key))
    async with contextlib.aclosing(log) as records:
        async for record in records:
            if neutral_record(record) is not None:
                newest = max(newest, record.epoch)
    for earlier in range(epoch - 1, max(newest, 1) - 1, -1):
        if await _has(target, key, untouched(source, key, earlier)):
            return True
    return not newest


async def was_removed(source: Store, target: Store, key: SessionKey, epoch: int) -> bool:
    """Say whether a migration deleted a session under an epoch, to write it again."""
    return await _has(target, key, removed(source, key, epoch))


async def _has(store: Store, key: SessionKey, receipt: bytes) -> bool:
    return await store.get_blob(key.tenant, name(receipt)) is not None


async def current(store: Store, tenant: str, names: Collection[str]) -> set[str]:
    """Return the names of those blobs that are receipts and match the store's present state."""
    receipts: list[tuple[str, list[Any]]] = []
    for blob in sorted(names):
        data = await store.get_blob(tenant, blob)
        parts = None if data is None else _parts(data)
        if parts is not None:
            receipts.append((blob, parts))
    valid = {blob for blob, parts in receipts if await _is_current(store, parts)}
    copied = {parts[1] for blob, parts in receipts if blob in valid and parts[0] == UNTOUCHED}
    return valid | {blob for blob, parts in receipts if parts[0] == LIFE and parts[1] in copied}


def _parts(data: bytes) -> list[Any] | None:
    """Return a receipt's parts, with the key decoded; None if the blob is not a receipt."""
    if not data.startswith(tuple(encode([kind])[:-1] + b"," for kind in _PARTS)):
        return None
    with contextlib.suppress(FormatError, ConfigError, msgspec.ValidationError):
        parts = decode(data, list[Any])
        if len(parts) == _PARTS[parts[0]]:
            return [parts[0], msgspec.convert(parts[1], SessionKey), *parts[2:]]
    return None


async def _is_current(store: Store, parts: Sequence[Any]) -> bool:
    kind, key = parts[:2]
    if kind == LETTER:
        known = await store.dead_letters(key) if store.capabilities.dead_letters else []
        return any([letter.item.op_id, letter.at] == parts[3:] for letter in known)
    if kind == EQUAL:
        copied = await state_of(store, key)
        return copied is not None and encode(copied) == encode(parts[4])
    holder = await store.holder(key)
    is_newest = holder is not None and holder.epoch == parts[3]
    return is_newest and holder is not None and holder.deleted is (kind == REMOVED)
