"""The session manager: opens, keeps, hibernates and closes sessions over one store.

It owns the autosave engine, the leases and the shutdown. Everything that must go on when a
caller is cancelled runs in its host task, so a manager may be opened in one task and
closed in another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

import anyio

from perdure._lib.display import card
from perdure._lib.host import Host
from perdure._lib.waiting import wait_through
from perdure.autosave.core import INHERIT, Inherit
from perdure.autosave.refusals import require_outside
from perdure.autosave.shutdown import ShutdownReport
from perdure.codec.registry import Registry
from perdure.errors import SessionClosedError, StoreError
from perdure.model.keys import DEFAULT_SESSION, SessionKey
from perdure.restore.ladder import restore
from perdure.session.clock import Clock
from perdure.session.connected import Connected, connected
from perdure.session.display import manager_facts
from perdure.session.hooks import EventName, Hook
from perdure.session.inbox import PostReceipt
from perdure.session.lineage import followed
from perdure.session.loading import Opening, Wanted
from perdure.session.lost import LostSession
from perdure.session.options import (
    Autosave,
    Engine,
    Lease,
    Limits,
    OnHeld,
    Shutdown,
    require_options,
)
from perdure.session.restoring import Restoring
from perdure.session.runtime import wrong_loop
from perdure.session.view import SessionView
from perdure.store import DeadLetter, SessionInfo, Store

if TYPE_CHECKING:
    from perdure.autosave.driver import Health

__all__ = ["SessionManager"]


@final
class SessionManager(Restoring):
    """Keep the sessions of one process: ``async with perdure.connect(…) as sessions``.

    Also awaitable, for frameworks that close by ``aclose``. May be opened in one task and closed in
    another of the same event loop.
    """

    def __init__(
        self,
        store: Store,
        *,
        autosave: Autosave | None,
        lease: Lease,
        shutdown: Shutdown,
        limits: Limits,
        types: Sequence[Any] = (),
        engine: Engine | None = None,
        clock: Clock | None = None,
    ) -> None:
        engine = Engine() if engine is None else engine
        require_options(
            autosave=autosave, lease=lease, shutdown=shutdown, limits=limits, engine=engine
        )
        self.registry: Registry = Registry(types)
        self._store = followed(store)
        self._autosave = autosave
        self._engine = engine
        self._lease = lease
        self._shutdown = shutdown
        self._limits = limits
        self._clock = clock  # a test's, for autosave
        self._connected: Connected | None = None
        self._started = False

    def __repr__(self) -> str:
        return f"<SessionManager {', '.join(map(str, manager_facts(self._connected).values()))}>"

    def _repr_html_(self) -> str:
        return card("SessionManager", manager_facts(self._connected))

    # its life

    def __await__(self) -> Generator[Any, None, Self]:
        return self._start().__await__()

    if not TYPE_CHECKING:  # which knows better without

        def __enter__(self) -> None:
            message = (
                "connect(…) is asynchronous: use `async with perdure.connect(…) as sessions`, or "
                "`import perdure.sync` and `with perdure.sync.connect(…) as sessions` in a program "
                "without an event loop"
            )
            raise TypeError(message)

        def __exit__(self, *_: object) -> None:
            """Never called: it makes `with` get as far as the message."""

    async def __aenter__(self) -> Self:
        return await self._start()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        connected = self._connected
        report = await self._close(None)
        if connected is not None and connected.signals.received:
            await connected.signals.end_process()
        if exc_type is None or issubclass(exc_type, Exception):
            report.raise_if_unsaved()

    async def _start(self) -> Self:
        if self._started:
            message = "this manager was started before: call connect(…) again for a new one"
            raise SessionClosedError(message)
        self._started = True
        self._connected = await connected(
            self._store,
            registry=self.registry,
            autosave=self._autosave,
            engine=self._engine,
            lease=self._lease,
            shutdown=self._shutdown,
            limits=self._limits,
            clock=self._clock,
            close=self.aclose,
        )
        return self

    def _check(self) -> Connected:
        if self._connected is None:
            message = (
                "this manager is not connected: use `async with connect(…) as sessions` "
                "or `sessions = await connect(…)`"
            )
            raise SessionClosedError(message)
        stray = self._connected.runtime.home.stray()
        if stray is not None:
            raise wrong_loop("this manager", stray)
        if self._connected.closing.done.is_set():
            message = "this manager is closed: call connect(…) again"
            raise SessionClosedError(message)
        return self._connected

    # sessions

    def open(
        self,
        id: str,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
        owner: str | None = None,
        tags: Sequence[str] = (),
        create: bool = True,
        new: bool = False,
        on_held: OnHeld = "handover",
        wait: float = 10.0,
        force: bool = False,
        strict: bool = False,
        autosave: Autosave | Inherit | None = INHERIT,
    ) -> Opening:
        """Open a session to write: await it, or ``async with`` it.

        Everybody in this process who opens the same id shares one object, and what the last of
        them says of it counts: tags, autosave. Leaving ``async with`` lets go of it;
        autosave owns it from then on.

        Args:
            id: The agent's id.
            session: Which of its conversations.
            tenant: Whose it is, where customers share a store.
            owner: Who it belongs to, kept as metadata: a label, which opening gives to a session
                that has none, and never changes.
            tags: Kept as metadata.
            create: Whether to make a session that does not exist.
            new: Whether it has to be a new one: never go on with what is stored.
            on_held: What to do if another process holds it: ask for a handover and wait,
                raise at once, or steal it once its holder has expired.
            wait: Seconds to wait for another process.
            force: Open it even if it is quarantined in this process.
            strict: Raise if one of its documents cannot be used, instead of making it anew.
            autosave: This session's own settings; None for no timers.

        Raises:
            ConfigError: An argument does not fit, or ``new`` is True and ``create`` is False.
            LeaseHeldError: Another process goes on holding it.
            SessionNotFoundError: It does not exist, and ``create`` is False.
            SessionError: It exists, and ``new`` is True; or it has another owner.
            SessionQuarantinedError: The store refuses one of its records for good.
            CorruptRecordError: Its log is damaged before the tail; if strict, or a document is.
            UnsupportedVersionError: A newer release wrote it.
            StoreUnavailableError: The store cannot be reached.

        """
        wanted = Wanted(
            key=SessionKey(id, session, tenant),
            owner=owner,
            tags=tags,
            create=create,
            new=new,
            on_held=on_held,
            wait=wait,
            force=force,
            strict=strict,
            autosave=autosave,
        )
        return Opening(self._check().opener, wanted)

    async def load(
        self,
        id: str,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> SessionView | None:
        """Read a session without a lease, as of now; None if there is none.

        Of a session that is open here, it shows what is durable.
        """
        self._check()
        key = SessionKey(id, session, tenant)
        restored = await restore(self._store, key, context_bytes=self._limits.context_bytes)
        return SessionView(self._store, self.registry, restored) if restored.head else None

    async def post(
        self,
        id: str,
        *items: Any,
        key: str | None = None,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> PostReceipt:
        """Leave items for a session, durably, whoever has it; it need not exist yet.

        Whoever holds the session, or opens it next, appends them as one group between two turns,
        once, and its manager tells by the event ``posted``. Cancelling may come too late, never
        half-way.

        Args:
            id: The agent's id.
            items: As for ``Session.append``.
            key: What names this post, such as a request's id: a retry with the same key
                posts nothing twice. By default a new one.
            session: Which of its conversations.
            tenant: Whose it is, where customers share a store.

        Raises:
            ConfigError: The key does not fit, or there are no items.
            InboxFullError: Too much waits for the session, by ``Limits(inbox_items=…,
                inbox_bytes=…)``.
            NotStorableError: An item cannot be stored, or the store has no inbox.
            StoreUnavailableError: The store cannot be reached: try again with the same key.

        """
        return await self._check().inbox.post(SessionKey(id, session, tenant), items, key)

    async def dead_letters(
        self, id: str, *, session: str = DEFAULT_SESSION, tenant: str = ""
    ) -> tuple[DeadLetter, ...]:
        """Return the posted items of a session that could not be delivered, with their bytes.

        They were tried several times and set aside, so that those behind them came. They stay
        until somebody retries or drops them, or the session is deleted.

        Args:
            id: The agent's id.
            session: Which of the agent's sessions.
            tenant: Whose, where customers share a store.

        """
        return tuple(await self._check().inbox.dead_letters(SessionKey(id, session, tenant)))

    async def retry_dead_letters(
        self,
        id: str,
        keys: Collection[str] | None = None,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> int:
        """Post dead letters again, behind what waits by now; return how many items that were.

        Args:
            id: The agent's id.
            keys: Of which posts; None for all.
            session: Which of the agent's sessions.
            tenant: Whose, where customers share a store.

        Raises:
            ConfigError: There is no dead letter of a key, or one cannot be read.

        """
        inbox = self._check().inbox
        return await inbox.retry_dead_letters(SessionKey(id, session, tenant), keys)

    async def drop_dead_letters(
        self,
        id: str,
        keys: Collection[str] | None = None,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> int:
        """Remove dead letters for good; return how many items that were.

        Args:
            id: The agent's id.
            keys: Of which posts; None for all.
            session: Which of the agent's sessions.
            tenant: Whose, where customers share a store.

        Raises:
            ConfigError: There is no dead letter of a key.

        """
        inbox = self._check().inbox
        return await inbox.drop_dead_letters(SessionKey(id, session, tenant), keys)

    async def list(
        self,
        *,
        tenant: str = "",
        owner: str | None = None,
        tag: str | None = None,
        prefix: str = "",
        after: SessionInfo | None = None,
        limit: int = 100,
    ) -> list[SessionInfo]:
        """List sessions by id; pass the last one as ``after`` for the next page.

        What it tells, and ``owner`` and ``tag`` choose by, is as of each session's last fold.
        """
        self._check()
        last = None if after is None else after.key
        return await self._store.sessions(
            tenant=tenant, owner=owner, tag=tag, prefix=prefix, after=last, limit=limit
        )

    async def exists(
        self,
        id: str,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> bool:
        """Say whether there is such a session."""
        self._check()
        return await self._store.head(SessionKey(id, session, tenant)) > 0

    # all of them

    def on(self, event: EventName, hook: Hook) -> Callable[[], None]:
        """Call ``hook`` at each event, and return what takes it off again.

        ``before_save`` gets the session before a due save captures what to write, and is awaited;
        the other hooks get an event with facts. A hook that fails is logged.
        In ``before_save``, what would wait for that save (``save``, ``aclose``, a turn) raises
        SessionError: append and return.

        Raises:
            ConfigError: There is no such event, or the hook cannot be called.

        """
        connected = self._check()
        off = connected.runtime.hooks.on(event, hook)
        connected.keeper.heed_hooks()
        return off

    async def flush(self, deadline: float | None = None) -> None:
        """Save every session now, and return when all is durable or the deadline is over."""
        await self._check().runtime.saver.flush(deadline)

    def health(self) -> Health:
        """Say how saving goes: for readiness probes, never for liveness.

        A restart because of a store that is down would destroy the only copy.
        """
        return self._check().health()

    @property
    def lost(self) -> tuple[LostSession, ...]:
        """Sessions that others have taken over, with records that are only in memory here.

        They stay, and `health` is degraded, until somebody forks or discards their records. Also
        of a manager that is closed: what it could not keep.
        """
        connected = self._connected
        if connected is None:
            return ()
        runtime, keeper = connected.runtime, connected.keeper
        return tuple([LostSession(runtime, keeper, tracked) for tracked in runtime.saver.lost])

    def tune(self, autosave: Autosave | None) -> None:
        """Change the autosave settings of all sessions without settings of their own.

        Raises:
            ConfigError: It is neither an `Autosave` nor None.

        """
        require_options(autosave=autosave)
        self._check().runtime.saver.tune(autosave)

    def drain(self) -> None:
        """Begin to stop: open no more sessions, save every change as it comes; turns go on.

        SIGTERM does this by itself, unless ``Shutdown(signals=False)``.
        """
        self._check().closing.drain()

    async def aclose(self, deadline: float | None = None) -> ShutdownReport:
        """Drain, flush, fold, release and stop, within the shutdown deadline.

        Cancelling the caller does not stop it: it returns when it is done, and is cancelled then.

        Returns:
            What was saved, and what could not be: ``report.raise_if_unsaved()``.

        """
        report = await self._close(deadline)
        if self._connected is not None:
            self._connected.end_late_body()
        return report

    async def _close(self, deadline: float | None) -> ShutdownReport:
        connected = self._connected
        if connected is None:
            await self._store.aclose()
            return ShutdownReport(duration=0.0, clean=True)
        stray = connected.runtime.home.stray()
        if stray is not None:
            raise wrong_loop("this manager", stray)
        closing = connected.closing
        require_outside(None, "to close with its manager")
        closing.begin(deadline)
        try:
            await wait_through(closing.done)
        finally:
            if closing.done.is_set():  # else a Ctrl-C ends the wait, and the closing goes on
                await self._disconnect(connected)
        connected.raise_exit()
        if closing.report is None:
            raise StoreError("the shutdown itself failed; the log says how")
        return closing.report

    async def _disconnect(self, connected: Connected) -> None:
        connected.signals.uninstall()
        host = connected.runtime.host
        with anyio.CancelScope(shield=True):
            try:
                await (self._close_store(host) if host.running else self._store.aclose())
            finally:
                await host.aclose()

    async def _close_store(self, host: Host) -> None:
        """Close the store in the background: a native cancel, which no shield stops, waits too."""
        errors: list[Exception] = []
        closed = anyio.Event()
        host.at_end(closed.set)

        async def close() -> None:
            try:
                await self._store.aclose()
            except Exception as error:  # noqa: BLE001  # for whoever closes
                errors.append(error)
            finally:
                closed.set()

        host.spawn(close)
        await wait_through(closed)
        if errors:
            raise errors[0]
