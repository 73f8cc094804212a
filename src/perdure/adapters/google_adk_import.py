"""Sessions of Google ADK's own databases, to be imported into `PerdureSessionService`.

Read with the SDK's `DatabaseSessionService` or `SqliteSessionService`; the state of apps and users,
which sessions share, from its tables. It follows the source until it is changed here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from perdure.adapters.claims import as_kept
from perdure.adapters.google_adk import PerdureSessionService
from perdure.adapters.google_adk_events import as_json
from perdure.adapters.google_adk_shared import APP, TEMP, USER, scope_key_of
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
from perdure.adapters.items import quoted
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

PACKAGE: Final = "google-adk[db]"
TABLES: Final = ("sessions", "events", "app_states", "user_states")
METADATA: Final = "adk_internal_metadata"
WRITTEN: Final = "google-adk/imported"
"""The named state of a scope that keeps what the last import wrote into it: digests, by keys."""
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

    async def names(self) -> AsyncIterator[AdkName]:
        """Return the sessions' names, those of a user one after another."""
        after = AdkName("", "", "")
        while page := await self._rows(f"{NAMES} {PAGE}", *after):
            for row in page:
                after = AdkName(*row)
                yield after

    async def move(self, name: AdkName, sessions: SessionManager, tenant: str) -> Moved:
        """Add the events that the store lacks, and compare all of them, and the state."""
        with reading(f"session {name}"):
            session = await _read(self._service, name)
        if session is None:  # deleted since
            return Moved(0, 0)
        target = PerdureSessionService(sessions, tenant=tenant)
        known, added = await target.import_session(session)
        stored = await _read(target, name)
        if known <= len(session.events):
            _require_equal(name, session, stored)
        return Moved(known, added)

    async def finish(self, sessions: SessionManager, tenant: str, done: SdkImport) -> None:
        """Take over the state of apps and users, and say what was changed here."""
        for kind, query in STATES.items():
            after = "", ""
            while page := await self._rows(f"{query} {PAGE}", *after):
                for app, user, stored in page:
                    after = app, user
                    scope = f"{kind}{quoted(app)}" + (f"/{user}" if kind == USER else "")
                    try:
                        with reading(scope):
                            values = stored if isinstance(stored, dict) else json.loads(stored)
                            values = {scope_key_of(k): v for k, v in as_kept(values).items()}
                        if not await _take_over(sessions, tenant, scope, user or None, values):
                            done.left_alone.append(scope)
                    except PerdureError as error:  # of none of the sessions
                        done.failed[scope] = str(error)


async def _take_over(
    sessions: SessionManager,
    tenant: str,
    scope: str,
    owner: str | None,
    values: Mapping[str, Any],
) -> bool:
    """Store what a scope has in the source, unless it has anything else than an import wrote.

    Returns:
        Whether it is here as the source has it.

    """
    wanted = _digests(values)
    place = sessions.scope(scope, tenant=tenant, owner=owner)
    if _digests(await place.values()) == wanted:
        return True  # and takes no lease
    request = OpenRequest(key=scope_key(scope, tenant), owner=owner)
    opening = SessionOpening(parts_of(sessions).opener, request)
    async with opening as session, session.turn():
        known = await session.memory.keys()
        here = _digests({name: await session.memory.get(name) for name in known})
        if here and here != await session.state.get(WRITTEN):
            return False
        for name, value in values.items():  # before anything is appended
            require_name("key", name)
            encode_value(value, registry_of(session))
        for name, value in values.items():
            if here.get(name) != wanted[name]:
                session.memory.set(name, value, pinned=True)
        for name in here.keys() - wanted.keys():
            session.memory.drop(name)
        session.state.set(WRITTEN, wanted)
    return True


def _digests(values: Mapping[str, Any]) -> dict[str, str]:
    """Return what tells each value from any other; of JSON, as ADK stores it."""
    encoded = {name: json.dumps(value, sort_keys=True).encode() for name, value in values.items()}
    return {
        name: hashlib.blake2b(data, digest_size=15).hexdigest() for name, data in encoded.items()
    }


async def _read(service: BaseSessionService, name: AdkName) -> AdkSession | None:
    return await service.get_session(app_name=name.app, user_id=name.user, session_id=name.id)


def _require_equal(name: AdkName, session: AdkSession, stored: AdkSession | None) -> None:
    if stored is None or list(map(as_json, stored.events)) != list(map(as_json, session.events)):
        raise not_equal(name, "an event")
    if _own(stored.state) != _own(session.state):
        raise not_equal(name, "the state")


def _own(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not key.startswith((APP, USER, TEMP))}
