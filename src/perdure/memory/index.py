"""The index of the working memory: what is known of each entry without its value.

Pure. memory.json holds the index, and in it the values of up to ``INLINE`` bytes; a larger
one lies in a blob of its own under the SHA-256 of its JSON, and in the log record that set it.
The document is a function of the log's records alone, so it can always be made again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import UNSET, UnsetType

from perdure.records.json import decode
from perdure.records.records import MEMORY_DROP, MEMORY_SET, Record

MEMORY = "memory.json"

INLINE = 1024
"""Values of up to so many bytes of JSON stay in the index."""

_NOTHING = msgspec.Raw(b"null")


class MemoryEntry(msgspec.Struct, rename="camel", kw_only=True):
    """One entry of the working memory; the field names on disk are the format."""

    key: str
    description: str = ""
    value: msgspec.Raw = _NOTHING
    types: dict[str, str] | None = None
    """What JSON cannot tell of the value, by JSON pointer."""
    scope: str = "session"
    size_bytes: int = 0
    base_priority: str = "normal"
    pinned: bool = False
    created_at: int = 0
    """Milliseconds since 1970."""
    last_accessed_at: int = 0
    sha256: str | UnsetType = UNSET
    """The hash of a large value's JSON, which is the name of its blob."""
    seq: int | UnsetType = UNSET
    """The record that set a large value."""

    @property
    def is_apart(self) -> bool:
        """Whether the value lies elsewhere, and has to be read."""
        return self.sha256 is not UNSET and len(bytes(self.value)) <= INLINE

    def apart(self) -> MemoryEntry:
        """Return the entry without its large value; itself if that is small."""
        if self.sha256 is UNSET or self.is_apart:
            return self
        return msgspec.structs.replace(self, value=_NOTHING)


class _EntryWithoutValue(msgspec.Struct, rename="camel", kw_only=True, omit_defaults=True):
    """An entry in the document without its value: no more bytes than it takes."""

    key: str
    description: str = ""
    types: dict[str, str] | None = None
    scope: str | UnsetType = UNSET
    size_bytes: int = 0
    base_priority: str | UnsetType = UNSET
    pinned: bool = False
    created_at: int = 0
    last_accessed_at: int | UnsetType = UNSET
    """Left out where it is ``created_at``; -1 for 0, which is what is read if it is left out."""
    sha256: str | UnsetType = UNSET
    seq: int | UnsetType = UNSET


class MemoryChange(MemoryEntry):
    """The payload of a record that sets an entry."""

    touched: dict[str, int] | UnsetType = UNSET
    """When entries were read since the last change, in milliseconds since 1970."""


class DroppedPayload(msgspec.Struct):
    """The payload of a record that drops an entry."""

    key: str
    touched: dict[str, int] | UnsetType = UNSET


class _Touched(msgspec.Struct):
    touched: dict[str, int] | UnsetType = UNSET


class MemoryStats(msgspec.Struct, rename="camel", kw_only=True):
    """What the entries of a memory add up to."""

    total_entries: int = 0
    total_size_bytes: int = 0


class MemoryDocument(msgspec.Struct, kw_only=True):
    """memory.json."""

    version: int = 1
    entries: list[MemoryEntry] = []
    stats: MemoryStats = msgspec.field(default_factory=MemoryStats)


class _Written(msgspec.Struct, kw_only=True):
    version: int
    entries: list[MemoryEntry | _EntryWithoutValue]
    stats: MemoryStats


