"""What the tests of forks, copies, renames and forgetting share: conversations, and looks at them."""

from __future__ import annotations

from typing import Any

from perdure import Message, SessionManager

__all__ = ["converse", "looks", "said", "told"]


async def converse(sessions: SessionManager, id: str, *texts: str, **options: Any) -> None:
    """Have a turn for each text, in a session that is closed behind them."""
    session = await sessions.open(id, **options)
    for text in texts:
        async with session.turn(id=f"turn {text}"):
            session.append(Message.user(text))
            session.append(Message.assistant(f"re {text}"))
            session.memory.set(f"about {text}", {"said": text})
            session.state.set("last", text)
    session.describe(title=f"about {texts[-1]}" if texts else None)
    await session.aclose()


def said(session: Any) -> list[str]:
    """Return the working context's texts."""
    return [message.text for message in session.context()]


async def told(session: Any) -> list[tuple[int, str]]:
    """Return the history's messages, by number."""
    items = await session.history(limit=10_000)
    return [(item.seq, item.value.text) for item in items if isinstance(item.value, Message)]


async def looks(session: Any) -> dict[str, Any]:
    """Return all that a session shows: two that look the same are the same for their users."""
    return {
        "said": said(session),
        "told": await told(session),
        "memory": {key: await session.memory.get(key) for key in await session.memory.keys()},
        "state": {key: await session.state.get(key) for key in await session.state.keys()},
        "title": session.info.metadata.title,
        "turns": session.info.turns,
        "messages": session.info.messages,
    }
