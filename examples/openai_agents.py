"""The OpenAI Agents SDK with its session in perdure: ask, wait for an approval, resume later.

    python examples/openai_agents.py ask      runs until a tool needs an approval, and ends
    python examples/openai_agents.py approve  resumes that run, in another process

The model is a scripted one of the SDK's, so it needs no key: put your model in its place.
"""

from __future__ import annotations

import asyncio
import sys

from agents import Agent, RunConfig, Runner, function_tool
from agents.testing import ScriptedModel, assistant_message, function_call

import perdure
from perdure.adapters import PerdureSession

QUIET = RunConfig(tracing_disabled=True)


@function_tool
def tide(harbor: str) -> str:
    """Say when the tide is low."""
    return f"low in {harbor} at noon"


@function_tool(needs_approval=True)
def sail(harbor: str) -> str:
    """Leave for a harbor."""
    return f"sailed to {harbor}"


def pilot(*answers: object) -> Agent[None]:
    return Agent(name="pilot", model=ScriptedModel(answers), tools=[tide, sail])  # type: ignore[arg-type]


async def ask(session: PerdureSession) -> None:
    agent = pilot(
        [function_call("tide", {"harbor": "Oosthaven"}, call_id="call_1")],
        [function_call("sail", {"harbor": "Oosthaven"}, call_id="call_2")],
    )
    result = await Runner.run(agent, "Take me to Oosthaven", session=session, run_config=QUIET)
    for interruption in result.interruptions:
        print(f"waits for approval: {interruption.name}({interruption.arguments})")
    await session.save_run_state(result.to_state())


async def approve(session: PerdureSession) -> None:
    agent = pilot([assistant_message("We are there.")])
    state = await session.load_run_state(agent)
    if state is None:
        print("nothing waits for approval")
        return
    for interruption in state.get_interruptions():
        state.approve(interruption)
    result = await Runner.run(agent, state, session=session, run_config=QUIET)
    await session.drop_run_state()
    print(f"{result.final_output} The session has {len(await session.get_items())} items.")


async def main(what: str) -> None:
    async with perdure.connect() as sessions, PerdureSession("pilot", sessions) as session:
        await (approve(session) if what == "approve" else ask(session))


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "ask"))
