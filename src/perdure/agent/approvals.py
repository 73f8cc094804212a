"""Whether a tool may run now: its settings, its permissions, and whoever is asked.

What is refused becomes a result that tells the model so.
"""

from __future__ import annotations

import inspect

from perdure.agent.context import AgentContext
from perdure.model.messages import ToolCall

__all__ = ["refusal"]


async def refusal(call: ToolCall, context: AgentContext) -> str | None:
    """Return why a tool may not run, None if it may."""
    plugins, name = context.plugins, call.name
    if not plugins.tools.is_enabled(name):
        return f"the tool {name!r} is disabled"
    verdict = plugins.permissions.verdict(name)
    if verdict == "blocked":
        return f"the tool {name!r} is blocked"
    approve = context.config.approve
    if verdict == "allowed" or approve is None:
        return None
    try:
        answer = approve(call, context)
        answer = await answer if inspect.isawaitable(answer) else answer
    except Exception as error:  # noqa: BLE001  # nobody has approved it
        return f"the tool {name!r} could not be approved: {type(error).__name__}: {error}"
    if answer == "always":
        plugins.permissions.approve(name)
    return None if answer in {True, "always"} else f"the tool {name!r} was not approved"
