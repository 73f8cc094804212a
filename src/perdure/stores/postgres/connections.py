"""Connections: settings from a ``postgresql:`` URL, a pool with a deadline, and the listener.

perdure's own parameters (``schema``, ``connections``, ``timeout``) are removed from the URL; all
others are passed to libpq unchanged. The location that may be shown is built from user, hosts,
database and schema only, instead of by masking secrets.

Blocking, and used from threads: as many connections at once as there are threads. A connection is
opened when one is needed and none is idle, so a server that recovers is used at once, and only
calls try to reach one that is down.

A connection whose reply is late is cut: its socket is shut down, which wakes the thread that waits
for it with an error. ``cut`` must be called from time to time.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import re
import select
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, final
from urllib.parse import quote, unquote

import anyio
import anyio.from_thread
import anyio.lowlevel
import msgspec

from perdure._lib.backoff import backoff
from perdure.errors import ConfigError, MissingExtraError, PerdureError, StoreUnavailableError
from perdure.store import ConnectionEvent, ConnectionHook
from perdure.stores.postgres.errors import is_broken, perdure_error

if TYPE_CHECKING:
    import psycopg


SCHEMA = "perdure"
CONNECTIONS = 6
_MAX_CONNECTIONS = 100
TIMEOUT = 15.0
_MIN_TIMEOUT = 0.1
_MAX_TIMEOUT = 600.0
_OWN = frozenset({"schema", "connections", "timeout"})
_SECRET = frozenset({"password", "sslpassword", "oauth_client_secret", "sslkey"})
_PORT = re.compile(r"\A(?:\[[^\]]*\]|[^:\[\]]*):")
"""The part before a port: a name, or an address in brackets."""
_NAME_BYTES = 63
"""PostgreSQL truncates longer names silently."""


N = TypeVar("N", int, float)


class PostgresSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Connection parameters."""

    conninfo: str
    """For libpq; may hold a password."""
    schema: str
    connections: int
    timeout: float
    """Seconds that a reply may take."""
    location: str
    """The URL as it may be shown, without the password."""
    secrets: tuple[str, ...] = ()
    """Strings that no message may show."""
    has_password: bool = False
    """True if the URL holds one."""

    def __repr__(self) -> str:
        return f"Settings({self.location!r})"

    def hide(self, text: str) -> str:
        """Return another program's text without the secrets."""
        for secret in self.secrets:
            text = text.replace(secret, "…")
        return text


def settings_of(
    url: str, *, schema: str | None = None, connections: int | None = None
) -> PostgresSettings:
    """Parse a URL; arguments take precedence over its parameters.

    Raises:
        ConfigError: A part of it is not valid.

    """
    scheme, _, remainder = url.partition(":")
    if scheme.lower() not in ("postgresql", "postgres") or not remainder.startswith("//"):
        raise ConfigError(
            "a PostgreSQL store's URL is postgresql://user@host:5432/database", option="url"
        )
    address, _, query = remainder[2:].partition("?")
    authority, slash, database = address.partition("/")
    login, at, hosts = authority.rpartition("@")
    _require_unambiguous("" if at else hosts, database, query)
    parameters: dict[str, str] = {}
    """By name, still quoted; libpq does not read ``+`` as a space."""
    others = []
    for part in filter(None, query.split("&")):
        name, _, text = part.partition("=")
        parameters[unquote(name)] = text
        if unquote(name) not in _OWN:
            others.append(part)
    own = {name: unquote(text) for name, text in parameters.items() if name in _OWN}
    schema_name = _schema(schema if schema is not None else own.get("schema", SCHEMA))
    suffix = "" if schema_name == SCHEMA else f"?schema={quote(schema_name)}"
    most = own.get("connections", str(CONNECTIONS)) if connections is None else str(connections)
    seconds = own.get("timeout", str(TIMEOUT))
    user, _, password = login.partition(":")
    hidden = [password, *(value for name, value in parameters.items() if name in _SECRET)]
    return PostgresSettings(
        conninfo=f"postgresql://{address}{'?' if others else ''}{'&'.join(others)}",
        schema=schema_name,
        connections=_number("connections", most, int, 2, _MAX_CONNECTIONS),
        timeout=_number("timeout", seconds, float, _MIN_TIMEOUT, _MAX_TIMEOUT),
        location=f"postgresql://{user}{at}{hosts}{slash}{database}{suffix}",
        has_password=bool(password or parameters.get("password")),
        secrets=tuple({form for text in hidden for form in (text, unquote(text)) if form}),
    )


