"""A proxy on loopback that counts what a store sends to its server: round trips, or requests.

PostgreSQL is ready for a query after each Sync and each simple Query, so those messages are the
round trips; for Redis, each command is counted; for HTTP, each request, with its method and path.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Self

__all__ = [
    "CountingProxy",
    "PostgresStatements",
    "http_requests",
    "postgres_round_trips",
    "redis_commands",
    "redis_round_trips",
]

Parser = Callable[[bytearray], Iterator[str]]
"""Takes whole messages off the front of what a client has sent, and names those that count."""

_SYNC, _QUERY = b"S", b"Q"


def postgres_round_trips(sent: bytearray) -> Iterator[str]:
    """Name the messages that a client of PostgreSQL waits for an answer to."""
    while len(sent) >= 5:
        kind = bytes(sent[:1])
        is_startup = kind == b"\0"  # the only messages without a type, but with a length
        size = int.from_bytes(sent[:4] if is_startup else sent[1:5])
        size += 0 if is_startup else 1
        if len(sent) < size:
            return
        body = bytes(sent[5:size])
        del sent[:size]
        if is_startup:
            yield "connect"
        elif kind == _SYNC:
            yield "sync"
        elif kind == _QUERY:
            yield f"query {body[:60].decode('utf-8', 'replace')}"


class PostgresStatements:
    """A parser that names each statement that a client runs: its text, also of one prepared."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[int, bytes], str] = {}

    def __call__(self, sent: bytearray) -> Iterator[str]:
        while len(sent) >= 5:
            is_startup = sent[0] == 0
            size = int.from_bytes(sent[:4]) if is_startup else 1 + int.from_bytes(sent[1:5])
            if len(sent) < size:
                return
            kind, body = bytes(sent[:1]), bytes(sent[5:size])
            del sent[:size]
            if kind == b"P":
                name, text, _ = body.split(b"\0", 2)
                # A connection has one buffer, and names of its own.
                self._prepared[id(sent), name] = text.decode("utf-8", "replace")
            elif kind == b"B":
                yield self._prepared.get((id(sent), body.split(b"\0", 2)[1]), "?")
            elif kind == _QUERY:
                yield body[:-1].decode("utf-8", "replace")


def redis_round_trips(sent: bytearray) -> Iterator[str]:
    """Name the first of the commands that a client of Redis has sent at once."""
    commands = list(redis_commands(sent))
    yield from commands[:1]


def redis_commands(sent: bytearray) -> Iterator[str]:
    """Name the commands that a client of Redis sends."""
    while (found := _redis_command(sent)) is not None:
        words, size = found
        del sent[:size]
        yield b" ".join(word[:24] for word in words[:3]).decode("utf-8", "replace")


def _redis_command(sent: bytearray) -> tuple[list[bytes], int] | None:
    end = sent.find(b"\r\n")
    if end < 0:
        return None
    words: list[bytes] = []
    for _ in range(int(sent[1:end])):
        start = end + 2
        end = sent.find(b"\r\n", start)
        if end < 0:
            return None
        size = int(sent[start + 1 : end])
        if len(sent) < end + 4 + size:
            return None
        words.append(bytes(sent[end + 2 : end + 2 + size]))
        end += 2 + size
    return words, end + 2


def http_requests(sent: bytearray) -> Iterator[str]:
    """Name the requests that a client sends over HTTP/1.1."""
    while (end := sent.find(b"\r\n\r\n")) >= 0:
        first, *lines = bytes(sent[:end]).split(b"\r\n")
        headers = {
            name.strip().lower(): value for name, _, value in (x.partition(b":") for x in lines)
        }
        size = end + 4 + int(headers.get(b"content-length", b"0"))
        if len(sent) < size:
            return
        del sent[:size]
        yield first.rpartition(b" ")[0].decode("utf-8", "replace")


class CountingProxy:
    """Pass everything on to a port of this host, and note what counts of it.

    Args:
        port: The server's port.
        parser: Names what counts.

    """

    def __init__(self, port: int, parser: Parser) -> None:
        self.server_port: int = port
        self._server = ("127.0.0.1", port)
        self._parser = parser
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._seen: list[str] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def count(self, parser: Parser) -> None:
        """Count by another parser, on connections that are made from now on."""
        self._parser = parser

    def take(self) -> list[str]:
        """Return what was counted since the last call."""
        with self._lock:
            seen, self._seen = self._seen, []
        return seen

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._server) as far:
            for line in (near, far):
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_pass_on, args=(far, near), daemon=True)
            back.start()
            sent, parser = bytearray(), self._parser
            with contextlib.suppress(OSError):
                while data := near.recv(1 << 18):
                    sent += data
                    counted = list(parser(sent))
                    with self._lock:
                        self._seen += counted
                    far.sendall(data)
            _shut(far)
            back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 18):
            target.sendall(data)
    _shut(target)


def _shut(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
