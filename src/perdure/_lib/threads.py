"""Threads that take a blocking call and bring its result back to the event loop, in one hop.

What ``anyio.to_thread.run_sync`` is for everything else, for the one call that a user
waits for on every save: no limiter, no checkpoint before it, no copy of the context.

Cancelling a caller abandons its call, which goes on to its end in its thread. The threads
belong to one event loop. They keep no process alive: a call that the end of the process
cuts off is like one that a crash cuts off.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar, TypeVarTuple, final

from perdure._lib.loop import OneShotEvent, event_maker

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_HAND_OVER: Final = 1e-3
"""Seconds for which a call may wait until its thread has begun."""


class ThreadCall(Generic[T]):
    """A call, and what came of it."""

    __slots__ = ("_args", "_begun", "_function", "_then", "_threads", "error", "value")

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
        self._then = then
        self.error: Exception | None = None
        self.value: T
        self._begun: threading.Lock | None = None

    def hand_over(self, jobs: _Jobs) -> None:
        """Put it among the jobs, and wait until a thread has begun with it."""
        self._begun = begun = threading.Lock()
        begun.acquire()
        jobs.put(self)
        begun.acquire(timeout=_HAND_OVER)

    def run(self) -> None:
        """Make the call, and tell the event loop."""
        if self._begun is not None:
            self._begun.release()
        try:
            self.value = self._function(*self._args)
        except Exception as error:  # noqa: BLE001  # raised where somebody waits for it
            self.error = error
        except BaseException as error:  # noqa: BLE001  # a thread of ours does not end by it
            self.error = RuntimeError(f"the call ended by {error!r}")
        with contextlib.suppress(RuntimeError):  # the event loop has ended: nobody waits
            self._threads.post(self._finish)

    def refuse(self) -> None:
        """Make no call: the threads were closed."""
        self.error = RuntimeError("these threads were closed")
        self._threads.post(self._finish)

    def _finish(self) -> None:
        # On the event loop; also for a call that was abandoned, whose thread is free only now.
        self._threads.busy -= 1
        self._then(self)


_Jobs = SimpleQueue["ThreadCall[Any] | None"]


@final
class Threads:
    """At most ``most`` threads, begun when they are needed. Made on a running event loop.

    Args:
        most: How many.
        name: Theirs.
        prompt: Give the interpreter to a thread that is free as soon as it has a call.
            While the event loop has other things to do, a thread gets it only after
            CPython's switch interval, which is 5 ms: longer than a commit.

    """

    def __init__(self, most: int, *, name: str, prompt: bool = False) -> None:
        self.busy: int = 0
        """Calls whose threads are not free again yet."""
        self.new_event: Callable[[], OneShotEvent] = event_maker()
        self.post: Callable[..., object] = _post_to_loop()
        """Runs a function soon on the event loop."""
        self._most = most
        self._name = name
        self._prompt = prompt
        self._begun = 0
        self._jobs: _Jobs = SimpleQueue()
        self._end = weakref.finalize(self, _end, self._jobs, most)

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call ``function(*args)`` in a thread; return its value or raise its error."""
        call = await self.done(function, *args)
        if call.error is not None:
            raise call.error
        return call.value

    async def done(self, function: Callable[[*Ts], T], *args: *Ts) -> ThreadCall[T]:
        """Call ``function(*args)`` in a thread, and return what came of it."""
        done = self.new_event()
        call = self.start(function, *args, then=lambda _: done.set())
        await done.wait()
        return call

    def start(
        self, function: Callable[[*Ts], T], *args: *Ts, then: Callable[[ThreadCall[T]], object]
    ) -> ThreadCall[T]:
        """Call ``function(*args)`` in a thread, then ``then`` with its ``value`` or ``error``.

        ``then`` is called on the event loop, without a task, and must not raise.
        """
        call = ThreadCall(self, function, args, then)
        if not self._end.alive:
            self.busy += 1
            call.refuse()
            return call
        if self._prompt and self.busy < self._begun:
            self.busy += 1
            call.hand_over(self._jobs)
            return call
        self.busy += 1
        if self.busy > self._begun < self._most:
            self._begun += 1
            name = f"{self._name} {self._begun}"
            threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()
        self._jobs.put(call)
        return call

    def close(self) -> None:
        """Let the threads end when they have done what was asked of them.

        What is asked of them from here on ends with a RuntimeError.
        """
        self._end()


def _work(jobs: _Jobs) -> None:
    while (call := jobs.get()) is not None:
        call.run()
        del call  # a thread that waits keeps nobody's result alive


def _end(jobs: _Jobs, most: int) -> None:
    for _ in range(most):
        jobs.put(None)


def _post_to_loop() -> Callable[[Callable[[], object]], object]:
    """Return what runs a function soon on the running event loop, from any thread."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        return trio.lowlevel.current_trio_token().run_sync_soon  # type: ignore[no-any-return]  # trio may be missing
    from asyncio import get_running_loop

    return get_running_loop().call_soon_threadsafe
