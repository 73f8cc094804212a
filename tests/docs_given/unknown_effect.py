"""An agent with a call of which nobody knows whether it was done."""

import anyio

import perdure
from perdure.agent import Agent, ScriptedModel, call, tool


@tool(effect="ask")
async def send_mail(to: str) -> str:
    await anyio.sleep_forever()


class the_service:
    @staticmethod
    async def has_done(key):
        return True


sessions = await perdure.connect("memory:")
agent = await Agent.create(
    "ada",
    model=ScriptedModel(call("send_mail", to="Mia"), "I do not know."),
    tools=[send_mail],
    sessions=sessions,
    tool_timeout=0.1,
)
await agent.start()
await agent.ask("Write to Mia.")
assert agent.unknown_effects


async def after():
    await settle(agent)
    assert not agent.unknown_effects
    await agent.stop()
    await sessions.aclose()
