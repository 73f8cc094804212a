"""``perdure serve``: an agent behind an HTTP API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from perdure._lib.lazy import import_extra
from perdure.autosave.options import Shutdown
from perdure.cli.output import StoreOption, note
from perdure.errors import ConfigError

if TYPE_CHECKING:
    from perdure.serve.access import Token

VARIABLE = "PERDURE_TOKENS"


def serve(
    agent: Annotated[str, Parameter(name="AGENT")],
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    tokens: Path | None = None,
    allow_host: tuple[str, ...] = (),
    max_body: int = 1024 * 1024,
    keep: float = 30.0,
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
        allow_host: A name that the Host header may have; "*" for any. Default: the host, and the
            names of this machine's loopback.
        max_body: Bytes that a request's body may have.
        keep: Seconds for which an agent that nobody uses stays open.
        grace: Seconds that turns have to end at SIGTERM; then half answers are kept.
        deadline: Seconds that saving may take after that.

    """
    for name, value in (("--port", port), ("--max-body", max_body), ("--keep", keep)):
        if value <= 0:
            raise ConfigError(f"invalid {name} {value:g}: give a number above 0")
    for package in ("starlette", "uvicorn"):
        import_extra(package, used_by="perdure serve", name=package, extra="serve")
    from perdure.serve.access import LOOPBACK, Access
    from perdure.serve.api import AgentServer
    from perdure.serve.server import load_source, require_tokens, serve as serve_until_stopped

    names = ("*",) if host in {"0.0.0.0", "::"} else (*LOOPBACK, host)  # noqa: S104  # a comparison
    access = Access(_tokens(tokens), hosts=allow_host or names)
    require_tokens(host, access)
    server = AgentServer(
        load_source(agent),
        where.store,
        access=access,
        keep=keep,
        max_body=max_body,
        grace=grace,
        shutdown=Shutdown(deadline=deadline, turn_grace=min(grace, deadline)),
    )
    note(f"serving {agent} on http://{host}:{port}")
    serve_until_stopped(server, host=host, port=port, grace=grace)
    return 0


def _tokens(file: Path | None) -> tuple[Token, ...] | None:
    from perdure.serve.access import read_tokens

    text = os.environ.get(VARIABLE) if file is None else file.read_text(encoding="utf-8")
    return None if text is None else read_tokens(text)
