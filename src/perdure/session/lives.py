"""How sessions begin with others and how they end: the part of the manager that says so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING

from perdure.errors import ConfigError
from perdure.model.keys import DEFAULT_SESSION, SessionKey, require_filters
from perdure.session.choosing import Chosen, chosen, only_posted_to
from perdure.session.forgetting import ForgetReport, Forgetter
from perdure.session.forking import Forked, Forker
from perdure.session.options import OnHeld
from perdure.session.pruning import Pruner, PruneReport
from perdure.session.renaming import Renamer
from perdure.session.retention import Retention
from perdure.session.tending import Tending, Terms

if TYPE_CHECKING:
    from perdure.model.checkpoints import Checkpoint
    from perdure.session.connected import Connected

__all__ = ["Acts", "Lives"]


class Acts:
    """What can be done to one manager's sessions from outside."""

    __slots__ = ("forgetter", "forker", "pruner", "renamer", "tending")

    def __init__(self, connected: Connected) -> None:
        self.tending: Tending = Tending(connected.runtime, connected.keeper)
        self.forker: Forker = Forker(self.tending)
        self.forgetter: Forgetter = Forgetter(self.tending, self.forker)
        self.renamer: Renamer = Renamer(self.tending, self.forker, self.forgetter)
        self.pruner: Pruner = Pruner(self.tending, self.forgetter)


class Lives(ABC):
    """Fork, copy, rename, delete, forget and prune; `SessionManager` has these methods."""

    _acts: Acts | None = None

    @abstractmethod
    def _check(self) -> Connected:
        """Return the manager's parts; raise where it cannot be used."""

    def _acting(self) -> Acts:
        connected = self._check()
        if self._acts is None:
            self._acts = Acts(connected)
        return self._acts

    async def fork(
        self,
        id: str,
        new_id: str,
        *,
        at: int | str | Checkpoint | None = None,
        session: str = DEFAULT_SESSION,
        new_session: str | None = None,
        tenant: str = "",
    ) -> Forked:
        """Begin a session with another one's history; both go on, each for itself.

        Writes one short record, however long that history is, and needs no lease on it. Doing it
        again after a crash makes it whole.

        Args:
            id: The agent's id.
            new_id: The id of the fork.
            at: Where it goes on: the seq of the last record that both have, the id of a turn
                that has ended, or a checkpoint. None for the end.
            session: Which of the agent's conversations.
            new_session: The fork's session id; None for the same.
            tenant: Whose both are.

        Raises:
            ConfigError: There is no such record, turn or checkpoint, or it is the middle of a
                group.
            SessionError: A session of the new id exists.
            SessionNotFoundError: There is nothing to fork.

        """
        acts, key = self._acting(), SessionKey(id, session, tenant)
        child = SessionKey(new_id, new_session or session, tenant)
        return await acts.tending.runtime.host.call(acts.forker.fork, key, child, at)

    async def copy(
        self,
        id: str,
        new_id: str,
        *,
        session: str = DEFAULT_SESSION,
        new_session: str | None = None,
        tenant: str = "",
    ) -> Forked:
        """Make a session with all of another one's history and state, which does not need it.

        Raises:
            NotStorableError: The store keeps no blobs.
            SessionError: A session of the new id exists.
            SessionNotFoundError: There is nothing to copy.

        """
        acts, key = self._acting(), SessionKey(id, session, tenant)
        new = SessionKey(new_id, new_session or session, tenant)
        return await acts.tending.runtime.host.call(acts.forker.copy, key, new)

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
    ) -> Forked:
        """Give a session another id; whoever has it open here has to open it anew.

        Killed anywhere, one of the ids opens with everything; doing it again finishes.

        Raises:
            LeaseHeldError: Another process goes on holding it.
            NotStorableError: The store keeps no blobs.
            SessionError: A session of the new id exists.
            SessionNotFoundError: There is no session of the old id.

        """
        acts, key = self._acting(), SessionKey(id, session, tenant)
        new = SessionKey(new_id, new_session or session, tenant)
        call = acts.tending.runtime.host.call
        return await call(acts.renamer.rename, key, new, Terms(on_held, wait))

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

        Forks of it stay: each first gets the history that it goes on behind. Blobs stay until
        they are swept; `forget` removes them too.

        Raises:
            LeaseHeldError: Another process goes on holding it, or one of its forks.

        """
        acts, key = self._acting(), SessionKey(id, session, tenant)
        call = acts.tending.runtime.host.call
        return await call(acts.forgetter.delete, key, Terms(on_held, wait))

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

        Logs, documents, what lies in quarantine, posts, spill files and blobs go, and what the
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
            wait: Seconds to wait for another process.

        Raises:
            ConfigError: Neither id, owner nor tag is given, or one of them is no text.
            LeaseHeldError: Another process goes on holding one; then nothing was removed.

        """
        acts = self._acting()
        require_filters(tenant=tenant, owner=owner, tag=tag)
        wanted = Chosen(id, session, tenant, owner, tag)
        if id is None and owner is None and tag is None:
            message = "forget: give an id, an owner or a tag, so that not everything is forgotten"
            raise ConfigError(message, option="id")
        terms = Terms(on_held, wait)
        call = partial(_forget, acts, wanted, terms, dry_run=dry_run)
        return await acts.tending.runtime.host.call(call)

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
            wait: Seconds to wait for another process.

        Raises:
            NotStorableError: The store keeps no blobs.

        """
        acts = self._acting()
        wanted = Chosen(id, session, tenant, None, None)
        terms = Terms(on_held, wait)
        call = partial(_prune, acts, retention, wanted, terms, dry_run=dry_run)
        return await acts.tending.runtime.host.call(call)


async def _forget(acts: Acts, wanted: Chosen, terms: Terms, *, dry_run: bool) -> ForgetReport:
    keys = await chosen(acts.tending.store, wanted, acts.tending.runtime.sessions)
    keys += await only_posted_to(acts.tending.store, wanted)
    return await acts.forgetter.forget(keys, wanted.tenant, terms, dry_run=dry_run)


async def _prune(
    acts: Acts, retention: Retention, wanted: Chosen, terms: Terms, *, dry_run: bool
) -> PruneReport:
    keys = (
        None
        if wanted.id is None
        else await chosen(acts.tending.store, wanted, acts.tending.runtime.sessions)
    )
    return await acts.pruner.prune(retention, keys, wanted.tenant, terms, dry_run=dry_run)
