"""A storage of working memory in a folder of its own: memory.json, as an export has it.

The file is read at the first touch, once, however many wait for it; changes are written
together, by ``flush``, which happens at intervals while the storage is entered. Each flush
replaces the file in one step. A damaged file is copied to ``quarantine/`` and reported, and the
memory begins empty; one of a newer release is refused, and never written over.

The form has all entries in one file, so all values are read at once, and a flush writes all.
Large memories are better kept with a session.
"""

from __future__ import annotations

import logging
import os
import time
from types import TracebackType
from typing import Self, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import Folder
from perdure._lib.logs import log_facts
from perdure._lib.tasks import Host
from perdure.errors import InvalidArgumentError, NotStorableError, StoreUnavailableError
from perdure.formats.json_folder import MEMORY, FolderFiles, guarded, pretty
from perdure.formats.migrations import MIGRATIONS, Finding, Migrations, read_memory
from perdure.formats.state import (
    SerializedMemoryEntry,
    SerializedMemoryState,
    count_entries,
    write_open,
)
from perdure.memory.index import check_priority
from perdure.memory.working_memory import Lazy, MemoryInfo, MemoryItem
from perdure.records.json import decode
from perdure.records.values import encode_value

log: logging.Logger = logging.getLogger("perdure")


class _Loaded:
    """Contents of the file, and the changes since."""

    def __init__(self, state: SerializedMemoryState, findings: tuple[Finding, ...]) -> None:
        self.state = state
        self.findings = findings
        self.entries = {entry.key: entry for entry in state.entries}

    def bytes(self) -> bytes:
        """Return the file; its stats are those of the entries."""
        self.state.entries = list(self.entries.values())
        count_entries(self.state)
        return write_open(self.state)


