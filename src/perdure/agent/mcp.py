"""MCP servers as an agent has them: started with it, asked for tools, made again when they die.

A server is a command that is run, spoken to by its standard input and output, or a URL
(streamable HTTP). A call that finds it dead starts it once more. A call during which it dies
may have taken effect, so it is not made again unless a trusted server says that this does no
harm.

The protocol's client opens cancel scopes. They are entered and left in the host's task, never in
a caller's, so a connection may be opened in an agent's bootstrap and closed from anywhere.
A connection that has ended stays so: its server makes another.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import shlex
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import PurePath
from typing import Any, Final, Literal, Self, TextIO, final
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from perdure._lib.tasks import Host
from perdure.agent.tools import Tool, causes_of
from perdure.errors import (
    ConfigError,
    InvalidArgumentError,
    MissingExtraError,
    ToolOutcomeUnknownError,
    ToolServerError,
)
from perdure.records.values import REDACTED, redact

_log = logging.getLogger("perdure")

START_TIMEOUT: Final = 30.0
CALL_TIMEOUT: Final = 300.0


@final
class McpServer:
    """A server of tools: a command, or a URL.

        McpServer("uvx mcp-server-time")
        McpServer(url="https://example.org/mcp", headers={"Authorization": token})

    Agents may share one: it is started with the first, and stopped with the last. ``async with``
    starts and stops it, too.

    Args:
        command: What to run: a command line, or the program and its arguments.
        url: Where it listens, instead of a command.
        name: What messages call it; by default the program or the host.
        prefix: What its tools' names begin with, where two servers have tools of one name.
        only: The tools to offer, by the server's names; None for all of them.
        env: Environment variables for the command; besides these it gets PATH, HOME and the like.
        cwd: Where the command runs.
        headers: HTTP headers for the URL; they are never shown.
        trusted: Whether to believe what it says of its tools: that one just reads, or does nothing
            more the second time (``readOnlyHint``, ``idempotentHint``), and so may be called again
            when the outcome of a call is unknown.
        start_timeout: Seconds that it may take to start.
        call_timeout: Seconds that a call may take; None for as long as the agent's
            ``tool_timeout`` lets it.

    Raises:
        ConfigError: There is neither a command nor a URL, or both.
        MissingExtraError: The ``mcp`` package is not installed.

    """

    def __init__(
        self,
        command: str | Sequence[str] | None = None,
        *,
        url: str | None = None,
        name: str | None = None,
        prefix: str = "",
        only: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        headers: Mapping[str, str] | None = None,
        trusted: bool = False,
        start_timeout: float = START_TIMEOUT,
        call_timeout: float | None = CALL_TIMEOUT,
    ) -> None:
        words = shlex.split(command) if isinstance(command, str) else list(command or ())
        if bool(words) == bool(url):
            raise InvalidArgumentError("an MCP server is a command or a URL: give one of them")
        if importlib.util.find_spec("mcp") is None:
            raise MissingExtraError(
                "MCP servers need the package mcp: pip install 'perdure[mcp]'", extra="mcp"
            )
        self._place: Address | Command = (
            Address(url, headers=headers) if url else Command(words, env=env, cwd=cwd)
        )
        self.name: str = name or self._place.name
        self._prefix, self._only, self._trusted = prefix, only, trusted
        self._start_timeout, self._call_timeout = start_timeout, call_timeout
        self._users = 0
        self._lock = anyio.Lock()
        self._host: Host | None = None
        self._connection: Connection | None = None
        self._offered: tuple[Any, ...] = ()
        self.starts: int = 0
        """Number of starts, or of connections."""

    @classmethod
    def of(cls, given: McpServer | str) -> McpServer:
        """Return a server for a command line or a URL; a server as it is."""
        if isinstance(given, McpServer):
            return given
        return cls(url=given) if given.startswith(("http://", "https://")) else cls(given)

    def __repr__(self) -> str:
        return f"<McpServer {self}>"

    def __str__(self) -> str:
        return f"{self.name!r} ({self._place})"

    @property
    def is_connected(self) -> bool:
        """True if it is there, as far as can be seen; a call makes it again if not."""
        return self._connection is not None and self._connection.is_open

    async def __aenter__(self) -> McpServer:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start it, or count one user more, and learn its tools.

        Raises:
            ToolServerError: It does not start, or does not answer.

        """
        if self._users == 0:
            self._lock = anyio.Lock()  # the last user may have lived in another loop
        self._users += 1
        try:
            await self._connected()
        # No user any more, even if cancelled: else the last one would never stop it.
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.aclose()
            raise

    async def aclose(self) -> None:
        """Count one user less; stop it with the last, and do nothing without any."""
        if self._users == 0:
            return
        self._users -= 1
        if self._users > 0:
            return
        # Taken before the first await: a user who comes meanwhile makes new ones.
        host, connection, self._host, self._connection = self._host, self._connection, None, None
        if connection is not None:
            await connection.aclose()
        if host is not None:
            await host.aclose()

    def tools(self) -> list[Tool]:
        """Return its tools, once it is started.

        Raises:
            ConfigError: ``only`` names a tool that it does not have.

        """
        known = [offered_tool.name for offered_tool in self._offered]
        missing = [name for name in self._only or () if name not in known]
        if missing:
            raise ConfigError(
                f"MCP server {self} has no tool {missing[0]!r}; it has: "
                f"{', '.join(known) or 'none'}",
                server=self.name,
                tool=missing[0],
            )
        tools: list[Tool] = []
        for offered in self._offered:
            if self._only is not None and offered.name not in self._only:
                continue
            effect = effect_of(offered.annotations, trusted=self._trusted)
            made = Tool(
                partial(self.call, offered.name, repeatable=effect != "ask"),
                name=tool_name(offered.name, self._prefix),
                description=offered.description or offered.title or "",
                parameters=offered.input_schema,
                effect=effect,
            )
            tools.append(made)
        return tools

    async def call(self, tool: str, arguments: dict[str, Any], *, repeatable: bool = False) -> Any:
        """Call a tool by the server's name for it, and return what it answers.

        Args:
            repeatable: Whether to call it once more if the server dies meanwhile.

        Raises:
            ToolServerError: The tool failed, or the server died; the message says which.

        """
        again = False
        while True:
            try:
                return await self._call(tool, arguments, repeatable=repeatable)
            except ConnectionGoneError as gone:
                # It may be made once more if nothing was done, or if that does no harm.
                if again or (gone.asked and not repeatable):
                    self._log_end()
                    raise self._died(tool, is_unknown=gone.asked and not repeatable) from gone
            again = True

    def _died(self, tool: str, *, is_unknown: bool) -> ToolServerError:
        facts = {"server": self.name, "tool": tool}
        if is_unknown:
            return ToolOutcomeUnknownError(
                f"MCP server {self} died while it ran {tool!r}: whether that has taken effect is "
                "unknown, and it was not called again",
                **facts,
            )
        return ToolServerError(f"MCP server {self} died twice while it ran {tool!r}", **facts)

    async def _call(self, tool: str, arguments: dict[str, Any], *, repeatable: bool) -> Any:
        connection = await self._connected()
        try:
            with anyio.fail_after(self._call_timeout):
                result = await connection.ask(lambda client: client.call_tool(tool, arguments))
        except ConnectionGoneError:
            raise
        except Exception as error:
            code = getattr(error, "code", None)
            if code == _INVALID and "Session terminated" in str(error):
                # A server at a URL that was restarted does not know this connection.
                await connection.aclose()
                raise ConnectionGoneError(asked=False) from error
            raise self._without_result(tool, error, repeatable=repeatable) from error
        failure = failure_of(result)
        if failure is not None:
            raise ToolServerError(
                f"{tool} of MCP server {self.name!r} failed: {failure}", server=self.name, tool=tool
            )
        return value_of(result)

    def _without_result(self, tool: str, error: Exception, *, repeatable: bool) -> ToolServerError:
        facts = {"server": self.name, "tool": tool}
        code = getattr(error, "code", None)
        if isinstance(code, int) and code not in _UNSURE:  # so it was certainly not made
            return ToolServerError(f"MCP server {self} refused {tool!r}: {error}", **facts)
        reason = f"has failed while it ran {tool!r}: {error}"
        if isinstance(error, TimeoutError):
            reason = (
                f"has not answered {tool!r} within {self._call_timeout:g} s: look what it does, or "
                "give a longer call_timeout"
            )
        if repeatable:
            return ToolServerError(f"MCP server {self} {reason}", **facts)
        return ToolOutcomeUnknownError(
            f"MCP server {self} {reason}; whether that has taken effect is unknown", **facts
        )

    async def _connected(self) -> Connection:
        """Return the connection, made again if it has ended."""
        if self._users <= 0:
            raise ToolServerError(
                f"MCP server {self} is not started: use `async with server`", server=self.name
            )
        # Of the calls that found it dead, one makes the connection, and the others wait for that.
        async with self._lock:
            if self._connection is None or not self._connection.is_open:
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> Connection:
        await anyio.to_thread.run_sync(importlib.import_module, "mcp")  # a second, the first time
        if self._host is None:
            self._host = Host()
            await self._host.start()
        connection = Connection(self._place.transport)
        self._host.spawn(connection.run)
        try:
            with anyio.fail_after(self._start_timeout):
                await connection.ready.wait()
                listed = await connection.ask(_list_tools)
        # Even if cancelled: the process that was started must not be left running.
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await connection.aclose()
            if isinstance(error, ConnectionGoneError | TimeoutError):
                raise self._not_started(connection.error or error) from error
            raise
        self.starts += 1
        self._offered = tuple(listed)
        return connection

    def _not_started(self, cause: BaseException) -> ToolServerError:
        place, late = self._place, f"it has not answered within {self._start_timeout:g} s"
        message = f"MCP server {self} {place.failed}: "
        message += late if isinstance(cause, TimeoutError) else place.why(cause)
        if self.starts:  # a model reads it
            self._log_end()
        elif place.last_words:
            message += f"; it last wrote:\n{place.last_words}"
        return ToolServerError(message, server=self.name)

    def _log_end(self) -> None:
        """Log what a server wrote last: it may say anything, so a model does not get it."""
        if words := self._place.last_words:
            _log.warning("MCP server %s ended; it last wrote:\n%s", self, words)


