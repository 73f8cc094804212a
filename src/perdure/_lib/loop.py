"""The running event loop: clock, timers, one-shot events, worker threads, and object affinity."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    Protocol,
    TypeVar,
    TypeVarTuple,
    final,
)

from perdure.errors import StoreUnavailableError

if TYPE_CHECKING:
    import asyncio


# Clock and timers
#
# The clock is looked up once and then called for each record, so it must be cheap. It is the clock
# of the loop's own timers and cancel scopes, virtual clocks of tests included.


def loop_clock() -> Callable[[], float]:
    """Return the running event loop's monotonic clock, in seconds.

    Raises:
        RuntimeError: No event loop is running here.

    """
    if on_trio():
        from trio import lowlevel

        current: Callable[[], float] = lowlevel.current_clock().current_time
        return current
    import asyncio

    loop = asyncio.get_running_loop()
    # The standard loops only call time.monotonic: call it directly.
    if type(loop).time is asyncio.BaseEventLoop.time:
        return monotonic
    return loop.time


def on_trio() -> bool:
    """Return whether trio runs this, also while another thread is just importing it."""
    in_trio_run = getattr(sys.modules.get("trio.lowlevel"), "in_trio_run", None)
    return in_trio_run is not None and in_trio_run()


def in_event_loop() -> bool:
    """Return whether an event loop runs this."""
    return _running_loop()() is not None


def loop_timer() -> Callable[[float, Callable[[], None]], Callable[[], None]]:
    """Return a function that schedules a call on the running event loop after some seconds.

    That function returns the timer's cancel function. On asyncio it needs no task. The scheduled
    call must not raise. It runs without the caller's context variables, which a pending timer would
    keep alive.

    Raises:
        RuntimeError: No event loop is running here.

    """
    if on_trio():
        return _later_on_trio
    import asyncio
    from contextvars import Context

    loop = asyncio.get_running_loop()
    return lambda seconds, call: loop.call_later(seconds, call, context=Context()).cancel


def _later_on_trio(seconds: float, call: Callable[[], None]) -> Callable[[], None]:
    import trio

    scope = trio.CancelScope()

    async def wait() -> None:
        with scope:
            await trio.sleep(seconds)
            call()

    trio.lowlevel.spawn_system_task(wait, name="perdure:timer")
    return scope.cancel


# One-shot events
#
# A cheaper ``anyio.Event``, since every save needs several: one waiter, and the running event loop
# is looked up once for all events.


class OneShotEvent(Protocol):
    """An event for one waiter, set once, on the event loop that it was made for."""

    def set(self) -> None:
        """Resume the waiter, present or future."""

    def wait(self) -> Awaitable[None]:
        """Wait until it is set; one waiter at most."""
        ...


def event_maker() -> Callable[[], OneShotEvent]:
    """Return a factory of one-shot events for the running event loop.

    Raises:
        RuntimeError: No event loop is running here.

    """
    if on_trio():
        from trio import Event

        return Event
    import asyncio

    loop = asyncio.get_running_loop()
    return partial(_OnAsyncio, loop)


def post_to_loop(*, from_any_thread: bool = True) -> Callable[..., object]:
    """Return a function that schedules a call in the next step of the running event loop.

    What is called must not raise. Where only the loop's own thread posts, it costs less.

    Raises:
        RuntimeError: No event loop is running here.

    """
    if on_trio():
        from trio import lowlevel

        post: Callable[..., object] = lowlevel.current_trio_token().run_sync_soon
        return post
    import asyncio

    loop = asyncio.get_running_loop()
    return loop.call_soon_threadsafe if from_any_thread else loop.call_soon


@final
class _OnAsyncio:
    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[None] = loop.create_future()

    def set(self) -> None:
        if not self._future.done():  # it is, if the waiter was cancelled
            self._future.set_result(None)

    def wait(self) -> Awaitable[None]:
        return self._future


# Affinity to one event loop, one thread, one process
#
# Cheap enough for every call: it compares a thread id, a fork counter and the running loop.


Stray = Literal["fork", "thread", "loop"]

_forks = 0


def _forked() -> None:
    global _forks  # noqa: PLW0603  # counted once per fork, by the interpreter
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Affinity:
    """The loop, thread and process that made an object; check ``stray`` before use."""

    __slots__ = ("_forks", "_thread", "loop", "running")

    def __init__(self) -> None:
        self._forks = _forks
        self._thread = threading.get_ident()
        self.running: Callable[[], object] = _running_loop()
        """Returns the loop that the caller runs in, None in a forked child."""
        self.loop: object = self.running()
        """The loop that made this; ``running() is loop`` is the cheapest check."""

    def stray(self) -> Stray | None:
        """Return what differs for the caller: process, thread or loop; None if nothing does."""
        # No two threads run the same loop, so the same loop means the same thread.
        if self.running() is self.loop is not None and self._forks == _forks:
            return None
        if self._forks != _forks:
            return "fork"
        if self._thread != threading.get_ident():
            return "thread"
        return None if self.running() is self.loop else "loop"


def _running_loop() -> Callable[[], object]:
    """Return a function that returns the running loop, None when there is none."""
    if on_trio():
        from trio import lowlevel

        forks = _forks

        def token() -> object:
            loop = forks == _forks and lowlevel.in_trio_run()
            return lowlevel.current_trio_token() if loop else None

        return token
    # Knows a forked child by itself, for which it asks the system each time.
    from asyncio import _get_running_loop

    ours, thread, forks = _get_running_loop(), threading.get_ident(), _forks
    if ours is None:
        return _get_running_loop
    is_running, this_thread = ours.is_running, threading.get_ident

    def running() -> object:
        # A thread runs one loop at a time.
        if is_running() and this_thread() == thread and forks == _forks:
            return ours
        return _get_running_loop()

    return running


def unopened(place: str, *, elsewhere: bool) -> StoreUnavailableError:
    """Return the error for a store that was not opened, or in another process *elsewhere*."""
    message = (
        f"the store at {place} was opened in another process: open a store of its own in this one"
        if elsewhere
        else f"the store at {place} is not open: await its open() first"
    )
    return StoreUnavailableError(message, path=place)


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_HAND_OVER: Final = 1e-3
"""Seconds for which a call may wait until its thread has begun."""
_REPOST: Final = 1.0
"""Seconds after which the event loop is woken again: a Ctrl-C may have come before it answered."""


class ThreadCall(Generic[T]):
    """A call and its result."""

    __slots__ = ("_args", "_begun", "_function", "_threads", "error", "then", "value")

    def __init__(
        self,
        threads: Threads,
        function: Callable[..., T],
        args: tuple[Any, ...],
        then: Callable[[ThreadCall[T]], object],
    ) -> None:
        self._threads = threads
        self._function = function
        self._args = args
        self.then: Callable[[ThreadCall[T]], object] = then
        """Called back on the event loop, also for a call whose caller has gone."""
        self.error: Exception | None = None
        self.value: T
        self._begun: threading.Lock | None = None

    def hand_over(self, jobs: _Jobs) -> None:
        """Queue it, and wait until a thread has started it."""
        self._begun = begun = threading.Lock()
        begun.acquire()
        jobs.put(self)
        begun.acquire(timeout=_HAND_OVER)

    def run(self) -> None:
        """Make the call, and notify the event loop."""
        if self._begun is not None:
            self._begun.release()
        try:
            self.value = self._function(*self._args)
        except Exception as error:  # noqa: BLE001  # raised in the waiter
            self.error = error
        except BaseException as error:  # noqa: BLE001  # a thread of ours does not end by it
            self.error = RuntimeError(f"the call ended by {error!r}")
        self._threads.finished(self)


_Jobs = SimpleQueue["ThreadCall[Any] | None"]


@final
class Threads:
    """At most ``most`` threads, started when needed, that take blocking calls for one event loop.

    A cheaper ``anyio.to_thread.run_sync`` for the call that a user waits for on every save: no
    limiter, no checkpoint before it, no copy of the context. Made on a running event loop.
    Cancelling a caller abandons its call, which continues to its end in its thread. The threads
    keep no process alive: a call that the end of the process cuts off is like one that a crash
    cuts off.

    Args:
        most: The maximum number of threads.
        name: The prefix of their names.
        prompt: Give the interpreter to an idle thread as soon as it has a call.
            While the event loop has other things to do, a thread gets it only after
            CPython's switch interval, which is 5 ms: longer than a commit.

    """

    def __init__(self, most: int, *, name: str, prompt: bool = False) -> None:
        self.busy: int = 0
        """Calls whose threads are not free again yet."""
        self.new_event: Callable[[], OneShotEvent] = event_maker()
        self.post: Callable[..., object] = post_to_loop()
        """Runs a function soon on the event loop."""
        self.most: int = most
        self._name = name
        self._prompt = prompt
        self._begun = 0
        # Calls that have ended and were not answered yet, and when the event loop is woken again.
        self._ended: deque[ThreadCall[Any]] = deque()
        self._repost_at = 0.0
        self._jobs: _Jobs = SimpleQueue()
        self._end = weakref.finalize(self, _end, self._jobs, most)

    async def run(self, function: Callable[[*Ts], T], *args: *Ts, prompt: bool = True) -> T:
        """Call ``function(*args)`` in a thread; return its value or raise its error."""
        call = await self.done(function, *args, prompt=prompt)
        if call.error is not None:
            raise call.error
        return call.value

    async def done(
        self, function: Callable[[*Ts], T], *args: *Ts, prompt: bool = True
    ) -> ThreadCall[T]:
        """Call ``function(*args)`` in a thread, and return the finished call."""
        done = self.new_event()
        call = self.start(function, *args, then=lambda _: done.set(), prompt=prompt)
        await done.wait()
        return call

    def start(
        self,
        function: Callable[[*Ts], T],
        *args: *Ts,
        then: Callable[[ThreadCall[T]], object],
        prompt: bool = True,
    ) -> ThreadCall[T]:
        """Call ``function(*args)`` in a thread, then ``then`` with its ``value`` or ``error``.

        ``then`` is called on the event loop, without a task, and must not raise; after a Ctrl-C
        in it, it is called again. With ``prompt=False`` the thread gets the interpreter when the
        event loop next waits, which costs less where the loop has nothing else to do.

        Raises:
            StoreUnavailableError: There is no thread, and none can be started.

        """
        call = ThreadCall(self, function, args, then)
        if not self._end.alive:
            self.busy += 1
            call.error = RuntimeError("these threads were closed")
            self.finished(call)
            return call
        if prompt and self._prompt and self.busy < self._begun:
            self.busy += 1
            call.hand_over(self._jobs)
            return call
        if self.busy >= self._begun < self.most:
            self._begin_thread()
        self.busy += 1
        self._jobs.put(call)
        return call

    def _begin_thread(self) -> None:
        self._begun += 1  # first: a Ctrl-C may come when the thread has started
        name = f"{self._name} {self._begun}"
        args = (self._jobs, weakref.ref(self))
        try:
            threading.Thread(target=_work, args=args, name=name, daemon=True).start()
        except Exception as error:
            self._begun -= 1
            if not self._begun:  # else the call waits for a thread that has begun
                message = f"the system starts no thread ({name}): {error}"
                raise StoreUnavailableError(message) from error

    def finished(self, call: ThreadCall[Any]) -> None:
        """Have the event loop answer a call; from any thread."""
        self._ended.append(call)
        self.wake()

    def wake(self) -> bool:
        """Wake the event loop if calls have ended; return whether it has to answer any.

        Many calls that end at about the same time wake it once.
        """
        if not self._ended:
            return False
        if monotonic() >= self._repost_at:
            self._repost_at = monotonic() + _REPOST
            try:
                self.post(self._answer_all)
            except RuntimeError:  # the event loop has ended: there is no waiter
                return False
            except Exception:  # noqa: BLE001  # a thread wakes it again
                self._repost_at = 0.0
        return True

    def _answer_all(self) -> None:
        self._repost_at = 0.0  # first: a call that ends from now on posts again, at worst in vain
        try:
            # What an answer begins may end at once: it waits until others have had their turn.
            for _ in range(len(self._ended)):
                self._answer_next()
        finally:
            self.wake()  # there are more, or an answer raised, or a Ctrl-C came

    def _answer_next(self) -> None:
        self.busy -= 1
        try:
            call = self._ended[0]
            call.then(call)
        except KeyboardInterrupt:  # perhaps before the answer had begun: it is repeated
            self.busy += 1
            raise
        except BaseException:
            self._ended.popleft()
            raise
        self._ended.popleft()

    def close(self) -> None:
        """End the threads after the calls that are queued.

        Later calls end with a RuntimeError.
        """
        self._end()


def _work(jobs: _Jobs, owner: weakref.ref[Threads]) -> None:
    timeout = None
    while True:
        try:
            call = jobs.get(timeout=timeout)
        except Empty:
            threads = owner()
            has_unanswered = threads is not None and threads.wake()
            timeout = timeout * 2 if timeout and has_unanswered else None
            del threads  # a waiting thread must not keep them alive, nor a result
            continue
        if call is None:
            return
        call.run()
        del call
        timeout = _REPOST


def _end(jobs: _Jobs, most: int) -> None:
    for _ in range(most):
        jobs.put(None)
