"""What the parts of one connected manager share. Values and owners, no behavior."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

import anyio
from anyio.lowlevel import checkpoint

from perdure._lib.host import Host
from perdure._lib.loop import Affinity, Stray
from perdure.autosave.engine import Autosaver
from perdure.autosave.options import Shutdown
from perdure.errors import WrongLoopError
from perdure.lease import LeaseOptions, OwnerWatch
from perdure.records.keys import SessionKey
from perdure.records.types import Registry
from perdure.session import spill
from perdure.session.hooks import Hooks
from perdure.session.options import Limits
from perdure.store import Store

if TYPE_CHECKING:
    from perdure.autosave.tracked import Tracked
    from perdure.records.records import Entry
    from perdure.session.base import SessionBase


# One operation at a time on a session: its load, its close, a change from outside


class PendingLoad:
    """Something under way with a session, for others to wait for."""

    __slots__ = ("done", "error", "scope")

    def __init__(self) -> None:
        self.done: anyio.Event = anyio.Event()
        self.error: Exception | None = None
        """Why a load has failed."""
        self.scope: anyio.CancelScope = anyio.CancelScope()
        """Around a load, if it is one: nobody wants that any more once its manager stops."""


PendingLoads: TypeAlias = dict[SessionKey, PendingLoad]
"""What is under way, one a session at most."""


async def wait_idle(pending_loads: PendingLoads, key: SessionKey) -> None:
    """Wait until nothing is under way with a session."""
    while (pending_load := pending_loads.get(key)) is not None:
        await pending_load.done.wait()


@asynccontextmanager
async def exclusive(pending_loads: PendingLoads, key: SessionKey) -> AsyncGenerator[None, None]:
    """Be exclusive with a session, once others are done with it."""
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
        del pending_loads[key]
        pending_load.done.set()


class Runtime:
    """One connected manager's parts."""

    __slots__ = (
        "append",
        "clock",
        "draining",
        "durability",
        "home",
        "hooks",
        "host",
        "lease",
        "limits",
        "loop",
        "max_record_bytes",
        "pending_loads",
        "registry",
        "running",
        "saver",
        "sessions",
        "shutdown",
        "spill_folder",
        "store",
        "store_record_bytes",
        "watch",
    )

    def __init__(
        self,
        *,
        store: Store,
        host: Host,
        saver: Autosaver,
        clock: Callable[[], float],
        registry: Registry,
        hooks: Hooks,
        lease: LeaseOptions,
        shutdown: Shutdown,
        limits: Limits,
    ) -> None:
        self.store: Store = store
        self.host: Host = host
        self.saver: Autosaver = saver
        self.clock: Callable[[], float] = clock
        self.registry: Registry = registry
        self.hooks: Hooks = hooks
        self.lease: LeaseOptions = lease
        self.watch: OwnerWatch = OwnerWatch(lease, clock)
        self.shutdown: Shutdown = shutdown
        self.limits: Limits = limits
        self.spill_folder: str | None = spill.folder_for(store, shutdown.spill)
        self.home: Affinity = Affinity()
        self.running: Callable[[], object] = self.home.running
        """Asked on each append, as ``append`` is: bound once."""
        self.loop: object = self.home.loop
        self.append: Callable[[Tracked, tuple[Entry, ...]], int] = saver.append
        self.sessions: dict[SessionKey, SessionBase] = {}
        """The sessions in memory. One stays until it is durable and its lease is released."""
        self.pending_loads: PendingLoads = {}
        self.draining: bool = False
        self.durability: str = store.capabilities.durability
        self.store_record_bytes: int = store.capabilities.max_record_bytes
        self.max_record_bytes: int = min(limits.record_bytes, self.store_record_bytes)


def wrong_loop(what: str, stray: Stray) -> WrongLoopError:
    """Return the error for a use from elsewhere, with the cure."""
    place, cure = {
        "fork": ("process", "connect again in the child process"),
        "thread": (
            "thread",
            "call it from its own, with anyio.from_thread.run or loop.call_soon_threadsafe",
        ),
        "loop": ("event loop", "connect again inside this loop"),
    }[stray]
    return WrongLoopError(f"{what} belongs to another {place}: {cure}", stray=stray)


# A clock for autosave that stands still until it is moved: what tests give to a manager


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


async def catch_up(runtime: Runtime) -> float:
    """Do what autosave has to do by now, and return when it will have more to do."""
    due = await runtime.saver.catch_up()
    # Sessions that became idle leave memory in tasks of their own. Those begin by the
    # second checkpoint: trio runs what is ready in any order.
    await checkpoint()
    await checkpoint()
    for key, pending_load in list(runtime.pending_loads.items()):
        session = runtime.sessions.get(key)
        if session is not None and _at_rest(session):
            await pending_load.done.wait()
    return due


def _at_rest(session: SessionBase) -> bool:
    """Whether a session can leave memory at once: no turn runs, and nothing is unsaved."""
    return not session._pins and not session._turns.busy and session._tracked.clean
