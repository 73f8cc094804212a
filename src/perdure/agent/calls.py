"""Tool calls: approve a call, record it, run it, keep its result.

A call of a tool with side effects is durable in the ledger before it begins, under the idempotency
key that the tool is given. Its result enters the log in one group with the note that it is settled:
after a crash there is either the result or an effect of unknown outcome, never neither.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, Final

import anyio
import msgspec

from perdure._lib.logs import log_facts
from perdure._lib.tasks import stray_cancellation_fails
from perdure.agent.context import AgentContext
from perdure.agent.effects import SKIPPED, Verdict, given_result, is_intact, verdict
from perdure.agent.events import ApprovalRequested, EffectUnknown, ToolFinished, ToolStarted
from perdure.agent.hooks import processed, waited_for
from perdure.agent.requests import claimed
from perdure.agent.tools import CANCELLED, Tool, error_text, failed, is_certain
from perdure.memory.ledger import Effect
from perdure.providers.tool_pairs import INTERRUPTED, unknown_result
from perdure.records.messages import Message, ToolCall, ToolResult
from perdure.session.internals import grouped

log: logging.Logger = logging.getLogger("perdure.agent")

# Capability events: what was asked of tools, allowed and used, as kernel events for a replay
# (docs/replay.md lists them)


_KINDS: Final = {"done": "capability_used", "refused": "capability_denied"}


def _emit(kind: str, call: ToolCall, context: AgentContext, **more: Any) -> None:
    context.session.events.emit(kind, call.name, {"call": call.id, **more})


# Whether a tool may run now: its settings, its permissions, and an answer to the question
#
# What is refused becomes a result that tells the model so. A call that waits for an answer is in
# the ledger, and durable, before the question is shown: after a restart it waits still.


def barred(call: ToolCall, context: AgentContext) -> str | None:
    """Return why a tool may not run even with an approval, None if it may."""
    plugins, name = context.plugins, call.name
    if not plugins.tools.is_enabled(name):
        return f"the tool {name!r} is disabled"
    if plugins.permissions.verdict(name) == "blocked":
        return f"the tool {name!r} is blocked"
    return None


async def refusal(call: ToolCall, context: AgentContext) -> str | None:
    """Return why a tool may not run, None if it may."""
    reason = barred(call, context)
    if reason is not None:
        return reason
    plugins, name, approve = context.plugins, call.name, context.config.approve
    is_allowed = plugins.permissions.verdict(name) == "allowed"
    known = context.ledger.approval_of(context.turn_id, call)
    if known is not None and (known.answer is not None or not is_allowed):
        # The answer decides, even if the configuration has changed since.
        return await _asked(call, context)
    if is_allowed or approve is None:
        return None
    if approve == "ask":
        return await _asked(call, context)
    try:
        with stray_cancellation_fails():
            answer = approve(call, context)
            answer = await answer if inspect.isawaitable(answer) else answer
    except Exception as error:  # noqa: BLE001  # it was not approved
        return f"the tool {name!r} could not be approved: {error_text(error)}"
    if answer == "ask":
        return await _asked(call, context)
    if answer not in {True, "always"}:
        return f"the tool {name!r} was not approved"
    if answer == "always":
        plugins.permissions.approve(name)
    _emit("capability_granted", call, context, by="function")
    return None


async def _asked(call: ToolCall, context: AgentContext) -> str | None:
    """Wait until a call is approved or denied."""
    approval = context.ledger.ask(context.turn_id, call)
    if approval.answer is None:
        # Durable before anyone sees the question, so that the answer finds it after a restart.
        await context.session.save()
        context.emit(ApprovalRequested(call=call, **context.ids))
        approval = await context.ledger.answered(approval)
    if approval.answer == "approved":
        _emit("capability_granted", call, context, by="person")
        return None
    reason = f": {approval.why}" if approval.why else ""
    return f"the tool {call.name!r} was not approved{reason}"


# Calling tools: approved first, noted before, kept after
#
# A call of a tool with side effects is in the ledger, durably, before it begins, under the key
# that the tool is given. Its result enters the log in one group with the note that it is settled:
# so after a crash there is the result, or the effect is known to be unknown, and never neither.


class PlannedCall(msgspec.Struct):
    """A call, and what to do about it."""

    call: ToolCall
    verdict: Verdict
    tool: Tool | None
    effect: Effect | None


def plan(call: ToolCall, context: AgentContext, *, resumed: bool) -> PlannedCall:
    """Decide on a call, and note it if it has side effects; durable with the next save.

    Args:
        call: What the model wants.
        context: The agent's.
        resumed: Whether it may have been made already, before a restart.

    """
    ledger, turn, tool = context.ledger, context.turn_id, context.toolbox.find(call.name)
    what: Verdict = "run"
    effect = ledger.effect_of(turn, call) if resumed else None
    if resumed:
        approval = ledger.approval_of(turn, call)
        can_run = tool is not None and is_intact(call)
        what = verdict(effect, approval, can_run=can_run)
    if what == "ask" and effect is not None:
        effect = ledger.unknown(effect)  # also one decided to be replayed, which cannot be now
    if what == "run" and effect is None and tool is not None and tool.effect is not None:
        is_open = context.plugins.permissions.verdict(call.name) == "open"
        # Begun, as of the save that comes anyway, if no question has to be answered before.
        is_begun = not is_open or context.config.approve is None
        effect = ledger.plan(turn, call, tool.effect, begun=is_begun)
    if not resumed:
        _emit("capability_requested", call, context)
    return PlannedCall(call, what, tool, effect)


async def make(planned: PlannedCall, context: AgentContext) -> ToolResult | None:
    """Do what was decided, and keep the result; None if the call had one already."""
    call = planned.call
    context.emit(ToolStarted(call=call, **context.ids))
    how, result = await _outcome(planned, context)
    try:
        # As the processors make it, a large one with its blob.
        stored = await claimed(
            await processed(result, call, context),
            context.session,
            max_inline_bytes=context.config.max_inline_bytes,
            unstorable="raise" if planned.tool is None else planned.tool.unstorable,
        )
    except anyio.get_cancelled_exc_class():
        _keep(result, how, planned, context)  # it is complete: only its looks are not
        raise
    is_new = _keep(stored, how, planned, context)
    context.emit(ToolFinished(call=call, result=stored, **context.ids))
    if planned.effect is not None and planned.effect.told:
        context.emit(EffectUnknown(agent_id=context.agent_id, effect=planned.effect))
    return stored if is_new else None


async def _outcome(planned: PlannedCall, context: AgentContext) -> tuple[str, ToolResult]:
    """Return what came of a call, and in one word how it went."""
    call, effect, what = planned.call, planned.effect, planned.verdict
    if what == "ask" and effect is not None:
        context.emit(EffectUnknown(agent_id=context.agent_id, effect=effect))
        effect = planned.effect = await context.ledger.decided(effect)
        what = "again" if effect.decision == "replay" else effect.decision or "skip"
    if what == "run":
        reason = await refusal(call, context)
        return await _run(planned, context) if reason is None else ("refused", failed(call, reason))
    if what == "again":
        reason = barred(call, context)  # by now; what the first call has done stays unknown
        if reason is not None:
            return "unknown", failed(call, f"{SKIPPED}: {reason}")
        return await _run(planned, context)
    if what == "done" and effect is not None:
        return "done", given_result(effect)
    if what == "skip":
        return "skipped", failed(call, SKIPPED)
    return "interrupted", failed(call, INTERRUPTED)


async def _run(planned: PlannedCall, context: AgentContext) -> tuple[str, ToolResult]:
    call, effect, limit = planned.call, planned.effect, context.config.tool_timeout
    was_approved = context.ledger.end_approval(context.turn_id, call)
    if effect is not None:
        context.ledger.begun(effect)
    if was_approved or (effect is not None and effect.state != "begun"):
        await context.session.save()  # that it begins, before it does
    key = None if effect is None else effect.id
    with waited_for(context):
        result = await context.toolbox.run(call, context, limit=limit, idempotency_key=key)
    if not is_certain(result):
        return "unknown", result
    return "done" if result.error is None else "failed", result


def _keep(result: ToolResult, how: str, planned: PlannedCall, context: AgentContext) -> bool:
    """Keep a result and what is known of its effect, as one group of the log."""
    ledger, turn, effect = context.ledger, context.turn_id, planned.effect
    is_unknown = effect is not None and how == "unknown"
    message = unknown_result(result) if is_unknown else Message(role="tool", tool_result=result)
    # One group: a crash leaves the result and the settled effect, or neither.
    with grouped(context.session):
        is_new = context.memory.ingest_tool_result(message, turn)
        ledger.end_approval(turn, planned.call)
        if effect is not None and how == "unknown":
            planned.effect = ledger.unknown(effect, told=True)
        elif effect is not None:
            ledger.settled(effect, how)
        if is_new:
            more = {} if how in _KINDS else {"outcome": how}
            _emit(_KINDS.get(how, "capability_failed"), planned.call, context, **more)
    return is_new


def lost(planned: PlannedCall, context: AgentContext) -> ToolResult:
    """Keep that a call has cancelled its own task, which asyncio reports to no one else."""
    call, reason = planned.call, f"{CANCELLED}: the tool cancelled its own task"
    message = "a tool cancelled its own task"
    log_facts(log, logging.WARNING, message, tool=call.name, call=call.id)
    result = failed(call, reason)
    _keep(result, "unknown", planned, context)
    context.emit(ToolFinished(call=call, result=result, **context.ids))
    return result
