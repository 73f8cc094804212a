"""Runtime of one connected manager: the parts that its modules share, and its key locks.

A key lock lets one operation at a time work on a session: its load, its close, or a change by
`ExclusiveAccess`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    Protocol,
    TypeAlias,
    final,
)

import anyio

from perdure._lib.loop import Affinity, Stray, loop_clock
from perdure._lib.tasks import Host, task_finder
from perdure.autosave.engine import Autosaver
from perdure.autosave.options import Autosave, EngineOptions, Shutdown
from perdure.errors import InvalidArgumentError, PerdureError, StoreUnavailableError, WrongLoopError
from perdure.lease import LeaseOptions, OwnerWatch
from perdure.memory.media import MediaBudget
from perdure.records.keys import SessionKey
from perdure.records.types import Registry
from perdure.session import spill
from perdure.session.events import Hooks
from perdure.session.media import Filled
from perdure.session.options import Limits
from perdure.session.retention import Retention
from perdure.session.stored import SessionStore

if TYPE_CHECKING:
    from perdure.autosave.tracked import Tracked
    from perdure.records.records import Entry
    from perdure.store import LeaseState, Store


log: logging.Logger = logging.getLogger("perdure")


class PendingLoad:
    """An operation under way with a session, for others to wait for."""

    __slots__ = ("done", "error", "holder", "scope")

    def __init__(self, scope: anyio.CancelScope | None = None) -> None:
        self.done: anyio.Event = anyio.Event()
        self.error: Exception | None = None
        """Causes of failed loads."""
        self.holder: LeaseState | None = None
        """The owner that a load waits for, of another process."""
        self.scope: anyio.CancelScope | None = scope
        """Around a load, if it is one: cancelled when its manager stops."""

    def note_holder(self, holder: LeaseState) -> None:
        """Note whom a load waits for."""
        self.holder = holder


LEAST_PATIENCE = 2.0
"""Seconds that a store has to answer where a caller waits for less."""
_ASKING = 1 / 3
"""The last part of a wait, in which the store is asked for a sign."""
_AGAIN = 0.05
"""Seconds between two such questions that the store refuses."""


def require_seconds(option: str, value: Any) -> None:
    """Raise InvalidArgumentError for a value that is no number of seconds."""
    if not isinstance(value, int | float) or not value >= 0:
        raise InvalidArgumentError(
            f"invalid {option}={value!r}: give seconds, 0 or more", option=option
        )


@final
class Patience:
    """For how long a caller waits for a store that gives no sign: for a call's own ``wait``.

    A store that can be reached may take its time, for a long log, say; and 0 seconds are meant for
    other processes: then the store's own time limits count.
    """

    def __init__(self, store: Store, key: SessionKey, wait: float) -> None:
        require_seconds("wait", wait)
        self.seconds: float = max(wait, LEAST_PATIENCE) if wait else math.inf
        self._store = store
        self._key = key
        self._until = anyio.current_time() + self.seconds
        self._last = 0.0 if math.isinf(self.seconds) else self.seconds * _ASKING

    async def wait_for(self, done: anyio.Event, until: float = math.inf) -> None:
        """Wait for background work, or until a time, while the store gives signs.

        Raises:
            StoreUnavailableError: It gave none, and the event is not set.

        """
        while not done.is_set() and anyio.current_time() < until:
            asks_at = self._until - self._last
            with anyio.CancelScope(deadline=min(until, asks_at)):
                await done.wait()
                return
            if anyio.current_time() >= asks_at and not await self._signs() and not done.is_set():
                raise StoreUnavailableError(
                    f"the store has not answered for {self.seconds:g} s; what was asked of session "
                    f"{self._key} continues in the background: look whether the store can be "
                    "reached, and do it again",
                    key=str(self._key),
                    wait=self.seconds,
                )

    async def _signs(self) -> bool:
        """Ask the store for a sign; return False if it gives none within what is left."""
        # A loop that was blocked until now leaves the store no less time than any other.
        with anyio.CancelScope(deadline=anyio.current_time() + self._last):
            while True:
                try:
                    await self._store.head(self._key)
                except StoreUnavailableError:
                    await anyio.sleep(_AGAIN)
                    continue
                except PerdureError:
                    pass  # that is a sign, too
                self._until = anyio.current_time() + self.seconds
                return True
        return False


PendingLoads: TypeAlias = dict[SessionKey, PendingLoad]
"""The operations under way, one for each session at most."""


async def wait_idle(pending_loads: PendingLoads, key: SessionKey) -> None:
    """Wait until nothing is under way with a session."""
    # Another operation may begin before this task wakes.
    while (pending_load := pending_loads.get(key)) is not None:
        await pending_load.done.wait()


@asynccontextmanager
async def exclusive(pending_loads: PendingLoads, key: SessionKey) -> AsyncGenerator[None, None]:
    """Lock a session's key, once other operations are done with it."""
    await wait_idle(pending_loads, key)
    with try_exclusive(pending_loads, key):
        yield


