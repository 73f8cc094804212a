"""An agent that is kept, the short way: run it twice, and it knows what you said.

    python examples/persistent_agent.py "My name is Ada"
    python examples/persistent_agent.py "What did I say?"

``persistent_session=True`` keeps it in the default store; everything of it lies in one folder.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from perdure import Message
from perdure.agent import Agent, ScriptedModel


def answer(messages: Sequence[Message]) -> str:
    """Play the model."""
    said = [message.text for message in messages if message.role == "user"]
    return f"So far you have said: {'; '.join(said)}."


async def main(text: str) -> None:
    async with Agent.create(
        "my-assistant", model=ScriptedModel(answer), persistent_session=True
    ) as agent:
        print(await agent.ask(text))


asyncio.run(main(" ".join(sys.argv[1:]) or "Hello!"))
