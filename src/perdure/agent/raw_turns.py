"""What was said, read back from a session's log: turns, blocks and traces.

Sees what is durable; whoever needs the newest saves first. What was retracted, and what a
new beginning set aside, is not among it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import final

from perdure.agent.compaction import LogCompaction, TurnBlocks
from perdure.memory.compaction import blocks_of
from perdure.memory.traces import RawTrace, RawTurn, find_turn, newest_turns, read_turns, traces_of
from perdure.records.messages import Message, decode_message
from perdure.session.internals import registry_of, store_of
from perdure.session.session import Session


@final
class RawTurns:
    """The turns of one session.

    Args:
        session: Whose.

    """

    def __init__(self, session: Session) -> None:
        self._session = session

    async def opening_of(self, turn_id: str) -> Message | None:
        """Return what a user opened a turn with, None if nobody did."""
        messages = await self._said_in(turn_id)
        return messages[0] if messages and messages[0].role == "user" else None

    async def answer_of(self, turn_id: str) -> Message | None:
        """Return the last that the model said in a turn, None if it said nothing."""
        answers = [
            message for message in await self._said_in(turn_id) if message.role == "assistant"
        ]
        return answers[-1] if answers else None

    async def newest(self, count: int, *, exclude: str | None = None) -> list[Message]:
        """Return what was said in the newest turns, without the one of an id."""
        store, key = store_of(self._session), self._session.key
        turns = await newest_turns(store, key, count, exclude=exclude)
        return [message for turn in turns for message in self._decoded(turn)]

    async def traces(self, after: int) -> AsyncGenerator[RawTrace, None]:
        """Give what was said behind a record, oldest first."""
        async with aclosing(self._read(after)) as turns:
            async for turn in turns:
                numbered = zip(turn.seqs, self._decoded(turn), strict=True)
                for trace in traces_of(turn.id, numbered):
                    yield trace

    async def count(self, after: int, upto: int) -> int:
        """Return how many turns there are between two records."""
        count = 0
        async with aclosing(self._read(after, upto)) as turns:
            async for _ in turns:
                count += 1
        return count

    async def blocks(
        self, after: int, upto: int, running_id: str | None, compacting: LogCompaction
    ) -> AsyncGenerator[TurnBlocks, None]:
        """Give the turns between two records as blocks; all from the running one on is running."""
        waiting: RawTurn | None = None
        running = False
        async with aclosing(self._read(after, upto)) as turns:
            async for turn in turns:
                if waiting is not None:
                    running = running or waiting.id == running_id
                    yield self._blocks_of(waiting, compacting, running=running)
                waiting = turn
        if waiting is not None:
            # The rest of a turn whose beginning is compacted has no id yet: it can only be last.
            running = running or (running_id is not None and waiting.id in {running_id, ""})
            yield self._blocks_of(waiting, compacting, running=running)

    def _blocks_of(self, turn: RawTurn, compacting: LogCompaction, *, running: bool) -> TurnBlocks:
        numbered = zip(turn.seqs, self._decoded(turn), turn.messages, strict=True)
        parts = [
            (seq, message, compacting.share_of(message, len(payload)))
            for seq, message, payload in numbered
        ]
        return TurnBlocks(blocks_of(turn.id, parts, last=turn.last), running)

    def _read(self, after: int, upto: int | None = None) -> AsyncGenerator[RawTurn, None]:
        return read_turns(store_of(self._session), self._session.key, after=after, upto=upto)

    async def _said_in(self, turn_id: str) -> list[Message]:
        turn = await find_turn(store_of(self._session), self._session.key, turn_id)
        return [] if turn is None else self._decoded(turn)

    def _decoded(self, turn: RawTurn) -> list[Message]:
        types = registry_of(self._session)
        return [decode_message(payload, types) for payload in turn.messages]
