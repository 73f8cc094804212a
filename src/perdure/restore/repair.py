"""What a provider would reject in a working context, and how it is mended.

Rules over messages, nothing else: each tool call has one result, right behind the message
that asked for it, and each result has its call. A process that was killed leaves calls
without results; they are closed with a result that says so, and the model can decide.
A result that is there is never thrown away for one that was made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from perdure.model.messages import Message, ToolCall

__all__ = ["INTERRUPTED", "Dangling", "Repair", "interrupted_result", "is_synthetic", "repair"]

Dangling = Literal["interrupted", "drop", "keep"]
"""What becomes of a tool call without a result: closed as interrupted, left out, or kept."""

INTERRUPTED: Final = (
    "interrupted: the process stopped before the result was there; "
    "the tool may or may not have done its work"
)
MARK: Final = "perdure_repair"
"""The field of a message that perdure made up; its value is a deterministic id."""


class Repair(msgspec.Struct, frozen=True):
    """A working context that no provider rejects."""

    messages: tuple[Message, ...]
    appended: tuple[Message, ...] | None
    """What to append to the original to get ``messages``; None if that is not enough."""
    closed: int = 0
    """Calls that were closed as interrupted."""
    dropped: int = 0
    """Calls that were left out."""
    orphans: int = 0
    """Results without a call, and second results, that were left out."""
    moved: int = 0
    """Results that came late, and now stand behind their call."""
    empty: int = 0
    """Answers with nothing in them that were left out."""


def interrupted_result(call: ToolCall) -> Message:
    """Return the result of a call whose own result never came; the same for the same call."""
    result = Message.tool(call.id, name=call.name, error=INTERRUPTED)
    mark = msgspec.Raw(msgspec.json.encode(f"interrupted:{call.id}"))
    return msgspec.structs.replace(result, extra={MARK: mark})


def is_synthetic(message: Message) -> bool:
    """Say whether perdure made a result up, so that a real one may take its place."""
    return MARK in message.extra


def repair(messages: Sequence[Message], policy: Dangling = "interrupted") -> Repair:
    """Return the messages as every provider takes them.

    Mending what is mended changes nothing.
    """
    blocks, orphans, moved = _blocks(messages)
    mended: list[Message] = []
    closed = dropped = empty = 0
    for block in blocks:
        missing = block.missing()
        if policy == "drop" and missing:
            dropped += len(missing)
            mended.extend(block.without(missing))
        elif policy == "interrupted" and missing:
            closed += len(missing)
            mended += (block.head, *block.results, *map(interrupted_result, missing))
        elif block.is_empty():
            empty += 1
        else:
            mended += (block.head, *block.results)
    given = tuple(messages)
    is_longer = tuple(mended[: len(given)]) == given
    return Repair(
        tuple(mended),
        tuple(mended[len(given) :]) if is_longer else None,
        closed,
        dropped,
        orphans,
        moved,
        empty,
    )


class _Block:
    """A message, and the results that answer its calls."""

    __slots__ = ("head", "open", "results")

    def __init__(self, head: Message) -> None:
        self.head = head
        self.results: list[Message] = []
        self.open = [call.id for call in head.tool_calls]

    def answer(self, message: Message) -> bool:
        """Take a result in, if a call waits for it."""
        call_id = _answers(message)
        if call_id in self.open:
            self.open.remove(call_id)
            self.results.append(message)
            return True
        return self._replace(message, call_id)

    def asked(self, message: Message) -> bool:
        """Say whether a result is of a call of this message."""
        call_id = _answers(message)
        return any(call.id == call_id for call in self.head.tool_calls)

    def _replace(self, message: Message, call_id: str) -> bool:
        """Put a real result in the place of one that was made up."""
        if is_synthetic(message):
            return False
        for at, have in enumerate(self.results):
            if is_synthetic(have) and _answers(have) == call_id:
                self.results[at] = message
                return True
        return False

    def missing(self) -> list[ToolCall]:
        """Return the calls without a result."""
        waiting = list(self.open)
        missing: list[ToolCall] = []
        for call in self.head.tool_calls:
            if call.id in waiting:
                waiting.remove(call.id)
                missing.append(call)
        return missing

    def without(self, missing: Sequence[ToolCall]) -> list[Message]:
        """Return the block without some calls; nothing if nothing is left."""
        calls = tuple(call for call in self.head.tool_calls if all(call is not m for m in missing))
        head = msgspec.structs.replace(self.head, tool_calls=calls)
        return [] if _is_empty(head) else [head, *self.results]

    def is_empty(self) -> bool:
        """Say whether it says nothing at all."""
        return not self.results and _is_empty(self.head)


def _blocks(messages: Sequence[Message]) -> tuple[list[_Block], int, int]:
    """Return the blocks, and how many results had no call, or came late."""
    blocks: list[_Block] = []
    orphans = moved = 0
    for message in messages:
        if message.tool_result is None:
            blocks.append(_Block(message))
            continue
        # The newest message first: providers number calls anew in each answer.
        for back, block in enumerate(reversed(blocks)):
            if block.answer(message):
                moved += back > 0
                break
            if block.asked(message):  # answered before: a second result
                orphans += 1
                break
        else:
            orphans += 1
    return blocks, orphans, moved


def _answers(message: Message) -> str:
    return "" if message.tool_result is None else message.tool_result.call_id


def _is_empty(message: Message) -> bool:
    if message.role != "assistant" or message.tool_calls:
        return False
    return not (message.content or message.reasoning or message.extra or message.payload_extra)
