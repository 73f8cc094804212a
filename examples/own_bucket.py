"""A backend of your own in 100 lines: a bucket in one table of SQLite.

Where you have conditional writes, you have a store: `perdure.stores.ObjectStore` does the rest.
docs/own-backend.md builds it step by step, and it passes the conformance suite. It keeps a
greeting:

    python examples/own_bucket.py FILE
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import anyio

import perdure
from perdure.errors import StoreUnavailableError
from perdure.stores import Bucket, ListedObject, ObjectStore, StoredObject

TABLE = "CREATE TABLE IF NOT EXISTS object (name TEXT PRIMARY KEY, data BLOB, tag TEXT, time REAL)"
NEW_TAG = "lower(hex(randomblob(8)))"
PAGE = 500


class TableBucket(Bucket):
    """Objects as rows: a name, bytes, a tag that no write has had before, a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._run(TABLE)

    def _run(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Run one statement as one durable step."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            connection = sqlite3.connect(self._path, timeout=10, isolation_level=None)
            with contextlib.closing(connection):
                connection.execute("PRAGMA synchronous = EXTRA")
                return connection.execute(sql, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            message = f"cannot use {self._path}: {error}: look at the disk and the file"
            raise StoreUnavailableError(message, path=str(self._path)) from error

    def get(self, name: str) -> StoredObject | None:
        rows = self._run("SELECT data, tag FROM object WHERE name = ?", name)
        return StoredObject(*rows[0]) if rows else None

    def stat(self, name: str) -> ListedObject | None:
        rows = self._run("SELECT name, length(data), time FROM object WHERE name = ?", name)
        return ListedObject(*rows[0]) if rows else None

    def create(self, name: str, data: bytes) -> str | None:
        rows = self._run(
            f"INSERT INTO object VALUES (?, ?, {NEW_TAG}, ?) ON CONFLICT DO NOTHING RETURNING tag",
            *(name, data, time.time()),
        )
        return rows[0][0] if rows else None

    def replace(self, name: str, data: bytes, tag: str) -> str | None:
        rows = self._run(
            f"UPDATE object SET data = ?, tag = {NEW_TAG}, time = ? "
            "WHERE name = ? AND tag = ? RETURNING tag",
            *(data, time.time(), name, tag),
        )
        return rows[0][0] if rows else None

    def put(self, name: str, data: bytes) -> None:
        self._run(
            f"INSERT OR REPLACE INTO object VALUES (?, ?, {NEW_TAG}, ?)",
            *(name, data, time.time()),
        )

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            self._run("DELETE FROM object WHERE name = ?", name)

    def pages(self, prefix: str, after: str | None = None) -> Iterator[list[ListedObject]]:
        least = max(prefix, after or "")
        while rows := self._run(
            "SELECT name, length(data), time FROM object "
            "WHERE name > ? AND substr(name, 1, ?) = ? ORDER BY name LIMIT ?",
            *(least, len(prefix), prefix, PAGE),
        ):
            yield [ListedObject(*row) for row in rows]
            least = rows[-1][0]


def table_store(path: Path, owner: str | None = None) -> ObjectStore:
    return ObjectStore(lambda: TableBucket(path), location=str(path), owner=owner)


async def main(path: Path) -> None:
    async with perdure.connect(table_store(path)) as sessions:
        async with sessions.open("greeter") as session, session.turn():
            session.append(perdure.Message.user("Hello"))
        view = await sessions.load("greeter")
        assert view is not None
        print(f"{len(view.context())} messages in {path}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/own_bucket.py FILE")
    with contextlib.suppress(KeyboardInterrupt):
        anyio.run(main, Path(sys.argv[1]))
