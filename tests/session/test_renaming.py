"""Renames: one of the names always opens, with everything."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import pytest

from perdure import (
    ConfigError,
    Message,
    SessionClosedError,
    SessionError,
    SessionNotFoundError,
    Shutdown,
    connect,
)
from perdure.records.keys import SessionKey
from perdure.session.fork import made_of, newest
from perdure.session.lifecycle import ExclusiveAccess
from perdure.session.manager import SessionManager
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.pausing import PausingStore, meanwhile, reached_or_ended
from tests.session.conftest import Connect, Place
from tests.session.lives import converse, looks, said

QUIET = Shutdown(signals=False)


async def ids(sessions: SessionManager) -> list[str]:
    return [info.key.agent for info in await sessions.list()]


async def test_a_renamed_session_is_the_same_under_its_new_name(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "old", "one", "two", owner="ada", tags=["x"])
        async with sessions.open("old") as session:
            before = await looks(session)
            done = await sessions.rename("old", "new")
            assert (str(done.key), str(done.parent)) == ("new", "old")
            with pytest.raises(SessionClosedError):
                session.append(Message.user("late"))
        assert await ids(sessions) == ["new"]
    async with again() as sessions:
        assert not await sessions.exists("old")
        async with sessions.open("new") as session:
            assert await looks(session) == before
            assert session.info.metadata.owner == "ada"


async def test_a_session_that_was_never_written_is_renamed_with_its_posts(again: Connect) -> None:
    async with again() as sessions:
        await (await sessions.open("old")).aclose()
        await sessions.post("old", Message.user("posted"))
        await sessions.rename("old", "new")
        assert not await sessions.exists("old")
        assert await sessions.exists("new")
        async with sessions.open("new") as session:
            assert said(session) == ["posted"]


async def test_what_is_taken_or_missing_is_said(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "old", "one")
        await converse(sessions, "taken", "two")
        with pytest.raises(SessionError, match="taken exists"):
            await sessions.rename("old", "taken")
        with pytest.raises(SessionNotFoundError, match="no session nobody"):
            await sessions.rename("nobody", "new")
        with pytest.raises(ConfigError, match="the session itself"):
            await sessions.rename("old", "old")
        held = await sessions.open("held")
        with pytest.raises(SessionError, match="held exists"):
            await sessions.rename("old", "held")
        held.append(Message.user("on"))
        assert await ids(sessions) == ["held", "old", "taken"]


async def test_forks_and_posts_go_on_behind_a_rename(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "old", "one")
        await sessions.fork("old", "fork")
        await sessions.post("old", Message.user("posted"), key="p")
        await sessions.rename("old", "new")
        await sessions.fork("new", "later")
        async with sessions.open("new") as session:
            assert said(session) == ["one", "re one", "posted"]
        async with sessions.open("fork") as session:
            assert said(session) == ["one", "re one"]
        async with sessions.open("later") as session:
            assert said(session)[:2] == ["one", "re one"]


async def half_way(sessions: SessionManager, old: str, new: str) -> None:
    """Do what a rename has done when it is killed behind its copy."""
    access = ExclusiveAccess(sessions._check().runtime, sessions._check().lifecycle)
    head = await sessions._store.head(SessionKey(old))
    last = await newest(access, SessionKey(old), head)
    assert last is not None
    await made_of(access, SessionKey(old), SessionKey(new), last, "rename")


async def test_a_rename_is_finished_by_doing_it_again(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "old", "one")
        before = await looks(await sessions.load("old"))
        await half_way(sessions, "old", "new")
        for name in ("old", "new"):
            assert await looks(await sessions.load(name)) == before
    async with again() as sessions:
        await sessions.rename("old", "new")
        assert await ids(sessions) == ["new"]
        assert await looks(await sessions.load("new")) == before
        await sessions.rename("old", "new")
        assert await ids(sessions) == ["new"]


async def test_who_goes_on_under_the_old_name_is_not_lost(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "old", "one")
        await half_way(sessions, "old", "new")
        await converse(sessions, "old", "two")
        await sessions.rename("old", "new")
        assert said(await sessions.load("new")) == ["one", "re one", "two", "re two"]
        assert await ids(sessions) == ["new"]


async def test_who_goes_on_under_both_names_has_to_choose(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "old", "one")
        await half_way(sessions, "old", "new")
        await converse(sessions, "old", "two")
        await converse(sessions, "new", "three")
        with pytest.raises(SessionError, match="under both names"):
            await sessions.rename("old", "new")
        assert said(await sessions.load("old")) == ["one", "re one", "two", "re two"]
        assert said(await sessions.load("new")) == ["one", "re one", "three", "re three"]


@pytest.mark.parametrize("gone", ["delete", "forget", "rename"])
async def test_a_new_session_of_a_renamed_ones_old_name_is_not_taken_for_it(
    place: Place, gone: str
) -> None:
    async with connect(place(), shutdown=QUIET) as sessions:
        await converse(sessions, "old", "one")
        if gone == "rename":
            await sessions.rename("old", "new")
        else:  # killed between the copy and the deletion, and then given up
            await half_way(sessions, "old", "new")
            await getattr(sessions, gone)("old")
        async with sessions.open("old") as session:
            session.append(Message.user("again"))
            with pytest.raises(SessionError, match="new exists"):
                await sessions.rename("old", "new")
            session.append(Message.user("and on"))
    async with connect(place(), shutdown=QUIET) as sessions:
        assert said(await sessions.load("old")) == ["again", "and on"]
        assert said(await sessions.load("new")) == ["one", "re one"]
        await sessions.rename("old", "other")
        assert said(await sessions.load("other")) == ["again", "and on"]


async def test_a_rename_takes_the_session_from_another_process() -> None:
    backing = MemoryBacking()
    one = await connect(MemoryStore(backing=backing), shutdown=QUIET)
    two = await connect(MemoryStore(backing=backing), shutdown=QUIET)
    theirs = await two.open("old")
    theirs.append(Message.user("theirs"))
    await one.rename("old", "new")
    assert said(await one.load("new")) == ["theirs"]
    assert theirs._closed_by is not None
    await two.aclose()
    await one.aclose()


ACTS: dict[str, Callable[[SessionManager], Awaitable[object]]] = {
    "rename": lambda sessions: sessions.rename("old", "new"),
    "rename again": lambda sessions: sessions.rename("old", "new"),  # over an outdated copy
    "fork": lambda sessions: sessions.fork("old", "new"),  # over one that was never written
}


@pytest.mark.parametrize("name", list(ACTS))
async def test_posts_wait_once_wherever_an_act_is_killed_and_whenever_they_come(name: str) -> None:
    """At each call of the store another process posts; the process goes on, or is killed there."""
    texts = {"old": "to the old", "new": "to the new"}

    async def prepared() -> MemoryBacking:
        backing = MemoryBacking()
        async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
            await converse(sessions, "old", "one")
            if name == "rename again":
                await half_way(sessions, "old", "new")
                await converse(sessions, "old", "two")
            else:
                await (await sessions.open("new")).aclose()
            for id, text in texts.items():
                await sessions.post(id, Message.user(f"{text}, before"))
        return backing

    async def posts(backing: MemoryBacking, *, done: bool) -> list[str]:
        for owner in backing.owners.values():
            owner.alive = False
        async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
            if not done:
                with contextlib.suppress(SessionNotFoundError):  # all but the answer was done
                    await ACTS[name](sessions)
            found: list[str] = []
            for id in texts:
                async with sessions.open(id) as session:
                    found += [text for text in said(session) if text.startswith("to ")]
            return sorted(found)

    expected = sorted(f"{text}, {when}" for text in texts.values() for when in ("before", "then"))
    nth, has_ended, failed = 0, False, []
    while not has_ended:
        nth, backing = nth + 1, await prepared()
        store = PausingStore(MemoryStore(backing=backing))
        async with (
            connect(store, shutdown=QUIET) as sessions,
            connect(MemoryStore(backing=backing), shutdown=QUIET) as other,
            anyio.create_task_group() as group,
        ):
            pause = store.pause(None, nth=nth)
            has_ended = await reached_or_ended(pause, group, partial(ACTS[name], sessions))
            for id, text in texts.items():
                await other.post(id, Message.user(f"{text}, then"))
            killed = copy.deepcopy(backing)
            pause.go()
        for what, place, done in ("killed", killed, False), ("whole", backing, True):
            found = await posts(place, done=done)
            if found != expected:
                failed.append((nth, what, found))
    assert failed == []
    assert nth > 5


async def test_what_is_posted_while_a_rename_deletes_the_old_name_waits_there(place: Place) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as sessions:
        await converse(sessions, "old", "one")
        await sessions.post("old", Message.user("before"))
        deleting = store.pause("delete")

        async with anyio.create_task_group() as group:
            group.start_soon(sessions.rename, "old", "new")
            await deleting.reached.wait()
            group.start_soon(sessions.post, "old", Message.user("meanwhile"))
            for _ in range(20):
                await anyio.sleep(0)
            deleting.go()
        async with sessions.open("new") as session:
            assert said(session) == ["one", "re one", "before"]
        async with sessions.open("old") as session:
            assert said(session) == ["meanwhile"]


async def test_a_post_that_is_on_its_way_waits_at_one_of_the_names(place: Place) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as sessions:
        await converse(sessions, "old", "one")
        posting = store.pause("enqueue")
        async with anyio.create_task_group() as group:
            group.start_soon(sessions.post, "old", Message.user("posted"))
            await posting.reached.wait()
            group.start_soon(sessions.rename, "old", "new")
            for _ in range(1000):  # as far as it comes
                await anyio.sleep(0)
            posting.go()
        async with sessions.open("new") as new, sessions.open("old") as old:
            assert said(new) + said(old) == ["one", "re one", "posted"]


async def test_two_renames_to_one_name_leave_both_sessions(place: Place) -> None:
    store, new = PausingStore(place()), SessionKey("new")
    async with connect(store, shutdown=QUIET) as first, connect(place(), shutdown=QUIET) as second:
        await converse(first, "a", "one")
        await converse(first, "b", "two")
        pause = store.pause("acquire", lambda key, _: key == new)

        async def rename() -> None:
            with pytest.raises(SessionError, match="new exists"):
                await first.rename("a", "new")

        await meanwhile(pause, rename, lambda: second.rename("b", "new"))
        assert said(await second.load("new")) == ["two", "re two"]
        assert said(await second.load("a")) == ["one", "re one"]
        await first.rename("a", "other")
        assert said(await second.load("other")) == ["one", "re one"]


async def test_a_rename_to_a_name_that_another_session_got_by_a_rename_is_refused(
    place: Place,
) -> None:
    """Both were called "b" when they were renamed, and have the same numbers and epochs."""
    async with connect(place(), shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one")
        await sessions.rename("a", "b")
        await sessions.rename("b", "c")
        await converse(sessions, "d", "two")
        for text in "three", "four", "five":
            await converse(sessions, "d", text)
        await sessions.rename("d", "b")
        with pytest.raises(SessionError, match="c exists"):
            await sessions.rename("b", "c")
        assert said(await sessions.load("c")) == ["one", "re one"]
