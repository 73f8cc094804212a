"""Connection to an MCP server: its address, and its life from start to end in a task of its own.

The protocol's client opens cancel scopes. They are entered and left in the host's task, never in
a caller's, so a connection may be opened in an agent's bootstrap and closed from anywhere.
A connection that has ended stays so: its server makes another.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import PurePath
from typing import Any, Final, Self, TextIO, final
from urllib.parse import urlsplit

import anyio

from perdure.agent.tools import causes_of
from perdure.records.values import REDACTED, redact

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
        self.error: BaseException | None = None
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
            self.error = causes_of(error)[0]
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
    """A stream of messages that reports when it is at its end."""

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


def _never_reached(error: BaseException | None) -> bool:
    """Whether no server was there to take a request."""
    return any(kind.__name__ == "ConnectError" for kind in type(error).__mro__)


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
        return "\n".join(map(shown_line, self._lines))

    def _read(self, fd: int) -> None:
        with open(fd, encoding="utf-8", errors="replace") as pipe:
            while line := pipe.readline(_LONGEST):  # one that does not end is read in pieces
                if line.strip():
                    self._lines.append(line.rstrip())


# Address of a server: a command that is run, or a URL, and how to speak to it


CONNECT_TIMEOUT: Final = 30.0
SILENCE: Final = 300.0
"""Seconds that a server at a URL may say nothing while it works."""
_PASSWORD: Final = re.compile(r"(://[^/@\s:]*:)[^/@\s]+@")
_NAMED: Final = re.compile(r"([A-Za-z][\w.-]*)[\"']?\s*[:=]\s*(?=\S)")
_BEARER: Final = re.compile(r"(?i)\b((?:bearer|basic) )\S+")


@final
class Command:
    """A command, spoken to by its standard input and output.

    Args:
        words: The program and its arguments.
        env: Environment variables besides PATH, HOME and the like.
        cwd: Where it runs.

    """

    failed: Final = "did not start"
    """What to say if it was not reached."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self._words = list(words)
        self._env, self._cwd = env, cwd
        self._stderr: StderrTail | None = None

    @property
    def name(self) -> str:
        """What to call a server of no other name."""
        return PurePath(self._words[0]).name

    def __str__(self) -> str:
        return shown_command(self._words)

    @contextlib.asynccontextmanager
    async def transport(self) -> AsyncIterator[tuple[Any, Any]]:
        """Yield a stream to read from and one to write to."""
        from mcp import StdioServerParameters, stdio_client

        self._stderr = StderrTail()
        parameters = StdioServerParameters(
            command=self._words[0],
            args=self._words[1:],
            env=None if self._env is None else dict(self._env),
            cwd=None if self._cwd is None else os.fspath(self._cwd),
        )
        with self._stderr.pipe as pipe:
            async with stdio_client(parameters, errlog=pipe) as streams:
                pipe.close()
                yield streams

    def why(self, error: BaseException) -> str:
        """Say why it was not reached."""
        if isinstance(error, FileNotFoundError):
            return f"there is no program {self._words[0]!r}: install it, or give its whole path"
        return str(error) or type(error).__name__

    @property
    def last_words(self) -> str:
        """What it wrote last, in a few lines without credentials, for people; mostly empty."""
        return "" if self._stderr is None else self._stderr.text


@final
class Address:
    """A URL, spoken to by streamable HTTP.

    Args:
        url: Where it listens.
        headers: HTTP headers; they are never shown.

    """

    failed: Final = "could not be reached"
    last_words: Final = ""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        self._url = url
        self._headers = dict(headers or {})

    @property
    def name(self) -> str:
        """See `Command`."""
        return urlsplit(self._url).hostname or self._url

    def __str__(self) -> str:
        url = urlsplit(self._url)
        return f"{url.scheme}://{url.hostname}:{url.port or ''}{url.path}"

    @contextlib.asynccontextmanager
    async def transport(self) -> AsyncIterator[tuple[Any, Any]]:
        """See `Command`."""
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        limits = httpx2.Timeout(CONNECT_TIMEOUT, read=SILENCE)
        async with (
            httpx2.AsyncClient(headers=self._headers, timeout=limits) as http,
            streamable_http_client(self._url, http_client=http) as streams,
        ):
            yield streams

    def why(self, error: BaseException) -> str:
        """See `Command`."""
        return f"nobody answers there as one: {error}"


def shown_command(words: Sequence[str]) -> str:
    """Return a command line for people, without what looks like a credential in it.

    >>> shown_command(["serve", "--api-key", "k", "--token=t", "db://me:pw@host/x"])
    'serve --api-key [redacted] --token=[redacted] db://me:[redacted]@host/x'
    """
    return " ".join(
        word if REDACTED in word else shlex.quote(word) for word in _without_credentials(words)
    )


def shown_line(line: str) -> str:
    """Return a line of a log for people: what follows the name of a credential is left out.

    >>> shown_line("GET db://me:pw@host/x Authorization: Bearer k")
    'GET db://me:[redacted]@host/x Authorization: [redacted]'
    """
    line = _PASSWORD.sub(rf"\g<1>{REDACTED}@", line)
    for named in _NAMED.finditer(line):
        if _is_credential(named[1], "a value"):
            return f"{line[: named.end()]}{REDACTED}"
    return _BEARER.sub(rf"\g<1>{REDACTED}", line)


def _without_credentials(words: Sequence[str]) -> Iterator[str]:
    is_next = False
    for word in words:
        name, given, value = word.partition("=")
        if is_next and not word.startswith("-"):
            yield REDACTED
        elif given and _is_credential(name, value):
            yield f"{name}={REDACTED}"
        else:
            yield _PASSWORD.sub(rf"\g<1>{REDACTED}@", word)
        is_next = word.startswith("-") and not given and _is_credential(word, "a value")


def _is_credential(name: str, value: str) -> bool:
    return bool(redact({name.lstrip("-"): value})[1])
