"""The host: tasks that nobody's cancellation reaches, and that no task's failure ends."""

from __future__ import annotations

import asyncio
import contextvars
import logging

import anyio
import pytest
import trio

from perdure._lib.tasks import Host, HostClosedError


async def answer(value: int) -> int:
    return value


async def fail() -> None:
    raise LookupError("on purpose")


async def test_a_call_returns_what_the_function_returns() -> None:
    host = Host()
    await host.start()
    assert await host.call(answer, 3) == 3
    await host.aclose()


async def test_a_call_raises_what_the_function_raises() -> None:
    host = Host()
    await host.start()
    with pytest.raises(LookupError, match="on purpose"):
        await host.call(fail)
    assert host.running
    await host.aclose()


async def test_a_cancelled_caller_leaves_the_function_running() -> None:
    host, go, done = Host(), anyio.Event(), anyio.Event()
    await host.start()

    async def work() -> None:
        await go.wait()
        done.set()

    with anyio.move_on_after(0):
        await host.call(work)
    assert not done.is_set()
    go.set()
    with anyio.fail_after(60):
        await done.wait()
    await host.aclose()


async def test_an_exception_that_nobody_waits_for_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, go = Host(), anyio.Event()
    await host.start()

    async def late() -> None:
        await go.wait()
        raise LookupError("late")

    with anyio.move_on_after(0):
        await host.call(late)
    host.spawn(fail)
    go.set()
    await anyio.wait_all_tasks_blocked()
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert sorted(logged) == ["late", "on purpose"]
    assert await host.call(answer, 1) == 1
    await host.aclose()


async def test_closing_from_another_task_cancels_what_runs() -> None:
    host, cancelled = Host(), anyio.Event()

    async def forever() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    async with anyio.create_task_group() as group:
        group.start_soon(host.start)
    host.spawn(forever)
    await anyio.wait_all_tasks_blocked()
    async with anyio.create_task_group() as group:
        group.start_soon(host.aclose)
    assert cancelled.is_set()
    assert not host.running
    await host.aclose()


async def test_a_closed_host_starts_nothing() -> None:
    host = Host()
    with pytest.raises(HostClosedError):
        host.spawn(fail)
    await host.start()
    await host.aclose()
    with pytest.raises(HostClosedError):
        await host.call(answer, 1)


async def test_a_caller_hears_that_the_host_was_closed() -> None:
    host, heard = Host(), anyio.Event()
    await host.start()

    async def wait() -> None:
        with pytest.raises(HostClosedError):
            await host.call(anyio.sleep_forever)
        heard.set()

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        await host.aclose()
    assert heard.is_set()


async def test_a_call_within_a_call_that_ends_with_the_host_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = Host()
    await host.start()
    begun = anyio.Event()

    async def inner() -> None:
        begun.set()
        await anyio.sleep_forever()

    async def outer() -> None:
        await host.call(inner)

    host.spawn(host.call, outer)
    await begun.wait()
    with caplog.at_level(logging.ERROR, "perdure"):
        await host.aclose()
    assert [record.getMessage() for record in caplog.records] == []


async def test_a_host_starts_once() -> None:
    host = Host()
    await host.start()
    with pytest.raises(RuntimeError, match="started before"):
        await host.start()
    await host.aclose()


async def test_a_caller_s_context_variables_stay_out() -> None:
    variable = contextvars.ContextVar("variable", default="none")
    host = Host()
    await host.start()
    variable.set("the caller's")

    async def look() -> str:
        return variable.get()

    assert await host.call(look) == "none"
    await host.aclose()


async def test_no_scope_stays_open_around_the_starter() -> None:
    host = Host()
    with anyio.CancelScope() as scope:
        await host.start()
        scope.cancel()
        await anyio.sleep_forever()
    assert await host.call(answer, 2) == 2
    await host.aclose()


class Torn:
    """A host whose loop ends under it, and what was done about that."""

    def __init__(self) -> None:
        self.host = Host(on_teardown=self.flush)
        self.flushed = ""

    async def flush(self) -> None:
        await anyio.sleep(0.001)
        self.flushed = await self.host.call(self.shout)

    async def shout(self) -> str:
        await anyio.lowlevel.checkpoint()
        return "flushed"


