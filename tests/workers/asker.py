"""A process with one session: it answers requests, each by a named turn, while another of its tasks keeps appending.

Its turns are cancelled at random and tried again. It prints what is durable, and goes on where the one before it was killed.

    python -m tests.workers.asker file:/tmp/data 20 7
"""

from __future__ import annotations

import os
import random
import sys

import anyio
from anyio.lowlevel import checkpoint

from perdure import Message, Session, Shutdown, connect

AGENT = "asked"


async def hook(session: Session, dice: random.Random) -> None:
    """Append what is no part of any turn."""
    for number in range(1_000):
        text = f"hook-{os.getpid()}-{number}"
        session.append(Message.user(text))
        await session.save()
        print(text, flush=True)
        await anyio.sleep(dice.random() / 200)


async def answer(session: Session, number: int, dice: random.Random) -> None:
    async with session.turn(f"request-{number}") as turn:
        if turn.replayed:
            return
        session.append(Message.user(f"Q {number}"))
        await session.save()

        async def work(part: int) -> None:
            await anyio.sleep(dice.random() / 500)
            session.append(Message.assistant(f"part {part} of {number}"))

        async with anyio.create_task_group() as group:
            for part in range(3):
                group.start_soon(work, part)
        turn.append(Message.assistant(f"A {number}"))


async def main(url: str, turns: int, seed: int) -> None:
    dice = random.Random(seed)
    async with (
        connect(url, shutdown=Shutdown(signals=False)) as sessions,
        sessions.open(AGENT, wait=60) as session,
        anyio.create_task_group() as group,
    ):
        group.start_soon(hook, session, dice)
        for number in range(turns):
            done = False
            while not done:
                with anyio.move_on_after(dice.choice((0.001, 0.003, 0.01, 60))):
                    await answer(session, number, dice)
                    done = True
                await checkpoint()
            print(f"done {number}", flush=True)
        group.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
