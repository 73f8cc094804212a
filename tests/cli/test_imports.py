"""``perdure import SDK URL``: sessions of another SDK's own database."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from agents import SQLiteSession

from tests.cli.conftest import Command

ITEMS = [{"role": "user", "content": "When is low tide?"}, {"role": "assistant", "content": "Noon"}]


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    path = tmp_path / "conversations.db"

    async def write() -> None:
        for name in ("ada", "bob"):
            session = SQLiteSession(name, path)
            await session.add_items(ITEMS)
            session.close()

    anyio.run(write)
    return path


def test_sessions_are_imported_once(command: Command, conversations: Path, tmp_path: Path) -> None:
    options = "--store", str(tmp_path / "new")
    first = command("import", "openai-agents", str(conversations), *options)
    assert (first.status, "2 of 2 sessions imported" in first.out) == (0, True)
    again = command("import", "openai-agents", f"sqlite:///{conversations}", *options, "--json")
    assert {key: again.json[key] for key in ("sdk", "sessions", "imported", "there", "failed")} == {
        "sdk": "openai-agents",
        "sessions": 2,
        "imported": 0,
        "there": 2,
        "failed": {},
    }
    assert command("check", *options).status == 0


def test_a_session_that_differs_is_named_and_left_alone(
    command: Command, conversations: Path, store: Path
) -> None:
    ran = command("import", "openai-agents", str(conversations), "--store", str(store))
    assert ran.status == 1
    assert "ada: NOT IMPORTED: session ada is here already" in ran.out
    assert "5" in command("show", "ada", "--store", str(store)).out


def test_what_was_given_is_explained(command: Command, tmp_path: Path) -> None:
    options = "--store", str(tmp_path / "new")
    wrong = {
        ("openai-agents",): "which database? perdure import openai-agents URL",
        ("openai", "x.db"): "openai is no SDK that can be imported: choose",
        ("openai-agents", "x.db", "--id", "ada"): "keeps the ids: leave out --id",
        ("openai-agents", "x.db", "--tables", "one"): "give two, such as agent_sessions,agent_mess",
        ("openai-agents", "x.db", "--tables", "a,b;c"): "invalid tables 'a,b;c'",
        ("langgraph", "x.db", "--tables", "a,b"): "--tables is for the database of openai-agents",
        ("openai-agents", "mysql://host/x"): "give a SQLite file or a PostgreSQL URL",
    }
    for tokens, message in wrong.items():
        ran = command("import", *tokens, *options)
        assert (ran.status, message in ran.err) == (2, True)
    missing = command("import", "openai-agents", str(tmp_path / "x.db"), *options)
    assert (missing.status, "x.db cannot be read: No such file" in missing.err) == (1, True)
    assert not (tmp_path / "new").exists()


def test_what_was_done_is_counted(command: Command, conversations: Path, tmp_path: Path) -> None:
    options = "--store", str(tmp_path / "new")
    command("import", "openai-agents", str(conversations), *options)
    again = command("import", "openai-agents", str(conversations), *options)
    assert "0 items; 0 continued, 2 already complete or empty, 0 not imported" in again.out


def test_tables_may_have_names_of_their_own(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "conversations.db"

    async def write() -> None:
        named = {"sessions_table": "chats", "messages_table": "lines"}
        session = SQLiteSession("ada", path, **named)
        await session.add_items(ITEMS)
        session.close()

    anyio.run(write)
    options = "--store", str(tmp_path / "new")
    ran = command("import", "openai-agents", str(path), *options)
    assert (ran.status, "no table agent_sessions" in ran.err) == (2, True)
    ran = command("import", "openai-agents", str(path), "--tables", "chats,lines", *options)
    assert (ran.status, "1 of 1 sessions imported" in ran.out) == (0, True)
