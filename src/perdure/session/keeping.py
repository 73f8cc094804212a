"""Looking after open sessions: pins, folds, hibernation, handover, close.

A session leaves memory only when it is durable, or when nobody can write it any more; it stays
registered until its lease is released, so that a load cannot meet a close half-way.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio

from perdure._lib.host import HostClosedError
from perdure.errors import (
    LeaseLostError,
    PerdureError,
    SessionClosedError,
    SessionNotFoundError,
    SessionQuarantinedError,
    UnsavedChangesError,
)
from perdure.session.events import SessionClosed, SessionFolded, SessionFoldFailed
from perdure.session.folding import LEAST_TAIL, fold, fold_due, fold_first, phase_of
from perdure.session.remembering import read_again
from perdure.session.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from perdure.model.keys import SessionKey
    from perdure.session.session import Session

__all__ = ["Keeper"]

log: logging.Logger = logging.getLogger("perdure")

FIRST_TURN = 0.1
"""Seconds that whoever opens a session has to begin a turn, before it is handed over."""
PATIENCE = 1.0
"""Seconds that a handover keeps turns waiting for the store."""
MOST_GIVEN = 1000
"""Sessions that we know to have given away."""


class Keeper:
    """What happens to sessions between open and close."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked: set[SessionKey] = set()
        self._given: dict[SessionKey, int] = {}

    # pins

    def keep(self, session: Session) -> Session:
        """Wire a session that was just loaded to the engine."""
        tracked = session.tracked
        tracked.on_saved = lambda _: self._saved(session)
        tracked.on_idle = lambda: self._runtime.host.spawn(self.idle, session)
        tracked.on_lost = lambda: self.lost(session)
        if self._runtime.hooks.has("before_save"):
            tracked.before_capture = lambda: self._runtime.hooks.run("before_save", session)
        return session

    def pin(self, session: Session, *, force: bool = False) -> None:
        """Let somebody hold a session.

        Raises:
            SessionQuarantinedError: It is quarantined, and ``force`` is False.

        """
        tracked = session.tracked
        if tracked.quarantined and not force:
            message = (
                f"session {session.key} is quarantined: the store refuses a record of it; "
                "open it with force=True to see what is unsaved"
            )
            raise SessionQuarantinedError(message, key=str(session.key)) from tracked.last_error
        session.pins += 1
        tracked.pins = session.pins

    def unpin(self, session: Session) -> None:
        """Let go of a session; autosave and hibernation own it from then on."""
        session.pins = max(session.pins - 1, 0)
        session.tracked.pins = session.pins
        if session.pins == 0 and session.closed_by is None:
            self._runtime.saver.touch(session.tracked)

    # folds

    def _saved(self, session: Session) -> None:
        """Decide, after each save, whether to fold."""
        if session.folding or self._runtime.draining or session.closed_by is not None:
            return
        limits = self._runtime.limits
        if session.tail_bytes < LEAST_TAIL and session.tail_records < limits.fold_records:
            return  # nearly always: the rest costs more than this
        due = fold_due(
            tail_bytes=session.tail_bytes,
            tail_records=session.tail_records,
            rewrite_bytes=session.rewrite_bytes,
            limits=limits,
            phase=phase_of(session.key),
        )
        if due and not self._runtime.saver.crowded:
            session.folding = True
            self._runtime.host.spawn(self._fold_in_lane, session)

    async def _fold_in_lane(self, session: Session) -> None:
        try:
            # It may wait until the manager has closed: then the next holder folds.
            with suppress(HostClosedError):
                await self._runtime.saver.exclusive(session.tracked, lambda: self.fold(session))
        finally:
            session.folding = False

    async def fold(self, session: Session) -> None:
        """Fold what is durable of a session; a failure is an event and a warning."""
        runtime, upto = self._runtime, session.tracked.durable
        tail = (session.tail_bytes, session.tail_records)
        try:
            manifest = await fold(
                runtime.store,
                session.key,
                epoch=session.epoch,
                upto=upto,
                limits=runtime.limits,
                mend=tuple(session._contents.damaged),
            )
        except PerdureError as error:
            log.warning("fold failed", extra={"session": str(session.key)}, exc_info=error)
            runtime.hooks.emit("fold_failed", SessionFoldFailed(str(session.key), error))
            return
        if manifest is not None:
            session.folded(manifest, tail)
            runtime.hooks.emit("folded", SessionFolded(str(session.key), upto))

    # leaving memory

    async def idle(self, session: Session) -> None:
        """Hibernate a session that nobody holds and nobody has changed for long."""
        async with self._leaving(session.key) as free:
            if free and session.contributors is not None and session.closed_by is None:
                await self._runtime.saver.contribute(session.tracked)
            if free and session.closed_by is None and not session.pins and session.tracked.clean:
                await self._leave(session, "hibernated", _hibernated(session.key))

    async def hand_over(self, key: SessionKey) -> None:
        """Give a session to another process that asks: end the turn, save, fold, release."""
        if key in self._asked:
            return
        self._asked.add(key)
        try:
            await self._hand_over(key)
        finally:
            self._asked.discard(key)

    async def _hand_over(self, key: SessionKey) -> None:
        runtime = self._runtime
        while (flight := runtime.flights.get(key)) is not None:
            await flight.done.wait()
        session = runtime.sessions.get(key)
        if session is None:
            return
        # Whoever has just got it has a turn first, or two who ask would get none done.
        await session._turns.used(FIRST_TURN)
        await runtime.saver.save(session.tracked)  # as long as the store takes, turns go on
        async with self._leaving(key) as free:
            if not free or runtime.draining or runtime.sessions.get(key) is not session:
                return  # it is being let go of already, or will be when the manager stops
            await session._turns.enter(str(key))  # behind those that wait already
            try:
                await self._give(session)
            finally:
                session._turns.leave()

    async def _give(self, session: Session) -> None:
        """Let go of a session between two of its turns; no turn waits long for a store."""
        with anyio.move_on_after(PATIENCE) as scope:
            await self._runtime.saver.save(session.tracked)
        if scope.cancelled_caught:
            return  # whoever wants it asks again
        message = (
            f"session {session.key} was handed over to another process that asked for it: "
            "open it again to ask for it back"
        )
        lost = LeaseLostError(message, key=str(session.key))
        await self._leave(session, "handed over", lost)
        self._given[session.key] = session.epoch
        if len(self._given) > MOST_GIVEN:
            del self._given[next(iter(self._given))]

    def given(self, key: SessionKey) -> int:
        """Return the epoch in which a session was handed over from here last, once; else 0."""
        return self._given.pop(key, 0)

    async def close(self, session: Session) -> None:
        """Save, fold and release a session for everybody in this process."""
        if session.closed_by is None:
            await self._runtime.host.call(self._close, session)

    async def _close(self, session: Session) -> None:
        deadline = self._runtime.shutdown.deadline
        async with self._leaving(session.key) as free:
            if not free or session.closed_by is not None:
                return
            with anyio.move_on_after(deadline) as scope:
                await session.turns_idle()
                await self._runtime.saver.save(session.tracked)
                await self._leave(session, "closed", _closed(session.key))
            if scope.cancelled_caught:
                message = (
                    f"session {session.key} could not be saved within {deadline} s; it stays open "
                    "and goes on trying: look at sessions.health()"
                )
                raise UnsavedChangesError(message, key=str(session.key))

    async def discard(self, session: Session) -> int:
        """Drop what is not durable of a session, and return how many records that were."""
        dropped = self._runtime.saver.discard(session.tracked)
        await read_again(session)
        return dropped

    async def delete(self, session: Session) -> None:
        """Drop a session that is being deleted, unsaved changes and all."""
        gone = SessionNotFoundError(f"session {session.key} was deleted", key=str(session.key))
        session.closed_by = gone
        await self._runtime.saver.abandon(session.tracked)
        self._forget(session, "deleted")

    def lost(self, session: Session) -> None:
        """Somebody else has taken a session: nobody can write it here any more."""
        if session.closed_by is not None:
            return
        unsaved = session.version - session.durable_version
        message = (
            f"session {session.key} was taken over by another process, with {unsaved} records "
            "unsaved here: open it again to go on"
        )
        session.closed_by = LeaseLostError(message, key=str(session.key), unsaved=unsaved)
        self._forget(session, "lost")

    async def _leave(self, session: Session, why: str, closed_by: Exception) -> None:
        """Seal a session that is durable, fold it, release it and forget it."""
        runtime, tracked = self._runtime, session.tracked
        runtime.saver.seal(tracked)
        if not tracked.clean:  # changed between the save and the seal
            await runtime.saver.save(tracked)
        session.closed_by = closed_by
        hurried = why == "handed over" and not fold_first(
            tail_bytes=session.tail_bytes,
            tail_records=session.tail_records,
            rewrite_bytes=session.rewrite_bytes,
        )
        if session.tail_records and not hurried:
            await runtime.saver.exclusive(tracked, lambda: self.fold(session), urgent=True)
        await runtime.store.release(session.key, session.epoch)
        self._forget(session, why)

    def _forget(self, session: Session, why: str) -> None:
        if self._runtime.sessions.get(session.key) is session:
            del self._runtime.sessions[session.key]
        self._runtime.saver.untrack(session.tracked)
        facts = SessionClosed(str(session.key), why, session.tracked.durable)
        self._runtime.hooks.emit("closed", facts)

    @asynccontextmanager
    async def _leaving(self, key: SessionKey) -> AsyncGenerator[bool, None]:
        """Keep loads of a key waiting; False when a load or close is under way already."""
        from perdure.session.loading import Flight

        flights = self._runtime.flights
        if key in flights:
            yield False
            return
        flight = flights[key] = Flight()
        try:
            yield True
        finally:
            del flights[key]
            flight.done.set()


def _closed(key: SessionKey) -> SessionClosedError:
    message = f"session {key} is closed: open it again with sessions.open(…)"
    return SessionClosedError(message, key=str(key))


def _hibernated(key: SessionKey) -> SessionClosedError:
    message = (
        f"session {key} was idle and left memory after its last `async with` ended: "
        "open it again with sessions.open(…)"
    )
    return SessionClosedError(message, key=str(key))
