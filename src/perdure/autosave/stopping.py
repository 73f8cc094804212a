"""Stopping autosave: drain, seal, flush, cut, report; never longer than it was given.

Runs in the host, once, however often it is asked for, so that a caller who is cancelled
while it stops leaves nothing half-stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import anyio

from perdure.autosave.batcher import Batcher
from perdure.autosave.contributors import Contributors
from perdure.autosave.core import Core
from perdure.autosave.lane import Lane
from perdure.autosave.shutdown import ShutdownReport, report_of
from perdure.autosave.timer import Timer
from perdure.autosave.waiting import Waiting

__all__ = ["Stopping"]


@final
class Stopping:
    """Stop one engine.

    Args:
        core: What it knows.
        clock: The loop's.
        timer: Its timer.
        batcher: Its workers.
        lane: Its jobs.
        contributors: Asked once more, those of clean sessions included.
        waiting: Its waiters.

    """

    def __init__(
        self,
        core: Core,
        clock: Callable[[], float],
        *,
        timer: Timer,
        batcher: Batcher,
        lane: Lane,
        contributors: Contributors,
        waiting: Waiting,
    ) -> None:
        self.report: ShutdownReport | None = None
        """What became of everything, once it is over."""
        self._core = core
        self._clock = clock
        self._timer = timer
        self._batcher = batcher
        self._lane = lane
        self._contributors = contributors
        self._waiting = waiting
        self._one = anyio.Lock()
        self._flushing: anyio.CancelScope | None = None
        self._cut = False

    def drain(self) -> None:
        """Save everything as it comes from now on."""
        if self._core.schedule.draining:
            return
        now = self._clock()
        self._core.schedule.drain(self._core.books.unsaved, now)
        self._core.breaker.hurry(now)
        self._timer.attend()

    def cut(self) -> None:
        """Wait no longer for the store: go on to the report."""
        self._cut = True
        if self._flushing is not None:
            self._flushing.cancel()

    async def stop(self, deadline: float, hard_grace: float) -> ShutdownReport:
        """Stop within ``deadline + hard_grace`` seconds, and say what became of everything."""
        async with self._one:
            if self.report is not None:
                return self.report
            began = self._clock()
            self.drain()
            self._timer.attend()  # in a loop that ends it was cut, as all other tasks were
            self._core.intake.seal(None)
            before = list(self._core.books.unsaved)
            with anyio.move_on_after(deadline) as self._flushing:
                if not self._cut:
                    await self._flush()
            # From here on nothing new is sent: what the report says stays true.
            self._core.stopped = True
            self._batcher.cut()
            self._lane.cut()
            with anyio.move_on_after(hard_grace):
                await self._batcher.idle()
            return self.finish(began, saved=len([t for t in before if t.clean]))

    async def _flush(self) -> None:
        await self._contributors.ask_quiet()
        while self._core.books.unsaved:
            t = next(iter(self._core.books.unsaved))
            await self._waiting.settled(t, t.version)

    def finish(self, began: float, *, saved: int) -> ShutdownReport:
        """Begin no save any more, account for everything, and let nobody wait in vain."""
        self._core.stopped = True
        self._core.intake.seal(None)
        if self.report is None:
            self.report = report_of(self._core, began=began, saved=saved, now=self._clock())
            self.report.log()
        self._timer.stop()
        self._waiting.make_room()
        for t in self._core.books.sessions:
            self._waiting.wake(t.take_waiters())
        return self.report
