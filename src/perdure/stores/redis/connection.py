"""The scripts that the server runs: each one step, whole or not at all, in one slot."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import AsyncGenerator, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, final

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from perdure._lib.host import Host, HostClosedError
from perdure._lib.loop import unopened
from perdure.errors import ConfigError, MissingExtraError, StoreUnavailableError
from perdure.stores.redis.errors import in_doubt, meaning_of, unreachable
from perdure.stores.redis.settings import RedisSettings

if TYPE_CHECKING:
    import ssl

    from coredis.connection import BaseConnection


# The scripts that the server runs: each one step, whole or not at all, in one slot


_NAMES: Final = (
    "acquire",
    "aged",
    "append",
    "ask",
    "beat",
    "delete",
    "drop",
    "fold",
    "look",
    "post",
    "put",
    "read",
    "reject",
    "release",
    "remove",
    "retire",
    "settle",
    "sweep",
    "take",
    "trim",
    "unlist",
)


class RedisCall:
    """One command with its arguments, as a connection takes it."""

    __slots__ = ("name", "serialized_arguments")

    decode: bool = False
    """Answers stay bytes."""

    def __init__(self, name: bytes, *arguments: bytes | str | float) -> None:
        self.name: bytes = name
        self.serialized_arguments: tuple[bytes | str | float, ...] = arguments


class Script:
    """A script, and the name by which the server knows it."""

    __slots__ = ("_sha", "text")

    def __init__(self, text: bytes) -> None:
        self.text: bytes = text
        # How the protocol names a script; it protects nothing.
        self._sha = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()

    def __call__(self, keys: tuple[bytes, ...], *arguments: Any) -> RedisCall:
        """Return the call of the script with these keys and arguments."""
        return RedisCall(b"EVALSHA", self._sha, len(keys), *keys, *arguments)


@cache
def script(name: str) -> Script:
    """Return a script by its name."""
    return Script((files(__package__) / "lua" / f"{name}.lua").read_bytes())


def all_scripts() -> list[Script]:
    """Return every script, to be loaded into a server that has started anew."""
    return [script(name) for name in _NAMES]


# The link to the server: a few connections that live in a host task of the store's own
#
# coredis keeps a task for each connection. Those tasks belong to the store's host, so that a store
# may be opened in one task and closed in another, and cancelling a caller ends only the connection
# that it had in hand. A connection that broke is replaced when the next one is needed, so a server
# that comes back is found without anything being started again.
# Whatever goes to the server goes in one write and has a deadline. Errors tell whether it was
# sent, because what was sent may have been done.


MOST = 8
"""Connections that wait for answers at the same time."""
_ENDING, _QUIET = 30.0, 0.25
"""Seconds for which an event loop that ends is kept at most, and without a call."""
_PATIENCE = 0.8
"""How much of the timeout a sync may take, so that its answer still comes in time."""


@final
class RedisLink:
    """Connections to one server, for one event loop of one process."""

    def __init__(self, settings: RedisSettings) -> None:
        self.settings: RedisSettings = settings
        self.location: str = settings.location
        self.waits: bool = False
        """Whether each write waits until the server has synced it."""
        self.mode: str = ""
        """standalone or cluster, as the server says; empty where INFO is forbidden."""
        self._host: Host | None = None
        self._pid = 0

    async def open(self) -> None:
        """Start the host, and see that the server answers.

        Raises:
            ConfigError: It is a Sentinel.
            MissingExtraError: The driver is not installed.
            StoreUnavailableError: The server does not answer, or refuses us.

        """
        # The driver's import takes a second: not on the event loop.
        self._driver, self._make = await anyio.to_thread.run_sync(self._load)
        self._room = anyio.Semaphore(MOST, fast_acquire=True)
        self._idle: list[BaseConnection] = []
        self._all: set[BaseConnection] = set()
        self._pid = os.getpid()
        self._calls = 0
        self._closing = anyio.Event()
        self._host = host = Host(on_teardown=self._last_calls)
        await host.start()
        try:
            await self._greet()
        except BaseException:
            await self.aclose()
            raise

    async def _greet(self) -> None:
        """See what the server is, and load the scripts."""
        try:
            ping, info, *loaded = await self.ask(
                [RedisCall(b"PING"), RedisCall(b"INFO", "server"), *_loads()]
            )
        except StoreUnavailableError as error:
            if "unknown command 'SELECT'" not in str(error):
                raise
            raise _no_data(self.location) from error  # it has no databases to choose from
        self.mode = _mode_in(info)
        if self.mode == "sentinel":
            raise _no_data(self.location)
        self._sound([ping, *loaded])

    async def aclose(self) -> None:
        """Close every connection; without effect in a forked child."""
        host, self._host = self._host, None
        if host is None or self._pid != os.getpid():
            return
        self._closing.set()
        for connection in list(self._all):
            connection.invalidate("the store was closed")
        with anyio.CancelScope(shield=True):
            await host.aclose()

    async def _last_calls(self) -> None:
        """Be there, as the event loop ends, for whoever saves what is left: until it is quiet."""
        with anyio.move_on_after(_ENDING):
            seen = -1
            while not self._closing.is_set():
                if seen == self._calls and self._room.value == MOST:
                    break
                seen = self._calls
                with anyio.move_on_after(_QUIET):
                    await self._closing.wait()

    def require_open(self) -> Host:
        """Return the host.

        Raises:
            StoreUnavailableError: The store is not open in this process.

        """
        host = self._host
        if host is not None and self._pid == os.getpid():
            return host
        failure = unopened(self.location, elsewhere=host is not None)
        failure.facts["sent"] = False
        raise failure

    async def send(self, calls: Sequence[RedisCall]) -> list[Any]:
        """Send calls in one write, and return their answers in order.

        Calls that may be made twice: a connection that broke while it was idle is noticed only
        when it is used, and then they go over a new one.

        Raises:
            StoreUnavailableError: No answer, or one of the answers says not now.
            CorruptRecordError: Something that is not perdure's stands in the way.

        """
        replies = await self.ask(calls)
        if any(type(reply) is self._driver.ConnectionError for reply in replies):
            replies = await self.ask(calls)
        return self._sound(replies)

    def _sound(self, replies: list[Any]) -> list[Any]:
        for reply in replies:
            if isinstance(reply, BaseException):
                raise meaning_of(self.location, reply)
        return replies

    async def write(self, calls: Sequence[RedisCall]) -> list[Any]:
        """Send calls whose effect is durable when this returns; errors as `send`."""
        return self._sound(await self.ask(calls, write=True))

    async def ask(self, calls: Sequence[RedisCall], *, write: bool = False) -> list[Any]:
        """Send calls, and return an answer or an error in place of each.

        With *write*, the answers come when what they say is durable.

        Raises:
            StoreUnavailableError: They could not be sent, or not synced in time.

        """
        wanted = [*calls, self._synced] if write and self.waits else calls
        self._calls += 1
        async with self._room:
            connection = await self._lease()
            replies = await self._batch(connection, wanted)
            if any(isinstance(reply, self._driver.NoScriptError) for reply in replies):
                # The server has started anew, and has not done what it does not know.
                replies = await self._again(connection, wanted, replies)
            self._give_back(connection)
        if wanted is not calls:
            synced = replies.pop()
            if isinstance(synced, BaseException):
                raise meaning_of(self.location, synced)
            if not synced[0]:
                raise in_doubt(self.location)
        return replies

    @property
    def _synced(self) -> RedisCall:
        return RedisCall(b"WAITAOF", 1, 0, int(self.settings.timeout * _PATIENCE * 1000))

    async def _batch(self, connection: BaseConnection, calls: Sequence[RedisCall]) -> list[Any]:
        try:
            request = connection.create_request_batch(calls, timeout=self.settings.timeout)  # type: ignore[arg-type]  # what it reads of a call
        except self._driver.RedisError as error:
            raise unreachable(self.location, error, sent=False) from error
        return list(await request)

    async def _again(
        self, connection: BaseConnection, calls: Sequence[RedisCall], replies: list[Any]
    ) -> list[Any]:
        """Load the scripts, and send once more what the server did not know."""
        await self._batch(connection, _loads())
        missing = [
            place
            for place, reply in enumerate(replies)
            if isinstance(reply, self._driver.NoScriptError) or calls[place].name == b"WAITAOF"
        ]
        answers = await self._batch(connection, [calls[place] for place in missing])
        for place, answer in zip(missing, answers, strict=True):
            replies[place] = answer
        return replies

    # connections

    async def _lease(self) -> BaseConnection:
        self.require_open()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return await self.connect()

    def _give_back(self, connection: BaseConnection) -> None:
        if connection.usable:
            self._idle.append(connection)
            return
        # The server is gone, or was: what else is idle has seen its end, or soon will.
        idle, self._idle = self._idle, []
        for one in idle:
            one.invalidate("another connection broke")

    async def connect(self) -> BaseConnection:
        """Return a new connection, which belongs to the caller until it breaks.

        Raises:
            StoreUnavailableError: There is none to be had.

        """
        opening = _Opening()
        connection: BaseConnection = self._make()
        try:
            self.require_open().spawn(self._keep, connection, opening)
        except HostClosedError as error:
            raise unreachable(self.location, error, sent=False) from error
        try:
            with anyio.move_on_after(self.settings.connect_timeout):
                await opening.done.wait()
        finally:
            if not opening.done.is_set():
                connection.invalidate("nobody waits for it")
        if not connection.usable:
            raise self._refused(opening.error)
        return connection

    def _refused(self, error: BaseException | None) -> Exception:
        """Return why there is no connection: the server's own word, or that there is none."""
        if isinstance(error, self._driver.ResponseError | self._driver.BusyLoadingError):
            meaning = meaning_of(self.location, error)
            meaning.facts["sent"] = False
            return meaning
        return unreachable(self.location, error and (error.__cause__ or error), sent=False)

    async def pushed(self, channel: bytes) -> AsyncGenerator[None, None]:
        """Subscribe, on a connection of its own, and yield with each message that comes.

        The first comes when the subscription stands: what was said before it was not heard.

        Raises:
            StoreUnavailableError: There is no connection, or not any more.

        """
        connection = await self.connect()
        try:
            connection.send_command(b"SUBSCRIBE", channel)
            async for _ in connection.push_messages:
                yield
        except self._driver.RedisError as error:
            raise unreachable(self.location, error, sent=False) from error
        finally:
            connection.invalidate("nobody listens any more")

    async def _keep(self, connection: BaseConnection, opening: _Opening) -> None:
        """Be the task in which a connection lives."""
        self._all.add(connection)
        try:
            await connection.run(task_status=opening)
        except (self._driver.RedisError, OSError) as error:
            opening.error = error
        finally:
            self._all.discard(connection)
            opening.done.set()
            for part in vars(connection).values():  # it leaves them open where it found nobody
                if isinstance(part, MemoryObjectSendStream | MemoryObjectReceiveStream):
                    part.close()

    def _load(self) -> tuple[Any, Any]:
        return _driver(), self._maker()

    def _maker(self) -> Any:
        """Return what makes connections, so that nothing is worked out for each of them."""
        from functools import partial

        from coredis.connection import (
            TCPConnection,
            TCPLocation,
            UnixDomainSocketConnection,
            UnixDomainSocketLocation,
        )

        said = self.settings
        options: dict[str, Any] = {
            "stream_timeout": said.timeout,
            "connect_timeout": said.connect_timeout,
            "username": said.username or None,
            "password": said.password or None,
            "db": said.db,
            "client_name": "perdure",
        }
        if said.path:
            return partial(
                UnixDomainSocketConnection, UnixDomainSocketLocation(said.path), **options
            )
        if said.tls:
            options["ssl_context"] = _tls(said.tls_files)
        return partial(TCPConnection, TCPLocation(said.host, said.port), **options)


