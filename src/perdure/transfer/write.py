"""Import of a session from bundle items, under a lease, with the original sequence numbers.

Records refer to one another by sequence number, so each keeps its own. Where the source's log had
an epoch record, the importer writes one too, by acquiring the lease again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, TypeAlias, final

import anyio
import msgspec

from perdure.errors import ConfigError, StoreError
from perdure.lineage.store import followed
from perdure.memory.documents import InboxTakenPayload
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, Origin
from perdure.records.records import BASE, TAKEN, Entry, Record
from perdure.store import Batch, DeadLetter, HeldLease, Status, Store
from perdure.transfer.bundle import GAP, BundleBlob, BundleDocument, Item

ALL: Final = 1_000_000
"""Limit of pending items that are read at once."""

BATCH_BYTES: Final = 4 * 1024 * 1024
BATCH_RECORDS: Final = 2000
FEW: Final = 16
"""Gaps up to this size are filled with epoch records; longer ones are pruned history."""


class WrittenSession(msgspec.Struct, frozen=True):
    """Result of an import."""

    key: SessionKey
    records: int = 0
    blobs: int = 0
    bytes: int = 0
    """Bytes of records, documents and blobs, before the store frames them."""
    epoch: int = 0
    """The last one under which it was written."""


OnEpoch: TypeAlias = Callable[[int], Awaitable[None]]


async def land(
    store: Store,
    key: SessionKey,
    items: AsyncGenerator[Item, None],
    *,
    on_epoch: OnEpoch | None = None,
) -> WrittenSession:
    """Write a session that the store does not have, and release it.

    Args:
        store: The store to write to.
        key: The session's key in the store.
        items: The complete session.
        on_epoch: Called with each epoch that was acquired, before any write under it.

    Raises:
        ConfigError: The store has a session of this key.
        StoreError: The store refused a part of it; the store has an incomplete session.

    """
    holder = await store.holder(key)
    if holder is not None and not holder.deleted and await store.head(key):
        message = f"{store.location} has a session {key}: choose another id, or delete it first"
        raise ConfigError(message, key=str(key))
    landing = _SessionWrite(store, key, on_epoch)
    await landing.take(0 if holder is None else holder.epoch)
    return await landing.of(items)


async def go_on(
    store: Store,
    grant: HeldLease,
    items: AsyncGenerator[Item, None],
    *,
    on_epoch: OnEpoch | None = None,
) -> WrittenSession:
    """Append a session's new records to the part that a store has, and release it.

    Args:
        store: The store that has the beginning.
        grant: The lease to write under; it is released.
        items: The complete session. The store must have its records up to the lease's epoch record.
        on_epoch: As for `land`.

    Raises:
        StoreError: The store refused a part of it; the store has an incomplete session.

    """
    landing = _SessionWrite(store, grant.key, on_epoch)
    try:
        await landing.go_on(grant)
        return await landing.of(items)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await landing.release()
        raise


@final
class _SessionWrite:
    def __init__(self, store: Store, key: SessionKey, on_epoch: OnEpoch | None) -> None:
        self._store = store
        self._on_epoch = on_epoch
        self._key = key
        self._epoch = 0
        self._next = 1
        """Sequence number of the next record."""
        self._written = 1
        """Sequence number of the first record in the buffer."""
        self._entries: list[Entry] = []
        self._size = 0
        self._blobs: dict[str, bytes] = {}
        self._letters: list[DeadLetter] = []
        self._documents: dict[str, bytes] = {}
        self._records = self._count = self._bytes = 0
        self._base: Origin | None = None
        """The newest origin of the session, with this store's epoch."""
        self._present_head = 0
        """The last record that the store had before."""
        self._taken_ops: set[str] = set()
        """Op ids of inbox items that are in the log."""

    async def of(self, items: AsyncGenerator[Item, None]) -> WrittenSession:
        async with aclosing(items) as source:
            async for item in source:
                await self.add(item)
        await self.finish()
        return WrittenSession(self._key, self._records, self._count, self._bytes, self._epoch)

    async def go_on(self, grant: HeldLease) -> None:
        """Continue under a lease that was just acquired, after its epoch record."""
        self._present_head = grant.head
        await self._begin(grant)

    async def _begin(self, grant: HeldLease) -> None:
        self._epoch = grant.epoch
        self._next = self._written = grant.head + 1
        if self._on_epoch is not None:
            await self._on_epoch(grant.epoch)

    async def release(self) -> None:
        await self._store.release(self._key, self._epoch)

    async def take(self, after: int) -> None:
        """Acquire the lease, which appends an epoch record."""
        grant = await self._store.acquire(self._key, after=after)
        if grant.head != self._next:
            message = (
                f"session {self._key} in {self._store.location} is written by another process: "
                f"its log ends at {grant.head}, not {self._next}; try again"
            )
            raise StoreError(message, key=str(self._key))
        await self._begin(grant)

    async def add(self, item: Item) -> None:
        match item:
            case BundleBlob(name, data):
                self._blobs[name] = data
                self._size += len(data)
                self._count += 1
            case DeadLetter():
                self._letters.append(item)
            case Record():
                await self._record(item)
            case BundleDocument(name, document):
                self._documents[name] = document.data
                self._bytes += len(document.data)
            case Manifest():
                await self._fold(item)
        if self._size >= BATCH_BYTES:
            await self._flush()

    async def _record(self, record: Record) -> None:
        payload = record.payload
        if record.kind == BASE:
            self._base = await self._based(decode(payload, Origin))
            payload = encode(self._base)
        if record.kind == TAKEN:
            self._taken_ops.update(decode(payload, InboxTakenPayload).ops)
        if record.seq <= self._present_head:
            return
        await self._reach(record.seq)
        self._append(Entry(record.kind, payload, record.end))
        self._records += 1
        if len(self._entries) >= BATCH_RECORDS:
            await self._flush()

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._size += len(entry.payload)
        self._next += 1

    async def _reach(self, seq: int) -> None:
        """Fill the log up to a sequence number, with epoch or gap records."""
        if seq - self._next > FEW:
            await self._skip(seq)
        while self._next < seq:
            await self._flush()
            if self._entries:
                raise StoreError(f"the log of {self._key} has an epoch within a group at {seq}")
            await self._store.release(self._key, self._epoch)
            await self.take(self._epoch)

    async def _skip(self, seq: int) -> None:
        first = not self._records and not self._present_head
        while self._next < seq:
            self._append(Entry(GAP, b"null"))
            if len(self._entries) >= BATCH_RECORDS:
                await self._flush()
        await self._flush()
        if first:  # a long gap later on is epochs without records, not pruned history
            await self._store.trim(self._key, self._epoch, seq)

    async def _based(self, base: Origin) -> Origin:
        """Return an origin with the epoch that the parent's record has in this store."""
        if base.parent is None:
            return base
        if base.parent.tenant != self._key.tenant:
            await self._store.delete(self._key, self._epoch)
            message = (
                f"session {self._key} is a fork of {base.parent}, and a fork has its parent's "
                f"tenant: import both for {base.parent.tenant!r}"
            )
            raise StoreError(message, key=str(self._key), parent=str(base.parent))
        if not base.at:
            return base
        log = followed(self._store).read_log(base.parent, after=base.at - 1, limit=1)
        async with aclosing(log) as chunks:
            async for chunk in chunks:
                return msgspec.structs.replace(base, epoch=chunk.records[0].epoch)
        return base

    async def _flush(self) -> None:
        """Make the buffer durable, up to its last complete group: blobs first, then records."""
        if self._blobs:
            blobs, self._blobs = self._blobs, {}
            await self._store.put_blobs(self._key.tenant, blobs)
            self._bytes += sum(map(len, blobs.values()))
        ends = [at for at, entry in enumerate(self._entries, 1) if entry.end]
        count = ends[-1] if ends else 0
        if count:
            batch = Batch(self._key, self._epoch, self._written, tuple(self._entries[:count]))
            outcome = (await self._store.append_many([batch]))[0]
            if outcome.status is not Status.OK:
                message = f"{self._store.location} did not take the records of {self._key}"
                raise StoreError(message, key=str(self._key)) from outcome.error
            self._bytes += sum(len(entry.payload) for entry in batch.records)
            del self._entries[:count]
            self._written += count
        self._size = sum(len(entry.payload) for entry in self._entries)

    async def _fold(self, manifest: Manifest) -> None:
        await self._reach(manifest.as_of_seq + 1)
        await self._flush()
        base = None if manifest.base is None else await self._based(manifest.base)
        rewritten = msgspec.structs.replace(manifest, key=self._key, epoch=self._epoch, base=base)
        await self._store.write_documents(self._key, self._documents, rewritten)

    async def finish(self) -> None:
        await self._flush()
        if self._entries:
            raise StoreError(f"the log of {self._key} ends within a group, at {self._next - 1}")
        await self._require_parent()
        await self._settle()
        if self._letters:
            await self._store.reject(self._key, self._epoch, self._letters)
        await self.release()

    async def _settle(self) -> None:
        """Acknowledge pending items that the log now contains."""
        if not self._taken_ops:
            return
        waiting = await self._store.take(self._key, self._epoch, limit=ALL)
        done = [item.op_id for item in waiting if item.op_id in self._taken_ops]
        if done:
            await self._store.settle(self._key, self._epoch, done)

    async def _require_parent(self) -> None:
        """Delete the session and raise if the store lacks the parent's record that it needs."""
        base = self._base
        if base is None or base.parent is None:
            return
        if await followed(self._store).has(base.parent, base.at, base.epoch):
            return
        await self._store.delete(self._key, self._epoch)
        message = (
            f"session {self._key} is a fork at record {base.at} of {base.parent}, which "
            f"{self._store.location} does not have: import that session first"
        )
        raise StoreError(message, key=str(self._key), parent=str(base.parent), at=base.at)
