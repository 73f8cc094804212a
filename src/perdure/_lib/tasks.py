"""Tasks: waiting through a cancellation, detecting who waits for whom, running several at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, final

import anyio

from perdure._lib.loop import on_trio


def was_cancelled(error: BaseException) -> bool:
    """Return whether an exception means that this very task is cancelled.

    On asyncio user code may raise another task's cancellation, by awaiting it: that is a failure
    like any other.
    """
    if on_trio():
        from trio import Cancelled

        return isinstance(error, Cancelled)
    import asyncio

    task = asyncio.current_task()  # none, where a bare callback is called
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def wait_through(done: anyio.Event) -> None:
    """Wait for an event that is sure to come, even if cancelled; then raise the cancellation."""
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not done.is_set():
            try:
                await done.wait()
            except anyio.get_cancelled_exc_class() as error:  # a native cancel passes a shield
                cancelled = error
    if cancelled is not None:
        raise cancelled


# Whether one task waits for another to end, as far as the event loop can tell
#
# On trio that is exact: the task that opened the nursery waits at its end. On asyncio a task may
# run without a waiter, so this finds the futures that cannot be done before the other task, and
# whether the first waits for any of them now. Only what is cancelled together counts: the task
# itself, ``wait_for``, a task group, a ``gather`` none of whose others can fail first. A task that
# waits through ``shield`` or ``wait`` may give up at any time: that is reported separately, as a
# seeming wait. Indirect waits, such as for an event that the other task would set, are unknowable.


_MOST = 1000
"""Futures that are looked at."""


def task_finder() -> Callable[[], object]:
    """Return a function that returns the running task of this event loop."""
    if on_trio():
        from trio import lowlevel

        current_task: Callable[[], object] = lowlevel.current_task
        return current_task
    import asyncio

    return asyncio.current_task


@final
class CurrentTask:
    """A task of this event loop, by default the one that creates this object."""

    __slots__ = ("_nurseried", "task")

    def __init__(self, task: Any = None) -> None:
        self._nurseried = on_trio()
        self.task: Any = task_finder()() if task is None else task

    def waits_for(self, other: CurrentTask, stuck: Collection[CurrentTask] = ()) -> bool:
        """Return whether it cannot continue before another has ended, or was cancelled.

        Args:
            other: The other task.
            stuck: Tasks that can neither end nor fail before it continues.

        """
        if self._nurseried:
            return _in_nursery(self.task, other.task)
        tasks = [task.task for task in stuck]
        return _on_asyncio(self.task, other.task, lambda cb, of: _certain(cb, of, tasks))

    def seems_to_wait_for(self, other: CurrentTask) -> bool:
        """Return whether it waits for another, but may stop waiting at any time."""
        return not self._nurseried and _on_asyncio(self.task, other.task, _possible)


def _in_nursery(waiter: Any, task: Any) -> bool:
    nursery = task.parent_nursery
    while nursery is not None:
        if nursery.parent_task is waiter:
            # In its body the waiter may still do anything.
            return bool(getattr(nursery, "_parent_waiting_in_aexit", False))
        nursery = nursery.parent_task.parent_nursery
    return False


def _on_asyncio(waiter: Any, other: Any, dependents: Callable[[Any, Any], Iterator[Any]]) -> bool:
    """Return whether a task waits for a future that depends, step by step, on another's end."""
    from asyncio import isfuture

    wanted = getattr(waiter, "_fut_waiter", None)
    if wanted is None:
        return False
    visited, waiters = {id(other)}, [other]
    for future in waiters:  # which grows
        if future is wanted:
            return not future.done()
        for callback, _ in getattr(future, "_callbacks", None) or ():
            for task in dependents(callback, future):
                if isfuture(task) and id(task) not in visited and len(waiters) < _MOST:
                    visited.add(id(task))
                    waiters.append(task)
    return False


def _certain(callback: Any, of: Any, stuck: list[Any]) -> Iterator[Any]:
    """Find what cannot be done before a future is, going by one of its callbacks."""
    cells = _cells(callback)
    if _name(callback) == ("asyncio.tasks", "gather.<locals>._done_callback"):
        outer = cells.get("outer")
        if cells.get("return_exceptions") or _all_stuck(outer, of, stuck):
            yield outer
    elif isinstance(callback, partial):
        if _name(callback.func) == ("asyncio.tasks", "_release_waiter"):
            yield callback.args[0]  # wait_for
    else:
        owner = getattr(callback, "__self__", None)
        yield owner if _awaits(owner, of) else _end_of(owner or cells.get("self"))


def _possible(callback: Any, of: Any) -> Iterator[Any]:
    """Find what the end of a future may complete: anything that one of its callbacks holds."""
    owner, cells = getattr(callback, "__self__", None), _cells(callback)
    if isinstance(callback, partial):
        yield from callback.args
    yield owner if _awaits(owner, of) else _end_of(owner or cells.get("self"))
    yield from cells.values()


def _awaits(task: Any, future: Any) -> bool:
    from asyncio import isfuture

    return isfuture(task) and getattr(task, "_fut_waiter", None) is future


def _end_of(group: Any) -> Any:
    """Return what the last task of a task group completes."""
    module, name = _name(type(group))
    if name == "TaskGroup" and module in {"asyncio.taskgroups", "anyio._backends._asyncio"}:
        return getattr(group, "_on_completed_fut", None)
    return None


def _all_stuck(future: Any, but: Any, stuck: list[Any]) -> bool:
    """Return whether all that a ``gather`` still waits for, except *but*, is stuck."""
    children = [child for child in getattr(future, "_children", ()) if child is not but]
    return all(child.done() or _is_stuck(child, stuck) for child in children)


def _is_stuck(future: Any, stuck: list[Any]) -> bool:
    for _ in range(_MOST):
        if any(future is task for task in stuck):
            return True
        if hasattr(future, "_children"):
            return _all_stuck(future, None, stuck)
        future = getattr(future, "_fut_waiter", None)
        if future is None:
            break
    return False


def _name(of: Any) -> tuple[object, object]:
    return getattr(of, "__module__", None), getattr(of, "__qualname__", None)


def _cells(function: Any) -> dict[str, Any]:
    """Return the values of a function's closure by name."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells: dict[str, Any] = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return cells


T = TypeVar("T")
R = TypeVar("R")


async def all_of(items: Sequence[T], act: Callable[[T], Awaitable[R]]) -> list[R]:
    """Act on all items concurrently, and return the results in their order."""
    if len(items) == 1:
        return [await act(items[0])]
    results: dict[int, R] = {}

    async def one(place: int, item: T) -> None:
        results[place] = await act(item)

    async with anyio.create_task_group() as group:
        for place, item in enumerate(items):
            group.start_soon(one, place, item)
    return [results[place] for place in range(len(items))]


async def each(
    items: Collection[T], act: Callable[[T], Awaitable[None]], *, at_once: int = 8
) -> None:
    """Act on each item, some at a time; raise the first failure.

    After a failure no further item is started, and the started ones are waited for.
    """
    failed: list[Exception] = []
    remaining = iter(items)

    async def some() -> None:
        for item in remaining:
            if failed:
                return
            try:
                await act(item)
            except Exception as error:  # noqa: BLE001  # raised when all have ended
                failed.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(min(at_once, len(items))):
            group.start_soon(some)
    if failed:
        raise failed[0]
