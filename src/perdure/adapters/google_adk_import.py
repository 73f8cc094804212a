"""Sessions of Google ADK's own databases, to be imported into `PerdureSessionService`.

Read with the SDK's `DatabaseSessionService` or `SqliteSessionService`; the state of apps and users,
which sessions share, from its tables. It is taken over, once the sessions are here, until it is in
use here: until there is a session of theirs that the source does not have, or that has gone on. A
value that was changed here is left alone in any case.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from perdure.adapters.google_adk import APP, TEMP, USER, PerdureSessionService, quoted
from perdure.adapters.google_adk_events import as_json
from perdure.adapters.imports import (
    PAGE,
    Moved,
    ReadRows,
    SdkImport,
    Source,
    engine_rows,
    not_equal,
    read_only_engine,
    reader,
    reading,
    sqlite_copy,
    sqlite_path,
    sqlite_rows,
)
from perdure.adapters.items import AdapterManager
from perdure.errors import PerdureError
from perdure.records.keys import require_name
from perdure.records.values import encode_value
from perdure.session.internals import open_stored, registry_of
from perdure.session.scope import scope_key

if TYPE_CHECKING:
    from google.adk.sessions.base_session_service import BaseSessionService
    from google.adk.sessions.session import Session as AdkSession

    from perdure.session.manager import SessionManager
    from perdure.session.session import Session

PACKAGE: Final = "google-adk[db]"
TABLES: Final = ("sessions", "events", "app_states", "user_states")
METADATA: Final = "adk_internal_metadata"
WRITTEN: Final = "google-adk/imported"
"""The named state of a scope that keeps what imports wrote into it: digests, by keys."""
STATES: Final = {
    USER: (
        "SELECT app_name, user_id, state FROM user_states WHERE (app_name, user_id) > (?, ?) "
        "ORDER BY app_name, user_id LIMIT"
    ),
    APP: (
        "SELECT app_name, '', state FROM app_states WHERE (app_name, '') > (?, ?) "
        "ORDER BY app_name LIMIT"
    ),
}
"""Tables of state that sessions share, by the prefix of its keys."""
NAMES: Final = (
    "SELECT app_name, user_id, id FROM sessions WHERE (app_name, user_id, id) > (?, ?, ?) "
    "ORDER BY app_name, user_id, id LIMIT"
)


class AdkName(NamedTuple):
    """Which session."""

    app: str
    user: str
    id: str

    def __str__(self) -> str:
        return f"{quoted(str(self.app))}/{self.user}/{self.id}"  # a damaged one may be bytes


@asynccontextmanager
async def source_of(url: str) -> AsyncGenerator[AdkSource, None]:
    """Open a database of the SDK's, to be read.

    Raises:
        StoreUnavailableError: It cannot be read.
        ConfigError: It is not the SDK's database.

    """
    path = sqlite_path(url)
    async with AsyncExitStack() as stack:
        if path is not None:
            copy = await stack.enter_async_context(sqlite_copy(path, *TABLES, more=(METADATA,)))
            rows: ReadRows = partial(sqlite_rows, copy)
            columns = {row[1] for row in await rows("PRAGMA table_info(events)")}
            known = await rows("SELECT 1 FROM sqlite_master WHERE name = ?", METADATA)
            if "event_data" in columns and not known:
                module = reader("google.adk.sessions.sqlite_session_service", "google-adk")
                service = module.SqliteSessionService(str(copy))
            else:
                service = _database_service(db_url=f"sqlite+aiosqlite:///{copy}")
                stack.push_async_callback(service.close)
        else:
            engine = await stack.enter_async_context(read_only_engine(url, PACKAGE, *TABLES))
            rows = partial(engine_rows, engine)
            service = _database_service(db_engine=engine)
            await _skip_preparation(service, engine)
        (total,) = (await rows("SELECT count(*) FROM sessions"))[0]
        yield AdkSource(total, service, rows)


def _database_service(**options: Any) -> Any:
    reader("sqlalchemy.ext.asyncio", PACKAGE)
    module = reader("google.adk.sessions.database_session_service", PACKAGE)
    return module.DatabaseSessionService(**options)


async def _skip_preparation(service: Any, engine: Any) -> None:
    """Let the service read tables of an older version, without the indexes that it would make."""
    checks = reader("google.adk.sessions.migration._schema_check_utils", PACKAGE)
    async with engine.connect() as connection:
        version = await connection.run_sync(checks.get_db_schema_version_from_connection)
    service._db_schema_version = version  # noqa: SLF001  # in a read-only transaction
    service._tables_created = True  # noqa: SLF001  # it cannot find that out


@final
class AdkSource(Source):
    """The sessions of a database of the SDK's."""

    def __init__(self, total: int, service: BaseSessionService, rows: ReadRows) -> None:
        self.total: int = total
        self._service = service
        self._rows = rows
        self._moved: dict[str, int] = {}
        """Sessions that are here as the source has them, by the scope of a state they share."""

    async def names(self) -> AsyncIterator[AdkName]:
        """Return the sessions' names, those of a user one after another."""
        after = AdkName("", "", "")
        while page := await self._rows(f"{NAMES} {PAGE}", *after):
            for row in page:
                after = AdkName(*row)
                yield after

    async def move(self, name: AdkName, sessions: SessionManager, tenant: str) -> Moved:
        """Add the events that the store lacks, and compare all of them, and the state."""
        scopes = [_scope(kind, name.app, name.user) for kind in (APP, USER)]
        for scope in scopes:
            self._moved.setdefault(scope, 0)
        with reading(f"session {name}"):
            session = await _read(self._service, name)
        if session is None:  # deleted since
            return Moved(0, 0)
        target = PerdureSessionService(sessions, tenant=tenant)
        known, added = await target.import_session(session)
        stored = await _read(target, name)
        if known <= len(session.events):
            _require_equal(name, session, stored)
            for scope in scopes:
                self._moved[scope] += 1
        return Moved(known, added)

    async def finish(self, sessions: SessionManager, tenant: str, done: SdkImport) -> None:
        """Take over the state of apps and users, and say what is in use here."""
        for kind, query in STATES.items():
            after = "", ""
            while page := await self._rows(f"{query} {PAGE}", *after):
                for app, user, stored in page:
                    after = app, user
                    scope = _scope(kind, app, user)
                    moved = self._moved.get(scope)
                    if moved == 0:  # none of its sessions could be imported
                        continue
                    try:
                        with reading(scope):
                            values = stored if isinstance(stored, dict) else json.loads(stored)
                        target = _SharedState(sessions, tenant, kind, app, user)
                        if not await target.take_over(values, moved or 0):
                            done.left_alone.append(scope)
                    except PerdureError as error:  # of none of the sessions
                        done.failed[scope] = str(error)


