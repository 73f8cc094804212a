"""Whatever becomes of a session while it comes over, the next run at rest brings what it is then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import product
from typing import Any, TypeAlias

import anyio
import pytest

from perdure import Message, Retention, SessionManager, Shutdown, connect
from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.transfer import backup, migrate, restore_backup
from tests.pausing import PausingStore, reached_or_ended
from tests.session.lives import converse, looks

QUIET = Shutdown(signals=False)


async def talked(sessions: SessionManager) -> None:
    await converse(sessions, "a", "one", "two", "three")


async def all_pruned(sessions: SessionManager) -> None:
    async with sessions.open("a") as session, session.turn():
        session.append(Message.user("one"))
    assert (await sessions.prune(Retention(keep_turns=0), id="a")).pruned


async def only_rebuilt(sessions: SessionManager) -> None:
    await (await sessions.open("a")).aclose()
    await sessions.rebuild_working_context("a")


async def forked_without_history(sessions: SessionManager) -> None:
    await converse(sessions, "parent", "one")
    await sessions.fork("parent", "a", history="context")


BEFORE = {
    "talked": talked,
    "all pruned": all_pruned,
    "only rebuilt": only_rebuilt,
    "forked without history": forked_without_history,
}


async def made_again(sessions: SessionManager) -> None:
    await sessions.delete("a")
    await converse(sessions, "a", "again")


async def opened_again(sessions: SessionManager) -> None:
    await sessions.delete("a")
    await converse(sessions, "a")


async def renamed_there_and_back(sessions: SessionManager) -> None:
    await sessions.rename("a", "b")
    await sessions.rename("b", "a")


MEANWHILE: dict[str, Callable[[SessionManager], Awaitable[object]]] = {
    "talk": lambda sessions: converse(sessions, "a", "four"),
    "prune": lambda sessions: sessions.prune(Retention(keep_turns=1), id="a"),
    "prune all": lambda sessions: sessions.prune(Retention(keep_turns=0), id="a"),
    "delete": lambda sessions: sessions.delete("a"),
    "forget": lambda sessions: sessions.forget("a"),
    "rename": lambda sessions: sessions.rename("a", "b"),
    "rename there and back": renamed_there_and_back,
    "make again": made_again,
    "open again": opened_again,
}


async def seen(store: Store) -> dict[str, Any]:
    """Return what each session of a store shows."""
    async with connect(store, shutdown=QUIET) as sessions:
        views = [await sessions.load(info.key.agent) for info in await sessions.list()]
        return {view.key.agent: await looks(view) for view in views if view is not None}


Run: TypeAlias = Callable[[Store, Store], Awaitable[Any]]


QUICK = {(migrate, act) for act in ("prune", "delete")}


CASES = [
    pytest.param(loop, run, *case, marks=[] if (run, case[1]) in QUICK else [pytest.mark.deep])
    for run in (migrate, backup)
    for case in product(BEFORE, MEANWHILE)
    for loop in (("asyncio", "trio") if case[0] == "talked" else ("asyncio",))
]


@pytest.mark.parametrize(("anyio_backend", "run", "before", "act"), CASES)
async def test_the_next_run_brings_what_became_of_a_session_meanwhile(
    run: Run, before: str, act: str
) -> None:
    """Interrupts the run before each of its calls to the source."""
    ended, nth = False, 0
    while not ended:
        nth += 1
        ours, theirs = MemoryBacking(), MemoryBacking()
        program = MemoryStore(backing=ours)
        source, target = PausingStore(MemoryStore(backing=ours)), MemoryStore(backing=theirs)
        async with connect(program, shutdown=QUIET) as sessions:
            await BEFORE[before](sessions)
            await source.open()
            await target.open()
            pause = source.pause(None, nth=nth)
            with anyio.fail_after(20):
                async with anyio.create_task_group() as group:
                    ended = await reached_or_ended(pause, group, lambda: run(source, target))  # noqa: B023
                    await MEANWHILE[act](sessions)
                    pause.go()
            assert (await run(source, target)).failed == {}
            await target.aclose()
            copy = MemoryStore(backing=theirs)
            if run is backup:
                copy = MemoryStore(backing=MemoryBacking())
                await copy.open()
                await restore_backup(target, copy)
            has, expected = await seen(copy), await seen(MemoryStore(backing=ours))
            silent = [id for id in expected.keys() - has.keys() if not expected[id]["messages"]]
            for id in silent:  # nothing was ever said in it: there may be nothing to copy
                del expected[id]
            assert has == expected, nth
    assert nth > 10


@pytest.mark.parametrize("turns", [0, 3])
async def test_what_was_pruned_whole_deleted_and_begun_anew_is_not_what_it_was(turns: int) -> None:
    """The copy has no record that could differ: it begins behind all that the source has."""
    backings = MemoryBacking(), MemoryBacking()

    async def moved() -> None:
        source, target = (MemoryStore(backing=backing) for backing in backings)
        await source.open()
        await target.open()
        done = await migrate(source, target)
        assert done.failed == {}
        await source.aclose()
        await target.aclose()

    async with connect(MemoryStore(backing=backings[0]), shutdown=QUIET) as sessions:
        await all_pruned(sessions)
    await moved()
    async with connect(MemoryStore(backing=backings[0]), shutdown=QUIET) as sessions:
        await sessions.delete("a")
        await (await sessions.open("a")).aclose()
        for number in range(turns):
            await converse(sessions, "a", str(number))
        there = await sessions.load("a")
        before = None if there is None else await looks(there)
    await moved()
    async with connect(MemoryStore(backing=backings[1]), shutdown=QUIET) as sessions:
        found = await sessions.load("a")
        if turns:
            assert found is not None
            assert await looks(found) == before
        else:
            assert found is None or found.context() == []
