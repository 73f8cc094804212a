"""Checkpoints are judged as of one moment, whatever other tasks do, or leave half done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from perdure import (
    Message,
    Retention,
    Session,
    SessionManager,
    SessionNotFoundError,
    Shutdown,
    connect,
)
from tests.pausing import Pause, PausingStore, meanwhile, reached_or_ended
from tests.session.conftest import Place

QUIET = Shutdown(signals=False)
LARGE = "x" * 3000


async def turn(session: Session, text: str) -> None:
    async with session.turn():
        session.append(Message.user(text))


async def cancelled_at(pause: Pause, act: Callable[[], Awaitable[Any]]) -> bool:
    """Begin something, cancel its caller at the pause, and return whether it ended before."""
    async with anyio.create_task_group() as group:
        ended = await reached_or_ended(pause, group, act)
        group.cancel_scope.cancel()
    pause.go()
    return ended


ACTS: dict[str, Callable[[Session], Awaitable[object]]] = {
    "create": lambda session: session.checkpoints.create("mine"),
    "create with a state": lambda session: session.checkpoints.create("mine", {"pad": LARGE}),
    "rollback": lambda session: session.checkpoints.rollback(1),
    "rollback of a state": lambda session: session.checkpoints.rollback(2),
    "prune": lambda session: session.checkpoints.prune(keep=[1, 2]),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("act", ACTS)
async def test_a_caller_that_goes_away_at_any_call_leaves_sound_checkpoints(
    place: Place, act: str, after: bool
) -> None:
    store, nth, ended = PausingStore(place()), 0, False
    async with connect(store, shutdown=QUIET) as sessions:
        while not ended:
            nth += 1
            async with sessions.open(f"a{nth}") as session:
                session.append(Message.user("one"))
                await session.checkpoints.create("one")
                await session.checkpoints.create("two", {"pad": LARGE})
                await session.checkpoints.create("three")
                session.append(Message.user("two"))
                pause = store.pause(None, nth=nth, after=after)
                ended = await cancelled_at(pause, lambda: ACTS[act](session))  # noqa: B023
                found = await session.checkpoints.verify()
                assert found.ok, (nth, found.problems)
                session.append(Message.user("three"))
                latest = await session.checkpoints.latest()
                assert latest is not None
                await session.checkpoints.rollback(latest.id)
                await session.checkpoints.create("after")
                assert (await session.checkpoints.verify()).ok, nth
    assert nth > 1
    async with connect(place(), shutdown=QUIET) as sessions:
        for at in range(1, nth + 1):
            view = await sessions.load(f"a{at}")
            assert view is not None
            assert (await view.checkpoints.verify()).ok, at


async def sealed_with_states(sessions: SessionManager, id: str) -> Session:
    session = await sessions.open(id)
    for number in range(4):
        await turn(session, f"{number}")
        await session.checkpoints.create(f"c{number}")
        await session.checkpoints.create(f"s{number}", {"n": number, "pad": f"{number}" * 3000})
    return session


async def test_a_checkpoint_that_is_made_meanwhile_is_no_damage(
    place: Place,
) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as sessions:
        session = await sealed_with_states(sessions, "a")
        for method in ("read_log", "get_blob"):
            found = await meanwhile(
                store.pause(method),
                session.checkpoints.verify,
                lambda: session.checkpoints.create("beside", {"pad": LARGE}),
            )
            assert found.ok
            # One that is not in the log yet, since the store takes its time.
            slow = store.pause("append_many")
            async with anyio.create_task_group() as group:
                group.start_soon(session.checkpoints.create, "slow")
                await slow.reached.wait()
                found = []

                async def verify(found: list[Any] = found) -> None:
                    found.append(await session.checkpoints.verify())

                group.start_soon(verify)
                await anyio.wait_all_tasks_blocked()
                slow.go()
            assert found[0].ok


async def test_checkpoints_that_are_pruned_meanwhile_are_no_damage(
    place: Place,
) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as sessions:
        session = await sealed_with_states(sessions, "a")

        for method in ("read_log", "get_blob"):
            await session.checkpoints.create("more", {"pad": method * 3000})
            found = await meanwhile(
                store.pause(method),
                session.checkpoints.verify,
                lambda: session.checkpoints.prune(keep=2),
            )
            assert found.ok
        await session.checkpoints.create("last", {"n": 1})
        await session.checkpoints.prune(keep=3)

        async def sweep() -> None:
            await session.checkpoints.prune(keep=1)
            for name in await store.blob_names(""):
                await store.remove_blobs("", [name])

        found = await meanwhile(store.pause("get_blob"), session.checkpoints.verify, sweep)
        assert found.ok


async def test_history_that_is_pruned_meanwhile_is_no_damage(place: Place) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as sessions, sessions.open("a") as session:
        await turn(session, "one")
        await session.checkpoints.create("one")
        await turn(session, "two")
        kept = await session.checkpoints.create("two")
        await turn(session, "three")
        await session.checkpoints.prune(keep=[kept.id])

        async def prune() -> None:
            assert (await sessions.prune(Retention(keep_turns=1), id="a")).pruned

        found = await meanwhile(store.pause("read_log"), session.checkpoints.verify, prune)
        assert found.ok
        assert found.unchecked == (kept.id,)


async def test_a_checkpoint_beside_a_prune_of_the_history_is_made(
    place: Place,
) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as sessions:
        async with sessions.open("a") as session:
            for number in range(5):
                await turn(session, f"{number}")
        await session.aclose()
        async with sessions.open("a") as session:
            await session.checkpoints.latest()

            async def prune() -> None:
                assert (await sessions.prune(Retention(keep_turns=1), id="a")).pruned

            await meanwhile(
                store.pause("read_log"), lambda: session.checkpoints.create("one"), prune
            )
            assert (await session.checkpoints.verify()).ok
            await session.checkpoints.rollback(1)


async def test_a_view_is_judged_with_what_its_holder_adds_meanwhile(
    place: Place,
) -> None:
    async with connect(place(), shutdown=QUIET) as sessions, connect(place()) as reader:
        session = await sealed_with_states(sessions, "a")
        view = await reader.load("a")
        assert view is not None
        await session.checkpoints.create("later")
        await session.checkpoints.prune(keep=2)
        await session.aclose()  # folds
        assert (await view.checkpoints.verify()).ok


async def test_a_session_that_is_deleted_meanwhile_is_not_called_damaged(
    place: Place,
) -> None:
    async with connect(place(), shutdown=QUIET) as sessions, connect(place()) as reader:
        await (await sealed_with_states(sessions, "a")).aclose()
        view = await reader.load("a")
        assert view is not None
        await view.checkpoints.states()
        await sessions.delete("a")
        with pytest.raises(SessionNotFoundError, match="was deleted meanwhile"):
            await view.checkpoints.verify()
