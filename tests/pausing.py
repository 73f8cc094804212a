"""A store whose calls wait at a chosen place until a test lets them go on.

Two tasks, or two managers over one place, then meet in the same order each time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, cast, final

import anyio
from anyio.abc import TaskGroup

from perdure.records.keys import SessionKey
from perdure.store import Batch, LogChunk, Outcome, Store
from perdure.stores.delegate import DelegatingStore
from perdure.testing.faulty import _Intercepted

_OWN = frozenset({"heartbeat", "wait_for_notification"})


@final
class Pause:
    """One call that waits: ``reached`` when it has come, ``go`` lets it go on."""

    def __init__(
        self, method: str | None, fits: Callable[..., bool], *, nth: int, after: bool
    ) -> None:
        self.method = method
        self.after = after
        self.reached = anyio.Event()
        self._go = anyio.Event()
        self._fits = fits
        self._left = nth

    def go(self) -> None:
        self._go.set()

    def is_due(self, method: str, args: tuple[Any, ...]) -> bool:
        wanted = method == self.method if self.method else method not in _OWN
        if self.reached.is_set() or not wanted or not self._fits(*args):
            return False
        self._left -= 1
        return self._left == 0

    async def here(self) -> None:
        self.reached.set()
        await self._go.wait()


@final
class PausingStore(DelegatingStore):
    """Forward every call, but the ones that a test has asked to wait."""

    def __init__(self, store: Store) -> None:
        super().__init__(cast("Store", _Intercepted(store, self._call)))
        self._store = store
        self._pauses: list[Pause] = []
        self.left: int | None = None
        """How many calls are still answered; None for all."""

    async def _answers(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:  # as of a server that cannot be reached
                await anyio.sleep_forever()

    def pause(
        self,
        method: str | None,
        fits: Callable[..., bool] = lambda *_: True,
        *,
        nth: int = 1,
        after: bool = False,
    ) -> Pause:
        """Have the n-th call from now on wait whose arguments fit: before it is made, or after.

        None is any method but those by which a manager renews its heartbeat.
        """
        self._pauses.append(pause := Pause(method, fits, nth=nth, after=after))
        return pause

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        await self._answers()
        due = [pause for pause in self._pauses if pause.is_due(method, args)]
        for pause in due:
            if not pause.after:
                await pause.here()
        result = await getattr(self._store, method)(*args, **options)
        for pause in due:
            if pause.after:
                await pause.here()
        return result

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        return cast("list[Outcome]", await self._call("append_many", batches))

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        await self._answers()
        due = [pause for pause in self._pauses if pause.is_due("read_log", (key,))]
        for pause in due:
            if not pause.after:
                await pause.here()
        read = partial(self._store.read_log, key, after=after, before=before)
        async with aclosing(read(limit=limit, reverse=reverse)) as log:
            async for chunk in log:
                yield chunk
        for pause in due:
            if pause.after:
                await pause.here()


async def meanwhile(
    pause: Pause, begun: Callable[[], Awaitable[Any]], then: Callable[[], Awaitable[Any]]
) -> Any:
    """Begin something, do something else when it has come to the pause, and return its result."""
    results: list[Any] = []

    async def begin() -> None:
        results.append(await begun())

    async with anyio.create_task_group() as group:
        group.start_soon(begin)
        with anyio.fail_after(20):
            await pause.reached.wait()
        await then()
        pause.go()
    return results[0]


async def reached_or_ended(
    pause: Pause, group: TaskGroup, begun: Callable[[], Awaitable[Any]]
) -> bool:
    """Begin something in a group; return once it has come to the pause, or has ended: which?"""
    either = anyio.Event()

    async def begin() -> None:
        try:
            await begun()
        finally:
            either.set()

    async def wait() -> None:
        await pause.reached.wait()
        either.set()

    group.start_soon(begin)
    async with anyio.create_task_group() as waiting:
        waiting.start_soon(wait)
        await either.wait()
        waiting.cancel_scope.cancel()
    return not pause.reached.is_set()
