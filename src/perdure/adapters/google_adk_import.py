"""Sessions of Google ADK's own databases, to be imported into `PerdureSessionService`.

Read with the SDK's `DatabaseSessionService` or `SqliteSessionService`. The state of an app, and of
a user, is taken over until it is in use here: until there is a session of theirs that the source
does not have, or that has gone on. A value that was changed here is left alone in any case.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from perdure.adapters.google_adk import PerdureSessionService, quoted
from perdure.adapters.google_adk_events import as_json
from perdure.adapters.imports import (
    PAGE,
    Moved,
    ReadRows,
    SdkImport,
    engine_rows,
    not_equal,
    read_only_engine,
    reader,
    reading,
    sqlite_copy,
    sqlite_path,
    sqlite_rows,
)
from perdure.errors import PerdureError
from perdure.records.keys import require_name
from perdure.records.values import encode_value
from perdure.session.internals import parts_of, registry_of
from perdure.session.open import OpenRequest, SessionOpening
from perdure.session.scope import scope_key

if TYPE_CHECKING:
    from google.adk.sessions.base_session_service import BaseSessionService
    from google.adk.sessions.session import Session as AdkSession

    from perdure.session.manager import SessionManager
    from perdure.session.session import Session

PACKAGE: Final = "google-adk[db]"
TABLES: Final = ("sessions", "events", "app_states", "user_states")
METADATA: Final = "adk_internal_metadata"
SHARED: Final = ("app:", "user:", "temp:")
"""Keys that are no state of a session's own."""
WRITTEN: Final = "google-adk/imported"
"""The named state of a scope that keeps what imports wrote into it: digests, by keys."""
STATES: Final = {
    "user_states": (
        "SELECT app_name, user_id, state FROM user_states s WHERE NOT EXISTS (SELECT 1 FROM "
        "sessions o WHERE o.app_name = s.app_name AND o.user_id = s.user_id)"
    ),
    "app_states": (
        "SELECT app_name, '', state FROM app_states s WHERE NOT EXISTS (SELECT 1 FROM "
        "sessions o WHERE o.app_name = s.app_name)"
    ),
}
"""State that no session has, by the table."""
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
class AdkSource:
    """The sessions of a database of the SDK's."""

    def __init__(self, total: int, service: BaseSessionService, rows: ReadRows) -> None:
        self.total: int = total
        self._service = service
        self._rows = rows
        self._user: _SharedState | None = None
        self._app: _SharedState | None = None
        self._left_alone: list[str] = []
        self._failed: dict[str, str] = {}

    async def names(self) -> AsyncIterator[AdkName]:
        """Return the sessions' names, those of a user one after another."""
        after = AdkName("", "", "")
        while page := await self._rows(f"{NAMES} {PAGE}", *after):
            for row in page:
                after = AdkName(*row)
                yield after

    async def move(self, name: AdkName, sessions: SessionManager, tenant: str) -> Moved:
        """Add the events that the store lacks, and compare all of them, and the state."""
        app, user = self._scopes(name)
        await self._share(sessions, tenant, app, user)
        with reading(f"session {name}"):
            session = await _read(self._service, name)
        if session is None:  # deleted since
            return Moved(0, 0)
        app.values, user.values = _shared(session, "app:"), _shared(session, "user:")
        target = PerdureSessionService(sessions, tenant=tenant)
        known, added = await target.import_session(session)
        stored = await _read(target, name)
        if known <= len(session.events):
            _require_equal(name, session, stored)
            app.moved += 1
            user.moved += 1
        return Moved(known, added)

    async def finish(self, sessions: SessionManager, tenant: str, done: SdkImport) -> None:
        """Take over the state of the last app and user, and say what is in use here."""
        await self._share(sessions, tenant, None, None)
        for table, query in STATES.items():
            for app, user, values in await self._rows(query):
                app_state, user_state = self._scopes(AdkName(app, user, ""))
                state = user_state if table == "user_states" else app_state
                try:
                    with reading(state.scope):
                        state.values = values if isinstance(values, dict) else json.loads(values)
                except PerdureError as error:
                    self._failed[state.scope] = str(error)
                    continue
                state.moved = 1
                await self._share(sessions, tenant, None, state)
        await self._share(sessions, tenant, None, None)
        done.left_alone += self._left_alone
        done.failed |= self._failed

    def _scopes(self, name: AdkName) -> tuple[_SharedState, _SharedState]:
        """Return what is known of the state of a session's app and user."""
        prefix = f"{quoted(name.app)}/"
        app = _SharedState(f"app:{quoted(name.app)}", prefix, None)
        user = _SharedState(f"user:{prefix}{name.user}", f"{prefix}{name.user}", name.user or None)
        if self._app is not None and self._app.scope == app.scope:
            app = self._app
        if self._user is not None and self._user.scope == user.scope:
            user = self._user
        return app, user

    async def _share(
        self,
        sessions: SessionManager,
        tenant: str,
        app: _SharedState | None,
        user: _SharedState | None,
    ) -> None:
        """Take over the state of an app and of a user all of whose sessions were imported."""
        for state, following in ((self._user, user), (self._app, app)):
            if state is not None and state is not following and state.moved:
                try:
                    if not await state.take_over(sessions, tenant):
                        self._left_alone.append(state.scope)
                except PerdureError as error:  # of none of the sessions
                    self._failed[state.scope] = str(error)
        self._app, self._user = app, user


