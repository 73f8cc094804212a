"""The statements in the ``.sql`` files beside this module, by name."""

from __future__ import annotations

import re
from importlib.resources import files

__all__ = ["MIGRATIONS", "Q", "statements"]


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
