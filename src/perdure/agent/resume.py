"""Going on with what was not answered: which messages those are, and how far their turns came.

A message is in the ledger from before its turn begins until that has ended. So whatever ends a
process, the next one finds the message, and in the log what came of it until then.
"""

from __future__ import annotations

from typing import Final

import msgspec

from perdure.agent.context import AgentContext
from perdure.agent.effects import EffectProgress, is_unknown, progress
from perdure.agent.events import (
    EffectUnknown,
    ResumeEvent,
    ToolInvocationRequestEvent,
    TurnUnfinished,
    UnfinishedMessage,
    UserMessageReceivedEvent,
)
from perdure.agent.ledger import whole_ledger
from perdure.memory.ledger import Admitted, Approval, Effect
from perdure.memory.traces import newest_turns
from perdure.records.messages import decode_message
from perdure.records.values import Types
from perdure.restore.report import RestoreStep
from perdure.session.internals import registry_of, report_step, store_of
from perdure.session.session import Session
from perdure.session.view import SessionView

MOST_ATTEMPTS: Final = 3
"""How often a turn is begun without anybody asking: it may be what kills the process."""


class OpenMatters(msgspec.Struct, frozen=True):
    """What an agent has begun and not brought to its end, as its session has it."""

    unfinished: tuple[UnfinishedMessage, ...] = ()
    """Messages that are not answered; one that is being answered is among them."""
    effects: tuple[Effect, ...] = ()
    """Calls of tools with side effects whose outcome is not known."""
    approvals: tuple[Approval, ...] = ()
    """Tool calls that wait for an approval, or have one and have not begun."""


async def open_matters(session: Session | SessionView) -> OpenMatters:
    """Return what is under way in a session: for whoever looks at it without its agent."""
    ledger, types = await whole_ledger(session), registry_of(session)
    unfinished_left = tuple(_unfinished(message, types) for message in ledger.messages())
    return OpenMatters(unfinished_left, ledger.effects(), ledger.approvals())


def unfinished(context: AgentContext) -> tuple[UnfinishedMessage, ...]:
    """Return the messages that are not answered, the running turn's aside; oldest first."""
    types = registry_of(context.session)
    return tuple(
        _unfinished(message, types)
        for message in context.ledger.messages
        if message.id not in context.ledger.underway
    )


def _unfinished(admitted: Admitted, types: Types) -> UnfinishedMessage:
    return UnfinishedMessage(
        id=admitted.id,
        message=decode_message(bytes(admitted.message), types),
        at=admitted.at,
        turn_id=admitted.turn or admitted.asked,
        attempts=admitted.attempts,
        error=admitted.error,
    )


def unknown(context: AgentContext) -> tuple[Effect, ...]:
    """Return the effects of which nobody knows, those that run just now aside."""
    running = context.turn_id
    return tuple(
        effect
        for effect in context.ledger.effects
        if is_unknown(effect) and not (effect.turn == running and effect.state == "begun")
    )


def to_resume(unfinished_messages: tuple[UnfinishedMessage, ...]) -> tuple[UnfinishedMessage, ...]:
    """Return those that an agent goes on with by itself when it starts.

    Not what has failed, since whoever posted it was told, nor what may have killed the process.
    """
    return tuple(
        message
        for message in unfinished_messages
        if message.error is None and message.attempts < MOST_ATTEMPTS
    )


def report(context: AgentContext) -> None:
    """Tell of what was left when the agent stopped, by events and in the restore report."""
    agent_id, steps = context.agent_id, list[RestoreStep]()
    for effect in unknown(context):
        context.emit(EffectUnknown(agent_id=agent_id, effect=effect))
        detail = f"{effect.tool}, call {effect.call} of {effect.turn}: {effect.policy}"
        steps.append(RestoreStep("unknown effect", detail))
    for message in unfinished(context):
        context.emit(
            TurnUnfinished(agent_id=agent_id, turn_id=message.turn_id or "", unfinished=message)
        )
        steps.append(
            RestoreStep("unfinished", message.turn_id or "a message that no turn had begun")
        )
    for approval in context.ledger.approvals:
        if approval.answer is None:
            detail = f"{approval.tool}, call {approval.call} of {approval.turn}"
            steps.append(RestoreStep("waits for approval", detail))
    for step in steps:
        report_step(context.session, step.what, step.detail)
    if context.restore_report is not None:
        all_steps = (*context.restore_report.steps, *steps)
        context.restore_report = msgspec.structs.replace(context.restore_report, steps=all_steps)


async def go_on(event: ResumeEvent, context: AgentContext) -> EffectProgress:
    """Return how far a turn had come."""
    message = event.unfinished
    if message.turn_id is None or not message.attempts:
        return EffectProgress()
    session = context.session
    await session.save()  # the turns are read from the store
    types = registry_of(session)
    turns = await newest_turns(store_of(session), session.key, message.attempts + 1)
    return progress(
        [
            decode_message(payload, types)
            for turn in turns
            if turn.id == message.turn_id
            for payload in turn.messages
        ]
    )


def first_event(
    done: EffectProgress, message: UnfinishedMessage
) -> UserMessageReceivedEvent | ToolInvocationRequestEvent:
    """Return what a resumed turn goes on with; for one that has an answer, nothing has to be done.

    The calls without a result come before the model, as in a turn that was never stopped.
    """
    if not done.has_input:
        return UserMessageReceivedEvent(message.message)
    if done.open_calls:
        return ToolInvocationRequestEvent(done.open_calls, resumed=True)
    return UserMessageReceivedEvent(None, sender="tool")
