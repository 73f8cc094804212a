"""A process never takes a session over from itself, whatever it does to it while it is in use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from perdure import (
    Message,
    PerdureError,
    Retention,
    Session,
    SessionClosedError,
    SessionError,
    SessionManager,
    SessionNotFoundError,
    Shutdown,
    connect,
)
from perdure.records.keys import SessionKey
from tests.pausing import PausingStore, meanwhile, reached_or_ended
from tests.session.conftest import Place

QUIET = Shutdown(signals=False)

ACTS: dict[str, Callable[[SessionManager, str], Awaitable[object]]] = {
    "rename": lambda sessions, id: sessions.rename(id, f"new {id}"),
    "copy": lambda sessions, id: sessions.copy(id, f"new {id}"),
    "fork": lambda sessions, id: sessions.fork(id, f"new {id}"),
    "prune": lambda sessions, id: sessions.prune(Retention(keep_turns=1), id=id),
    "rebuild": lambda sessions, id: sessions.rebuild_working_context(id),
    "delete": lambda sessions, id: sessions.delete(id),
    "forget": lambda sessions, id: sessions.forget(id),
}
GONE = ("delete", "forget")


async def turns(sessions: SessionManager, id: str, *texts: str) -> None:
    async with sessions.open(id) as session:
        for text in texts:
            async with session.turn():
                session.append(Message.user(text))


async def stored(place: Place) -> set[str]:
    async with connect(place(), shutdown=QUIET) as sessions:
        texts: set[str] = set()
        for info in await sessions.list(limit=1000):
            view = await sessions.load(info.key.agent)
            assert view is not None
            items = await view.history(limit=1000)
            texts |= {item.value.text for item in items if isinstance(item.value, Message)}
        return texts


def is_about(id: str, *args: object) -> bool:
    """Return whether a call is not about another session."""
    return not (args and isinstance(args[0], SessionKey) and args[0].agent != id)


@pytest.mark.parametrize(
    "place",
    ["memory", pytest.param("file", marks=pytest.mark.deep)],
    indirect=True,
)
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("act", ACTS)
async def test_what_requests_append_at_any_call_of_an_act_is_kept_or_refused(
    place: Place, act: str, is_open: bool
) -> None:
    store, accepted, nth, done = PausingStore(place()), list[str](), 0, False

    async def request(sessions: SessionManager, id: str) -> None:
        try:
            async with sessions.open(id) as session:
                session.append(Message.user(f"{id} late"))
                accepted.append(f"{id} late")
                await session.save()
        except (SessionClosedError, SessionNotFoundError):
            pass  # never LeaseLostError: there is no other process

    async with connect(store, shutdown=QUIET) as sessions:
        while not done:
            nth += 1
            id = f"a{nth}"
            await turns(sessions, id, f"{id} one", f"{id} two")
            session = await sessions.open(id)
            session.append(Message.user(f"{id} unsaved"))
            accepted.append(f"{id} unsaved")
            if not is_open:
                await session.aclose()
            # A forget looks at all sessions, and there is one more each time.
            pause = store.pause(None, lambda *args: is_about(id, *args), nth=nth)  # noqa: B023
            async with anyio.create_task_group() as group:
                done = await reached_or_ended(pause, group, lambda: ACTS[act](sessions, id))  # noqa: B023
                if session.is_writable:
                    session.append(Message.user(f"{id} amid"))
                    accepted.append(f"{id} amid")
                group.start_soon(request, sessions, id)
                await anyio.wait_all_tasks_blocked()
                pause.go()
            assert sessions.lost == ()
            assert sessions.health().status == "ok", nth
            await turns(sessions, id, f"{id} after")
            accepted.append(f"{id} after")
    assert nth > 2
    if act not in GONE:
        assert set(accepted) <= await stored(place)


@pytest.mark.parametrize("act", ACTS)
async def test_an_act_that_meets_a_session_that_is_being_opened_takes_nothing_over(
    place: Place, act: str
) -> None:
    store, opened = PausingStore(place()), list[Session]()
    async with connect(store, shutdown=QUIET) as sessions:
        await turns(sessions, "a", "one", "two")
        async with sessions.open("a") as session:
            await session.aclose()

        async def open_it() -> None:
            opened.append(await sessions.open("a"))

        pause = store.pause("acquire", after=True)
        async with anyio.create_task_group() as group:
            group.start_soon(open_it)
            await pause.reached.wait()
            group.start_soon(ACTS[act], sessions, "a")
            await anyio.wait_all_tasks_blocked()
            pause.go()
        assert sessions.lost == ()
        (session,) = opened
        if session.is_writable or act not in (*GONE, "rename"):
            session.append(Message.user("three"))
            await session.save()


async def test_an_open_of_the_old_name_waits_until_a_rename_is_done(place: Place) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as sessions:
        await turns(sessions, "a", "one")
        opened: list[Any] = []

        async def reopen() -> None:
            opened.append(await sessions.open("a"))

        async with anyio.create_task_group() as group:

            async def then() -> None:
                group.start_soon(reopen)
                await anyio.wait_all_tasks_blocked()
                assert not opened

            pause = store.pause("publish")
            await meanwhile(pause, lambda: sessions.rename("a", "new"), then)
        (session,) = opened
        assert session.context() == []
        view = await sessions.load("new")
        assert view is not None
        assert [message.text for message in view.context()] == ["one"]


async def test_objects_of_the_old_name_say_what_the_new_one_is(place: Place) -> None:
    async with connect(place(), shutdown=QUIET) as sessions:
        session = await sessions.open("a")
        session.append(Message.user("one"))
        await sessions.rename("a", "new")
        for act in (lambda: session.append(Message.user("late")), session.turn):
            with pytest.raises(SessionClosedError, match="renamed to new: open new") as refused:
                result = act()
                async with result:  # type: ignore[union-attr]
                    pass
            assert refused.value.facts == {"key": "a", "new": "new"}


async def test_a_rename_in_a_turn_of_its_own_is_refused_at_once(place: Place) -> None:
    async with connect(place(), shutdown=QUIET) as sessions, sessions.open("a") as session:
        async with session.turn():
            session.append(Message.user("one"))
            with pytest.raises(SessionError, match="this task is in a turn of it"):
                await sessions.rename("a", "new")
        await sessions.rename("a", "new")
        assert await sessions.exists("new")


async def test_a_rename_waits_for_a_turn_which_may_delete_others(place: Place) -> None:
    async with connect(place(), shutdown=QUIET) as sessions:
        await turns(sessions, "other", "one")
        await sessions.fork("other", "fork")
        session = await sessions.open("a")
        async with anyio.create_task_group() as group:
            async with session.turn():
                group.start_soon(sessions.rename, "a", "new")
                await anyio.wait_all_tasks_blocked()
                assert await sessions.delete("other")
                session.append(Message.user("one"))
        view = await sessions.load("new")
        assert view is not None
        assert [message.text for message in view.context()] == ["one"]


async def test_a_rename_that_is_refused_leaves_the_session_open(place: Place) -> None:
    async with connect(place(), shutdown=QUIET) as sessions, sessions.open("a") as session:
        await turns(sessions, "taken", "one")
        session.append(Message.user("one"))
        with pytest.raises(PerdureError, match="taken exists"):
            await sessions.rename("a", "taken")
        session.append(Message.user("two"))
        await session.save()
