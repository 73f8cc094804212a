"""The plain drivers: the same rows, the same durability, and nothing around them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import anyio
import anyio.to_thread

from benchmarks.stores.load import PER_TURN, Part
from perdure.records import records
from perdure.records.messages import encode_message

__all__ = ["Plain", "PlainFiles", "PlainPostgres", "PlainRedis", "PlainS3", "PlainSqlite", "replay"]

Row = tuple[int, int, int, bytes]
"""Session, first and last number, framed records."""


class Plain(Protocol):
    """A driver that writes rows, durably when it returns."""

    workers: int
    """How many batches at once, each over a connection of its own."""

    async def write(self, rows: list[Row]) -> None: ...


async def replay(plain: Plain, batches: list[list[Part]], heads: list[int]) -> float:
    """Write what perdure wrote; return the time. ``heads`` are the logs' ends, and move."""
    waiting = iter(batches)

    async def work() -> None:
        for batch in waiting:
            await plain.write([_row(part, heads) for part in batch])

    start = perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(plain.workers):
            group.start_soon(work)
    return perf_counter() - start


def _row(part: Part, heads: list[int]) -> Row:
    """Encode a session's turns, as late as perdure does it."""
    entries = tuple(encode_message(message) for turn in part.turns for message in turn)
    first = heads[part.session] + 1
    heads[part.session] += PER_TURN * len(part.turns)
    data, _ = records.encode(entries, first=first, epoch=1, crc=0)
    return part.session, first, heads[part.session], data


class PlainFiles:
    """Appends to a file each, in threads, as many at once as perdure has."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.workers = workers
        self._folder = folder
        self._open: dict[int, int] = {}

    async def write(self, rows: list[Row]) -> None:
        for row in rows:
            await anyio.to_thread.run_sync(self._write, row)

    def _write(self, row: Row) -> None:
        fd = self._open.get(row[0])
        if fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            fd = self._open[row[0]] = os.open(self._folder / f"{row[0]}.jsonl", flags, 0o600)
        os.write(fd, row[3])
        os.fdatasync(fd)

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)


class PlainSqlite:
    """A transaction for each batch, on one connection, in WAL with FULL."""

    workers = 1

    def __init__(self, path: Path) -> None:
        self._con = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._con.execute("PRAGMA journal_mode=WAL").fetchall()
        self._con.execute("PRAGMA synchronous=FULL").fetchall()
        self._con.execute(
            "CREATE TABLE log (session INTEGER NOT NULL, first INTEGER NOT NULL, "
            "last INTEGER NOT NULL, epoch INTEGER NOT NULL, seed INTEGER NOT NULL, "
            "data BLOB NOT NULL)"
        )
        self._con.execute("CREATE UNIQUE INDEX log_by_place ON log (session, first)")

    async def write(self, rows: list[Row]) -> None:
        await anyio.to_thread.run_sync(self._write, rows)

    def _write(self, rows: list[Row]) -> None:
        self._con.execute("BEGIN IMMEDIATE")
        self._con.executemany(
            "INSERT INTO log VALUES (?, ?, ?, 1, 0, ?)", [(s, f, n, d) for s, f, n, d in rows]
        )
        self._con.execute("COMMIT")

    def close(self) -> None:
        self._con.close()


class PlainPostgres:
    """COPY of each batch, a transaction each."""

    def __init__(self, url: str, workers: int) -> None:
        import psycopg

        self.workers = workers
        self._free = [psycopg.connect(url) for _ in range(workers)]
        with self._free[0] as con:
            con.execute("DROP TABLE IF EXISTS plain")
            con.execute(
                "CREATE TABLE plain (session bigint NOT NULL, first bigint NOT NULL, last bigint "
                "NOT NULL, epoch bigint NOT NULL, seed bigint NOT NULL, lines bytea NOT NULL, "
                "PRIMARY KEY (session, first))"
            )
            con.commit()
        self._free = [psycopg.connect(url) for _ in range(workers)]

    async def write(self, rows: list[Row]) -> None:
        con = self._free.pop()
        try:
            await anyio.to_thread.run_sync(self._write, con, rows)
        finally:
            self._free.append(con)

    def _write(self, con: Any, rows: list[Row]) -> None:
        with con.cursor() as cursor:
            with cursor.copy("COPY plain FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["int8", "int8", "int8", "int8", "int8", "bytea"])
                for session, first, last, data in rows:
                    copy.write_row((session, first, last, 1, 0, data))
            con.commit()

    def close(self) -> None:
        for con in self._free:
            con.close()


class PlainRedis:
    """A pipeline of XADD for each batch."""

    def __init__(self, client: Any, workers: int) -> None:
        self.workers = workers
        self._client = client

    async def write(self, rows: list[Row]) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            for session, first, last, data in rows:
                pipe.xadd(f"plain:{session}", {b"%d-%d" % (last, first): data})

    @classmethod
    @asynccontextmanager
    async def opened(cls, url: str, workers: int) -> AsyncIterator[PlainRedis]:
        import coredis

        async with coredis.Redis.from_url(url) as client:
            yield cls(client, workers)


class PlainS3:
    """An object for each session of a batch, created in threads."""

    def __init__(self, bucket: Any, workers: int) -> None:
        self.workers = workers
        self._bucket = bucket

    async def write(self, rows: list[Row]) -> None:
        for row in rows:
            await anyio.to_thread.run_sync(self._write, row)

    def _write(self, row: Row) -> None:
        import obstore

        obstore.put(self._bucket, f"plain/{row[0]}/{row[1]:016d}", row[3], mode="create")
