"""A manager's parts between connect and close, and how they hang together."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import anyio
import msgspec
from anyio.lowlevel import checkpoint

from perdure._lib.logs import log_facts
from perdure._lib.signals import Exit, exit_in
from perdure._lib.tasks import Host, was_cancelled
from perdure.autosave.deadline import Deadline
from perdure.autosave.reports import NAMED, Health
from perdure.errors import InvalidArgumentError, StoreUnavailableError
from perdure.lease import renew_heartbeat
from perdure.records.keys import SessionKey, require_filters
from perdure.restore.ladder import restore
from perdure.session import spill
from perdure.session.contents import PAGE
from perdure.session.delete import (
    ForgetReport,
    SessionFilter,
    chosen,
    forget,
    only_posted_to,
)
from perdure.session.inbox import Inbox
from perdure.session.lifecycle import ExclusiveAccess, HandoverTerms, SessionLifecycle
from perdure.session.media import hold_media
from perdure.session.open import Opener
from perdure.session.options import require_sessions
from perdure.session.prune import prune
from perdure.session.rebuild import RebuildReport, rebuild_session
from perdure.session.retention import PruneReport, Retention
from perdure.session.runtime import (
    LEAST_PATIENCE,
    ManagerOptions,
    Patience,
    Runtime,
    require_seconds,
)
from perdure.session.session import SessionView
from perdure.session.shutdown import ExitHandler, ManagerShutdown, SignalWatch
from perdure.session.stored import SessionStore

T = TypeVar("T")

log: logging.Logger = logging.getLogger("perdure")

GATHER = 0.005
"""Seconds between two heartbeats at least: requests that arrive together are served together."""
FIRST_SWEEP = 60.0
"""Seconds before the first look at what a retention removes, or up to twice that."""
SWEEP_EVERY = 3600.0
"""Seconds between two such looks, or up to twice that."""


class ManagerParts:
    """The parts of a connected manager, and the acts on its sessions from outside."""

    def __init__(
        self,
        runtime: Runtime,
        close: Callable[[], Awaitable[object]],
        by_owner: Callable[[], object] | None,
    ) -> None:
        self.runtime: Runtime = runtime
        self.lifecycle: SessionLifecycle = SessionLifecycle(runtime)
        self.inbox: Inbox = Inbox(runtime, self.lifecycle.sessions)
        self.opener: Opener = Opener(runtime, self.lifecycle, self.inbox)
        self.access: ExclusiveAccess = ExclusiveAccess(runtime, self.lifecycle)
        self.closing: ManagerShutdown = ManagerShutdown(runtime, self.lifecycle)
        self._exit: Exit | None = None
        self.signals: SignalWatch = SignalWatch(self.closing, self._on_end)
        runtime.host.on_teardown = self._torn_down
        runtime.host.on_exit = self._on_exit
        runtime.host.spawn(self._renew_leases)
        if runtime.retention is not None:
            runtime.host.spawn(self._sweep, runtime.retention)
        self.at_exit: ExitHandler = ExitHandler(self.closing, close, by_owner)
        if by_owner is None:  # else in the owner's thread
            self.install()
        runtime.host.at_end(self._ended)

    def install(self) -> None:
        """Watch for SIGTERM and for the end of the process, in the thread whose program it is."""
        if self.runtime.shutdown.signals:
            self.signals.install()
        self.at_exit.install()

    def _ended(self) -> None:
        if self.closing.report is not None:  # else what it has accepted is still to be kept
            self.at_exit.uninstall()

    async def _renew_leases(self) -> None:
        """Renew the leases, and give up the sessions that others ask for."""
        store, failed = self.runtime.store, False
        while True:
            try:
                if not failed:  # else that long has been waited
                    await store.wait_for_notification(self.runtime.lease.heartbeat)
                requests = await renew_heartbeat(store, self.runtime.watch)
            except BaseException as error:
                # Without heartbeats every lease is lost; a driver may cancel its own call, too.
                if was_cancelled(error) or exit_in(error) is not None:
                    raise
                if self.closing.report is not None:
                    return
                level = logging.DEBUG if failed else logging.WARNING  # one line for an outage
                log_facts(log, level, "heartbeat failed, trying again", error)
                failed = True
                await anyio.sleep(self.runtime.lease.heartbeat)
            else:
                self.runtime.saver.warn(requests.warnings)
                for key in requests.mail:
                    self.runtime.host.spawn(self.inbox.attend, key)
                for key in requests.handovers:
                    self.runtime.host.spawn(self.lifecycle.hand_over, key)
                if failed:
                    failed = False
                    log.info("the heartbeat works again")
                    self.inbox.again()
                await anyio.sleep(GATHER)

    async def _sweep(self, retention: Retention) -> None:
        """Apply the retention to all tenants, again and again.

        Every process that was connected with one does: what one of them has removed the next does
        not find, and what another one holds is left alone.
        """
        terms, pause = HandoverTerms("raise", 0.0), FIRST_SWEEP
        while True:
            # Workers that were started together do not sweep together.
            await anyio.sleep(pause * (1 + random.random()))  # no secret
            pause = SWEEP_EVERY
            try:
                for tenant in await self.runtime.store.tenants():
                    if self.closing.begun:
                        return
                    wanted = SessionFilter(None, None, tenant, None, None)
                    # A scrub may rewrite the database, under locks that others wait for.
                    await self.prune(retention, wanted, terms, scrub=False)
            except Exception as error:  # noqa: BLE001  # a store's own, too: the next one may work
                log_facts(log, logging.WARNING, "retention failed, and is tried again", error)

    def health(self) -> Health:
        """Return its health: saving, whether posts are taken, and whether leases are renewed."""
        health, lease = self.runtime.saver.health(), self.runtime.lease
        undelivered = self.inbox.undelivered()
        reasons = [f"session {key}: {reason}" for key, reason in list(undelivered.items())[:NAMED]]
        if len(undelivered) > NAMED:
            reasons.append(f"{len(undelivered) - NAMED} more sessions: posts cannot be taken")
        reasons += list(self.runtime.turn_waits.values())[:NAMED]
        late = self.runtime.watch.since_renewal()
        if late > max(lease.ttl, 2 * lease.heartbeat) and self.closing.report is None:
            risk = ": other processes may take over what is open here" if health.sessions else ""
            reasons.append(f"no heartbeat for {late:.0f} s{risk}")
        degraded = reasons and health.status != "failing"
        return msgspec.structs.replace(
            health,
            status="degraded" if degraded else health.status,
            reasons=(*health.reasons, *reasons),
            undelivered=undelivered,
            dead_letters=self.inbox.set_aside(),
            set_aside={str(key): what for key, what in self.lifecycle.set_aside.items()},
        )

    def _on_end(self) -> None:
        """SIGTERM has come over the default action: have the body left, and end by the deadline."""
        if not self.runtime.host.running:
            return  # it has just closed: the task that closed it ends the process
        self.runtime.host.spawn(self._end)
        if not self.closing.begun:  # else it is being left, or `aclose` has it cancelled
            self.signals.cancel_body()

    async def _torn_down(self) -> None:
        """Handle the end of the loop while the manager is not closed."""
        await self.closing.torn_down()
        if self.signals.received:
            await self.signals.end_process_by_force()

    def _on_exit(self, error: Exit) -> None:
        """User code in here has raised what is meant to end the program."""
        if self.closing.begun:
            self._exit = self._exit or error  # for the task that closes
        elif not self.runtime.host.interrupt(error):
            self._exit = error

    def raise_exit(self) -> None:
        """Raise, once it has closed, what is meant to end the program, unless its loop did."""
        error, self._exit = self._exit, None
        if error is not None and not self.runtime.host.torn_down:
            raise error

    async def _end(self) -> None:
        """End the process even if its body does not: first what is accepted is saved."""
        closing = self.closing
        with closing.begin().scope("turns"):  # which the body has to leave, too
            await closing.done.wait()
        closing.stop(closing.begin())
        with anyio.move_on_after(closing.time_left()):
            await closing.done.wait()
        if not closing.done.is_set():  # it is stuck
            rescue = self.signals.rescue
            await anyio.to_thread.run_sync(rescue, limiter=anyio.CapacityLimiter(1))
        # A body that is leaving ends the process itself.
        await anyio.sleep(min(self.runtime.shutdown.hard_grace, closing.time_left()))
        await self.signals.end_process_by_force()

    # what can be done to sessions, perdure's own among them

    async def act(
        self, key: SessionKey, wait: float, act: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Run an act in the background, and wait for it as long as the store gives a sign."""
        patience = Patience(self.runtime.store.inner, key, wait)
        return await self.runtime.host.call(act, wait=patience.wait_for)

    async def save_here(self, key: SessionKey, wait: float) -> None:
        """Save what is unsaved of a session here, in as long as a caller waits for a store.

        Raises:
            StoreUnavailableError: It is not durable by then.

        """
        require_seconds("wait", wait)
        seconds = max(wait, LEAST_PATIENCE)
        with anyio.move_on_after(seconds) as scope:
            await self.runtime.host.call(self.access.save_here, key)
        if scope.cancelled_caught:
            raise StoreUnavailableError(
                f"what is unsaved of session {key} could not be saved within {seconds:g} s, and "
                "may still be: look whether the store can be reached (sessions.health()), and do "
                "it again",
                wait=seconds,
            )

    async def load(self, key: SessionKey, *, context: bool = True) -> SessionView | None:
        """Read a session; None if there is none."""
        runtime = self.runtime
        restored = await restore(
            runtime.store,
            key,
            context_bytes=runtime.limits.context_bytes,
            with_context=context,
            newest=0 if context else PAGE,  # who leaves the context out shows history
        )
        await hold_media(runtime.store, key, restored.context, runtime.media_budget)
        return SessionView(runtime.filled, runtime.registry, restored) if restored.head else None

    async def forget(
        self, wanted: SessionFilter, terms: HandoverTerms, *, dry_run: bool = False
    ) -> ForgetReport:
        """Forget the sessions that a filter finds, also those that were only posted to.

        Raises:
            InvalidArgumentError: It names neither an id, an owner nor a tag, or one is no text.

        """
        require_filters(tenant=wanted.tenant, owner=wanted.owner, tag=wanted.tag)
        if wanted.id is None and wanted.owner is None and wanted.tag is None:
            raise InvalidArgumentError(
                "forget: give an id, an owner or a tag, so that not everything is forgotten",
                option="id",
            )

        async def forget_found() -> ForgetReport:
            found = await chosen(self.access.store, wanted, self.access.sessions)
            # One that was deleted since, and posted to, is among both.
            keys = sorted({*found, *await only_posted_to(self.access.store, wanted)})
            return await forget(self.access, keys, wanted.tenant, terms, dry_run=dry_run)

        return await self.act(
            SessionKey(wanted.id or "-", tenant=wanted.tenant), terms.wait, forget_found
        )

    async def prune(
        self,
        retention: Retention,
        wanted: SessionFilter,
        terms: HandoverTerms,
        *,
        dry_run: bool = False,
        scrub: bool = True,
    ) -> PruneReport:
        """Prune the sessions that a filter finds; all of the tenant's if it names no id."""

        async def prune_found() -> PruneReport:
            keys = None
            if wanted.id is not None:
                keys = await chosen(self.access.store, wanted, self.access.sessions)
            report = await prune(
                self.access, retention, keys, wanted.tenant, terms, dry_run=dry_run, scrub=scrub
            )
            if not dry_run:
                self.runtime.hooks.emit(report)
            return report

        key = SessionKey(wanted.id or "-", tenant=wanted.tenant)
        return await self.act(key, terms.wait, prune_found)

    async def rebuild(
        self, key: SessionKey, terms: HandoverTerms, *, dry_run: bool = False
    ) -> RebuildReport:
        """Compare a session's documents with its log, and rewrite those that are wrong."""
        return await self.act(
            key, terms.wait, partial(rebuild_session, self.access, key, terms, dry_run=dry_run)
        )


