"""The working memory: keyed values that an agent stores for itself, and its storage port.

The index loads at the first access, each large value at its own first access; writes wait for
neither: each is a record of the log, applied on top of the document. A value that was not loaded
is never written back, so a partial load cannot overwrite anything.

Times of access are stored with the next change of the memory: reading alone never makes a session
dirty.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, Generic, Protocol, TypeVar, final

import anyio
import msgspec
from msgspec import UNSET, UnsetType

from perdure.errors import CorruptRecordError, InvalidArgumentError
from perdure.memory.index import (
    MEMORY as DOCUMENT,
    DroppedPayload,
    MemoryChange,
    MemoryEntry,
    MemoryIndex,
    changes_of,
    check_priority,
    entry_text,
    evicted,
    points_of,
    ranked,
    words_of,
)
from perdure.records.chunks import name_of
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey, require_text, require_whole
from perdure.records.records import MEMORY_DROP, MEMORY_SET, Entry, Record
from perdure.records.types import Registry
from perdure.records.values import decode_value, encode_value
from perdure.store import Store, first_record, require_same

T = TypeVar("T")


class Lazy(Generic[T]):
    """A value that loads at the first access.

    Concurrent first accesses share one load. A load that fails, or is cancelled, leaves the value
    unloaded, and the next access tries again.
    """

    __slots__ = ("_load", "_lock", "value")

    def __init__(self, load: Callable[[], Awaitable[T]]) -> None:
        self._load = load
        self._lock: anyio.Lock | None = None
        # None until it is loaded.
        self.value: T | None = None

    async def get(self) -> T:
        """Return the value; load it first if necessary."""
        if self.value is None:
            if self._lock is None:  # created late: most sessions never use their memory
                self._lock = anyio.Lock()
            async with self._lock:
                if self.value is None:
                    self.value = await self._load()
        return self.value


class MemoryItem(msgspec.Struct, frozen=True, kw_only=True):
    """One entry with its value."""

    key: str
    value: Any
    description: str = ""
    scope: str = "session"
    priority: str = "normal"
    """low, normal, high or critical."""
    pinned: bool = False
    created_at: int | None = None
    """Milliseconds since 1970; None for now."""
    last_accessed_at: int | None = None
    """Milliseconds since 1970; None for now."""


class MemoryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One entry without its value."""

    key: str
    description: str = ""
    scope: str = "session"
    size_bytes: int = 0
    """Bytes of the value's JSON."""
    base_priority: str = "normal"
    pinned: bool = False
    created_at: int = 0
    """Milliseconds since 1970."""
    last_accessed_at: int = 0
    """Milliseconds since 1970."""
    sha256: str | None = None
    """The hash of a large value's JSON, in hex; None for a value that is in the index."""
    is_loaded: bool = True
    """True if the value can be read without the store."""


class MemoryStorage(Protocol):
    """Stores the entries of one agent's working memory.

    perdure has two: `SessionMemoryStorage` stores entries with a session,
    `perdure.formats.FileMemoryStorage` in a folder of its own.

    Nothing is loaded before it is requested, and what was not loaded is never overwritten. A
    change is visible at once; it is durable when ``flush`` has returned.
    """

    async def get(self, key: str) -> MemoryItem | None:
        """Return an entry, None if there is none; it counts as used now."""

    async def set(self, item: MemoryItem) -> None:
        """Store an entry, replacing the one with the same key.

        Raises NotStorableError for a value that cannot be stored.
        """

    async def delete(self, key: str) -> None:
        """Delete an entry; no error if there is none."""

    async def has(self, key: str) -> bool:
        """Return whether there is an entry; it does not count as used."""

    async def entries(self, *, scope: str | None = None) -> list[MemoryInfo]:
        """Return the entries without their values, oldest first; of one scope, or all."""

    async def clear(self, *, scope: str | None = None) -> None:
        """Delete the entries of one scope, or all."""

    async def size(self) -> int:
        """Return the bytes of all values' JSON."""

    async def flush(self) -> None:
        """Return when all changes are durable."""

    async def aclose(self) -> None:
        """Flush, and close all resources."""


class MemoryOwner(Protocol):
    """The owner of a working memory that is saved with it: a session."""

    @property
    def memory(self) -> WorkingMemory:
        """Its working memory."""

    async def save(self) -> Any:
        """Make everything durable."""


