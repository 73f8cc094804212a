"""What the parts of one connected manager share. Values and owners, no behavior."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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
from perdure.session.key_lock import PendingLoads
from perdure.session.options import Limits
from perdure.store import Store

if TYPE_CHECKING:
    from perdure.autosave.tracked import Tracked
    from perdure.records.records import Entry
    from perdure.session.base import SessionBase


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