def _require_unambiguous(hosts: str, database: str, query: str) -> None:
    """Raise if a password cuts the address: its parts would be shown as port and database.

    Text after a login's last @ is never part of a password.
    """
    ports = [host.rpartition(":")[2] for host in hosts.split(",") if _PORT.search(host)]
    others = [part for part in query.split("&") if part and "=" not in part]
    if "@" in database or others or not all(port.isdecimal() for port in ports if port):
        raise ConfigError(
            "this PostgreSQL URL cannot be read: a character in its user, password or host cuts "
            "it in two; write @ # / ? : there as %40 %23 %2F %3F %3A",
            option="url",
        )


def quoted(name: str) -> str:
    """Return a name as a quoted SQL identifier.

    >>> print(quoted('my "own" schema'))
    "my ""own"" schema"
    """
    return '"' + name.replace('"', '""') + '"'


def _schema(name: str) -> str:
    size = len(name.encode("utf-8", "replace"))
    if not 0 < size <= _NAME_BYTES or not name.isprintable():
        reason = f"it must have 1 to {_NAME_BYTES} bytes and no control characters"
    elif name.lower().startswith("pg_") or name.lower() == "information_schema":
        reason = "PostgreSQL reserves this name"
    else:
        return name
    raise ConfigError(
        f"invalid schema={name[:80]!r}: {reason}; use a name such as {SCHEMA}",
        option="schema",
        value=name,
    )


def _number(option: str, text: str, kind: type[N], least: N, most: N) -> N:
    try:
        number = kind(text)
    except ValueError:
        number = kind(0)
    if not least <= number <= most:
        raise ConfigError(
            f"invalid {option}={text!r}: expected {least:g} to {most:g}", option=option, value=text
        )
    return number


# The pool


Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"

Statement: TypeAlias = tuple[bytes, Mapping[str, object] | Sequence[object]]
"""A statement and its parameters."""

READ_ONLY = "25006"
_ROUNDS = 6
FRESH = 0.5
"""Seconds of idleness after which a connection is checked before it is used."""

_DEFAULTS = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "client_encoding": "UTF8",
}
# Every statement finds its rows by an index. A plan made while a table was small would be cached,
# and scan all of it; nested loops also lock rows in the order of the ids that were sent.
_PLANS = "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off"


def _setup(timeout: float) -> str:
    """Return a connection's settings: the server gives up before the client does."""
    statement, lock = int(timeout * 700), int(timeout * 400)  # milliseconds
    return (
        f"SET statement_timeout = {statement}; SET lock_timeout = {lock}; "
        f"SET idle_in_transaction_session_timeout = {statement}; {_PLANS}; "
        "SET default_transaction_isolation = 'read committed'"
    )


def _process(connection: Connection) -> int:
    """Return the pid of the server process that answers now."""
    row = connection.execute(b"SELECT pg_backend_pid()", prepare=False).fetchone()
    assert row is not None
    return int(row[0])


def _share_processes(first: Connection, second: Connection) -> bool:
    """Return whether two clients of a pooler get each other's process, or change their own.

    Both hold a transaction, so they have one process each, and return it in either order: whether
    the pooler reuses the newest or the oldest free one, one of the rounds swaps them.
    """
    before = _process(first)
    if _process(second) == before:
        return True
    pairs: set[tuple[int, int]] = set()
    for turn in range(_ROUNDS):
        first.execute(b"BEGIN READ ONLY", prepare=False)
        second.execute(b"BEGIN READ ONLY", prepare=False)
        pairs.add((_process(first), _process(second)))
        for connection in (second, first) if turn % 2 else (first, second):
            connection.execute(b"ROLLBACK", prepare=False)
    return len(pairs) > 1 or any(process != before for process, _ in pairs)


