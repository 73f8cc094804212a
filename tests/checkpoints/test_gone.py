"""A session that is deleted while its checkpoints are used: that is told, and no damage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

from perdure import (
    HistoryPrunedError,
    LeaseLostError,
    Limits,
    Message,
    Retention,
    Session,
    SessionManager,
    SessionNotFoundError,
    SessionView,
    Shutdown,
    connect,
)
from perdure.errors import FormatError, PerdureError
from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.conformance._kit import take
from tests.pausing import PausingStore, reached_or_ended
from tests.session.conftest import Place

QUIET = Shutdown(signals=False)
LARGE = "x" * 3000


async def sealed(sessions: SessionManager, id: str) -> Session:
    """Open a session with checkpoints of both kinds, of which half is folded."""
    session = await sessions.open(id)
    for number in (1, 3):
        session.append(Message.user(f"message {number}"))
        session.memory.set("large", LARGE * number)
        await session.checkpoints.create(f"c{number}")
        await session.checkpoints.create(f"s{number}", {"n": number, "pad": LARGE})
        await session.save()
        if number == 1:
            await session.aclose()
            session = await sessions.open(id)
    return session


async def restored(reader: Session | SessionView, id: int) -> Any:
    checkpoint = await reader.checkpoints.restore(id)
    return None if checkpoint is None else checkpoint.state


READS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "states": lambda session: session.checkpoints.states(),
    "restore": lambda session: restored(session, 3),
    "restore of a state": lambda session: restored(session, 4),
    "diff": lambda session: session.checkpoints.diff(1, 3),
    "verify": lambda session: session.checkpoints.verify(),
}
WRITES: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "create": lambda session: session.checkpoints.create("mine"),
    "create with a state": lambda session: session.checkpoints.create("mine", {"pad": LARGE}),
    "rollback": lambda session: session.checkpoints.rollback(1),
    "rollback of a state": lambda session: session.checkpoints.rollback(2),
    "prune": lambda session: session.checkpoints.prune(keep=[1, 2]),
}


async def deleted(store: Store, session: Session) -> None:
    """Delete a session as a process that has taken it over."""
    await store.delete(session.key, (await take(store, session.key)).epoch)


async def begun_anew(store: Store, session: Session) -> None:
    """The same, and something else has its id then."""
    await deleted(store, session)
    await take(store, session.key)


async def outcome(act: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await act()
    except PerdureError as error:
        return error


@pytest.mark.parametrize("gone", [deleted, begun_anew])
@pytest.mark.parametrize("act", [*READS, *WRITES])
async def test_what_another_process_deleted_at_any_call_is_no_damage(
    act: str, gone: Callable[[Store, Session], Awaitable[None]]
) -> None:
    backing = MemoryBacking()
    store, other = PausingStore(MemoryStore(backing=backing)), MemoryStore(backing=backing)
    await other.open()
    does, ended, nth = {**READS, **WRITES}[act], False, 0
    async with connect(store, shutdown=QUIET) as sessions:
        while not ended:
            nth += 1
            session = await sealed(sessions, f"a{nth}")
            wanted = await outcome(partial(does, session)) if act in READS else None
            pause, said = store.pause(None, nth=nth), list[Any]()

            async def run() -> None:
                said.append(await outcome(partial(does, session)))  # noqa: B023

            async with anyio.create_task_group() as group:
                ended = await reached_or_ended(pause, group, run)
                if not ended:
                    await gone(other, session)
                pause.go()
            if act not in READS or said != [wanted]:
                is_refused = isinstance(said[0], LeaseLostError | SessionNotFoundError)
                assert is_refused or ended, (nth, said)
            for lost in sessions.lost:
                await lost.discard_unsaved()
    await other.aclose()


@pytest.mark.parametrize("act", [*READS, *WRITES])
async def test_what_this_process_deleted_at_any_call_is_no_damage(act: str) -> None:
    store = PausingStore(MemoryStore())
    does, ended, nth = {**READS, **WRITES}[act], False, 0
    async with connect(store, shutdown=QUIET) as sessions:
        while not ended:
            nth += 1
            session = await sealed(sessions, f"a{nth}")
            wanted = await outcome(partial(does, session)) if act in READS else None
            pause, said = store.pause(None, nth=nth), list[Any]()

            async def run() -> None:
                said.append(await outcome(partial(does, session)))  # noqa: B023

            async with anyio.create_task_group() as group:
                ended = await reached_or_ended(pause, group, run)
                group.start_soon(sessions.delete, session.id)
                await anyio.wait_all_tasks_blocked()  # it may wait for what is paused
                pause.go()
            if act in READS and said != [wanted]:
                assert isinstance(said[0], SessionNotFoundError), (nth, said)
            assert not isinstance(said[0], FormatError), (nth, said)


@pytest.mark.parametrize("gone", [deleted, begun_anew])
@pytest.mark.parametrize("act", READS)
async def test_what_is_deleted_below_a_view_is_no_damage(
    place: Place, act: str, gone: Callable[[Store, Session], Awaitable[None]]
) -> None:
    other = place()
    await other.open()
    async with connect(place(), shutdown=QUIET) as sessions, connect(place()) as reader:
        session = await sealed(sessions, "a")
        view = await reader.load("a")
        assert view is not None
        wanted = await READS[act](view)
        await session.aclose()
        await gone(other, session)
        said = await outcome(partial(READS[act], view))
        assert said == wanted or isinstance(said, SessionNotFoundError)
    await other.aclose()


@pytest.mark.parametrize("gone", [deleted, begun_anew])
async def test_a_memory_value_that_went_with_its_session_is_not_called_lost(
    place: Place, gone: Callable[[Store, Session], Awaitable[None]]
) -> None:
    other = place()
    await other.open()
    async with connect(place(), shutdown=QUIET) as sessions, connect(place()) as reader:
        session = await sealed(sessions, "a")
        await session.aclose()
        view = await reader.load("a")
        assert view is not None
        assert await view.memory.keys() == ["large"]
        await gone(other, session)
        await other.remove_blobs("", await other.blob_names(""))
        with pytest.raises(SessionNotFoundError, match="was deleted meanwhile"):
            await view.memory.get("large")
    await other.aclose()


async def test_a_restore_beside_a_prune_at_any_call_is_what_it_was_or_refused(place: Place) -> None:
    """The documents that it begins with may be older than what is removed."""
    store, ended, nth = PausingStore(place()), False, 0
    async with (
        connect(place(), shutdown=QUIET, limits=Limits(fold_records=2000)) as sessions,
        connect(store) as reader,
    ):
        while not ended:
            nth += 1
            session = await sealed(sessions, f"a{nth}")
            for text in ("one", "two", "three"):
                async with session.turn():
                    session.append(Message.user(text))
                    session.memory.set(text, text)
            made = await session.checkpoints.create("here")
            await session.checkpoints.prune(keep=[made.id])
            view = await reader.load(f"a{nth}")
            assert view is not None
            await view.checkpoints.states()
            wanted = await restored(view, made.id)
            pause, said = store.pause(None, nth=nth), list[Any]()

            async def run() -> None:
                said.append(await outcome(partial(restored, view, made.id)))  # noqa: B023

            async with anyio.create_task_group() as group:
                ended = await reached_or_ended(pause, group, run)
                report = await sessions.prune(Retention(keep_turns=1), id=f"a{nth}")
                assert report.pruned
                pause.go()
            assert said == [wanted] or isinstance(said[0], HistoryPrunedError), (nth, said)
    assert nth > 3