@final
class SessionMemoryStorage:
    """Stores entries in ``session.memory``: loaded lazily, and saved with the session.

    Args:
        session: The session.

    """

    def __init__(self, session: MemoryOwner) -> None:
        self._session = session

    def __repr__(self) -> str:
        return "<SessionMemoryStorage>"

    async def get(self, key: str) -> MemoryItem | None:
        """Return an entry, None if there is none; it counts as used now."""
        return await self._session.memory.item(key)

    async def set(self, item: MemoryItem) -> None:
        """Store an entry, replacing the one with the same key; errors as ``session.memory``."""
        self._session.memory.put(item)

    async def delete(self, key: str) -> None:
        """Delete an entry; appends no record if there is none."""
        if await self.has(key):
            self._session.memory.drop(key)

    async def has(self, key: str) -> bool:
        """Return whether there is an entry; it does not count as used."""
        return key in await self._session.memory.keys()

    async def entries(self, *, scope: str | None = None) -> list[MemoryInfo]:
        """Return the entries without their values, oldest first."""
        entries = await self._session.memory.entries()
        return [entry for entry in entries if scope is None or entry.scope == scope]

    async def clear(self, *, scope: str | None = None) -> None:
        """Delete the entries of one scope, or all."""
        for entry in await self.entries(scope=scope):
            self._session.memory.drop(entry.key)

    async def size(self) -> int:
        """Return the bytes of all values' JSON."""
        return sum(entry.size_bytes for entry in await self._session.memory.entries())

    async def flush(self) -> None:
        """Save the session."""
        await self._session.save()

    async def aclose(self) -> None:
        """Save the session, which stays open."""
        await self.flush()


CACHE_BYTES: Final = 8 * 1024 * 1024
"""Bytes of values that are cached; the newest value always is."""


class SessionValues:
    """The large values of one session's memory: each is read by itself, at its first access.

    A value is read from its blob; if that is lost or damaged, or the store has no blobs, from the
    log record that set it. Concurrent first accesses share one read. A failed read leaves the
    value unread, and the next access tries again.
    """

    __slots__ = ("_cache", "_loads", "_seen", "_size", "_store", "key")

    def __init__(self, store: Store, key: SessionKey, *, seen: int = 0) -> None:
        self._store = store
        self.key: SessionKey = key
        self._seen = seen
        self._loads: dict[str, Lazy[bytes]] = {}
        self._cache: dict[str, bytes] = {}  # the least recently used first
        self._size = 0

    def has(self, entry: MemoryEntry) -> bool:
        """Return whether a value is in memory."""
        return not entry.is_apart or entry.sha256 in self._cache

    async def of(self, entry: MemoryEntry) -> bytes:
        """Return an entry's value as JSON.

        Raises:
            CorruptRecordError: It is neither in its blob nor in the log.

        """
        name = entry.sha256
        if name is UNSET or not entry.is_apart:
            return bytes(entry.value)
        value_of_name = self._cache.get(name)
        if value_of_name is not None:
            self._cache[name] = self._cache.pop(name)
            return value_of_name
        load = self._loads.get(name)
        if load is None:  # it stays until it has finished: concurrent callers join it
            load = self._loads[name] = Lazy(lambda: self._load(entry, name))
        return await load.get()

    async def _load(self, entry: MemoryEntry, name: str) -> bytes:
        data = await self.read(entry)
        self.cache(name, data)
        self._loads.pop(name, None)
        return data

    def cache(self, name: str, data: bytes) -> None:
        """Cache a value, and drop the least recently used ones."""
        self._size += len(data) - len(self._cache.pop(name, b""))
        self._cache[name] = data
        while self._size > CACHE_BYTES and len(self._cache) > 1:
            self._size -= len(self._cache.pop(next(iter(self._cache))))

    async def read(self, entry: MemoryEntry) -> bytes:
        """Read a value without caching it; errors as ``of``."""
        name = entry.sha256
        if name is UNSET or not entry.is_apart:
            return bytes(entry.value)
        if self._store.capabilities.blobs:
            with contextlib.suppress(CorruptRecordError):  # only a copy: the log has it, too
                data = await self._store.get_blob(self.key.blobs, name)
                if data is not None:
                    return data
        return await self._from_log(entry, name)

    async def _from_log(self, entry: MemoryEntry, name: str) -> bytes:
        seq = 0 if entry.seq is UNSET else entry.seq
        log = self._store.read_log(self.key, after=seq - 1, before=seq + 1)
        record = await first_record(log, lambda record: record.kind == MEMORY_SET)
        if record is not None:
            data = bytes(decode(record.payload, MemoryEntry).value)
            if name_of(data) == name:
                return data
        # Before it counts as damage: another process may have forgotten the session meanwhile.
        await require_same(self._store, self.key, seen=self._seen)
        raise CorruptRecordError(
            f"session {self.key}: the value of memory key {entry.key!r} is lost: neither blob "
            f"{name} nor record {seq} has it; put the blob back from a copy, or set the key again",
            key=str(self.key),
            memory_key=entry.key,
            blob=name,
        )