@contextmanager
def try_exclusive(pending_loads: PendingLoads, key: SessionKey) -> Iterator[bool]:
    """Enter a session exclusively; yield False, without entering, if another task is inside."""
    if key in pending_loads:
        yield False
        return
    pending_load = pending_loads[key] = PendingLoad()
    try:
        yield True
    finally:
        # First: who wakes finds the key free.
        del pending_loads[key]
        pending_load.done.set()


class ManagerOptions(NamedTuple):
    """The arguments that a manager was connected with."""

    registry: Registry
    autosave: Autosave | None
    engine: EngineOptions
    lease: LeaseOptions
    shutdown: Shutdown
    limits: Limits
    clock: Clock | None
    """A test's, for autosave."""
    retention: Retention | None


class Runtime:
    """One connected manager's parts."""

    def __init__(self, store: SessionStore, host: Host, options: ManagerOptions) -> None:
        self.store: SessionStore = store
        self.filled: Store = Filled(store) if store.capabilities.blobs else store
        """The store as messages are read from it: one for all sessions."""
        self.host: Host = host
        self.hooks: Hooks = Hooks(host)
        self.clock: Callable[[], float] = loop_clock()
        tests_clock = options.clock
        self.saver: Autosaver = Autosaver(
            store,
            host,
            autosave=options.autosave,
            engine=options.engine,
            clock=tests_clock or self.clock,
            ticking=tests_clock is None,
            seed=None if tests_clock is None else 0,  # a test is to run the same way each time
            on_event=self.hooks.emit,
        )
        self.saver.report_saves(wanted=False)  # until there is a hook
        self.registry: Registry = options.registry
        self.lease: LeaseOptions = options.lease
        self.watch: OwnerWatch = OwnerWatch(options.lease, self.clock)
        self.shutdown: Shutdown = options.shutdown
        self.limits: Limits = options.limits
        self.media_budget: MediaBudget = MediaBudget(
            self.limits.context_media_tokens, self.limits.media_tokens
        )
        self.retention: Retention | None = options.retention
        self.spill_folder: str | None = spill.folder_for(store, self.shutdown.spill)
        self.home: Affinity = Affinity()
        self.running: Callable[[], object] = self.home.running
        """Asked on each append, as ``append`` is: bound once."""
        self.find_task: Callable[[], object] = task_finder()
        self.loop: object = self.home.loop
        self.append: Callable[[Tracked, tuple[Entry, ...]], int] = self.saver.append
        self.pending_loads: PendingLoads = {}
        self.turn_waits: dict[object, str] = {}
        """Turns that wait for the one in which they were begun, with what is reported of them."""
        self.draining: bool = False
        self.durability: str = store.capabilities.durability
        self.store_record_bytes: int = store.capabilities.max_record_bytes
        self.max_record_bytes: int = min(self.limits.record_bytes, self.store_record_bytes)


def wrong_loop(what: str, stray: Stray) -> WrongLoopError:
    """Return the error for a use from elsewhere, with the cure."""
    place, cure = {
        "fork": ("process", "connect again in the child process"),
        "thread": (
            "thread",
            (
                "call it in the loop's: anyio.from_thread.run_sync(session.append, …) where "
                "anyio.to_thread started this one, else loop.call_soon_threadsafe(session.append, "
                "…); and asyncio.run_coroutine_threadsafe(session.save(), loop).result() waits for "
                "what is async. Without async, perdure.sync is for any thread"
            ),
        ),
        "loop": ("event loop", "connect again inside this loop"),
    }[stray]
    return WrongLoopError(f"{what} belongs to another {place}: {cure}", stray=stray)


class Clock(Protocol):
    """Clock in seconds that moves only when it is advanced."""

    def __call__(self) -> float:
        """Return the time."""
        ...

    def drive(self, catch_up: Callable[[], Awaitable[float]]) -> None:
        """Await ``catch_up`` from now on each time that the clock was moved.

        It returns when there will be more to do.
        """
        ...
