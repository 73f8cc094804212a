"""The Agent Framework with its history and its checkpoints in perdure: ask, approve later.

    python examples/agent_framework_approval.py ask      runs until a person has to decide, and ends
    python examples/agent_framework_approval.py approve  resumes that run, in another process

The chat client is scripted, so it needs no key: put your client in its place.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatResponse,
    Executor,
    FunctionInvocationLayer,
    Message,
    WorkflowBuilder,
    WorkflowContext,
    handler,
    response_handler,
)

import perdure
from perdure.adapters import PerdureCheckpointStorage, PerdureHistoryProvider


class Scripted(FunctionInvocationLayer[Any], BaseChatClient):
    """Answers with how many questions it was asked."""

    def _inner_get_response(self, *, messages: Any, **kwargs: Any) -> Any:
        async def answer() -> ChatResponse[Any]:
            asked = sum(message.role == "user" for message in messages)
            return ChatResponse(messages=[Message("assistant", [f"Answer {asked}."])])

        return answer()


class Pilot(Executor):
    """Sails once a person has agreed."""

    @handler
    async def plan(self, harbor: str, context: WorkflowContext) -> None:
        await context.request_info(f"sail to {harbor}?", bool)

    @response_handler
    async def decided(
        self,
        question: str,
        agreed: bool,  # noqa: FBT001  # as the framework calls it
        context: WorkflowContext[Any, str],
    ) -> None:
        await context.yield_output("We are there." if agreed else "We stay.")


async def ask(history: PerdureHistoryProvider, storage: PerdureCheckpointStorage) -> None:
    agent = Agent(Scripted(), context_providers=[history])
    answer = await agent.run("When is low tide?", session=AgentSession(session_id="pilot"))
    print(answer.text)
    workflow = WorkflowBuilder(
        name="voyage", start_executor=Pilot(id="pilot"), checkpoint_storage=storage
    ).build()
    result = await workflow.run("Oosthaven")
    for request in result.get_request_info_events():
        print(f"waits for approval: {request.data}")


async def approve(storage: PerdureCheckpointStorage) -> None:
    latest = await storage.get_latest(workflow_name="voyage")
    if latest is None or not latest.pending_request_info_events:
        print("nothing waits for approval")
        return
    workflow = WorkflowBuilder(
        name="voyage", start_executor=Pilot(id="pilot"), checkpoint_storage=storage
    ).build()
    agreed = dict.fromkeys(latest.pending_request_info_events, True)
    result = await workflow.run(checkpoint_id=latest.checkpoint_id, responses=agreed)
    print(*result.get_outputs())


async def main(what: str) -> None:
    async with perdure.connect() as sessions:
        storage = PerdureCheckpointStorage("pilot", sessions)
        if what == "approve":
            await approve(storage)
        else:
            await ask(PerdureHistoryProvider(sessions), storage)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "ask"))
