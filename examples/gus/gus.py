"""An agent with a service for long-term memory, whose ids it keeps in persistence.yaml.

    python examples/gus/gus.py "My name is Captain"
    python examples/gus/gus.py "Who am I?"
    python examples/gus/gus.py --session work "Who am I?"

The service knows users and sessions by ids that the agent has made up. The user's id is made on the
first run and kept for good, so the service still knows the user in another session; the
session's id is another one in each. Nothing of this is written in the code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from perdure import Message
from perdure.agent import Agent, ScriptedModel


class MemoryService:
    """A small stand-in for a service of that kind: facts by user, in one file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def add(self, user: str, session: str, text: str) -> None:
        facts = await self.recall()
        facts.append({"user": user, "session": session, "text": text})
        await asyncio.to_thread(self._file.write_text, json.dumps(facts, indent=2))

    async def recall(self, user: str | None = None) -> list[dict[str, str]]:
        if not self._file.exists():
            return []
        facts = json.loads(await asyncio.to_thread(self._file.read_text))
        return [fact for fact in facts if user in (None, fact["user"])]


class Gus(Agent):
    """Remembers across its sessions."""

    async def setup(self) -> None:
        self.user_id: str = self.config.get("zep_user_id")
        self.session_id: str = self.config.get("zep_session_id")
        runs = await self.load_state("runs", default=0)
        await self.save_state("runs", runs + 1)

    async def hear(self, service: MemoryService, text: str) -> str:
        if text.startswith("My name is "):
            await self.config.set("user_name", text.removeprefix("My name is "))
        known = [fact["text"] for fact in await service.recall(self.user_id)]
        await service.add(self.user_id, self.session_id, text)
        answer = await self.ask(text)
        name = self.config.get("user_name", "stranger")
        return f"{answer} Hello, {name}: you have told me {len(known)} things before."


def answer(messages: Sequence[Message]) -> str:
    """Play the model."""
    return f"This is turn {sum(message.role == 'user' for message in messages)} of our talk."


async def main(text: str, session: str, file: Path) -> None:
    gus = Gus.create("gus", model=ScriptedModel(answer), persistent_session=True, session=session)
    async with gus as agent:
        print(f"{agent.user_id} in {agent.session_id}, run {await agent.load_state('runs')}")
        print(await agent.hear(MemoryService(file), text))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("text", nargs="?", default="Hello")
    parser.add_argument("--session", default="default")
    parser.add_argument("--memory", type=Path, default=Path("gus-memory.json"))
    given = parser.parse_args()
    asyncio.run(main(given.text, given.session, given.memory))
