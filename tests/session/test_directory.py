"""Listings: sessions that are in use here are in them as of now, and those used last come first."""

from __future__ import annotations

import anyio
from hypothesis import given, settings, strategies as st

import perdure
from perdure import Message, SessionManager, Shutdown
from perdure.stores.memory import MemoryStore
from tests.session.conftest import Connect


async def talk(sessions: SessionManager, id: str, **options: object) -> perdure.Session:
    """Open a session, run a turn in it, and leave it in use: no fold has seen it."""
    session = await sessions.open(id, **options)  # type: ignore[arg-type]
    async with session.turn():
        session.append(Message.user("Hello"), Message.assistant("Hello!"))
    return session


async def ids(sessions: SessionManager, **options: object) -> list[str]:
    return [info.key.agent for info in await sessions.list(**options)]  # type: ignore[arg-type]


async def test_a_session_in_use_is_found_by_its_labels_at_once(again: Connect) -> None:
    async with again() as sessions:
        session = await talk(sessions, "chat", owner="ann", tags=["vip"])
        await talk(sessions, "other", owner="bob")
        session.describe(title="Holiday plans")
        await session.save()
        (info,) = await sessions.list(owner="ann")
        assert (info.key.agent, info.owner, info.title) == ("chat", "ann", "Holiday plans")
        assert (info.tags, info.turns, info.head) == (("vip",), 1, session.durable_version)
        assert info.created_at is not None
        assert info.updated_at is not None
        assert await ids(sessions, tag="vip") == ["chat"]
        assert await ids(sessions) == ["chat", "other"]


async def test_a_label_that_is_changed_or_taken_away_counts_at_once(again: Connect) -> None:
    async with again() as sessions:
        session = await talk(sessions, "chat", owner="ann", tags=["vip"])
        await session.aclose()  # folded: the store lists it as ann's
        session = await sessions.open("chat")
        session.describe(owner="bob", tags=[])
        assert await ids(sessions, owner="ann") == []
        assert await ids(sessions, tag="vip") == []
        assert await ids(sessions, owner="bob") == ["chat"]


async def test_the_last_activity_is_that_of_the_newest_record(again: Connect) -> None:
    async with again() as sessions:
        session = await sessions.open("chat")
        session.append(Message(role="user", content="x", created_at=4_000_000_000.0))
        (info,) = await sessions.list()
        assert info.updated_at == 4_000_000_000.0
        assert session.info.last_active_at.startswith("2096-10-02T07:06:40")


async def test_those_used_last_come_first_and_pages_continue(again: Connect) -> None:
    async with again() as sessions:
        for at, id in enumerate("abcdef"):
            session = await talk(sessions, id, owner="ann" if id in "ace" else "bob")
            session.append(
                Message(role="user", content="x", created_at=4_000_000_000.0 + (at * 7) % 6)
            )
            if id in "ab":
                await session.aclose()
        # a and b were closed: a file store knows only when their files were written.
        whole = await sessions.list(newest_first=True)
        assert [info.key.agent for info in whole][:4] == ["f", "e", "d", "c"]
        assert {info.key.agent for info in whole[4:]} <= {"a", "b"}
        pages = []
        page = await sessions.list(newest_first=True, limit=2)
        while page:
            pages += page
            page = await sessions.list(newest_first=True, limit=2, after=page[-1])
        assert pages == whole
        assert (await ids(sessions, newest_first=True, owner="ann"))[:2] == ["e", "c"]


OWNERS = st.sampled_from(["ann", "bob", None])


@given(
    st.lists(st.tuples(st.booleans(), OWNERS, OWNERS), max_size=7),
    st.integers(1, 4),
    OWNERS,
)
@settings(max_examples=40)
def test_pages_are_whole_whatever_is_in_use(
    drawn: list[tuple[bool, str | None, str | None]],
    limit: int,
    wanted: str | None,
) -> None:
    async def check() -> None:
        store = MemoryStore()
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            expected = []
            for at, (in_use, folded, now) in enumerate(drawn):
                session = await talk(sessions, f"s{at}", owner=folded)
                await session.aclose()
                owner = folded
                if in_use:
                    session = await sessions.open(f"s{at}")
                    if now is not None:
                        session.describe(owner=now)
                        owner = now
                if wanted in (None, owner):
                    expected.append(f"s{at}")
            pages: list[str] = []
            page = await sessions.list(owner=wanted, limit=limit)
            while page:
                assert len(page) <= limit
                pages += [info.key.agent for info in page]
                if len(page) < limit:
                    break
                page = await sessions.list(owner=wanted, limit=limit, after=page[-1])
            assert pages == expected

    anyio.run(check)
