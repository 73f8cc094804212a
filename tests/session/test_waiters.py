"""Very many callers that wait for one session: what one of them costs does not grow."""

from __future__ import annotations

import asyncio
import gc
import sys
import tracemalloc
from types import FrameType
from typing import Any

import anyio

from perdure import Message, Session, connect
from perdure.autosave.tracked import Tracked

PACKAGE = "perdure"


class Steps:
    """Count the steps that the interpreter takes within the library."""

    def __init__(self) -> None:
        self.count = 0
        # Python 3.12 counts opcodes from a settrace that comes after the first frame asked for it.
        sys._getframe().f_trace_opcodes = True

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and not frame.f_globals.get("__name__", "").startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        self.count += event == "opcode"
        return self


async def steps_of(waiters: int, *, cancelled: bool) -> int:
    """Return what so many waiters cost from the first to the last."""
    async with connect("memory:", autosave=None) as sessions:
        session = await sessions.open("x")
        session.append(Message.user("a"))
        await session.save()
        versions = [session.append(Message.user("b")) for _ in range(waiters)]
        steps, before = Steps(), sys.gettrace()
        sys.settrace(steps)
        try:
            tasks = [asyncio.ensure_future(session.wait_durable(one)) for one in versions]
            await asyncio.sleep(0)
            if cancelled:
                for task in tasks:
                    task.cancel()
            else:
                await session.save()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            sys.settrace(before)
        assert all(isinstance(one, asyncio.CancelledError) is cancelled for one in results)
        return steps.count


def test_giving_up_costs_each_waiter_the_same_however_many_there_are() -> None:
    few, many = (asyncio.run(steps_of(n, cancelled=True)) for n in (150, 600))
    assert many < 4.5 * few


def test_being_woken_costs_each_waiter_the_same_however_many_there_are() -> None:
    few, many = (asyncio.run(steps_of(n, cancelled=False)) for n in (150, 600))
    assert many < 4.5 * few


async def far_and_near(near: int, far: int) -> int:
    """Return what saves cost that each wake one, while others wait for much later."""
    async with connect("memory:", autosave=None) as sessions:
        session = await sessions.open("x")
        waiting = [asyncio.ensure_future(session.wait_durable(1_000_000)) for _ in range(far)]
        await asyncio.sleep(0)
        steps, before = Steps(), sys.gettrace()
        sys.settrace(steps)
        try:
            for _ in range(near):
                session.append(Message.user("a"))
                await session.save()
        finally:
            sys.settrace(before)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return steps.count


def test_a_save_costs_the_same_whoever_waits_for_a_later_one() -> None:
    alone, among_many = (asyncio.run(far_and_near(20, far)) for far in (1, 500))
    assert among_many < 1.5 * alone


def test_who_gives_up_again_and_again_leaves_nothing_behind() -> None:
    def waiters() -> int:
        gc.collect()
        tracked = [one for one in gc.get_objects() if type(one) is Tracked]
        return sum(len(one.waiters or ()) for one in tracked)

    async def give_up(session: Session, times: int) -> None:
        for _ in range(times):
            with anyio.move_on_after(0):
                await session.wait_durable(1_000_000)

    async def main() -> int:
        async with connect("memory:", autosave=None) as sessions:
            session = await sessions.open("x")
            others = waiters()
            async with anyio.create_task_group() as group:
                group.start_soon(session.wait_durable, 10)
                await give_up(session, 20)
                assert waiters() == others + 1
                before, _ = tracemalloc.get_traced_memory()
                await give_up(session, 2000)
                gc.collect()
                after, _ = tracemalloc.get_traced_memory()
                group.cancel_scope.cancel()
            assert waiters() == others
            return after - before

    tracemalloc.start()
    try:
        assert asyncio.run(main()) < 2000 * 25
    finally:
        tracemalloc.stop()
