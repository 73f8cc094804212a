"""Stopping a manager: drain, seal, flush, fold, release, report. Always within a deadline."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
import msgspec

from perdure.autosave.shutdown import ShutdownReport, Unsaved
from perdure.session import spilling
from perdure.session.keeping import Keeper
from perdure.session.runtime import Runtime
from perdure.session.session import Session

__all__ = ["Closing"]

log: logging.Logger = logging.getLogger("perdure")


class Closing:
    """The shutdown of one manager, done once, however often it is asked for."""

    def __init__(self, runtime: Runtime, keeper: Keeper) -> None:
        self._runtime = runtime
        self._keeper = keeper
        self._begun = False
        self.done: anyio.Event = anyio.Event()
        self.report: ShutdownReport | None = None

    def drain(self) -> None:
        """Save everything as it comes, and open nothing new; turns go on."""
        if self._runtime.draining:
            return
        self._runtime.draining = True
        self._runtime.saver.begin_drain()
        self._runtime.hooks.emit("drain", None)

    def begin(self, deadline: float | None) -> None:
        """Start the shutdown in the manager's own task, unless it has begun."""
        if not self._begun:
            self._begun = True
            self._runtime.host.spawn(self._run, deadline)

    async def torn_down(self) -> None:
        """Save what can be saved: the loop is being closed under an open manager."""
        if not self._begun:
            self._begun = True
            await self._run(None)

    async def _run(self, deadline: float | None) -> None:
        options = self._runtime.shutdown
        total = options.deadline if deadline is None else deadline
        start = self._runtime.clock()
        try:
            self.drain()
            await self._turns_end(min(options.turn_grace, total))
            self._runtime.saver.seal()
            left = max(total - (self._runtime.clock() - start), 0.0)
            report = await self._runtime.saver.aclose(deadline=left, hard_grace=options.hard_grace)
            report = self._spill(report)
            left = max(total - (self._runtime.clock() - start), 0.0)
            await self._let_go(left)
            took = self._runtime.clock() - start
            self.report = msgspec.structs.replace(report, duration=took)
        finally:
            self.done.set()

    def _spill(self, report: ShutdownReport) -> ShutdownReport:
        """Keep in local files what the store would not take, if a place for them was named."""
        folder = self._runtime.shutdown.spill
        if folder is None:
            return report
        kept: list[Unsaved] = []
        for one in report.unsaved + report.in_doubt:
            session = self._runtime.sessions.get(one.key)
            if session is None:
                continue
            tracked = session.tracked
            try:
                epoch, base = tracked.epoch, tracked.durable
                entries = spilling.sealed(
                    self._runtime.store, one.key, epoch=epoch, base=base, entries=tracked.pending
                )
                path = spilling.write(folder, one.key, epoch=epoch, base=base, entries=entries)
            except OSError as error:
                log.exception("spill failed", extra={"session": str(one.key)}, exc_info=error)
            else:
                log.warning("spilled", extra={"session": str(one.key), "path": path})
                kept.append(one)
        return _with_spilled(report, kept)

    async def _turns_end(self, grace: float) -> None:
        """Give open turns, and loads under way, time to come to their end."""
        with anyio.move_on_after(grace):
            for flight in list(self._runtime.flights.values()):
                await flight.done.wait()
            for session in list(self._runtime.sessions.values()):
                await session.turns_idle()

    async def _let_go(self, left: float) -> None:
        """Fold and release every session that is durable; others' leases expire."""
        clean = [one for one in self._runtime.sessions.values() if one.tracked.clean]
        with anyio.move_on_after(left):
            await self._each(clean, self._fold)
        with anyio.move_on_after(max(left, 1.0)):
            await self._each(clean, self._release)

    async def _each(
        self, sessions: list[Session], act: Callable[[Session], Awaitable[None]]
    ) -> None:
        """Act on each session, as many at once as the store can take."""
        rest = iter(sessions)

        async def work() -> None:
            for session in rest:
                await act(session)

        async with anyio.create_task_group() as group:
            for _ in range(min(len(sessions), self._runtime.store.capabilities.parallelism)):
                group.start_soon(work)

    async def _fold(self, session: Session) -> None:
        if session.tail_records:
            await self._keeper.fold(session)

    async def _release(self, session: Session) -> None:
        try:
            await self._runtime.store.release(session.key, session.epoch)
        except Exception as error:  # it expires by itself then
            log.warning("release failed", extra={"session": str(session.key)}, exc_info=error)


def _with_spilled(report: ShutdownReport, kept: list[Unsaved]) -> ShutdownReport:
    unsaved = tuple(one for one in report.unsaved if one not in kept)
    in_doubt = tuple(one for one in report.in_doubt if one not in kept)
    return msgspec.structs.replace(
        report,
        unsaved=unsaved,
        in_doubt=in_doubt,
        spilled=tuple(kept),
        clean=not (unsaved or in_doubt or report.quarantined or report.lost),
    )
