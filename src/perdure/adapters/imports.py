"""An import of another SDK's own database: what each SDK's source has in common.

A source is only read: a SQLite file as a private copy of it, PostgreSQL in read-only transactions.
A session that is here already is continued, if it is how the source's begins; so an import that was
killed is repeated, and adds nothing twice. Each session is read back and compared.
"""

from __future__ import annotations

import errno
import importlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple
from urllib.parse import unquote
from uuid import uuid4

import anyio.to_thread
import msgspec

from perdure._lib.files import open_regular
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    MissingExtraError,
    PerdureError,
    SessionError,
    StoreUnavailableError,
)
from perdure.session.manager import SessionManager

SDKS: Final = {
    "langgraph": "perdure.adapters.langgraph_import",
    "openai-agents": "perdure.adapters.openai_agents_import",
    "adk": "perdure.adapters.google_adk_import",
    "claude-agent-sdk": "perdure.adapters.claude_agent_import",
}
"""The modules that read an SDK's database or files, by the names that the command line knows."""
PAGE: Final = 500
"""Names of sessions that are read from the source at a time."""
_LONGEST_DEFAULT: Final = 1000
"""Characters of a column's default; each row that lacks the column reads it anew."""
WAL: Final = b"\x02\x02"
"""Value in the header of a SQLite file, at `WAL_AT`, if changes are first written to a log."""
WAL_AT: Final = 18


UNPREPARED: Final[dict[str, dict[str, Any]]] = {
    "psycopg": {"prepare_threshold": None},
    "asyncpg": {
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": lambda: f"perdure_{uuid4()}",
    },
}
"""Options by which a driver of PostgreSQL's works behind a pooler, where another transaction has
another connection, and what was prepared is not there, or is somebody else's."""

ReadRows = Callable[..., Awaitable[Sequence[Any]]]
"""Reads the rows of a query with its values, a few at a time."""


class Moved(NamedTuple):
    """Outcome for one session of the source."""

    known: int
    """Part of it that was here already."""
    added: int


class SdkImport(msgspec.Struct, kw_only=True):
    """Result of an import."""

    sessions: int = 0
    """Sessions in the source."""
    imported: int = 0
    """Sessions that were not here."""
    continued: int = 0
    """Sessions of which the beginning was here; what follows was added."""
    there: int = 0
    """Sessions that are here with all that the source has; those without any content, too."""
    added: int = 0
    """Items, events or checkpoints that were added."""
    left_alone: list[str] = []
    """State that sessions share, and that differs because it is in use here."""
    failed: dict[str, str] = {}
    """Reasons why a session, or state that sessions share, was not imported, by its name."""


class Source(ABC):
    """The sessions of an SDK's database."""

    total: int
    """Number of its sessions."""

    @abstractmethod
    def names(self) -> AsyncIterator[Any]:
        """Return their names, as they are shown."""

    @abstractmethod
    async def move(self, name: Any, sessions: SessionManager, tenant: str) -> Moved:
        """Add what the store lacks of a session, and compare what is there with the source."""

    async def finish(self, sessions: SessionManager, tenant: str, done: SdkImport) -> None:  # noqa: B027  # nothing, where they share nothing
        """Move what sessions share, and say what was left alone."""


