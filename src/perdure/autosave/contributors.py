"""Asking contributors for the state that they own, before a due save.

Runs in the host. One session's contributors are asked by one task at a time, and at most
`RUNNERS` sessions' at once. One that fails or takes too long is reported, and the save
goes on: records that were accepted are no hostages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import final

import anyio

from perdure._lib import task_scope
from perdure._lib.host import Host
from perdure._lib.signals import exit_in
from perdure._lib.tasks import was_cancelled
from perdure.autosave.core import Core
from perdure.autosave.events import CaptureFailed
from perdure.autosave.tracked import Tracked

RUNNERS = 16


@final
class StateCapture:
    """Ask, with a timeout, and tell the core.

    Args:
        core: Told when a session's contributors have been asked.
        host: Where they run.
        clock: The loop's.
        attend: Called when a session may have become ready.

    """

    def __init__(
        self,
        core: Core,
        host: Host,
        clock: Callable[[], float],
        *,
        attend: Callable[[], None],
    ) -> None:
        self._core = core
        self._host = host
        self._clock = clock
        self._attend = attend
        self._queue: deque[Tracked] = deque()
        self._runners: set[object] = set()
        """Those who ask, or are about to."""
        self._locks: dict[Tracked, anyio.Lock] = {}
        self._idle = anyio.Event()
        self._idle.set()

    def ask(self, sessions: Iterable[Tracked]) -> None:
        """Ask the contributors of sessions that the core holds back for it."""
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

    def replace_runners(self, sessions: Iterable[Tracked]) -> None:
        """Ask for sessions that were to be asked for and are not: count on no runner any more."""
        missing = [t for t in sessions if t not in self._locks and t not in self._queue]
        if missing:
            self._runners.clear()
            self.ask(missing)

    async def ask_quiet(self) -> None:
        """Ask those of clean sessions, too, and wait for all; what they append is due then."""
        quiet = [
            t
            for t in self._core.registry.sessions
            if t.before_capture is not None and t.clean and t.end is None and not t.preparing
        ]
        for t in quiet:
            t.preparing = True
        self.ask(quiet)
        await self.idle()

    @property
    def is_busy(self) -> bool:
        """Whether somebody is being asked."""
        return bool(self._runners)

    async def idle(self) -> None:
        """Wait until nobody is being asked."""
        await self._idle.wait()

    async def capture(self, t: Tracked) -> None:
        """Ask a session's contributors now; what they append is behind what was before."""
        if t.before_capture is None:
            return
        lock = self._locks.setdefault(t, anyio.Lock())
        try:
            async with lock:
                await self._capture(t)
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._locks.pop(t, None)
        t.prepared = True

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
            self._failed(t, error)  # and the save goes on all the same
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
                    self._attend()
        finally:
            self._gone(runner)

    def _gone(self, runner: object) -> None:
        self._runners.discard(runner)
        if not self._runners:
            self._idle.set()
