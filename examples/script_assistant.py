"""One assistant in a script: ask it something, run it again, and it knows what was said.

    python examples/script_assistant.py "My name is Ada"
    python examples/script_assistant.py "What did I say?"

The model here is a stand-in; put your client's call in its place. A script that is ended by Ctrl-C,
SIGTERM or a crash amid an answer keeps the question, since `save` made it durable.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import perdure
from perdure import Message


async def ask_model(messages: list[dict[str, Any]]) -> str:
    asked = [message["content"] for message in messages if message["role"] == "user"]
    await asyncio.sleep(0)
    if len(asked) == 1:
        return "Nice to meet you. I will remember that."
    return f"Before that you said: {asked[-2]!r}. In all you have said {len(asked)} things."


async def main(text: str) -> None:
    async with perdure.connect() as sessions, sessions.open("script-assistant") as session:
        async with session.turn():
            session.append(Message.user(text))
            await session.save()  # from here on the question outlives whatever happens
            answer = await ask_model(session.context("openai"))
            session.append(Message.assistant(answer))
        print(answer)


asyncio.run(main(" ".join(sys.argv[1:]) or "Hello"))
