"""Requests to the model: compaction if it was asked for, then the working context, rendered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import msgspec

from perdure.agent.events import (
    AgentEvent,
    CompactionCompleted,
    CompactionFailed,
    CompactionStarted,
)
from perdure.agent.memory import MemoryManager
from perdure.agent.notes import with_notes
from perdure.model.messages import Message
from perdure.session.rendering import render

__all__ = ["LLMRequest", "LLMRequestAssembler", "render_openai"]


class LLMRequest(msgspec.Struct, frozen=True):
    """What the model is asked with."""

    messages: tuple[Message, ...]
    rendered: tuple[Any, ...]
    compacted: bool = False
    """Whether old turns left the context for it."""


def render_openai(messages: Sequence[Message]) -> list[Any]:
    """Return messages as the dicts of Chat Completions."""
    return render(messages, "openai")


def _tell_nobody(_: AgentEvent) -> None:
    pass


@final
class LLMRequestAssembler:
    """Prepare what the model is asked with.

    Args:
        memory: The agent's memory.
        renderer: What makes of messages what the model takes.
        emit: Tells of compactions.
        notes: What to show behind the system prompt, beside what is kept.

    """

    def __init__(
        self,
        memory: MemoryManager,
        *,
        renderer: Callable[[Sequence[Message]], Sequence[Any]] | None = None,
        emit: Callable[[AgentEvent], None] | None = None,
        notes: Callable[[], str] | None = None,
    ) -> None:
        self._memory = memory
        self._renderer = renderer
        self._emit = emit or _tell_nobody
        self._notes = notes

    async def prepare_request(self, current_turn_id: str, system_prompt: str) -> LLMRequest:
        """Return the next request; what it shows of the turn is durable.

        A compaction that fails stays asked for, and its exception comes out of here: the model
        is not called with a context that is over its budget.
        """
        compacted = self._memory.compaction_required
        if compacted:
            await self._compact(current_turn_id, system_prompt)
        messages = self._memory.safe_messages()
        if self._notes is not None:
            messages = with_notes(messages, self._notes())
        rendered = messages if self._renderer is None else self._renderer(messages)
        await self._memory.persist_working_context_snapshot()
        return LLMRequest(messages, tuple(rendered), compacted)

    async def _compact(self, turn_id: str, system_prompt: str) -> None:
        agent_id, before = self._memory.agent_id, self._memory.context_bytes
        self._emit(CompactionStarted(agent_id=agent_id, turn_id=turn_id))
        try:
            done = await self._memory.compact(system_prompt, exclude_turn_id=turn_id)
        except Exception as error:
            self._emit(CompactionFailed(agent_id=agent_id, turn_id=turn_id, error=error))
            raise
        self._emit(
            CompactionCompleted(
                agent_id=agent_id,
                turn_id=turn_id,
                turns=len(done.turn_ids),
                bytes_before=before,
                bytes_after=self._memory.context_bytes,
            )
        )
