"""Code that type checkers must accept: tools with effects, open matters, large results."""

from __future__ import annotations

from typing import assert_type

from perdure import Message, SessionManager
from perdure.agent import (
    Agent,
    AgentConfig,
    AgentContext,
    AgentEvent,
    Approval,
    ApprovalRequested,
    EchoModel,
    Effect,
    EffectUnknown,
    OpenMatters,
    ResultReference,
    Tool,
    TurnEnded,
    TurnFailed,
    TurnInterrupted,
    TurnUnfinished,
    UnfinishedMessage,
    open_matters,
    reference_of,
    resolved,
    tool,
)


@tool
async def send_mail(to: str, idempotency_key: str) -> str:
    return f"{to}: {idempotency_key}"


@tool(effect="ask", unstorable="repr")
def book(day: str) -> str:
    return day


async def hook(event: AgentEvent, context: AgentContext) -> None:
    print(type(event).__name__, context.turn_id)


config = AgentConfig(
    name="mia",
    model=EchoModel(),
    tools=[send_mail, book, tool(book.function, name="again", effect="skip")],
    approve="ask",
    on_unfinished="resume",
    max_inline_bytes=64 * 1024,
    lifecycle_hooks=[hook],
)


async def people(agent: Agent) -> None:
    assert_type(agent.unfinished, tuple[UnfinishedMessage, ...])
    assert_type(await agent.resume(), tuple[TurnEnded | TurnInterrupted | TurnFailed, ...])
    assert_type(await agent.dismiss("id"), int)
    assert_type(agent.pending_approvals, tuple[Approval, ...])
    await agent.approve("call_1", always=True)
    await agent.deny("call_1", "no")
    assert_type(agent.unknown_effects, tuple[Effect, ...])
    await agent.resolve_effect("call_1", "done", result={"id": 1})
    await agent.resolve_effect("call_1", "replay")
    assert_type(send_mail, Tool)
    assert_type(book, Tool)


def of(event: AgentEvent) -> str:
    match event:
        case ApprovalRequested(call=call):
            return call.name
        case EffectUnknown(effect=effect):
            return f"{effect.tool} {effect.policy} {effect.state}"
        case TurnUnfinished(unfinished=one):
            return one.message.text
        case _:
            return event.agent_id


async def results(sessions: SessionManager) -> None:
    async with sessions.open("mia") as session:
        whole = await resolved(session, session.context())
        assert_type(whole, list[Message])
        found = reference_of(whole[0])
        assert_type(found, ResultReference | None)
        left = await open_matters(session)
        assert_type(left, OpenMatters)
        assert_type(left.unfinished, tuple[UnfinishedMessage, ...])
    view = await sessions.load("mia")
    if view is not None:
        await resolved(view, view.context())