def driver() -> Any:
    """Return the driver's module, imported on first use.

    Raises:
        MissingExtraError: It is not installed.

    """
    try:
        import psycopg
    except ImportError as error:
        raise MissingExtraError(
            "the PostgreSQL store needs psycopg: pip install 'perdure[postgres]'", extra="postgres"
        ) from error
    return psycopg


def bigint(number: int) -> object:
    """Return a number of one type for any size: each type would be prepared by itself."""
    return driver().types.numeric.Int8(number)


def execute_all(
    connection: Connection, statements: Sequence[Statement]
) -> list[list[tuple[Any, ...]]]:
    """Run statements in one round trip; return the rows of each.

    They are one transaction, and each sees what was committed when it began. With a libpq before
    version 14 they are one round trip and one transaction each.
    """
    cursors: list[psycopg.Cursor[tuple[Any, ...]]] = []
    if not statements:
        return []  # a pipeline of none is a round trip, too
    with connection.pipeline() if driver().Pipeline.is_supported() else contextlib.nullcontext():
        for query, values in statements:
            cursors.append(connection.execute(query, values, binary=True))
    return [cursor.fetchall() if cursor.description else [] for cursor in cursors]


@final
class Connections:
    """The open connections of one store."""

    def __init__(
        self,
        settings: PostgresSettings,
        password: Callable[[], str] | None = None,
        hook: ConnectionHook | None = None,
    ) -> None:
        self._settings = settings
        self._password = password
        self._hook = hook
        self._last_password = ""  # the last one used, to hide in messages
        self._driver = driver()
        self.errors: type[psycopg.Error] = self._driver.Error
        """The base class of the driver's errors."""
        self._setup = _setup(settings.timeout).encode()
        self._conninfo = self._full_conninfo()
        self._lock = threading.Lock()
        self._idle: list[tuple[Connection, float]] = []
        self._used: dict[Connection, float] = {}
        """Until when each may be used."""
        self._closed = False
        self._is_own = False  # whether a connection is known to keep its server process

    def _full_conninfo(self) -> str:
        conninfo = self._settings.conninfo
        try:
            given = self._driver.conninfo.conninfo_to_dict(conninfo)
            missing = {name: text for name, text in _DEFAULTS.items() if name not in given}
            if "application_name" not in given:  # not at the start: a pooler would keep it
                self._setup += b"; SET application_name = 'perdure'"
            return str(self._driver.conninfo.make_conninfo(conninfo, **missing))
        except self.errors as error:
            # Not as the cause: it may quote any part of the URL.
            text = self._settings.hide(" ".join(str(error).split()))
            raise ConfigError(
                f"the URL of {self._settings.location} is not valid: {text}", option="url"
            ) from None

    def connect(self) -> Connection:
        """Return a new connection, in autocommit mode.

        Raises:
            ConfigError: The address is a pooler's that shares its connections among clients.
            StoreUnavailableError: The server cannot be reached, or refuses.

        """
        began = time.monotonic()
        connection = self._connect_driver()
        try:
            with self.watched(connection, is_lent=False):
                if not self._is_own:
                    self._require_own(connection)
                connection.execute(self._setup, prepare=False)
        except self.errors as error:
            connection.close()
            raise self.perdure_error(error, "reach") from error
        except BaseException:
            connection.close()
            raise
        self._report("created", began)
        return connection

    def _report(self, event: ConnectionEvent, began: float) -> None:
        if self._hook is not None:
            self._hook(event, time.monotonic() - began)

    def _connect_driver(self) -> Connection:
        secret: dict[str, str] = {}
        if self._password is not None:
            self._last_password = secret["password"] = self._password()
        began = time.monotonic()
        try:
            connection: Connection = self._driver.connect(
                self._conninfo, autocommit=True, prepare_threshold=0, **secret
            )
        except self.errors as error:
            if isinstance(error, self._driver.errors.ConnectionTimeout):
                self._report("timed_out", began)
            raise self.perdure_error(error, "reach") from error
        return connection

    def _require_own(self, connection: Connection) -> None:
        """Raise if transactions may run on different server connections; called before any SET.

        A server sends its process's pid on connecting; a pooler sends one that it made up. Through
        a pooler, two clients test whether they can get each other's process.
        """
        if _process(connection) != connection.info.backend_pid:
            other = self._connect_driver()
            with contextlib.closing(other), self.watched(other, is_lent=False):
                if _share_processes(connection, other):
                    raise ConfigError(
                        f"{self._settings.location} is the address of a pooler that gives each "
                        "transaction any connection, such as PgBouncer with pool_mode=transaction: "
                        "settings, prepared statements and notifications do not hold there; "
                        "use the server's own address, or one with pool_mode=session",
                        option="url",
                    )
        self._is_own = True

    def perdure_error(self, error: psycopg.Error, doing: str) -> PerdureError:
        """Return the perdure error for a driver's error, without any password."""
        return perdure_error(error, doing, self._settings.location, self._hide)

    def _hide(self, text: str) -> str:
        hidden = self._settings.hide(text)
        return hidden.replace(self._last_password, "…") if self._last_password else hidden

    def handle_error(
        self, error: psycopg.Error, connection: Connection, doing: str
    ) -> PerdureError:
        """Return the perdure error; drop the pool's connections if this one is of no use."""
        if error.sqlstate == READ_ONLY:  # a standby by now: the next connection may be better
            connection.close()
        if is_broken(error, connection):
            self.drop_idle()
        return self.perdure_error(error, doing)

    def drop_idle(self) -> None:
        """Close the idle connections: what broke one, such as a restart, has broken others."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    @contextlib.contextmanager
    def borrow(self, seconds: float | None = None) -> Iterator[Connection]:
        """Lend a connection that looks alive.

        ``cut`` ends it after this many ``seconds``, by default the timeout.

        Raises:
            StoreUnavailableError: The store is closed, or the server cannot be reached.

        """
        connection = self._take()
        try:
            with self.watched(connection, seconds):
                yield connection
        finally:
            self.give_back(connection)

    def take_ready(self, is_suitable: Callable[[Connection], bool]) -> Connection | None:
        """Return a suitable idle connection that was in use just now, None if there is none.

        Never waits. The caller gives it back.
        """
        newest = time.monotonic() - FRESH
        with self._lock:
            for idle in reversed(self._idle):
                connection, since = idle
                if since >= newest and not connection.closed and is_suitable(connection):
                    self._idle.remove(idle)
                    return connection
        return None

    @contextlib.contextmanager
    def watched(
        self, connection: Connection, seconds: float | None = None, *, is_lent: bool = True
    ) -> Iterator[None]:
        """Let ``cut`` end a connection after this many ``seconds``, by default the timeout.

        Args:
            connection: Which one.
            seconds: When.
            is_lent: Whether the pool has lent it, so that it counts as used.

        """
        began = time.monotonic()
        with self._lock:
            self._used[connection] = began + (seconds or self._settings.timeout)
        try:
            yield
        finally:
            with self._lock:
                del self._used[connection]
            if is_lent:
                self._report("used", began)

    def _take(self) -> Connection:
        """Take an idle connection that the server has not closed, or connect."""
        began = time.monotonic()
        while True:
            with self._lock:
                if self._closed:
                    raise StoreUnavailableError(
                        f"the store at {self._settings.location} is closed: open a new one"
                    )
                connection, idle_since = self._idle.pop() if self._idle else (None, began)
            connection = connection or self.connect()
            if time.monotonic() - idle_since < FRESH or not _is_readable(connection):
                self._report("waited", began)
                return connection
            connection.close()

    def give_back(self, connection: Connection) -> None:
        """Return a connection to the pool, or close it if it is broken or in a transaction."""
        idle = connection.pgconn.transaction_status == 0  # PQTRANS_IDLE
        with self._lock:
            if idle and not connection.closed and not self._closed:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    def counts(self) -> tuple[int, int]:
        """Return how many are idle, and how many are in use."""
        with self._lock:
            return len(self._idle), len(self._used)

    def cut(self, *, everything: bool = False) -> None:
        """Shut down the connections whose reply is late."""
        now = time.monotonic()
        with self._lock:
            for connection, until in self._used.items():
                if everything or until <= now:
                    self.shut_down(connection)

    def shut_down(self, connection: Connection) -> None:
        """Shut down a connection that another thread waits on, which then gets an error."""
        # A twin of its descriptor: the driver closes its own itself.
        with (
            contextlib.suppress(OSError, self.errors),  # it has just closed
            socket.socket(fileno=os.dup(connection.fileno())) as twin,
        ):
            twin.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the idle connections, and cut those in use."""
        with self._lock:
            self._closed = True
        self.drop_idle()
        self.cut(everything=True)


