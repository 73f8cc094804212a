"""Calls paired with their results: what every provider requires, even if the log lacks some.

Each tool call has one result, right after the message that asked for it, and each result has
its call. A process that was killed leaves calls without results; they are closed with a result
that says so, and the model can decide. A result that is there is never thrown away for one
that was made up. Calls of one reply that came as several messages stand in one message again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from perdure.providers.context_fit import ContextTarget
from perdure.providers.issued import Issued, stamp_of
from perdure.providers.replies import joined
from perdure.records.messages import MADE_UP, Message, ToolCall, ToolResult

Dangling = Literal["interrupted", "drop", "keep"]
"""Treatment of a tool call without a result: closed as interrupted, left out, or kept."""

INTERRUPTED: Final = (
    "interrupted: the process stopped before the result was there; "
    "the tool may or may not have done its work"
)


class Exchange(msgspec.Struct, frozen=True, gc=False):
    """A message, and the results that answer its calls, in the order in which they came."""

    head: Message
    results: tuple[Message, ...] = ()


class ReadResult(NamedTuple):
    """A result as its reader gets it."""

    at: int
    """The place of its call."""
    message: Message
    result: ToolResult
    own: Issued | None
    """The message's stamp, if what it holds may be sent."""


class ReadExchange(NamedTuple):
    """An exchange as its reader gets it."""

    head: Message
    own: Issued | None
    """The head's stamp, if what it holds may be sent."""
    results: list[ReadResult]


def read_by(exchange: Exchange, target: ContextTarget) -> ReadExchange:
    """Return an exchange as its reader gets it: each stamp is decoded here, once."""
    results: list[ReadResult] = []
    waiting: list[str | None] = [call.id for call in exchange.head.tool_calls]
    for message in exchange.results:
        result = message.tool_result
        assert result is not None  # it is paired
        at = waiting.index(result.call_id)
        waiting[at] = None
        results.append(ReadResult(at, message, result, target.own(stamp_of(message))))
    return ReadExchange(exchange.head, target.own(stamp_of(exchange.head)), results)


class PairedHistory(msgspec.Struct, frozen=True):
    """A conversation in exchanges, and what had to be done for it."""

    given: Sequence[Message]
    """The conversation as it was."""
    exchanges: tuple[Exchange, ...]
    closed: int = 0
    """Calls that were closed as interrupted."""
    dropped: int = 0
    """Calls that were left out."""
    orphans: int = 0
    """Results without a call, and second results, that were left out."""
    moved: int = 0
    """Results that came late, and now are after their call."""
    empty: int = 0
    """Answers with nothing in them that were left out."""
    joined: int = 0
    """Messages that were put back into the reply that they are part of."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as messages."""
        return tuple(message for each in self.exchanges for message in (each.head, *each.results))

    @property
    def appended(self) -> tuple[Message, ...] | None:
        """The messages to append to the given ones for ``messages``; None if that is not enough."""
        size, messages = len(self.given), self.messages
        return messages[size:] if messages[:size] == tuple(self.given) else None


def interrupted_result(call: ToolCall) -> Message:
    """Return the result of a call whose own result never came; the same for the same call."""
    return _made_up(Message.tool(call.id, name=call.name, error=INTERRUPTED), _OPEN)


def unknown_result(result: ToolResult) -> Message:
    """Return the result of a call that is not waited for, though its outcome may become known."""
    return _made_up(Message(role="tool", tool_result=result), "unknown")


def is_synthetic(message: Message) -> bool:
    """Say whether perdure made a result up, so that a real one may take its place."""
    return MADE_UP in message.extra


def is_open(message: Message) -> bool:
    """Say whether a result was made up for a call that is still to be dealt with."""
    return message.extra.get(MADE_UP, msgspec.Raw()) == _mark(_OPEN, answers(message))


_OPEN: Final = "interrupted"


def _made_up(message: Message, why: str) -> Message:
    return msgspec.structs.replace(message, extra={MADE_UP: _mark(why, answers(message))})


def _mark(why: str, call_id: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(f"{why}:{call_id}"))


def paired(messages: Sequence[Message], policy: Dangling = "interrupted") -> PairedHistory:
    """Return the conversation in exchanges; what it has open is treated by the policy.

    Pairing what is paired changes nothing.
    """
    blocks, orphans, moved, put_back = _blocks_of(messages)
    exchanges: list[Exchange] = []
    closed = dropped = empty = 0
    for block in blocks:
        missing = block.missing() if block.open else []
        if policy == "drop" and missing:
            dropped += len(missing)
            exchanges.extend(block.without(missing))
        elif policy == "interrupted" and missing:
            closed += len(missing)
            made_up = map(interrupted_result, missing)
            exchanges.append(Exchange(block.head, (*block.results, *made_up)))
        elif not block.results and _is_empty(block.head):
            empty += 1
        else:
            exchanges.append(Exchange(block.head, block.results))
    return PairedHistory(
        messages, tuple(exchanges), closed, dropped, orphans, moved, empty, put_back
    )


