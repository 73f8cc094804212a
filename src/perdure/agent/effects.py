"""Verdicts on tool calls whose outcome a crash has left unknown.

Pure: the ledger's entry and the call in, a verdict out. A call that may have begun
is never begun again unasked, unless the tool says that it may be, with the same key.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, Literal

import msgspec

from perdure.memory.ledger import Approval, Effect
from perdure.providers.tool_pairs import is_open, paired
from perdure.records.json import decode
from perdure.records.messages import CUT_OFF, REDACTED_AT, Message, ToolCall, ToolResult
from perdure.restore.rebuild import is_memory

Verdict = Literal["run", "again", "skip", "done", "ask", "interrupted"]
"""Run it: it has not begun. Run it again, with the same key. Leave it. Take the outcome
that a person gave. Ask a person. Say that it was interrupted."""

SKIPPED: Final = (
    "unknown: the process stopped while this ran, so it may or may not have done its work; "
    "it was not called again"
)


def verdict(effect: Effect | None, approval: Approval | None, *, can_run: bool) -> Verdict:
    """Return what to do about a call without a result, when its turn continues after a crash.

    Args:
        effect: What the ledger has of it; None for a tool without declared side effects.
        approval: What the ledger has of its approval, which ends when the call begins; None if
            it has begun, or needed no approval.
        can_run: Whether the tool is still there, and the arguments are stored whole.

    >>> verdict(None, None, can_run=True)  # unknown whether it has begun
    'interrupted'
    """
    if effect is None:
        return "run" if approval is not None and can_run else "interrupted"
    if effect.state == "planned":
        return "run" if can_run else "interrupted"
    wish = effect.decision if effect.state == "decided" else effect.policy
    if wish == "replay":
        return "again" if can_run else "ask"
    return wish or "ask"


def is_unknown(effect: Effect) -> bool:
    """Return True if a call may have done its work, with neither outcome nor decision known."""
    return effect.state in {"begun", "unknown"}


def given_result(effect: Effect) -> ToolResult:
    """Return the result that a person gave with a decision."""
    return ToolResult(effect.call, effect.tool, decode(bytes(effect.result)))


def takes_result(messages: Sequence[Message], effect: Effect, result: Message) -> bool:
    """Return True if a late result, behind these messages, takes the place of an effect's own.

    Not if its call is not among them, or a newer one has its id.
    """
    asked_at = next(
        (
            message.created_at or 0.0
            for message in reversed(messages)
            if any(call.id == effect.call for call in message.tool_calls)
        ),
        inf,
    )
    if asked_at > effect.at:
        return False
    return any(message is result for message in paired((*messages, result)).messages)


def is_intact(call: ToolCall) -> bool:
    """Say whether a stored call has all of its arguments."""
    return REDACTED_AT not in call.extra


class EffectProgress(msgspec.Struct, frozen=True):
    """Progress of a turn."""

    has_input: bool = False
    """True if the user's message was kept."""
    open_calls: tuple[ToolCall, ...] = ()
    """Calls of the model's that have no real result."""
    answer: Message | None = None
    """The whole answer, if only the turn's end is missing."""


def progress(messages: Sequence[Message]) -> EffectProgress:
    """Return how far a turn had come, from what was kept of it.

    >>> progress([Message.user("Hello"), Message.assistant("Hello to you.")]).answer.text
    'Hello to you.'
    """
    real_messages = [message for message in messages if not is_open(message)]
    has_input = any(message.role == "user" and not is_memory(message) for message in real_messages)
    open_calls: list[ToolCall] = []
    for message in real_messages:
        if message.role == "assistant":
            open_calls = list(message.tool_calls)
        elif message.tool_result is not None:
            close_call(open_calls, message.tool_result.call_id)
    last = real_messages[-1] if real_messages else None
    ended = last is not None and last.role == "assistant" and not last.tool_calls
    is_complete = ended and last is not None and CUT_OFF not in last.extra
    return EffectProgress(has_input, tuple(open_calls), last if is_complete else None)


def without_cut_answers(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages without the partial answers that the model repeats, or has repeated.

    A request must not end with half an answer: some providers refuse that, others would continue
    with it, and the answer would lack its beginning. One that the user has replied to stays.

    >>> cut = Message(role="assistant", content="He", extra={CUT_OFF: msgspec.Raw(b"true")})
    >>> [one.text for one in without_cut_answers([Message.user("Hi"), cut])]
    ['Hi']
    """
    return tuple(
        message
        for at, message in enumerate(messages)
        if CUT_OFF not in message.extra
        or any(later.role != "assistant" for later in messages[at + 1 : at + 2])
    )


def close_call(calls: list[ToolCall], call_id: str) -> bool:
    """Take the first call of an id away, since its result has come; False if there is none."""
    for at, call in enumerate(calls):
        if call.id == call_id:
            del calls[at]
            return True
    return False
