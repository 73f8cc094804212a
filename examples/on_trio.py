"""The same library on trio: several conversations at once, saved in the background."""

from __future__ import annotations

import trio

import perdure
from perdure import Autosave, Message, SessionManager


async def converse(sessions: SessionManager, agent: str, turns: int) -> None:
    async with sessions.open(agent) as session:
        for number in range(1, turns + 1):
            async with session.turn():
                session.append(Message.user(f"Question {number}"))
                await trio.lowlevel.checkpoint()  # the model would be asked here
                session.append(Message.assistant(f"Answer {number}"))
        print(
            f"{agent}: {session.info.turns} turns, durable up to record {session.durable_version}"
        )


async def main() -> None:
    async with (
        perdure.connect(autosave=Autosave.server()) as sessions,
        trio.open_nursery() as nursery,
    ):
        for name in ("amber", "basalt", "cedar"):
            nursery.start_soon(converse, sessions, name, 3)


trio.run(main)
