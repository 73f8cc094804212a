"""Listings: sessions in use are in them as of now, in every process; those used last come first."""

from __future__ import annotations

import anyio
import msgspec
from hypothesis import given, settings, strategies as st

import perdure
from perdure import Message, SessionManager, Shutdown
from perdure.store import SessionQuery
from perdure.stores import EncryptedStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.listings import NotedReads
from tests.session.conftest import Connect, Place


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


async def test_another_process_lists_a_session_in_use(place: Place) -> None:
    """Its labels when it is open, and all else with each save; nothing is closed or folded."""
    quiet = Shutdown(signals=False)
    async with (
        perdure.connect(place(), shutdown=quiet) as sessions,
        perdure.connect(place(), shutdown=quiet) as other,
    ):
        async with sessions.open("chat", owner="ann", tags=["vip"]) as chat:
            (info,) = await other.list(owner="ann", tag="vip")
            assert (info.key.agent, info.owner, info.tags) == ("chat", "ann", ("vip",))
            for turns in (1, 2, 3):
                async with chat.turn():
                    chat.append(Message.user("Hello"), Message.assistant("Hello!"))
                (info,) = await other.list(owner="ann")
                assert (info.turns, info.title) == (turns, None)
            chat.describe(title="Holiday plans", tags=["vip", "late"])
            await chat.save()
            (info,) = await other.list(tag="late")
            assert (info.title, info.tags, info.turns) == ("Holiday plans", ("vip", "late"), 3)
            later = await talk(sessions, "later", owner="ann")
            assert await ids(other, newest_first=True) == ["later", "chat"]
            async with chat.turn():
                chat.append(Message.user("And now?"))
            assert await ids(other, newest_first=True, owner="ann") == ["chat", "later"]
            (info, _) = await other.list(newest_first=True)
            assert await ids(other, since=info.updated_at) == ["chat"]
            assert await ids(other, before=info.updated_at) == ["later"]
            await later.aclose()  # folds it, which is no activity
            assert await ids(other, newest_first=True, owner="ann") == ["chat", "later"]


async def test_another_process_lists_an_encrypted_session_in_use() -> None:
    backing, quiet = MemoryBacking(), Shutdown(signals=False)

    def store() -> EncryptedStore:
        return EncryptedStore(MemoryStore(backing=backing), "ab" * 32)

    async with (
        perdure.connect(store(), shutdown=quiet) as sessions,
        perdure.connect(store(), shutdown=quiet) as other,
    ):
        chat = await talk(sessions, "chat", owner="ann", tags=["vip"])
        chat.describe(title="Holiday plans")
        await chat.save()
        (info,) = await other.list(owner="ann", tag="vip")
        assert (info.owner, info.tags, info.title) == ("ann", ("vip",), "Holiday plans")
        assert info.turns == 1
        (seen,) = await MemoryStore(backing=backing).sessions(SessionQuery(prefix="chat"))
        assert b"ann" not in msgspec.json.encode(seen)
        assert b"Holiday" not in msgspec.json.encode(seen)
        assert b"vip" not in msgspec.json.encode(seen)


async def test_a_page_is_one_call_of_the_store() -> None:
    counted = NotedReads(MemoryStore())
    async with perdure.connect(counted, shutdown=Shutdown(signals=False)) as sessions:
        for id in ("a", "b", "c"):
            await (await talk(sessions, id, owner="ann")).aclose()
            await sessions.scope(f"user:{id}").set("x", 1)
        counted.forget()
        assert await ids(sessions, newest_first=True, owner="ann", limit=2) == ["c", "b"]
        assert [query.limit for query in counted.queries] == [2]
        assert await ids(sessions, limit=2) == ["a", "b"]
        assert len(counted.queries) == 2


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
