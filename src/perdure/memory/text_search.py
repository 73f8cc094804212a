"""Text search over an agent's memory: words of any script, BM25, ranked entries. Pure.

The query is taken apart into words (`words_of`); upper and lower case are
the same. An entry is found if one of them is in its key, its description or, where values are
searched, in the text of its value. For each word the best place counts:

    the key is the word 16 · a word of the key 8 · within the key 4
    a word of the description 4 · within the description 2
    within the value 1

More points come first; with equal points the higher priority, then what was used last,
then the key in order.

`bm25` ranks texts by SQLite's own full-text search (FTS5), in a database in memory that is gone
afterwards: the same on every store, with nothing in plain text beside an encrypted one. It blocks,
about ten milliseconds for a thousand memories: run it in a thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from perdure.errors import ConfigError
from perdure.memory.eviction import weight_of
from perdure.memory.index import MemoryEntry
from perdure.records.json import decode

_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Myanmar, Khmer
    "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "\uac00-\ud7a3"  # Hangul, whose words carry particles
)


_RUN: Final = re.compile(rf"[{_UNSPACED}]+|[^\W{_UNSPACED}]+")


_CHARACTER: Final = re.compile(f"[{_UNSPACED}]")


def words_of(text: str) -> list[str]:
    """Return the words of a text, each once, in their order.

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
    """Return a text with spaces round each character of a script that has none.

    >>> spaced("我的boat").split()
    ['我', '的', 'boat']
    """
    return _CHARACTER.sub(r" \g<0> ", text)


_MOST_WORDS: Final = 64


_LEAST_OF_A_WORD: Final = 3
"""How many letters of a word's beginning count."""


def bm25(query: str, texts: Sequence[str]) -> list[float]:
    """Return for each text how well it fits: 1.0 is the best of them, 0.0 none of the words.

    >>> bm25("favorite cities", ["Her favorite city is Rome", "She sails"])
    [1.0, 0.0]

    Raises:
        ConfigError: This Python's SQLite was built without FTS5.

    """
    words = [spaced(word) for word in words_of(query)[:_MOST_WORDS]]
    begins = [f'"{word}"*' for word in words if len(word) >= _LEAST_OF_A_WORD]
    rows = _ranked([f'"{word}"' for word in words], texts, "porter unicode61")
    scores = [0.0] * len(texts)
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
            message = (
                "this Python's SQLite has no full-text search (FTS5): give the retriever a "
                "ranking of your own, Retriever(…, rank=…)"
            )
            raise ConfigError(message, option="rank") from error
        rows = ((at, spaced(text)) for at, text in enumerate(texts))
        database.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", rows)
        matches = database.execute(
            "SELECT rowid, rank FROM texts WHERE texts MATCH ?", (" OR ".join(wanted),)
        )
        return matches.fetchall()


_KEY, _KEY_WORD, _IN_KEY = 16, 8, 4
_WORD_OF_TEXT, _IN_TEXT, _IN_VALUE = 4, 2, 1
_PARTS: Final = re.compile(r"[^\W_]+")


class QueryWords:
    """A query's words.

    >>> QueryWords("Favorite city").points("favorite_city", "where she would live", "")
    16
    """

    def __init__(self, query: str) -> None:
        self._words = words_of(query.casefold())

    def __bool__(self) -> bool:
        return bool(self._words)

    def points(self, key: str, description: str, value: str) -> int:
        """Return what an entry is worth, 0 if nothing of it is looked for."""
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
            for word in self._words
        )


def ranked(matches: Iterable[tuple[int, MemoryEntry]]) -> list[MemoryEntry]:
    """Return entries by their points, the best first."""
    return [entry for _, entry in sorted(matches, key=_place)]


def _place(match: tuple[int, MemoryEntry]) -> tuple[int, int, int, str]:
    points, entry = match
    return -points, -weight_of(entry.base_priority), -entry.last_accessed_at, entry.key


def entry_text(data: bytes) -> str:
    """Return the text of a value's JSON as it is searched: its words, with no syntax.

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
