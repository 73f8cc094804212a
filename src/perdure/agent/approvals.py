"""Whether a tool may run now: its settings, its permissions, and whoever is asked.

What is refused becomes a result that tells the model so. A call that waits for somebody is
in the ledger, and durable, before anybody is told of it: after a restart it waits still.
"""

from __future__ import annotations

import inspect

from perdure.agent import capabilities
from perdure.agent.context import AgentContext
from perdure.agent.events import ApprovalRequested
from perdure.model.messages import ToolCall

__all__ = ["barred", "must_ask", "refusal"]


def must_ask(call: ToolCall, context: AgentContext) -> bool:
    """Say whether somebody, or some function, decides before a tool may run."""
    is_open = context.plugins.permissions.verdict(call.name) == "open"
    return is_open and context.config.approve is not None


def barred(call: ToolCall, context: AgentContext) -> str | None:
    """Return why a tool may not run whoever says so, None if it may."""
    plugins, name = context.plugins, call.name
    if not plugins.tools.is_enabled(name):
        return f"the tool {name!r} is disabled"
    if plugins.permissions.verdict(name) == "blocked":
        return f"the tool {name!r} is blocked"
    return None


async def refusal(call: ToolCall, context: AgentContext) -> str | None:
    """Return why a tool may not run, None if it may."""
    why = barred(call, context)
    if why is not None:
        return why
    plugins, name, approve = context.plugins, call.name, context.config.approve
    is_allowed = plugins.permissions.verdict(name) == "allowed"
    known = context.ledger.approval_of(context.turn_id, call)
    if known is not None and (known.answer is not None or not is_allowed):
        return await _asked(call, context)  # whoever was asked decides, whatever is configured now
    if is_allowed or approve is None:
        return None
    if approve == "ask":
        return await _asked(call, context)
    try:
        answer = approve(call, context)
        answer = await answer if inspect.isawaitable(answer) else answer
    except Exception as error:  # noqa: BLE001  # nobody has approved it
        return f"the tool {name!r} could not be approved: {type(error).__name__}: {error}"
    return await _asked(call, context) if answer == "ask" else _answered(answer, call, context)


def _answered(answer: object, call: ToolCall, context: AgentContext) -> str | None:
    if answer not in {True, "always"}:
        return f"the tool {call.name!r} was not approved"
    if answer == "always":
        context.plugins.permissions.approve(call.name)
    capabilities.granted(call, context, "function")
    return None


async def _asked(call: ToolCall, context: AgentContext) -> str | None:
    """Wait until somebody has approved a call, or denied it."""
    approval = context.ledger.ask(context.turn_id, call)
    if approval.answer is None:
        await context.session.save()
        told = {"agent_id": context.agent_id, "turn_id": context.turn_id}
        context.emit(ApprovalRequested(call=call, **told))
        approval = await context.ledger.answered(approval)
    if approval.answer == "approved":
        capabilities.granted(call, context, "person")
        return None
    why = f": {approval.why}" if approval.why else ""
    return f"the tool {call.name!r} was not approved{why}"
