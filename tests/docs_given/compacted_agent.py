"""An agent whose first turns have become an episode."""

import perdure
from perdure.agent import Agent, EchoModel

sessions = await perdure.connect("memory:")
agent = await Agent.create("ada", model=EchoModel(), sessions=sessions)
await agent.start()
for text in ("My boat is called Albatross.", "Hello.", "And you?", "Well.", "Bye.", "Still here."):
    await agent.ask(text)
await agent.memory.compact("")


async def after():
    assert any("Albatross" in text for text in await recall("Albatross"))
    await agent.stop()
    await sessions.aclose()
