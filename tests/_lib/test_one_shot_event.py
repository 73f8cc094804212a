"""An event lets one waiter go on, before or after it is rung, whatever became of the waiter."""

from __future__ import annotations

import anyio
import pytest

from perdure._lib.loop import OneShotEvent, event_maker, post_to_loop


async def wait(event: OneShotEvent, heard: list[str]) -> None:
    await event.wait()
    heard.append("rung")


async def test_who_waits_goes_on_when_it_rings() -> None:
    event, heard = event_maker()(), list[str]()
    async with anyio.create_task_group() as group:
        group.start_soon(wait, event, heard)
        await anyio.wait_all_tasks_blocked()
        assert heard == []
        event.set()
    assert heard == ["rung"]


async def test_an_event_that_was_set_keeps_nobody_waiting() -> None:
    event, heard = event_maker()(), list[str]()
    event.set()
    event.set()
    async with anyio.create_task_group() as group:
        group.start_soon(wait, event, heard)
        await anyio.wait_all_tasks_blocked()
        assert heard == ["rung"]


async def test_it_may_ring_after_its_waiter_was_cancelled() -> None:
    event, heard = event_maker()(), list[str]()
    async with anyio.create_task_group() as group:
        group.start_soon(wait, event, heard)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    event.set()
    event.set()
    assert group.cancel_scope.cancelled_caught
    assert heard == []


def test_one_shot_events_are_for_a_running_event_loop() -> None:
    with pytest.raises(RuntimeError):
        event_maker()


async def test_soon_comes_in_a_step_of_its_own() -> None:
    heard: list[str] = []
    done = anyio.Event()

    def call(*words: str) -> None:
        heard.extend(words)
        done.set()

    post_to_loop(from_any_thread=False)(call, "one", "two")
    assert heard == []
    await done.wait()
    assert heard == ["one", "two"]
