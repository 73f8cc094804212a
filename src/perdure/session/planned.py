"""A session's plan of its own restore: the part of the session that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.session.accepting import Accepting

if TYPE_CHECKING:
    from perdure.providers.target import Format
    from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
    from perdure.restore.plan import RestorePlan

__all__ = ["Planned"]


class Planned(Accepting):
    """Plan a restore and do it; `Session` has these methods."""

    __slots__ = ()

    async def plan_restore(
        self,
        target: Format | None = None,
        *,
        system_prompt: str | None = None,
        options: WorkingContextSnapshotBootstrapOptions | None = None,
    ) -> RestorePlan:
        """Say what would come back after a kill at this moment, and what would be mended, and why.

        Changes nothing; `apply` does what it says. As `SessionManager.plan_restore`, which
        tells the same of a session that nobody has opened.

        Args:
            target: The provider that the context is meant for: what would be stripped for it.
            system_prompt: The processed prompt that an agent would be restored with.
            options: How an agent would be restored. Without either, the plan is for a session
                that no agent of perdure works on.

        Raises:
            ConfigError: The target is unknown; or the system prompt has changed, and the
                options' policy is "error".
            CorruptRecordError: A document is damaged, and the options are strict.

        """
        from perdure.session.planning import plan_of

        self._check_open()
        runtime = self._runtime
        return await plan_of(
            runtime.store,
            runtime.registry,
            self.tracked.key,
            context_bytes=runtime.limits.context_bytes,
            target=target,
            system_prompt=system_prompt,
            options=options,
        )

    async def apply(self, plan: RestorePlan) -> int:
        """Do what a plan says, durably, and return the new version.

        Results that were made up are appended; where that is not enough, a record replaces the
        working context. Nothing is erased.

        Raises:
            ConfigError: The session has moved on since the plan, or has unsaved changes: save it,
                and plan again.

        """
        from perdure.session.planning import carry_out

        self._check_open()
        carry_out(self, plan)
        return await self._runtime.saver.save(self.tracked)