def _is_readable(connection: Connection, seconds: float = 0.0) -> bool:
    """Return whether there is something to read, or is within so many seconds; its end, too.

    An idle connection has nothing to read unless the server closed it.
    """
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(seconds * 1000))


# The password, requested for each new connection, since it may have expired


Password: TypeAlias = str | Callable[[], str | Awaitable[str]]
"""A password, or a function that returns one, plain or async."""


def password_reader(password: Password, location: str, timeout: float) -> Callable[[], str]:
    """Return a function that reads the password, for threads of the current event loop.

    *password* is called in the thread that connects; an awaitable result is awaited on the event
    loop.
    """
    token = anyio.lowlevel.current_token()

    async def awaited(awaitable: Awaitable[str]) -> str:
        with anyio.fail_after(timeout):
            return await awaitable

    def read() -> str:
        try:
            secret = password if isinstance(password, str) else password()
            if inspect.isawaitable(secret):
                secret = anyio.from_thread.run(awaited, secret, token=token)
        except PerdureError:
            raise
        except Exception as error:
            kind = type(error).__name__  # its text may hold anything
            raise StoreUnavailableError(
                f"cannot reach {location}: its password= failed with {kind}: make sure that it "
                "returns a password; a connected manager tries again"
            ) from error
        if not isinstance(secret, str):
            raise ConfigError(
                f"password= returned a {type(secret).__name__}: it has to return text",
                option="password",
            )
        return secret

    return read