class MemoryIndex:
    """The entries by key, oldest first, and how large their values are together."""

    __slots__ = ("entries", "size")

    def __init__(self, entries: Iterable[MemoryEntry] = ()) -> None:
        self.entries: dict[str, MemoryEntry] = {entry.key: entry for entry in entries}
        self.size: int = sum(entry.size_bytes for entry in self.entries.values())
        """Bytes of all values' JSON."""

    @classmethod
    def of_document(cls, data: bytes | None) -> MemoryIndex:
        """Return the index that a document holds."""
        entries = [] if data is None else decode(data, MemoryDocument).entries
        for entry in entries:
            if entry.sha256 is not UNSET:
                at = entry.last_accessed_at
                entry.last_accessed_at = at if at > 0 else entry.created_at if at == 0 else 0
        return cls(entries)

    def apply(self, record: Record) -> None:
        """Take in the next record; of another kind it changes nothing."""
        if record.kind == MEMORY_SET:
            entry = decode(record.payload, MemoryEntry)
            self._touch(decode(record.payload, _Touched))
            _name(entry, record.seq)
            self._remove(entry.key, keep_place=True)
            self.entries[entry.key] = entry
            self.size += entry.size_bytes
        elif record.kind == MEMORY_DROP:
            dropped = decode(record.payload, DroppedPayload)
            self._touch(dropped)
            self._remove(dropped.key)

    def _touch(self, change: DroppedPayload | _Touched) -> None:
        touched = change.touched
        if touched is UNSET or not touched:
            return
        for key, at in touched.items():
            entry = self.entries.get(key)
            if entry is not None:
                entry.last_accessed_at = max(entry.last_accessed_at, at)

    def _remove(self, key: str, *, keep_place: bool = False) -> None:
        entry = self.entries.get(key)
        if entry is not None:
            self.size -= entry.size_bytes
            if not keep_place:
                del self.entries[key]

    def document(self) -> bytes:
        """Return memory.json: large values are left out, stats are those of the entries."""
        entries = [_written(entry) for entry in self.entries.values()]
        stats = MemoryStats(total_entries=len(entries), total_size_bytes=self.size)
        return msgspec.json.encode(_Written(version=1, entries=entries, stats=stats))

    def large_values(self) -> dict[str, bytes]:
        """Return the values that the document leaves out and this index holds, by hash."""
        return {
            entry.sha256: bytes(entry.value)
            for entry in self.entries.values()
            if entry.sha256 is not UNSET and not entry.is_apart
        }


def hash_of(data: bytes) -> str:
    """Return the name of the blob that holds these bytes."""
    return hashlib.sha256(data).hexdigest()


def _name(entry: MemoryEntry, seq: int) -> None:
    """Say where a large value will lie; whatever the record says of that does not count."""
    data = bytes(entry.value)
    large = len(data) > INLINE
    entry.sha256 = hash_of(data) if large else UNSET
    entry.seq = seq if large else UNSET


def _written(entry: MemoryEntry) -> MemoryEntry | _EntryWithoutValue:
    if entry.sha256 is UNSET:
        return entry
    fields = {name: getattr(entry, name) for name in _EntryWithoutValue.__struct_fields__}
    for name in ("scope", "base_priority"):
        if fields[name] == getattr(_DEFAULT, name):
            fields[name] = UNSET
    if entry.last_accessed_at == entry.created_at:
        fields["last_accessed_at"] = UNSET
    elif entry.last_accessed_at <= 0:
        fields["last_accessed_at"] = -1
    return _EntryWithoutValue(**fields)


_DEFAULT = MemoryEntry(key="")


def split_memory(old: bytes | None, records: Iterable[Record]) -> tuple[bytes, dict[str, bytes]]:
    """Return memory.json after ``records``, and the blobs to put before it is written."""
    index = changes_of(MemoryIndex.of_document(old), records)
    return index.document(), index.large_values()


def changes_of(index: MemoryIndex, records: Iterable[Record]) -> MemoryIndex:
    """Return an index after ``records``, the values that they set included."""
    for record in records:
        index.apply(record)
    return index


def fold_memory(old: bytes | None, records: Iterable[Record]) -> bytes:
    """Return memory.json after ``records``; its stats are those of its entries."""
    return split_memory(old, records)[0]


def blob_names(documents: Mapping[str, bytes], records: Iterable[Record] = ()) -> frozenset[str]:
    """Return the blobs that a session's memory refers to.

    Args:
        documents: The session's documents by name; only memory.json is looked at.
        records: The log behind them: what the next fold will refer to.

    """
    index = changes_of(MemoryIndex.of_document(documents.get(MEMORY)), records)
    return frozenset(entry.sha256 for entry in index.entries.values() if entry.sha256 is not UNSET)
