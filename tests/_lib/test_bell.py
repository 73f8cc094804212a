"""A bell lets one waiter go on, before or after it is rung, whatever became of the waiter."""

from __future__ import annotations

import anyio
import pytest

from perdure._lib.loop import Bell, bell_maker, soon_maker


async def test_who_waits_goes_on_when_it_rings() -> None:
    heard = []

    async def wait(bell: Bell) -> None:
        await bell.wait()
        heard.append(bell.rung)

    bell = bell_maker()()
    async with anyio.create_task_group() as group:
        group.start_soon(wait, bell)
        await anyio.wait_all_tasks_blocked()
        assert heard == []
        bell.ring()
    assert heard == [True]


async def test_a_bell_that_has_rung_keeps_nobody_waiting() -> None:
    bell = bell_maker()()
    assert not bell.rung
    bell.ring()
    bell.ring()
    with anyio.fail_after(60):
        await bell.wait()


async def test_it_may_ring_after_its_waiter_was_cancelled() -> None:
    bell = bell_maker()()

    async def wait() -> None:
        await bell.wait()

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert not bell.rung
    bell.ring()
    assert bell.rung


def test_bells_are_for_a_running_event_loop() -> None:
    with pytest.raises(RuntimeError):
        bell_maker()


async def test_soon_comes_in_a_step_of_its_own() -> None:
    heard: list[str] = []
    done = anyio.Event()

    def call(*words: str) -> None:
        heard.extend(words)
        done.set()

    soon_maker()(call, "one", "two")
    assert heard == []
    await done.wait()
    assert heard == ["one", "two"]