async def connected(
    store: SessionStore,
    options: ManagerOptions,
    *,
    close: Callable[[], Awaitable[object]],
    by_owner: Callable[[], object] | None,
) -> ManagerParts:
    """Open the store, and start everything."""
    shutdown = options.shutdown
    if shutdown.spill:
        check = partial(spill.require_usable, shutdown.spill)
        await anyio.to_thread.run_sync(check, abandon_on_cancel=True)
    host = Host()
    try:
        await host.start()
        await store.open()
        try:
            await require_sessions(store)
        except BaseException:
            with Deadline.of(shutdown, anyio.current_time()).scope("store") as scope:
                scope.shield = True
                await store.aclose()
            raise
    except BaseException:
        await host.aclose()
        raise
    parts = ManagerParts(Runtime(store, host, options), close, by_owner)
    if options.clock is not None:
        options.clock.drive(partial(_catch_up, parts))
    log_facts(log, logging.INFO, "connected", location=store.location, owner=store.owner)
    return parts


async def _catch_up(parts: ManagerParts) -> float:
    """Do what autosave has to do by now, and return when it will have more to do."""
    due = await parts.runtime.saver.catch_up()
    # Sessions that became idle leave memory in tasks of their own. Those begin by the
    # second checkpoint: trio runs what is ready in any order.
    await checkpoint()
    await checkpoint()
    for key, pending_load in list(parts.runtime.pending_loads.items()):
        session = parts.lifecycle.sessions.get(key)
        if session is None or session._tracked.pins or session._turns.busy:
            continue
        if session._tracked.clean:  # it can leave memory at once
            await pending_load.done.wait()
    return due


def manager_facts(connected: ManagerParts | None) -> dict[str, object]:
    """Return a manager's health; from any thread, at any time."""
    if connected is None:
        return {"state": "not connected"}
    store, report = connected.runtime.store.location, connected.closing.report
    if report is not None:
        return {"state": "closed", "store": store, "report": report}
    health = connected.health()
    return {
        "state": "open",
        "store": store,
        "sessions": f"{health.sessions} sessions",
        "saving": health.status,
        "unsaved": f"{health.unsaved_bytes} bytes unsaved",
    }
