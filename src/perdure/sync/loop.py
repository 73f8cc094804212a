"""A loop in a thread of its own, and how other threads ask it for something.

Whatever belongs to a manager lives in this thread; user threads only wait. So autosave goes
on while user code blocks, and any thread may call. A wait that an exception ends (Ctrl-C)
is given up like a cancelled task's: what was asked for is told so, and what it must not
interrupt goes on. Nobody waits for ever: when the loop ends, every wait ends with an error.

The thread is a daemon: whether it may end is decided by ``perdure.sync.manager``.
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
"""Where Ctrl-C does not end a wait for a lock, it is noticed between two short ones."""


class _Call(Generic[T]):
    """What a thread waits for. All but the future belongs to the loop's thread."""

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
    """Run an event loop in a thread until ``stop``."""

    tasks: TaskGroup
    """Where tasks run that must not end with a call; for the loop's own thread."""

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
        """Whether this is a child of the process that has the thread."""
        return self._home.stray() == "fork"

    @property
    def usable(self) -> bool:
        """Whether there is a loop to ask, and this is not its own thread."""
        current_process = self._thread is threading.current_thread()
        return not (self.forked or self._ended or current_process)

    def call(self, make: Callable[[], Awaitable[T]]) -> T:
        """Await ``make()`` in the loop; a wait that an exception ends cancels it."""
        call: _Call[T] = _Call()
        return self._wait(call, lambda: self.tasks.start_soon(self._answer, call, make))

    def do(self, act: Callable[[], T]) -> T:
        """Call ``act()`` in the loop; it is done even if the wait is ended."""
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
        """Have ``act()`` called in the loop, without waiting; False if that has ended."""
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
            if self._ended:  # perhaps after its thread had looked through the calls
                _fail(call.future, closed())
            while not wait((call.future,), _SLICE).done:
                pass
            return call.future.result()
        finally:
            self._calls.discard(call)
            if not call.future.done():
                self.post(call.abandon)

    def _check(self) -> None:
        if self.forked:
            message = (
                "this belongs to the process that connected: connect again in the child process"
            )
            raise WrongLoopError(message, stray="fork")
        if self._thread is threading.current_thread():
            message = (
                "a blocking call from within perdure's own thread would wait for itself: hand "
                "the work to a thread of your own"
            )
            raise WrongLoopError(message, stray="thread")
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
        # Not the callers' contexts: what they hold would stay alive in here.
        self._context = contextvars.copy_context()
        self._stop = anyio.Event()
        async with anyio.create_task_group() as self.tasks:
            self._started.set_result(None)
            await self._stop.wait()
            self.tasks.cancel_scope.cancel()

    def stop(self) -> None:
        """End the loop, whatever still runs in it, and every wait for it."""
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
    except BaseException as error:  # noqa: BLE001  # the caller's, who would wait for ever
        _fail(future, error)
    else:
        _succeed(future, value)


def _succeed(future: Future[T], value: T) -> None:
    with contextlib.suppress(InvalidStateError):  # the loop ended, and so did the wait
        future.set_result(value)


def _fail(future: Future[Any], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


# Hooks of blocking code: called in a thread of their own, in the order of the events
#
# A hook may take its time and may use the blocking API; the loop never waits for it, except for
# ``before_save``. When the manager has closed, what has happened until then is still told.


log: logging.Logger = logging.getLogger("perdure")


@final
class HookThread:
    """Call functions one after another; the thread starts with the first of them.

    What is meant to end the program (``sys.exit`` in a hook) goes to ``on_exit``.
    """

    def __init__(self, name: str, on_exit: Callable[[BaseException], object]) -> None:
        self._name = name
        self._on_exit = on_exit
        self._told: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, hook: Callable[[Any], object], facts: object) -> None:
        """Have ``hook(facts)`` called; from the loop's thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._told.put(lambda: hook(facts))

    def finish(self, timeout: float) -> None:
        """Wait until everything was told; a hook that closes its own manager does not wait."""
        self._told.put(None)
        if self._thread not in {None, threading.current_thread()}:
            assert self._thread is not None
            self._thread.join(timeout)

    def _work(self) -> None:
        while (tell := self._told.get()) is not None:
            try:
                tell()
            except (KeyboardInterrupt, SystemExit) as error:
                self._on_exit(error)  # it would end this thread without a word
            except BaseException:  # it would end this thread, and no hook would be called again
                log.exception("a hook failed")
