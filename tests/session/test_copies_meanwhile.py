"""What a copy or a fork acknowledges is whole, or it was refused, whatever becomes of its source."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from perdure import (
    LeaseHeldError,
    Message,
    PerdureError,
    Retention,
    SessionManager,
    SessionNotFoundError,
    Shutdown,
    connect,
)
from perdure.cli.check import audit
from perdure.records.keys import SessionKey
from perdure.stores.file import FileStore
from tests.pausing import PausingStore, meanwhile, reached_or_ended
from tests.session.conftest import Place
from tests.session.lives import converse, looks, said

QUIET = Shutdown(signals=False)

ACTS: dict[str, Callable[[SessionManager, str], Awaitable[object]]] = {
    "copy": lambda sessions, id: sessions.copy(id, f"new {id}"),
    "fork": lambda sessions, id: sessions.fork(id, f"new {id}"),
}


async def made_again(sessions: SessionManager, id: str) -> None:
    await sessions.delete(id)
    await converse(sessions, id, "again")


OTHERS: dict[str, Callable[[SessionManager, str], Awaitable[object]]] = {
    "delete": lambda sessions, id: sessions.delete(id),
    "make again": made_again,
    "forget": lambda sessions, id: sessions.forget(id),
    "prune": lambda sessions, id: sessions.prune(Retention(keep_turns=1), id=id),
}


IN_TWO_PLACES = pytest.mark.parametrize("place", ["memory", "file"], indirect=True)
"""It is stopped at calls of the port, which SQLite answers as memory does (`tests/conformance`);
processes that are killed within them are in `tests/crash`, on each store."""


async def shown(sessions: SessionManager, id: str) -> dict[str, Any] | None:
    view = await sessions.load(id)
    return None if view is None else await looks(view)


async def require_whole(sessions: SessionManager, id: str, *, may_be: list[Any]) -> None:
    """Require that what there is under an id is right, and can be deleted and forgotten."""
    if await sessions.exists(id):
        seen = await audit(sessions._store, SessionKey(id))
        assert [found for found in seen.findings if found.problem] == []
    found = await shown(sessions, id)
    assert found in may_be, (found, id)
    if found is not None:
        async with sessions.open(id) as session:
            assert await looks(session) == found
        await sessions.delete(id)
    await sessions.forget(id)


async def meet(
    place: Place,
    begun: Callable[[SessionManager, str], Awaitable[object]],
    then: Callable[[SessionManager, str], Awaitable[object]],
    *,
    is_copying: bool,
) -> None:
    """Let two processes meet: the second acts while the first is at each of its calls."""
    store, theirs, nth, done = PausingStore(place()), PausingStore(place()), 0, False
    async with (
        connect(store, shutdown=QUIET) as first,
        connect(theirs, shutdown=QUIET) as second,
    ):
        step = 3 if isinstance(store._store, FileStore) else 1  # whose calls cost the most
        while not done:
            nth += step
            id, refused = f"a{nth}", list[PerdureError]()
            await converse(second, id, "one", "two", "three", "large " + "x" * 3000)
            lives = [await shown(second, id)]
            copying = begun if is_copying else then

            async def act(
                what: Callable[[SessionManager, str], Awaitable[object]], sessions: SessionManager
            ) -> None:
                try:
                    await what(sessions, id)  # noqa: B023
                except PerdureError as error:
                    if what is copying:  # noqa: B023
                        refused.append(error)  # noqa: B023
                    else:
                        raise

            pause = store.pause(None, nth=nth)
            async with anyio.create_task_group() as group:
                done = await reached_or_ended(pause, group, lambda: act(begun, first))  # noqa: B023
                lives.append(await shown(second, id))
                asked = theirs.pause("request_handover")  # it waits for the first one's lease
                await reached_or_ended(asked, group, lambda: act(then, second))  # noqa: B023
                lives.append(await shown(second, id))
                pause.go()
                asked.go()
            lives += [await shown(second, id)]
            new = f"new {id}"
            await require_whole(second, new, may_be=[None] if refused else lives)
            await require_whole(second, id, may_be=lives)
    assert nth > 3


@IN_TWO_PLACES
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("act", ACTS)
async def test_what_is_made_of_a_source_that_goes_meanwhile_is_whole_or_refused(
    place: Place, act: str, other: str
) -> None:
    await meet(place, ACTS[act], OTHERS[other], is_copying=True)


@pytest.mark.deep
@IN_TWO_PLACES
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("act", ACTS)
async def test_what_is_made_of_a_source_that_is_going_is_whole_or_refused(
    place: Place, act: str, other: str
) -> None:
    await meet(place, OTHERS[other], ACTS[act], is_copying=False)


@pytest.mark.parametrize("act", ["fork", "prune"])
async def test_what_is_posted_to_an_id_outlives_a_refused_act_on_it(place: Place, act: str) -> None:
    """A fork refused as its parent goes, and a prune that finds its session gone, remove nothing."""
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as first, connect(place(), shutdown=QUIET) as second:
        await converse(second, "a", "one", "two", "three")
        id = "new" if act == "fork" else "a"
        pause = store.pause("acquire", lambda key, _: key == SessionKey(id))

        async def begin() -> None:
            if act == "fork":
                with pytest.raises(SessionNotFoundError):
                    await first.fork("a", id)
            else:
                assert not (await first.prune(Retention(keep_turns=1), id=id)).pruned

        async def go() -> None:
            await second.delete("a")
            await second.post(id, Message.user("posted"))

        await meanwhile(pause, begin, go)
        assert not await second.exists(id)
        async with second.open(id) as session:
            assert said(session) == ["posted"]


@pytest.mark.parametrize("act", ["delete", "forget"])
async def test_what_is_posted_to_a_fork_that_is_just_being_made_outlives_its_end(
    place: Place, act: str
) -> None:
    store, new = PausingStore(place()), SessionKey("new")
    async with connect(store, shutdown=QUIET) as first, connect(place(), shutdown=QUIET) as second:
        await converse(second, "a", "one")
        begun = store.pause("append_many", lambda batches: batches[0].key == new)

        async def fork() -> None:
            with pytest.raises(SessionNotFoundError):
                await first.fork("a", "new")

        async def go() -> None:
            await second.post("new", Message.user("posted"))
            await getattr(second, act)("a")
            await second.post("new", Message.user("posted then"))

        await meanwhile(begun, fork, go)
        assert not await second.exists("new")
        async with second.open("new") as session:
            assert said(session) == ["posted", "posted then"]


async def test_a_copy_that_another_process_may_withdraw_is_not_acknowledged(place: Place) -> None:
    store, new = PausingStore(place()), SessionKey("new")
    async with connect(store, shutdown=QUIET) as first, connect(place(), shutdown=QUIET) as second:
        await converse(first, "a", "one")
        begun = store.pause("append_many", lambda batches: batches[0].key == new, after=True)

        async def copy() -> None:
            with pytest.raises(SessionNotFoundError):
                await first.copy("a", "new")

        async def other() -> None:
            with pytest.raises(LeaseHeldError):
                await second.copy("a", "new")
            await second.delete("a")

        await meanwhile(begun, copy, other)
        assert not await second.exists("new")
        await converse(first, "a", "two")
        assert await first.copy("a", "new") == await second.copy("a", "new")  # made before
        assert said(await second.load("new")) == ["two", "re two"]


@pytest.mark.parametrize("act", ["fork", "copy"])
async def test_what_is_made_of_a_fork_that_is_just_being_made_has_its_history(
    place: Place, act: str
) -> None:
    store, child = PausingStore(place()), SessionKey("child")
    async with connect(store, shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one")
        pause = store.pause("acquire", lambda key, _: key == child, after=True)
        async with anyio.create_task_group() as group:
            group.start_soon(sessions.fork, "a", "child")
            await pause.reached.wait()
            group.start_soon(getattr(sessions, act), "child", "grandchild")
            for _ in range(1000):  # as far as it comes
                await anyio.sleep(0)
            pause.go()
        view = await sessions.load("grandchild")
        assert said(view) == ["one", "re one"]


async def test_a_rename_that_waits_for_a_session_that_goes_makes_none(place: Place) -> None:
    """An empty session that is removed again would take with it what is posted meanwhile."""
    store, acquired = PausingStore(place()), list[SessionKey]()
    async with connect(store, shutdown=QUIET) as first, connect(place(), shutdown=QUIET) as second:
        await converse(first, "a", "one")
        waiting = store.pause("holder", lambda key: key == SessionKey("a"))
        making = store.pause("acquire", lambda key, _: acquired.append(key) or False)

        async def rename() -> None:
            with pytest.raises(SessionNotFoundError):
                await first.rename("a", "b")

        await meanwhile(waiting, rename, lambda: second.delete("a"))
        assert acquired == [SessionKey("a")]  # asked for, on terms that make none
        assert not making.reached.is_set()


async def test_what_a_fork_without_history_begins_with_is_put_when_its_draft_is_there(
    place: Place,
) -> None:
    """Who looks for what a removal may take finds the draft; nobody knows of what comes before."""
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as one, connect(place(), shutdown=QUIET) as two:
        for id in ("a", "b"):
            async with two.open(id) as session:
                session.state.set("same in both", 1)
                await session.aclose()
            await converse(two, id, "one", "two", "three")
        await two.prune(Retention(keep_turns=1), id="a")
        pause = store.pause("acquire")
        await meanwhile(
            pause,
            lambda: one.fork("b", "fork", history="context"),
            lambda: two.forget(id="a"),
        )
        found = (await audit(two._store, SessionKey("fork"))).findings
        assert [finding.detail for finding in found if finding.problem] == []
