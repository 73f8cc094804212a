"""A process that has turns on a session which others want as well.

    python -m tests.workers.worker URL NAME TURNS

It says "ready", waits for a line, and says in the end what happened, as JSON.
"""

from __future__ import annotations

import json
import sys

import anyio

from perdure import LeaseLostError, Message, Shutdown, connect

AGENT = "shared"


async def work(url: str, name: str, turns: int) -> dict[str, int]:
    """Have so many turns, each after an open of its own; one that is lost is tried again."""
    done = lost = opens = 0
    last = 0
    async with connect(url, shutdown=Shutdown(signals=False)) as sessions:
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        while done < turns:
            async with sessions.open(AGENT, wait=120) as session:
                opens += session.epoch != last
                last = session.epoch
                try:
                    async with session.turn(f"{name}-{done}") as turn:
                        if not turn.replayed:
                            session.append(Message.user(f"{name}-{done}"))
                            await anyio.sleep(0.002)  # the model's answer
                            session.append(Message.assistant(f"{name}-{done}!"))
                    done += 1
                except LeaseLostError:
                    lost += 1
    return {"done": done, "lost": lost, "epochs": opens}


def main() -> None:
    url, name, turns = sys.argv[1:]
    print(json.dumps(anyio.run(work, url, name, int(turns))))


if __name__ == "__main__":
    main()
