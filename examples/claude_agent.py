"""The Claude Agent SDK with its transcripts in perdure: ask, and go on in another process.

    python examples/claude_agent.py "When is low tide in Oosthaven?"
    python examples/claude_agent.py "And tomorrow?"     continues the newest session of this folder
    python examples/claude_agent.py                     lists the sessions of this folder

The SDK needs a key: ANTHROPIC_API_KEY. PERDURE_URL says where the transcripts are, such as
postgresql://db.example.org/agents: another machine continues them from there, in the same folder.
"""

from __future__ import annotations

import asyncio
import sys

from claude_agent_sdk import (
    ClaudeAgentOptions,
    MirrorErrorMessage,
    ResultMessage,
    list_sessions_from_store,
    query,
)

import perdure
from perdure.adapters import PerdureSessionStore


async def ask(store: PerdureSessionStore, question: str) -> None:
    options = ClaudeAgentOptions(
        session_store=store,
        session_store_flush="eager",  # a kill loses the newest entries at most, not a turn
        continue_conversation=True,
    )
    async for message in query(prompt=question, options=options):
        if isinstance(message, MirrorErrorMessage):
            print(f"not stored: {message.error}", file=sys.stderr)
        elif isinstance(message, ResultMessage):
            print(message.result)


async def show(store: PerdureSessionStore) -> None:
    for listed in await list_sessions_from_store(store):
        print(f"{listed.session_id}  {listed.first_prompt}")


async def main(*questions: str) -> None:
    async with perdure.connect() as sessions:
        store = PerdureSessionStore(sessions, owner="ada")
        for question in questions:
            await ask(store, question)
        if not questions:
            await show(store)


asyncio.run(main(*sys.argv[1:]))
