"""The session manager: opens, keeps, hibernates and closes sessions over one store.

It owns the autosave engine, the leases and the shutdown. Everything that must continue when a
caller is cancelled runs in its host task, so a manager may be opened in one task and
closed in another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from perdure._lib.designs import lookup
from perdure._lib.logs import card
from perdure._lib.misnamed import Misnamed
from perdure._lib.options import names_options
from perdure._lib.tasks import wait_through
from perdure.autosave.options import (
    INHERIT,
    KEEP,
    Autosave,
    AutosaveStatus,
    EngineOptions,
    Inherit,
    Shutdown,
)
from perdure.autosave.reports import ShutdownReport
from perdure.autosave.tracked import require_outside
from perdure.errors import InvalidArgumentError, SessionClosedError, StoreError
from perdure.lease import LeaseOptions, OnDamage, OnHeld
from perdure.providers.context_fit import Format
from perdure.records.keys import DEFAULT_SESSION, SCOPES, require_whole, session_key
from perdure.records.manifest import SessionQuery
from perdure.records.types import Registry
from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
from perdure.restore.report import RestorePlan
from perdure.session.connected import ManagerParts, connected, manager_facts
from perdure.session.delete import (
    ForgetReport,
    SessionFilter,
    delete,
    rename,
)
from perdure.session.directory import list_sessions
from perdure.session.events import EventName, typed_by_event
from perdure.session.fork import Fork, History, LostSession, copy, fork, require_history
from perdure.session.inbox import PostReceipt
from perdure.session.lifecycle import HandoverTerms
from perdure.session.open import OpenRequest, SessionOpening
from perdure.session.options import Limits, require_options
from perdure.session.rebuild import RebuildReport
from perdure.session.retention import PruneReport, Retention
from perdure.session.runtime import Clock, ManagerOptions, wrong_loop
from perdure.session.scope import Scope, list_scopes, scope_key
from perdure.session.session import Session, SessionView
from perdure.session.stored import followed
from perdure.store import DeadLetter, SessionInfo, Store

if TYPE_CHECKING:
    from perdure.autosave.reports import Health
    from perdure.records.checkpoints import Checkpoint


@final
class SessionManager:
    """Keep the sessions of one process: ``async with perdure.connect(…) as sessions``.

    Also awaitable, for frameworks that close by ``aclose``. May be opened in one task and closed in
    another of the same event loop.
    """

    if not TYPE_CHECKING:
        __getattr__ = lookup

    def __init__(
        self,
        store: Store,
        *,
        autosave: Autosave | None,
        lease: LeaseOptions,
        shutdown: Shutdown,
        limits: Limits,
        types: Sequence[Any] = (),
        engine: EngineOptions | None = None,
        clock: Clock | None = None,
        retention: Retention | None = None,
    ) -> None:
        engine = EngineOptions() if engine is None else engine
        require_options(
            autosave=autosave,
            lease=lease,
            shutdown=shutdown,
            limits=limits,
            engine=engine,
            retention=retention,
        )
        if retention is not None and retention.expire_days == 0:
            message = "retention: expire_days=0 would forget every session: leave it out"
            raise InvalidArgumentError(message, option="retention")
        self.registry: Registry = Registry(types)
        self._store = followed(store)
        self._options = ManagerOptions(
            self.registry, autosave, engine, lease, shutdown, limits, clock, retention
        )
        self._connected: ManagerParts | None = None
        self._by_owner: Callable[[], object] | None = None  # the blocking mirror's close
        self._started = False

    def __repr__(self) -> str:
        return f"<SessionManager {', '.join(map(str, manager_facts(self._connected).values()))}>"

    def _repr_html_(self) -> str:
        return card("SessionManager", manager_facts(self._connected))

    def __await__(self) -> Generator[Any, None, Self]:
        return self._start().__await__()

    if not TYPE_CHECKING:  # which knows better without

        def __enter__(self) -> None:
            raise TypeError(
                "connect(…) is asynchronous: use `async with perdure.connect(…) as sessions`, or "
                "`import perdure.sync` and `with perdure.sync.connect(…) as sessions` in a program "
                "without an event loop"
            )

        def __exit__(self, *_: object) -> None:
            """Never called: it makes `with` get as far as the message."""

        close = Misnamed("await sessions.aclose()")
        create = Misnamed("async with sessions.open(id) as session")
        get = Misnamed("async with sessions.open(id) as session, or await sessions.load(id)")

    async def __aenter__(self) -> Self:
        return await self._start()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        connected = self._connected
        if connected is not None and connected.runtime.home.stray() == "fork" and exc is not None:
            return  # a child that ends: the manager is the parent's
        report = await self._close(None)
        if connected is not None and connected.signals.received:
            await connected.signals.end_process()
        if exc_type is None or issubclass(exc_type, Exception):
            report.raise_if_unsaved()

    async def _start(self) -> Self:
        if self._started:
            raise SessionClosedError(
                "this manager was started before: call connect(…) again for a new one"
            )
        self._started = True
        self._connected = await connected(
            self._store, self._options, close=self.aclose, by_owner=self._by_owner
        )
        return self

    def _check(self) -> ManagerParts:
        if self._connected is None:
            raise SessionClosedError(
                "this manager is not connected: use `async with connect(…) as sessions` "
                "or `sessions = await connect(…)`"
            )
        stray = self._connected.runtime.home.stray()
        if stray is not None:
            raise wrong_loop("this manager", stray)
        closing = self._connected.closing
        if closing.report is not None or closing.done.is_set():
            raise SessionClosedError("this manager is closed: call connect(…) again")
        return self._connected

    # sessions

    @names_options
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
        on_damage: OnDamage = "raise",
        autosave: Autosave | Inherit | None = KEEP,
    ) -> SessionOpening:
        """Open a session to write: await it, or ``async with`` it.

        Callers in this process that open the same id share one object; tags and autosave are
        those of the last caller. Leaving ``async with`` lets go of it: autosave owns it from then.

        Args:
            id: The agent's id.
            session: Which of its conversations.
            tenant: Whose it is, where customers share a store.
            owner: Who it belongs to, kept as metadata: a label, which opening gives to a session
                that has none, and never changes.
            tags: Kept as metadata.
            create: Whether to make a session that does not exist.
            new: Whether it has to be a new one: never continue a stored session.
            on_held: What to do if another process holds it: ask for a handover and wait,
                raise at once, or steal it once its holder has expired.
            wait: Seconds to wait for another process, and for a store that does not answer.
            force: Open it even if it is quarantined in this process.
            strict: Raise if one of its documents cannot be used, instead of rebuilding it.
            on_damage: "fresh": set a damaged log aside, in a store of files, and begin a new one,
                which later opens continue. The restore report names what is kept.
            autosave: This session's own settings, until it leaves memory; None for no timers,
                ``Inherit.INHERIT`` for the manager's again. Left out, it keeps those that it has.

        Raises:
            InvalidArgumentError: An argument is invalid, or ``new`` is True and ``create`` False.
            LeaseHeldError: Another process keeps holding it.
            SessionNotFoundError: It does not exist, and ``create`` is False.
            SessionError: It exists, and ``new`` is True.
            OwnerMismatchError: It has another owner.
            SessionQuarantinedError: The store permanently refuses one of its records.
            CorruptRecordError: Its log is damaged before the tail, and is not set aside; if
                strict, or a document is.
            UnsupportedVersionError: A newer release wrote it.
            StoreUnavailableError: The store cannot be reached.

        """
        wanted = OpenRequest(
            key=session_key(id, session, tenant),
            owner=owner,
            tags=tags,
            create=create,
            new=new,
            on_held=on_held,
            wait=wait,
            force=force,
            strict=strict,
            on_damage=on_damage,
            autosave=autosave,
        )
        return SessionOpening(self._check().opener, wanted)

    async def load(
        self,
        id: str,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
        context: bool = True,
    ) -> SessionView | None:
        """Read a session without a lease, as of now; None if there is none.

        Of a session that is open here, it shows what is durable. With ``context=False`` it has no
        working context, and costs the same however large that is: to show history. Then a
        store may have read the newest page with it.
        """
        return await self._check().load(session_key(id, session, tenant), context=context)

    async def post(
        self,
        id: str,
        *items: Any,
        key: str | None = None,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> PostReceipt:
        """Post items to a session, durably, whichever process holds it; it need not exist yet.

        The session's holder, or its next one, appends them as one group between two turns, exactly
        once, and its manager emits the event ``posted``. A cancellation may come too late, but
        never leaves half a post.

        Args:
            id: The agent's id.
            items: As for ``Session.append``.
            key: What names this post, such as a request's id: a retry with the same key
                posts nothing twice. By default a new one.
            session: Which of its conversations.
            tenant: Whose it is, where customers share a store.

        Raises:
            InvalidArgumentError: The key is invalid, or there are no items.
            InboxFullError: Too much waits for the session, by ``Limits(inbox_items=…,
                inbox_bytes=…)``.
            NotStorableError: An item cannot be stored, or the store has no inbox.
            StoreUnavailableError: The store cannot be reached: try again with the same key.

        """
        return await self._check().inbox.post(session_key(id, session, tenant), items, key)

    async def dead_letters(
        self, id: str, *, session: str = DEFAULT_SESSION, tenant: str = ""
    ) -> tuple[DeadLetter, ...]:
        """Return the posted items of a session that could not be delivered, with their bytes.

        They were tried several times and set aside, so that later ones were delivered. They stay
        until they are retried or dropped, or the session is deleted.

        Args:
            id: The agent's id.
            session: Which of the agent's sessions.
            tenant: Whose, where customers share a store.

        """
        return tuple(await self._check().inbox.dead_letters(session_key(id, session, tenant)))

    async def retry_dead_letters(
        self,
        id: str,
        keys: Collection[str] | None = None,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> int:
        """Post dead letters again, after the items pending by now; return how many they were.

        Args:
            id: The agent's id.
            keys: Of which posts; None for all.
            session: Which of the agent's sessions.
            tenant: Whose, where customers share a store.

        Raises:
            InvalidArgumentError: There is no dead letter of a key, or one cannot be read.

        """
        inbox = self._check().inbox
        return await inbox.retry_dead_letters(session_key(id, session, tenant), keys)

    async def drop_dead_letters(
        self,
        id: str,
        keys: Collection[str] | None = None,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> int:
        """Remove dead letters; return how many items that were.

        Args:
            id: The agent's id.
            keys: Of which posts; None for all.
            session: Which of the agent's sessions.
            tenant: Whose, where customers share a store.

        Raises:
            InvalidArgumentError: There is no dead letter of a key.

        """
        inbox = self._check().inbox
        return await inbox.drop_dead_letters(session_key(id, session, tenant), keys)

    def scope(
        self, id: str, *, tenant: str = "", owner: str | None = None, wait: float = 10.0
    ) -> Scope:
        """Return values that sessions share, and that outlive them. It reads nothing yet.

        Args:
            id: The scope's id, such as "user:ada" or "app:notes"; it is no session's id.
            tenant: Whose it is, where customers share a store.
            owner: Who it belongs to: a label, by which `forget` finds it.
            wait: Seconds that a change waits for another process.

        Raises:
            InvalidArgumentError: The id is empty or too long.

        """
        return Scope(self._check, scope_key(id, tenant), owner=owner, wait=wait)

    async def list_scopes(
        self,
        *,
        tenant: str = "",
        owner: str | None = None,
        prefix: str = "",
        after: SessionInfo | None = None,
        limit: int = 100,
    ) -> list[SessionInfo]:
        """List scopes by id, which is ``info.key.session``; pages are as for `list`."""
        self._check()
        require_whole(limit=limit)
        last = "" if after is None else _last_of_page(after).key.session
        return await list_scopes(
            self._store, tenant=tenant, owner=owner, prefix=prefix, after=last, limit=limit
        )

    async def list(
        self,
        *,
        tenant: str = "",
        owner: str | None = None,
        tag: str | None = None,
        prefix: str = "",
        after: SessionInfo | None = None,
        limit: int = 100,
        newest_first: bool = False,
        since: float | None = None,
        before: float | None = None,
    ) -> list[SessionInfo]:
        """List sessions by id; pass the last one as ``after`` for the next page.

        What it reports, and chooses by, is as of now for sessions that are open here, and as of
        its last save for any other; docs/stores.md says what files and buckets know of others.
        Scopes are not in it: see `list_scopes`.

        Args:
            tenant: Whose, where customers share a store.
            owner: Only sessions of this owner.
            tag: Only sessions with this tag.
            prefix: Only agents whose id begins with this.
            after: The last session of the page before.
            limit: How many, at most.
            newest_first: List those first that were saved last.
            since: Only sessions that were saved then or later, in seconds since 1970.
            before: Only sessions that were not saved since.

        """
        parts = self._check()
        query = SessionQuery(
            tenant=tenant,
            owner=owner,
            tag=tag,
            prefix=prefix,
            without=(SCOPES,),
            since=since,
            before=before,
            newest_first=newest_first,
            limit=limit,
        )
        if after is not None:
            query = query.after_page(_last_of_page(after))
        open_here = map(parts.lifecycle.sessions.get, parts.runtime.saver.unsaved_keys())
        unsaved = [session for session in open_here if session and session.is_writable]
        return await list_sessions(self._store, query, unsaved)

    async def exists(
        self,
        id: str,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> bool:
        """Return whether there is such a session."""
        self._check()
        return await self._store.head(session_key(id, session, tenant)) > 0

    # all of them

    @typed_by_event(Session)
    def on(self, event: EventName, hook: Callable[[Any], object]) -> Callable[[], None]:
        """Call ``hook``, plain or async, at each event, and return what takes it off again.

        ``before_save`` gets the session before a due save captures what to write, and is awaited;
        the other hooks get the payload of their event, as `perdure.events` and ``docs/events.md``
        list them. A hook that fails is logged.
        In ``before_save``, what would wait for that save (``save``, ``aclose``, a turn) raises
        SessionError: append and return.

        Raises:
            InvalidArgumentError: There is no such event, or the hook cannot be called.

        """
        connected = self._check()
        off = connected.runtime.hooks.on(event, hook)
        connected.lifecycle.attach_hooks()
        return off

    async def flush(self, deadline: float | None = None) -> bool:
        """Save every session now, and say whether all that was appended is durable.

        False if the deadline is over first, or records are stuck: `health` says which and why.
        """
        return await self._check().runtime.saver.flush(deadline)

    def health(self) -> Health:
        """Return the state of saving: for readiness probes, never for liveness.

        A restart because of a store that is down would destroy the only copy.
        """
        return self._check().health()

    @property
    def lost(self) -> tuple[LostSession, ...]:
        """Sessions that others have taken over, with records that are only in memory here.

        They stay, and `health` is degraded, until their records are forked or discarded. Also
        of a manager that is closed: what it could not keep.
        """
        connected = self._connected
        if connected is None:
            return ()
        runtime, lifecycle = connected.runtime, connected.lifecycle
        return tuple([LostSession(runtime, lifecycle, tracked) for tracked in runtime.saver.lost])

    @property
    def autosave(self) -> AutosaveStatus:
        """The settings by which sessions without their own save themselves, and those in force now.

        A session's own is ``session.autosave``.
        """
        return self._check().runtime.saver.status()

    def tune(
        self,
        autosave: Autosave | Inherit | None = INHERIT,
        *,
        id: str | None = None,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> None:
        """Change the autosave settings of one session, or of all without settings of their own.

        It applies at once, to what is unsaved as well. ``tune(id="ada")`` gives an open session
        back to the manager's settings.

        Args:
            autosave: The settings; None for no timers. Left out, the manager's, for one session.
            id: The agent's id of one session, which is open here; None for all.
            session: Which of its conversations.
            tenant: Whose it is.

        Raises:
            InvalidArgumentError: It is neither an `Autosave` nor None, or it names no session to
                give back.
            SessionClosedError: The session is not open here.

        """
        if not isinstance(autosave, Inherit):
            require_options(autosave=autosave)
        parts = self._check()
        if id is not None:
            key = session_key(id, session, tenant)
            opened = parts.lifecycle.sessions.get(key)
            if opened is None:
                raise SessionClosedError(
                    f"session {key} is not open here: give open(…, autosave=…) its settings",
                    key=key,
                )
            if autosave is not KEEP:
                parts.runtime.saver.tune_one(opened._tracked, autosave)
        elif isinstance(autosave, Inherit) or session != DEFAULT_SESSION or tenant:
            raise InvalidArgumentError(
                "tune(…) takes autosave=… for all sessions, or id=… for one of them",
                option="autosave",
            )
        else:
            parts.runtime.saver.tune(autosave)

    def drain(self) -> None:
        """Begin to stop: open no more sessions, save every change at once; turns continue.

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
        if self._connected is not None and self._connected.signals.received:
            self._connected.signals.cancel_body()  # SIGTERM has come meanwhile
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
        closing.stop(closing.begin(deadline))
        try:
            await wait_through(closing.done)
        finally:
            if closing.done.is_set():  # else a Ctrl-C ends the wait, and the closing continues
                connected.signals.uninstall()
                with closing.begin().scope("store") as scope:
                    scope.shield = True
                    await closing.close_store()  # if its host has ended before the stop
                    await connected.runtime.host.aclose()
        connected.raise_exit()
        if closing.error is not None:
            raise closing.error
        if closing.report is None:
            raise StoreError("the shutdown itself failed; the log says how")
        return closing.report

    @property
    def shutdown_report(self) -> ShutdownReport | None:
        """The outcome for every unsaved record, once the manager has been closed."""
        return None if self._connected is None else self._connected.closing.report

    async def fork(
        self,
        id: str,
        new_id: str,
        *,
        at: int | str | Checkpoint | None = None,
        history: History = "full",
        session: str = DEFAULT_SESSION,
        new_session: str | None = None,
        tenant: str = "",
        wait: float = 10.0,
    ) -> Fork:
        """Begin a session with another one's history; both continue independently.

        A fork is a copy: it refers to nothing of the other, and costs what its history costs to
        write. It needs no lease on the other; what is in progress there has ended in the fork.
        Doing it again after a crash makes it whole.

        Args:
            id: The agent's id.
            new_id: The id of the fork.
            at: Where it branches: the seq of the last record that both have, the id of a turn
                that has ended, or a checkpoint. None for the end.
            history: ``context`` leaves the records out: the fork begins with the working
                context, memory, episodes, states and labels of that point, at the cost of a few
                opens at the end of the log, of reading the log up to there before it. Checkpoints
                of the session itself go with the records; those of given states stay.
            session: Which of the agent's conversations.
            new_session: The fork's session id; None for the same.
            tenant: Whose both are.
            wait: Seconds to wait for the store; what is unsaved of the parent here is saved first.

        Raises:
            HistoryPrunedError: The history that the fork starts from was pruned.
            InvalidArgumentError: There is no such record, turn or checkpoint, or it is in a
                group.
            SessionError: A session of the new id exists.
            SessionNotFoundError: There is nothing to fork.
            StoreUnavailableError: The store has not taken it in time; it may still do so.

        """
        parts, key = self._check(), session_key(id, session, tenant)
        child = session_key(new_id, new_session or session, tenant)
        require_history(history)
        await parts.save_here(key, wait)
        return await parts.act(
            key, wait, partial(fork, parts.access, key, child, at, history=history)
        )

    async def copy(
        self,
        id: str,
        new_id: str,
        *,
        session: str = DEFAULT_SESSION,
        new_session: str | None = None,
        tenant: str = "",
        wait: float = 10.0,
    ) -> Fork:
        """Make a session with all of another one's history and state; an open turn continues in it.

        Waiting posts and dead letters stay with the source.

        Args:
            id: The agent's id.
            new_id: The id of the copy.
            session: Which of the agent's conversations.
            new_session: The copy's session id; None for the same.
            tenant: Whose both are.
            wait: Seconds to wait for the store to answer, and to save what is unsaved of it here.

        Raises:
            SessionError: A session of the new id exists.
            SessionNotFoundError: There is nothing to copy, or it was deleted meanwhile.
            StoreUnavailableError: The store does not answer in time.

        """
        parts, key = self._check(), session_key(id, session, tenant)
        new = session_key(new_id, new_session or session, tenant)
        await parts.save_here(key, wait)
        return await parts.act(key, wait, partial(copy, parts.access, key, new))

    async def rename(
        self,
        id: str,
        new_id: str,
        *,
        session: str = DEFAULT_SESSION,
        new_session: str | None = None,
        tenant: str = "",
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> Fork:
        """Give a session another id; callers that have it open here have to open it again.

        Killed anywhere, one of the ids opens with everything; doing it again finishes.

        Raises:
            LeaseHeldError: Another process keeps holding it.
            SessionError: A session of the new id exists.
            SessionNotFoundError: There is no session of the old id.

        """
        parts, key = self._check(), session_key(id, session, tenant)
        new = session_key(new_id, new_session or session, tenant)
        open_here = parts.lifecycle.sessions.get(key)
        if open_here is not None:
            parts.lifecycle.require_closable(open_here)
        act = partial(rename, parts.access, key, new, HandoverTerms(on_held, wait))
        return await parts.act(key, wait, act)

    async def delete(
        self,
        id: str,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> bool:
        """Remove a session and all that it owns; False if there was none.

        Forks and copies of it stay as they are. Blobs stay until they are swept; `forget` removes
        them too.

        Raises:
            LeaseHeldError: Another process keeps holding it.

        """
        parts, key = self._check(), session_key(id, session, tenant)
        act = partial(delete, parts.access, key, HandoverTerms(on_held, wait))
        return await parts.act(key, wait, act)

    async def forget(
        self,
        id: str | None = None,
        *,
        session: str | None = None,
        tenant: str = "",
        owner: str | None = None,
        tag: str | None = None,
        dry_run: bool = False,
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> ForgetReport:
        """Remove sessions and everything that only they reach, and say what was kept and why.

        Logs, documents, quarantined files, posts, spill files and blobs go, and what the
        backend keeps of removed data, as far as it can. Looks through all of the tenant's sessions
        for blobs that are shared, so it takes its time.

        Args:
            id: Of this agent.
            session: Only this one of its conversations; None for all.
            tenant: Whose they are.
            owner: Of this owner, as of now.
            tag: With this tag, as of now.
            dry_run: Remove nothing, and say what would be.
            on_held: What to do if another process holds one.
            wait: Seconds to wait for another process, and for a store that does not answer.

        Raises:
            InvalidArgumentError: Neither id, owner nor tag is given, or one of them is no text.
            LeaseHeldError: Another process keeps holding one; then nothing was removed.
            LeaseLostError: Another process took one over meanwhile, since this one had stopped.

        """
        if id is not None:
            session_key(id, tenant=tenant)
        wanted = SessionFilter(id, session, tenant, owner, tag)
        terms = HandoverTerms(on_held, wait)
        return await self._check().forget(wanted, terms, dry_run=dry_run)

    async def prune(
        self,
        retention: Retention,
        *,
        id: str | None = None,
        session: str | None = None,
        tenant: str = "",
        dry_run: bool = False,
        on_held: OnHeld = "raise",
        wait: float = 0.0,
    ) -> PruneReport:
        """Remove the history that a retention lets go, and the sessions that have expired.

        What a session is stays as it was: its context, memory, states, title. Sessions that
        other processes hold, or that are damaged, are left alone, and named.

        Args:
            retention: What stays.
            id: Of this agent; None for all.
            session: Only this one of its conversations; None for all.
            tenant: Whose they are.
            dry_run: Remove nothing, and say what would be.
            on_held: What to do if another process holds one.
            wait: Seconds to wait for another process, and for a store that does not answer.

        Raises:
            NotStorableError: The store keeps no blobs.
            SessionError: One session was named, and it may not be pruned. Of several, those that
                may not are named in the report.

        """
        session_key(id or "-", tenant=tenant)
        wanted, terms = SessionFilter(id, session, tenant, None, None), HandoverTerms(on_held, wait)
        return await self._check().prune(retention, wanted, terms, dry_run=dry_run)

    async def plan_restore(
        self,
        id: str,
        *,
        target: Format | None = None,
        system_prompt: str | None = None,
        options: WorkingContextSnapshotBootstrapOptions | None = None,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> RestorePlan:
        """Return what opening a session would use, repair, strip and rebuild, and why.

        Needs no lease, changes nothing, and reads all documents. Of a session that is open here
        it shows what would come back after a kill at this moment.

        Args:
            id: The agent's id.
            target: The provider that the context is meant for: what would be stripped for it.
            system_prompt: The processed prompt that an agent would be restored with.
            options: How an agent would be restored. Without either, the plan is for a session
                that no agent of perdure works on.
            session: Which of the agent's conversations.
            tenant: Whose it is, where customers share a store.

        Raises:
            InvalidArgumentError: The target is unknown; or the system prompt has changed, and the
                options' policy is "error".
            CorruptRecordError: The log is damaged before its tail; or a document is, and the
                options are strict.

        """
        from perdure.session.plan import plan_of

        return await plan_of(
            self._check().runtime,
            session_key(id, session, tenant),
            target=target,
            system_prompt=system_prompt,
            options=options,
        )

    async def rebuild_working_context(
        self,
        id: str,
        *,
        dry_run: bool = False,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
        on_held: OnHeld = "raise",
        wait: float = 0.0,
    ) -> RebuildReport:
        """Rebuild a session's working context, and everything else that is folded, from its log.

        What is stored is first compared with the log and reported; it is a cache, so this loses
        nothing. A session that is open here stays open.

        Args:
            id: The agent's id.
            dry_run: Only compare.
            session: Which of the agent's conversations.
            tenant: Whose it is, where customers share a store.
            on_held: What to do if another process holds it.
            wait: Seconds to wait for another process, and for a store that does not answer.

        Raises:
            CorruptRecordError: The log is damaged before its tail, or ends before the documents.
            LeaseHeldError: Another process keeps holding it.
            SessionNotFoundError: There is no such session.

        """
        key, terms = session_key(id, session, tenant), HandoverTerms(on_held, wait)
        return await self._check().rebuild(key, terms, dry_run=dry_run)


def _last_of_page(after: SessionInfo) -> SessionInfo:
    if not isinstance(after, SessionInfo):
        raise InvalidArgumentError(
            f"invalid after={after!r}: give the last session of the page before", option="after"
        )
    return after


def require_manager(sessions: object, instead: str) -> None:
    """Refuse what is no session manager, such as a URL, or one of perdure.sync.

    Raises:
        InvalidArgumentError: It is none; the message names *instead*.

    """
    if not isinstance(sessions, SessionManager):
        kind = type(sessions)
        shown = (
            kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        )
        raise InvalidArgumentError(
            f"{shown} is no session manager of async code: give the one that `async with "
            f"perdure.connect(url) as sessions` has opened, or use {instead}",
            option="sessions",
        )
