"""Connections to the server: settings from its URL, Lua scripts, and what decides on durability.

Each script is one atomic step on the keys of one slot.

coredis needs a task for each connection. These tasks belong to the store's host task, so a store
may be opened in one task and closed in another, and cancelling a caller ends only the connection
that it is using. A broken connection is replaced when the next one is needed, so perdure reconnects
to a server that restarts. All calls of a request go in one write and have a deadline. Errors state
whether the request was sent, because what was sent may have been executed. Errors and
representations never show the password.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, final
from urllib.parse import parse_qsl, unquote, urlsplit

import anyio
import anyio.to_thread
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from perdure._lib.logs import log_facts
from perdure._lib.loop import unopened
from perdure._lib.tasks import Host, HostClosedError
from perdure.errors import ConfigError, MissingExtraError, StoreUnavailableError
from perdure.store import ConnectionEvent, ConnectionHook, ConnectionPool
from perdure.stores.redis.errors import error_meaning, in_doubt, unreachable

if TYPE_CHECKING:
    import ssl

    from coredis.connection import BaseConnection


SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys", "unix")
SEVERAL: Final = re.compile(r"(redis|valkey)s?(\+|-)(sentinel|cluster)")
"""Schemes of other clients for Sentinels and clusters, which perdure does not support."""
_PORT: Final = 6379
_SECONDS: Final = (r"(?=.*[1-9])[0-9]*\.?[0-9]*", "use seconds, such as 5")
_FILE: Final = (r".+", "use the path of a file")
_OPTIONS: Final = {
    "db": (r"[0-9]{1,6}", "use a database's number, such as 0"),
    "prefix": (r"[A-Za-z0-9_.:-]{1,64}", "use up to 64 of letters, digits, _ . : -"),
    "timeout": _SECONDS,
    "connect_timeout": _SECONDS,
    "wait": (r"yes|no", "use yes or no"),
    "history": (r".*", "use the URL of a store"),
    "ssl_ca_certs": _FILE,
    "ssl_certfile": _FILE,
    "ssl_keyfile": _FILE,
}
"""The options of a URL: the pattern of each, and the cure of a value that does not match it."""


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Address and credentials of a server, and the prefix of perdure's keys."""

    host: str = "localhost"
    port: int = _PORT
    path: str = ""
    """A socket's path, instead of host and port."""
    db: int = 0
    username: str = ""
    password: str = ""
    tls: bool = False
    tls_files: dict[str, str] = {}
    prefix: str = "perdure"
    timeout: float = 5.0
    """Seconds that a reply may take."""
    connect_timeout: float = 5.0
    history: str = ""
    """The URL of a store for cold history."""
    wait: bool = True
    """True if a save waits for the server's fsync, where a write does not imply it."""

    @property
    def location(self) -> str:
        """The server's address, without user and password."""
        if self.path:
            return f"unix://{self.path}?db={self.db}&prefix={self.prefix}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "rediss" if self.tls else "redis"
        return f"{scheme}://{host}:{self.port}/{self.db}?prefix={self.prefix}"

    def __repr__(self) -> str:
        return f"Settings({self.location!r})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("location", self.location)]