@final
class _SharedState:
    """State that sessions share, of which the newest session read has brought the values."""

    def __init__(self, scope: str, prefix: str, owner: str | None) -> None:
        self.scope: str = scope
        self.owner: str | None = owner
        self.moved: int = 0
        """Sessions that are here as the source has them."""
        self.values: dict[str, Any] = {}
        self._prefix = prefix

    async def take_over(self, sessions: SessionManager, tenant: str) -> bool:
        """Store it, unless it is in use here; return whether it is here as the source has it."""
        scope = sessions.scope(self.scope, tenant=tenant, owner=self.owner)
        if _digest(await scope.values()) == _digest(self.values):
            return True  # and takes no lease
        key = scope_key(self.scope, tenant)
        request = OpenRequest(key=key, owner=self.owner)
        opening = SessionOpening(parts_of(sessions).opener, request)
        async with opening as session, session.turn():
            wanted = {name: _digest(value) for name, value in self.values.items()}
            here = {name: _digest(await session.memory.get(name)) for name in await _keys(session)}
            written: dict[str, str] = await session.state.get(WRITTEN) or {}
            differ = {
                name
                for name in wanted.keys() | (here.keys() & written.keys())
                if here.get(name) != wanted.get(name)
            }
            ours = {name for name in differ if here.get(name) == written.get(name)}
            if not ours or (here and await self._count(sessions, tenant) > self.moved):
                return not differ
            _store(session, {name: self.values.get(name) for name in ours}, wanted.keys())
            known = {name: wanted[name] for name in ours & wanted.keys()}
            kept = {name: mark for name, mark in written.items() if name not in ours}
            session.state.set(WRITTEN, kept | known)
        return differ == ours

    async def _count(self, sessions: SessionManager, tenant: str) -> int:
        """Return how many sessions share it here."""
        count, after = 0, None
        while page := await sessions.list(
            tenant=tenant, prefix=self._prefix, after=after, limit=PAGE
        ):
            after = page[-1]
            count += sum(
                self._prefix in (info.key.agent, f"{info.key.agent.partition('/')[0]}/")
                for info in page
            )
        return count


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


def _shared(session: AdkSession, prefix: str) -> dict[str, Any]:
    return {
        key.removeprefix(prefix): value
        for key, value in session.state.items()
        if key.startswith(prefix)
    }


def _require_equal(name: AdkName, session: AdkSession, stored: AdkSession | None) -> None:
    if stored is None or list(map(as_json, stored.events)) != list(map(as_json, session.events)):
        raise not_equal(name, "an event")
    if _own(stored.state) != _own(session.state):
        raise not_equal(name, "the state")


def _own(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not key.startswith(SHARED)}
