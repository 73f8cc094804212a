"""The loop's thread: every wait ends, with an answer or with an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import anyio
import anyio.to_thread
import pytest

from perdure import SessionClosedError, WrongLoopError
from perdure.sync.loop import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test loop")
    yield loop
    loop.post(loop.stop)
    loop.join(30)


def stopped(loop: LoopThread) -> LoopThread:
    loop.post(loop.stop)
    loop.join(30)
    return loop


def test_it_runs_on_asyncio_in_its_own_thread(loop: LoopThread) -> None:
    async def where() -> tuple[str, str]:
        import asyncio

        assert asyncio.get_running_loop().is_running()
        return threading.current_thread().name, "asyncio"

    assert loop.call(where) == ("test loop", "asyncio")
    assert loop.do(lambda: threading.current_thread().name) == "test loop"


def test_an_error_comes_back_as_it_is(loop: LoopThread) -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        loop.call(fail)
    with pytest.raises(ZeroDivisionError):
        loop.do(lambda: 1 / 0)


def test_every_wait_ends_with_the_loop(loop: LoopThread) -> None:
    errors: list[Exception] = []

    def wait() -> None:
        try:
            loop.call(anyio.sleep_forever)
        except SessionClosedError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    while len(loop._calls) < 5:
        pass
    stopped(loop)
    for thread in threads:
        thread.join()
    assert len(errors) == 5


def test_a_loop_that_has_ended_says_so(loop: LoopThread) -> None:
    stopped(loop)
    for ask in (lambda: loop.call(anyio.sleep_forever), lambda: loop.do(list)):
        with pytest.raises(SessionClosedError, match="closed"):
            ask()
    loop.post(list)  # no effect, no error


def test_reading_goes_on_without_a_loop(loop: LoopThread) -> None:
    assert loop.read(lambda: threading.current_thread().name) == "test loop"
    assert stopped(loop).read(lambda: threading.current_thread().name) != "test loop"


def test_its_own_thread_is_refused(loop: LoopThread) -> None:
    async def inside() -> None:
        with pytest.raises(WrongLoopError, match="wait for itself"):
            loop.do(list)
        assert loop.read(lambda: 7) == 7

    loop.call(inside)


def test_an_abandoned_wait_cancels_what_it_waited_for(loop: LoopThread) -> None:
    began, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    thread = threading.Thread(target=lambda: pytest.raises(SessionClosedError, loop.call, wait))
    thread.start()
    began.wait(30)
    (call,) = loop._calls
    loop.post(call.abandon)
    assert cancelled.wait(30)
    stopped(loop)
    thread.join()


def test_ctrl_c_cancels_what_it_waited_for(
    loop: LoopThread, ctrl_c_when: Callable[[threading.Event], None]
) -> None:
    began, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    ctrl_c_when(began)
    with pytest.raises(KeyboardInterrupt):
        loop.call(wait)
    assert cancelled.wait(30)


def test_a_loop_that_cannot_end_keeps_nobody_waiting(loop: LoopThread) -> None:
    gate, stuck = threading.Event(), threading.Event()

    async def block() -> None:
        await anyio.to_thread.run_sync(lambda: stuck.set() or gate.wait())

    try:
        loop.do(lambda: loop.tasks.start_soon(block))
        assert stuck.wait(30)
        thread = threading.Thread(
            target=lambda: pytest.raises(SessionClosedError, loop.call, anyio.sleep_forever)
        )
        thread.start()
        while not loop._calls:
            pass
        loop.post(loop.stop)
        thread.join(30)
        assert not thread.is_alive()
    finally:
        gate.set()


def test_a_loop_that_ends_between_the_look_and_the_call_says_so(loop: LoopThread) -> None:
    stopped(loop)._ended = False
    with pytest.raises(SessionClosedError):
        loop.call(anyio.sleep_forever)


def test_stopping_amid_calls_leaves_nobody_waiting() -> None:
    for _ in range(20):
        loop = LoopThread("test loop")
        ended = []

        def hammer(loop: LoopThread = loop, ended: list[int] = ended) -> None:
            try:
                while True:
                    loop.do(list)
            except SessionClosedError:
                ended.append(1)

        threads = [threading.Thread(target=hammer) for _ in range(3)]
        for thread in threads:
            thread.start()
        stopped(loop)
        for thread in threads:
            thread.join(30)
        assert len(ended) == 3
