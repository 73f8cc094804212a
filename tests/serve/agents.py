"""Agents that the tests serve: `perdure serve tests.serve.agents:slow`."""

from __future__ import annotations

from collections.abc import Sequence

from perdure import Message
from perdure.agent import AgentConfig, ScriptedModel


def words(messages: Sequence[Message]) -> str:
    """Answer with as many words as the last message has, each a number."""
    last = [message.text for message in messages if message.role == "user"][-1]
    return " ".join(str(place) for place, _ in enumerate(last.split()))


def quick(id: str) -> AgentConfig:
    return AgentConfig(name="quick", model=ScriptedModel(words, chunk_chars=8))


def slow(id: str) -> AgentConfig:
    return AgentConfig(name="slow", model=ScriptedModel(words, chunk_chars=2, delay=0.05))
