"""Text match: how well texts fit a query's words, by BM25.

SQLite's own full-text search (FTS5) ranks them, in a database in memory that is gone afterwards:
the same on every store, nothing lies in plain text beside an encrypted one, and there is nothing to
forget or to keep in step. English words match
by their stems, accents do not count, and where nothing has one of the words, what begins
with one counts.

Blocks while it works, about ten milliseconds for a thousand memories: run it in a thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from perdure.errors import ConfigError
from perdure.memory.words import spaced, words_of

__all__ = ["bm25"]

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
    found = _ranked([f'"{word}"' for word in words], texts, "porter unicode61")
    scores = [0.0] * len(texts)
    for row, rank in found or _ranked(begins, texts, "unicode61"):
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
        found = database.execute(
            "SELECT rowid, rank FROM texts WHERE texts MATCH ?", (" OR ".join(wanted),)
        )
        return found.fetchall()
