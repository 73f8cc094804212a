"""A pooler: many clients of a PostgreSQL server on few connections, as PgBouncer does it.

It knows just enough of the protocol: a client is let in at once and told a process that does not
exist; it is given a server connection for a transaction, or for as long as it stays. Connections
that were given back are given out again, the newest or the oldest first.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import socket
import struct
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Self

import psycopg
import pytest

SSL_REQUEST, CANCEL = 80877103, 80877102
TOLD = ("server_version", "client_encoding", "standard_conforming_strings", "DateStyle", "TimeZone")


class Pooler:
    """A pooler that listens on a port of its own.

    Args:
        conninfo: The server.
        mode: ``transaction`` or ``session``.
        size: How many server connections it has.
        oldest: Whether the one that was given back first is given out first.

    """

    def __init__(self, conninfo: str, mode: str, *, size: int = 4, oldest: bool = False) -> None:
        self._mode = mode
        self._oldest = oldest
        self._servers = [psycopg.connect(conninfo, autocommit=True) for _ in range(size)]
        self._wires = [socket.socket(fileno=os.dup(server.fileno())) for server in self._servers]
        for wire in self._wires:
            wire.setblocking(True)
        self._free = list(self._wires)
        self._changed = threading.Condition()
        self._clients: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self._clients, *self._wires):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:  # they see the end, and hold no socket that is closed below
            thread.join(10)
        for one in (self._listener, *self._clients, *self._wires):
            one.close()
        for server in self._servers:
            server.close()

    def settings(self, *names: str) -> set[tuple[str, ...]]:
        """Return what the server connections have set; no client may be there."""
        found = set()
        for server in self._servers:
            rows = [server.execute(f"SHOW {name}").fetchone() for name in names]
            found.add(tuple(row[0] for row in rows if row is not None))
        return found

    def _start(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._clients.append(client)
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        asked = 0  # how many requests have no answer yet
        try:
            name = self._let_in(client)
            while True:
                wires = [client] if server is None else [server, client]
                ready, _, _ = select.select(wires, [], [])
                kind, data = _message(ready[0])
                if ready[0] is client:
                    if kind == b"X":
                        return
                    if server is None:
                        server = self._take()
                        if name:
                            self._query(server, f"SET application_name = '{name}'")
                    server.sendall(_packed(kind, data))
                    asked += kind in b"QS"
                    continue
                client.sendall(_packed(kind, data))
                asked -= kind == b"Z"
                is_over = kind == b"Z" and data == b"I" and not asked
                if is_over and self._mode == "transaction" and server is not None:
                    self._give_back(server)
                    server = None
        except (OSError, EOFError):
            return
        finally:
            client.close()
            if server is not None:
                with contextlib.suppress(OSError, EOFError):
                    self._reset(server)
                self._give_back(server)

    def _let_in(self, client: socket.socket) -> str:
        """Let a client in, and return how it calls itself: its server connections are told."""
        while True:
            (size,) = struct.unpack("!i", _exactly(client, 4))
            body = _exactly(client, size - 4)
            (code,) = struct.unpack("!i", body[:4])
            if code == CANCEL:
                raise EOFError
            if code != SSL_REQUEST and code >> 16 == 3:
                break
            client.sendall(b"N")
        told = _packed(b"R", struct.pack("!i", 0))
        for name in TOLD:
            value = self._servers[0].info.parameter_status(name) or ""
            told += _packed(b"S", f"{name}\0{value}\0".encode())
        told += _packed(b"K", struct.pack("!ii", secrets.randbelow(1 << 30), 1))
        client.sendall(told + _packed(b"Z", b"I"))
        given = body[4:].decode().split("\0")
        return dict(zip(given[::2], given[1::2], strict=False)).get("application_name", "")

    def _reset(self, server: socket.socket) -> None:
        """Leave nothing of a session that has ended."""
        self._query(server, "ROLLBACK")
        self._query(server, "DISCARD ALL")

    def _query(self, server: socket.socket, query: str) -> None:
        server.sendall(_packed(b"Q", query.encode() + b"\0"))
        while _message(server)[0] != b"Z":
            pass

    def _take(self) -> socket.socket:
        with self._changed:
            while not self._free:
                self._changed.wait()
            return self._free.pop(0 if self._oldest else -1)

    def _give_back(self, server: socket.socket) -> None:
        with self._changed:
            self._free.append(server)
            self._changed.notify()


@contextlib.contextmanager
def reached(url: str, way: str) -> Iterator[str]:
    """Yield the URL of a database: as it is, for ``asyncpg``, through a ``pooler``, or both."""
    driver, _, pooler = way.partition(" ")
    if driver == "asyncpg":
        url = url.replace("postgresql:", "postgresql+asyncpg:")
    if not (pooler or driver == "pooler"):
        yield url
        return
    conninfo = url.replace("+asyncpg", "")
    with Pooler(conninfo, "transaction", size=2, oldest=True) as running:
        yield re.sub(r"@[^/]*/", f"@127.0.0.1:{running.port}/", url)


_NEEDS_ASYNCPG = pytest.mark.skipif(find_spec("asyncpg") is None, reason="asyncpg is missing")
WAYS = (
    "direct",
    pytest.param("pooler", marks=pytest.mark.deep),
    pytest.param("asyncpg", marks=_NEEDS_ASYNCPG),
    pytest.param("asyncpg pooler", marks=[_NEEDS_ASYNCPG, pytest.mark.deep]),
)


def _packed(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("!i", len(data) + 4) + data


def _message(wire: socket.socket) -> tuple[bytes, bytes]:
    kind = _exactly(wire, 1)
    (size,) = struct.unpack("!i", _exactly(wire, 4))
    return kind, _exactly(wire, size - 4)


def _exactly(wire: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = wire.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
