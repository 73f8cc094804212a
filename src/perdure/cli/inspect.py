"""``perdure inspect``: a web page on this machine to look at a store's sessions."""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from perdure._lib.lazy import import_extra
from perdure.cli.access import existing, managed
from perdure.cli.output import StoreOption, note, print_line, say
from perdure.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp


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

    Prints the page's address, with a new token; without it, nobody sees anything. It reads
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
            f"cannot listen at {host} port {port}: {error.strerror}; choose another --port",
            option="port",
            value=port,
        ) from error
    return sock
