"""A store without threads or files, in virtual time, with faults by plan, that checks its user.

It keeps the log's promises (idempotent by seq, fenced, whole groups, a prefix) and notes
every breach of the engine's: two writes of one session at a time, a gap, half a group, a
write that brings nothing, a write with an epoch that was told to be lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import anyio

from perdure._lib.tasks import Host
from perdure.errors import NotStorableError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.records import Entry
from perdure.store import Batch, Capabilities, Outcome, Status

Fault = Literal["ok", "down", "unacked", "lost", "hang", "hang_applied", "raise"]
"""How a call ends: as it should; nothing written, and said so; written, but in doubt; not
written, and in doubt; never, until it is cancelled; the same after writing; with an exception."""


@dataclass
class Write:
    """One call's part for one session: its seqs, and when it began and ended."""

    first: int
    last: int
    began: float
    ended: float = float("inf")


class InlineStore:
    """Hold logs; each call takes the next latency and the next fault."""

    def __init__(
        self,
        *,
        latency: Sequence[float] = (0.0,),
        faults: Sequence[Fault] = (),
        parallelism: int = 4,
        queue_depth: int = 0,
        batch_max: int = 64,
        batch_linger: float = 0.0,
    ) -> None:
        self.capabilities = Capabilities(
            durability="memory",
            parallelism=parallelism,
            queue_depth=queue_depth,
            batch_max=batch_max,
            batch_linger=batch_linger,
        )
        self.location = "inline:"
        self.logs: dict[SessionKey, list[Entry]] = {}
        self.writes: dict[SessionKey, list[Write]] = {}
        self.poison: set[tuple[SessionKey, int]] = set()
        """Records that are refused for good."""
        self.spoiled: set[SessionKey] = set()
        """Sessions that make a store refuse the whole batch that they are in."""
        self.epochs: dict[SessionKey, int] = {}
        """The newest epochs, where it is not the one that the engine has."""
        self.down = False
        """Whether every call fails, whatever is planned."""
        self.stuck = False
        """Whether every call hangs, whatever is planned."""
        self.faults = list(faults)
        self.latency = list(latency)
        self.calls: list[list[Batch]] = []
        self.sent: Counter[SessionKey] = Counter()
        """Records that were sent, those of repeated attempts included."""
        self.breaches: list[str] = []
        self.told_lost: set[tuple[SessionKey, int]] = set()
        self._writing: set[SessionKey] = set()

    @property
    def peak(self) -> int:
        return max([len(call) for call in self.calls], default=0)

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        number = len(self.calls)
        self.calls.append(list(batches))
        self._check(batches)
        keys = {batch.key for batch in batches}
        self._writing |= keys
        writes = [self._write_of(batch) for batch in batches]
        try:
            fault = self.faults[number] if number < len(self.faults) else "ok"
            return await self._call(batches, fault, self.latency[number % len(self.latency)])
        finally:
            self._writing -= keys
            for write in writes:
                write.ended = anyio.current_time()

    def _write_of(self, batch: Batch) -> Write:
        last = batch.first + len(batch.records) - 1
        write = Write(batch.first, last, anyio.current_time())
        self.writes.setdefault(batch.key, []).append(write)
        return write

    def durable_at(self, key: SessionKey, seq: int) -> tuple[float, float]:
        """Return when a record became durable, and how long its write took; no faults."""
        for write in self.writes.get(key, ()):
            if write.first <= seq <= write.last:
                return write.ended, write.ended - write.began
        return float("inf"), 0.0

    def remainder(self, key: SessionKey, at: float) -> float:
        """Return how long a write of the session that was under way still took."""
        writes = self.writes.get(key, ())
        return max([one.ended - at for one in writes if one.began <= at < one.ended], default=0.0)

    async def _call(self, batches: Sequence[Batch], fault: Fault, latency: float) -> list[Outcome]:
        if self.stuck or fault == "hang":
            await anyio.sleep_forever()
        if fault == "hang_applied":
            self._write(batches)
            await anyio.sleep_forever()
        await anyio.sleep(latency)
        if self.down or fault == "down":
            return [Outcome(Status.TRANSIENT, StoreUnavailableError("down"))] * len(batches)
        if fault == "lost":
            return [Outcome(Status.IN_DOUBT, StoreUnavailableError("no answer"))] * len(batches)
        if fault == "raise":
            raise OSError("the connection broke")
        outcomes = self._write(batches)
        if fault == "unacked":
            return [Outcome(Status.IN_DOUBT, StoreUnavailableError("no answer"))] * len(batches)
        for batch, outcome in zip(batches, outcomes, strict=True):
            if outcome.status is Status.CONFLICT:
                self.told_lost.add((batch.key, batch.epoch))
        return outcomes

    def _write(self, batches: Sequence[Batch]) -> list[Outcome]:
        spoiled = [batch.key for batch in batches if batch.key in self.spoiled]
        if spoiled:
            return [Outcome(Status.PERMANENT, NotStorableError("spoiled"))] * len(batches)
        return [self._append(batch) for batch in batches]

    def _append(self, batch: Batch) -> Outcome:
        if batch.epoch != self.epochs.get(batch.key, batch.epoch):
            return Outcome(Status.CONFLICT)
        log = self.logs.setdefault(batch.key, [])
        seqs = range(batch.first, batch.first + len(batch.records))
        if any((batch.key, seq) in self.poison for seq in seqs):
            return Outcome(Status.PERMANENT, NotStorableError("poison"))
        known = len(log) - batch.first + 1
        if known < 0:
            self.breaches.append(
                f"{batch.key}: a gap before {batch.first}, the log ends at {len(log)}"
            )
            return Outcome(Status.PERMANENT)
        if tuple(log[batch.first - 1 :]) != batch.records[:known]:
            self.breaches.append(f"{batch.key}: other records sent again from {batch.first}")
        for entry in batch.records[known:]:
            log.append(entry)
        return Outcome(Status.OK, written=sum(len(entry.payload) for entry in batch.records))

    def _check(self, batches: Sequence[Batch]) -> None:
        if len({batch.key for batch in batches}) < len(batches):
            self.breaches.append("a session twice in one batch")
        if len(batches) > self.capabilities.batch_max:
            self.breaches.append(f"{len(batches)} sessions in one batch")
        for batch in batches:
            self.sent[batch.key] += len(batch.records)
            if batch.key in self._writing:
                self.breaches.append(f"{batch.key}: two writes at a time")
            if not batch.records:
                self.breaches.append(f"{batch.key}: a write that brings nothing")
            elif not batch.records[-1].end:
                self.breaches.append(f"{batch.key}: half a group")
            if (batch.key, batch.epoch) in self.told_lost:
                self.breaches.append(f"{batch.key}: a write behind the fence")