# Listener: a separate connection on which the server sends notifications


_SLOWEST = 5.0
"""Seconds between two attempts to connect, at most."""
_PING = 30.0
"""Seconds of silence after which the server is pinged."""


@final
class Listener:
    """Call ``notify`` from a thread for each notification, and when some may have been missed."""

    def __init__(self, connections: Connections, channel: str, notify: Callable[[], None]) -> None:
        self._connections = connections
        self._channel = channel
        self._notify = notify
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="perdure:listen", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, without waiting for it."""
        self._stopped.set()
        with self._lock:
            if self._connection is not None:
                self._connections.shut_down(self._connection)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended; blocking."""
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(PerdureError, self._connections.errors, OSError):
                self._listen()
            self._failures += 1
            chance = 0.5 + random.random() / 2
            self._stopped.wait(backoff(self._failures, base=0.1, cap=_SLOWEST, chance=chance))

    def _listen(self) -> None:
        with self._connections.connect() as connection:
            with self._lock:
                # Stopped while it connected, when there was nothing to shut down.
                if self._stopped.is_set():
                    return
                self._connection = connection
            try:
                connection.execute(f"LISTEN {self._channel}".encode(), prepare=False)
                self._failures = 0
                # Requests from before the LISTEN send no notification: have them looked for.
                self._notify()
                self._wait_for_notifications(connection)
            finally:
                with self._lock:
                    self._connection = None

    def _wait_for_notifications(self, connection: Connection) -> None:
        while not self._stopped.is_set():
            if not _is_readable(connection, _PING):
                connection.execute(b"SELECT 1", prepare=False)
            connection.pgconn.consume_input()
            is_notified = False
            while connection.pgconn.notifies() is not None:
                is_notified = True
            if is_notified:
                self._notify()
