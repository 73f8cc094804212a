"""Waiting for autosave: for a version to become durable, for a session to settle, for room."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import final

import anyio

from perdure._lib.loop import event_maker
from perdure.autosave import errors
from perdure.autosave.core import Core
from perdure.autosave.tracked import Tracked, Waiter, Waiters


@final
class SaveWaiters:
    """Let callers wait.

    Args:
        core: Knows how far each session is.
        clock: The loop's.

    """

    def __init__(self, core: Core, clock: Callable[[], float]) -> None:
        self._core = core
        self._pressure = core.registry.pressure
        self._clock = clock
        self._new_event = event_maker()
        self._room: anyio.Event | None = None

    def check(self, t: Tracked) -> None:
        """Raise if nothing more of a session will become durable."""
        if t.end is not None or self._core.stopped:
            raise errors.ended(t)

    async def durable(self, t: Tracked, version: int) -> None:
        """Wait until a version is durable, or raise because it will not be."""
        while t.durable < version:
            self.check(t)
            errors.require_outside(t, "to wait until it is durable")
            await self._woken(t, version)

    async def settled(self, t: Tracked, version: int) -> None:
        """Wait until a version is durable, or will not be; raise nothing."""
        while t.durable < version and t in self._core.registry.unsaved and not self._core.stopped:
            await self._woken(t, version)

    async def _woken(self, t: Tracked, version: int) -> None:
        woken = self._new_event()
        waiters = t.waiters = t.waiters or Waiters()
        number = waiters.add(Waiter(version, woken.set))
        try:
            await woken.wait()
        finally:
            t.give_up(number, waiters)

    async def room(self, t: Tracked) -> None:
        """Wait while too much is unsaved, then let one append of the session through."""
        if self._has_room():
            return
        engine = self._core.engine
        if engine.outage_policy == "backpressure":
            with anyio.move_on_after(engine.backpressure_timeout):
                while not self._has_room():
                    self._room = self._room or anyio.Event()
                    await self._room.wait()
        self.check(t)
        if not self._has_room():
            raise self._core.registry.overloaded(t, self._clock())
        t.granted = True

    def _has_room(self) -> bool:
        return self._core.stopped or not self._pressure.blocking

    def make_room(self) -> None:
        """Wake those who wait for room, if there is some."""
        if self._room is not None and self._has_room():
            self._room.set()
            self._room = None

    def wake(self, waiters: Iterable[Waiter]) -> None:
        """Wake those whose wait is over."""
        for waiter in waiters:
            waiter.wake()
