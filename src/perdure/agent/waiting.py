"""Tools, hooks and processors: an agent waits for them, so they must not wait for the agent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from perdure.errors import SessionError

if TYPE_CHECKING:
    from perdure.agent.context import AgentContext

__all__ = ["refuse_to_wait", "waited_for"]


class _Wait:
    """One call of such code; what it leaves running when it returns may wait for the agent."""

    __slots__ = ("context", "over")

    def __init__(self, context: AgentContext) -> None:
        self.context = context
        self.over = False


_wait: ContextVar[_Wait | None] = ContextVar("perdure_wait", default=None)


@contextlib.contextmanager
def waited_for(context: AgentContext) -> Iterator[None]:
    """Note that an agent waits for what runs in the block."""
    wait = _Wait(context)
    token = _wait.set(wait)
    try:
        yield
    finally:
        wait.over = True
        _wait.reset(token)


def refuse_to_wait(context: AgentContext, what: str, cure: str) -> None:
    """Refuse to wait for an agent where the agent waits for the caller.

    Args:
        context: The agent's.
        what: What the caller would wait for.
        cure: What to do instead.

    Raises:
        SessionError: It does.

    """
    wait = _wait.get()
    if wait is not None and wait.context is context and not wait.over:
        message = f"agent {context.agent_id!r} would wait for itself: {what} {cure}"
        raise SessionError(message, agent=context.agent_id)
