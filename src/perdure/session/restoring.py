"""How sessions come back, seen from outside: plans, and rebuilding what is folded.

The part of the manager that says so.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread
import msgspec

from perdure.errors import SessionNotFoundError, StoreUnavailableError
from perdure.model.keys import DEFAULT_SESSION, SessionKey
from perdure.model.records import Record
from perdure.restore.validity import judged
from perdure.session.comparing import WholeLog, differences
from perdure.session.hindsight import base_documents
from perdure.session.lives import Acts, Lives
from perdure.session.options import OnHeld
from perdure.session.rebuilding import rebuild
from perdure.session.tending import Terms

if TYPE_CHECKING:
    from perdure.model.manifest import Manifest
    from perdure.providers.target import Format
    from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
    from perdure.restore.plan import RestorePlan
    from perdure.session.comparing import Difference
    from perdure.session.session import Session
    from perdure.session.tending import Tending

__all__ = ["RebuildReport", "Restoring"]


class RebuildReport(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """What a rebuild found, and what it made anew."""

    key: SessionKey
    records: int = 0
    """Of the log that the documents were compared with."""
    wrong: tuple[str, ...] = ()
    """Documents that were not what the log amounts to, in words; empty if all were right."""
    rebuilt: tuple[str, ...] = ()
    """Documents that were written, by name."""
    dry_run: bool = False

    def __str__(self) -> str:
        wrong = "; ".join(self.wrong) or "every document was what its log amounts to"
        done = "nothing was changed" if self.dry_run else f"rebuilt {', '.join(self.rebuilt)}"
        return f"{self.key}: {wrong}; {done}"


class Restoring(Lives):
    """Plan restores, and rebuild working contexts; `SessionManager` has these methods."""

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
        """Say what opening a session would use, repair, strip and make anew, and why.

        Needs no lease, changes nothing, and reads all documents. Of a session that is open here
        it tells what would come back after a kill at this moment.

        Args:
            id: The agent's id.
            target: The provider that the context is meant for: what would be stripped for it.
            system_prompt: The processed prompt that an agent would be restored with.
            options: How an agent would be restored. Without either, the plan is for a session
                that no agent of perdure works on.
            session: Which of the agent's conversations.
            tenant: Whose it is, where customers share a store.

        Raises:
            ConfigError: The target is unknown; or the system prompt has changed, and the
                options' policy is "error".
            CorruptRecordError: The log is damaged before its tail; or a document is, and the
                options are strict.

        """
        from perdure.session.planning import plan_of

        runtime = self._check().runtime
        return await plan_of(
            runtime.store,
            runtime.registry,
            SessionKey(id, session, tenant),
            context_bytes=runtime.limits.context_bytes,
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
        """Make a session's working context, and all else that is folded, anew from its log.

        What is stored is compared with the log first, and told; it is a cache, so this loses
        nothing. A session that is open here stays open.

        Args:
            id: The agent's id.
            dry_run: Only compare.
            session: Which of the agent's conversations.
            tenant: Whose it is, where customers share a store.
            on_held: What to do if another process holds it.
            wait: Seconds to wait for another process.

        Raises:
            CorruptRecordError: The log is damaged before its tail.
            LeaseHeldError: Another process goes on holding it.
            SessionNotFoundError: There is no such session.

        """
        acts, key = self._acting(), SessionKey(id, session, tenant)
        call = partial(_rebuild, acts, key, Terms(on_held, wait), dry_run=dry_run)
        return await acts.tending.runtime.host.call(call)


async def _rebuild(acts: Acts, key: SessionKey, terms: Terms, *, dry_run: bool) -> RebuildReport:
    tending = acts.tending
    records, wrong = await _compared(tending, key)
    report = RebuildReport(
        key=key,
        records=records,
        wrong=tuple(one.detail for one in wrong),
        dry_run=dry_run,
    )
    if dry_run:
        return report
    names = frozenset(one.name for one in wrong)
    async with tending.alone(key):
        mine = tending.runtime.sessions.get(key)
        if mine is not None:
            manifest = await _rebuild_open(tending, mine, names)
        else:
            async with tending.held(key, terms) as hold:
                limits = tending.runtime.limits
                manifest = await rebuild(
                    tending.store, key, epoch=hold.epoch, limits=limits, wrong=names
                )
    return msgspec.structs.replace(report, rebuilt=tuple(sorted(manifest.documents)))


async def _rebuild_open(tending: Tending, mine: Session, wrong: frozenset[str]) -> Manifest:
    """Rebuild what lies behind a session that is open here; what it holds stays as it is."""
    runtime = tending.runtime
    await mine.save()

    async def work() -> Manifest:
        tail = (mine.tail_bytes, mine.tail_records)
        manifest = await rebuild(
            tending.store, mine.key, epoch=mine.epoch, limits=runtime.limits, wrong=wrong
        )
        mine.folded(manifest, tail)
        return manifest

    manifest = await runtime.saver.exclusive(mine.tracked, work, urgent=True)
    if manifest is None:
        message = f"session {mine.key} cannot be rebuilt now: the store is not well; try again"
        raise StoreUnavailableError(message, key=str(mine.key))
    return manifest


async def _compared(tending: Tending, key: SessionKey) -> tuple[int, list[Difference]]:
    """Return how many records there are, and what of the documents does not follow from them."""
    store = tending.store
    documents = judged(await store.read_documents(key, None), key)
    records: list[Record] = []
    async with contextlib.aclosing(store.read_log(key)) as log:
        async for chunk in log:
            records += chunk.records
    if not records:
        raise SessionNotFoundError(f"there is no session {key}", key=str(key))
    whole = WholeLog(key, records, (await base_documents(store, key)).found)
    wrong = await anyio.to_thread.run_sync(lambda: list(differences(whole, documents)))
    return len(records), wrong
