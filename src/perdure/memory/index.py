"""The index of the working memory: entries without their values, eviction, and text search.

Pure. memory.json holds the index, and in it the values of up to ``INLINE`` bytes; a larger value
is in a blob of its own under the SHA-256 of its JSON, and in the log record that set it. The
document is a function of the log's records alone, so it can always be built again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from perdure.errors import ConfigError, InvalidArgumentError, TooLargeError
from perdure.records.chunks import name_of
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
    """The table of the value's tags, by JSON pointer: see `perdure.records.values`."""
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
        """True if the value is stored elsewhere, and must be read."""
        return self.sha256 is not UNSET and len(bytes(self.value)) <= INLINE

    def apart(self) -> MemoryEntry:
        """Return the entry without its large value; itself if that is small."""
        if self.sha256 is UNSET or self.is_apart:
            return self
        return msgspec.structs.replace(self, value=_NOTHING)


class _EntryWithoutValue(msgspec.Struct, rename="camel", kw_only=True, omit_defaults=True):
    """An entry without its value, as the document stores it in the fewest bytes."""

    key: str
    description: str = ""
    types: dict[str, str] | None = None
    scope: str | UnsetType = UNSET
    size_bytes: int = 0
    base_priority: str | UnsetType = UNSET
    pinned: bool = False
    created_at: int = 0
    # Omitted if equal to ``created_at``; -1 for 0, since 0 is the value of an omitted field.
    last_accessed_at: int | UnsetType = UNSET
    sha256: str | UnsetType = UNSET
    seq: int | UnsetType = UNSET


class MemoryChange(MemoryEntry):
    """The payload of a record that sets an entry."""

    touched: dict[str, int] | UnsetType = UNSET
    """Times at which entries were read since the last change, in milliseconds since 1970."""


class DroppedPayload(msgspec.Struct):
    """The payload of a record that drops an entry."""

    key: str
    touched: dict[str, int] | UnsetType = UNSET


class MemoryDocument(msgspec.Struct, kw_only=True):
    """memory.json, without the totals next to its entries."""

    version: int = 1
    entries: list[MemoryEntry] = []


class MemoryIndex:
    """The entries by key, oldest first, and the total size of their values."""

    __slots__ = ("entries", "size")

    def __init__(self, entries: Iterable[MemoryEntry] = ()) -> None:
        self.entries: dict[str, MemoryEntry] = {entry.key: entry for entry in entries}
        # Bytes of all values' JSON.
        self.size: int = sum(entry.size_bytes for entry in self.entries.values())

    @classmethod
    def of_document(cls, data: bytes | None) -> MemoryIndex:
        """Return the index of a document."""
        entries = [] if data is None else decode(data, MemoryDocument).entries
        for entry in entries:
            if entry.sha256 is not UNSET:
                at = entry.last_accessed_at
                # As stored, 0 (left out) stands for the time of its creation, and -1 for 0.
                entry.last_accessed_at = at if at > 0 else entry.created_at if at == 0 else 0
        return cls(entries)

    def apply(self, record: Record) -> None:
        """Apply the next record; records of other kinds change nothing."""
        if record.kind == MEMORY_SET:
            entry = decode(record.payload, MemoryChange)
            self._touch(entry.touched)
            entry.touched = UNSET  # the document has it in the entries themselves
            data = bytes(entry.value)
            is_large = len(data) > INLINE
            # Those in the record do not count: they are another writer's.
            entry.sha256 = name_of(data) if is_large else UNSET
            entry.seq = record.seq if is_large else UNSET
            replaced = self.entries.get(entry.key)
            self.entries[entry.key] = entry  # in the place of the one before
            self.size += entry.size_bytes - (0 if replaced is None else replaced.size_bytes)
        elif record.kind == MEMORY_DROP:
            dropped = decode(record.payload, DroppedPayload)
            self._touch(dropped.touched)
            removed = self.entries.pop(dropped.key, None)
            self.size -= 0 if removed is None else removed.size_bytes

    def _touch(self, touched: dict[str, int] | UnsetType) -> None:
        for key, at in (touched or {}).items():
            entry = self.entries.get(key)
            if entry is not None:
                entry.last_accessed_at = max(entry.last_accessed_at, at)

    def document(self) -> bytes:
        """Return memory.json, without large values."""
        entries = [_written(entry) for entry in self.entries.values()]
        stats = {"totalEntries": len(entries), "totalSizeBytes": self.size}
        return msgspec.json.encode({"version": 1, "entries": entries, "stats": stats})

    def large_values(self) -> dict[str, bytes]:
        """Return the large values that this index has and its document has not, by hash."""
        return {
            entry.sha256: bytes(entry.value)
            for entry in self.entries.values()
            if entry.sha256 is not UNSET and not entry.is_apart
        }


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
    """Apply records to an index, with the values that they set; return it."""
    for record in records:
        index.apply(record)
    return index


