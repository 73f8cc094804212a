"""Find out why saves are slow: a slow disk, a lock of another process, or a blocked event loop.

python examples/why_slow.py sqlite:///agents.db
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import perdure
from perdure import Autosave, Message, SessionManager
from perdure.events import LoopBlocked, Saved, SaveFailed

SLOW = 0.5
"""Seconds from which a save counts as slow."""


def watch(sessions: SessionManager, tell: Callable[[str], object] = print) -> None:
    """Tell in a sentence what made a save slow."""

    def saved(event: Saved) -> None:
        if event.took > SLOW:
            tell(
                f"slow disk: the store took {event.took:.1f} s for {event.records} records "
                f"({event.written} bytes) of session {event.key}"
            )

    def save_failed(event: SaveFailed) -> None:
        kind = "lock" if "locked" in str(event.error) else "failure"
        tell(f"{kind}: session {event.key} is saved again in {event.retry_in:.1f} s: {event.error}")

    def loop_blocked(event: LoopBlocked) -> None:
        tell(f"busy loop: something blocked the event loop for {event.delay:.1f} s, await instead")

    sessions.on("saved", saved)
    sessions.on("save_failed", save_failed)
    sessions.on("loop_blocked", loop_blocked)


async def main(url: str) -> None:
    async with perdure.connect(url, autosave=Autosave.server()) as sessions:
        watch(sessions)
        async with sessions.open("ada") as session:
            for number in range(10):
                async with session.turn():
                    session.append(Message.user(f"Question {number}"))
                    session.append(Message.assistant(f"Answer {number}"))
            print(f"{session.durable_version} records are saved")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "why-slow.db"))