def _scope(kind: str, app: str, user: str) -> str:
    """Return the name of the scope that keeps the state of an app, or of a user."""
    return f"{kind}{quoted(app)}" if kind == APP else f"{kind}{quoted(app)}/{user}"


@final
class _SharedState:
    """The state of an app, or of a user, that their sessions here share."""

    def __init__(
        self, sessions: SessionManager, tenant: str, kind: str, app: str, user: str
    ) -> None:
        self._sessions = sessions
        self._tenant = tenant
        self._is_app = kind == APP
        self._scope = _scope(kind, app, user)
        self._prefix = f"{quoted(app)}/{user}"
        self._owner = user or None

    async def take_over(self, values: Mapping[str, Any], moved: int) -> bool:
        """Store values, unless they are in use here; return whether they are here then.

        Args:
            values: What the source has.
            moved: How many sessions that share them are here as the source has them.

        """
        scope = self._sessions.scope(self._scope, tenant=self._tenant, owner=self._owner)
        if _digest(await scope.values()) == _digest(values):
            return True  # and takes no lease
        key = scope_key(self._scope, self._tenant)
        opening = open_stored(self._sessions, key, owner=self._owner)
        async with opening as session, session.turn():
            wanted = {name: _digest(value) for name, value in values.items()}
            here = {name: _digest(await session.memory.get(name)) for name in await _keys(session)}
            written: dict[str, str] = await session.state.get(WRITTEN) or {}
            differ = {
                name
                for name in wanted.keys() | (here.keys() & written.keys())
                if here.get(name) != wanted.get(name)
            }
            ours = {name for name in differ if here.get(name) == written.get(name)}
            if not ours or (here and await self._count() > moved):
                return not differ
            _store(session, {name: values.get(name) for name in ours}, wanted.keys())
            known = {name: wanted[name] for name in ours & wanted.keys()}
            kept = {name: mark for name, mark in written.items() if name not in ours}
            session.state.set(WRITTEN, kept | known)
        return differ == ours

    async def _count(self) -> int:
        """Return how many sessions share it here."""
        place = AdapterManager(self._sessions, instead="", tenant=self._tenant)
        keys = [info.key async for info in place.listed(prefix=self._prefix)]
        return sum(self._is_app or key.agent == self._prefix for key in keys)


async def _keys(session: Session) -> list[str]:
    return list(await session.memory.keys())


def _digest(value: Any) -> str:
    """Return what tells a value from any other; JSON, as ADK stores it."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=15).hexdigest()


def _store(session: Session, values: Mapping[str, Any], wanted: AbstractSet[str]) -> None:
    """Store those values that are wanted, and drop the others, all or none."""
    for name in wanted & values.keys():  # before anything is appended
        require_name("key", name)
        encode_value(values[name], registry_of(session))
    for name, value in values.items():
        if name in wanted:
            session.memory.set(name, value, pinned=True)
        else:
            session.memory.drop(name)


async def _read(service: BaseSessionService, name: AdkName) -> AdkSession | None:
    return await service.get_session(app_name=name.app, user_id=name.user, session_id=name.id)


def _require_equal(name: AdkName, session: AdkSession, stored: AdkSession | None) -> None:
    if stored is None or list(map(as_json, stored.events)) != list(map(as_json, session.events)):
        raise not_equal(name, "an event")
    if _own(stored.state) != _own(session.state):
        raise not_equal(name, "the state")


def _own(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not key.startswith((APP, USER, TEMP))}
