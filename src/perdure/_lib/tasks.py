"""Tasks: the host of background tasks, and waiting through a cancellation.

A host is a task group of the library's own, so that no cancel scope stays open across user code.
The group is in a task that belongs to the library. A caller may be cancelled in any way, a native
``Task.cancel()`` included, and only its wait ends: what runs here continues. So a host may be
started in one task and closed in another.

* An exception in a spawned task ends that task only, and is logged.
* One that ends the program (KeyboardInterrupt, SystemExit) ends that task only, too, and is passed
  to ``on_exit``: the other tasks save before the program ends.
* If the loop ends while the host is open (``asyncio.run`` cancels every task, trio its
  system tasks), ``on_teardown`` is awaited first, then the host ends without noise.
* ``spawn`` may be called from a task of the loop or from a bare callback of it
  (``call_soon``, ``call_soon_threadsafe``, a signal's): anyio starts tasks only where a
  task runs, so the host's own task starts those that a callback asks for.

A host belongs to one event loop and its thread.
"""

from __future__ import annotations

import contextvars
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Literal, TypeVar, TypeVarTuple, final

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import cancel_shielded_checkpoint

from perdure._lib import task_scope
from perdure._lib.loop import on_trio
from perdure._lib.signals import Exit, exit_in, interrupter
from perdure.errors import (
    ConfigError,
    LeaseError,
    PerdureError,
    SessionClosedError,
    SessionError,
)


def was_cancelled(error: BaseException) -> bool:
    """Return whether an exception means that this very task is cancelled.

    User code may raise another cancellation: on asyncio another task's, by awaiting it; on trio
    one that it has caught before. That is a failure like any other.
    """
    if on_trio():
        from trio import Cancelled

        return isinstance(error, Cancelled) and anyio.current_effective_deadline() == -math.inf
    import asyncio

    task = asyncio.current_task()  # none, where a bare callback is called
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def is_stray(error: BaseException) -> bool:
    """Return whether an exception is a cancellation, and not this task's own."""
    import asyncio  # what runs in a thread may raise its cancellation on trio, too

    kinds = (anyio.get_cancelled_exc_class(), asyncio.CancelledError)
    return isinstance(error, kinds) and not was_cancelled(error)


@contextmanager
def stray_cancellation_fails() -> Iterator[None]:
    """Raise RuntimeError for a cancellation that user code lets out though this task continues.

    Else code that cleans up after a cancellation would take it for one, and end silently.
    """
    try:
        yield
    except BaseException as error:
        if not is_stray(error):
            raise
        raise RuntimeError(f"it ended with {error!r}, and no one has cancelled it") from error


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


def task_finder() -> Callable[[], object]:
    """Return a function that returns the running task of this event loop.

    None in a bare callback; on trio callbacks run in a task of its own.
    """
    if on_trio():
        from trio import lowlevel

        current_task: Callable[[], object] = lowlevel.current_task
        return current_task
    import asyncio

    return partial(asyncio.current_task, asyncio.get_running_loop())


T = TypeVar("T")
R = TypeVar("R")


async def all_of(items: Sequence[T], act: Callable[[T], Awaitable[R]]) -> list[R]:
    """Act on all items concurrently, and return the results in their order; raise as `each`."""
    if len(items) == 1:
        return [await act(items[0])]
    results: dict[int, R] = {}

    async def one(place: int) -> None:
        results[place] = await act(items[place])

    await each(range(len(items)), one, at_once=len(items))
    return [results[place] for place in range(len(items))]


async def each(
    items: Collection[T], act: Callable[[T], Awaitable[None]], *, at_once: int = 8
) -> None:
    """Act on each item, some at a time; raise the first failure.

    After a failure no further item is started, and the started ones are waited for.
    """
    failed: list[Exception] = []
    # One iterator for all: each takes the next item when it has done one.
    remaining = iter(items)
    if len(items) < 2:
        for item in remaining:
            await act(item)
        return

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
            group.start_soon(some, name=_task_name(act))
    if failed:
        raise failed[0]


# The host: a task group of the library's own


Ts = TypeVarTuple("Ts")

log = logging.getLogger("perdure.host")


_mark: contextvars.ContextVar[object] = contextvars.ContextVar("perdure_host", default=None)
"""The mark of the host whose task this is, or was started by; a context may outlive the host."""


def _task_name(fn: object) -> str:
    """Return the name of a task that runs a function, for debuggers and for the loops' own tools.

    >>> _task_name(Host.aclose)
    'perdure:Host.aclose'
    """
    return f"perdure:{getattr(fn, '__qualname__', type(fn).__name__)}"


class HostClosedError(SessionClosedError):
    """The background tasks have ended with their manager: call connect(…) for a new one."""


class _Call(Generic[T]):
    """The pending result of a call: a value, or an error."""

    __slots__ = ("abandoned", "done", "error", "value")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.abandoned = False
        self.error: BaseException | None = None
        self.value: T


