"""What a program asks of its disk, its threads and its SQLite; and which facts it reads, how often.

A fact about a session is what one place of its store says: a lease, a manifest, a document, a file
of the log. Whoever read it can pass it on; a second read costs as much as the first, and may say
something else.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import anyio
import anyio.to_thread

from perdure._lib.loop import Threads

__all__ = [
    "Asked",
    "Monitor",
    "count_asked",
    "facts_in_commands",
    "facts_in_files",
    "facts_in_requests",
    "facts_in_statements",
]


class Asked:
    """What was asked for since the last `take`; many threads may add to it."""

    def __init__(self) -> None:
        self.opens = 0
        """Calls of ``os.open``, those that found nothing included."""
        self.read: list[str] = []
        """The names of the files that were opened to be read."""
        self.listings = 0
        self.syncs = 0
        self.hops = 0
        """Calls that were handed to a thread."""
        self.statements: list[str] = []
        """SQL with its values, of connections that were made since counting began."""

    def take(self) -> Asked:
        """Return what was counted, and begin again at nothing."""
        taken = Asked()
        taken.__dict__, self.__dict__ = self.__dict__, taken.__dict__
        return taken

    @property
    def transactions(self) -> int:
        """How many transactions were begun."""
        return sum(statement.startswith("BEGIN") for statement in self.statements)


@contextmanager
def count_asked() -> Iterator[Asked]:
    """Count what this process asks for. On trio, files that are streamed are no hops."""
    asked = Asked()
    opened, connected = os.open, sqlite3.connect

    def open_file(path: Any, flags: int, *args: Any, **options: Any) -> int:
        asked.opens += 1
        fd = opened(path, flags, *args, **options)
        if not flags & (os.O_WRONLY | os.O_DIRECTORY):
            asked.read.append(os.path.basename(os.fspath(path)))
        return fd

    def connect(*args: Any, **options: Any) -> sqlite3.Connection:
        def note(statement: str) -> None:
            asked.statements.append(statement)  # to the list of now

        connection = connected(*args, **options)
        connection.set_trace_callback(note)
        return connection

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            setattr(asked, name, getattr(asked, name) + 1)
            return call(*args, **options)

        return counted

    replaced: list[tuple[Any, str, Any]] = [
        (os, "open", open_file),
        (sqlite3, "connect", connect),
        (os, "listdir", counting("listings", os.listdir)),
        (os, "scandir", counting("listings", os.scandir)),
        (os, "fsync", counting("syncs", os.fsync)),
        (os, "fdatasync", counting("syncs", os.fdatasync)),
        (Threads, "start", counting("hops", Threads.start)),
        (anyio.to_thread, "run_sync", counting("hops", anyio.to_thread.run_sync)),
        (
            asyncio.BaseEventLoop,
            "run_in_executor",
            counting("hops", asyncio.BaseEventLoop.run_in_executor),
        ),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    for place, name, call in replaced:
        setattr(place, name, call)
    try:
        yield asked
    finally:
        for place, name, call in before:
            setattr(place, name, call)


# Facts, by what was read of them

_FILE = re.compile(r"(lease|manifest)-\d+\.(json|next)\Z|\d+-\d+\.jsonl\Z|[a-z_]+\.jsonl?\Z")
_TABLES = {
    "session": "lease",
    "sessions": "lease",
    "manifest": "manifest",
    "manifests": "manifest",
    "document": "document",
    "documents": "document",
    "log": "log",
    "commits": "log",
}
_TABLE = re.compile(r"\b(?:FROM|JOIN)\s+(?:\"?\w+\"?\.)?(\w+)")
_DOCUMENT = re.compile(r"\bname = '([^']*)'")
_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"')


def facts_in_files(read: Iterable[str]) -> Counter[str]:
    """Count the files of a session's folder that were opened to be read, by their names.

    >>> facts_in_files(["lease-3.json", "lease-3.json", "owner.lock", "3-0.jsonl"])
    Counter({'lease-3.json': 2, '3-0.jsonl': 1})
    """
    return Counter(filter(_FILE.match, read))


def facts_in_statements(statements: Iterable[str]) -> Counter[str]:
    """Count the statements that read a table of a session's facts; each counts once for a table.

    What a statement changes it has to find: that is no read, and neither is PostgreSQL's row of a
    session by whose name other facts are found. Of a log, each statement reads a part of its own,
    and only the same one reads it twice.

    >>> facts_in_statements(["SELECT data FROM document WHERE session = 1 AND name = 'a.json'"])
    Counter({'document a.json': 1})
    """
    facts: Counter[str] = Counter()
    for statement in statements:
        name = _DOCUMENT.search(statement)
        for table in set(_TABLE.findall(statement)) & _TABLES.keys():
            fact = _TABLES[table]
            if table == "sessions" and "s.epoch" not in statement:
                continue
            if fact == "log":
                fact = f"log by {statement}"
            elif fact == "document" and name:
                fact = f"document {name[1]}"
            facts[fact] += 1
    return facts


def facts_in_commands(lines: Iterable[str]) -> Counter[str]:
    """Count the fields that were read of a session's hashes, from what Redis' MONITOR says.

    >>> facts_in_commands(['+1.0 [0 lua] "HMGET" "p:{:ada:default}:s" "e" "m"'])
    Counter({'lease': 1, 'manifest': 1})
    """
    facts: Counter[str] = Counter()
    for line in lines:
        command, *words = _WORD.findall(line) or [""]
        if command.upper() not in {"HGET", "HMGET", "HGETALL"}:
            continue
        name, *fields = words
        if name.endswith("}:s"):  # the epoch stands for the lease, which is read by it
            known = {"e": "lease", "m": "manifest"}
            facts.update(known[field] for field in fields if field in known)
        elif name.endswith("}:d"):
            facts.update(f"document {field}" for field in fields or ["*"])
    return facts


def facts_in_requests(requests: Iterable[str]) -> Counter[str]:
    """Count the objects of a bucket that were read, and what was listed.

    >>> facts_in_requests(["GET /bucket/s/1/head", "PUT /bucket/s/1/head"])
    Counter({'/bucket/s/1/head': 1})
    """
    said = (request.split(" ", 1) for request in requests)
    return Counter(path for method, path in said if method in {"GET", "HEAD"})


class Monitor:
    """What a Redis server runs, the commands of its scripts included: a connection in MONITOR."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._lines = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self._seen: list[str] = []

    def __enter__(self) -> Self:
        self._socket.sendall(b"MONITOR\r\n")
        self._lines.readline()  # from now on it is told of everything
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        for line in self._lines:
            with self._lock:
                self._seen.append(line.decode("utf-8", "replace"))

    def take(self) -> list[str]:
        """Return what was run since the last call, as far as the server has told it."""
        with self._lock:
            seen, self._seen = self._seen, []
        return seen
