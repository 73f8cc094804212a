"""Requests to the model: compaction if requested, then the working context with notes, rendered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import msgspec

from perdure.agent.effects import without_cut_answers
from perdure.agent.events import (
    AgentEvent,
    CompactionCompleted,
    CompactionFailed,
    CompactionStarted,
)
from perdure.agent.memory import MemoryManager
from perdure.agent.results import reference_of, resolved
from perdure.providers import render
from perdure.records.messages import Message


def with_notes(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Return messages with notes after the system prompt; the result is not stored."""
    if not text:
        return tuple(messages)
    if not messages or messages[0].role != "system":
        return (Message.system(text), *messages)
    prompt = messages[0]
    content: str | list[Any]
    if isinstance(prompt.content, list):
        content = [*prompt.content, {"type": "text", "text": text}]
    else:
        content = f"{prompt.content or ''}\n\n{text}".lstrip()
    return (msgspec.structs.replace(prompt, content=content), *messages[1:])


class LLMRequest(msgspec.Struct, frozen=True):
    """What the model is asked with."""

    messages: tuple[Message, ...]
    rendered: tuple[Any, ...]
    compacted: bool = False
    """Whether old turns left the context for it."""


def render_openai(messages: Sequence[Message]) -> list[Any]:
    """Return messages as the dicts of Chat Completions."""
    return render(messages, "openai").messages


def _tell_nobody(_: AgentEvent) -> None:
    pass


@final
class LLMRequestAssembler:
    """Prepare what the model is asked with.

    Args:
        memory: The agent's memory.
        renderer: What makes of messages what the model takes.
        emit: Called with the events of compactions.
        notes: What to show after the system prompt, besides what is stored.

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

        Compacts first if that was asked for, or if the context is over its budget by now. A
        compaction that fails stays asked for, and its exception comes out of here: the model
        is not called with a context that is over its budget.

        Raises:
            CompactionError: Old turns could not be summed up.
            StoreUnavailableError: The store cannot be reached.

        """
        messages = self._messages()
        compacted = self._memory.is_due(messages)
        if compacted:
            await self._compact(current_turn_id, system_prompt)
            messages = self._messages()
        messages = await self._with_results(messages)
        rendered = messages if self._renderer is None else self._renderer(messages)
        await self._memory.persist_working_context_snapshot()
        return LLMRequest(messages, tuple(rendered), compacted)

    async def _with_results(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Bring large results back, the newest first, as far as the budget allows."""
        memory, apart = self._memory, 0
        policy, shown = memory.compaction_policy, list(messages)
        for at in reversed(range(len(shown))):
            reference = reference_of(shown[at])
            if reference is None or policy.is_due(
                memory.context_bytes + apart + reference.bytes, None
            ):
                continue
            resolved_messages = [
                *shown[:at],
                *await resolved(memory.session, [shown[at]]),
                *shown[at + 1 :],
            ]
            if not memory.is_over_budget(resolved_messages):
                apart += reference.bytes
                shown = resolved_messages
        return tuple(shown)

    def _messages(self) -> tuple[Message, ...]:
        messages = without_cut_answers(self._memory.safe_messages())
        return messages if self._notes is None else with_notes(messages, self._notes())

    async def _compact(self, turn_id: str, system_prompt: str) -> None:
        agent_id, before = self._memory.agent_id, self._memory.context_bytes
        self._emit(CompactionStarted(agent_id=agent_id, turn_id=turn_id))
        try:
            notes = "" if self._notes is None else self._notes()
            done = await self._memory.compact(system_prompt, exclude_turn_id=turn_id, notes=notes)
        except Exception as error:
            self._memory.request_compaction()
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
