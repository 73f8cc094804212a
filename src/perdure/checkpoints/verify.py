"""Verification of checkpoints: their chain, the log below them, and their states."""

from __future__ import annotations

from collections import deque
from contextlib import aclosing
from typing import final

import msgspec

from perdure.checkpoints.chain import (
    ChainProblem,
    CheckpointChain,
    LogDigest,
    problems_of,
)
from perdure.checkpoints.journal import JournalReader
from perdure.checkpoints.states import read_bytes
from perdure.errors import CorruptRecordError
from perdure.records.checkpoints import (
    CapturedState,
    Checkpoint,
    ExplicitState,
    Tombstone,
)
from perdure.records.keys import SessionKey
from perdure.records.records import Record
from perdure.store import Store


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, and what does not fit."""

    checkpoints: int
    """How many there are."""
    pruned: int
    """How many were pruned; their places in the chain were looked at."""
    unchecked: tuple[int, ...] = ()
    """Those whose part of the log was pruned: it cannot be compared any more."""
    problems: tuple[ChainProblem, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything fits."""
        return not self.problems


async def verified(reading: JournalReader) -> Verification:
    """Look through everything, as it is at one moment, whatever goes on beside it."""
    # A copy: the session's own chain changes with each checkpoint and each pruning.
    chain = CheckpointChain((await reading.chain()).links)
    upto = max(reading.head, chain.links[-1].event_seq + 1 if chain.links else 0)
    problems = problems_of(chain.links)
    runs, written = await _read(reading, chain, after=0, upto=upto)
    problems += [
        ChainProblem(checkpoint.id, "the log's record of it is another one than the document's")
        for checkpoint in written.by_id.values()
        if chain.by_id.get(checkpoint.id) != checkpoint
    ]
    problems += await _unfitting(reading, chain, runs.problems, upto + 1)
    for checkpoint in chain.by_id.values():
        if isinstance(checkpoint.state, ExplicitState):
            bad = await state_problems(reading, checkpoint)
            # One that was pruned meanwhile may have lost its state since.
            problems += bad if bad and checkpoint.id in (await reading.chain()).by_id else []
    if problems:
        await reading.require_same()
    return Verification(
        checkpoints=len(chain.by_id),
        pruned=sum(isinstance(link, Tombstone) for link in chain.links),
        unchecked=runs.unchecked,
        problems=tuple(problems),
    )


async def state_problems(reading: JournalReader, checkpoint: Checkpoint) -> list[ChainProblem]:
    """Return what does not fit in the state of one checkpoint."""
    if isinstance(checkpoint.state, ExplicitState):
        try:
            await read_bytes(reading.store, reading.key.blobs, checkpoint.state)
        except CorruptRecordError as error:
            return [ChainProblem(checkpoint.id, str(error))]
        return []
    alone = CheckpointChain([checkpoint])
    after, upto = checkpoint.state.since, checkpoint.event_seq
    runs, _ = await _read(reading, alone, after=after, upto=upto)
    return await _unfitting(reading, alone, runs.problems, upto + 1, after=after)


async def _unfitting(
    reading: JournalReader,
    chain: CheckpointChain,
    problems: list[ChainProblem],
    before: int,
    *,
    after: int = 0,
) -> list[ChainProblem]:
    """Return the problems that stay wherever the media of the log's messages are.

    A log that was imported from files has them where its store keeps media, and its checkpoints
    may have been sealed in another store, or before media went into blobs.
    """
    cut = await reading.cut()
    for store, lifts in ((reading.store, True), (reading.filled, False)):
        if problems:
            runs = _Runs(chain, cut, lifts=lifts)
            await _fed(runs, store, reading.key, after, before)
            still = {problem.id for problem in runs.problems}
            problems = [problem for problem in problems if problem.id in still]
    return problems


async def _fed(runs: _Runs, store: Store, key: SessionKey, after: int, before: int) -> _Runs:
    async with aclosing(store.read_log(key, after=after, before=before)) as log:
        async for chunk in log:
            for record in chunk.records:
                runs.feed(record)
    return runs


async def _read(
    reading: JournalReader, chain: CheckpointChain, *, after: int, upto: int
) -> tuple[_Runs, CheckpointChain]:
    """Return the runs of the log up to a record, and the chain that its records make."""
    await reading.settle(upto)  # a checkpoint is in the chain before it is in the log
    while True:
        cut = await reading.cut()
        runs, written = _Runs(chain, cut), CheckpointChain()
        log = reading.store.read_log(reading.key, after=after, before=upto + 1)
        async with aclosing(log):
            async for chunk in log:
                for record in chunk.records:
                    runs.feed(record)
                    written.apply(record.kind, record.payload)
        if cut == await reading.cut():  # else history was pruned meanwhile, which is no loss
            return runs, written


@final
class _Runs:
    """The runs of the log that checkpoints are sealed with, one after the other."""

    def __init__(self, chain: CheckpointChain, cut: int, *, lifts: bool = False) -> None:
        captured = [
            checkpoint
            for checkpoint in chain.by_id.values()
            if isinstance(checkpoint.state, CapturedState)
        ]
        self.unchecked: tuple[int, ...] = tuple(
            checkpoint.id for checkpoint in captured if _since(checkpoint) < cut
        )
        self._unverified = deque(checkpoint for checkpoint in captured if _since(checkpoint) >= cut)
        self._lifts = lifts
        self._digest = self._next()
        self._problems: list[ChainProblem] = []
        self._end()

    def feed(self, record: Record) -> None:
        """Take in the next record of the log."""
        if self._digest is not None:
            self._digest.accept(record.seq, record.kind, record.payload)
            self._end()

    def _end(self) -> None:
        """Compare the complete runs, and start the next one."""
        while self._digest is not None and self._digest.seq >= self._unverified[0].event_seq:
            checkpoint, digest = self._unverified.popleft(), self._digest
            if isinstance(checkpoint.state, CapturedState) and digest.value != checkpoint.state.log:
                self._problems.append(_changed(checkpoint))
            self._digest = self._next()

    def _next(self) -> LogDigest | None:
        first = self._unverified[0] if self._unverified else None
        return None if first is None else LogDigest(_since(first), lifts=self._lifts)

    @property
    def problems(self) -> list[ChainProblem]:
        """What does not fit, runs that did not come to their end among it."""
        return self._problems + [_changed(checkpoint) for checkpoint in self._unverified]


def _since(checkpoint: Checkpoint) -> int:
    return checkpoint.state.since if isinstance(checkpoint.state, CapturedState) else 0


def _changed(checkpoint: Checkpoint) -> ChainProblem:
    first, last = _since(checkpoint) + 1, checkpoint.event_seq
    return ChainProblem(checkpoint.id, f"a record from {first} to {last} was changed or is missing")
