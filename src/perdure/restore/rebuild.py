"""Building a working context: system prompt, memory, and the newest turns.

Used when a compaction replaces the context, and when a restore has no cache to read. The same
parts always give the same messages, and repairing a repaired context changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, final

import msgspec

from perdure.memory.compaction import MemoryBundle
from perdure.providers.tool_pairs import Dangling, paired
from perdure.records.json import encode
from perdure.records.messages import Message, encode_message
from perdure.records.records import CONTEXT, Entry
from perdure.records.values import NO_TYPES, Types

MARK: Final = "perdure_memory"
"""The field of the message with the memories."""


@final
class CompactionSnapshotBuilder:
    """Builds a working context."""

    def build(
        self,
        system_prompt: str,
        bundle: MemoryBundle,
        raw_tail: Sequence[Message],
        *,
        dangling: Dangling = "keep",
    ) -> tuple[Message, ...]:
        """Return the messages: the prompt, the memories, and the raw tail, repaired."""
        head: list[Message] = [Message.system(system_prompt)] if system_prompt else []
        if bundle.episodic or bundle.semantic:
            head.append(_remembered(bundle))
        return paired((*head, *raw_tail), dangling).messages


def _remembered(bundle: MemoryBundle) -> Message:
    """Return the memories as a user message: a second system prompt would push the first one
    out of a context that is cut."""
    lines = ["[Memory of earlier turns, kept for you. It is not a new request.]"]
    if bundle.semantic:
        lines += ["", "Known facts:", *(f"- {item.fact}" for item in bundle.semantic)]
    for item in bundle.episodic:
        lines += ["", f"Earlier{_span(item.turn_ids)}:", item.summary]
    message = Message.user("\n".join(lines))
    return msgspec.structs.replace(message, extra={MARK: msgspec.Raw(b"true")})


def _span(turn_ids: Sequence[str]) -> str:
    if not turn_ids:
        return ""
    first, last = turn_ids[0], turn_ids[-1]
    return f" ({first})" if first == last else f" ({first} to {last})"


def is_memory(message: Message) -> bool:
    """Return whether a message holds memories, and is not part of the conversation."""
    return MARK in message.extra


def raw_part(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the conversation: without the leading system prompt, and without the memories.

    >>> [m.text for m in raw_part([Message.system("Be kind."), Message.user("Hello")])]
    ['Hello']
    """
    start = 1 if messages and messages[0].role == "system" else 0
    return tuple(message for message in messages[start:] if not is_memory(message))


def system_prompt_of(messages: Sequence[Message]) -> str | None:
    """Return the leading system prompt, None if there is none."""
    return messages[0].text if messages and messages[0].role == "system" else None


def prompt_sha256(prompt: str) -> str:
    """Return the hash that detects a changed system prompt."""
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()


def context_entry(
    messages: Sequence[Message],
    *,
    epoch_id: int,
    last_compaction_ts: float | None,
    system_prompt_sha256: str | None,
    reason: str,
    types: Types = NO_TYPES,
) -> Entry:
    """Return the record that replaces the working context.

    Raises:
        NotStorableError: A message cannot be stored.

    """
    payload = {
        "messages": [msgspec.Raw(encode_message(message, types).payload) for message in messages],
        "epoch_id": epoch_id,
        "last_compaction_ts": last_compaction_ts,
        "system_prompt_sha256": system_prompt_sha256,
        "reason": reason,
    }
    return Entry(CONTEXT, encode(payload))