def run(backend: str, main: object) -> None:
    if backend == "asyncio":
        asyncio.run(main())  # type: ignore[operator]
    else:
        trio.run(main)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_a_loop_that_ends_lets_the_host_finish_first(
    backend: str, ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    torn: list[Torn] = []

    async def main() -> None:
        torn.append(Torn())
        await torn[0].host.start()
        torn[0].host.spawn(anyio.sleep_forever)
        await anyio.lowlevel.checkpoint()
        torn[0].host.spawn(anyio.sleep_forever)
        if ends == "raises":
            raise LookupError("the body's own")

    try:
        run(backend, main)
    except LookupError:
        assert ends == "raises"
    assert torn[0].flushed == "flushed"
    assert not torn[0].host.running
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_was_spawned_just_before_the_end_still_runs(backend: str) -> None:
    ran: list[int] = []

    async def main() -> None:
        host = Host()

        async def once() -> None:
            ran.append(1)

        async def finish() -> None:
            for _ in range(5):
                await anyio.lowlevel.checkpoint()

        host.on_teardown = finish
        await host.start()
        host.spawn(once)

    run(backend, main)
    assert ran == [1]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_failing_teardown_is_reported(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        await Host(on_teardown=fail).start()

    run(backend, main)
    assert "on purpose" in caplog.text


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_crash_within_ends_the_host_and_frees_its_callers(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Crash(BaseException):
        pass

    async def crash() -> None:
        raise Crash

    heard: list[str] = []

    async def main() -> None:
        host = Host()
        await host.start()
        try:
            await host.call(crash)
        except HostClosedError as error:
            heard.append(str(error))
        await host.aclose()

    if backend == "trio":
        with pytest.raises(BaseException) as caught:
            run(backend, main)
        assert not isinstance(caught.value, AssertionError)
    else:
        run(backend, main)
    assert "background tasks failed" in caplog.text
    if backend == "asyncio":
        assert heard


def test_native_cancellation_of_a_caller_leaves_the_function_running() -> None:
    ended: list[str] = []

    async def main() -> None:
        host, go = Host(), asyncio.Event()
        await host.start()

        async def work(name: str) -> None:
            await go.wait()
            ended.append(name)

        task = asyncio.create_task(host.call(work, "cancelled"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(host.call(work, "timed out"), 0.001)
        go.set()
        await host.call(work, "waited for")
        await host.aclose()

    asyncio.run(main())
    assert sorted(ended) == ["cancelled", "timed out", "waited for"]


def test_what_callbacks_ask_for_is_started_while_the_loop_ends() -> None:
    """A save's answer comes to a callback, which starts the next one: at the end, too."""
    ran: list[int] = []

    async def main() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        async def asked() -> None:
            ran.append(1)
            done.set()

        async def teardown() -> None:
            loop.call_soon(host.spawn, asked)
            await asyncio.wait_for(done.wait(), 60)

        host = Host(on_teardown=teardown)
        await host.start()

    asyncio.run(main())
    assert ran == [1]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_program_ends_one_task_only_and_is_handed_on(
    error: type[BaseException], backend: str
) -> None:
    async def end() -> None:
        raise BaseExceptionGroup("of tasks", [error("on purpose")])

    async def main() -> None:
        taken: list[BaseException] = []
        host = Host()
        host.on_exit = taken.append
        await host.start()
        host.spawn(end)
        with pytest.raises(HostClosedError, match="ended before"):
            await host.call(end)
        assert [str(one) for one in taken] == ["on purpose"] * 2
        assert await host.call(answer, 1) == 1
        await host.aclose()

    run(backend, main)


def test_a_program_that_cancels_all_tasks_before_asyncio_does_is_waited_for() -> None:
    """A task that is cancelled before its first step ends its whole group."""
    ran: list[str] = []

    async def main() -> None:
        async def once() -> None:
            ran.append("once")

        async def finish() -> None:
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            ran.append("finish")

        host = Host(on_teardown=finish)
        await host.start()
        host.spawn(once)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(main())
    assert ran == ["once", "finish"]


@pytest.mark.parametrize("steps", range(6))
def test_a_teardown_that_is_cancelled_is_begun_again(steps: int) -> None:
    finished: list[int] = []

    async def main() -> None:
        async def finish() -> None:
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            finished.append(1)

        host = Host(on_teardown=finish)
        await host.start()
        for _ in range(2):
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            for _ in range(steps):
                await asyncio.sleep(0)

    asyncio.run(main())
    assert finished == [1]


def test_ctrl_c_while_a_task_is_being_started_loses_no_task() -> None:
    async def main() -> None:
        host, done = Host(), asyncio.Event()
        taken: list[BaseException] = []
        host.on_exit = taken.append
        await host.start()
        start_soon, errors = host._start_soon, [KeyboardInterrupt()]

        def interrupted(number: int) -> None:
            if errors:
                raise errors.pop()
            start_soon(number)

        async def work() -> None:
            done.set()

        host._start_soon = interrupted  # type: ignore[method-assign]
        asyncio.get_running_loop().call_soon(host.spawn, work)
        await asyncio.wait_for(done.wait(), 60)
        assert len(taken) == 1
        await host.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("steps", range(4))
def test_who_waits_for_what_may_never_begin_does_not_wait_for_ever(steps: int) -> None:
    async def main() -> None:
        host = Host()
        await host.start()
        call = asyncio.create_task(host.call(answer, 1))
        await asyncio.sleep(0)  # it was asked for, and has not begun
        for _ in range(4):
            for task in asyncio.all_tasks() - {asyncio.current_task(), call}:
                task.cancel()
            for _ in range(steps):
                await asyncio.sleep(0)
        try:
            assert await asyncio.wait_for(call, 60) == 1
        except HostClosedError:
            assert not host.running

    asyncio.run(main())
