"""``perdure serve``: an agent with an HTTP API; ``inspect``: a page to look at sessions."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from perdure._lib.lazy import import_extra
from perdure.autosave.options import Shutdown
from perdure.cli.access import existing, managed
from perdure.cli.output import StoreOption, days, note, print_line, say
from perdure.errors import ConfigError
from perdure.session.retention import Retention

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from perdure.serve.access import Token


VARIABLE = "PERDURE_TOKENS"
ABOVE_0 = Parameter(validator=validators.Number(gt=0))


def serve(
    agent: Annotated[str, Parameter(name="AGENT")],
    /,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, ABOVE_0] = 8000,
    tokens: Path | None = None,
    allow_host: tuple[str, ...] = (),
    allow_origin: tuple[str, ...] = (),
    max_body: Annotated[int, ABOVE_0] = 1024 * 1024,
    max_connections: Annotated[int | None, ABOVE_0] = None,
    request_timeout: Annotated[float, ABOVE_0] = 15.0,
    keep: Annotated[float, ABOVE_0] = 30.0,
    older_than: str | None = None,
    grace: float = 5.0,
    deadline: float = 20.0,
    where: StoreOption = StoreOption(),  # noqa: B008  # frozen
) -> int:
    """Serve an agent over HTTP.

    Until SIGTERM or Ctrl-C; then it saves, and exits with 0. Several of these may share a store
    on PostgreSQL, Redis or S3.

    Args:
        agent: The agent, as module:name: an AgentConfig, or a function that takes an agent's id
            and returns one.
        host: The address to listen on. Other than loopback addresses need tokens.
        port: The port to listen on.
        tokens: A file of bearer tokens, in JSON. Default: what PERDURE_TOKENS holds, or none.
        allow_host: A name that the Host header may have; "*" for any. Default: its own.
        allow_origin: A site whose pages may send requests, as https://name. Default: none.
        max_body: Bytes that a request's body may have.
        max_connections: Requests at a time, and agents that stay open.
        request_timeout: Seconds for a request to come in full, and for a client to read on.
        keep: Seconds for which an unused agent stays open.
        older_than: Forget sessions that were not used for this long.
        grace: Seconds that turns have to end at SIGTERM; then half answers are kept.
        deadline: Seconds that saving may take after that.

    """
    for package in ("starlette", "uvicorn"):
        import_extra(package, used_by="perdure serve", name=package, extra="serve")
    from perdure.asgi.browsers import LOOPBACK
    from perdure.serve.access import Access
    from perdure.serve.api import AgentServer
    from perdure.serve.connections import ConnectionLimits, connection_limit
    from perdure.serve.server import (
        load_source,
        require_tokens,
        serve as serve_until_stopped,
    )

    given = _tokens(tokens)
    is_any = given is not None and host in {"0.0.0.0", "::"}  # noqa: S104  # a comparison
    names = ("*",) if is_any else (*LOOPBACK, host)
    access = Access(given, hosts=allow_host or names, origins=allow_origin)
    require_tokens(host, access)
    most = connection_limit(max_connections)
    server = AgentServer(
        load_source(agent),
        where.store,
        access=access,
        keep=keep,
        max_body=max_body,
        max_requests=most,
        grace=grace,
        retention=None if older_than is None else Retention(expire_days=days(older_than)),
        shutdown=Shutdown(deadline=deadline, turn_grace=min(grace, deadline)),
    )
    note(f"serving {agent} on http://{host}:{port}")
    connections = ConnectionLimits(most=most, timeout=request_timeout)
    serve_until_stopped(server, host=host, port=port, grace=grace, connections=connections)
    return 0


def _tokens(file: Path | None) -> tuple[Token, ...] | None:
    from perdure.serve.access import read_tokens

    if file is None:
        text = os.environ.get(VARIABLE)
        return None if text is None else read_tokens(text)
    try:
        with file.open(encoding="utf-8") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"--tokens {file}: {reason}: name a file of tokens that can be read",
            option="tokens",
        ) from error
    tokens = read_tokens(text)
    if sys.platform == "win32":
        return tokens
    cure = f"chmod 600 {shlex.quote(str(file))}"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"--tokens {file}: other users may write to it (mode {mode:04o}), and let in whom they "
            f"like: {cure}, and look at what is in it",
            option="tokens",
            mode=mode,
        )
    if mode & (stat.S_IRGRP | stat.S_IROTH) and any(token.token for token in tokens):
        note(f"other users may read the tokens in {file} (mode {mode:04o}): {cure}, or use sha256")
    return tokens


# ``perdure inspect``: a web page on this machine to look at a store's sessions


async def inspect(
    url: Annotated[str | None, Parameter(name="URL")] = None,
    /,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=validators.Number(gte=0, lt=65536))] = 0,
    allow_changes: bool = False,
    where: StoreOption = StoreOption(),  # noqa: B008  # frozen
) -> int:
    """Serve a web page to look at the sessions of a store, until Ctrl-C.

    Prints the page's address, with a new token; without it, no one sees anything. It reads
    without a lease, also while a program writes.

    Args:
        url: The store, as with --store.
        host: The address to listen at, which browsers reach it by. Anything but this machine is
            not encrypted: better forward the port with ssh.
        port: The port to listen at; 0 for any that is free.
        allow_changes: Let who has the address also roll back, fork, rebuild and forget.

    """
    if url is not None and where.store is not None:
        raise ConfigError("the store is given twice, as URL and with --store: give it once")
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104  # refused
        raise ConfigError(
            f"--host {host!r} is no address of a browser's: give the one that it will use",
            option="host",
            value=host,
        )
    about = {"used_by": "perdure inspect", "name": "uvicorn", "extra": "inspector"}
    uvicorn = import_extra("uvicorn", **about)
    from perdure.inspector.application import app

    token = secrets.token_urlsafe(24)
    name = f"[{host}]" if ":" in host else host
    async with managed(existing(url or where.store), write=allow_changes) as sessions:
        served: ASGIApp = app(sessions, token=token, hosts=[name], allow_changes=allow_changes)
        config = uvicorn.Config(
            served, log_level="warning", access_log=False, lifespan="off", server_header=False
        )
        with _listening(host, port) as sock:
            address = f"http://{name}:{sock.getsockname()[1]}/?token={token}"
            if where.json:
                print_line({"address": address})
            else:
                say(address)
                note("open it in a browser; Ctrl-C ends it")
            await uvicorn.Server(config).serve(sockets=[sock])
    return 0


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen()  # a browser that is quicker than the server waits
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen at {host} port {port}: {error.strerror}; "
            "choose another --host or --port",
            option="port",
            value=port,
        ) from error
    return sock