async def import_sessions(
    source: Source,
    sessions: SessionManager,
    *,
    tenant: str = "",
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> SdkImport:
    """Import every session of a source. It can be killed and repeated.

    Args:
        source: Where they are.
        sessions: Where they go,
        tenant: and whose they become.
        progress: What is told how many are done, and of how many.

    Raises:
        StoreUnavailableError: The store is out of reach.

    """
    done = SdkImport(sessions=source.total)
    count = 0
    async for name in source.names():
        try:
            with reading(f"session {name}"):
                moved = await source.move(name, sessions, tenant)
        except StoreUnavailableError:
            raise
        except PerdureError as error:
            done.failed[str(name) or "''"] = str(error)
        else:
            done.added += moved.added
            done.imported += bool(moved.added and not moved.known)
            done.continued += bool(moved.added and moved.known)
            done.there += not moved.added
        count += 1
        progress(count, max(source.total, count))
    with reading("what its sessions share"):
        await source.finish(sessions, tenant, done)
    return done


def diverged(key: object, what: str) -> SessionError:
    """Return the error for a session that is not how the source's begins."""
    message = (
        f"session {key} is here already, and {what}: it was left alone; keep both with `perdure "
        "rename`, or remove it with `perdure forget`, and import again"
    )
    return SessionError(message, key=str(key))


def not_equal(key: object, what: str) -> CorruptRecordError:
    """Return the error for a session that does not read back as it was."""
    message = f"session {key} does not read back as the source has it: {what} differs"
    return CorruptRecordError(message, key=str(key))


def reader(module: str, package: str) -> Any:
    """Return a module of the SDK that reads its database.

    Raises:
        MissingExtraError: It is not installed.

    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"the source is read with {package}: pip install '{package}'"
        raise MissingExtraError(message, extra=package) from error


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Say what of the source could not be read.

    Raises:
        CorruptRecordError: What the SDK's reader raised is its cause.

    """
    try:
        yield
    except PerdureError:
        raise
    except Exception as error:
        message = f"{what} cannot be read from the source: {type(error).__name__}: {error}"
        raise CorruptRecordError(message) from error


# SQLite


def sqlite_path(url: str) -> Path | None:
    """Return the file of a SQLite URL, or of a path; None for another URL.

    >>> str(sqlite_path("sqlite+aiosqlite:///conversations.db"))
    'conversations.db'
    """
    scheme, is_url, location = url.partition("://")
    if not is_url:
        return Path(url)
    if scheme.partition("+")[0] != "sqlite":
        return None
    return Path(unquote(location.partition("?")[0]).removeprefix("/"))


@asynccontextmanager
async def sqlite_copy(
    path: Path, *tables: str, more: Sequence[str] = ()
) -> AsyncGenerator[Path, None]:
    """Yield a private copy of a SQLite database, as of now; it may be in use.

    The copy has no views and no triggers, and what is read of it is stored: code in the database
    could be endless, or make a value of a gigabyte from a few bytes.

    Args:
        path: The file.
        tables: What the copy must have.
        more: Which tables are read besides, if they are there.

    Raises:
        StoreUnavailableError: There is no such file, or it cannot be read.
        ConfigError: It is not the SDK's database.

    """
    import sqlite3

    with TemporaryDirectory(prefix="perdure-import-") as folder:
        copy = Path(folder, "source.db")
        try:
            await anyio.to_thread.run_sync(_copy, path, copy)
            names = [*tables, *more]
            there, computed = await anyio.to_thread.run_sync(_without_code, copy, names)
        except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
            message = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
            if _is_full(error):
                message = f"{folder} has no room for a copy of {path}: let TMPDIR name another one"
            raise StoreUnavailableError(message, path=str(path)) from error
        require_tables(path, there, *tables)
        if computed:
            message = (
                f"the table {computed[0]} of {path} computes what it holds, and no SDK makes such "
                "a table: copy its rows into a plain one, and import that"
            )
            raise ConfigError(message, table=computed[0])
        yield copy


def _without_code(copy: Path, names: Sequence[str]) -> tuple[set[str], list[str]]:
    """Remove code from a copy, and return its tables, and which of some compute what they hold.

    Those are virtual, or have values that are made when they are read.
    """
    import sqlite3

    with closing(sqlite3.connect(copy)) as connection:
        query = "SELECT type, name FROM sqlite_master WHERE type IN ('trigger', 'view')"
        for kind, name in connection.execute(query).fetchall():
            quoted = name.replace('"', '""')
            connection.execute(f'DROP {kind} IF EXISTS "{quoted}"')
        connection.commit()
        query = "SELECT name, rootpage FROM sqlite_master WHERE type = 'table'"
        roots: dict[str, int] = dict(connection.execute(query).fetchall())
        query = "SELECT 1 FROM pragma_table_xinfo(?) WHERE hidden <> 0 OR length(dflt_value) > ?"
        computed = [
            name
            for name in names
            if roots.get(name) == 0
            or connection.execute(query, (name, _LONGEST_DEFAULT)).fetchone()
        ]
        return set(roots), computed


def _is_full(error: Exception) -> bool:
    import sqlite3

    code = getattr(error, "sqlite_errorcode", None)
    return code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) == errno.ENOSPC


def require_tables(location: object, there: set[str], *tables: str) -> None:
    """Refuse a database without the SDK's tables.

    Raises:
        ConfigError: One is missing.

    """
    missing = [table for table in tables if table not in there]
    if missing:
        message = f"{location} has no table {missing[0]}: is it this SDK's database?"
        raise ConfigError(message, table=missing[0])


