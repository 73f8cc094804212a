"""How long the steps of perdure's own tasks are, in CPU time of the thread.

A step is what runs between two points at which a task lets others run: while it lasts,
nobody's turn goes on. Only tasks that perdure started count, told by their names. Time in
which another process had the CPU is no part of it; a garbage collection that happens to begin
in a step is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import thread_time
from typing import Any

__all__ = ["Steps", "living", "watch"]

OURS = "perdure"


class Steps:
    """What was seen."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.longest = 0.0
        self.where = ""
        """The task of the longest step."""

    def took(self, seconds: float, name: str) -> None:
        """Take note of a step."""
        self.count += 1
        self.total += seconds
        if seconds > self.longest:
            self.longest, self.where = seconds, name


def watch(backend: str) -> AbstractContextManager[Steps]:
    """Watch the steps of the running event loop, of the given backend."""
    return _on_trio() if backend == "trio" else _on_asyncio()


@contextmanager
def _on_asyncio() -> Iterator[Steps]:
    import asyncio

    steps = Steps()
    run = asyncio.Handle._run

    def timed(handle: Any) -> None:
        name = _owner(handle._callback)
        if not name.startswith(OURS):
            return run(handle)
        start = thread_time()
        try:
            return run(handle)
        finally:
            steps.took(thread_time() - start, name)

    asyncio.Handle._run = timed
    try:
        yield steps
    finally:
        asyncio.Handle._run = run


def _owner(callback: Any) -> str:
    """Return the name of the task that a callback steps or wakes, else of its function's module."""
    owner = getattr(callback, "__self__", None)
    if hasattr(owner, "get_coro"):
        return owner.get_name()
    return getattr(callback, "__module__", None) or ""


@contextmanager
def _on_trio() -> Iterator[Steps]:
    import trio

    class Instrument(trio.abc.Instrument):
        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.start = thread_time()

        def after_task_step(self, task: trio.lowlevel.Task) -> None:
            if task.name.startswith(OURS):
                steps.took(thread_time() - self.start, task.name)

    steps = Steps()
    instrument = Instrument()
    trio.lowlevel.add_instrument(instrument)
    try:
        yield steps
    finally:
        trio.lowlevel.remove_instrument(instrument)


def living(backend: str) -> tuple[int, int]:
    """Return how many tasks and timers the running event loop has.

    Both keep some cancelled timers until their time has come; they do not count.
    """
    if backend == "trio":
        import trio

        statistics = trio.lowlevel.current_statistics()
        runner = trio._core._run.GLOBAL_RUN_CONTEXT.runner
        return statistics.tasks_living, runner.deadlines._active
    import asyncio

    timers = [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]
    return len(asyncio.all_tasks()), len(timers)
