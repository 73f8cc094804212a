"""Stopping a manager: drain, seal, flush, fold, release, report. Always within a deadline."""

from __future__ import annotations

import atexit
import logging
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from perdure._lib.several import each
from perdure.autosave.shutdown import ShutdownReport, Unsaved
from perdure.autosave.tracked import Tracked
from perdure.errors import SessionClosedError
from perdure.model.keys import SessionKey
from perdure.session import spilling
from perdure.session.keeping import Keeper
from perdure.session.runtime import Runtime
from perdure.session.session import Session

__all__ = ["Closing"]

log: logging.Logger = logging.getLogger("perdure")

SPILLERS: Final = 8
"""Spill files that are written at once: a disk syncs several about as fast as one."""


class Closing:
    """The shutdown of one manager, done once, however often it is asked for."""

    def __init__(self, runtime: Runtime, keeper: Keeper) -> None:
        self._runtime = runtime
        self._keeper = keeper
        self.begun: bool = False
        self._until = 0.0
        """When the deadline is over, once the shutdown has begun."""
        self._ran: anyio.Event = anyio.Event()
        self.done: anyio.Event = anyio.Event()
        self.report: ShutdownReport | None = None
        runtime.host.at_end(self.done.set)  # whatever has ended it: nobody waits in vain
        if runtime.shutdown.spill is not None:
            atexit.register(self.at_exit)

    def drain(self) -> None:
        """Save everything as it comes, and open nothing new; turns go on."""
        if self._runtime.draining:
            return
        self._runtime.draining = True
        for flight in self._runtime.flights.values():
            flight.scope.cancel()  # a load: whoever waits for it is refused in any case
        self._runtime.saver.begin_drain()
        self._runtime.hooks.emit("drain", None)

    def begin(self, deadline: float | None) -> None:
        """Start the shutdown in the manager's own task, unless it has begun."""
        if not (self.begun or self.done.is_set()):
            self._begin(deadline)
            try:
                self._runtime.host.spawn(self._run)
            except BaseException:
                self.begun = False
                raise

    def _begin(self, deadline: float | None = None) -> None:
        total = self._runtime.shutdown.deadline if deadline is None else deadline
        self.begun, self._until = True, self._runtime.clock() + total

    async def torn_down(self) -> None:
        """Save what can be saved: the loop is ending under a manager that is open, or closing."""
        if not self.begun:
            self._begin()
            await self._run()
        await self._ran.wait()
        if not self.done.is_set():  # cut with all that ran: there is still time left
            await self._run()
        self.done.set()
        await self._runtime.store.aclose()  # nobody else may

    async def _run(self) -> None:
        try:
            self.report = await self._shut_down()
        except Exception:
            self.done.set()
            raise
        else:
            self.done.set()
            atexit.unregister(self.at_exit)
        finally:
            self._ran.set()

    async def _shut_down(self) -> ShutdownReport:
        options, clock, start = self._runtime.shutdown, self._runtime.clock, self._runtime.clock()
        self.drain()
        await self._turns_end(min(options.turn_grace, self._left()))
        self._runtime.saver.seal()
        grace = options.hard_grace
        report = await self._runtime.saver.aclose(deadline=self._left(), hard_grace=grace)
        report = await self._spill(report)
        await self._let_go(self._until + grace)
        self._close_all()
        return msgspec.structs.replace(report, duration=clock() - start)

    def _left(self) -> float:
        return max(self._until - self._runtime.clock(), 0.0)

    async def _spill(self, report: ShutdownReport) -> ShutdownReport:
        """Keep in local files what the store would not take, if a place for them was named."""
        folder = self._runtime.shutdown.spill
        left = report.unsaved + report.in_doubt
        tracked = [one.tracked for one in map(self._runtime.sessions.get, _keys(left)) if one]
        tracked += [one for one in self._runtime.saver.lost if one.pending]
        if folder is None or not tracked:
            return report
        spilled: set[_Id] = set()

        async def spill(one: Tracked) -> None:
            if await to_thread.run_sync(self._spill_one, folder, one):
                spilled.add((one.key, one.durable, one.version))

        await each(tracked, spill, at_once=SPILLERS)
        settled = await to_thread.run_sync(_settled, folder)
        return _with_spilled(report, spilled if settled else set())

    def _spill_one(self, folder: str, tracked: Tracked) -> bool:
        key, epoch, base = tracked.key, tracked.epoch, tracked.durable
        try:
            entries = spilling.sealed(
                self._runtime.store, key, epoch=epoch, base=base, entries=tracked.pending
            )
            path = spilling.write(folder, key, epoch=epoch, base=base, entries=entries)
        except Exception as error:  # the others' are to be kept all the same
            log.exception("spill failed", extra={"session": str(key)}, exc_info=error)
            return False
        log.warning("spilled", extra={"session": str(key), "path": path})
        return True

    def at_exit(self) -> None:
        """Spill what nobody will save any more: the process ends, and its loop was just left."""
        folder = self._runtime.shutdown.spill
        if folder is None or self.report is not None or self._runtime.home.stray() == "fork":
            return
        open_here = [one.tracked for one in self._runtime.sessions.values()]
        left = [one for one in open_here if one.pending and one.end is None]
        spilled = [
            self._spill_one(folder, one) for one in left + self._runtime.saver.lost if one.pending
        ]
        if any(spilled):
            _settled(folder)

    async def _turns_end(self, grace: float) -> None:
        """Give open turns, and loads under way, time to come to their end."""
        with anyio.move_on_after(grace):
            for flight in list(self._runtime.flights.values()):
                await flight.done.wait()
            for session in list(self._runtime.sessions.values()):
                await session.turns_idle()

    async def _let_go(self, at_most: float) -> None:
        """Fold and release every session that is durable; others' leases expire."""
        clean = [one for one in self._runtime.sessions.values() if one.tracked.clean]
        at_once = self._runtime.store.capabilities.parallelism
        with anyio.CancelScope(deadline=self._until):
            await each(clean, self._fold, at_once=at_once)
        with anyio.CancelScope(deadline=at_most):
            await each(clean, self._keeper.release, at_once=at_once)

    def _close_all(self) -> None:
        """Have whoever still holds a session hear that it is closed, whatever is asked of it."""
        for session in self._runtime.sessions.values():
            if session.closed_by is None:
                message = f"session {session.key} is closed with its manager: call connect(…) again"
                session.closed_by = SessionClosedError(message, key=str(session.key))

    async def _fold(self, session: Session) -> None:
        if session.tail_records:
            await self._keeper.fold(session)


def _settled(folder: str) -> bool:
    """Make spill files durable; False if that fails, and then they may be lost."""
    try:
        spilling.settle(folder)
    except OSError as error:
        log.exception("spill failed", extra={"path": folder}, exc_info=error)
        return False
    return True


def _with_spilled(report: ShutdownReport, spilled: set[_Id]) -> ShutdownReport:
    lists: dict[str, tuple[Unsaved, ...]] = {}
    kept: list[Unsaved] = []
    for name in ("unsaved", "in_doubt", "lost"):
        ones: tuple[Unsaved, ...] = getattr(report, name)
        # A file has what was unsaved, not what a store has lost: that is still to be told.
        safe = [one for one in ones if _id(one) in spilled and not one.missing]
        kept += safe
        lists[name] = tuple([one for one in ones if one not in safe])
    clean = not (any(lists.values()) or report.quarantined)
    return msgspec.structs.replace(report, **lists, spilled=tuple(kept), clean=clean)


_Id = tuple[SessionKey, int, int]
"""Which records of which session: one may have been lost more than once."""


def _id(one: Unsaved) -> _Id:
    return one.key, one.durable, one.version


def _keys(ones: tuple[Unsaved, ...]) -> list[SessionKey]:
    return [one.key for one in ones]