class _Opening:
    """A connection that is on its way, as coredis reports it."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.error: BaseException | None = None

    def started(self, value: object = None) -> None:
        """Take note that it is there."""
        self.done.set()


def _loads() -> list[RedisCall]:
    return [RedisCall(b"SCRIPT LOAD", one.text) for one in all_scripts()]


def _driver() -> Any:
    try:
        import coredis.exceptions
    except ImportError as error:
        message = "redis: and valkey: URLs need coredis: pip install 'perdure[redis]'"
        raise MissingExtraError(message, extra="redis") from error
    return coredis.exceptions


def _tls(files: dict[str, str]) -> ssl.SSLContext:
    import ssl

    context = ssl.create_default_context(cafile=files.get("ssl_ca_certs"))
    if "ssl_certfile" in files:
        context.load_cert_chain(files["ssl_certfile"], files.get("ssl_keyfile"))
    return context


def _mode_in(info: Any) -> str:
    """Return what the server says it is; nothing where INFO is forbidden."""
    found = None if isinstance(info, BaseException) else _MODE.search(bytes(info))
    return "" if found is None else found[1].decode()


def _no_data(location: str) -> ConfigError:
    message = (
        f"{location} is a Sentinel, which keeps no data: perdure talks to one primary and asks no "
        "Sentinel for it. Name the primary, or an address that always leads to it (a proxy or a "
        "DNS name that a failover moves)"
    )
    return ConfigError(message, option="url")


_MODE: Final = re.compile(rb"(?:redis|server)_mode:(\w+)")