def settings_from(url: str) -> RedisSettings:
    """Return the settings in a URL.

    Raises:
        ConfigError: The URL is invalid; the message never shows user or password.

    """
    scheme = url.partition(":")[0].lower()
    if SEVERAL.fullmatch(scheme) or _names_several_hosts(url):
        raise _invalid(
            "it names a Sentinel, a cluster or several hosts, and perdure talks to one primary",
            "use redis://host:6379/0 with the primary, or with an address that always leads to it "
            "(a proxy, or a DNS name that a failover moves); to spread over servers use "
            "PostgreSQL or S3",
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _invalid("its host or port cannot be read", "use redis://host:6379/0") from None
    if parts.scheme not in SCHEMES:
        raise _invalid("its scheme is unknown", f"use one of {', '.join(SCHEMES)}")
    if "@" in parts.path + parts.query + parts.fragment or parts.fragment:
        reason = "a reserved character in its user, password or path splits it"
        raise _invalid(reason, "write @ # / ? : there as %40 %23 %2F %3F %3A")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unix = parts.scheme == "unix"
    path = unquote(parts.path)
    if unix and (parts.hostname or not path.startswith("/")):
        raise _invalid("a socket needs an absolute path", "use unix:///run/valkey.sock?db=0")
    if not unix and not parts.hostname:
        raise _invalid("it names no host", "use redis://localhost:6379/0")
    options["db"] = options.get("db") or ("" if unix else path.strip("/")) or "0"
    for name, value in options.items():
        if name not in _OPTIONS:
            known = ", ".join(sorted(_OPTIONS))
            raise _invalid(f"it has an unknown option {name!r}", f"known: {known}")
        pattern, cure = _OPTIONS[name]
        if not re.fullmatch(pattern, value):
            raise _invalid(f"invalid {name}={value!r}", cure)
    return RedisSettings(
        host=parts.hostname or "",
        port=port or _PORT,
        path=path if unix else "",
        db=int(options["db"]),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        tls=parts.scheme in ("rediss", "valkeys"),
        tls_files={name: value for name, value in options.items() if name.startswith("ssl_")},
        prefix=options.get("prefix", "perdure"),
        timeout=float(options.get("timeout", 5)),
        connect_timeout=float(options.get("connect_timeout", 5)),
        history=options.get("history", ""),
        wait=options.get("wait") != "no",
    )


def _names_several_hosts(url: str) -> bool:
    """Return whether the URL lists several hosts, after any user and password."""
    place = url.partition("://")[2].partition("?")[0].rpartition("@")[2]
    return "," in place.partition("/")[0] and not url.startswith("unix:")


def _invalid(reason: str, cure: str) -> ConfigError:
    return ConfigError(f"the URL of a Redis store is invalid: {reason}: {cure}", option="url")


# Connections, and the scripts that they run


class RedisCall:
    """A command with its arguments, in the form that a connection sends."""

    __slots__ = ("name", "serialized_arguments")

    decode: bool = False
    """Replies stay bytes."""

    def __init__(self, name: bytes, *arguments: bytes | str | float) -> None:
        self.name: bytes = name
        self.serialized_arguments: tuple[bytes | str | float, ...] = arguments


Script = Callable[..., RedisCall]
"""Returns the call of a script, given a tuple of its keys and then its arguments."""

_LOAD_ALL: Final[list[RedisCall]] = []
"""The calls that load every script into a server that is new, or has restarted."""


def script(name: str) -> Script:
    """Return the script in ``lua/<name>.lua``."""
    text = (files(__package__) / "lua" / f"{name}.lua").read_bytes()
    # The protocol's name of a script; it has no security purpose.
    digest = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
    _LOAD_ALL.append(RedisCall(b"SCRIPT LOAD", text))

    def call(keys: tuple[bytes, ...], *arguments: Any) -> RedisCall:
        return RedisCall(b"EVALSHA", digest, len(keys), *keys, *arguments)

    return call


MAX_CONNECTIONS = 8
"""Connections that may await replies at the same time."""
_MAX_CALLS = 256
"""Calls in one write of `RedisLink.send_all`."""
_SCAN_COUNT = 1000
_IDLE_SECONDS = 0.25
"""Seconds without a call after which an ending event loop is not delayed any more."""
_SYNC_SHARE = 0.8
"""Share of the timeout that a sync may take, so that its reply arrives in time."""


@final
class RedisLink:
    """Connections to one server, for one event loop of one process."""

    def __init__(self, settings: RedisSettings) -> None:
        self.settings: RedisSettings = settings
        self.location: str = settings.location
        self.waits: bool = False
        """True if each write waits for the server's sync to disk."""
        self.mode: str = ""
        """standalone or cluster; empty if INFO is forbidden."""
        self._host: Host | None = None
        self._pid = 0
        self._idle: list[BaseConnection] = []
        self._all: set[BaseConnection] = set()
        self.hook: ConnectionHook | None = None

    async def open(self) -> None:
        """Start the host task, and check that the server answers.

        Raises:
            ConfigError: It is a Sentinel.
            MissingExtraError: The driver is not installed.
            StoreUnavailableError: The server does not answer, or refuses us.

        """
        # The driver's import takes a second: not on the event loop.
        self._driver, self._new_connection = await anyio.to_thread.run_sync(self._load)
        self._room = anyio.Semaphore(MAX_CONNECTIONS, fast_acquire=True)
        self._idle = []
        self._all = set()
        self._pid = os.getpid()
        self._calls = 0
        self._closing = anyio.Event()
        self._host = host = Host(on_teardown=self._drain)
        await host.start()
        try:
            await self._handshake()
        except BaseException:
            await self.aclose()
            raise

    async def _handshake(self) -> None:
        """Read the server's mode, and load the scripts."""
        try:
            ping, info, *loaded = await self.request(
                [RedisCall(b"PING"), RedisCall(b"INFO", "server"), *_LOAD_ALL]
            )
        except StoreUnavailableError as error:
            if "unknown command 'SELECT'" not in str(error):
                raise
            raise _sentinel_error(self.location) from error  # only a Sentinel has no databases
        match = None if isinstance(info, BaseException) else _MODE.search(bytes(info))
        self.mode = "" if match is None else match[1].decode()
        if self.mode == "sentinel":
            raise _sentinel_error(self.location)
        self._require_success([ping, *loaded])

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

    async def _drain(self) -> None:
        """Keep the connections open until the ending event loop's last saves are done."""
        calls = -1
        while calls != self._calls or self._room.value < MAX_CONNECTIONS:
            calls = self._calls
            with anyio.move_on_after(_IDLE_SECONDS):
                await self._closing.wait()
                return

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
        """Send calls in one write, and return their replies in order.

        For idempotent calls: a connection that broke while idle is noticed only when it is
        used; then they are sent again over a new connection.

        Raises:
            StoreUnavailableError: No reply, or a reply says that the server is not ready.
            CorruptRecordError: A key has foreign data.

        """
        replies = await self.request(calls)
        if any(type(reply) is self._driver.ConnectionError for reply in replies):
            replies = await self.request(calls)
        return self._require_success(replies)

    def _require_success(self, replies: list[Any]) -> list[Any]:
        for reply in replies:
            if isinstance(reply, BaseException):
                raise error_meaning(self.location, reply)
        return replies

    async def write(self, calls: Sequence[RedisCall]) -> list[Any]:
        """Send calls whose effect is durable on return; raises as `send`."""
        return self._require_success(await self.request(calls, write=True))

    async def send_all(self, calls: Sequence[RedisCall], *, write: bool = False) -> list[Any]:
        """Send any number of independent calls, some at a time, as `send` or `write` does."""
        send = self.write if write else self.send
        replies: list[Any] = []
        for at in range(0, len(calls), _MAX_CALLS):
            replies += await send(calls[at : at + _MAX_CALLS])
        return replies

    async def scan(self, pattern: str) -> list[bytes]:
        """Return the names of all keys that match a pattern."""
        names: set[bytes] = set()
        cursor = b"0"
        while True:
            call = RedisCall(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT)
            ((cursor, page),) = await self.send([call])
            names.update(page)  # a key may be returned more than once
            if cursor == b"0":
                return list(names)

    async def request(self, calls: Sequence[RedisCall], *, write: bool = False) -> list[Any]:
        """Send calls, and return a reply or an error for each.

        With *write*, the replies arrive after the effects are durable.

        Raises:
            StoreUnavailableError: They could not be sent, or not synced in time.

        """
        sent = calls
        if write and self.waits:
            milliseconds = int(self.settings.timeout * _SYNC_SHARE * 1000)
            # Last, since it waits for the writes before it.
            sent = [*calls, RedisCall(b"WAITAOF", 1, 0, milliseconds)]
        self._calls += 1
        began = time.perf_counter()
        async with self._room:
            connection = await self._check_out()
            self._report("waited", began)
            began = time.perf_counter()
            replies = await self._batch(connection, sent)
            if any(isinstance(reply, self._driver.NoScriptError) for reply in replies):
                # The server has restarted: it executed no call of an unknown script.
                replies = await self._retry_missing_scripts(connection, sent, replies)
            self._check_in(connection)
            self._report("used", began)
        if sent is not calls:
            synced = replies.pop()
            if isinstance(synced, BaseException):
                raise error_meaning(self.location, synced)
            # The writes are there, and a power cut may still take them.
            if not synced[0]:
                raise in_doubt(self.location)
        return replies

    async def _batch(self, connection: BaseConnection, calls: Sequence[RedisCall]) -> list[Any]:
        try:
            request = connection.create_request_batch(calls, timeout=self.settings.timeout)  # type: ignore[arg-type]  # RedisCall has what it uses
        except self._driver.RedisError as error:
            raise unreachable(self.location, error, sent=False) from error
        return list(await request)

    async def _retry_missing_scripts(
        self, connection: BaseConnection, calls: Sequence[RedisCall], replies: list[Any]
    ) -> list[Any]:
        """Load the scripts, and repeat the calls whose script was missing."""
        await self._batch(connection, _LOAD_ALL)
        # What is repeated has to be synced, too.
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

    def pool(self) -> ConnectionPool:
        """Return how many there are, the one for notifications among those in use."""
        if self._host is None:
            return ConnectionPool()
        idle, waiting = len(self._idle), self._room.statistics().tasks_waiting
        used = len(self._all) - idle
        return ConnectionPool(idle=idle, used=used, waiting=waiting, most=MAX_CONNECTIONS)

    def _report(self, event: ConnectionEvent, began: float) -> None:
        if self.hook is not None:
            self.hook(event, time.perf_counter() - began)

    async def _check_out(self) -> BaseConnection:
        self.require_open()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return await self.connect()

    def _check_in(self, connection: BaseConnection) -> None:
        if connection.usable:
            self._idle.append(connection)
            return
        # The server is or was unreachable: other idle connections are broken, too.
        idle, self._idle = self._idle, []
        for other in idle:
            other.invalidate("another connection broke")

    async def connect(self) -> BaseConnection:
        """Return a new connection, which belongs to the caller until it breaks.

        Raises:
            StoreUnavailableError: The server cannot be reached, or refuses.

        """
        began = time.perf_counter()
        opening = _Opening()
        connection: BaseConnection = self._new_connection()
        try:
            self.require_open().spawn(self._run_connection, connection, opening)
        except HostClosedError as error:
            raise unreachable(self.location, error, sent=False) from error
        try:
            with anyio.move_on_after(self.settings.connect_timeout) as limit:
                await opening.done.wait()
            if limit.cancelled_caught:
                self._report("timed_out", began)
        finally:
            if not opening.done.is_set():
                connection.invalidate("its caller was cancelled or timed out")
        if not connection.usable:
            raise self._refused(opening.error)
        self._report("created", began)
        return connection

    def _refused(self, error: BaseException | None) -> Exception:
        """Return the error of a failed connection: the server's reply, or unreachable."""
        if isinstance(error, self._driver.ResponseError | self._driver.BusyLoadingError):
            meaning = error_meaning(self.location, error)
            meaning.facts["sent"] = False
            return meaning
        return unreachable(self.location, error and (error.__cause__ or error), sent=False)

    async def notifications(self, channel: bytes) -> AsyncGenerator[None, None]:
        """Subscribe on a separate connection, and yield for each message.

        Yields first when the subscription begins: earlier messages are not received.

        Raises:
            StoreUnavailableError: The connection failed or broke.

        """
        connection = await self.connect()
        try:
            connection.send_command(b"SUBSCRIBE", channel)
            async for _ in connection.push_messages:
                yield
        except self._driver.RedisError as error:
            raise unreachable(self.location, error, sent=False) from error
        finally:
            connection.invalidate("the subscription ended")

    async def _run_connection(self, connection: BaseConnection, opening: _Opening) -> None:
        """Run a connection until it ends."""
        self._all.add(connection)
        try:
            await connection.run(task_status=opening)
        except (self._driver.RedisError, OSError) as error:
            opening.error = error
        finally:
            self._all.discard(connection)
            opening.done.set()
            for part in vars(connection).values():  # coredis leaves streams without a receiver open
                if isinstance(part, MemoryObjectSendStream | MemoryObjectReceiveStream):
                    part.close()

    def _load(self) -> tuple[Any, Any]:
        """Return the driver's exceptions, and a factory of connections with these settings."""
        try:
            import coredis.exceptions
        except ImportError as error:
            raise MissingExtraError(
                "redis: and valkey: URLs need coredis: pip install 'perdure[redis]'", extra="redis"
            ) from error
        from coredis.connection import (
            TCPConnection,
            TCPLocation,
            UnixDomainSocketConnection,
            UnixDomainSocketLocation,
        )

        settings = self.settings
        options: dict[str, Any] = {
            "stream_timeout": settings.timeout,
            "connect_timeout": settings.connect_timeout,
            "username": settings.username or None,
            "password": settings.password or None,
            "db": settings.db,
            "client_name": "perdure",
        }
        if settings.path:
            place = UnixDomainSocketLocation(settings.path)
            return coredis.exceptions, partial(UnixDomainSocketConnection, place, **options)
        if settings.tls:
            options["ssl_context"] = _tls(settings.tls_files)
        location = TCPLocation(settings.host, settings.port)
        return coredis.exceptions, partial(TCPConnection, location, **options)


class _Opening:
    """Task status of a connection that is being opened, as coredis uses it."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.error: BaseException | None = None

    def started(self, value: object = None) -> None:
        """Record that the connection is open."""
        self.done.set()


def _tls(files: dict[str, str]) -> ssl.SSLContext:
    import ssl

    context = ssl.create_default_context(cafile=files.get("ssl_ca_certs"))
    if "ssl_certfile" in files:
        context.load_cert_chain(files["ssl_certfile"], files.get("ssl_keyfile"))
    return context


def _sentinel_error(location: str) -> ConfigError:
    return ConfigError(
        f"{location} is a Sentinel, which holds no data: perdure connects to one primary and does "
        "not query Sentinels. Name the primary, or an address that always leads to it (a proxy or "
        "a DNS name that a failover moves)",
        option="url",
    )


_MODE: Final = re.compile(rb"(?:redis|server)_mode:(\w+)")


# Server settings that decide on durability: eviction, persistence and fsync


log: logging.Logger = logging.getLogger("perdure")

UNKNOWN: Final = "unknown"
_NO_EVICTION = "noeviction"
_NO_SYNC_ON_REWRITE = "no-appendfsync-on-rewrite"
_POLICY: Final = "maxmemory-policy"
_SETTINGS = (_POLICY, "appendonly", "appendfsync", "save", _NO_SYNC_ON_REWRITE)
_POLL_SECONDS = 0.05
_CLUSTER_SIZE: Final = re.compile(rb"cluster_size:(\d+)")


async def inspect_durability(link: RedisLink) -> str:
    """Return the server's durability; make writes await its fsync where that is supported.

    Raises:
        ConfigError: The server may evict data when its memory is full, or is one of several
            primaries of a cluster.

    """
    await _require_one_primary(link)
    settings = await _settings(link)
    policy = await _policy(link, settings)
    if policy not in {None, _NO_EVICTION}:
        raise ConfigError(_eviction_message(link, policy), option="maxmemory-policy", value=policy)
    if policy is None:
        message = "whether the server evicts keys is unknown"
        log_facts(log, logging.WARNING, message, store=link.location)
    syncs_late = settings.get("appendonly") == "yes" and settings.get("appendfsync") == "everysec"
    wait = link.settings.wait and syncs_late
    if wait:
        (reply,) = await link.request([RedisCall(b"WAITAOF", 0, 0, 0)])
        wait = not isinstance(reply, BaseException)  # an older server does not know it
    link.waits = wait
    return durability_name(settings, waits=wait)


async def _require_one_primary(link: RedisLink) -> None:
    """Refuse a cluster of several primaries: perdure does not follow redirections."""
    if link.mode != "cluster":
        return
    (reply,) = await link.request([RedisCall(b"CLUSTER INFO")])
    match = None if isinstance(reply, BaseException) else _CLUSTER_SIZE.search(bytes(reply))
    if match is not None and int(match[1]) > 1:
        raise ConfigError(
            f"{link.location} is a node of a cluster with {int(match[1])} primaries: perdure keeps "
            "a store on one primary and does not follow redirections. Name a server without "
            "cluster-enabled, or a cluster of one primary; to spread over more use PostgreSQL or "
            "S3",
            option="url",
        )


async def warnings(link: RedisLink) -> tuple[str, ...]:
    """Return warnings about settings that were changed after the store was opened."""
    policy = await _policy(link, await _settings(link, (_POLICY,)))
    return () if policy in {None, _NO_EVICTION} else (_eviction_message(link, policy),)


async def _policy(link: RedisLink, settings: Mapping[str, str]) -> str | None:
    return settings.get(_POLICY) or (await _info(link, "memory")).get("maxmemory_policy")


def _eviction_message(link: RedisLink, policy: str | None) -> str:
    return (
        f"the server at {link.location} may evict sessions when its memory is full "
        f"(maxmemory-policy {policy}): set maxmemory-policy noeviction in its configuration, or "
        "with CONFIG SET"
    )


def durability_name(settings: Mapping[str, str], *, waits: bool) -> str:
    """Return the durability of an acknowledged write, from the known settings.

    >>> durability_name({"appendonly": "yes", "appendfsync": "everysec"}, waits=False)
    'fsync every second'
    """
    appends, syncs = settings.get("appendonly"), settings.get("appendfsync")
    if appends is None:
        return UNKNOWN
    if appends != "yes":
        return "memory, with snapshots" if settings.get("save") else "memory"
    if waits:
        return "fsync"
    if syncs == "always":
        return (
            "fsync"
            if settings.get(_NO_SYNC_ON_REWRITE) != "yes"
            else "fsync, but not during a rewrite"
        )
    if syncs == "everysec":
        return "fsync every second"
    return UNKNOWN if syncs is None else "written, synced by the system"


async def _settings(link: RedisLink, names: Sequence[str] = _SETTINGS) -> dict[str, str]:
    """Return the server's settings; empty if CONFIG is forbidden."""
    (reply,) = await link.request([RedisCall(b"CONFIG GET", *names)])
    if isinstance(reply, BaseException):
        return {}
    return {name.decode(): value.decode() for name, value in reply.items()}


async def _info(link: RedisLink, section: str) -> dict[str, str]:
    """Return a section of INFO; empty if it is forbidden."""
    (reply,) = await link.request([RedisCall(b"INFO", section)])
    if isinstance(reply, BaseException):
        return {}
    pairs = (line.partition(":") for line in bytes(reply).decode().splitlines())
    return {name: value for name, colon, value in pairs if colon}


async def scrub(link: RedisLink) -> None:
    """Have the server rewrite its files without the removed data, and wait until it has.

    Raises:
        StoreUnavailableError: The server refuses, or fails.

    """
    aof = (await _info(link, "persistence")).get("aof_enabled") == "1"
    if aof:
        begin, busy, last = RedisCall(b"BGREWRITEAOF"), "aof_rewrite_", "aof_last_bgrewrite_status"
    else:
        begin, busy, last = (
            RedisCall(b"BGSAVE", b"SCHEDULE"),
            "rdb_bgsave_",
            "rdb_last_bgsave_status",
        )
    (reply,) = await link.request([begin])
    if isinstance(reply, BaseException) and "progress" not in str(reply):
        raise StoreUnavailableError(
            f"the server at {link.location} refused to rewrite its files ({reply}): run "
            f"{begin.name.decode()} there, so that removed data leaves its disk",
            location=link.location,
            sent=False,
        )
    while True:
        info = await _info(link, "persistence")
        if not any(info.get(busy + what) == "1" for what in ("in_progress", "scheduled")):
            break
        await anyio.sleep(_POLL_SECONDS)
    if info.get(last) == "err":
        raise StoreUnavailableError(
            f"the server at {link.location} failed to rewrite its files: see its log and its "
            "disk; removed data may still be on it",
            location=link.location,
            sent=False,
        )