def _copy(path: Path, copy: Path) -> None:
    import sqlite3

    path = path.resolve()  # the log is beside the file, not beside a link
    with open_regular(path) as file:
        is_wal = file.read(WAL_AT + len(WAL))[WAL_AT:] == WAL
    if not is_wal or Path(f"{path}-shm").exists():
        try:
            source = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            with closing(source), closing(sqlite3.connect(copy)) as target:
                source.backup(target)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_READONLY:
                raise
        else:
            return
    # Nobody has it open, or a crash has left its log or journal: SQLite would leave files of its
    # own next to it, or write it to recover. So it recovers the copy.
    names = ["", "-wal", "-journal"]
    states = [_state_of(Path(f"{path}{name}")) for name in names]
    for name, state in zip(names, states, strict=True):
        if state is not None:
            shutil.copyfile(f"{path}{name}", f"{copy}{name}")
    if [_state_of(Path(f"{path}{name}")) for name in names] != states:
        raise OSError("it was changed while it was copied: import again")


def _state_of(path: Path) -> tuple[int, int] | None:
    if not path.exists():
        return None
    state = path.stat()
    return state.st_size, state.st_mtime_ns


async def sqlite_rows(path: Path, query: str, *values: Any) -> Sequence[Any]:
    """Return the rows of a query.

    Raises:
        CorruptRecordError: The file is damaged.

    """
    with reading("a table"):
        return await anyio.to_thread.run_sync(_rows, path, query, *values)


def _rows(path: Path, query: str, *values: Any) -> list[Any]:
    import sqlite3

    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query, values).fetchall()


# PostgreSQL


def postgres_url(url: str, driver: str = "") -> str:
    """Return the URL of a PostgreSQL database for a driver of SQLAlchemy's, or for psycopg's own.

    >>> postgres_url("postgres://localhost/agents", "psycopg")
    'postgresql+psycopg://localhost/agents'

    Raises:
        ConfigError: It is another kind of database.

    """
    scheme, _, location = url.partition("://")
    kind, _, named = scheme.partition("+")
    if kind not in ("postgres", "postgresql"):
        message = f"{scheme}:// cannot be imported from: give a SQLite file or a PostgreSQL URL"
        raise ConfigError(message, option="URL")
    if driver and named == "asyncpg":
        driver = named
    return f"postgresql{'+' if driver else ''}{driver}://{location}"


@asynccontextmanager
async def read_only_engine(url: str, package: str, *tables: str) -> AsyncGenerator[Any, None]:
    """Yield an engine of SQLAlchemy's whose transactions are read-only.

    Args:
        url: A PostgreSQL database.
        package: What brings SQLAlchemy along.
        tables: What the database must have.

    Raises:
        ConfigError: It is not the SDK's database.
        StoreUnavailableError: It is out of reach.

    """
    address = postgres_url(url, "psycopg")
    asynchronous = reader("sqlalchemy.ext.asyncio", package)
    from sqlalchemy import inspect

    driver = "asyncpg" if address.startswith("postgresql+asyncpg:") else "psycopg"
    try:
        engine = asynchronous.create_async_engine(
            address,
            execution_options={"postgresql_readonly": True},
            connect_args=UNPREPARED[driver],
        )
    except ModuleNotFoundError as error:
        message = f"the source is read with {error.name}: pip install '{error.name}'"
        raise MissingExtraError(message, extra=error.name) from error
    except Exception as error:
        raise ConfigError(f"the URL cannot be read: {error}", option="URL") from error
    try:
        try:
            async with engine.connect() as connection:
                there = await connection.run_sync(lambda each: inspect(each).get_table_names())
        except Exception as error:
            raise StoreUnavailableError(f"the source cannot be read: {error}") from error
        require_tables(engine.url.render_as_string(hide_password=True), set(there), *tables)
        yield engine
    finally:
        await engine.dispose()


async def engine_rows(engine: Any, query: str, *values: Any) -> Sequence[Any]:
    """Return the rows of a query; its values are where it has question marks."""
    from sqlalchemy import text

    names = {f"v{at}": value for at, value in enumerate(values)}
    for name in names:
        query = query.replace("?", f":{name}", 1)
    async with engine.connect() as connection:
        found = await connection.execute(text(query), names)
        return list(found.all())
