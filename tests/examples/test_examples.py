from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from tests.servers.anthropic_script import AnthropicScript, said

ROOT = Path(__file__).parents[2]


class Shell:
    """Runs examples on a store of its own, as a user would."""

    def __init__(self, home: Path) -> None:
        self.env = {**os.environ, "PERDURE_HOME": str(home)}

    def run(self, name: str, *arguments: str) -> list[str]:
        command = [sys.executable, "-W", "error", str(ROOT / "examples" / name), *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.splitlines()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "home")


def test_the_eight_lines_remember_the_run_before(shell: Shell) -> None:
    assert shell.run("eight_lines.py") == ["Hello! I remember 0 earlier messages."]
    assert shell.run("eight_lines.py") == ["Hello! I remember 2 earlier messages."]


def test_the_script_assistant_knows_what_was_said_in_another_process(shell: Shell) -> None:
    shell.run("script_assistant.py", "My name is Ada")
    (answer,) = shell.run("script_assistant.py", "What did I say?")
    assert "'My name is Ada'" in answer


def test_the_trio_example_goes_on_where_it_stopped(shell: Shell) -> None:
    assert "cedar: 3 turns, durable up to record 13" in shell.run("on_trio.py")
    assert any(line.startswith("cedar: 6 turns") for line in shell.run("on_trio.py"))


def test_a_session_moves_from_one_worker_to_another_and_loses_nothing(shell: Shell) -> None:
    first, asked, second, done, last = shell.run("several_workers.py")
    assert first == "first has it after turn 0"
    assert asked == "first was asked for it, and let go"
    turn = int(second.removeprefix("second has it after turn "))
    assert turn >= 1
    assert done == f"second is done after turn {turn + 5}"
    assert last == f"{turn + 5} turns, the last: Answer {turn + 5}, by second"


def test_an_agent_with_tools_goes_on_with_what_its_tools_have_said(shell: Shell) -> None:
    first = shell.run("worker_with_tools.py")
    assert first[0].startswith("tide({'harbor': 'Oosthaven', 'hour': 1}) -> ")
    again = shell.run("worker_with_tools.py")
    assert "I have looked 2 tides up for you so far." in again[1]
    assert again[2].startswith("The turn is durable, up to record ")


@pytest.mark.deep
def test_a_session_of_google_adk_is_continued_and_rewound(shell: Shell) -> None:
    pytest.importorskip("google.adk")
    for number in (1, 2):
        answer, looked_up = shell.run("google_adk.py", "When is low tide?")
        assert answer.endswith(f"You have asked {number} questions.")
        assert looked_up == f"Looked up for ada: {number}"
    shell.run("google_adk.py", "--rewind")
    answer, looked_up = shell.run("google_adk.py", "And today?")
    assert answer.endswith("You have asked 2 questions.")
    assert looked_up == "Looked up for ada: 3"


@pytest.mark.deep
def test_a_session_of_the_claude_agent_sdk_is_continued(shell: Shell, tmp_path: Path) -> None:
    pytest.importorskip("claude_agent_sdk")
    with AnthropicScript() as server:
        shell.env |= {**server.environment, "CLAUDE_CONFIG_DIR": str(tmp_path / "one")}
        assert shell.run("claude_agent.py", "When is low tide?") == ["At noon."]
        shell.env["CLAUDE_CONFIG_DIR"] = str(tmp_path / "two")  # as on another machine
        assert shell.run("claude_agent.py", "And tomorrow?") == ["At noon."]
        questions = [text for role, text in said(server.requests[-1]) if role == "user"]
    assert questions == ["When is low tide?", "And tomorrow?"]
    (listed,) = shell.run("claude_agent.py")
    assert listed.endswith("  When is low tide?")


@pytest.mark.deep
def test_a_run_of_the_openai_agents_sdk_is_resumed_in_another_process(shell: Shell) -> None:
    (waits,) = shell.run("openai_agents.py", "ask")
    assert waits.startswith("waits for approval: sail(")
    done = ["We are there. The session has 6 items."]
    assert shell.run("openai_agents.py", "approve") == done
    assert shell.run("openai_agents.py", "approve") == ["nothing waits for approval"]