Read = Callable[[str], Awaitable[tuple[bytes | None, list[Record]]]]
"""Return a document and the records after it."""
Accept = Callable[[tuple[Entry, ...]], int]
"""Append records, and return the session's version."""

MOST_TOUCHED: Final = 256
"""The most times of access that one record stores."""


class MemorySearch(msgspec.Struct, frozen=True):
    """A search of a memory."""

    found: int
    """Number of results."""
    took: float
    """Seconds."""
    error: str | None = None
    """The type of the error that it ended with."""


OnSearched = Callable[[MemorySearch], object]


@contextlib.contextmanager
def reported(on_searched: OnSearched | None) -> Iterator[list[Any]]:
    """Report a search at its end, failed or not; what it found goes into the list."""
    found: list[Any] = []
    began, failure = time.perf_counter(), None
    try:
        yield found
    except BaseException as error:
        failure = type(error).__qualname__
        raise
    finally:
        if on_searched is not None:
            on_searched(MemorySearch(len(found), time.perf_counter() - began, failure))


class MemoryLimit(msgspec.Struct, frozen=True):
    """The limit of a working memory, and the callbacks for evicted entries and for searches."""

    limit: int | None = None
    """Bytes of all values together; None for no limit."""
    on_evicted: Callable[[Sequence[MemoryInfo]], object] | None = None
    on_searched: OnSearched | None = None


NO_LIMIT: Final = MemoryLimit()