def blob_names(documents: Mapping[str, bytes], records: Iterable[Record] = ()) -> frozenset[str]:
    """Return the blobs that a session's memory refers to.

    Args:
        documents: The session's documents by name; only memory.json is read.
        records: The log after them: the next fold will refer to its values.

    """
    index = changes_of(MemoryIndex.of_document(documents.get(MEMORY)), records)
    return frozenset(entry.sha256 for entry in index.entries.values() if entry.sha256 is not UNSET)


def value_names(records: Iterable[Record]) -> set[str]:
    """Return the blobs that a fold makes of the large values in records."""
    changes = [decode(one.payload, MemoryEntry) for one in records if one.kind == MEMORY_SET]
    values = [bytes(entry.value) for entry in changes]
    return {name_of(value) for value in values if len(value) > INLINE}


Priority = Literal["low", "normal", "high", "critical"]


_WEIGHTS: Final = {name: weight for weight, name in enumerate(get_args(Priority))}


def weight_of(priority: str) -> int:
    """Return the weight of a priority; an unknown one counts as normal.

    >>> weight_of("low") < weight_of("normal") == weight_of("unknown") < weight_of("critical")
    True
    """
    return _WEIGHTS.get(priority, _WEIGHTS["normal"])


def check_priority(priority: str) -> None:
    """Raise for an unknown priority.

    Raises:
        InvalidArgumentError: It is none of the known ones.

    """
    if priority not in _WEIGHTS:
        raise InvalidArgumentError(
            f"memory: invalid priority={priority!r}: choose {', '.join(_WEIGHTS)}",
            option="priority",
            value=priority,
        )


def evicted(
    entries: Iterable[MemoryEntry], *, total: int, key: str, size: int, limit: int
) -> list[MemoryEntry]:
    """Return the entries to evict, so that a value of ``size`` bytes fits under ``key``.

    Args:
        entries: All entries.
        total: Bytes of all their values.
        key: The entry that is set; it is not evicted itself.
        size: Bytes of its new value.
        limit: The most bytes that all values may have in total.

    Raises:
        TooLargeError: The value alone is larger than the limit, or pinned entries leave no room
            for it; nothing is evicted then.

    """
    if size > limit:
        raise TooLargeError(
            f"the value for memory key {key!r} has {size} bytes, all values together may have "
            f"{limit}: keep it elsewhere and a reference here, or raise Limits(memory_bytes=…)",
            memory_key=key,
            size=size,
            limit=limit,
        )
    others = [entry for entry in entries if entry.key != key]
    used = sum(entry.size_bytes for entry in others) if total + size > limit else 0
    removed: list[MemoryEntry] = []
    loose = [entry for entry in others if not entry.pinned]
    loose.sort(key=lambda entry: (weight_of(entry.base_priority), entry.last_accessed_at))
    for entry in loose:
        if used + size <= limit:
            break
        removed.append(entry)
        used -= entry.size_bytes
    if used + size > limit:
        raise TooLargeError(
            f"the value for memory key {key!r} has {size} bytes, and pinned entries have {used} "
            f"of the {limit} there are: unpin or drop some, or raise Limits(memory_bytes=…)",
            memory_key=key,
            size=size,
            limit=limit,
            pinned=used,
        )
    return removed


_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Myanmar, Khmer
    "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "\uac00-\ud7a3"  # Hangul, whose words carry particles
)


_RUN: Final = re.compile(rf"[{_UNSPACED}]+|[^\W{_UNSPACED}]+")


_CHARACTER: Final = re.compile(f"[{_UNSPACED}]")


def words_of(text: str) -> list[str]:
    """Return the words of a text, each once, in order.

    Scripts without spaces (Chinese, Japanese, Korean, Thai and others) are not split by a
    dictionary, which would be large and often wrong: each pair of neighboring characters counts
    as a word, as in search engines.

    >>> words_of("the boat, the berth")
    ['the', 'boat', 'berth']
    >>> words_of("我的船")
    ['我的', '的船']
    """
    words_found: list[str] = []
    for run in _RUN.findall(text):
        if _CHARACTER.match(run) and len(run) > 2:
            words_found += (run[at : at + 2] for at in range(len(run) - 1))
        else:
            words_found.append(run)
    return list(dict.fromkeys(words_found))


