"""Calls go to threads and come back, in parallel up to a limit; abandoned ones hinder nobody."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable

import anyio
import pytest

from perdure._lib.loop import Threads
from perdure.errors import StoreUnavailableError

LONG = 60.0


def begun(name: str) -> int:
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def gone(name: str) -> bool:
    """Wait until no thread of this name lives."""
    until = time.monotonic() + LONG
    while begun(name) and time.monotonic() < until:
        time.sleep(0)
    return not begun(name)


async def test_a_call_brings_its_value_back_from_another_thread() -> None:
    threads = Threads(2, name="value")
    here, there = threading.get_ident(), await threads.run(threading.get_ident)
    assert here != there
    assert await threads.run(divmod, 7, 2) == (3, 1)
    threads.close()
    assert gone("value")


async def test_a_call_brings_its_error_back() -> None:
    threads = Threads(1, name="error")
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 1, 0)
    assert await threads.run(abs, -1) == 1
    threads.close()


async def test_a_prompt_thread_has_begun_when_start_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("perdure._lib.loop._HAND_OVER", LONG)
    threads = Threads(1, name="prompt", prompt=True)
    await threads.run(abs, -1)  # its thread is there now
    go_on, done = threading.Event(), threads.new_event()
    threads.start(go_on.wait, LONG, then=lambda _: done.set())
    assert threads._jobs.empty()
    second = threads.new_event()
    threads.start(abs, -2, then=lambda _: second.set())  # nobody is free: it waits for nobody
    assert not threads._jobs.empty()
    go_on.set()
    await done.wait()
    await second.wait()
    assert threads.busy == 0
    threads.close()
    assert gone("prompt")


async def test_calls_run_side_by_side_up_to_the_limit() -> None:
    threads = Threads(3, name="limit")
    together = threading.Barrier(3)
    async with anyio.create_task_group() as group:
        for _ in range(6):
            group.start_soon(threads.run, together.wait, LONG)
    assert begun("limit") == 3
    assert threads.busy == 0
    threads.close()


async def test_one_after_the_other_needs_one_thread() -> None:
    threads = Threads(8, name="frugal")
    for _ in range(20):
        await threads.run(abs, -1)
    assert begun("frugal") == 1
    threads.close()


async def test_an_abandoned_call_goes_on_and_keeps_nobody_waiting() -> None:
    threads = Threads(2, name="abandoned")
    release, ended = threading.Event(), threading.Event()

    def call() -> None:
        release.wait(LONG)
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(threads.run, call)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert threads.busy == 1
    with anyio.fail_after(LONG):
        assert await threads.run(abs, -1) == 1
    release.set()
    assert await anyio.to_thread.run_sync(ended.wait, LONG)
    threads.close()


async def test_threads_end_with_whoever_made_them() -> None:
    threads = Threads(2, name="dropped")
    await threads.run(abs, -1)
    assert begun("dropped") == 1
    del threads
    gc.collect()
    assert await anyio.to_thread.run_sync(gone, "dropped")


def test_a_call_that_outlives_its_event_loop_ends_in_silence() -> None:
    release = threading.Event()

    def call() -> None:
        release.wait(LONG)

    async def main() -> Threads:
        threads = Threads(1, name="outlived")
        task = asyncio.get_running_loop().create_task(threads.run(call))
        await asyncio.sleep(0)
        task.cancel()
        return threads

    threads = asyncio.run(main())
    release.set()
    threads.close()
    assert gone("outlived")


async def test_what_is_asked_of_closed_threads_is_refused_and_keeps_nobody_waiting() -> None:
    threads = Threads(2, name="closed")
    assert await threads.run(lambda: "before") == "before"
    threads.close()
    with anyio.fail_after(LONG):
        for _ in range(3):
            with pytest.raises(RuntimeError, match="closed"):
                await threads.run(lambda: "after")
    assert threads.busy == 0
    assert gone("closed")


async def test_calls_that_end_together_wake_the_event_loop_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("perdure._lib.loop._REPOST", LONG)
    threads = Threads(4, name="together")
    posted: list[object] = []
    post = threads.post
    monkeypatch.setattr(threads, "post", posted.append)
    done = [threads.new_event() for _ in range(4)]
    for event in done:
        threads.start(abs, -1, then=lambda _, event=event: event.set())
    threads.close()
    assert gone("together")  # without a step of the event loop: all four have ended
    assert len(posted) == 1
    post(posted[0])
    for event in done:
        await event.wait()
    assert threads.busy == 0


# what may go wrong between a thread and the event loop


def fail_once(post: Callable[..., object], error: Exception | None) -> Callable[..., object]:
    """Return a ``post`` that first raises an error, or loses what it is to post."""
    calls: list[object] = []

    def fail_first(function: Callable[[], object]) -> object:
        calls.append(function)
        if len(calls) > 1:
            return post(function)
        if error is not None:
            raise error
        return None

    return fail_first


@pytest.mark.parametrize("error", [None, MemoryError()])
async def test_an_event_loop_that_was_not_woken_is_woken_again(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure._lib.loop._REPOST", 0.001)
    threads = Threads(1, name="again")
    monkeypatch.setattr(threads, "post", fail_once(threads.post, error))
    with anyio.fail_after(LONG):
        assert await threads.run(abs, -1) == 1  # no later call helps it
        assert await threads.run(abs, -2) == 2
    assert threads.busy == 0
    threads.close()
    assert gone("again")


async def test_a_ctrl_c_in_an_answer_has_it_answered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads(1, name="interrupted")
    posted: list[Callable[[], object]] = []
    monkeypatch.setattr(threads, "post", posted.append)
    attempts: list[int] = []

    def answer(call: object) -> None:
        attempts.append(threads.busy)
        if len(attempts) == 1:
            raise KeyboardInterrupt

    threads.start(abs, -1, then=answer)
    threads.close()
    assert gone("interrupted")
    with pytest.raises(KeyboardInterrupt):
        posted[-1]()
    posted[-1]()
    assert attempts == [0, 0]
    assert threads.busy == 0


async def test_what_answers_begin_waits_for_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(1, name="turns")
    posted: list[Callable[[], object]] = []
    monkeypatch.setattr(threads, "post", posted.append)
    threads.close()  # every call ends at once
    answered: list[object] = []

    def answer(call: object) -> None:
        answered.append(call)
        if len(answered) < 3:
            threads.start(abs, -1, then=answer)

    threads.start(abs, -1, then=answer)
    for step in range(1, 4):
        posted[-1]()
        assert len(answered) == step
    assert threads.busy == 0


# a system that starts no thread


def start_no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("most", [1, 3])
async def test_a_thread_that_was_not_started_is_started_by_the_next_call(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads(most, name="refused")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_no_thread)
        for _ in range(most):
            with anyio.fail_after(LONG), pytest.raises(StoreUnavailableError, match="refused 1"):
                await threads.run(abs, -1)
    assert threads.busy == 0
    with anyio.fail_after(LONG):
        assert await threads.run(abs, -1) == 1
    threads.close()
    assert gone("refused")


async def test_a_call_without_a_new_thread_waits_for_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads(2, name="short")
    release = threading.Event()
    first, second = threads.new_event(), threads.new_event()
    threads.start(release.wait, LONG, then=lambda _: first.set())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_no_thread)
        threads.start(abs, -1, then=lambda _: second.set())
    release.set()
    with anyio.fail_after(LONG):
        await first.wait()
        await second.wait()
    assert threads.busy == 0
    assert begun("short") == 1
    threads.close()