class DirectStore(InlineStore):
    """One that takes batches without a task of the caller's, as the file store does.

    What was given up goes on, and is answered late: a call that hangs does so for *hangs* seconds.
    """

    host: Host

    def __init__(self, *, hangs: float = 25.0, queues: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._queues = queues  # whether a session may be sent while a write of it is under way
        self.begun = 0
        self._hangs = hangs

    def begin_append(
        self, batches: Sequence[Batch], done: Callable[[Sequence[Outcome]], object]
    ) -> bool:
        self.begun += 1
        self.host.spawn(self._carry, batches, done)
        return True

    async def _carry(
        self, batches: Sequence[Batch], done: Callable[[Sequence[Outcome]], object]
    ) -> None:
        error = StoreUnavailableError("it ended late")
        outcomes = [Outcome(Status.IN_DOUBT, error)] * len(batches)
        with anyio.move_on_after(self._hangs) as scope:
            while self._queues and any(batch.key in self._writing for batch in batches):
                await anyio.sleep(0.01)
            try:
                outcomes = await super().append_many(batches)
            except OSError as broken:
                outcomes = [Outcome(Status.IN_DOUBT, broken)] * len(batches)
        if scope.cancelled_caught and all(map(self._has, batches)):
            outcomes = [Outcome(Status.OK)] * len(batches)
        # Whoever is refused so sends it once more, with `append_many`, to learn why.
        self.told_lost -= {(batch.key, batch.epoch) for batch in batches}
        done(outcomes)

    def _has(self, batch: Batch) -> bool:
        return len(self.logs.get(batch.key, ())) >= batch.first + len(batch.records) - 1
