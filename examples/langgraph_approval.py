"""LangGraph with its threads in perdure: ask, wait for an approval, resume later.

    python examples/langgraph_approval.py ask      runs until a person is asked
    python examples/langgraph_approval.py approve  resumes that run, in another process

The model is a function, so it needs no key: put your model in its place.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

import perdure
from perdure.adapters import PerdureSaver

THREAD: RunnableConfig = {"configurable": {"thread_id": "pilot"}}


async def plan(_: MessagesState) -> dict[str, Any]:
    return {"messages": [("ai", "The tide is low at noon: we leave at eleven.")]}


def sail(_: MessagesState) -> dict[str, Any]:
    answer = interrupt("sail to Oosthaven?")
    return {"messages": [("ai", "We are there." if answer == "yes" else "We stay.")]}


builder = StateGraph(MessagesState)
builder.add_node(plan)
builder.add_node(sail)
builder.add_edge(START, "plan")
builder.add_edge("plan", "sail")


async def main(what: str) -> None:
    async with perdure.connect() as sessions:
        graph = builder.compile(checkpointer=PerdureSaver(sessions))
        if what == "ask":
            await graph.ainvoke({"messages": [("user", "Take me to Oosthaven")]}, THREAD)
        elif not (await graph.aget_state(THREAD)).interrupts:
            print("nothing waits for approval")
            return
        else:
            await graph.ainvoke(Command(resume="yes"), THREAD)
        state = await graph.aget_state(THREAD)
        for waiting in state.interrupts:
            print(f"waits for approval: {waiting.value}")
        if not state.interrupts:
            messages = state.values["messages"]
            print(f"{messages[-1].content} The thread has {len(messages)} messages.")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "ask"))
