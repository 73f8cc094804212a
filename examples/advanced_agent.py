"""An agent that says which of its parts are kept, and how often it is saved.

Run it twice. In the first run the model notes something, and you decide about a tool; the second
run still knows both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from perdure import Message
from perdure.agent import Agent, AgentConfig, Features, PersistentSession, ScriptedModel, call
from perdure.agent.llm.scripted import ScriptedReply


def answer(messages: Sequence[Message]) -> ScriptedReply:
    """Play the model: note the color once, then say what stands in the notes."""
    if messages[-1].role == "tool":
        return "I have noted that."
    notes = [line for line in messages[0].text.splitlines() if line.startswith("- ")]
    if not notes:
        return call("note_set", key="color", value="blue", description="what the user likes")
    return f"My notes say: {notes[0].removeprefix('- ')}"


def delete_everything() -> str:
    """Delete everything."""
    return "gone"


CONFIG = AgentConfig(
    name="my-assistant",
    model=ScriptedModel(answer),
    instructions="You remember what people like.",
    tools=[delete_everything],
    features=Features(memory=True, in_context_memory=True, persistent_session=True),
    persistent_session=PersistentSession(
        autosave_interval=60,  # save every minute at the latest; turns are saved when they end
        save_on_close=True,
        load_on_create=True,
    ),
)


async def main() -> None:
    async with Agent.create("advanced-assistant", config=CONFIG) as agent:
        print("blocked:", ", ".join(agent.permissions.blocklist) or "nothing")
        agent.permissions.block("delete_everything")
        agent.working_memory.set("theme", "dark", description="preferred theme", pinned=True)
        print(await agent.ask("I like blue."))


asyncio.run(main())
