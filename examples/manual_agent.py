"""An agent that loads and saves when you say so, and not otherwise.

Without timers, turns are still saved when they end; without loading, it begins anew unless you
load what is stored before its first message. Run it twice.
"""

from __future__ import annotations

import asyncio

from perdure.agent import Agent, EchoModel, PersistentSession

BY_HAND = PersistentSession(
    autosave_interval=0,  # no timers
    load_on_create=False,  # nothing is loaded by itself
)


async def main() -> None:
    async with Agent.create(
        "manual-assistant", model=EchoModel(), persistent_session=BY_HAND
    ) as agent:
        found = await agent.load_persisted_session()
        print("went on" if found else "began", "with", len(agent.session.context()), "messages")
        await agent.ask("Do something.")
        agent.working_memory.set("done", True)
        await agent.save_persisted_session()
        print("durable:", agent.session.durable_version == agent.session.version)


asyncio.run(main())
