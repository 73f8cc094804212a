"""How sessions come back, seen from outside, in blocking style."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from perdure.model.keys import DEFAULT_SESSION
from perdure.sync.lives import Lives

if TYPE_CHECKING:
    from perdure.providers.target import Format
    from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
    from perdure.restore.plan import RestorePlan
    from perdure.session import manager, session
    from perdure.session.options import OnHeld
    from perdure.session.restoring import RebuildReport
    from perdure.sync.loop import LoopThread

__all__ = ["Planned", "Restoring"]


class _BlockingManager(Protocol):
    """What these methods need of the manager."""

    _loop: LoopThread
    _inner: manager.SessionManager


class _BlockingSession(Protocol):
    """What these methods need of the session."""

    _loop: LoopThread
    _inner: session.Session


class Restoring(Lives):
    """Plan restores, and rebuild working contexts; `SessionManager` has these methods."""

    def plan_restore(
        self: _BlockingManager,
        id: str,
        *,
        target: Format | None = None,
        system_prompt: str | None = None,
        options: WorkingContextSnapshotBootstrapOptions | None = None,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> RestorePlan:
        """Say what opening a session would use, repair, strip and make anew, and why.

        As `perdure.SessionManager.plan_restore`.
        """
        return self._loop.call(
            lambda: self._inner.plan_restore(
                id,
                target=target,
                system_prompt=system_prompt,
                options=options,
                session=session,
                tenant=tenant,
            )
        )

    def rebuild_working_context(
        self: _BlockingManager,
        id: str,
        *,
        dry_run: bool = False,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
        on_held: OnHeld = "raise",
        wait: float = 0.0,
    ) -> RebuildReport:
        """Make a session's working context, and all else that is folded, anew from its log.

        As `perdure.SessionManager.rebuild_working_context`.
        """
        return self._loop.call(
            lambda: self._inner.rebuild_working_context(
                id, dry_run=dry_run, session=session, tenant=tenant, on_held=on_held, wait=wait
            )
        )


class Planned:
    """Plan a restore and do it; `Session` has these methods."""

    __slots__ = ()

    def plan_restore(
        self: _BlockingSession,
        target: Format | None = None,
        *,
        system_prompt: str | None = None,
        options: WorkingContextSnapshotBootstrapOptions | None = None,
    ) -> RestorePlan:
        """Say what would come back after a kill at this moment, and what would be mended, and why.

        As `perdure.Session.plan_restore`.
        """
        return self._loop.call(
            lambda: self._inner.plan_restore(target, system_prompt=system_prompt, options=options)
        )

    def apply(self: _BlockingSession, plan: RestorePlan) -> int:
        """Do what a plan says, durably, and return the new version. As `perdure.Session.apply`."""
        return self._loop.call(lambda: self._inner.apply(plan))
