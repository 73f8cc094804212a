"""A process whose body does not end when it is told to: ``… ROOT RUNNER``."""

from __future__ import annotations

import sys
from functools import partial

import anyio

import perdure
from perdure import Message, Shutdown
from tests.runners import run
from tests.sigterm.child import tell

BRIEF = Shutdown(deadline=0.5, turn_grace=0.1, hard_grace=0.1)


async def main(root: str) -> None:
    async with perdure.connect(root, shutdown=BRIEF) as sessions, sessions.open("s0") as session:
        number = 0
        while True:
            number += 1
            session.append(Message.user(f"s0:{number}"))
            tell(f"s0:{number}")
            try:
                await anyio.sleep(0.001)
            except BaseException:
                tell("not now")


if __name__ == "__main__":
    run(sys.argv[2], partial(main, sys.argv[1]))
