"""An agent with tools that goes on after a restart: run it twice.

The scripted model needs no key. A model of your own is any object with an async generator
``stream(messages, tools)`` that yields chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import perdure
from perdure import Message
from perdure.agent import Agent
from perdure.agent.events import Segment, ToolFinished, TurnEnded
from perdure.agent.llm import ScriptedModel, call
from perdure.agent.llm.scripted import ScriptedReply


async def tide(harbor: str, hour: int) -> dict[str, object]:
    """Return the height of the tide at a harbor, in meters.

    Args:
        harbor: Where.
        hour: When, from 0 to 23.

    """
    return {"harbor": harbor, "hour": hour, "meters": round(2 + (hour % 12 - 6) / 3, 1)}


def answer(messages: Sequence[Message]) -> ScriptedReply:
    """Play the model: call the tool once a question, then say what came of it."""
    last = messages[-1]
    if last.tool_result is None:
        asked = sum(message.role == "user" for message in messages)
        return call("tide", harbor="Oosthaven", hour=asked)
    known = sum(message.role == "tool" for message in messages)
    return f"{last.tool_result.result['meters']} m. I have looked {known} tides up for you so far."


async def main() -> None:
    async with (
        perdure.connect() as sessions,
        Agent.create(
            "tide-agent", model=ScriptedModel(answer), tools=[tide], sessions=sessions
        ) as agent,
    ):
        async for event in agent.stream("How high is the tide?"):
            if isinstance(event, ToolFinished):
                print(f"{event.call.name}({event.call.arguments}) -> {event.result.result}")
            elif isinstance(event, Segment):
                print(event.text, end="")
            elif isinstance(event, TurnEnded):
                print(f"\nThe turn is durable, up to record {event.version}.")


asyncio.run(main())
