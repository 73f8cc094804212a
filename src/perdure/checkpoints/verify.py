"""Verification of checkpoints: their chain, the log below them, and their states.

`verify`, a replay and a rollback ask here. Each checkpoint was compared and fits, or is wrong, or
cannot be compared, because the part of the log that it seals was pruned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import aclosing
from typing import NamedTuple, final

import msgspec

from perdure.checkpoints.chain import ChainProblem, CheckpointChain, LogDigest, problems_of
from perdure.checkpoints.journal import JournalReader
from perdure.checkpoints.states import read_bytes
from perdure.errors import CorruptRecordError
from perdure.records.checkpoints import CapturedState, Checkpoint, ExplicitState, Tombstone
from perdure.records.records import Record


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a verification."""

    checkpoints: int
    """Number of checkpoints."""
    pruned: int
    """Number of pruned ones; their places in the chain were looked at."""
    unchecked: tuple[int, ...] = ()
    """Those whose part of the log was pruned: it cannot be compared any more."""
    problems: tuple[ChainProblem, ...] = ()

    @property
    def ok(self) -> bool:
        """True if everything fits."""
        return not self.problems


async def verified(reading: JournalReader) -> Verification:
    """Look through everything, as it is at one moment, even while it is written."""
    # A copy: the session's own chain changes with each checkpoint and each pruning.
    chain = CheckpointChain((await reading.chain()).links)
    upto = max(reading.head, chain.links[-1].event_seq + 1 if chain.links else 0)
    in_log = await _compared(reading, chain.by_id.values(), after=0, upto=upto)
    problems = problems_of(chain.links)
    problems += [
        ChainProblem(checkpoint.id, "the log's record of it is another one than the document's")
        for checkpoint in in_log.written.by_id.values()
        if chain.by_id.get(checkpoint.id) != checkpoint
    ]
    problems += in_log.problems
    for checkpoint in chain.by_id.values():
        if isinstance(checkpoint.state, ExplicitState):
            bad = await state_problems(reading, checkpoint)
            # One that was pruned meanwhile may have lost its state since.
            problems += bad if bad and checkpoint.id in (await reading.chain()).by_id else []
    if problems:
        # What seems wrong may be that the session was deleted or replaced meanwhile.
        await reading.require_same()
    return Verification(
        checkpoints=len(chain.by_id),
        pruned=sum(isinstance(link, Tombstone) for link in chain.links),
        unchecked=in_log.unchecked,
        problems=tuple(problems),
    )


async def state_problems(reading: JournalReader, checkpoint: Checkpoint) -> list[ChainProblem]:
    """Return what does not fit in the state of one checkpoint."""
    if isinstance(checkpoint.state, CapturedState):
        after, upto = checkpoint.state.since, checkpoint.event_seq
        return (await _compared(reading, [checkpoint], after=after, upto=upto)).problems
    try:
        await read_bytes(reading.store, reading.key.blobs, checkpoint.state)
    except CorruptRecordError as error:
        return [ChainProblem(checkpoint.id, str(error))]
    return []


class _Run(NamedTuple):
    """The run of the log that a checkpoint of the session itself seals."""

    id: int
    since: int
    upto: int
    digest: str


class _Compared(msgspec.Struct):
    """Checkpoints of the session itself, compared with the log."""

    unchecked: tuple[int, ...]
    """Those whose part of the log was pruned."""
    written: CheckpointChain
    """The chain that the log's records make."""
    problems: list[ChainProblem]


async def _compared(
    reading: JournalReader, checkpoints: Iterable[Checkpoint], *, after: int, upto: int
) -> _Compared:
    """Compare checkpoints with the log.

    What does not fit is read again, with the media of messages where the store keeps them, and in
    place: a log that was imported from files has them in blobs, and its checkpoints may have been
    sealed in another store, or before media went there.
    """
    sealed = [
        _Run(one.id, one.state.since, one.event_seq, one.state.log)
        for one in checkpoints
        if isinstance(one.state, CapturedState)
    ]
    await reading.settle(upto)  # a checkpoint is in the chain before it is in the log
    while True:
        cut = await reading.cut()
        wrong = [run for run in sealed if run.since >= cut]
        looks = ((reading.store, False), (reading.store, True), (reading.filled, False))
        written = CheckpointChain()
        for store, lifts in looks:
            runs = _Runs(wrong, lifts=lifts)
            is_first = (store, lifts) == looks[0]
            async with aclosing(store.read_log(reading.key, after=after, before=upto + 1)) as log:
                async for chunk in log:
                    for record in chunk.records:
                        runs.feed(record)
                        if is_first:
                            written.apply(record.kind, record.payload)
            wrong = runs.wrong()
            if not wrong:
                break
        if cut == await reading.cut():  # else history was pruned meanwhile, which is no loss
            unchecked = tuple(run.id for run in sealed if run.since < cut)
            problems = [
                ChainProblem(
                    run.id,
                    f"a record from {run.since + 1} to {run.upto} was changed or is missing",
                )
                for run in wrong
            ]
            return _Compared(unchecked, written, problems)


@final
class _Runs:
    """The digests of runs of the log, one after the other."""

    def __init__(self, runs: Iterable[_Run], *, lifts: bool) -> None:
        self._left = deque(runs)
        self._lifts = lifts
        self._digest: LogDigest | None = None
        self._wrong: list[_Run] = []
        self._compare()

    def feed(self, record: Record) -> None:
        """Take in the next record of the log."""
        if self._digest is not None:
            self._digest.accept(record.seq, record.kind, record.payload)
            self._compare()

    def _compare(self) -> None:
        """Compare the runs that are complete, and begin the next one; a run may be empty."""
        while self._left:
            run = self._left[0]
            if self._digest is None:
                self._digest = LogDigest(run.since, lifts=self._lifts)
            if self._digest.seq < run.upto:
                return
            if self._digest.value != run.digest:
                self._wrong.append(run)
            self._left.popleft()
            self._digest = None

    def wrong(self) -> list[_Run]:
        """Return the runs that do not fit, or did not come to their end."""
        return [*self._wrong, *self._left]
