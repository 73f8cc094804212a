"""No way of cancelling a caller reaches a save: asyncio's own ways, on the real loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import trio

from perdure._lib.loop import loop_clock
from perdure._lib.tasks import Host
from perdure.autosave.engine import Autosaver
from perdure.autosave.tracked import Tracked
from perdure.records.keys import SessionKey
from tests.autosave.inline_store import InlineStore
from tests.autosave.rigs import CALM, PLAIN, Rig, entry, rig, within


async def by_task_cancel(wait: Callable[[], Awaitable[object]]) -> None:
    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_cancel_before_the_first_step(wait: Callable[[], Awaitable[object]]) -> None:
    task = asyncio.ensure_future(wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_wait_for(wait: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait(), 0.001)


async def by_timeout(wait: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await wait()


async def by_a_sibling(wait: Callable[[], Awaitable[object]]) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.001)
        raise LookupError("the sibling's own")

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(as_coroutine(wait))
            group.create_task(fail())


async def as_coroutine(wait: Callable[[], Awaitable[object]]) -> None:
    await wait()


async def by_a_scope(wait: Callable[[], Awaitable[object]]) -> None:
    with anyio.move_on_after(0.001) as scope:
        await wait()
    assert scope.cancelled_caught


WAYS = [
    by_task_cancel,
    by_cancel_before_the_first_step,
    by_wait_for,
    by_timeout,
    by_a_sibling,
    by_a_scope,
]


def waits(r: Rig, t: Tracked) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "save": lambda: r.saver.save(t),
        "wait_durable": lambda: r.saver.wait_durable(t),
        "flush": r.saver.flush,
        "exclusive": lambda: r.saver.exclusive(t, r.saver.flush if False else pause),
        "aclose": lambda: r.saver.aclose(within(5, 1)),
    }


async def pause() -> None:
    await anyio.sleep(0.005)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["save", "wait_durable", "flush", "exclusive", "aclose"])
def test_cancelling_a_caller_ends_its_wait_and_nothing_else(what: str, way: Any) -> None:
    async def main() -> None:
        async with rig(InlineStore(latency=(0.01,))) as r:
            t = r.track()
            r.append(t)
            r.saver.turn_ended(t)
            await way(waits(r, t)[what])
            assert not t.waiters or what == "aclose"
            report = await r.saver.aclose(within(5, 1))
            assert report.clean
            assert r.stored(t) == 1
            assert len(r.store.calls) == 1, "the save was cut, and had to be repeated"

    asyncio.run(main())


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("saving", [False, True])
def test_a_loop_that_ends_under_the_engine_saves_first(backend: str, saving: bool) -> None:
    stores: list[InlineStore] = []

    async def main() -> None:
        store = InlineStore(latency=(0.005,))
        stores.append(store)
        host = Host()
        await host.start()
        saver = Autosaver(
            store,  # type: ignore[arg-type]
            host,
            autosave=CALM,
            engine=PLAIN,
            clock=loop_clock(),
        )
        host.on_teardown = lambda: saver.aclose(within(5, 1))
        sessions = [saver.track(SessionKey(str(n)), epoch=1, head=0) for n in range(5)]
        for t in sessions:
            saver.append(t, (entry(1),))
            if saving:
                saver.turn_ended(t)
        if saving:
            await anyio.sleep(0.001)
            for t in sessions:
                saver.append(t, (entry(2),))

    if backend == "asyncio":
        asyncio.run(main())
    else:
        trio.run(main)
    assert [len(log) for log in stores[0].logs.values()] == [2 if saving else 1] * 5


def test_a_caller_in_another_thread_can_wait_through_its_portal() -> None:
    with anyio.from_thread.start_blocking_portal() as portal:

        async def open_rig() -> tuple[Any, Rig, Tracked]:
            context = rig()
            r = await context.__aenter__()
            return context, r, r.track()

        context, r, t = portal.call(open_rig)
        portal.call(r.append, t)
        assert portal.call(r.saver.save, t) == 1
        future = portal.start_task_soon(r.saver.wait_durable, t, 5)
        future.cancel()
        portal.call(r.append, t)
        assert portal.call(r.saver.save, t) == 2
        portal.call(context.__aexit__, None, None, None)
