"""Which tools may run, and what is offered (S2-1, S2-17: permissions, tools)."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from perdure import ToolCall
from perdure.agent import AgentFactory, Permissions, ScriptedModel, ToolSettings, call
from perdure.agent.llm import ToolSpec
from perdure.records.keys import SessionKey
from perdure.session.contributors import RestoreContext
from tests.agent.conftest import Configure, World

CONTEXT = RestoreContext(key=SessionKey("ada"), stored_version=1)


def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()


def whisper(text: str) -> str:
    """Say it softly."""
    return text.lower()


async def results(
    world: World, configured: Configure, prepare: Any = None, **options: Any
) -> list[str]:
    """Let a model call both tools, and return what came of it."""
    both = [call("shout", text="Hi"), call("whisper", text="Hi")]
    config = configured(
        model=ScriptedModel(both, "Done."), tools=[shout, whisper], setup=prepare, **options
    )
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.ask("go")
            told = [one.tool_result for one in agent.session.context() if one.tool_result]
    return sorted(one.error or one.result for one in told[-2:])


def test_a_block_counts_before_everything_else() -> None:
    permissions = Permissions()
    assert permissions.verdict("x") == "open"
    permissions.allow("x")
    assert permissions.verdict("x") == "allowed"
    permissions.approve("x", by="ada")
    permissions.block("x")
    assert permissions.verdict("x") == "blocked"
    assert (permissions.allowlist, permissions.approvals) == ((), {})
    permissions.revoke("x")
    assert permissions.verdict("x") == "open"
    permissions.approve("x")
    assert permissions.verdict("x") == "allowed"


async def test_nobody_asked_means_allowed_and_blocked_means_never(
    memory_world: World, configured: Configure
) -> None:
    def block(context: Any) -> None:
        context.plugins.permissions.block("shout")

    assert await results(memory_world, configured) == ["HI", "hi"]
    assert await results(memory_world, configured, block) == ["hi", "the tool 'shout' is blocked"]
    # The block was saved with the session, and holds in the next run (S2-1).
    assert await results(memory_world, configured) == ["hi", "the tool 'shout' is blocked"]


async def test_whoever_approves_is_asked_until_it_says_always(
    memory_world: World, configured: Configure
) -> None:
    asked: list[str] = []

    async def approve(one: ToolCall, context: Any) -> Any:
        asked.append(one.name)
        return "always" if one.name == "shout" else False

    for _ in range(2):
        got = await results(memory_world, configured, approve=approve)
        assert got == ["HI", "the tool 'whisper' was not approved"]
    assert sorted(asked) == ["shout", "whisper", "whisper"]


@pytest.mark.parametrize("answer", ["no", "yes", 2, None])
async def test_only_a_plain_yes_approves(
    memory_world: World, configured: Configure, answer: Any
) -> None:
    """Not whatever is true by chance, as the word no is."""
    got = await results(memory_world, configured, approve=lambda one, context: answer)
    assert all("was not approved" in one for one in got)


async def test_an_approval_that_fails_approves_nothing(
    memory_world: World, configured: Configure
) -> None:
    def approve(one: ToolCall, context: Any) -> bool:
        raise RuntimeError("nobody there")

    got = await results(memory_world, configured, approve=approve)
    assert all("could not be approved: RuntimeError" in one for one in got)


async def test_a_disabled_tool_is_neither_offered_nor_run(
    memory_world: World, configured: Configure
) -> None:
    def disable(context: Any) -> None:
        context.plugins.tools.disable("whisper")

    got = await results(memory_world, configured, disable)
    assert got == ["HI", "the tool 'whisper' is disabled"]
    assert await results(memory_world, configured) == got


def test_tools_are_offered_by_priority() -> None:
    specs = [ToolSpec(name, "", {}) for name in ("a", "b", "c", "d")]
    settings = ToolSettings()
    settings.place("c", priority=5, namespace="files")
    settings.place("a", priority=-1)
    settings.disable("b")
    assert [spec.name for spec in settings.offered(specs)] == ["c", "d", "a"]
    assert (settings.namespace("c"), settings.namespace("a")) == ("files", None)
    settings.enable("b")
    assert [spec.name for spec in settings.offered(specs)] == ["c", "b", "d", "a"]


async def test_states_have_the_seeds_fields_and_keep_what_they_do_not_know() -> None:
    """S2-17: permissions{version, approvals, blocklist, allowlist}, tools{enabled, …}."""
    permissions = Permissions()
    assert await permissions.capture() is None
    permissions.allow("a")
    permissions.block("b")
    permissions.approve("c", by="ada", at=datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC))
    assert await permissions.capture() == {
        "version": 1,
        "approvals": {
            "c": {
                "scope": "always",
                "approvedAt": "2026-01-02T00:00:00+00:00",
                "approvedBy": "ada",
            }
        },
        "blocklist": ["b"],
        "allowlist": ["a"],
    }
    stored: dict[str, Any] = {
        "version": 1,
        "approvals": {"x": {"scope": "session", "new": 1}},
        "blocklist": [],
        "allowlist": ["y"],
        "later": {"a": 1},
    }
    await permissions.restore(stored, CONTEXT)
    assert await permissions.capture() == stored
    tools = ToolSettings()
    assert await tools.capture() is None
    state = {"enabled": {"a": False}, "namespaces": {}, "priorities": {"a": 1}, "later": [1]}
    await tools.restore(state, CONTEXT)
    assert await tools.capture() == state


@pytest.mark.parametrize("state", [{}, {"approvals": None, "blocklist": None}])
async def test_a_state_with_parts_missing_is_read(state: dict[str, Any]) -> None:
    permissions = Permissions()
    await permissions.restore(state, CONTEXT)
    assert permissions.verdict("x") == "open"
