"""Requests to the model, and the large tool results that they bring back from their blobs.

A request is the working context, compacted if that is due, with notes, rendered. A large result
is a blob of its own, and in the conversation a preview and a reference:

    "tool_result": "<preview>"
    "perdure_tool_result_ref": {"sha256", "bytes", "media_type", "preview", "types"?}

The blob is durable before the record that names it, and shared between forks, since its name is
its hash. Text and bytes lie in it as they are, everything else as JSON. The model is shown
the whole result: `resolved` brings it back. A blob that is lost leaves the preview, and says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import msgspec
from msgspec.structs import replace

from perdure._lib.tasks import stray_cancellation_fails
from perdure.agent.effects import without_cut_answers
from perdure.agent.events import (
    AgentEvent,
    CompactionCompleted,
    CompactionFailed,
    CompactionStarted,
)
from perdure.agent.memory import MemoryManager
from perdure.agent.tools import storable
from perdure.errors import CorruptRecordError, FormatError, NotStorableError, StoreError
from perdure.providers import render
from perdure.records.chunks import name_of
from perdure.records.json import decode, encode
from perdure.records.media import text_bytes, without_media
from perdure.records.messages import RESULT_REF, Message, ToolResult
from perdure.records.values import OnUnstorable, Tags, Types, decode_value, encode_value
from perdure.session.internals import registry_of, store_of
from perdure.session.session import Session, SessionView

PREVIEW_CHARS: Final = 1000
BYTES: Final = "application/octet-stream"
TEXT: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"


class ResultReference(msgspec.Struct, frozen=True, omit_defaults=True):
    """Reference to a large tool result."""

    sha256: str
    """The blob's name, and its hash."""
    bytes: int
    media_type: str
    preview: str
    """Its beginning."""
    types: Tags | None = None
    """Types that JSON cannot express."""


def reference_of(message: Message) -> ResultReference | None:
    """Return the reference to a message's tool result, None if the message has it."""
    result = message.tool_result
    raw = None if result is None else result.extra.get(RESULT_REF)
    if raw is None:
        return None
    try:
        return decode(bytes(raw), ResultReference)
    except FormatError:  # another program's field
        return None


async def claimed(
    result: ToolResult,
    session: Session,
    *,
    max_inline_bytes: int,
    unstorable: OnUnstorable = "raise",
) -> ToolResult:
    """Return a result as it is to be kept: a large one's blob is durable then.

    A result that cannot be stored is returned as it is, but for its lone surrogates, which are
    escaped, and so is a large one where the store keeps no blobs, or cannot be reached: the log
    takes it then.
    """
    types = registry_of(session)
    if _is_small(result.result, max_inline_bytes) and unstorable == "raise":
        return result
    try:
        data, tags = encode_value(result.result, types, on_unstorable=unstorable)
    except NotStorableError:
        try:
            result = storable(result)
            data, tags = encode_value(result.result, types)
        except (NotStorableError, RecursionError):
            return result
    if unstorable == "repr":
        result = replace(result, result=decode_value(data, tags, types))
    store = store_of(session)
    # Its images become blobs of their own when it is saved, but for what a type reads.
    beside = b'{"tool_result":%b,"tool_result_types":%b}' % (data, encode(tags)) if tags else data
    if text_bytes(beside) <= max_inline_bytes or not store.capabilities.blobs:
        return result
    blob, reference = _blob(result.result, data, tags)
    try:
        await store.put_blobs(session.key.blobs, {reference.sha256: blob})
    except StoreError:
        return result
    extra = {**result.extra, RESULT_REF: msgspec.Raw(encode(reference))}
    preview = f"{reference.preview}\n[… {reference.bytes} bytes in all; this is how it begins]"
    return replace(result, result=preview, extra=extra)


async def resolved(session: Session | SessionView, messages: Sequence[Message]) -> list[Message]:
    """Return messages with their large tool results brought back from their blobs.

    A result whose blob is lost or damaged keeps its preview, and a line that says so.

    Raises:
        StoreUnavailableError: The store cannot be reached.

    """
    whole: list[Message] = []
    for message in messages:
        reference, result = reference_of(message), message.tool_result
        if reference is None or result is None:
            whole.append(message)
            continue
        data: bytes | None = None
        with contextlib.suppress(CorruptRecordError):  # as good as lost
            data = await store_of(session).get_blob(session.key.blobs, reference.sha256)
        if data is None:
            lost = f"{reference.preview}\n[… the rest of {reference.bytes} bytes is lost]"
            result = replace(result, result=lost)
        else:
            value = _value(data, reference, registry_of(session))
            extra = {name: raw for name, raw in result.extra.items() if name != RESULT_REF}
            result = replace(result, result=value, extra=extra)
        whole.append(replace(message, tool_result=result))
    return whole


def _is_small(value: Any, limit: int) -> bool:
    """Say at a glance whether a value is small; False where that needs a look."""
    if isinstance(value, str | bytes):
        return 6 * len(value) + 2 <= limit  # at worst, each character is escaped
    return value is None or isinstance(value, bool | float)


def _blob(value: Any, data: bytes, tags: Tags | None) -> tuple[bytes, ResultReference]:
    kind = JSON
    if type(value) is str:
        kind, data = TEXT, value.encode()
    elif type(value) is bytes:
        kind, data = BYTES, value
    types = tags if kind == JSON else None
    shown = without_media(data, "not in this preview") if kind == JSON else data
    preview = "" if kind == BYTES else shown[: 4 * PREVIEW_CHARS].decode(errors="ignore")
    return data, ResultReference(name_of(data), len(data), kind, preview[:PREVIEW_CHARS], types)


def _value(data: bytes, reference: ResultReference, types: Types) -> Any:
    if reference.media_type == BYTES:
        return data
    if reference.media_type == TEXT:
        return data.decode()
    return decode_value(data, reference.types, types)


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
    return (replace(prompt, content=content), *messages[1:])


class LLMRequest(msgspec.Struct, frozen=True):
    """A request to the model."""

    messages: tuple[Message, ...]
    rendered: tuple[Any, ...]
    compacted: bool = False
    """True if old turns left the context for it."""


def render_openai(messages: Sequence[Message]) -> list[Any]:
    """Return messages as the dicts of Chat Completions."""
    return render(messages, "openai").messages


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
        self._emit = emit or (lambda _: None)
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
            if not memory.budget.is_over(resolved_messages):
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
            with stray_cancellation_fails():  # a compaction model's: it has failed
                done = await self._memory.compact(
                    system_prompt, exclude_turn_id=turn_id, notes=notes
                )
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
