"""The process that serves: an import path, uvicorn, and an exit status of 0 after SIGTERM."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

from perdure._lib.lazy import import_extra
from perdure.agent import AgentConfig
from perdure.asgi.browsers import LOOPBACK
from perdure.errors import ConfigError
from perdure.serve.access import Access
from perdure.serve.api import AgentServer, Source
from perdure.serve.connections import ConnectionLimits

uvicorn: Any = import_extra("uvicorn", used_by="perdure serve", name="uvicorn", extra="serve")

SPARE: Final = 8.0
"""Seconds that requests have to end after turns were cut; a thousand streams on a busy machine
took four. Later uvicorn cuts them, and logs a traceback for each."""


KEEP_ALIVE: Final = 5
"""Seconds for which a connection stays open for another request."""
MAX_HEADER: Final = 16 * 1024
"""Bytes of a request's header."""


def load_source(path: str) -> Source:
    """Return the agent that an import path names: ``module:name``, from the current folder too.

    Raises:
        ConfigError: There is no such thing, or it is no agent.

    """
    module, _, name = path.partition(":")
    if not (module and name):
        raise ConfigError(f"invalid agent {path!r}: give module:name", option="agent")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        source: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # the module itself lacks something
            raise
        raise ConfigError(
            f"invalid agent {path!r}: there is no module {module!r}: run this "
            "where it can be imported, or set PYTHONPATH",
            option="agent",
        ) from None
    for part in name.split("."):
        source = getattr(source, part, None)
        if source is None:
            raise ConfigError(
                f"invalid agent {path!r}: there is no {part!r} there: name an AgentConfig, or a "
                "function that returns one",
                option="agent",
            )
    if not (isinstance(source, AgentConfig) or callable(source)):
        raise ConfigError(
            f"invalid agent {path!r}: {name} is an AgentConfig, or a function that takes an "
            "agent's id and returns one",
            option="agent",
        )
    found: Source = source
    return found


def require_tokens(host: str, access: Access) -> None:
    """Refuse to be open to a network without tokens.

    Raises:
        ConfigError: It would be.

    """
    if access.is_open and host not in LOOPBACK:
        raise ConfigError(
            f"--host {host} can be reached from other machines: give --tokens FILE or the variable "
            "PERDURE_TOKENS, or serve on 127.0.0.1",
            option="host",
        )


def serve(
    server: AgentServer,
    *,
    host: str,
    port: int,
    grace: float,
    connections: ConnectionLimits | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, and return when everything is saved."""
    connections = connections or ConnectionLimits()
    config = uvicorn.Config(
        server.app,
        host=host,
        port=port,
        http=connections.protocol,
        ws="none",
        backlog=connections.backlog,
        timeout_keep_alive=KEEP_ALIVE,
        h11_max_incomplete_event_size=MAX_HEADER,
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(grace + SPARE) + 1,
    )
    _Server(config).run()


class _Server(uvicorn.Server):  # type: ignore[misc]  # imported when used
    """A uvicorn that does not raise the signal again which it was stopped by."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
