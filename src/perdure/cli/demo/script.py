"""The demo's agents: what their scripted model says, and the tools that it calls.

The answers follow from the conversation alone: how many questions the model has seen, what the last
one was about, and what the tools said. So an agent that had lost its memory would be heard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.agent import AgentConfig
from perdure.agent.llm import ScriptedModel, call
from perdure.agent.llm.scripted import ScriptedReply
from perdure.model.messages import Message

__all__ = ["answer", "config"]

DELAY = 0.004
"""Seconds before each piece of an answer: enough that answers of all agents interleave."""
PIECE = 160
PAGES = 12
NOTE = (
    "In the year that the archive speaks of, the town rebuilt what the flood had taken, and the "
    "record names the masons, the price of the stone, and the day on which the work was done. "
)
CLOSING = (
    "The older entries agree with the newer ones where they speak of the same thing, and where "
    "they do not, the newer ones say why. If you ask me about it again I will look it up again, "
    "and tell you whether anything has changed since. "
)


async def look_up(subject: str) -> dict[str, Any]:
    """Look a subject up in the archive."""
    pages = [
        {"page": page, "text": f"Page {page}, on {subject}. {NOTE}"} for page in range(1, PAGES + 1)
    ]
    return {"subject": subject, "pages": pages}


async def distance(place: str) -> dict[str, Any]:
    """Measure how far away a place is."""
    return {"place": place, "kilometers": sum(place.encode()) % 97 / 10}


def answer(messages: Sequence[Message]) -> ScriptedReply:
    """Return what the model says next."""
    questions = [message.text for message in messages if message.role == "user"]
    subject = questions[-1].rpartition(" about ")[2].rstrip("?")
    if messages[-1].role == "user" and len(questions) % 2:
        return [call("look_up", subject=subject), call("distance", place=subject)]
    results = sum(message.role == "tool" for message in messages)
    return (
        f"This is your question {len(questions)}. I have looked {results} things up so far. "
        f"About {subject}: it stands where it stood, and the archive has {PAGES} pages on it. "
        f"{NOTE}{CLOSING}What I told you before still holds."
    )


def config(tenant: str = "") -> AgentConfig:
    """Return how an agent of the demo is made; each gets a model of its own."""
    return AgentConfig(
        name="demo",
        model=ScriptedModel(answer, chunk_chars=PIECE, delay=DELAY),
        tools=[look_up, distance],
        instructions="You know the archive of a small town by the sea.",
        tenant=tenant,
    )
