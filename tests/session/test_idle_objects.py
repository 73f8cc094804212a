"""Objects of an idle session that Python's garbage collector walks over, counted by the collector.

A full collection visits each of them, on the event loop: with 10,000 open sessions that is most of
the longest pause of a process.
"""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import anyio
import pytest

from perdure import Limits, Message, Session, SessionManager, Shutdown, connect

pytestmark = pytest.mark.anyio

WARM_UP = 10
COUNTED = 100
MOST = 7
"""Objects of one session, after a turn."""
MOST_REOPENED = 6
"""The same of one that was only opened again."""


def tracked() -> Counter[str]:
    gc.collect()
    counts = Counter(type(one).__qualname__ for one in gc.get_objects())
    # Trio keeps up to 1,000 scopes that were left before their deadlines, each in a tuple.
    counts["tuple"] -= counts.pop("CancelScope", 0)
    return counts


async def taken_turn(session: Session) -> None:
    async with session.turn():
        session.append(Message.user("hi"), Message.assistant("hello"))


async def opened(sessions: SessionManager, count: int, *, first: int) -> list[Session]:
    return [await sessions.open(f"a{number}") for number in range(first, first + count)]


async def test_an_idle_session_is_few_objects_to_the_collector(tmp_path: Path) -> None:
    place, total = tmp_path / "sessions.db", WARM_UP + COUNTED
    quiet = Shutdown(signals=False)
    async with connect(f"sqlite:///{place}", shutdown=quiet) as sessions:
        for session in await opened(sessions, total, first=0):
            await taken_turn(session)
            await session.aclose()
        del session

    async with connect(f"sqlite:///{place}", shutdown=quiet) as sessions:
        kept = await opened(sessions, WARM_UP, first=0)
        for session in kept:
            await taken_turn(session)
        await anyio.wait_all_tasks_blocked()
        before = tracked()
        kept += await opened(sessions, COUNTED, first=WARM_UP)
        await anyio.wait_all_tasks_blocked()
        more = tracked() - before
        assert more.total() <= MOST_REOPENED * COUNTED, more.most_common(12)

        for session in kept[WARM_UP:]:
            await taken_turn(session)
        await anyio.wait_all_tasks_blocked()
        more = tracked() - before
        assert more.total() <= MOST * COUNTED, more.most_common(12)


class _App:
    """What counts media by a method of its own, and keeps its manager."""

    sessions: SessionManager

    def tokens(self, media: object) -> int:
        return 1


async def test_closed_sessions_are_freed_whatever_counts_their_media() -> None:
    before = sum(type(one) is _App for one in gc.get_objects())
    for _ in range(3):
        app = _App()
        limits = Limits(media_tokens=app.tokens)
        async with connect("memory:", limits=limits, shutdown=Shutdown(signals=False)) as sessions:
            app.sessions = sessions
            async with sessions.open("a") as session:
                await taken_turn(session)
        del app, limits, sessions, session
    await anyio.wait_all_tasks_blocked()
    gc.collect()
    assert sum(type(one) is _App for one in gc.get_objects()) == before
