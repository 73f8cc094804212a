"""MCP servers as an agent has them: started with it, asked for tools, made again when they die.

A server is a command that is run, spoken to by its standard input and output, or a URL
(streamable HTTP). A call that finds it dead starts it once more. A call during which it dies
may have taken effect, so it is not made again unless a trusted server says that this does no
harm.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, final

import anyio
import anyio.to_thread

from perdure._lib.tasks import Host
from perdure.agent.mcp.connection import (
    Address,
    Command,
    Connection,
    ConnectionGoneError,
)
from perdure.agent.tools import Tool, within
from perdure.errors import (
    ConfigError,
    InvalidArgumentError,
    MissingExtraError,
    ToolOutcomeUnknownError,
    ToolServerError,
)

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
        """How often it was started, or connected to."""

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
        """Whether it is there, as far as can be seen; a call makes it again if not."""
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
        try:
            return await self._call(tool, arguments, repeatable=repeatable)
        except ConnectionGoneError as gone:
            self._require_repeatable(tool, gone, repeatable=repeatable)
        # Nothing was done, or it does no harm to do it again.
        try:
            return await self._call(tool, arguments, repeatable=repeatable)
        except ConnectionGoneError as gone:
            self._require_repeatable(tool, gone, repeatable=repeatable)
            self._log_end()
            raise ToolServerError(
                f"MCP server {self} died twice while it ran {tool!r}",
                server=self.name,
                tool=tool,
            ) from gone

    def _require_repeatable(
        self, tool: str, gone: ConnectionGoneError, *, repeatable: bool
    ) -> None:
        """Raise, unless a call during which the server died may be made once more."""
        if repeatable or not gone.asked:
            return
        self._log_end()
        raise ToolOutcomeUnknownError(
            f"MCP server {self} died while it ran {tool!r}: whether that has taken effect is "
            "unknown, and it was not called again",
            server=self.name,
            tool=tool,
        ) from gone

    async def _call(self, tool: str, arguments: dict[str, Any], *, repeatable: bool) -> Any:
        connection = await self._connected()
        try:
            with within(self._call_timeout):
                result = await connection.ask(lambda client: client.call_tool(tool, arguments))
        except ConnectionGoneError:
            raise
        except Exception as error:
            if is_session_over(error):
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
        if is_refusal(error):
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
                await connection.opened()
                listed = await connection.ask(_list_tools)
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


def is_refusal(error: Exception) -> bool:
    """Say whether a server has refused a call, so that it has certainly not been made."""
    code = getattr(error, "code", None)
    return isinstance(code, int) and code not in _UNSURE


def is_session_over(error: Exception) -> bool:
    """Whether a server at a URL does not know this connection, because it was restarted."""
    return getattr(error, "code", None) == _INVALID and "Session terminated" in str(error)
