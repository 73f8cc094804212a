"""An event loop in a thread of its own, calls into it from other threads, and a thread for hooks.

Everything that belongs to a manager runs in the loop's thread; user threads only wait. So autosave
continues while user code blocks, and any thread may call. If an exception such as Ctrl-C ends a
wait, the call is cancelled like a task; work that must not be interrupted continues. No wait is
endless: when the loop ends, every wait ends with an error.

The thread is a daemon: ``perdure.sync.manager`` decides whether it may end.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import queue
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError, wait
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import anyio

from perdure._lib.loop import Affinity
from perdure._lib.tasks import was_cancelled
from perdure.errors import SessionClosedError, WrongLoopError

if TYPE_CHECKING:
    import asyncio

    from anyio.abc import TaskGroup


T = TypeVar("T")


_SLICE = 0.1 if sys.platform == "win32" else None
"""Seconds of a wait for a lock, short where only that lets Ctrl-C through; None for no limit."""


class _Call(Generic[T]):
    """A pending call. All but the future belongs to the loop's thread."""

    __slots__ = ("abandoned", "future", "scope")

    def __init__(self) -> None:
        self.future: Future[T] = Future()
        self.abandoned = False
        self.scope: anyio.CancelScope | None = None

    def abandon(self) -> None:
        self.abandoned = True
        if self.scope is not None:
            self.scope.cancel()


@final
class LoopThread:
    """An event loop that runs in a thread until ``stop``."""

    tasks: TaskGroup
    """For tasks that outlive a call; used by the loop's own thread only."""

    def __init__(self, name: str) -> None:
        self._home = Affinity()
        self._calls: set[_Call[Any]] = set()
        self._ended = False
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        self._started.result()

    # for other threads

    @property
    def forked(self) -> bool:
        """True if this process is a forked child, without the thread."""
        return self._home.stray() == "fork"

    @property
    def usable(self) -> bool:
        """True if the loop runs, and this is not its own thread."""
        current_process = self._thread is threading.current_thread()
        return not (self.forked or self._ended or current_process)

    def call(self, make: Callable[[], Awaitable[T]]) -> T:
        """Await ``make()`` in the loop; an exception that ends the wait cancels it."""
        call: _Call[T] = _Call()
        return self._wait(
            call, lambda: self.tasks.start_soon(self._answer, call, make, name="perdure:call")
        )

    def do(self, act: Callable[[], T]) -> T:
        """Call ``act()`` in the loop; it runs even if an exception ends the wait."""
        call: _Call[T] = _Call()
        return self._wait(call, lambda: _settle(call.future, act))

    def read(self, act: Callable[[], T]) -> T:
        """Call ``act()``, which only reads: in the loop while there is one, else here."""
        if self.usable:
            try:
                return self.do(act)
            except SessionClosedError:  # it ended just now
                if not self._ended:
                    raise
        return act()

    def post(self, act: Callable[[], object]) -> bool:
        """Schedule ``act()`` in the loop, without waiting; return False if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(act, context=self._context.copy())
        except RuntimeError:  # closed
            self._ended = True
        return not self._ended

    def join(self, timeout: float) -> None:
        """Wait for the thread's end."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _wait(self, call: _Call[T], begin: Callable[[], object]) -> T:
        self._check()
        self._calls.add(call)
        try:
            self.post(begin)
            if self._ended:  # perhaps after its thread has failed the pending calls
                _fail(call.future, closed())
            # In slices: on Windows, a wait without a timeout would ignore Ctrl-C.
            while not wait((call.future,), _SLICE).done:
                pass
            return call.future.result()
        finally:
            self._calls.discard(call)
            if not call.future.done():
                self.post(call.abandon)

    def _check(self) -> None:
        if self.forked:
            raise WrongLoopError(
                "this belongs to the process that connected: connect again in the child process",
                stray="fork",
            )
        if self._thread is threading.current_thread():
            raise WrongLoopError(
                "a blocking call from within perdure's own thread would wait for itself: hand "
                "the work to a thread of your own",
                stray="thread",
            )
        if self._ended:
            raise closed()

    # in its own thread

    def _work(self) -> None:
        try:
            anyio.run(self._main, backend="asyncio")
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)
        finally:
            self._ended = True
            for call in tuple(self._calls):
                _fail(call.future, closed())

    async def _main(self) -> None:
        import asyncio

        self._loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        # Not the callers' contexts: their values would stay alive here.
        self._context = contextvars.copy_context()
        self._stop = anyio.Event()
        async with anyio.create_task_group() as self.tasks:
            self._started.set_result(None)
            await self._stop.wait()
            self.tasks.cancel_scope.cancel()

    def stop(self) -> None:
        """End the loop, the tasks that still run in it, and every wait for it."""
        # First the flag, then the calls: one that is added in between finds the flag set.
        self._ended = True
        for call in tuple(self._calls):
            _fail(call.future, closed())
        self._stop.set()

    async def _answer(self, call: _Call[T], make: Callable[[], Awaitable[T]]) -> None:
        with anyio.CancelScope() as call.scope:
            if call.abandoned:
                return
            try:
                value = await make()
            except BaseException as error:
                if was_cancelled(error):
                    raise
                _fail(call.future, error)  # the caller's
            else:
                _succeed(call.future, value)


def closed() -> SessionClosedError:
    """Return the error for a manager whose loop has ended."""
    return SessionClosedError("this manager is closed: call connect(…) again")


def _settle(future: Future[T], act: Callable[[], T]) -> None:
    try:
        value = act()
    except BaseException as error:  # noqa: BLE001  # passed on: the caller would wait forever
        _fail(future, error)
    else:
        _succeed(future, value)


def _succeed(future: Future[T], value: T) -> None:
    with contextlib.suppress(InvalidStateError):  # the loop ended, and so did the wait
        future.set_result(value)


def _fail(future: Future[Any], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


log: logging.Logger = logging.getLogger("perdure")


@final
class HookThread:
    """A thread that calls hooks of blocking code, in the order of the events.

    A hook may block and may use the blocking API; the loop never waits for it, except for
    ``before_save``. The thread starts with the first hook. After the manager has closed, the hooks
    of earlier events are still called. An exception that ends the program (``sys.exit`` in a hook)
    goes to ``on_exit``.
    """

    def __init__(self, name: str, on_exit: Callable[[BaseException], object]) -> None:
        self._name = name
        self._on_exit = on_exit
        self._pending: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def schedule(self, hook: Callable[[Any], object], facts: object) -> None:
        """Schedule ``hook(facts)``; from the loop's thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._pending.put(lambda: hook(facts))

    def finish(self, timeout: float) -> None:
        """Wait until every hook was called; a hook that closes its own manager does not wait."""
        self._pending.put(None)
        if self._thread not in {None, threading.current_thread()}:
            assert self._thread is not None
            self._thread.join(timeout)

    def _work(self) -> None:
        while (call := self._pending.get()) is not None:
            try:
                call()
            except (KeyboardInterrupt, SystemExit) as error:
                self._on_exit(error)  # it would silently end this thread
            except BaseException:  # it would end this thread, and no hook would be called again
                log.exception("a hook failed")
