"""Receipts of migrations: small blobs in the target that say what an earlier run did.

    written    what a session has under an epoch was written, or deleted, by migrations alone
    equal      a session was found equal to its source, each as of a moment
    post       a pending item was copied: its op id
    letter     a dead letter was copied: its op id, and its time

No record references them, so garbage collection of blobs must ask `current` first. A receipt of an
older state of the target, such as before a program wrote the session there, is garbage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Container, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeAlias, final

import msgspec

from perdure.errors import CorruptRecordError, FormatError
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.records import HOLDER_KINDS
from perdure.store import Store, first_record
from perdure.transfer.bundle_files import ALL
from perdure.transfer.second_look import exact_moment_of

Kind: TypeAlias = Literal["written", "equal", "post", "letter"]


class _Receipt(msgspec.Struct, frozen=True, array_like=True, tag="migrated"):
    kind: Kind
    key: SessionKey
    source: str
    facts: tuple[Any, ...]


@final
class Receipts:
    """The receipts of migrations from one store into another."""

    def __init__(self, source: Store, target: Store) -> None:
        self._source = source
        self._target = target

    def _receipt(self, kind: Kind, key: SessionKey, facts: tuple[Any, ...]) -> tuple[str, bytes]:
        data = encode(_Receipt(kind, key, self._source.location, facts))
        return hashlib.sha256(data).hexdigest(), data

    async def leave(self, kind: Kind, key: SessionKey, *facts: object) -> None:
        """Leave a receipt."""
        name, data = self._receipt(kind, key, facts)
        await self._target.put_blobs(key.tenant, {name: data})

    async def has(self, kind: Kind, key: SessionKey, *facts: object) -> bool:
        """Return whether there is a receipt; its name alone says so, even if it is damaged."""
        name, _ = self._receipt(kind, key, facts)
        try:
            return await self._target.get_blob(key.tenant, name) is not None
        except CorruptRecordError:
            return True


async def written_under(store: Store, key: SessionKey) -> int:
    """Return the newest epoch that wrote anything of a session, or deleted it; 0 without one.

    An open alone, and a run that was killed before its first write, changed nothing.
    """
    holder = await store.holder(key)
    manifest = (await store.read_documents(key, ())).manifest
    log = store.read_log(key, reverse=True)
    newest = await first_record(log, lambda record: record.kind not in HOLDER_KINDS)
    folded = 0 if manifest is None else manifest.epoch
    written = 0 if newest is None else newest.epoch
    return max(folded, written) or (0 if holder is None else holder.epoch)


async def current(store: Store, tenant: str, names: Collection[str]) -> set[str]:
    """Return the names of those blobs that are receipts and match the store's present state.

    One that is damaged cannot be told from any other garbage.
    """
    valid: set[str] = set()
    waiting: dict[SessionKey, set[str]] = {}
    for name in sorted(names):
        data = None
        with suppress(CorruptRecordError):
            data = await store.get_blob(tenant, name)
        if data is not None and data.startswith(b'["migrated",'):
            with suppress(FormatError):
                receipt = decode(data, _Receipt)
                if receipt.kind == "post" and receipt.key not in waiting:
                    waiting[receipt.key] = await _waiting(store, receipt.key)
                if await _is_current(store, receipt, waiting):
                    valid.add(name)
    return valid


async def _waiting(store: Store, key: SessionKey) -> set[str]:
    holder = await store.holder(key)
    epoch = 0 if holder is None else holder.epoch
    return {item.op_id for item in await store.receive(key, epoch, limit=ALL)}


async def _is_current(
    store: Store, receipt: _Receipt, waiting: Mapping[SessionKey, Container[str]]
) -> bool:
    key, facts = receipt.key, list(receipt.facts)
    match receipt.kind:
        case "written":
            return facts == [await written_under(store, key)]
        case "equal":
            return encode(await exact_moment_of(store, key)) == encode(facts[-1])
        case "post":
            return facts[0] in waiting[key]
        case "letter":
            known = await store.dead_letters(key)
            return any([letter.item.op_id, letter.at] == facts for letter in known)