@final
class FileMemoryStorage:
    """Keep an agent's working memory in ``<path>/memory.json``: ``async with storage``.

    Entered, it flushes at intervals and when it is left. It works without being entered, too:
    then its user has to call ``flush``, as an agent does that it is given to.

    Args:
        path: The folder; made when something is written.
        flush_interval: Seconds from a change to the flush that writes it, at most; 0 for none.
        migrations: The steps from older versions of the format.

    Raises:
        InvalidArgumentError: The interval is invalid.

    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        flush_interval: float = 30.0,
        migrations: Migrations = MIGRATIONS,
    ) -> None:
        if not 0 <= flush_interval < float("inf"):
            raise InvalidArgumentError(
                f"FileMemoryStorage: invalid flush_interval={flush_interval!r}: give "
                "seconds, or 0 for none",
                option="flush_interval",
                value=flush_interval,
            )
        self._path = os.path.abspath(os.path.expanduser(os.fspath(path)))  # noqa: PTH100, PTH111
        self._interval = flush_interval
        self._migrations = migrations
        self._loaded: Lazy[_Loaded] = Lazy(self._load)
        self._changes = 0
        self._flushed = 0
        self._changed: anyio.Event | None = None
        self._lock = anyio.Lock()
        self._host: Host | None = None

    def __repr__(self) -> str:
        return f"<FileMemoryStorage {self._path}>"

    async def __aenter__(self) -> Self:
        if self._interval and self._host is None:
            self._host = Host()
            await self._host.start()
            self._host.spawn(self._flush_at_intervals)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def path(self) -> str:
        """The folder."""
        return self._path

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Problems with the file and how they were handled; none before it is read."""
        loaded = self._loaded.value
        return () if loaded is None else loaded.findings

    async def get(self, key: str) -> MemoryItem | None:
        """Return an entry, None if there is none.

        That it was used now is written with the next change.

        Raises:
            UnsupportedVersionError: The file is of a newer release; it was left as it is.
            StoreUnavailableError: It cannot be read.

        """
        entry = (await self._loaded.get()).entries.get(key)
        if entry is None:
            return None
        entry.last_accessed_at = max(entry.last_accessed_at, _now())
        return MemoryItem(
            key=key,
            value=decode(bytes(entry.value)),
            description=entry.description,
            scope=entry.scope,
            priority=entry.base_priority,
            pinned=entry.pinned,
            created_at=entry.created_at,
            last_accessed_at=entry.last_accessed_at,
        )

    async def set(self, item: MemoryItem) -> None:
        """Keep an entry, in place of the one that has its key; errors as for ``get``, too.

        Raises:
            NotStorableError: The value is not plain JSON, which is all that the form holds.
            InvalidArgumentError: There is no such priority.

        """
        check_priority(item.priority)
        data, types = encode_value(item.value)
        if types:
            at, name = next(iter(types.items()))
            raise NotStorableError(
                f"memory key {item.key!r} holds a {name} at {at or '/'}, and memory.json only "
                "plain JSON: convert it first, or keep it in session.memory",
                memory_key=item.key,
                path=at,
                type=name,
            )
        loaded = await self._loaded.get()
        before = loaded.entries.get(item.key)
        now = _now()
        loaded.entries[item.key] = SerializedMemoryEntry(
            key=item.key,
            description=item.description,
            value=msgspec.Raw(data),
            scope=item.scope,
            size_bytes=len(data),
            base_priority=item.priority,
            pinned=item.pinned,
            created_at=now if item.created_at is None else item.created_at,
            last_accessed_at=now if item.last_accessed_at is None else item.last_accessed_at,
            extra={} if before is None else before.extra,
        )
        self._note_change()

    async def delete(self, key: str) -> None:
        """Forget an entry; no error if there is none."""
        if (await self._loaded.get()).entries.pop(key, None) is not None:
            self._note_change()

    async def has(self, key: str) -> bool:
        """Say whether there is an entry; it does not count as used."""
        return key in (await self._loaded.get()).entries

    async def entries(self, *, scope: str | None = None) -> list[MemoryInfo]:
        """Return what is known of the entries, oldest first; of one scope, or of all."""
        entries = (await self._loaded.get()).entries.values()
        return [
            msgspec.convert(entry, MemoryInfo, from_attributes=True)
            for entry in entries
            if scope is None or entry.scope == scope
        ]

    async def clear(self, *, scope: str | None = None) -> None:
        """Forget the entries of one scope, or all."""
        for entry in await self.entries(scope=scope):
            await self.delete(entry.key)

    async def size(self) -> int:
        """Return how many bytes the values' JSON has together."""
        return sum(entry.size_bytes for entry in (await self._loaded.get()).entries.values())

    async def flush(self) -> None:
        """Write what has changed; return when it is durable.

        Raises:
            StoreUnavailableError: It cannot be written; what has changed is kept for the next.

        """
        async with self._lock:
            loaded, changes = self._loaded.value, self._changes
            if loaded is None or changes == self._flushed:
                return
            data = loaded.bytes()
            await anyio.to_thread.run_sync(guarded, _write, self._path, data)
            self._flushed = changes

    async def aclose(self) -> None:
        """Flush, and end the flushes at intervals; errors as for ``flush``."""
        host, self._host = self._host, None
        if host is not None:
            await host.aclose()
        await self.flush()

    async def _load(self) -> _Loaded:
        return await anyio.to_thread.run_sync(guarded, _read, self._path, self._migrations)

    def _note_change(self) -> None:
        self._changes += 1
        if self._changed is not None:
            self._changed.set()

    async def _flush_at_intervals(self) -> None:
        while True:
            self._changed = anyio.Event()
            if self._changes == self._flushed:
                await self._changed.wait()
            await anyio.sleep(self._interval)
            try:
                await self.flush()
            except StoreUnavailableError as error:
                message = "memory could not be flushed; it is tried again"
                log_facts(log, logging.WARNING, message, error, path=self._path)


def _read(path: str, migrations: Migrations) -> _Loaded:
    try:
        folder = Folder.root(path)
    except FileNotFoundError:
        return _Loaded(SerializedMemoryState(), ())
    with folder:
        content = FolderFiles(folder)
        read = content.document(MEMORY, lambda data: read_memory(data, migrations=migrations))
    state, findings = read or (SerializedMemoryState(), [])
    return _Loaded(state, (*content.findings, *findings))


def _write(path: str, data: bytes) -> None:
    os.makedirs(path, mode=0o700, exist_ok=True)  # noqa: PTH103
    with Folder.root(path) as folder:
        folder.replace(MEMORY, pretty(data))
        folder.sync()


def _now() -> int:
    return time.time_ns() // 1_000_000
