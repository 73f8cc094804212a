"""An agent whose calls wait for somebody, and somebody who always says yes."""

import asyncio

import perdure
from perdure.agent import Agent, ScriptedModel, call

sent = []


async def send_mail(to: str) -> str:
    sent.append(to)
    return "sent"


async def somebody_says_yes(call):
    return True


async def after():
    async with perdure.connect("memory:") as sessions:
        model = ScriptedModel(call("send_mail", to="Mia"), "Done.")
        agent = await Agent.create(
            "ada", model=model, tools=[send_mail], sessions=sessions, approve="ask"
        )
        async with agent:
            asking = asyncio.create_task(ask_somebody(agent))
            await asyncio.sleep(0)
            await agent.ask("Write to Mia.")
        await asking
    assert sent == ["Mia"]
