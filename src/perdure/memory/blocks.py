"""Interaction blocks: the pieces that a compaction takes, and never splits.

A block is opened by what a user said, or by the model's next message after tools have answered
(the continuation); what comes before either, because its beginning was not read, is a
recovery block. It is complete if something came of what opened it, each of its calls has its
result, and each of its results its call.

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from perdure.model.messages import MADE_UP, Message

__all__ = ["Block", "Frontier", "blocks_of"]

Opener = Literal["user", "tool_continuation", "recovery"]


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a turn that stays whole."""

    turn_id: str
    opener: Opener
    messages: tuple[Message, ...]
    last: int = 0
    """The seq of its last record; that of the turn, in the turn's last block."""
    share: float = 0.0
    """How much of the context's budget it takes: 1.0 is all of it."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing in it."""
        # The results that a continuation answers to are traces of the block before.
        traces = len(self.messages) + (self.opener == "tool_continuation")
        waiting, made_up, orphans = self._paired()
        return traces > 1 and waiting <= made_up and not orphans

    def open_calls(self) -> frozenset[str]:
        """Return the ids of the calls without a result in this block, but for one made up.

        The real one may stand in a later block: the turn was killed, and went on.
        """
        return self._paired()[0]

    def orphans(self) -> frozenset[str]:
        """Return the call ids of the results without a call in this block."""
        return self._paired()[2]

    def _paired(self) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """Return the ids of calls that wait, of results made up, and of results without a call."""
        waiting: list[str] = []
        made_up: set[str] = set()
        orphans: set[str] = set()
        for message in self.messages:
            waiting.extend(call.id for call in message.tool_calls)
            if message.tool_result is None:
                continue
            call_id = message.tool_result.call_id
            if MADE_UP in message.extra:
                made_up.add(call_id)
            elif call_id in waiting:
                waiting.remove(call_id)
            else:
                orphans.add(call_id)
        return frozenset(waiting), frozenset(made_up), frozenset(orphans)


def blocks_of(
    turn_id: str, messages: Iterable[tuple[int, Message, float]], *, last: int = 0
) -> list[Block]:
    """Return a turn's messages as blocks.

    Args:
        turn_id: The turn.
        messages: For each message the seq of its record, and its share of the budget.
        last: The seq of the turn's last record.

    """
    found: list[Block] = []
    part: list[tuple[int, Message, float]] = []
    for one in messages:
        if part and _opens(one[1], part[-1][1]):
            found.append(_block(turn_id, part, first=not found))
            part = []
        part.append(one)
    if part:
        block = _block(turn_id, part, first=not found)
        found.append(msgspec.structs.replace(block, last=max(last, block.last)))
    return found


def _opens(message: Message, before: Message) -> bool:
    return message.role == "user" or (message.role == "assistant" and before.role == "tool")


def _block(turn_id: str, part: Sequence[tuple[int, Message, float]], *, first: bool) -> Block:
    opener: Opener = "tool_continuation"
    if part[0][1].role == "user":
        opener = "user"
    elif first:
        opener = "recovery"
    return Block(
        turn_id=turn_id,
        opener=opener,
        messages=tuple(message for _, message, _ in part),
        last=part[-1][0],
        share=sum(share for _, _, share in part),
    )


class Frontier:
    """Which blocks stay raw, as they come in oldest first; the others leave, oldest first.

    Args:
        keep_turns: How many of the newest turns stay, at most.
        room: How much of the budget they may take together, the running turn aside.

    """

    def __init__(self, keep_turns: int, room: float) -> None:
        self.keep_turns: int = keep_turns
        self.room: float = room
        self._raw: deque[Block] = deque()
        self._share = 0.0

    @property
    def raw(self) -> tuple[Block, ...]:
        """The blocks that stay."""
        return tuple(self._raw)

    @property
    def share(self) -> float:
        """How much of the budget they take."""
        return self._share

    def add(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Take in the next turn's blocks; return those that leave for them."""
        for block in blocks:
            self._raw.append(block)
            self._share += block.share
        while self._is_over():
            leaving = self._leading()
            if not leaving:
                return
            yield from self._leave(leaving)

    def squeeze(self, room: float) -> Iterator[Block]:
        """Keep as much as fits a smaller room; return what leaves."""
        self.room = min(self.room, room)
        return self.add(())

    def _is_over(self) -> bool:
        if not self._raw:
            return False
        return self._turns() > self.keep_turns or self._share > self.room

    def _turns(self) -> int:
        return 1 + sum(self._begins(at) for at in range(1, len(self._raw))) if self._raw else 0

    def _begins(self, at: int) -> bool:
        """Say whether another turn begins with a block; without an id, a user begins one."""
        block, before = self._raw[at], self._raw[at - 1]
        return block.turn_id != before.turn_id or (not block.turn_id and block.opener == "user")

    def _leading(self) -> int:
        """Return how many blocks can leave at once, 0 if none can.

        Not between a call and its result, and nothing of the newest that is still incomplete.
        """
        blocks = list(self._raw)
        limit = next((at for at in range(len(blocks), 0, -1) if blocks[at - 1].is_complete), 0)
        waiting: set[str] = set()
        for count in range(1, limit + 1):
            waiting |= blocks[count - 1].open_calls()
            rest = blocks[count:]
            if not waiting or not any(waiting & block.orphans() for block in rest):
                return count
        return 0

    def _leave(self, count: int) -> Iterator[Block]:
        for _ in range(count):
            block = self._raw.popleft()
            self._share = self._share - block.share if self._raw else 0.0
            yield block
