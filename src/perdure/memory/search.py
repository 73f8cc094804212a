"""Finding entries of the working memory by their words.

Pure. The query is taken apart into words (`perdure.memory.words`); upper and lower case are
the same. An entry is found if one of them stands in its key, its description or, where values are
searched, in the text of its value. For each word the best place counts:

    the key is the word 16 · a word of the key 8 · within the key 4
    a word of the description 4 · within the description 2
    within the value 1

More points come first; with equal points the higher priority, then what was used last,
then the key in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from perdure.codec.json import decode
from perdure.memory.index import MemoryEntry
from perdure.memory.room import weight_of
from perdure.memory.words import words_of

__all__ = ["Words", "ranked", "text_of"]

_PARTS: Final = re.compile(r"[^\W_]+")
_KEY, _KEY_WORD, _IN_KEY = 16, 8, 4
_WORD_OF_TEXT, _IN_TEXT, _IN_VALUE = 4, 2, 1


class Words:
    """A query's words.

    >>> Words("Favorite city").points("favorite_city", "where she would live", "")
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


def ranked(found: Iterable[tuple[int, MemoryEntry]]) -> list[MemoryEntry]:
    """Return entries by their points, the best first."""
    return [entry for _, entry in sorted(found, key=_place)]


def _place(one: tuple[int, MemoryEntry]) -> tuple[int, int, int, str]:
    points, entry = one
    return -points, -weight_of(entry.base_priority), -entry.last_accessed_at, entry.key


def text_of(data: bytes) -> str:
    """Return the text of a value's JSON as it is searched: its words, with no syntax.

    >>> text_of(b'{"Where": ["Rome", 3]}')
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
