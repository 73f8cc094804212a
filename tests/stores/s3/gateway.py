"""A gateway before an S3 server, in this process, that can lose answers and make up others."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

Fault = Callable[[str, str], "int | tuple[int, str] | None"]
"""From method and path: None to pass it on, a status with a code to answer so instead,
``LOST`` to pass it on and lose the answer, ``DEAF`` to say that it was done."""

LOST = -1
DEAF = -2


class Gateway:
    """Listens on a port of its own; ``fault`` decides about each request."""

    def __init__(self, port: int) -> None:
        self.fault: Fault = lambda method, path: None
        self.seen: list[tuple[str, str]] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                gateway.seen.append((self.command, self.path))
                fault = gateway.fault(self.command, self.path)
                if isinstance(fault, tuple):
                    self._answer(*fault)
                    return
                if fault == DEAF:
                    self._done()
                    return
                status, headers, data = forward(port, self, body)
                if fault == LOST:
                    self.close_connection = True
                    return
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                        self.send_header(name, value)
                length = {k.lower(): v for k, v in headers}.get("content-length", "0")
                size = length if self.command == "HEAD" else str(len(data))
                if status not in (204, 304):
                    self.send_header("Content-Length", size)
                self.end_headers()
                self.wfile.write(data)

            def _answer(self, status: int, code: str) -> None:
                data = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
                self.send_response_only(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _done(self) -> None:
                self.send_response_only(200)
                self.send_header("ETag", f'"{len(gateway.seen)}"')
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def forward(
    port: int, request: BaseHTTPRequestHandler, body: bytes
) -> tuple[int, list[tuple[str, str]], bytes]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        link.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            link.putheader(name, value)
        link.endheaders(body)
        answer = link.getresponse()
        return answer.status, answer.getheaders(), answer.read()
    finally:
        link.close()