class WorkingMemory:
    """A session's working memory: ``session.memory``."""

    __slots__ = ("_accept", "_index", "_read", "_registry", "_room", "_touched", "_values")

    def __init__(
        self,
        read: Read,
        accept: Accept,
        registry: Registry,
        values: SessionValues,
        room: MemoryLimit,
    ) -> None:
        self._read = read
        self._accept = accept
        self._registry = registry
        self._values = values
        self._room = room
        self._index: Lazy[MemoryIndex] = Lazy(self._load)
        self._touched: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<WorkingMemory of {self._values.key}>"

    async def get(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``.

        Raises:
            CorruptRecordError: The value is lost: neither its blob nor the log has it.

        """
        item = await self.item(key)
        return default if item is None else item.value

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
        """Store a value under a key, and return the session's version.

        With ``Limits(memory_bytes=…)`` other entries are evicted if it does not fit: the lowest
        priority first, then the least recently used; never pinned ones.

        Args:
            key: Its name.
            value: Anything that a session's state can hold.
            description: A description for people, models and searches.
            scope: Such as "session", "task" or "persistent"; for searches.
            priority: "low", "normal", "high" or "critical".
            pinned: Whether it is never evicted.

        Raises:
            NotStorableError: The value cannot be stored; the error names path and type.
            TooLargeError: It does not fit even after evictions; nothing has changed.
            InvalidArgumentError: The priority is unknown, or a name or description is not text.

        """
        item = MemoryItem(
            key=key,
            value=value,
            description=description,
            scope=scope,
            priority=priority,
            pinned=pinned,
        )
        return self.put(item)

    def drop(self, key: str) -> int:
        """Delete a key (no error if it does not exist), and return the session's version."""
        require_text("memory key", key)
        touched = self._times_of_access()
        version = self._accept((Entry(MEMORY_DROP, encode(DroppedPayload(key, touched))),))
        self._forget(touched)
        return version

    async def keys(self) -> list[str]:
        """Return the keys, oldest entry first."""
        return list((await self._index.get()).entries)

    async def entries(self) -> list[MemoryInfo]:
        """Return the entries without their values, oldest first."""
        return [self._info(entry) for entry in (await self._index.get()).entries.values()]

    async def search(
        self, query: str, *, scope: str | None = None, limit: int = 10, values: bool = False
    ) -> list[MemoryInfo]:
        """Return the entries that match a query's words, the best first.

        A word in the key counts more than one in the description. Equal matches are sorted by
        priority, then by the time of access.

        Args:
            query: Words; case does not matter.
            scope: Only entries of this scope.
            limit: How many at most.
            values: Whether to search the values, too, which reads each of them.

        """
        require_text("query", query)
        require_whole(limit=limit)
        with reported(self._room.on_searched) as found:
            words, index = words_of(query.casefold()), await self._index.get()
            matches: list[tuple[int, MemoryEntry]] = []
            for entry in list(index.entries.values()) if words else ():
                if scope is not None and entry.scope != scope:
                    continue
                text = entry_text(await self._values.read(entry)) if values else ""
                points = points_of(words, entry.key, entry.description, text)
                if points:
                    matches.append((points, entry))
            found.extend([self._info(entry) for entry in ranked(matches)[: max(limit, 0)]])
        return found

    def _touch(self, read: MemoryEntry) -> int:
        """Note that a value was read; return the time."""
        index, now = self._index.value, _now()
        entry = None if index is None else index.entries.get(read.key)
        if entry is None:  # dropped while it was read
            return now
        entry.last_accessed_at = max(entry.last_accessed_at, now)
        self._touched.pop(entry.key, None)
        self._touched[entry.key] = entry.last_accessed_at
        return entry.last_accessed_at

    def _times_of_access(self) -> dict[str, int] | UnsetType:
        if not self._touched:
            return UNSET
        return dict(islice(reversed(self._touched.items()), MOST_TOUCHED))

    def _forget(self, touched: dict[str, int] | UnsetType) -> None:
        for key in () if touched is UNSET else touched:
            self._touched.pop(key, None)

    def _info(self, entry: MemoryEntry) -> MemoryInfo:
        return MemoryInfo(
            key=entry.key,
            description=entry.description,
            scope=entry.scope,
            size_bytes=entry.size_bytes,
            base_priority=entry.base_priority,
            pinned=entry.pinned,
            created_at=entry.created_at,
            last_accessed_at=entry.last_accessed_at,
            sha256=None if entry.sha256 is UNSET else entry.sha256,
            is_loaded=self._values.has(entry),
        )

    async def _load(self) -> MemoryIndex:
        data, records = await self._read(DOCUMENT)
        return changes_of(MemoryIndex.of_document(data), records)

    # For the session and storages, not for users.

    async def item(self, key: str) -> MemoryItem | None:
        """Return an entry with its value, None if there is none; errors as for ``get``."""
        entry = (await self._index.get()).entries.get(key)
        if entry is None:
            return None
        data = await self._values.of(entry)
        return MemoryItem(
            key=key,
            value=decode_value(data, entry.types, self._registry),
            description=entry.description,
            scope=entry.scope,
            priority=entry.base_priority,
            pinned=entry.pinned,
            created_at=entry.created_at,
            last_accessed_at=self._touch(entry),
        )

    def put(self, item: MemoryItem) -> int:
        """Store an entry, and return the session's version; errors as for ``set``."""
        _check(item)
        data, types = encode_value(item.value, self._registry)
        now = _now()
        change = MemoryChange(
            key=item.key,
            description=item.description,
            value=msgspec.Raw(data),
            types=types,
            scope=item.scope,
            size_bytes=len(data),
            base_priority=item.priority,
            pinned=item.pinned,
            created_at=now if item.created_at is None else item.created_at,
            last_accessed_at=now if item.last_accessed_at is None else item.last_accessed_at,
        )
        limit, index = self._room.limit, self._index.value
        leaving: list[MemoryEntry] = []
        if limit is not None:
            entries, total = ((), 0) if index is None else (index.entries.values(), index.size)
            leaving = evicted(entries, total=total, key=item.key, size=len(data), limit=limit)
        infos = [self._info(entry) for entry in leaving]
        touched = change.touched = self._times_of_access()
        drops = [Entry(MEMORY_DROP, encode(DroppedPayload(entry.key))) for entry in leaving]
        # One group: what leaves makes room for what comes.
        version = self._accept((*drops, Entry(MEMORY_SET, encode(change))))
        self._forget(touched)
        if infos and self._room.on_evicted is not None:
            self._room.on_evicted(infos)
        return version

    async def load(self) -> None:
        """Load the index if there is a limit: ``set`` must know which entries to evict."""
        if self._room.limit is not None:
            await self._index.get()

    def note(self, records: Iterable[Record]) -> None:
        """Apply records that were appended since the load."""
        index = self._index.value
        if index is not None:  # else the load will read it
            changes_of(index, records)

    def folded(self, as_of_seq: int) -> None:
        """Move values that are in blobs by now from the index to the cache."""
        index = self._index.value
        if index is None:
            return
        for key, entry in index.entries.items():
            apart = entry.apart()
            if apart is not entry and apart.seq is not UNSET and apart.seq <= as_of_seq:
                if apart.sha256 is not UNSET:
                    self._values.cache(apart.sha256, bytes(entry.value))
                index.entries[key] = apart


def _check(item: MemoryItem) -> None:
    for name in ("key", "description", "scope"):
        require_text(f"memory {name}", getattr(item, name))
    for name, kind, fits in _FITTING:
        value = getattr(item, name)
        if not isinstance(value, kind):
            raise InvalidArgumentError(
                f"memory: invalid {name}={value!r}: it is {fits}", option=name, value=value
            )
    check_priority(item.priority)


_FITTING: Final = (
    ("pinned", bool, "True or False"),
    ("created_at", int | None, "milliseconds since 1970, a whole number"),
    ("last_accessed_at", int | None, "milliseconds since 1970, a whole number"),
)


def _now() -> int:
    return time.time_ns() // 1_000_000
