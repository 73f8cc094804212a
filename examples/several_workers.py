"""Several workers on one store: a session moves from one process to another, and loses nothing.

Runs itself twice as workers. The first holds a session and works on it; the second asks for it.
The first ends its turn, saves and lets go; the second goes on where it stopped. Had the first
been killed instead, the second would have got the session at once.
"""

from __future__ import annotations

import asyncio
import sys

import perdure
from perdure import LeaseLostError, Message

AGENT = "shared-agent"


async def work(name: str, turns: int) -> None:
    """Take a session over, work on it, and stop when another worker asks for it."""
    async with perdure.connect() as sessions:
        session = await sessions.open(AGENT, on_held="handover", wait=30)
        print(f"{name} has it after turn {session.info.turns}", flush=True)
        try:
            for _ in range(turns):
                async with session.turn():
                    number = session.info.turns
                    session.append(Message.user(f"Question {number}"))
                    await asyncio.sleep(0.01)  # the model would be asked here
                    session.append(Message.assistant(f"Answer {number}, by {name}"))
        except LeaseLostError:
            print(f"{name} was asked for it, and let go", flush=True)
        else:
            print(f"{name} is done after turn {session.info.turns}", flush=True)


async def worker(name: str, turns: int) -> asyncio.subprocess.Process:
    """Start a worker process."""
    command = (sys.executable, __file__, name, str(turns))
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


async def main() -> None:
    """Start the second worker once the first has the session."""
    first = await worker("first", 1_000_000)
    assert first.stdout is not None
    said = await first.stdout.readline()
    second = await worker("second", 5)
    said += (await first.communicate())[0]
    said += (await second.communicate())[0]
    print(said.decode(), end="")
    async with perdure.connect() as sessions:
        view = await sessions.load(AGENT)
        assert view is not None
        answers = [m.text for m in view.context() if m.role == "assistant"]
        print(f"{view.info.turns} turns, the last: {answers[-1]}")


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], int(sys.argv[2])) if sys.argv[1:] else main())
