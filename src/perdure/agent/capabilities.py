"""What an agent's tools were asked for, allowed and used: told as kernel events, for a replay.

They stand in the session's log beside the calls themselves; docs/replay.md lists them.
"""

from __future__ import annotations

from typing import Any, Final

from perdure.agent.context import AgentContext
from perdure.model.messages import ToolCall

__all__ = ["granted", "outcome", "requested"]

_KINDS: Final = {"done": "capability_used", "refused": "capability_denied"}


def requested(call: ToolCall, context: AgentContext) -> None:
    """Tell that the model wants a tool to run."""
    _emit("capability_requested", call, context)


def granted(call: ToolCall, context: AgentContext, by: str) -> None:
    """Tell that a call was approved, and by whom: "person" or "function"."""
    _emit("capability_granted", call, context, by=by)


def outcome(call: ToolCall, context: AgentContext, how: str) -> None:
    """Tell what came of a call, in one word as `perdure.agent.calls` has it."""
    more = {} if how in _KINDS else {"outcome": how}
    _emit(_KINDS.get(how, "capability_failed"), call, context, **more)


def _emit(kind: str, call: ToolCall, context: AgentContext, **more: Any) -> None:
    context.session.events.emit(kind, call.name, {"call": call.id, **more})