class _Block(msgspec.Struct, gc=False):
    """A message, and the results that answer its calls so far."""

    head: Message
    open: tuple[str, ...]
    """The ids of calls that wait."""
    results: tuple[Message, ...] = ()

    def answer(self, message: Message) -> bool:
        """Take a result in, if a call waits for it, or has one that was made up."""
        call_id = answers(message)
        if call_id in self.open:
            at = self.open.index(call_id)
            self.open = self.open[:at] + self.open[at + 1 :]
            self.results += (message,)
            return True
        if not is_synthetic(message):
            for at, have in enumerate(self.results):
                if is_synthetic(have) and answers(have) == call_id:
                    self.results = (*self.results[:at], message, *self.results[at + 1 :])
                    return True
        return False

    def goes_on(self, message: Message) -> bool:
        """Say whether a message is part of the same reply: no call of that has been run yet."""
        if message.role != "assistant" or self.results:
            return False
        if not self.open:
            return _is_reasoning(self.head)
        call_ids = {call.id for call in self.head.tool_calls}
        return not any(call.id in call_ids for call in message.tool_calls)

    def join(self, message: Message) -> None:
        """Take in the next part of the same reply."""
        self.head = joined(self.head, message)
        self.open += _ids_of(message)

    def missing(self) -> list[ToolCall]:
        """Return the calls without a result."""
        waiting = list(self.open)
        missing: list[ToolCall] = []
        for call in self.head.tool_calls:
            if call.id in waiting:
                waiting.remove(call.id)
                missing.append(call)
        return missing

    def without(self, missing: Sequence[ToolCall]) -> list[Exchange]:
        """Return the block without some calls; nothing if nothing is left."""
        calls = tuple(call for call in self.head.tool_calls if all(call is not m for m in missing))
        head = msgspec.structs.replace(self.head, tool_calls=calls)
        return [] if _is_empty(head) else [Exchange(head, self.results)]


def _blocks_of(messages: Sequence[Message]) -> tuple[list[_Block], int, int, int]:
    """Return a conversation in blocks.

    And how many results had no call that waited, came late, and how many messages were put back.
    """
    blocks: list[_Block] = []
    asking: dict[
        str, _Block
    ] = {}  # the newest counts: providers number calls from 1 in each answer
    orphans = moved = put_back = 0
    for message in messages:
        if message.tool_result is not None:
            block = asking.get(answers(message))
            if block is None or not block.answer(message):
                orphans += 1
            else:
                moved += block is not blocks[-1]
            continue
        if blocks and blocks[-1].goes_on(message):
            blocks[-1].join(message)
            put_back += 1
        else:
            blocks.append(_Block(message, _ids_of(message)))
        for call in message.tool_calls:
            asking[call.id] = blocks[-1]
    return blocks, orphans, moved, put_back


def _ids_of(message: Message) -> tuple[str, ...]:
    return tuple([call.id for call in message.tool_calls]) if message.tool_calls else ()


def answers(message: Message) -> str:
    """Return the id of the call that a message is the result of."""
    return "" if message.tool_result is None else message.tool_result.call_id


def _is_reasoning(message: Message) -> bool:
    """Say whether a message came from a history as a part of a reply that says nothing yet."""
    if message.role != "assistant" or message.content or message.tool_calls:
        return False
    stamp = stamp_of(message)
    return stamp is not None and stamp.sent and bool(stamp.items)


def _is_empty(message: Message) -> bool:
    if message.role != "assistant" or message.tool_calls:
        return False
    return not (message.content or message.reasoning or message.extra or message.payload_extra)


# Groups of messages that belong together, for who reads only the end of a conversation


def groups(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Cut a conversation into groups that no provider takes apart: a message and its results.

    A result belongs to the message before it that is no result; what precedes the first
    such message is a group of its own. Nothing is left out, and nothing moves.
    """
    grouped: list[list[Message]] = []
    for message in messages:
        if message.tool_result is None or not grouped:
            grouped.append([message])
        else:
            grouped[-1].append(message)
    return [tuple(group) for group in grouped]


def newest(
    messages: Sequence[Message], limit: int, size: Callable[[Message], int] = lambda _: 1
) -> tuple[Message, ...]:
    """Return the newest whole groups within a limit; the newest one even if it is larger.

    Args:
        messages: A conversation, oldest first.
        limit: The most that the groups may measure together.
        size: How a message is measured; each counts one if this is not given.

    """
    newest_groups: list[tuple[Message, ...]] = []
    for group in reversed(groups(messages)):
        limit -= sum(map(size, group))
        if newest_groups and limit < 0:
            break
        newest_groups.append(group)
    return tuple(message for group in reversed(newest_groups) for message in group)
