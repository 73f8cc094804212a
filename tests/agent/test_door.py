"""What an agent's ledger could not read back is refused before a message is admitted."""

from __future__ import annotations

from typing import Any

import pytest

import perdure
from perdure import ConfigError, NotStorableError
from perdure.agent import Agent, ApprovalRequested, ScriptedModel, call


@pytest.mark.parametrize(
    ("message", "turn_id", "said"),
    [
        ("Hello", 5, "turn id must be a string, not int"),
        ("Hello", "", "turn id is empty"),
        (5, None, "a message is text or a Message, not int"),
        (None, None, "a message is text or a Message, not NoneType"),
    ],
    ids=["number", "empty", "no text", "nothing"],
)
async def test_a_post_of_a_wrong_type_is_not_admitted(
    message: Any, turn_id: Any, said: str
) -> None:
    async with perdure.connect("memory:") as sessions:
        async with Agent.create("ada", model=ScriptedModel("Hello!"), sessions=sessions) as agent:
            with pytest.raises(ConfigError, match=said):
                await agent.post_user_message(message, turn_id=turn_id)
            with pytest.raises(ConfigError, match=said):
                await agent.ask(message, turn_id=turn_id)
            assert agent.unfinished == ()
        async with Agent.create("ada", model=ScriptedModel("Hello!"), sessions=sessions) as agent:
            assert await agent.ask("Hello") == "Hello!"


async def look() -> str:
    return "water"


async def test_a_reason_to_deny_is_text() -> None:
    model: Any = ScriptedModel(call("look"), "Then not.")
    reason: Any = 5
    async with Agent.create("ada", model=model, tools=[look], approve="ask") as agent:
        async for event in agent.stream("Look!"):
            if isinstance(event, ApprovalRequested):
                with pytest.raises(ConfigError, match="why must be a string, not int"):
                    await agent.deny(event.call.id, reason)
                await agent.deny(event.call.id, "not today")


async def test_an_agent_that_was_not_awaited_says_what_to_write() -> None:
    creating: Any = Agent.create("ada", model=ScriptedModel("Hello!"))
    async with creating:
        with pytest.raises(AttributeError, match=r"no 'ask': write `async with Agent.create"):
            await creating.ask("Hello")
    agent = await creating
    async with agent:
        assert await agent.ask("Hello") == "Hello!"


async def test_a_message_may_be_a_dict_of_a_role_and_text() -> None:
    async with Agent.create("ada", model=ScriptedModel("Hello!")) as agent:
        assert await agent.ask({"role": "user", "content": "Hi"}) == "Hello!"
        assert [message.text for message in agent.session.context()] == ["Hi", "Hello!"]
        with pytest.raises(NotStorableError, match="extend"):
            await agent.ask({"role": "user", "content": [{"type": "text", "text": "Hi"}]})