async def _list_tools(client: Any) -> list[Any]:
    listed: list[Any] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        listed.extend(page.tools)
        cursor = page.next_cursor
        if not cursor:
            return listed


# What servers say of their tools, and what comes of calls, as perdure's values: pure


_UNFIT: Final = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST: Final = 64
_UNSURE: Final = frozenset({-32603, -32001})
"""Codes of JSON-RPC for what went wrong inside of the server, or on its way: 5xx, time-outs."""
_INVALID: Final = -32600


def tool_name(name: str, prefix: str = "") -> str:
    """Return what a model calls a tool: providers take letters, digits, ``_`` and ``-``.

    >>> tool_name("files.read", "disk_")
    'disk_files_read'
    """
    fit = _UNFIT.sub("_", prefix + name)
    return (fit if fit[:1].isalpha() or fit[:1] == "_" else f"_{fit}")[:_LONGEST]


def effect_of(annotations: Any, *, trusted: bool) -> Literal["replay", "ask"]:
    """Return what to do about a call of unknown outcome.

    A tool that just reads, or of which a second call does nothing more, may be called again, if
    its server says so and is trusted. Otherwise a person has to decide.
    """
    if annotations is None or not trusted:
        return "ask"
    hints = (annotations.read_only_hint, annotations.idempotent_hint)
    return "replay" if any(hints) else "ask"


