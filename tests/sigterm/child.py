"""A process with a manager of its own and sessions under load, to be ended by SIGTERM.

``python -m tests.sigterm.child ROOT RUNNER SESSIONS``. Writes one line to stdout for each step
of its start, and one for each append that was accepted, as soon as it was.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import anyio

import perdure
from perdure import Message, Session
from tests.runners import run


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


async def work(session: Session) -> None:
    """Append for ever: now in turns, now beside them."""
    number = 0
    while True:
        async with session.turn():
            for _ in range(3):
                number += 1
                accept(session, number)
                await anyio.lowlevel.checkpoint()
        for _ in range(3):
            number += 1
            accept(session, number)
            await anyio.sleep(0.001)


def accept(session: Session, number: int) -> None:
    session.append(Message.user(f"{session.id}:{number}"))
    tell(f"{session.id}:{number}")


async def main(root: str, count: int) -> None:
    tell("connecting")
    async with perdure.connect(root) as sessions:
        tell("connected")
        async with anyio.create_task_group() as group:
            for index in range(count):
                session = await sessions.open(f"s{index}")
                tell("opened")
                group.start_soon(work, session)


if __name__ == "__main__":
    run(sys.argv[2], partial(main, sys.argv[1], int(sys.argv[3])))
    tell("ended without the signal")
