"""A store full of sessions of every shape, for moving them elsewhere."""

from __future__ import annotations

from typing import Any

import perdure
from perdure import Message, ToolCall
from perdure.records.keys import SessionKey

HOSTILE = ["..", "a/b", "*", "[x]", "a:b", "CON", "Ünïcode", "x" * 200]


async def fill(store: Any, *, many: int = 3) -> list[SessionKey]:
    """Make sessions: long and short, folded and not, forked, of tenants, with inboxes."""
    async with perdure.connect(store) as sessions:
        for n in range(many):
            await _talk(await sessions.open(f"agent-{n}", owner="o", tags=["t"]), turns=n + 1)
        for name in HOSTILE:
            await _talk(await sessions.open(name), turns=1)
        await _talk(await sessions.open("theirs", tenant="acme"), turns=2)
        async with sessions.open("agent-1") as session:
            session.memory.set("big", "v" * 20_000)
            session.memory.set("small", 1)
            session.state.set("app", {"n": 1})
            await session.retract(after=session.version - 2)
        await sessions.fork("agent-2", "forked")
        await _talk(await sessions.open("forked"), turns=1)
    async with perdure.connect(store) as sessions:  # again, for another epoch
        async with sessions.open("agent-2") as session:
            await _talk(session, turns=2)
        # Not above, where the session is open, and a heartbeat might append it.
        await sessions.post("agent-0", Message.user("posted"), key="op-1")
    return [
        *(SessionKey(f"agent-{n}") for n in range(many)),
        *map(SessionKey, HOSTILE),
        SessionKey("theirs", tenant="acme"),
        SessionKey("forked"),
    ]


async def _talk(session: Any, *, turns: int) -> None:
    async with session:
        for n in range(turns):
            async with session.turn():
                call = ToolCall(f"call-{n}", "look", {"q": n})
                session.append(Message.user(f"question {n} of {session.id}"))
                session.append(
                    Message.assistant("let me look", tool_calls=[call]),
                    Message.tool(call.id, {"found": "x" * 5000}, name="look"),
                )
                session.append(Message.assistant(f"answer {n}"))
