"""How sessions begin with others and how they end, in blocking style."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from perdure.model.keys import DEFAULT_SESSION

if TYPE_CHECKING:
    from perdure.model.checkpoints import Checkpoint
    from perdure.session import manager
    from perdure.session.forgetting import ForgetReport
    from perdure.session.forking import Forked
    from perdure.session.options import OnHeld
    from perdure.session.pruning import PruneReport
    from perdure.session.retention import Retention
    from perdure.sync.loop import LoopThread

__all__ = ["Lives"]


class _Blocking(Protocol):
    """What these methods need of the manager."""

    _loop: LoopThread
    _inner: manager.SessionManager


class Lives:
    """Fork, copy, rename, delete, forget and prune; `SessionManager` has these methods."""

    def fork(
        self: _Blocking,
        id: str,
        new_id: str,
        *,
        at: int | str | Checkpoint | None = None,
        session: str = DEFAULT_SESSION,
        new_session: str | None = None,
        tenant: str = "",
    ) -> Forked:
        """Begin a session with another one's history; both go on, each for itself.

        As `perdure.SessionManager.fork`.
        """
        return self._loop.call(
            lambda: self._inner.fork(
                id, new_id, at=at, session=session, new_session=new_session, tenant=tenant
            )
        )

    def copy(
        self: _Blocking,
        id: str,
        new_id: str,
        *,
        session: str = DEFAULT_SESSION,
        new_session: str | None = None,
        tenant: str = "",
    ) -> Forked:
        """Make a session with all of another one's history and state, which does not need it.

        As `perdure.SessionManager.copy`.
        """
        return self._loop.call(
            lambda: self._inner.copy(
                id, new_id, session=session, new_session=new_session, tenant=tenant
            )
        )

    def rename(
        self: _Blocking,
        id: str,
        new_id: str,
        *,
        session: str = DEFAULT_SESSION,
        new_session: str | None = None,
        tenant: str = "",
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> Forked:
        """Give a session another id; whoever has it open here has to open it anew.

        As `perdure.SessionManager.rename`.
        """
        return self._loop.call(
            lambda: self._inner.rename(
                id,
                new_id,
                session=session,
                new_session=new_session,
                tenant=tenant,
                on_held=on_held,
                wait=wait,
            )
        )

    def delete(
        self: _Blocking,
        id: str,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> bool:
        """Remove a session and all that it owns; False if there was none.

        As `perdure.SessionManager.delete`.
        """
        return self._loop.call(
            lambda: self._inner.delete(
                id, session=session, tenant=tenant, on_held=on_held, wait=wait
            )
        )

    def forget(
        self: _Blocking,
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

        As `perdure.SessionManager.forget`.
        """
        return self._loop.call(
            lambda: self._inner.forget(
                id=id,
                session=session,
                tenant=tenant,
                owner=owner,
                tag=tag,
                dry_run=dry_run,
                on_held=on_held,
                wait=wait,
            )
        )

    def prune(
        self: _Blocking,
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

        As `perdure.SessionManager.prune`.
        """
        return self._loop.call(
            lambda: self._inner.prune(
                retention,
                id=id,
                session=session,
                tenant=tenant,
                dry_run=dry_run,
                on_held=on_held,
                wait=wait,
            )
        )
