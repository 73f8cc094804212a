"""The working memory: keyed values that an agent keeps for itself.

Reads load memory.json at the first touch; writes never wait for that: each is a record
of the log, applied on top of whatever the document holds. What was not loaded is
never written back, so a partial load cannot overwrite anything.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from perdure.codec.json import decode, encode
from perdure.codec.registry import Registry
from perdure.codec.values import decode_value, encode_value
from perdure.memory.documents import MEMORY, Dropped, MemoryDocument, MemoryEntry, fold_memory
from perdure.memory.lazy import Lazy
from perdure.model.records import MEMORY_DROP, MEMORY_SET, Entry, Record

__all__ = ["WorkingMemory"]

Read = Callable[[str], Awaitable[tuple[bytes | None, list[Record]]]]
"""Return a document and the records that go on top of it."""
Accept = Callable[[tuple[Entry, ...]], int]
"""Append records, and return the session's version."""


class WorkingMemory:
    """A session's working memory: ``session.memory``."""

    __slots__ = ("_accept", "_entries", "_read", "_registry")

    def __init__(self, read: Read, accept: Accept, registry: Registry) -> None:
        self._read = read
        self._accept = accept
        self._registry = registry
        self._entries: Lazy[dict[str, MemoryEntry]] = Lazy(self._load)

    async def get(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``."""
        entry = (await self._entries.get()).get(key)
        if entry is None:
            return default
        return decode_value(bytes(entry.value), entry.types, self._registry)

    def set(
        self,
        key: str,
        value: Any,
        *,
        description: str = "",
        scope: str = "session",
        priority: str = "normal",
        pinned: bool = False,
    ) -> int:
        """Keep a value under a key, and return the session's version.

        Raises:
            NotStorableError: The value cannot be stored; the error names path and type.

        """
        data, types = encode_value(value, self._registry)
        now = time.time_ns() // 1_000_000
        entry = MemoryEntry(
            key=key,
            description=description,
            value=msgspec.Raw(data),
            types=types,
            scope=scope,
            size_bytes=len(data),
            base_priority=priority,
            pinned=pinned,
            created_at=now,
            last_accessed_at=now,
        )
        return self._accept((Entry(MEMORY_SET, encode(entry)),))

    def drop(self, key: str) -> int:
        """Forget a key (no error if it is not there), and return the session's version."""
        return self._accept((Entry(MEMORY_DROP, encode(Dropped(key))),))

    async def keys(self) -> list[str]:
        """Return the keys, oldest entry first."""
        return list(await self._entries.get())

    async def entries(self) -> list[MemoryEntry]:
        """Return the entries as they are stored."""
        return list((await self._entries.get()).values())

    async def _load(self) -> dict[str, MemoryEntry]:
        data, records = await self._read(MEMORY)
        document = decode(fold_memory(data, records), MemoryDocument)
        return {entry.key: entry for entry in document.entries}

    def note(self, records: Iterable[Record]) -> None:
        """Apply what was appended since the load."""
        entries = self._entries.value
        if entries is None:  # the load will read it
            return
        for record in records:
            if record.kind == MEMORY_SET:
                entry = decode(record.payload, MemoryEntry)
                entries[entry.key] = entry
            elif record.kind == MEMORY_DROP:
                entries.pop(decode(record.payload, Dropped).key, None)
