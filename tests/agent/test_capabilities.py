"""What tools were asked for, allowed and used stands in the log, and a replay tells it."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.agent import AgentFactory, ApprovalRequested, ScriptedModel, call, tool
from perdure.checkpoints.replay import TimelineRow
from tests.agent.conftest import Configure, World


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def broken() -> None:
    """Fail."""
    raise ValueError("out of order")


SCRIPT = [[call("add", a=1, b=2), call("broken"), call("gone")], "done"]


async def replayed(world: World, configured: Configure, **options: Any) -> list[TimelineRow]:
    rows: list[TimelineRow] = []
    async with world.connect() as sessions:
        config = configured(model=ScriptedModel(*SCRIPT), tools=[add, broken], **options)
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            assert await agent.ask("go") == "done"
        view = await sessions.load("ada")
        assert view is not None
        report = await view.events.replay(on_row=rows.append, strict=True)
    assert report.turns == 1
    assert {row.token_id for row in rows} == {1}
    return rows


def told(rows: list[TimelineRow], name: str) -> list[str]:
    """Return what became of the call of a tool; all of it names one call."""
    mine = [row for row in rows if row.name == name]
    assert len({row.detail["call"] for row in mine}) == 1
    return [row.what for row in mine]


async def test_a_replay_tells_what_tools_did(world: World, configured: Configure) -> None:
    """S3-10: each call in the order in which it went, whatever came of it."""
    rows = await replayed(world, configured)
    assert told(rows, "add") == ["requested", "used"]
    assert told(rows, "broken") == ["requested", "failed"]
    assert told(rows, "gone") == ["requested", "failed"]


@pytest.mark.parametrize("answer", [True, False])
async def test_a_replay_tells_what_was_approved(
    world: World, configured: Configure, answer: bool
) -> None:
    rows = await replayed(world, configured, approve=lambda *_: answer)
    after = ["granted", "used"] if answer else ["denied"]
    assert told(rows, "add") == ["requested", *after]


@pytest.mark.parametrize("answer", [True, False])
async def test_a_replay_tells_what_a_person_approved(
    world: World, configured: Configure, answer: bool
) -> None:
    rows: list[TimelineRow] = []
    async with world.connect() as sessions:
        model = ScriptedModel([call("add", a=1, b=2)], "done")
        config = configured(model=model, tools=[add], approve="ask")
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            async for event in agent.stream("go"):
                if isinstance(event, ApprovalRequested):
                    decide = agent.approve if answer else agent.deny
                    await decide(event.call.id)
        view = await sessions.load("ada")
        assert view is not None
        await view.events.replay(on_row=rows.append, strict=True)
    after = ["granted", "used"] if answer else ["denied"]
    assert told(rows, "add") == ["requested", *after]
    if answer:
        (granted,) = [row for row in rows if row.what == "granted"]
        assert granted.detail["by"] == "person"