def spaced(text: str) -> str:
    """Return a text with spaces around each character of a script without spaces.

    >>> spaced("我的boat").split()
    ['我', '的', 'boat']
    """
    return _CHARACTER.sub(r" \g<0> ", text)


_MOST_WORDS: Final = 64


# The shortest word that is also matched as a prefix.
_LEAST_OF_A_WORD: Final = 3


def bm25(query: str, texts: Sequence[str]) -> list[float]:
    """Return how well each text matches: 1.0 is the best of them, 0.0 has none of the words.

    Ranked by SQLite's full-text search (FTS5) in a temporary in-memory database: the same on every
    store, no plain text next to an encrypted one, and no index to keep in sync. English words match
    by their stems, accents are ignored, and if no text has any of the words, prefixes match.
    Blocks, about ten milliseconds for a thousand memories: run it in a thread.

    >>> bm25("favorite cities", ["Her favorite city is Rome", "She sails"])
    [1.0, 0.0]

    Raises:
        ConfigError: This Python's SQLite was built without FTS5.

    """
    words = [spaced(word) for word in words_of(query)[:_MOST_WORDS]]
    begins = [f'"{word}"*' for word in words if len(word) >= _LEAST_OF_A_WORD]
    rows = _ranked([f'"{word}"' for word in words], texts, "porter unicode61")
    scores = [0.0] * len(texts)
    # Prefixes only where no whole word matches: they find far more, and less to the point.
    for row, rank in rows or _ranked(begins, texts, "unicode61"):
        scores[row] = -rank
    best = max(scores, default=0.0)
    return [score / best if best > 0 else 0.0 for score in scores]


def _ranked(wanted: Sequence[str], texts: Sequence[str], tokens: str) -> list[tuple[int, float]]:
    import sqlite3

    if not wanted or not texts:
        return []
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        try:
            database.execute(
                "CREATE VIRTUAL TABLE texts USING fts5"
                f"(text, tokenize = '{tokens} remove_diacritics 2')"
            )
        except sqlite3.OperationalError as error:
            raise ConfigError(
                "this Python's SQLite has no full-text search (FTS5): give the retriever your "
                "own ranking, Retriever(…, rank=…)",
                option="rank",
            ) from error
        rows = ((at, spaced(text)) for at, text in enumerate(texts))
        database.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", rows)
        matches = database.execute(
            "SELECT rowid, rank FROM texts WHERE texts MATCH ?", (" OR ".join(wanted),)
        )
        return matches.fetchall()


_KEY, _KEY_WORD, _IN_KEY = 16, 8, 4
_WORD_OF_TEXT, _IN_TEXT, _IN_VALUE = 4, 2, 1
_PARTS: Final = re.compile(r"[^\W_]+")


def points_of(words: Sequence[str], key: str, description: str, value: str) -> int:
    """Return the points of an entry for a query's words, 0 if none matches.

    >>> points_of(words_of("favorite city"), "favorite_city", "where she would live", "")
    16
    """
    key, description = key.casefold(), description.casefold()
    of_key, of_text = set(_PARTS.findall(key)), set(_PARTS.findall(description))
    return sum(
        _KEY
        if word == key
        else _KEY_WORD
        if word in of_key
        else _IN_KEY
        if word in key
        else _WORD_OF_TEXT
        if word in of_text
        else _IN_TEXT
        if word in description
        else _IN_VALUE
        if word in value
        else 0
        for word in words
    )


def ranked(matches: Iterable[tuple[int, MemoryEntry]]) -> list[MemoryEntry]:
    """Return entries by their points, the best first."""
    return [entry for _, entry in sorted(matches, key=_place)]


def _place(match: tuple[int, MemoryEntry]) -> tuple[int, int, int, str]:
    points, entry = match
    return -points, -weight_of(entry.base_priority), -entry.last_accessed_at, entry.key


def entry_text(data: bytes) -> str:
    """Return the text of a value's JSON for searching: its words, without syntax.

    >>> entry_text(b'{"Where": ["Rome", 3]}')
    'where rome 3'
    """
    return " ".join(_texts(decode(data))).casefold()


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif value is not None:
        yield str(value)