def value_of(result: Any) -> Any:
    """Return what a tool has answered: its structured content, or its text, or all its parts."""
    if result.structured_content is not None:
        return result.structured_content
    if all(part.type == "text" for part in result.content):
        return "\n".join(part.text for part in result.content)
    return [
        part.model_dump(mode="json", by_alias=True, exclude_none=True) for part in result.content
    ]


def failure_of(result: Any) -> str | None:
    """Return what a tool says went wrong, None if it went well."""
    if not result.is_error:
        return None
    texts = [part.text for part in result.content if part.type == "text"]
    return "\n".join(texts) or "it gave no reason"


# Connection to a server: its life from start to end in a task of its own


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
        self.ready: anyio.Event = anyio.Event()
        """Set when it is open, or could not be opened."""
        self._ended = anyio.Event()
        self._opening = anyio.CancelScope()
        self._asking: set[anyio.CancelScope] = set()  # those who wait for an answer
        self.error: BaseException | None = None
        """The error that it failed or ended with; None if the server just went away."""

    @property
    def is_open(self) -> bool:
        """True if the server is there, as far as can be seen."""
        return self._client is not None and not self._over.is_set()

    async def run(self) -> None:
        """Hold the connection until the server goes, or `aclose` is called."""
        from mcp import Client

        try:
            with self._opening:
                async with Client(self._watched(), cache=None) as client:
                    self._client = client
                    self.ready.set()
                    await self._over.wait()
        except Exception as error:  # noqa: BLE001  # raised in the waiter
            self.error = causes_of(error)[0]
        finally:
            self._over.set()
            self.ready.set()
            for scope in self._asking:
                scope.cancel()
            self._ended.set()

    async def ask(self, ask: Callable[[Any], Any]) -> Any:
        """Return what a function of the client returns.

        Raises:
            ConnectionGoneError: The server went away, before or meanwhile.

        """
        from mcp.types import CONNECTION_CLOSED

        if not self.is_open:
            raise ConnectionGoneError(asked=False)
        with anyio.CancelScope() as scope:
            self._asking.add(scope)
            try:
                return await ask(self._client)
            except Exception as error:
                if getattr(error, "code", None) != CONNECTION_CLOSED:
                    raise
            finally:
                self._asking.discard(scope)
        # It has ended: its client said so, or `run` has cancelled the wait.
        await self.aclose()  # only then it is known why
        kinds = {kind.__name__ for kind in type(self.error).__mro__}
        raise ConnectionGoneError(asked="ConnectError" not in kinds)  # else no server was there

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


# The last lines that a process has written to its standard error


_KEPT: Final = 20
_LONGEST_LINE: Final = 500


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
            target=self._read, args=(reading,), name="perdure:stderr", daemon=True
        )
        self._thread.start()

    @property
    def text(self) -> str:
        """The last few lines that were written; waits a moment for what is on its way."""
        self._thread.join(0.2)
        return "\n".join(map(shown_line, self._lines))

    def _read(self, fd: int) -> None:
        with open(fd, encoding="utf-8", errors="replace") as pipe:
            while line := pipe.readline(_LONGEST_LINE):  # one that does not end is read in pieces
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
    """Phrase for a message, if it was not reached."""

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
        """Name of a server without another one."""
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
        """Its last few lines without credentials, for people; mostly empty."""
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
        return f"no MCP server answers there: {error}"


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
