"""Tasks of the host for one session: background jobs, and asking contributors for state."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final, TypeAlias, TypeVar, final

import anyio

from perdure._lib import task_scope
from perdure._lib.signals import exit_in
from perdure._lib.tasks import Host, was_cancelled
from perdure.autosave.core import Core
from perdure.autosave.events import CaptureFailed
from perdure.autosave.tracked import State, Tracked
from perdure.errors import StoreUnavailableError

T = TypeVar("T")
_Prepare: TypeAlias = Callable[[], Awaitable[object]]


SHARE: Final = 0.2
"""The share of the time that background jobs may use."""


BURST: Final = 5.0
"""Seconds of rest at most that count for the next jobs: a second of use."""


QUEUE: Final = 32
"""Jobs that may wait; more are refused, and requested again later."""


@final
class BackgroundJobs:
    """Run jobs, folds mostly, that need their session to themselves.

    Args:
        core: Holds sessions back.
        host: Where jobs run.
        clock: The loop's.
        serve_due: Called when a session may have become ready.

    """

    def __init__(
        self,
        core: Core,
        host: Host,
        clock: Callable[[], float],
        *,
        serve_due: Callable[[], None],
    ) -> None:
        self._core = core
        self._host = host
        self._clock = clock
        self._serve_due = serve_due
        self._turn = anyio.Lock()
        self._waiting = 0
        # What jobs have used counts as paid for by this time.
        self._paid_until = float("-inf")
        self._freed: dict[Tracked, anyio.Event] = {}
        self._scopes: set[anyio.CancelScope] = set()

    async def run(
        self,
        t: Tracked,
        job: Callable[[], Awaitable[T]],
        *,
        prepare: _Prepare | None,
        urgent: bool,
    ) -> T | None:
        """Run a job; None if it was refused. Cancelling the caller does not cancel the job."""
        if self._refused(t, urgent=urgent) or (self.full and not urgent):
            return None
        run = partial(self._run, t, job, prepare, paid=not urgent)
        return await (self._host.call(run) if urgent else self._host.call(self._in_turn, t, run))

    @property
    def full(self) -> bool:
        """True if a job that can wait would be refused."""
        return self._waiting >= QUEUE

    def freed(self, t: Tracked) -> None:
        """Note that a session that is held back has no save in flight any more."""
        event = self._freed.pop(t, None)
        if event is not None:
            event.set()

    def cut(self) -> None:
        """Cancel the jobs that run."""
        for scope in list(self._scopes):
            scope.cancel()

    async def alone(self, t: Tracked) -> None:
        """Hold a session back permanently, and wait until no save of it is in flight.

        One that was given up is not waited for.
        """
        self._core.hold(t)
        await self._until_free(t)

    def _refused(self, t: Tracked, *, urgent: bool) -> bool:
        if t.end in (State.LOST, State.CLOSED) or t.given_up or self._core.stopped:
            return True
        if self._core.breaker.state != "closed":
            return True
        return self._core.schedule.draining and not urgent

    async def _in_turn(self, t: Tracked, run: Callable[[], Awaitable[T | None]]) -> T | None:
        self._waiting += 1
        try:
            async with self._turn:
                rest = self._paid_until - self._clock()
                if rest > 0:
                    await anyio.sleep(rest)
                # Again: the store may have failed, or the engine begun to drain, during the wait.
                if self._refused(t, urgent=False):
                    return None
                return await run()
        finally:
            self._waiting -= 1

    async def _run(
        self, t: Tracked, job: Callable[[], Awaitable[T]], prepare: _Prepare | None, *, paid: bool
    ) -> T | None:
        if prepare is not None:
            await self._bounded(t, prepare, paid=paid)
        self._core.hold(t)
        try:
            await self._until_free(t)
            # Its save is in doubt: until that is settled nothing of it is written.
            if t.given_up:
                return None
            t.occupied = True
            try:
                return await self._bounded(t, job, paid=paid)
            finally:
                t.occupied = False
        finally:
            self._core.release(t, self._clock())
            self.freed(t)
            self._serve_due()

    async def _bounded(
        self, t: Tracked, job: Callable[[], Awaitable[T]], *, paid: bool
    ) -> T | None:
        timeout, began = self._core.engine.exclusive_timeout, self._clock()
        with anyio.move_on_after(timeout) as scope:
            self._scopes.add(scope)
            try:
                return await job()
            finally:
                self._scopes.discard(scope)
                if paid:
                    used = self._clock() - began
                    self._paid_until = max(self._paid_until, began - BURST) + used / SHARE
        if self._clock() - began < timeout:
            return None  # cancelled by `cut`
        raise StoreUnavailableError(
            f"session {t.key}: a job took longer than {timeout} s and was given up",
            key=t.key,
            timeout=timeout,
        )

    async def _until_free(self, t: Tracked) -> None:
        # Several jobs may be woken at once, and one of them is first.
        while (t.inflight is not None and not t.given_up) or t.occupied:
            event = self._freed.setdefault(t, anyio.Event())
            await event.wait()


RUNNERS = 64


@final
class StateCapture:
    """Ask contributors for the state that they own, before a due save, with a timeout.

    One session's contributors are asked by one task at a time, and at most `RUNNERS` sessions' at
    once. A contributor that fails or takes too long is reported, and the save continues without
    it: accepted records never wait for one.

    Args:
        core: Notified when a session's contributors have been asked.
        host: Where they run.
        clock: The loop's.
        serve_due: Called when a session may have become ready.

    """

    def __init__(
        self,
        core: Core,
        host: Host,
        clock: Callable[[], float],
        *,
        serve_due: Callable[[], None],
    ) -> None:
        self._core = core
        self._host = host
        self._clock = clock
        self._serve_due = serve_due
        self._queue: deque[Tracked] = deque()
        # Tasks that ask, or are about to.
        self._runners: set[object] = set()
        self._locks: dict[Tracked, anyio.Lock] = {}
        self._idle = anyio.Event()
        self._idle.set()
        self._stopped = False

    def ask(self, sessions: Iterable[Tracked]) -> None:
        """Ask the contributors of sessions that the core holds back for that.

        And those of sessions that wait because a task could not be started.
        """
        if self._stopped:
            self._leave_out(sessions)
            return
        self._queue.extend(sessions)
        while len(self._runners) < min(RUNNERS, len(self._queue)):
            if not self._runners:
                self._idle = anyio.Event()
            runner = object()
            self._runners.add(runner)
            try:
                self._host.spawn(self._run, runner)
            except BaseException:
                self._gone(runner)
                raise

    async def ask_quiet(self) -> None:
        """Ask contributors of clean sessions, too, and wait for all; their records are due then."""
        quiet = [
            t
            for t in self._core.registry.sessions
            if t.before_capture is not None and t.clean and t.end is None and not t.preparing
        ]
        for t in quiet:
            t.preparing = True
        self.ask(quiet)
        await self.idle()

    def stop(self) -> None:
        """Ask no more: accepted records are saved without those who have not answered yet."""
        self._stopped = True
        self._queue.clear()
        self._leave_out([t for t in self._core.registry.sessions if t.preparing])

    def _leave_out(self, sessions: Iterable[Tracked]) -> None:
        for t in sessions:
            self._core.prepared(t, self._clock())

    @property
    def is_busy(self) -> bool:
        """True if a contributor is being asked."""
        return bool(self._runners)

    async def idle(self) -> None:
        """Wait until no contributor is being asked."""
        await self._idle.wait()

    async def capture(self, t: Tracked) -> None:
        """Ask a session's contributors now; what they append comes after earlier records."""
        if t.before_capture is None:
            return
        lock = self._locks.setdefault(t, anyio.Lock())
        try:
            async with lock:
                await self._capture(t)
        finally:
            # The last one out removes it: else each session would leave a lock.
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._locks.pop(t, None)
        t.prepared = t.first_at is not None  # else nothing is due that they were asked for

    async def _capture(self, t: Tracked) -> None:
        if t.before_capture is None or t.end is not None:
            return
        t.contributing = True
        stay = task_scope.enter(t)
        try:
            with anyio.fail_after(self._core.engine.capture_timeout):
                await t.before_capture()
        except BaseException as error:
            if was_cancelled(error):
                raise
            self._failed(t, error)  # and the save continues
        finally:
            stay.leave()
            t.contributing = False

    def _failed(self, t: Tracked, error: BaseException) -> None:
        exit_error = exit_in(error)
        if exit_error is not None:
            self._host.leave(exit_error)
            return
        if not isinstance(error, Exception):
            error = RuntimeError(f"it ended with {error!r}")
        self._core.registry.events.append(CaptureFailed(key=t.key, error=error))

    async def _run(self, runner: object) -> None:
        try:
            while self._queue:
                t = self._queue.popleft()
                try:
                    await self.capture(t)
                finally:
                    self._core.prepared(t, self._clock())
                    self._serve_due()
        finally:
            self._gone(runner)

    def _gone(self, runner: object) -> None:
        self._runners.discard(runner)
        if not self._runners:
            self._idle.set()