class _Task:
    """A spawned function, until its first step."""

    __slots__ = ("args", "coroutine", "fn")

    def __init__(self, fn: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
        self.fn = fn
        self.args = args
        self.coroutine: Coroutine[Any, Any, None] | None = None

    def drop(self) -> None:
        if self.coroutine is not None:
            self.coroutine.close()  # or Python warns that it was never awaited


@final
class Host:
    """A runner of background tasks, independent of their callers.

    Args:
        on_teardown: Awaited when the loop ends while the host is open.

    Attributes:
        on_exit: Called with an exception that ends the program; by default, `interrupt`.

    """

    def __init__(self, *, on_teardown: Callable[[], Awaitable[object]] | None = None) -> None:
        self.on_teardown = on_teardown
        self.on_exit: Callable[[Exit], object] = self.interrupt
        self._interrupt: Callable[[Exit, Callable[[], bool]], bool]
        self.torn_down: bool = False
        """True if the loop ends, or has ended, under the host."""
        self._group: TaskGroup | None = None
        self._context: contextvars.Context | None = None
        self._started = anyio.Event()
        self._stop = False
        self._wake = anyio.Event()
        self._ended = anyio.Event()
        self._teardown: Literal["runs", "over"] | None = None
        self._at_end: list[Callable[[], object]] = []
        self._unstarted: dict[_Task, None] = {}
        self._asked: deque[_Task] = deque()
        """Those of the unstarted that a bare callback asked for."""
        self._find_task: Callable[[], object]
        self._task: object = None
        self._own_mark = object()

    @property
    def running(self) -> bool:
        """True if tasks can be spawned."""
        return self._group is not None

    async def start(self) -> None:
        """Start the host's own task."""
        if self._task is not None:
            raise RuntimeError("this host was started before: make a new one")
        self._interrupt = interrupter()
        if on_trio():
            self._start_on_trio()
        else:
            # The one bare task of the library: the root of all others.
            import asyncio

            self._task = task = asyncio.get_running_loop().create_task(
                self._main(), name="perdure:host"
            )
            # The error that ends it is logged there, and the task is never awaited.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await self._started.wait()

    def spawn(self, fn: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        """Start ``fn(*args)`` in the background; from any task or callback of this loop.

        Raises:
            HostClosedError: The host is closed; nothing was started.

        """
        if self._group is None:
            raise HostClosedError
        task = _Task(fn, args)
        self._unstarted[task] = None
        if self._find_task() is None:
            self._asked.append(task)
            self._wake.set()
            return
        try:
            self._start_soon(task)
        except BaseException:
            del self._unstarted[task]
            raise

    def _start_soon(self, task: _Task) -> None:
        group, context = self._group, self._context
        if group is None or context is None:
            raise HostClosedError
        task.coroutine = coroutine = self._guarded(task)
        name = _task_name(task.args[1] if task.fn == self._answer else task.fn)
        # In the host's context, so that no caller's context variables stay alive in here.
        # mypy cannot match a keyword behind `*args` (a `partial` it can, which costs a call more).
        context.copy().run(group.start_soon, lambda: coroutine, name=name)  # type: ignore[arg-type]

    async def call(
        self,
        fn: Callable[[*Ts], Awaitable[T]],
        *args: *Ts,
        wait: Callable[[anyio.Event], Awaitable[None]] | None = None,
    ) -> T:
        """Run ``fn(*args)`` in the background and wait for its value or its exception.

        Cancelling the caller ends the wait, never ``fn``; so does an error of *wait*, which waits
        for the end in its own way.

        Raises:
            HostClosedError: The host is closed, or was before ``fn`` had ended.

        """
        call: _Call[T] = _Call()
        self.spawn(self._answer, call, fn, args, task_scope.stays.get())
        try:
            await (call.done.wait() if wait is None else wait(call.done))
        except BaseException:
            call.abandoned = True
            # It ended as the wait did: no one else would report its error.
            if isinstance(call.error, Exception):
                self._unheard(call.error)
            raise
        if call.error is not None:
            raise call.error
        return call.value

    def leave(self, error: Exit) -> None:
        """Pass on an exception of user code that ends the program."""
        self.on_exit(error)

    def interrupt(self, error: Exit) -> bool:
        """End the program in order, this host included; return False if the error is not raised.

        On trio the main task gets a KeyboardInterrupt in its place.
        """
        return self._interrupt(error, lambda: not self.torn_down)

    def at_end(self, call: Callable[[], object]) -> None:
        """Register a callback for the host's end, for any reason."""
        self._at_end.append(call)

    async def aclose(self) -> None:
        """Cancel the running tasks and wait for their end, unless this is one of them."""
        self._stop = True
        self._wake.set()
        if self._task is not None and _mark.get() is not self._own_mark:
            await self._ended.wait()

    # in the host's own task

    async def _main(self) -> None:
        _mark.set(self._own_mark)
        try:
            await self._serve_in_group()
        except BaseException as error:
            if not isinstance(error, anyio.get_cancelled_exc_class()):
                log.critical("background tasks failed", exc_info=error)
                raise
        finally:
            self._group = None
            self._started.set()
            self._ended.set()
            self._fail_unstarted()
            for call in self._at_end:
                try:
                    call()
                except Exception:
                    log.exception("what was to be done at the end of the background tasks failed")

    async def _serve_in_group(self) -> None:
        # On trio the shield keeps the tasks alive until on_teardown has had its time.
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                self._context = self._context or contextvars.copy_context()
                self._find_task = task_finder()
                self._group = group
                self._started.set()
                try:
                    try:
                        await self._serve()
                    except anyio.get_cancelled_exc_class():
                        # A native cancel, which no shield stops: asyncio.run is ending the loop,
                        # or the program, and asyncio.run once more. A task that it met before its
                        # first step has ended the group with it, so there is a new one within.
                        _uncancel()
                        self.torn_down = True
                        await self._serve_in_group()
                finally:
                    self._group = None
                group.cancel_scope.cancel()

    async def _serve(self) -> None:
        """Start the tasks that callbacks ask for, and the teardown at the end of the loop."""
        if self.torn_down:
            await self._start_again()
        while not self._is_over():
            try:
                if self.torn_down and self._teardown is None:
                    self._teardown = "runs"
                    self.spawn(self._tear_down)
                await self._start_asked()
            except (KeyboardInterrupt, SystemExit) as error:  # Ctrl-C came just here
                self.leave(error)

    def _is_over(self) -> bool:
        if self.torn_down and self.on_teardown is not None:
            return self._teardown == "over"
        return self._stop or self.torn_down

    async def _start_asked(self) -> None:
        self._wake = anyio.Event()
        while self._asked:  # removed after its start: a Ctrl-C in between must not lose one
            self._start_soon(self._asked[0])
            self._asked.popleft()
        if not self._is_over() and (self._teardown or not self.torn_down):
            await self._wake.wait()

    async def _tear_down(self) -> None:
        state: Literal["over"] | None = "over"
        try:
            if self.on_teardown is not None:
                await self.on_teardown()
        except anyio.get_cancelled_exc_class():
            state = None  # with all others: it is begun again
            raise
        finally:
            self._teardown = state
            self._wake.set()

    async def _start_again(self) -> None:
        """Start the tasks again that were cancelled before their first step."""
        # Tasks that callbacks have asked for were not started, so they were not cancelled.
        before = [task for task in self._unstarted if task not in self._asked]
        await cancel_shielded_checkpoint()
        for task in before:
            if task in self._unstarted:
                del self._unstarted[task]
                task.drop()
                self.spawn(task.fn, *task.args)

    def _fail_unstarted(self) -> None:
        """Fail the calls that were never started."""
        for task in self._unstarted:
            task.drop()
            if task.fn == self._answer:
                call: _Call[Any] = task.args[0]
                call.error = HostClosedError("the background tasks ended before this was begun")
                call.done.set()
        self._unstarted.clear()
        self._asked.clear()

    async def _guarded(self, task: _Task) -> None:
        if task not in self._unstarted:
            return  # begun before
        del self._unstarted[task]
        try:
            await task.fn(*task.args)
        except Exception as error:  # noqa: BLE001  # reported
            self._report(error)
        except anyio.get_cancelled_exc_class() as error:
            # A task that asyncio.run cancels natively would cancel the whole group with it.
            if not was_cancelled(error):
                self._report(error)
            elif self._group is None:
                raise
        except BaseException as error:
            exit_error = exit_in(error)
            if exit_error is None:
                raise
            self.leave(exit_error)

    async def _answer(
        self,
        call: _Call[T],
        fn: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
        stays: tuple[task_scope.TaskScope, ...],
    ) -> None:
        task_scope.stays.set(stays)  # the caller waits inside these scopes
        try:
            call.value = await fn(*args)
        except Exception as error:  # noqa: BLE001  # the caller's, or reported
            call.error = error
            if call.abandoned:
                self._unheard(error)
        except BaseException:
            call.error = HostClosedError("the background tasks ended before this was done")
            raise
        finally:
            call.done.set()

    def _unheard(self, error: Exception) -> None:
        """Log the answer to a call whose caller has been cancelled: a refusal is no failure."""
        if isinstance(error, ConfigError | LeaseError | SessionError):
            log.debug("no one waited for: %s", error)
        elif isinstance(error, PerdureError):
            log.warning("a call whose caller had been cancelled failed: %s", error)
        else:
            self._report(error)

    def _report(self, error: BaseException) -> None:
        if isinstance(error, HostClosedError):
            return  # the one who closes the host knows that its tasks end
        log.error("background task failed", exc_info=error)

    # trio

    def _start_on_trio(self) -> None:
        import trio

        async def watch() -> None:
            # Outside of the shield: notices that trio ends the system tasks.
            try:
                await self._ended.wait()
            except trio.Cancelled:
                self.torn_down = True
                self._stop = True
                self._wake.set()
                raise

        context = contextvars.copy_context()
        self._task = trio.lowlevel.spawn_system_task(
            self._main, name="perdure:host", context=context
        )
        trio.lowlevel.spawn_system_task(watch, name="perdure:host watch", context=context)


def _uncancel() -> None:
    """Acknowledge the cancellation, or later scopes would misread it."""
    if on_trio():
        return
    import asyncio

    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
