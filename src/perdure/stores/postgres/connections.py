"""Connections that are kept open, and the deadline that no reply may exceed.

Blocking, and used from threads: as many at once as there are threads. One is made when it
is needed and none is free, so a server that comes back is used at once, and nothing tries to
reach one that is gone but the calls that need it.

A reply that does not come in time is cut: its socket is shut down, which wakes
the thread that waits for it with an error. ``cut`` must be called now and then.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import select
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, final

import anyio
import anyio.from_thread
import anyio.lowlevel

from perdure.errors import ConfigError, MissingExtraError, PerdureError, StoreUnavailableError
from perdure.stores.postgres.errors import trouble
from perdure.stores.postgres.settings import PostgresSettings

if TYPE_CHECKING:
    import psycopg


# Connections that are kept open, and the deadline that no reply may exceed


Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"

READ_ONLY = "25006"
_ROUNDS = 6
FRESH = 0.5
"""Seconds of idleness after which a connection is looked at before it is used."""

_DEFAULTS = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "client_encoding": "UTF8",
}
# Every statement finds its rows by an index. A plan made while a table was small would stay,
# and read all of it; nested loops also lock rows in the order of the ids that were sent.
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
    """Return which process of the server answers, now."""
    row = connection.execute(b"SELECT pg_backend_pid()", prepare=False).fetchone()
    assert row is not None
    return int(row[0])


def _are_mixed(one: Connection, other: Connection) -> bool:
    """Say whether two clients of a pooler are given each other's process, or change their own.

    Both hold a transaction, so they have one each, and give it back in either order: whether
    the pooler takes the newest or the oldest of those that are free, one round swaps them.
    """
    before = _process(one)
    if _process(other) == before:
        return True
    seen: tuple[int, int] | None = None
    for turn in range(_ROUNDS):
        with _transaction(one), _transaction(other):
            pair = _process(one), _process(other)
            if turn % 2:
                other.execute(b"ROLLBACK", prepare=False)
            else:
                one.execute(b"ROLLBACK", prepare=False)
        if pair[0] != before or (seen is not None and pair != seen):
            return True
        seen = pair
    return False


@contextlib.contextmanager
def _transaction(connection: Connection) -> Iterator[None]:
    connection.execute(b"BEGIN READ ONLY", prepare=False)
    try:
        yield
    finally:
        if connection.pgconn.transaction_status != 0:  # PQTRANS_IDLE: it was rolled back before
            connection.execute(b"ROLLBACK", prepare=False)


def driver() -> Any:
    """Return the driver's module, imported when it is first needed.

    Raises:
        MissingExtraError: It is not installed.

    """
    try:
        import psycopg
    except ImportError as error:
        message = "the PostgreSQL store needs psycopg: pip install 'perdure[postgres]'"
        raise MissingExtraError(message, extra="postgres") from error
    return psycopg


class _ActiveConnection:
    """A connection at work, and when to give its server up."""

    __slots__ = ("connection", "until")

    def __init__(self, connection: Connection, patience: float) -> None:
        self.connection = connection
        self.until = time.monotonic() + patience


@final
class Connections:
    """The open connections of one store."""

    def __init__(
        self, settings: PostgresSettings, password: Callable[[], str] | None = None
    ) -> None:
        self._settings = settings
        self._password = password
        self._given = ""  # the newest one that was used, for messages to leave out
        self._driver = driver()
        self.errors: type[psycopg.Error] = self._driver.Error
        """What the driver raises."""
        self._setup = _setup(settings.timeout).encode()
        self._conninfo = self._checked()
        self._lock = threading.Lock()
        self._idle: list[tuple[Connection, float]] = []
        self._used: set[_ActiveConnection] = set()
        self._closed = False
        self._is_own = False  # whether a connection is known to keep its server process

    def _checked(self) -> str:
        conninfo = self._settings.conninfo
        try:
            given = self._driver.conninfo.conninfo_to_dict(conninfo)
            missing = {name: text for name, text in _DEFAULTS.items() if name not in given}
            if "application_name" not in given:  # not at the start: a pooler would keep it
                self._setup += b"; SET application_name = 'perdure'"
            return str(self._driver.conninfo.make_conninfo(conninfo, **missing))
        except self.errors as error:
            # Not as the cause: it may quote any part of the URL.
            said = self._settings.hide(" ".join(str(error).split()))
            message = f"the URL of {self._settings.location} does not fit: {said}"
            raise ConfigError(message, option="url") from None

    def connect(self) -> Connection:
        """Return a new connection, in autocommit mode.

        Raises:
            ConfigError: Its address is a pooler's, which shares its connections among clients.
            StoreUnavailableError: There is no server, or it lets nobody in.

        """
        connection = self._reached()
        try:
            with self.watched(connection):
                if not self._is_own:
                    self._require_own(connection)
                connection.execute(self._setup, prepare=False)
        except self.errors as error:
            connection.close()
            raise self.mapped(error, "reach") from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _reached(self) -> Connection:
        secret: dict[str, str] = {}
        if self._password is not None:
            self._given = secret["password"] = self._password()
        try:
            connection: Connection = self._driver.connect(
                self._conninfo, autocommit=True, prepare_threshold=0, **secret
            )
        except self.errors as error:
            raise self.mapped(error, "reach") from error
        return connection

    def _require_own(self, connection: Connection) -> None:
        """Raise if another transaction may run elsewhere: before anything is set there.

        A server tells its process's number when it is connected to; a pooler tells one that it has
        made up. Behind one, two clients find out whether they can get each other's process.
        """
        if _process(connection) != connection.info.backend_pid:
            other = self._reached()
            with contextlib.closing(other), self.watched(other):
                if _are_mixed(connection, other):
                    message = (
                        f"{self._settings.location} is the address of a pooler that gives each "
                        "transaction any connection, such as PgBouncer with pool_mode=transaction: "
                        "settings, prepared statements and notifications do not hold there; "
                        "use the server's own address, or one with pool_mode=session"
                    )
                    raise ConfigError(message, option="url")
        self._is_own = True

    def mapped(self, error: psycopg.Error, doing: str) -> PerdureError:
        """Return a driver's error in perdure's words, without any password."""
        mapped = trouble(error, doing, self._settings.location)
        hidden = self._settings.hide(str(mapped))
        hidden = hidden.replace(self._given, "…") if self._given else hidden
        return type(mapped)(hidden, **mapped.facts)

    def failed(self, error: psycopg.Error, connection: Connection, doing: str) -> PerdureError:
        """Return an error in perdure's words, and let go of a server that takes no writes."""
        if error.sqlstate == READ_ONLY:  # a standby by now: the next connection may be better
            connection.close()
            with self._lock:
                idle, self._idle = self._idle, []
            for other, _ in idle:
                other.close()
        return self.mapped(error, doing)

    @contextlib.contextmanager
    def borrow(self, patience: float | None = None) -> Iterator[Connection]:
        """Lend a connection that stands, as far as one can see from here.

        ``cut`` gives its server up after ``patience`` seconds, by default the timeout.

        Raises:
            StoreUnavailableError: There is none to be had.

        """
        connection = self._take()
        try:
            with self.watched(connection, patience):
                yield connection
        finally:
            self.give_back(connection)

    def take_ready(self, fits: Callable[[Connection], bool]) -> Connection | None:
        """Return an idle connection that fits and was in use just now; None if there is none.

        Never waits. Give it back.
        """
        newest = time.monotonic() - FRESH
        with self._lock:
            for place in range(len(self._idle) - 1, -1, -1):
                connection, since = self._idle[place]
                if since >= newest and not connection.closed and fits(connection):
                    del self._idle[place]
                    return connection
        return None

    @contextlib.contextmanager
    def watched(self, connection: Connection, patience: float | None = None) -> Iterator[None]:
        """Let ``cut`` give up on a connection after ``patience`` seconds, or the timeout."""
        used = _ActiveConnection(
            connection, self._settings.timeout if patience is None else patience
        )
        with self._lock:
            self._used.add(used)
        try:
            yield
        finally:
            with self._lock:
                self._used.discard(used)

    def _take(self) -> Connection:
        while True:
            with self._lock:
                if self._closed:
                    message = f"the store at {self._settings.location} is closed: open a new one"
                    raise StoreUnavailableError(message)
                idle = self._idle.pop() if self._idle else None
            if idle is None:
                return self.connect()
            connection, idle_since = idle
            if time.monotonic() - idle_since < FRESH or not _hears_something(connection):
                return connection
            connection.close()  # the server has ended it

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next who needs one, if it is of any use."""
        idle = connection.pgconn.transaction_status == 0  # PQTRANS_IDLE
        with self._lock:
            if idle and not connection.closed and not self._closed:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    def cut(self, *, everything: bool = False) -> None:
        """Shut down the connections whose server has said nothing for too long."""
        now = time.monotonic()
        with self._lock:
            for used in self._used:
                if everything or used.until <= now:
                    self.shut_down(used.connection)

    def shut_down(self, connection: Connection) -> None:
        """End a connection that another thread waits on, which then gets an error."""
        with (
            contextlib.suppress(OSError, self.errors),  # it has just ended by itself
            socket.socket(fileno=os.dup(connection.fileno())) as twin,
        ):
            twin.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close what is idle, and cut what is at work."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        self.cut(everything=True)
        for connection, _ in idle:
            connection.close()


def _hears_something(connection: Connection) -> bool:
    """Say whether there is something to read on an idle connection: it has ended, then."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


# A password that is asked for at each new connection, since it may have expired by then


Password: TypeAlias = str | Callable[[], str | Awaitable[str]]
"""A password, or what returns one."""


def password_reader(password: Password, location: str, timeout: float) -> Callable[[], str]:
    """Return what gives the password, for threads of the event loop that this is called on.

    A plain function is called in the thread that connects; what it returns is awaited on the
    event loop if it is awaitable.
    """
    token = anyio.lowlevel.current_token()

    async def awaited(coming: Awaitable[str]) -> str:
        with anyio.fail_after(timeout):
            return await coming

    def read() -> str:
        try:
            found = password if isinstance(password, str) else password()
            if inspect.isawaitable(found):
                found = anyio.from_thread.run(awaited, found, token=token)
        except PerdureError:
            raise
        except Exception as error:
            kind = type(error).__name__  # its text may hold anything
            message = (
                f"cannot reach {location}: its password= failed with {kind}: see that it returns "
                "a password; saving goes on by itself"
            )
            raise StoreUnavailableError(message) from error
        if not isinstance(found, str):
            message = f"password= returned a {type(found).__name__}: it has to return text"
            raise ConfigError(message, option="password")
        return found

    return read
