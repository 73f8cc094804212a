"""What is done about an agent that has stopped: keep what it has, then close what it had open.

Whatever fails, or is cancelled, the closing is done to its end: otherwise the session would stay
claimed, processes would stay behind, and a store of the agent's own would stay locked.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, final

import anyio

from perdure.agent.archiving import keep_home
from perdure.agent.bootstrap import keep_custom_data
from perdure.session.inside import disclaim

if TYPE_CHECKING:
    from perdure.agent.context import AgentContext

__all__ = ["Leaving"]

log: logging.Logger = logging.getLogger("perdure.agent")

CLOSING: Final = 30.0
"""Seconds that each part has to close that was opened for the agent."""


@final
class Leaving:
    """Leave one agent's session, once.

    Args:
        context: The agent's.
        save: Whether what came after the last turn is saved.
        release: Gives back what was opened for the agent's session.

    """

    def __init__(
        self, context: AgentContext, *, save: bool, release: Callable[[], Awaitable[object]] | None
    ) -> None:
        self._context = context
        self._save = save
        self._release = release
        self.begun: bool = False

    async def let_go(self, *, within: float | None) -> None:
        """Keep what the agent has, and let go of its session; do nothing the second time.

        Args:
            within: Seconds for the first of the two; None for as long as it takes. What the
                session has not saved by then is its manager's to save.

        """
        if self.begun:
            return
        self.begun = True
        try:
            with anyio.move_on_after(within) as scope:
                await self._keep()
            if scope.cancelled_caught:
                log.warning("an agent was not saved in time", extra=self._facts)
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()

    async def _keep(self) -> None:
        context = self._context
        if context.session.is_writable:
            await context.declared.flush()
        if self._save and context.session.is_writable:
            try:
                keep_custom_data(context)
            finally:
                await context.session.save()
                await context.plugins.memory.flush()
                await keep_home(context)

    async def _close(self) -> None:
        context = self._context
        context.plugins.detach()
        disclaim(context.session, context)
        await context.session.__aexit__(None, None, None)
        for close in reversed(context.at_stop):
            try:
                with anyio.fail_after(CLOSING):
                    await close()
            except Exception as error:  # it does not keep the others open
                log.warning("a part did not close", extra=self._facts, exc_info=error)
        if self._release is not None:
            await self._release()

    @property
    def _facts(self) -> dict[str, str]:
        return {"agent": self._context.agent_id}
