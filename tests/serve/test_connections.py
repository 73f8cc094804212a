"""Connections that keep a server waiting end, and stop nobody else."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import uvicorn

from perdure.errors import ConfigError
from perdure.serve import connections
from tests.asgi.served import Served
from tests.source_tree import ROOT

SERVE = "perdure serve tests.serve.agents:quick --port {port}".split()
HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def start(*options: str) -> Served:
        servers.append(Served(*SERVE, *options, store=f"file:{tmp_path / 'store'}"))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def connect(server: Served, *sent: bytes, buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.settimeout(30)
    sock.connect(("127.0.0.1", server.port))
    for piece in sent:
        sock.sendall(piece)
    return sock


def rest(sock: socket.socket) -> bytes:
    """Return all that comes, up to the end that the server makes."""
    said = b""
    with sock:
        while True:
            try:
                piece = sock.recv(65536)
            except ConnectionError:
                return said
            if not piece:
                return said
            said += piece


def is_open(sock: socket.socket) -> bool:
    try:
        sock.setblocking(False)
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_a_request_that_does_not_come_in_full_ends(serve: Callable[..., Served]) -> None:
    server = serve("--request-timeout", "0.5")
    post = b"POST /agents/a/messages HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: 100\r\n\r\n"
    halves = [b"", b"GET /", b"GET /agents HTTP/1.1\r\n" + HOST, post, post + b'{"text": ']
    # Nor does what comes after a whole request, or after an answer that needed no body.
    whole = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
    halves += [whole + post, b"PUT /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: 9\r\n\r\n"]
    socks = [connect(server, half) for half in halves]
    said = [rest(sock) for sock in socks]
    assert [one.rpartition(b"HTTP/1.1 ")[2][:3] for one in said] == [
        *[b"408"] * 6,
        b"404",
    ]
    assert server.client.post("/agents/a/messages", json={"text": "a"}).status_code == 200
    assert "Traceback" not in server.stop()


def test_a_client_that_does_not_read_on_is_let_go(serve: Callable[..., Served]) -> None:
    server = serve("--request-timeout", "0.5", "--max-body", "3000000")
    for _ in range(3):
        server.client.post("/agents/a/messages", json={"text": "x" * 2_000_000})
    get = b"GET /agents/a/messages HTTP/1.1\r\n" + HOST + b"\r\n"
    server.client.close()
    sock = connect(server, get, buffer=4096)
    assert sock.recv(1) == b"H"  # connected is not accepted: only an answer shows the server has it
    process = psutil.Process(server.process.pid)
    end = time.monotonic() + 30
    with sock:
        while len(process.net_connections()) > 1 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(process.net_connections()) == 1  # which listens
        assert len(rest(sock)) < 6_000_000


@pytest.mark.parametrize("use_uvloop", [False, True])
@pytest.mark.parametrize("size", [40_000, 400_000])
@pytest.mark.parametrize(
    ("header", "then"),
    [
        (b"", b""),
        (b"Connection: close\r\n", b""),
        (b"", b"no request\r\n\r\n"),
        (b"", b"GET /9 HTTP/1.1\r\n" + HOST + b"\r\n"),
        (b"", b"GET /9"),
        (b"", None),  # it ends what it sends
    ],
)
def test_a_client_is_let_go_at_any_point_of_what_it_does_not_read(
    header: bytes, then: bytes | None, *, size: int, use_uvloop: bool
) -> None:
    async def leave_unread(uvicorn_server: Any, sock: socket.socket) -> None:
        sock.send(b"GET /%d HTTP/1.1\r\n" % size + HOST + header + b"\r\n")
        await until(lambda: uvicorn_server.server_state.total_requests)
        (connection,) = uvicorn_server.server_state.connections
        assert connection.transport.get_write_buffer_size() > 0
        if then is None:
            sock.shutdown(socket.SHUT_WR)
        else:
            sock.send(then)
        await until(lambda: not uvicorn_server.server_state.connections)

    with_little_buffers(leave_unread, timeout=0.2, use_uvloop=use_uvloop)


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_a_client_that_reads_slowly_gets_its_whole_answer(*, use_uvloop: bool) -> None:
    async def read_slowly(uvicorn_server: Any, sock: socket.socket) -> None:
        sock.send(b"GET /400000 HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
        begin, said = time.monotonic(), b""
        while True:
            await anyio.wait_readable(sock)
            piece = sock.recv(2048)
            if not piece:
                break
            said += piece
            await anyio.sleep(0.01)
        assert said.endswith(b"x" * 400_000)
        assert time.monotonic() - begin > 1  # longer than it may read nothing

    with_little_buffers(read_slowly, timeout=1, use_uvloop=use_uvloop)


@pytest.mark.parametrize("path", [b"messages", b"events"])
def test_a_client_that_does_not_read_on_holds_up_no_stop(
    path: bytes, serve: Callable[..., Served]
) -> None:
    server = serve("--grace", "1", "--max-body", "3000000")
    for _ in range(2):
        server.client.post("/agents/a/messages", json={"text": "x" * 2_900_000})
    get = b"GET /agents/a/" + path + b" HTTP/1.1\r\nLast-Event-ID: 0\r\n" + HOST + b"\r\n"
    with connect(server, get, buffer=4096) as sock:
        assert sock.recv(1) == b"H"
        errors = server.stop()
    assert server.process.returncode == 0
    assert "graceful shutdown exceeded" not in errors
    assert "Traceback" not in errors


async def answer_at_length(scope: Any, receive: Any, send: Any) -> None:
    """Answer with as many bytes as the path says."""
    size = int(scope["path"][1:])
    headers = [(b"content-length", b"%d" % size)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * size})


def with_little_buffers(
    client: Callable[[Any, socket.socket], Awaitable[None]], *, timeout: float, use_uvloop: bool
) -> None:
    """Run a client of a server, where the system holds next to nothing of what is unread."""

    async def serve(listener: socket.socket) -> None:
        with anyio.CancelScope(shield=True):  # a client that fails ends it like any other
            await server.serve([listener])

    protocol = connections.ConnectionLimits(timeout=timeout).protocol
    config = uvicorn.Config(
        answer_at_length,
        http=protocol,
        ws="none",
        lifespan="off",
        log_level="critical",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        with socket.socket() as listener, socket.socket() as sock:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            listener.bind(("127.0.0.1", 0))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve, listener)
                await until(lambda: server.started)
                sock.setblocking(False)
                sock.connect_ex(listener.getsockname())
                await anyio.wait_writable(sock)
                try:
                    with anyio.fail_after(10):
                        await client(server, sock)
                finally:
                    sock.close()
                    server.should_exit = True

    anyio.run(run, backend="asyncio", backend_options={"use_uvloop": use_uvloop})


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await anyio.sleep(0.01)


def test_silent_connections_make_room_for_others(serve: Callable[..., Served]) -> None:
    server = serve("--max-connections", "4")
    limits = (56, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
    silent = [connect(server, b"GET /") for _ in range(70)]
    try:
        for agent in ("a", "b", "c"):
            answer = server.client.post(f"/agents/{agent}/messages", json={"text": "a b"})
            assert answer.json()["text"] == "0 1"
        assert server.client.get("/readyz").json()["ready"] is True
        assert sum(map(is_open, silent)) <= 4 + connections.FOR_PROBES
    finally:
        for sock in silent:
            sock.close()
    assert "Traceback" not in server.stop()


def test_open_streams_leave_room_for_probes(serve: Callable[..., Served]) -> None:
    server = serve("--max-connections", "3")
    server.client.post("/agents/a/messages", json={"text": "a"})
    get = b"GET /agents/a/events HTTP/1.1\r\n" + HOST + b"\r\n"
    streams = [connect(server, get) for _ in range(3)]
    try:
        for stream in streams:
            assert stream.recv(100).startswith(b"HTTP/1.1 200")
        busy = server.client.get("/agents")
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
        assert server.client.get("/healthz").status_code == 200
    finally:
        for stream in streams:
            stream.close()


def test_connect_and_odd_headers_leave_no_traceback(serve: Callable[..., Served]) -> None:
    server = serve()
    for head, status in (
        (b"CONNECT /healthz HTTP/1.1\r\n" + HOST, b"405"),
        (b"CONNECT localhost:1 HTTP/1.1\r\n" + HOST, b"404"),
        (b"GET /healthz HTTP/1.1\r\n" + HOST + HOST, b"400"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost:80@evil\r\n", b"421"),
        (b"GET /agents/%FF HTTP/1.1\r\n" + HOST, b"400"),
        (b"GET /healthz HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"200"),
    ):  # fmt: skip
        sock = connect(server, head + b"Connection: close\r\n\r\n")
        assert rest(sock)[9:12] == status, head
    assert "Traceback" not in server.stop()


@pytest.mark.parametrize(
    ("descriptors", "given", "limit"),
    [(256, None, 64), (1024, None, 256), (10**6, None, 4096), (None, None, 4096), (256, 10, 10)],
)
def test_a_quarter_of_the_descriptors_is_for_connections(
    descriptors: int | None, given: int | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "descriptor_limit", lambda: descriptors)
    assert connections.connection_limit(given) == limit


def test_more_connections_than_descriptors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "descriptor_limit", lambda: 256)
    with pytest.raises(ConfigError, match="are enough for 64"):
        connections.connection_limit(65)


def test_the_fuzzer_finds_no_answer_that_it_does_not_expect() -> None:
    command = [sys.executable, "-m", "tests.serve.fuzz", "--requests", "30"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
