"""Pydantic AI with its conversations in perdure: ask, wait for an approval, resume later.

    python examples/pydantic_ai_conversation.py ask      runs until a tool needs an approval
    python examples/pydantic_ai_conversation.py approve  resumes that run, in another process

The model is a function, so it needs no key: put your model in its place.
"""

from __future__ import annotations

import asyncio
import sys

from pydantic_ai import Agent, DeferredToolRequests
from pydantic_ai.conversation import Conversation
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

import perdure
from perdure.adapters import PerdureConversationStore


def scripted(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
    steps = [
        ToolCallPart("tide", {"harbor": "Oosthaven"}),
        ToolCallPart("sail", {"harbor": "Oosthaven"}),
        TextPart("We are there."),
    ]
    answered = sum(isinstance(message, ModelResponse) for message in messages)
    return ModelResponse(parts=[steps[answered]])


agent = Agent(FunctionModel(scripted), output_type=[str, DeferredToolRequests])


@agent.tool_plain
def tide(harbor: str) -> str:
    """Say when the tide is low."""
    return f"low in {harbor} at noon"


@agent.tool_plain(requires_approval=True)
def sail(harbor: str) -> str:
    """Leave for a harbor."""
    return f"sailed to {harbor}"


async def ask(store: PerdureConversationStore) -> None:
    conversation = await store.load("pilot") or Conversation(conversation_id="pilot")
    result = await agent.run("Take me to Oosthaven", conversation=conversation)
    await store.save(result, scope="ada")
    if isinstance(result.output, DeferredToolRequests):
        for call in result.output.approvals:
            print(f"waits for approval: {call.tool_name}({call.args})")


async def approve(store: PerdureConversationStore) -> None:
    conversation = await store.load("pilot")
    if conversation is None or conversation.deferred_tool_requests is None:
        print("nothing waits for approval")
        return
    approved = conversation.deferred_tool_requests.build_results(approve_all=True)
    result = await agent.run(conversation=conversation, deferred_tool_results=approved)
    await store.save(result)
    print(f"{result.output} The conversation has {len(result.all_messages())} messages.")


async def main(what: str) -> None:
    async with perdure.connect() as sessions:
        store = PerdureConversationStore(sessions)
        await (approve(store) if what == "approve" else ask(store))


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "ask"))
