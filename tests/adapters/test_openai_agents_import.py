"""Databases that the OpenAI Agents SDK's own sessions have written, imported."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from agents import SQLiteSession
from agents.extensions.memory import AdvancedSQLiteSession
from anyio import to_thread

import perdure
from perdure import SessionManager
from perdure.adapters import PerdureSession, imports
from perdure.adapters.imports import SdkImport, import_sessions
from perdure.adapters.openai_agents_import import TABLES, source_of
from perdure.errors import ConfigError, StoreUnavailableError
from tests.adapters.import_kills import killed_imports
from tests.servers.pooler import WAYS, reached
from tests.servers.postgres import database


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The SDK's sessions run on asyncio."""
    return "asyncio"


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[SessionManager]:
    async with perdure.connect(tmp_path / "store") as manager:
        yield manager


def turn(number: int) -> list[Any]:
    """What a run adds, with items that a message alone does not give back."""
    return [
        {"role": "user", "content": f"Question {number} é"},
        {"id": f"rs_{number}", "type": "reasoning", "summary": [], "encrypted_content": "x" * 99},
        {"type": "function_call", "call_id": f"c{number}", "name": "tide", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": f"c{number}", "output": "noon"},
        {"type": "compaction", "nested": {"float": 0.1, "null": None, "list": [1, "2"]}},
        {
            "id": f"m{number}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "At noon.", "annotations": []}],
        },
    ]


async def written(path: Path, lengths: dict[str, int]) -> None:
    """Let the SDK write so many turns more into sessions."""
    for name, turns in lengths.items():
        session = SQLiteSession(name, path)
        begin = len(await session.get_items()) // len(turn(0))
        for number in range(begin, begin + turns):
            await session.add_items(turn(number))
        session.close()


async def imported(url: str | Path, sessions: SessionManager, **options: Any) -> SdkImport:
    async with source_of(str(url)) as source:
        return await import_sessions(source, sessions, **options)


def state_of(folder: Path) -> dict[str, tuple[str, int, int]]:
    return {
        path.name: (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in folder.iterdir()
    }


async def test_sessions_read_back_as_the_sdk_has_them(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "conversations.db"
    await written(path, {"ada": 3, "bob": 1, "empty": 0})
    shown: list[tuple[int, int]] = []

    done = await imported(path, sessions, progress=lambda *at: shown.append(at))

    assert (done.sessions, done.imported, done.added, done.failed) == (2, 2, 24, {})
    assert shown == [(1, 2), (2, 2)]
    for name in ("ada", "bob"):
        session = SQLiteSession(name, path)
        assert await PerdureSession(name, sessions).get_items() == await session.get_items()
        session.close()
    assert [info.turns for info in await sessions.list()] == [3, 1]  # a turn for each question


@pytest.mark.parametrize("is_open", [False, True])
async def test_the_source_is_not_changed(
    tmp_path: Path, sessions: SessionManager, is_open: bool
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    await written(folder / "conversations.db", {"ada": 2})
    writer = SQLiteSession("bob", folder / "conversations.db") if is_open else None
    if writer is not None:
        await writer.add_items(turn(0))  # in the write-ahead log
    os.chmod(folder / "conversations.db", 0o444)
    before = state_of(folder)

    done = await imported(folder / "conversations.db", sessions)

    assert done.imported == 1 + is_open
    after = state_of(folder)
    for states in (before, after):
        states.pop("conversations.db-shm", None)  # who reads which page: SQLite's own
    assert after == before
    if writer is not None:
        writer.close()


async def test_an_import_is_repeated_and_doubles_nothing(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "conversations.db"
    await written(path, {"ada": 2, "bob": 1})
    # What was there when an import was killed: the beginning of a session.
    async with PerdureSession("ada", sessions) as begun:
        await begun.add_items(turn(0)[:2])

    assert (await imported(path, sessions)).continued == 1
    again = await imported(path, sessions)
    assert (again.there, again.added) == (2, 0)

    await written(path, {"ada": 1, "cy": 1})
    more = await imported(path, sessions)
    assert (more.continued, more.imported, more.there, more.added) == (1, 1, 1, 12)
    assert await PerdureSession("ada", sessions).get_items() == [
        item for number in range(3) for item in turn(number)
    ]


@pytest.mark.deep
async def test_an_import_that_is_killed_anywhere_ends_as_one_that_was_not(tmp_path: Path) -> None:
    path, store = tmp_path / "conversations.db", tmp_path / "killed"
    await written(path, dict.fromkeys("abcdef", 6))
    kills = await to_thread.run_sync(lambda: killed_imports("openai-agents", path, store, step=30))
    assert kills > 2
    async with perdure.connect(store) as sessions:
        items = [item for number in range(6) for item in turn(number)]
        for name in "abcdef":
            assert await PerdureSession(name, sessions).get_items() == items


async def test_a_session_that_went_on_here_is_left_alone(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "conversations.db"
    await written(path, {"ada": 1, "bob": 1})
    await imported(path, sessions)
    for name in ("ada", "bob"):
        async with PerdureSession(name, sessions) as session:
            await session.add_items(turn(7))
    await written(path, {"bob": 1})  # and there

    done = await imported(path, sessions)

    assert done.there == 1
    assert list(done.failed) == ["bob"]
    assert "is here already" in done.failed["bob"]
    assert await PerdureSession("bob", sessions).get_items() == turn(0) + turn(7)


async def test_a_session_that_cannot_be_imported_holds_up_no_other(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "conversations.db"
    await written(path, {"a": 1, "b\n": 1, "c": 1})

    done = await imported(path, sessions)

    assert list(done.failed) == ["b\n"]
    assert done.imported == 2


async def test_the_main_branch_of_an_advanced_session_is_imported(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "conversations.db"
    session = AdvancedSQLiteSession(session_id="ada", db_path=path, create_tables=True)
    await session.add_items(turn(0))
    await session.add_items(turn(1))
    await session.create_branch_from_turn(2)
    await session.add_items(turn(5))
    session.close()

    await imported(path, sessions)

    assert await PerdureSession("ada", sessions).get_items() == turn(0) + turn(1)


async def test_an_import_for_a_customer_is_the_customers(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "conversations.db"
    await written(path, {"ada": 1})
    await imported(path, sessions, tenant="acme")
    assert await sessions.list() == []
    assert await PerdureSession("ada", sessions, tenant="acme").get_items() == turn(0)


async def test_what_is_no_database_of_the_sdk_is_refused(tmp_path: Path) -> None:
    async def opened(url: object) -> None:
        async with source_of(str(url)):
            pass

    with pytest.raises(StoreUnavailableError, match="No such file"):
        await opened(tmp_path / "missing.db")
    (tmp_path / "text").write_text("text" * 1000)
    with pytest.raises(StoreUnavailableError, match="not a database"):
        await opened(f"sqlite:///{tmp_path}/text")
    sqlite3.connect(tmp_path / "empty.db").close()
    with pytest.raises(ConfigError, match="no table agent_sessions"):
        await opened(tmp_path / "empty.db")
    with pytest.raises(ConfigError, match="mysql:// cannot be imported"):
        await opened("mysql://localhost/agents")


@pytest.mark.parametrize(
    "column",
    [
        "message_data TEXT AS (printf('%.*c', 1000000000, 'x'))",
        "message_data TEXT AS (printf('%.*c', 1000000000, 'x')) STORED",
        f"message_data TEXT, padding TEXT DEFAULT '{'x' * 1001}'",
    ],
    ids=["generated", "stored", "default"],
)
@pytest.mark.parametrize("table", TABLES)
async def test_a_table_that_makes_what_it_holds_is_refused(
    table: str, column: str, tmp_path: Path
) -> None:
    """A few bytes would become a gigabyte for each row that is read."""
    with closing(sqlite3.connect(tmp_path / "x.db")) as connection:
        for name in TABLES:
            given = column if name == table else "message_data TEXT"
            connection.execute(f"CREATE TABLE {name} (id INTEGER, session_id TEXT, {given})")
    with pytest.raises(ConfigError, match=f"table {table} of .* computes what it holds"):
        async with source_of(str(tmp_path / "x.db")):
            pass


async def test_views_and_triggers_of_a_database_are_not_run(
    tmp_path: Path, sessions: SessionManager
) -> None:
    await written(tmp_path / "x.db", {"ada": 1})
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT x FROM n"
    with closing(sqlite3.connect(tmp_path / "x.db")) as connection:
        names = ("message_id", "session_id", "branch_id")
        columns = ", ".join(f"x AS {name}" for name in names)
        view = f"SELECT {columns} FROM ({endless})"
        connection.execute(f"CREATE VIEW message_structure AS {view}")
        connection.execute(
            'CREATE TRIGGER "a""b" AFTER INSERT ON agent_messages BEGIN '
            "SELECT RAISE(ABORT, 'was run'); END"
        )
        connection.commit()
    done = await imported(tmp_path / "x.db", sessions)
    assert (done.imported, done.failed) == (1, {})


@pytest.mark.parametrize("way", WAYS)
async def test_a_session_in_postgresql_is_read_in_read_only_transactions(
    sessions: SessionManager, way: str
) -> None:
    engines = pytest.importorskip("sqlalchemy.ext.asyncio")
    from agents.extensions.memory import SQLAlchemySession

    with database("openai_agents") as url:
        engine = engines.create_async_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        for name in ("ada", "bob"):
            session = SQLAlchemySession(name, engine=engine, create_tables=True)
            await session.add_items(turn(0))
            await session.add_items(turn(1))
        await engine.dispose()

        with reached(url, way) as address:
            assert (await imported(address, sessions)).imported == 2
            assert await PerdureSession("bob", sessions).get_items() == turn(0) + turn(1)

            async with source_of(address) as source:
                with pytest.raises(Exception, match="read-only transaction"):
                    await source._rows("DELETE FROM agent_messages RETURNING id")


async def test_rows_that_the_sdk_skips_are_reported(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "conversations.db"
    await written(path, {"": 1, "ada": 1, "bob": 1, "lost": 1})
    with closing(sqlite3.connect(path)) as connection:
        row = "INSERT INTO agent_messages (session_id, message_data) VALUES ('ada', '{broken')"
        connection.execute(row)
        connection.execute("DELETE FROM agent_sessions WHERE session_id = 'lost'")
        connection.commit()

    done = await imported(path, sessions)

    assert (done.sessions, done.imported, [*done.failed]) == (4, 2, ["''", "ada"])
    assert "1 of its 7 rows are not read" in done.failed["ada"]
    assert await PerdureSession("lost", sessions).get_items() == turn(0)


async def test_a_plain_session_beside_branches_is_imported(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "conversations.db"
    await written(path, {"plain": 1})
    session = AdvancedSQLiteSession(session_id="ada", db_path=path, create_tables=True)
    await session.add_items(turn(0))
    session.close()

    assert (await imported(path, sessions)).imported == 2
    assert await PerdureSession("plain", sessions).get_items() == turn(0)


async def test_a_link_is_imported_with_the_write_ahead_log(
    tmp_path: Path, sessions: SessionManager
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    session = SQLiteSession("ada", folder / "conversations.db")
    await session.add_items(turn(0))
    (tmp_path / "link.db").symlink_to(folder / "conversations.db")

    await imported(tmp_path / "link.db", sessions)

    session.close()
    assert await PerdureSession("ada", sessions).get_items() == turn(0)


async def test_a_source_that_a_crash_has_left_gets_no_files(
    tmp_path: Path, sessions: SessionManager
) -> None:
    session, folder = SQLiteSession("ada", tmp_path / "conversations.db"), tmp_path / "crashed"
    await session.add_items(turn(0))
    folder.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(tmp_path / f"conversations.db{suffix}", folder)
    session.close()
    before = state_of(folder)

    await imported(folder / "conversations.db", sessions)

    assert state_of(folder) == before
    assert await PerdureSession("ada", sessions).get_items() == turn(0)


async def test_a_journal_that_a_crash_has_left_is_rolled_back_in_the_copy(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path, folder = tmp_path / "conversations.db", tmp_path / "crashed"
    await written(path, {"ada": 50})
    folder.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA cache_size = 2")
        connection.execute("BEGIN")
        connection.execute("UPDATE agent_messages SET message_data = '{}'")
        for suffix in ("", "-journal"):
            shutil.copy(f"{path}{suffix}", folder)
    before = state_of(folder)

    await imported(folder / "conversations.db", sessions)

    assert state_of(folder) == before
    assert len(await PerdureSession("ada", sessions).get_items()) == 50 * len(turn(0))


async def test_a_url_that_cannot_be_read_is_explained() -> None:
    pytest.importorskip("sqlalchemy.ext.asyncio")
    with pytest.raises(ConfigError, match="the URL cannot be read"):
        async with source_of("postgresql://h:port/db"):
            pass


async def test_a_full_temporary_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "conversations.db"
    await written(path, {"ada": 1})

    def full(_path: Path, _copy: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(imports, "_copy", full)
    with pytest.raises(StoreUnavailableError, match="let TMPDIR name another"):
        async with source_of(str(path)):
            pass
