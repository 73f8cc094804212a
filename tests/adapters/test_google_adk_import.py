"""Databases that ADK's own session services have written, imported."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread

pytest.importorskip("google.adk")
pytest.importorskip("sqlalchemy.ext.asyncio")

from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import BaseSessionService, DatabaseSessionService, Session
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.genai import types

import perdure
from perdure import SessionManager
from perdure.adapters import PerdureSessionService
from perdure.adapters.google_adk_import import source_of
from perdure.adapters.imports import SdkImport, import_sessions
from perdure.errors import ConfigError
from tests.adapters.import_kills import killed_imports
from tests.servers.pooler import WAYS, reached
from tests.servers.postgres import database


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The SDK runs on asyncio alone."""
    return "asyncio"


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[SessionManager]:
    async with perdure.connect(tmp_path / "store") as manager:
        yield manager


Opened = Callable[[Path], Any]

SERVICES: dict[str, Opened] = {
    "database": lambda path: DatabaseSessionService(f"sqlite+aiosqlite:///{path}"),
    "sqlite": lambda path: SqliteSessionService(str(path)),
}


@pytest.fixture(params=[*SERVICES])
async def own(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    """A service of the SDK's own, with ``tmp_path / "adk.db"``."""
    service = SERVICES[request.param](tmp_path / "adk.db")
    yield service
    if isinstance(service, DatabaseSessionService):
        await service.close()


only_database = pytest.mark.parametrize("own", ["database"], indirect=True)


def event(number: int, **delta: Any) -> Event:
    is_user = number % 2 == 0
    parts = [types.Part(text=f"Text {number} é"), types.Part(text="why", thought=True)]
    if not is_user:
        call = types.FunctionCall(id=f"c{number}", name="tide", args={"at": None, "n": [1.5]})
        parts.append(types.Part(function_call=call))
    return Event(
        id=f"event-{number}",
        author="user" if is_user else "harbor",
        invocation_id=f"i{number // 2}",
        timestamp=1000.0 + number,
        content=types.Content(role="user" if is_user else "model", parts=parts),
        actions=EventActions(state_delta=delta),
    )


async def add(service: BaseSessionService, user: str, id: str, *events: Event) -> None:
    where = {"app_name": "the/app", "user_id": user, "session_id": id}
    session = await service.get_session(**where)
    if session is None:
        state = {"begun": True, "app:fleet": 1, f"user:is_{user}": [1, None]}
        session = await service.create_session(**where, state=state)
    for each in events:
        await service.append_event(session, each)


async def filled(service: BaseSessionService) -> None:
    await add(service, "ada", "one", event(0), event(1, color="red", **{"app:fleet": 2}))
    await add(service, "ada", "two", event(2, color={"is": None}, **{"user:boat": "Sula"}))
    await add(service, "bob", "one", *(event(number) for number in range(5)))
    await add(service, "bob", "empty")


async def all_of(service: BaseSessionService) -> list[dict[str, Any]]:
    listed = (await service.list_sessions(app_name="the/app")).sessions
    found = [
        await service.get_session(app_name=each.app_name, user_id=each.user_id, session_id=each.id)
        for each in sorted(listed, key=lambda each: (each.user_id, each.id))
    ]
    return [as_data(each) for each in found if each is not None]


def as_data(session: Session) -> dict[str, Any]:
    data = session.model_dump(mode="json", exclude={"last_update_time"})
    return {**data, "updated": round(session.last_update_time, 3)}


async def imported(url: object, sessions: SessionManager, **options: Any) -> SdkImport:
    async with source_of(str(url)) as source:
        return await import_sessions(source, sessions, **options)


async def test_sessions_read_back_as_the_sdk_has_them(
    tmp_path: Path, sessions: SessionManager, own: Any
) -> None:
    path = tmp_path / "adk.db"
    await filled(own)

    done = await imported(path, sessions)

    assert (done.imported, done.added, done.failed, done.left_alone) == (3, 8, {}, [])
    assert done.there == 1  # without any event
    assert await all_of(PerdureSessionService(sessions)) == await all_of(own)
    state = await PerdureSessionService(sessions).get_user_state(app_name="the/app", user_id="ada")
    assert state == {"is_ada": [1, None], "boat": "Sula"}


async def test_the_source_is_not_changed(
    tmp_path: Path, sessions: SessionManager, own: Any
) -> None:
    path = tmp_path / "adk.db"
    await filled(own)
    if isinstance(own, DatabaseSessionService):
        await own.close()
    path.chmod(0o444)
    before = hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns

    assert not (await imported(path, sessions)).failed

    assert (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) == before
    assert [each.name for each in tmp_path.glob("adk*")] == ["adk.db"]


async def test_an_import_is_repeated_and_doubles_nothing(
    tmp_path: Path, sessions: SessionManager, own: Any
) -> None:
    path = tmp_path / "adk.db"
    await filled(own)
    await imported(path, sessions)
    again = await imported(path, sessions)
    assert (again.there, again.added, again.left_alone) == (4, 0, [])

    delta = {"app:fleet": 3, "user:boat": None}
    await add(own, "ada", "two", event(3, color="blue", **delta), event(4))
    await add(own, "cy", "new", event(9))
    more = await imported(path, sessions)

    assert (more.imported, more.continued, more.there, more.added) == (1, 1, 3, 3)
    assert more.left_alone == []
    assert await all_of(PerdureSessionService(sessions)) == await all_of(own)


@only_database
async def test_an_import_that_was_killed_goes_on(
    tmp_path: Path, sessions: SessionManager, own: Any
) -> None:
    path = tmp_path / "adk.db"
    await filled(own)
    # What is there when it is killed between two saves.
    target = PerdureSessionService(sessions)
    begun = await own.get_session(app_name="the/app", user_id="bob", session_id="one")
    begun.events = begun.events[:2]
    await target.import_session(begun)

    assert (await imported(path, sessions)).continued == 1
    assert await all_of(target) == await all_of(own)


@only_database
@pytest.mark.deep
async def test_an_import_that_is_killed_anywhere_ends_as_one_that_was_not(
    tmp_path: Path, own: Any
) -> None:
    await filled(own)
    await add(own, "ada", "long", *(event(number, n=number) for number in range(20, 500)))
    path, store = tmp_path / "adk.db", tmp_path / "killed"
    kills = await to_thread.run_sync(lambda: killed_imports("adk", path, store, step=70))
    assert kills > 2
    async with perdure.connect(store) as sessions:
        assert await all_of(PerdureSessionService(sessions)) == await all_of(own)


@only_database
async def test_what_is_in_use_here_is_left_alone(
    tmp_path: Path, sessions: SessionManager, own: Any
) -> None:
    path = tmp_path / "adk.db"
    await filled(own)
    await imported(path, sessions)
    target = PerdureSessionService(sessions)
    await add(target, "ada", "one", event(7, **{"app:fleet": 9, "user:boat": "Here"}))
    await add(own, "ada", "one", event(8, **{"app:fleet": 8, "user:boat": "There"}))
    await add(own, "bob", "one", event(6, **{"user:boat": "Bob's"}))
    before = await target.get_session(app_name="the/app", user_id="ada", session_id="one")
    assert before is not None

    done = await imported(path, sessions)

    assert list(done.failed) == ["the%2Fapp/ada/one"]
    assert "its events are not how the source's begin" in done.failed["the%2Fapp/ada/one"]
    assert done.left_alone == ["user:the%2Fapp/ada", "app:the%2Fapp"]
    after = await target.get_session(app_name="the/app", user_id="ada", session_id="one")
    assert after is not None
    assert as_data(after) == as_data(before)
    bob = await target.get_user_state(app_name="the/app", user_id="bob")
    assert bob["boat"] == "Bob's"


@only_database
async def test_a_session_that_cannot_be_imported_holds_up_no_other(
    tmp_path: Path, sessions: SessionManager, own: Any
) -> None:
    await filled(own)
    await add(own, "a\nb", "one", event(0, **{"user:boat": "Sula"}))

    done = await imported(tmp_path / "adk.db", sessions)

    assert list(done.failed) == ["the%2Fapp/a\nb/one", "user:the%2Fapp/a\nb"]
    assert (done.imported, done.there) == (3, 1)


@only_database
async def test_a_pickled_object_is_refused_and_not_run(
    tmp_path: Path, sessions: SessionManager, own: Any
) -> None:
    path = tmp_path / "adk.db"
    await filled(own)
    await own.close()
    marker = tmp_path / "was run"
    pickled = f"cpathlib\nPath\n(V{marker}\ntRcos\nmkdir\n(V{marker}\ntR.".encode()
    with closing(sqlite3.connect(path)) as connection:  # as the SDK's releases before 1.22 had it
        connection.executescript(V0)
        connection.execute("INSERT INTO sessions VALUES ('a', 'u', 's', '{}', ?, ?)", (AT, AT))
        connection.execute("INSERT INTO sessions VALUES ('a', 'u', 't', '{}', ?, ?)", (AT, AT))
        connection.execute(
            "INSERT INTO events (id, app_name, user_id, session_id, invocation_id, author, actions,"
            " timestamp) VALUES ('e', 'a', 'u', 's', 'i', 'user', ?, ?)",
            (pickled, AT),
        )
        connection.commit()

    done = await imported(path, sessions)

    assert "Refusing to load" in done.failed["a/u/s"]
    assert done.there == 1
    assert not marker.exists()


AT = "2025-01-01 00:00:00.000000"
V0 = """
DROP TABLE events; DROP TABLE sessions; DROP TABLE adk_internal_metadata;
DROP TABLE app_states; DROP TABLE user_states;
CREATE TABLE app_states (app_name VARCHAR(128) PRIMARY KEY, state TEXT, update_time DATETIME);
CREATE TABLE user_states (app_name VARCHAR(128), user_id VARCHAR(128), state TEXT,
    update_time DATETIME, PRIMARY KEY (app_name, user_id));
CREATE TABLE sessions (app_name VARCHAR(128), user_id VARCHAR(128), id VARCHAR(128), state TEXT,
    create_time DATETIME, update_time DATETIME, PRIMARY KEY (app_name, user_id, id));
CREATE TABLE events (id VARCHAR(128), app_name VARCHAR(128), user_id VARCHAR(128),
    session_id VARCHAR(128), invocation_id VARCHAR(256), author VARCHAR(256), actions BLOB,
    long_running_tool_ids_json TEXT, branch VARCHAR(256), timestamp DATETIME, content TEXT,
    grounding_metadata TEXT, custom_metadata TEXT, usage_metadata TEXT, citation_metadata TEXT,
    partial BOOLEAN, turn_complete BOOLEAN, error_code VARCHAR(256), error_message VARCHAR(1024),
    interrupted BOOLEAN, input_transcription TEXT, output_transcription TEXT,
    PRIMARY KEY (id, app_name, user_id, session_id));
"""


@pytest.mark.parametrize("way", WAYS)
async def test_sessions_in_postgresql_are_read_in_read_only_transactions(
    sessions: SessionManager, way: str
) -> None:
    with database("google_adk") as url:
        own = DatabaseSessionService(url.replace("postgresql:", "postgresql+psycopg:"))
        await filled(own)

        with reached(url, way) as address:
            assert not (await imported(address, sessions)).failed
            assert await all_of(PerdureSessionService(sessions)) == await all_of(own)
            await own.close()

            async with source_of(address) as source:
                with pytest.raises(Exception, match="read-only transaction"):
                    await source._service.create_session(app_name="a", user_id="u")


async def test_what_is_no_database_of_the_sdk_is_refused(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "empty.db").close()
    with pytest.raises(ConfigError, match="no table sessions"):
        async with source_of(str(tmp_path / "empty.db")):
            pass


async def test_state_that_was_changed_here_is_left_alone(
    tmp_path: Path, sessions: SessionManager, own: Any
) -> None:
    path, state = tmp_path / "adk.db", {"user:name": "A", "user:port": 1, "user:old": 0}
    await own.create_session(app_name="h", user_id="ada", session_id="s", state=state)
    scope = sessions.scope("user:h/ada")

    async def changed(number: int, **delta: Any) -> list[str]:
        session = await own.get_session(app_name="h", user_id="ada", session_id="s")
        await own.append_event(session, event(number, **delta))
        return (await imported(path, sessions)).left_alone

    assert not (await imported(path, sessions)).left_alone
    assert await scope.values() == {"name": "A", "port": 1, "old": 0}
    assert not await changed(0, **{"user:port": 2})  # it follows the source
    assert await scope.values() == {"name": "A", "port": 2, "old": 0}
    await scope.update({"name": "changed here", "added": "later"})
    assert await changed(1, **{"user:port": 3}) == ["user:h/ada"]
    assert await scope.values() == {"name": "changed here", "port": 2, "old": 0, "added": "later"}


async def test_state_of_a_user_without_sessions_is_imported(
    tmp_path: Path, sessions: SessionManager, own: Any
) -> None:
    for user in ("ada", "bob"):
        state = {"user:name": user, "app:fleet": 1}
        where = {"app_name": user, "user_id": user, "session_id": "s"}
        await own.create_session(**where, state=state)
        await own.delete_session(**where)

    for _ in range(2):
        done = await imported(tmp_path / "adk.db", sessions)
        assert not done.failed
        assert not done.left_alone
        for user in ("ada", "bob"):
            assert await sessions.scope(f"user:{user}/{user}").values() == {"name": user}
            assert await sessions.scope(f"app:{user}").values() == {"fleet": 1}


async def test_temporary_keys_in_stored_state_are_not_imported(
    tmp_path: Path, sessions: SessionManager, own: Any
) -> None:
    where = {"app_name": "h", "user_id": "ada", "session_id": "s"}
    await own.create_session(**where, state={"own": 1})
    with closing(sqlite3.connect(tmp_path / "adk.db")) as connection:
        connection.execute("UPDATE sessions SET state = ?", ('{"own": 1, "temp:step": 2}',))
        connection.commit()

    assert not (await imported(tmp_path / "adk.db", sessions)).failed
    session = await PerdureSessionService(sessions).get_session(**where)
    assert session is not None
    assert session.state == {"own": 1}
