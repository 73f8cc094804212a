"""Forks and copies: sessions that begin with the history of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure import (
    ConfigError,
    LeaseLostError,
    Message,
    NotStorableError,
    Retention,
    SessionError,
    SessionNotFoundError,
    Shutdown,
    connect,
)
from perdure.records.keys import SessionKey
from perdure.session.manager import SessionManager
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore
from tests.session.conftest import Connect
from tests.session.lives import converse, looks, said, told

QUIET = Shutdown(signals=False)


async def view(sessions: SessionManager, id: str, **where: str) -> object:
    found = await sessions.load(id, **where)
    assert found is not None
    return found


async def test_a_fork_begins_as_its_parent_is(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "parent", "one", "two", owner="ada", tags=["x"])
        forked = await sessions.fork("parent", "child")
        parent = await looks(await view(sessions, "parent"))
        assert parent["title"] == "about two"
        assert await looks(await view(sessions, "child")) == parent
        async with sessions.open("child") as child:
            assert await looks(child) == parent
            assert child.info.metadata.owner == "ada"
            assert (child.info.agent_id, child.key.agent) == ("child", "child")
            assert child.version > forked.at
            assert str(forked.parent) == "parent"
    async with again() as sessions:
        assert await looks(await view(sessions, "child")) == parent


async def test_both_go_on_each_for_itself(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "parent", "one")
        await sessions.fork("parent", "child")
        await converse(sessions, "parent", "theirs")
        await converse(sessions, "child", "ours")
    async with again() as sessions, sessions.open("child") as child:
        assert said(child) == ["one", "re one", "ours", "re ours"]
        assert await child.state.get("last") == "ours"
        assert sorted(await child.memory.keys()) == ["about one", "about ours"]
        assert child.info.turns == 2
        async with sessions.open("parent") as parent:
            assert said(parent) == ["one", "re one", "theirs", "re theirs"]
            assert await parent.state.get("last") == "theirs"


async def test_history_walks_into_the_parent(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "parent", *"abcdef")
        forked = await sessions.fork("parent", "child")
        await converse(sessions, "parent", "hidden")
        await converse(sessions, "child", "g")
        async with sessions.open("child") as child:
            whole = await told(child)
            assert [text for _, text in whole if len(text) == 1] == list("abcdefg")
            assert [seq for seq, _ in whole] == sorted({seq for seq, _ in whole})
            pages: list[tuple[int, str]] = []
            before = None
            while page := await child.history(before=before, limit=3):
                before = page[0].seq
                texts = [(i.seq, i.value.text) for i in page if isinstance(i.value, Message)]
                pages = texts + pages
            assert pages == whole
            assert {seq for seq, _ in whole if seq > forked.at} == {seq for seq, _ in whole[-2:]}


@pytest.mark.parametrize("folded", [True, False], ids=["folded", "not folded"])
async def test_a_fork_at_a_turn_is_as_the_parent_was_then(again: Connect, folded: bool) -> None:
    async with again() as sessions:
        await converse(sessions, "parent", "one")
        then = await looks(await view(sessions, "parent"))
        if folded:
            await converse(sessions, "parent", "two")
        else:
            session = await sessions.open("parent")
            session.append(Message.user("two"))
            await session.save()
        forked = await sessions.fork("parent", "child", at="turn one")
        then["title"] = None  # it was given behind the turn
        assert await looks(await view(sessions, "child")) == then
        assert (await sessions.fork("parent", "other", at=forked.at)).at == forked.at
        assert await looks(await view(sessions, "other")) == then
        async with sessions.open("child") as child, child.turn(id="turn one") as turn:
            assert turn.replayed


async def test_where_a_fork_cannot_begin_it_says_why(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "parent", "one")
        session = await sessions.open("parent")
        head = session.append(Message.user("a"), Message.assistant("b"))
        await session.save()
        with pytest.raises(ConfigError, match="middle of a group"):
            await sessions.fork("parent", "child", at=head - 1)
        with pytest.raises(ConfigError, match="no record 99"):
            await sessions.fork("parent", "child", at=99)
        with pytest.raises(ConfigError, match="no record 0"):
            await sessions.fork("parent", "child", at=0)
        with pytest.raises(ConfigError, match="no turn 'never'"):
            await sessions.fork("parent", "child", at="never")
        with pytest.raises(ConfigError, match="the session itself"):
            await sessions.fork("parent", "parent")
        with pytest.raises(SessionNotFoundError, match="no session nobody"):
            await sessions.fork("nobody", "child")
        assert [info.key.agent for info in await sessions.list()] == ["parent"]
        await converse(sessions, "taken", "mine")
        with pytest.raises(SessionError, match="taken exists"):
            await sessions.fork("parent", "taken")
        assert said(await view(sessions, "taken")) == ["mine", "re mine"]


async def test_a_fork_again_is_the_same_fork(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "parent", "one")
        first = await sessions.fork("parent", "child", at="turn one")
        assert await sessions.fork("parent", "child", at="turn one") == first
        await converse(sessions, "child", "mine")
        with pytest.raises(SessionError, match="child exists"):
            await sessions.fork("parent", "child", at="turn one")


async def test_forks_of_forks(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one")
        at_one = await looks(await view(sessions, "a"))
        await sessions.fork("a", "b")
        await converse(sessions, "b", "two")
        await sessions.fork("b", "c")
        await converse(sessions, "c", "three")
        await sessions.fork("c", "d", at="turn one")
        texts = ["one", "re one", "two", "re two", "three", "re three"]
        assert [text for _, text in await told(await view(sessions, "c"))] == texts
        then = await looks(await view(sessions, "d"))
        assert {**then, "title": at_one["title"]} == at_one
    async with again() as sessions, sessions.open("c") as session:
        assert said(session) == texts


async def test_a_fork_that_lost_its_documents_is_made_anew_from_the_log(tmp_path: Path) -> None:
    async with connect(tmp_path / "data", shutdown=QUIET) as sessions:
        await converse(sessions, "parent", "one", "two")
        await sessions.fork("parent", "child")
        await converse(sessions, "child", "three")
        before = await looks(await view(sessions, "child"))
    folder = Path(FileStore(tmp_path / "data").folder_of(SessionKey("child")))
    for name in ("session.json", "memory.json", "working_context_snapshot.json"):
        (folder / name).write_text("damaged")
    async with connect(tmp_path / "data", shutdown=QUIET) as sessions:
        assert await looks(await view(sessions, "child")) == before
        async with sessions.open("child") as child:
            assert set(child.restore_report.damaged) >= {"session.json"}
            assert await looks(child) == before
    for file in folder.glob("manifest-*"):
        file.unlink()
    async with connect(tmp_path / "data", shutdown=QUIET) as sessions, sessions.open("child") as c:
        assert await looks(c) == before


@pytest.mark.parametrize("act", ["fork", "fork context", "fork unsaved", "copy", "rename"])
@pytest.mark.parametrize("begun", ["copy of a pruned one", "fork without history"])
async def test_what_is_made_of_a_session_that_nothing_was_said_in_has_what_that_began_with(
    again: Connect, begun: str, act: str
) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one", "two")
        if begun == "fork without history":
            await sessions.fork("a", "begun", history="context")
        else:
            async with sessions.open("a") as session, session.turn():
                session.append(Message.user("three"))
            assert (await sessions.prune(Retention(keep_turns=0), id="a")).pruned
            await sessions.copy("a", "begun")
        before = await looks(await view(sessions, "begun"))
        assert before["said"][:4] == ["one", "re one", "two", "re two"]
        for new in ("new", "newer"):  # of what was made of it, too
            if act == "fork unsaved":
                session = await sessions.open("begun")
                await session.fork_unsaved(new)
            elif act == "fork context":
                await sessions.fork("begun", new, history="context")
            else:
                await getattr(sessions, act)("begun", new)
            assert await looks(await view(sessions, new)) == before
            if act == "rename":
                assert not await sessions.exists("begun")
                await sessions.rename(new, "begun")
                assert await looks(await view(sessions, "begun")) == before


async def test_conversations_and_tenants_fork_too(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "agent", "one", session="first", tenant="t")
        await sessions.fork("agent", "agent", session="first", new_session="second", tenant="t")
        found = await view(sessions, "agent", session="second", tenant="t")
        assert said(found) == ["one", "re one"]
        assert await sessions.load("agent", session="second") is None


async def test_a_fork_of_an_open_session_saves_it_first(again: Connect) -> None:
    async with again(autosave=None) as sessions:
        session = await sessions.open("parent")
        session.append(Message.user("unsaved"))
        await sessions.fork("parent", "child")
        assert session.durable_version == session.version
        assert said(await view(sessions, "child")) == ["unsaved"]
        session.append(Message.user("more"))
        assert said(session) == ["unsaved", "more"]


async def test_retracting_reaches_into_the_parent(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "parent", "one", "two")
        at = (await sessions.fork("parent", "at one", at="turn one")).at
        await sessions.fork("parent", "child")
        async with sessions.open("child") as child:
            child.append(Message.user("three"))
            await child.retract(after=at)
            assert said(child) == ["one", "re one"]
            await child.save()
        assert said(await view(sessions, "child")) == ["one", "re one"]


def bytes_of(place: Path) -> int:
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())


# copies


async def test_a_copy_needs_the_other_no_more(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "one", "a", "b")
        await sessions.fork("one", "fork")
        await converse(sessions, "fork", "c")
        before = await looks(await view(sessions, "fork"))
        await sessions.copy("fork", "copy")
        assert await looks(await view(sessions, "copy")) == before
        assert await sessions.delete("one")
        assert await sessions.delete("fork")
        assert [info.key.agent for info in await sessions.list()] == ["copy"]
    async with again() as sessions, sessions.open("copy") as copy:
        assert await looks(copy) == before
        copy.append(Message.user("on"))
        await copy.save()
        assert [text for _, text in await told(copy)][-1] == "on"
        with pytest.raises(SessionNotFoundError):
            await sessions.copy("one", "another")


async def test_a_copy_of_much_history_is_cut_into_pieces(again: Connect) -> None:
    async with again() as sessions:
        session = await sessions.open("long")
        for number in range(30):
            session.append(Message.user(f"{number} " + "x" * 100_000))
        await session.aclose()
        await sessions.copy("long", "copy")
        assert await told(await view(sessions, "copy")) == await told(await view(sessions, "long"))
        found = await view(sessions, "copy")
        some = await found.history(before=10, limit=3)  # type: ignore[attr-defined]
        assert [item.seq for item in some] == [7, 8, 9]


async def test_a_store_without_blobs_forks_and_copies() -> None:
    from perdure.stores.state import StateStore
    from tests.stores.test_state import KeptStates, OwnStorage

    kept = KeptStates()
    store = StateStore(lambda key: OwnStorage(kept, key))
    async with connect(store, shutdown=QUIET) as sessions:
        await converse(sessions, "parent", "one")
        await sessions.fork("parent", "fork")
        await sessions.copy("parent", "copy")
        await sessions.delete("parent")
        for id in ("fork", "copy"):
            async with sessions.open(id) as session:
                assert said(session) == ["one", "re one"]


# what is not saved


async def test_what_a_lost_session_did_not_save_becomes_another() -> None:
    backing = MemoryBacking()
    one = await connect(MemoryStore(backing=backing), autosave=None, shutdown=QUIET)
    two = await connect(MemoryStore(backing=backing), shutdown=QUIET)
    session = await one.open("a")
    session.append(Message.user("saved"))
    await session.save()
    session.append(Message.user("unsaved 1"), Message.user("unsaved 2"))
    session.append(Message.user("unsaved 3"))
    holder = backing.sessions[session.key]
    holder.released = True  # as one that was taken to be dead
    async with two.open("a") as theirs:
        theirs.append(Message.user("theirs"))
        await theirs.save()
        with pytest.raises(LeaseLostError):
            await session.save()
        forked = await session.fork_unsaved("mine")
        assert forked.at == session.durable_version
        async with one.open("mine") as mine:
            assert said(mine) == ["saved", "unsaved 1", "unsaved 2", "unsaved 3"]
        assert said(theirs) == ["saved", "theirs"]
    await two.delete("a")
    assert said(await view(two, "mine")) == ["saved", "unsaved 1", "unsaved 2", "unsaved 3"]
    await two.aclose()
    await one.aclose()


async def test_what_is_quarantined_becomes_another() -> None:
    backing = MemoryBacking()
    faulty = FaultyStore(
        MemoryStore(backing=backing), fail_on="append_many", nth=2, how="permanent"
    )
    async with connect(faulty, autosave=None, shutdown=QUIET) as sessions:
        session = await sessions.open("a")
        session.append(Message.user("saved"))
        await session.save()
        session.append(Message.user("refused"))
        with pytest.raises(SessionError):
            await session.save()
        await session.fork_unsaved("b")
        assert said(await view(sessions, "b")) == ["saved", "refused"]
        assert await session.discard_unsaved() >= 1
        assert said(session) == ["saved"]


async def test_an_unsaved_record_that_is_refused_again_leaves_nothing_behind() -> None:
    faulty = FaultyStore(MemoryStore(), fail_on="append_many", nth=2, how="permanent", times=3)
    async with connect(faulty, autosave=None, shutdown=QUIET) as sessions:
        session = await sessions.open("a")
        session.append(Message.user("saved"))
        await session.save()
        session.append(Message.user("refused"))
        with pytest.raises(SessionError):
            await session.save()
        with pytest.raises(NotStorableError):
            await session.fork_unsaved("b")
        assert [info.key.agent for info in await sessions.list()] == ["a"]
        assert [one.kind for one in session.unsaved()][:1] == ["message"]
        await session.discard_unsaved()
