"""Text match: how well texts fit a query's words, by BM25.

SQLite's own full-text search (FTS5) ranks them, in a database in memory that is gone afterwards:
the same on every store, nothing lies in plain text beside an encrypted one, and there is nothing to
forget or to keep in step. English words match by their stems, accents do not count.

Blocks while it works, about ten milliseconds for a thousand memories: run it in a thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Final

from perdure.errors import ConfigError

__all__ = ["bm25"]

_WORD: Final = re.compile(r"\w+")
_MOST_WORDS: Final = 64


def bm25(query: str, texts: Sequence[str]) -> list[float]:
    """Return for each text how well it fits: 1.0 is the best of them, 0.0 none of the words.

    >>> bm25("favorite cities", ["Her favorite city is Rome", "She sails"])
    [1.0, 0.0]

    Raises:
        ConfigError: This Python's SQLite was built without FTS5.

    """
    words = list(dict.fromkeys(_WORD.findall(query)))[:_MOST_WORDS]
    scores = [0.0] * len(texts)
    if not words or not texts:
        return scores
    wanted = " OR ".join(f'"{word}"' for word in words)
    for row, rank in _ranked(wanted, texts):
        scores[row] = -rank
    best = max(scores)
    return [score / best if best > 0 else 0.0 for score in scores]


def _ranked(wanted: str, texts: Sequence[str]) -> list[tuple[int, float]]:
    import sqlite3

    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        try:
            database.execute(
                "CREATE VIRTUAL TABLE texts USING fts5"
                "(text, tokenize = 'porter unicode61 remove_diacritics 2')"
            )
        except sqlite3.OperationalError as error:
            message = (
                "this Python's SQLite has no full-text search (FTS5): give the retriever a "
                "ranking of your own, Retriever(…, rank=…)"
            )
            raise ConfigError(message, option="rank") from error
        database.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", enumerate(texts))
        found = database.execute("SELECT rowid, rank FROM texts WHERE texts MATCH ?", (wanted,))
        return found.fetchall()
