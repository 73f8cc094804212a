"""A server process of its own that writes to one session, and says what became of it.

    python -m tests.integration.journeys.writer URL NAME handover 10
    python -m tests.integration.journeys.writer URL NAME steal 1

With ``handover`` it makes so many turns, each when a line comes in, opening the session anew for
each, and tries each one again until it has ended. With ``steal`` it takes the session from whoever
has it, makes the turns and keeps it; what comes in then tells it to go on in the session that it
has. Each line that it prints is one event in JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anyio

import perdure
from perdure import Autosave, LeaseHeldError, LeaseLostError, LeaseOptions, Message, SessionManager

AGENT = "shared"
LEASE = LeaseOptions(heartbeat=0.1, ttl=0.5)


def say(event: str, *facts: Any) -> None:
    print(json.dumps([event, *facts]), flush=True)


async def told() -> str:
    return (await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)).strip()


async def decide(sessions: SessionManager) -> None:
    """Let what was unsaved of lost sessions go: it is tried again, or was told."""
    for lost in sessions.lost:
        await lost.discard_unsaved()


async def take_turns(sessions: SessionManager, name: str, count: int) -> None:
    """Make each turn until it is durable, opening the session for each try."""
    for number in range(count):
        op = f"{name}-{number}"
        await told()
        while True:
            try:
                async with sessions.open(AGENT, wait=30) as session, session.turn(op) as turn:
                    if not turn.replayed:
                        session.append(Message.user(op))
            except (LeaseHeldError, LeaseLostError) as error:
                say("again", op, str(error))
                await decide(sessions)
                await anyio.sleep(0.01)
            else:
                say("durable", op)
                break


async def keep(sessions: SessionManager, name: str, count: int) -> None:
    """Take the session, write, and go on in it when told to; say how it was lost."""
    session = await sessions.open(AGENT, on_held="steal", wait=30)
    for number in range(count):
        session.append(Message.user(f"{name}-{number}"))
        await session.save()
        say("durable", f"{name}-{number}")
    say("kept")
    while (word := await told()) not in {"", "end"}:
        try:
            session.append(Message.user(word))
            await session.save()
        except LeaseLostError as error:
            say("lost", word, str(error))
            await decide(sessions)
            session = await sessions.open(AGENT, wait=30)
        else:
            say("durable", word)


async def main(url: str, name: str, how: str, count: str) -> None:
    timers = Autosave.write_through() if how == "handover" else None
    async with perdure.connect(url, lease=LEASE, autosave=timers) as sessions:
        say("ready")
        if how == "steal":
            await keep(sessions, name, int(count))
            return
        await take_turns(sessions, name, int(count))


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
