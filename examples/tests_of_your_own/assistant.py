"""A shop's assistant: an application's own code, which knows perdure and nothing of its tests."""

from __future__ import annotations

from perdure import Message, Session
from perdure.agent.llm import Model


async def answer(session: Session, model: Model, question: str) -> str:
    """Answer a customer; what was said is durable when this returns."""
    async with session.turn():
        session.append(Message.user(question))
        chunks = [chunk.text async for chunk in model.stream(session.context(), ())]
        reply = "".join(chunks)
        session.append(Message.assistant(reply))
    return reply


def jot(session: Session, note: str) -> None:
    """Note something down, and leave the saving to autosave."""
    session.append(Message.system(f"Note: {note}"))
