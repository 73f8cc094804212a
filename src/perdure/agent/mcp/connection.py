"""One connection to an MCP server, from its start to its end, in a task of its own.

The protocol's client opens cancel scopes. They are entered and left in the host's task, never in
a caller's, so a connection may be opened in an agent's bootstrap and closed from anywhere.
A connection that has ended stays so: its server makes another.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Self, TextIO, final

import anyio

Transport = Callable[[], AbstractAsyncContextManager[tuple[Any, Any]]]
"""Makes what yields a stream to read from and one to write to."""


class ConnectionGoneError(Exception):
    """The connection has ended before the answer came.

    Args:
        asked: Whether the server may have got the request.

    """

    def __init__(self, *, asked: bool) -> None:
        super().__init__("the connection has ended")
        self.asked: bool = asked


@final
class Connection:
    """One life of a server, as a client sees it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._client: Any = None
        self._over = anyio.Event()
        self._ready = anyio.Event()
        self._ended = anyio.Event()
        self._opening = anyio.CancelScope()
        self.error: Exception | None = None
        """Why it could not be made, or has ended; None if the server just went away."""

    @property
    def is_open(self) -> bool:
        """Whether the server is there, as far as can be seen."""
        return self._client is not None and not self._over.is_set()

    async def run(self) -> None:
        """Hold the connection until the server goes, or `aclose` is called."""
        from mcp import Client

        try:
            with self._opening:
                async with Client(self._watched(), cache=None) as client:
                    self._client = client
                    self._ready.set()
                    await self._over.wait()
        except Exception as error:  # noqa: BLE001  # told to whoever waits
            self.error = _innermost(error)
        finally:
            self._over.set()
            self._ready.set()
            self._ended.set()

    async def opened(self) -> None:
        """Wait until it is open.

        Raises:
            ConnectionGoneError: It could not be opened: see ``error``.

        """
        await self._ready.wait()
        if self._client is None:
            raise ConnectionGoneError(asked=False)

    async def ask(self, ask: Callable[[Any], Any]) -> Any:
        """Return what a function of the client returns.

        Raises:
            ConnectionGoneError: The server went away, before or meanwhile.

        """
        if not self.is_open:
            raise ConnectionGoneError(asked=False)
        answers: list[Any] = []
        errors: list[Exception] = []
        async with anyio.create_task_group() as group:
            group.start_soon(self._cancel_at_end, group.cancel_scope)
            try:
                answers.append(await ask(self._client))
            except Exception as error:  # noqa: BLE001  # raised below, outside of the group
                errors.append(error)
            group.cancel_scope.cancel()
        if answers:
            return answers[0]
        if errors and not _is_end(errors[0]):
            raise errors[0]
        await self.aclose()  # only then it is known why
        raise ConnectionGoneError(asked=not _never_reached(self.error))

    async def _cancel_at_end(self, scope: anyio.CancelScope) -> None:
        await self._ended.wait()
        scope.cancel()

    async def aclose(self) -> None:
        """End it, and wait for its end."""
        self._over.set()
        if self._client is None:
            self._opening.cancel()
        await self._ended.wait()

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[tuple[Any, Any]]:
        async with self._transport() as (reading, writing):
            yield _EndAwareStream(reading, self._over), writing


class _EndAwareStream:
    """A stream of messages that tells when it is at its end."""

    def __init__(self, stream: Any, over: anyio.Event) -> None:
        self._stream = stream
        self._over = over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> _EndAwareStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except BaseException:
            self._over.set()
            raise

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> Any:
        return await self._stream.__aexit__(*exc)


def _is_end(error: Exception) -> bool:
    from mcp.types import CONNECTION_CLOSED

    return getattr(error, "code", None) == CONNECTION_CLOSED


def _never_reached(error: Exception | None) -> bool:
    """Whether nobody was there to take a request."""
    return any(kind.__name__ == "ConnectError" for kind in type(error).__mro__)


def _innermost(error: Exception) -> Exception:
    """Return what task groups have wrapped, if it is one error."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


# The last lines that a process has written to its standard error


_KEPT: Final = 20
_LONGEST: Final = 500


@final
class StderrTail:
    """Read a pipe to its end in a thread, and keep the last lines of it.

    The thread ends when the last process that has the pipe open ends.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)
        reading, writing = os.pipe()
        self.pipe: TextIO = os.fdopen(writing, "w")
        """For the process to write to; close it once the process has it."""
        self._thread = threading.Thread(
            target=self._read, args=(reading,), name="perdure stderr", daemon=True
        )
        self._thread.start()

    @property
    def text(self) -> str:
        """What was written last, in a few lines; waits a moment for what is on its way."""
        self._thread.join(0.2)
        return "\n".join(self._lines)

    def _read(self, fd: int) -> None:
        with open(fd, encoding="utf-8", errors="replace") as pipe:
            while line := pipe.readline(_LONGEST):  # one that does not end is read in pieces
                if line.strip():
                    self._lines.append(line.rstrip())