@pytest.mark.deep
def test_a_conversation_of_pydantic_ai_is_resumed_in_another_process(shell: Shell) -> None:
    (waits,) = shell.run("pydantic_ai_conversation.py", "ask")
    assert waits == "waits for approval: sail({'harbor': 'Oosthaven'})"
    done = ["We are there. The conversation has 6 messages."]
    assert shell.run("pydantic_ai_conversation.py", "approve") == done
    assert shell.run("pydantic_ai_conversation.py", "approve") == ["nothing waits for approval"]


@pytest.mark.deep
def test_a_workflow_of_the_agent_framework_is_resumed_in_another_process(shell: Shell) -> None:
    for number in (1, 2):
        answer, waits = shell.run("agent_framework_approval.py", "ask")
        assert answer == f"Answer {number}."
        assert waits == "waits for approval: sail to Oosthaven?"
        assert shell.run("agent_framework_approval.py", "approve") == ["We are there."]
        done = ["nothing waits for approval"]
        assert shell.run("agent_framework_approval.py", "approve") == done


@pytest.mark.deep
def test_a_run_of_langgraph_is_resumed_in_another_process(shell: Shell) -> None:
    pytest.importorskip("langgraph")
    assert shell.run("langgraph_approval.py", "ask") == ["waits for approval: sail to Oosthaven?"]
    done = ["We are there. The thread has 3 messages."]
    assert shell.run("langgraph_approval.py", "approve") == done
    assert shell.run("langgraph_approval.py", "approve") == ["nothing waits for approval"]


def test_a_persistent_agent_remembers_the_run_before(shell: Shell) -> None:
    """S2-5, S2-31: the short way."""
    assert shell.run("persistent_agent.py", "one") == ["So far you have said: one."]
    assert shell.run("persistent_agent.py", "two") == ["So far you have said: one; two."]


def test_an_agents_parts_are_kept_as_configured(shell: Shell) -> None:
    """S2-12, S2-13, S2-14: features and object together."""
    assert shell.run("advanced_agent.py") == ["blocked: nothing", "I have noted that."]
    blocked, noted = shell.run("advanced_agent.py")
    assert blocked == "blocked: delete_everything"
    assert noted == "My notes say: color (what the user likes): blue"


def test_a_storage_of_ones_own_keeps_an_agent(shell: Shell) -> None:
    """S2-3, S2-16."""
    assert shell.run("own_storage.py") == ["0 messages were there, 2 are in own-storage.json"]
    assert shell.run("own_storage.py") == ["2 messages were there, 4 are in own-storage.json"]


def test_an_agent_is_loaded_and_saved_by_hand(shell: Shell) -> None:
    """S2-15."""
    assert shell.run("manual_agent.py") == ["began with 0 messages", "durable: True"]
    assert shell.run("manual_agent.py") == ["went on with 2 messages", "durable: True"]


async def test_the_server_of_the_page_about_servers_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "servers.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = [block for block in blocks if "app = " in block]
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    names: dict[str, Any] = {}
    exec(code, names)
    for text in ("Hello", "Again"):
        async with serving(names["app"]) as client:
            answer = await client.post("/agents/ada", json={"text": text})
            assert answer.json() == {"answer": f"You said: {text}"}
            assert (await client.get("/ready")).json() == {"saving": "ok"}
    assert (tmp_path / "home" / "agents" / "ada" / "log" / "2-0.jsonl").exists()


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://here") as client,
    ):
        yield client


def test_every_example_is_run_here() -> None:
    tested = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    missing = [
        path.name
        for path in (ROOT / "examples").glob("*.py")
        if path.name not in tested
        and f"{path.stem}:app" not in tested
        and f"examples.{path.stem}" not in tested
    ]
    assert missing == []
