"""SQL statements by name, from the ``.sql`` files next to this module."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from perdure.records.rows import named_statements

__all__ = ["MAX_ROWS", "MIGRATIONS", "ROWS_AT_ONCE", "Q", "at_once", "statements"]

ROWS_AT_ONCE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""The rows that statements have. Compiling one costs ten times what an empty row in it does, so
there are few, which the driver keeps."""

MAX_ROWS = ROWS_AT_ONCE[-1]
"""Maximum rows in one statement: SQLite accepts 32,766 values."""


def statements(script: str) -> list[str]:
    """Split a script whose statements end with a semicolon at a line's end.

    ``executescript`` would commit first, and a migration is one transaction.
    """
    bare = re.sub(r"--[^\n]*", "", script)
    return [
        statement.strip() for statement in re.split(r";\s*(?:\n|\Z)", bare) if statement.strip()
    ]


_HERE = files(__package__)

Q: dict[str, str] = named_statements((_HERE / "queries.sql").read_text("utf-8"))
"""Each statement by its name in ``queries.sql``."""

MIGRATIONS: list[list[str]] = [
    statements((_HERE / f"schema_{number}.sql").read_text("utf-8")) for number in (1, 2, 3, 4)
]
"""The step from each format to the next; the first one makes an empty database format 1."""


@cache
def at_once(name: str, rows: int) -> str:
    """Return a statement with this many rows of values instead of one.

    Each statement releases the interpreter's lock and waits to get it back: many rows in one
    statement wait only once.
    """
    before, placeholders, after = re.split(r"VALUES (\([?, ]+\))", Q[name])
    return f"{before}VALUES {', '.join([placeholders] * rows)}{after}"
