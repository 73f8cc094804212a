"""SQL statements of the store: read from the files in ``sql``, with the schema's name inserted.

A file holds several statements, each below a line ``-- name: word``.
"""

from __future__ import annotations

import importlib.resources
import re
from typing import final

from perdure.stores.postgres.prepared import PreparedStatement
from perdure.stores.postgres.settings import quoted

LATEST = 2
"""The version of the tables that this release writes."""

_FILES = ("log", "leases", "documents", "blobs", "inbox", "directory")
_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


@final
class Statements:
    """Statements by name, for one schema."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        """Its name, not quoted."""
        self._by_name: dict[str, bytes] = {}
        name = quoted(schema).replace("%", "%%")
        for file in _FILES:
            _, *parts = _NAME.split(_text(f"{file}.sql"))
            for word, body in zip(parts[::2], parts[1::2], strict=True):
                self._by_name[word] = body.strip().replace("{schema}", name).encode()
        self.append: PreparedStatement = PreparedStatement(
            "append", self["append"].replace(b"%%", b"%"), numbers=6
        )

    def __getitem__(self, name: str) -> bytes:
        return self._by_name[name]


def migrations(schema: str, since: int) -> list[tuple[int, bytes]]:
    """Return the migrations from a version of the tables to the latest, in order."""
    name = quoted(schema)
    return [
        (number, _text(f"{number:04}.sql").replace("{schema}", name).encode())
        for number in range(since + 1, LATEST + 1)
    ]


def _text(name: str) -> str:
    return (importlib.resources.files(__package__) / "sql" / name).read_text(encoding="utf-8")
