"""The statements in the ``.sql`` files beside this module, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import TypeVar

__all__ = ["MIGRATIONS", "MOST_ROWS", "Q", "at_once", "chunks", "statements"]

T = TypeVar("T")

MOST_ROWS = 64
"""Rows of one statement."""


def _named(text: str) -> dict[str, str]:
    parts = re.split(r"^-- name: (\w+)$", text, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def statements(script: str) -> list[str]:
    """Split a script whose statements end with a semicolon at a line's end.

    ``executescript`` would commit first, and a migration is one transaction.
    """
    bare = re.sub(r"--[^\n]*", "", script)
    return [one.strip() for one in re.split(r";\s*(?:\n|\Z)", bare) if one.strip()]


_HERE = files(__package__)

Q: dict[str, str] = _named((_HERE / "queries.sql").read_text("utf-8"))
"""Each statement by its name in ``queries.sql``."""

MIGRATIONS: list[list[str]] = [statements((_HERE / "schema_1.sql").read_text("utf-8"))]
"""The step from each format to the next; the first one makes an empty database format 1."""


@cache
def at_once(name: str, rows: int) -> str:
    """Return a statement with so many rows of values instead of one.

    Each step of a statement gives the interpreter to other threads, and has to wait until
    they give it back: a statement with many rows is one step.
    """
    before, found, after = re.split(r"VALUES (\([?, ]+\))", Q[name])
    return f"{before}VALUES {', '.join([found] * rows)}{after}"


def chunks(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split rows into parts of few different sizes, for which statements are prepared.

    >>> [len(part) for part in chunks(range(150))]
    [64, 64, 16, 4, 2]
    """
    at, size = 0, MOST_ROWS
    while at < len(rows):
        while size > len(rows) - at:
            size //= 2
        yield rows[at : at + size]
        at += size
