"""Receipts: small blobs by which a migration finds out, in the target, what an earlier run did.

    equal      a session was found equal to its source, each as it was then
    untouched  nobody but a migration has written a session under an epoch
    life       which one of several sessions of a name was copied
    removed    a copy was deleted to be written anew, and not forgotten
    letter     a dead letter came from the source

Nothing names them, so a collection of unreachable blobs has to ask `current` first. One that says
nothing of how the target is now, because somebody has opened the session there since, is garbage.
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
from perdure.transfer.bundle import neutral

EQUAL, UNTOUCHED, LIFE, REMOVED, LETTER = "equal", "untouched", "life", "removed", "letter"
_PARTS: Final = {EQUAL: 5, UNTOUCHED: 4, LIFE: 4, REMOVED: 4, LETTER: 5}


class ReceiptState(msgspec.Struct, frozen=True):
    """What changes whenever a session does."""

    epoch: int
    head: int
    manifest: Manifest | None


async def state_of(store: Store, key: SessionKey) -> ReceiptState | None:
    """Return the state of a session; None where there is none, or where it was deleted."""
    manifest = (await store.read_documents(key, ())).manifest
    head = await store.head(key)
    holder = await store.holder(key)
    if holder is None or holder.deleted:
        return None
    return ReceiptState(holder.epoch, head, None if manifest is None else neutral(manifest))


def name(receipt: bytes) -> str:
    """Return the name of the blob that a receipt is."""
    return hashlib.sha256(receipt).hexdigest()


def equal(
    source: Store, key: SessionKey, receipt_state: ReceiptState, state: ReceiptState
) -> bytes:
    """Return the receipt by which a session, as it is here, was found equal to what is there."""
    return encode([EQUAL, key, source.location, receipt_state, state])


def untouched(source: Store, key: SessionKey, epoch: int) -> bytes:
    """Return the receipt by which nobody but a migration has written a session in the target."""
    return encode([UNTOUCHED, key, source.location, epoch])


def life(source: Store, key: SessionKey, mark: object) -> bytes:
    """Return the receipt of a session that differs by a mark from others of its name."""
    return encode([LIFE, key, source.location, mark])


def removed(source: Store, key: SessionKey, epoch: int) -> bytes:
    """Return the receipt of a copy that a migration removed, to write it anew."""
    return encode([REMOVED, key, source.location, epoch])


def copied_letter(source: Store, key: SessionKey, letter: DeadLetter) -> bytes:
    """Return the receipt of a dead letter that the target has from the source."""
    return encode([LETTER, key, source.location, letter.item.op_id, letter.at])


async def current(store: Store, tenant: str, names: Collection[str]) -> set[str]:
    """Return the names of those blobs that are receipts, and true of how the store is now."""
    receipts: list[tuple[str, list[Any]]] = []
    for name in sorted(names):
        data = await store.get_blob(tenant, name)
        parts = None if data is None else _parts(data)
        if parts is not None:
            receipts.append((name, parts))
    receipt = {name for name, parts in receipts if await _is_current(store, parts)}
    copied = {parts[1] for name, parts in receipts if name in receipt and parts[0] == UNTOUCHED}
    return receipt | {name for name, parts in receipts if parts[0] == LIFE and parts[1] in copied}


def _parts(data: bytes) -> list[Any] | None:
    """Return what a receipt says, its key as one; None for a blob that is none."""
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
        return any([receipt.item.op_id, receipt.at] == parts[3:] for receipt in known)
    if kind == EQUAL:
        state_there = await state_of(store, key)
        return state_there is not None and encode(state_there) == encode(parts[4])
    holder = await store.holder(key)
    is_newest = holder is not None and holder.epoch == parts[3]
    return is_newest and holder is not None and holder.deleted is (kind == REMOVED)
