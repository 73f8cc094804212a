"""The tables "What you gain, what you lose" of the pages "Coming from …", line by line."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.adapters import PerdureConversationStore, PerdureSession
from perdure.session.internals import store_of
from perdure.store import all_records

ROOT = Path(__file__).parents[2]
PAGES = ("openai-agents", "google-adk", "pydantic-ai")
COMMANDS = {f"python -m tests.adapters.kills {page}" for page in PAGES}
COMMANDS |= {"python -m benchmarks adapters"}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The SDKs run on asyncio alone."""
    return "asyncio"


def rows(page: str) -> list[str]:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    table = text.partition("## What you gain, what you lose")[2].partition("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize("page", PAGES)
def test_each_line_names_a_test_or_a_command(page: str) -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "adapters").glob("test_*.py"))
    known = set(re.findall(r"def (test_\w+)", tests))
    for row in rows(page):
        named = row.rstrip("| ").rpartition("| ")[2].strip("`")
        assert named in known | COMMANDS, row
    assert any("*Lost:*" in row for row in rows(page))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_the_sdk_s_session_mixes_writers_and_parts_calls_from_outputs(tmp_path: Path) -> None:
    from agents import SQLiteSession

    one, two = (SQLiteSession("a", tmp_path / "a.db") for _ in range(2))
    for session, text in ((one, "1"), (two, "2"), (one, "3")):
        await session.add_items([user(text)])
    assert [item["content"] for item in await two.get_items()] == ["1", "2", "3"]  # type: ignore[typeddict-item]
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "c", "output": "x"}
    await one.add_items([call, output])
    assert await one.get_items(limit=1) == [output]
    one.close()
    two.close()


async def test_what_is_cleared_is_still_in_the_log(tmp_path: Path) -> None:
    async with perdure.connect(tmp_path) as sessions:
        session = PerdureSession("a", sessions)
        await session.add_items([user("one")])
        await session.clear_session()
        assert await session.get_items() == []
        view = await sessions.load("a")
        assert view is not None
        log = await all_records(store_of(view).read_log(view.key))
        assert any(b"one" in record.payload for record in log)
        await sessions.forget("a")
        assert await sessions.load("a") is None


def test_what_the_sdk_s_advanced_session_has_is_not_here() -> None:
    from agents.extensions.memory import AdvancedSQLiteSession

    for name in ("create_branch_from_turn", "switch_to_branch", "store_run_usage"):
        assert hasattr(AdvancedSQLiteSession, name)
        assert not hasattr(PerdureSession, name)


async def test_an_encrypted_session_with_a_wrong_key_pops_what_it_cannot_read(
    tmp_path: Path,
) -> None:
    pytest.importorskip("cryptography")
    from agents import SQLiteSession
    from agents.extensions.memory import EncryptedSession

    async with perdure.connect(tmp_path / "store") as sessions:
        for inner in (SQLiteSession("a", tmp_path / "a.db"), PerdureSession("a", sessions)):
            right: Any = EncryptedSession("a", inner, encryption_key="right")  # type: ignore[arg-type]
            wrong: Any = EncryptedSession("a", inner, encryption_key="wrong")  # type: ignore[arg-type]
            await right.add_items([user("one"), user("two")])
            if isinstance(inner, SQLiteSession):
                with pytest.raises(Exception):  # noqa: B017, PT011  # the SDK's
                    await wrong.pop_item()
                assert len(await right.get_items()) == 2
                inner.close()
            else:
                assert await wrong.pop_item() is None
                assert await right.get_items() == []


async def test_the_sdk_s_database_has_one_event_of_an_id_and_objects_as_json(
    tmp_path: Path,
) -> None:
    pytest.importorskip("google.adk")
    import enum

    from google.adk.events.event import Event
    from google.adk.events.event_actions import EventActions
    from google.adk.sessions import DatabaseSessionService

    class Color(enum.Enum):
        RED = "r"

    service = DatabaseSessionService(f"sqlite+aiosqlite:///{tmp_path}/a.db")
    session = await service.create_session(app_name="harbor", user_id="ada", state={"given": 1})
    event = Event(id="e", author="a")
    await service.append_event(session, event)
    with pytest.raises(Exception, match="UNIQUE"):
        await service.append_event(session, event)
    again = await service.get_session(app_name="harbor", user_id="ada", session_id=session.id)
    assert again is not None
    odd = Event(author="a", actions=EventActions(state_delta={"x": Color.RED}))
    await service.append_event(again, odd)
    loaded = await service.get_session(app_name="harbor", user_id="ada", session_id=session.id)
    assert loaded is not None
    assert loaded.state["x"] == "r"
    await service.close()


def test_another_loop_is_refused_while_the_first_one_is_open(tmp_path: Path) -> None:
    pytest.importorskip("google.adk")
    from perdure.adapters import PerdureSessionService

    service = PerdureSessionService(f"sqlite:///{tmp_path}/a.db")
    first = asyncio.new_event_loop()
    first.run_until_complete(service.create_session(app_name="a", user_id="u", session_id="s"))
    asked = service.get_session(app_name="a", user_id="u", session_id="s")
    with pytest.raises(perdure.WrongLoopError):
        asyncio.run(asked)
    first.run_until_complete(service.close())
    first.close()


def test_the_next_event_loop_opens_a_store_s_url_anew(tmp_path: Path) -> None:
    from pydantic_ai.conversation import Conversation
    from pydantic_ai.messages import ModelRequest, UserPromptPart

    store = PerdureConversationStore.from_url(f"sqlite:///{tmp_path}/a.db")
    conversation = Conversation(conversation_id="a")
    for number in range(3):
        conversation.messages.append(ModelRequest(parts=[UserPromptPart(f"{number}")]))
        asyncio.run(store.save(conversation))
    loaded = asyncio.run(store.load("a"))
    assert loaded is not None
    assert len(loaded.messages) == 3


async def test_objects_in_a_tool_s_result_come_back_as_json() -> None:
    from datetime import date

    from pydantic_ai.conversation import Conversation
    from pydantic_ai.messages import ModelRequest, ToolReturnPart

    async with PerdureConversationStore.in_memory() as store:
        part = ToolReturnPart("f", {"day": date(2026, 11, 27)}, "c")
        held = Conversation(messages=[ModelRequest(parts=[part])], conversation_id="a")
        await store.save(held)
        loaded = await store.load("a")
        assert loaded is not None
        assert loaded.messages[0].parts[0].content == {"day": "2026-11-27"}  # type: ignore[union-attr]
