"""Large values of the working memory: each read by itself, when it is first touched.

From its blob; if that is lost or damaged, or the store keeps none, from the record of the log
that set it. Concurrent first touches of one value share one read. A failed read leaves the
value unread, and the next touch tries again.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Final

from msgspec import UNSET

from perdure.codec.json import decode
from perdure.errors import CorruptRecordError
from perdure.memory.index import MemoryEntry, hash_of
from perdure.memory.lazy import Lazy
from perdure.model.keys import SessionKey
from perdure.model.records import MEMORY_SET
from perdure.store import Store

__all__ = ["KEPT_BYTES", "Values"]

KEPT_BYTES: Final = 8 * 1024 * 1024
"""How many bytes of values that were read stay at hand; the newest stays in any case."""


class Values:
    """The values of one session's memory."""

    __slots__ = ("_flights", "_kept", "_key", "_size", "_store")

    def __init__(self, store: Store, key: SessionKey) -> None:
        self._store = store
        self._key = key
        self._flights: dict[str, Lazy[bytes]] = {}
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0

    def has(self, entry: MemoryEntry) -> bool:
        """Say whether a value is here without a read."""
        return not entry.is_apart or entry.sha256 in self._kept

    async def of(self, entry: MemoryEntry) -> bytes:
        """Return an entry's value as JSON.

        Raises:
            CorruptRecordError: It is neither in its blob nor in the log.

        """
        name = entry.sha256
        if name is UNSET or not entry.is_apart:
            return bytes(entry.value)
        kept = self._kept.get(name)
        if kept is not None:
            self._kept.move_to_end(name)
            return kept
        flight = self._flights.get(name)
        if flight is None:  # it stays until it has landed: whoever comes meanwhile joins it
            flight = self._flights[name] = Lazy(lambda: self._load(entry, name))
        return await flight.get()

    async def _load(self, entry: MemoryEntry, name: str) -> bytes:
        data = await self.read(entry)
        self.keep(name, data)
        self._flights.pop(name, None)
        return data

    def keep(self, name: str, data: bytes) -> None:
        """Have a value at hand, in place of those that were used longest ago."""
        self._size += len(data) - len(self._kept.pop(name, b""))
        self._kept[name] = data
        while self._size > KEPT_BYTES and len(self._kept) > 1:
            self._size -= len(self._kept.popitem(last=False)[1])

    async def read(self, entry: MemoryEntry) -> bytes:
        """Read a value that lies apart from the store, and keep nothing; errors as ``of``."""
        name = entry.sha256
        if name is UNSET or not entry.is_apart:
            return bytes(entry.value)
        if self._store.capabilities.blobs:
            with contextlib.suppress(CorruptRecordError):  # a copy: the log has it, too
                data = await self._store.get_blob(self._key.tenant, name)
                if data is not None:
                    return data
        return await self._from_log(entry, name)

    async def _from_log(self, entry: MemoryEntry, name: str) -> bytes:
        seq = 0 if entry.seq is UNSET else entry.seq
        log = self._store.read_log(self._key, after=seq - 1, before=seq + 1)
        async with contextlib.aclosing(log):
            async for chunk in log:
                for record in chunk.records:
                    if record.kind != MEMORY_SET:
                        continue
                    data = bytes(decode(record.payload, MemoryEntry).value)
                    if hash_of(data) == name:
                        return data
        message = (
            f"session {self._key}: the value of memory key {entry.key!r} is lost: neither blob "
            f"{name} nor record {seq} has it; put the blob back from a copy, or set the key anew"
        )
        raise CorruptRecordError(message, key=str(self._key), memory_key=entry.key, blob=name)
