"""Export of a session's events and checkpoints into a pair of files, and import from one."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import NewFile
from perdure.checkpoints.audit_files import (
    _DIGEST,
    _OURS,
    CHECKPOINTS_FILE,
    EVENTS_FILE,
    SUMMARY_FILE,
    AuditSummary,
    EventSigner,
    SavedSnapshot,
    events_by_time,
    saved_snapshots,
    state_digest,
)
from perdure.checkpoints.chain import CheckpointChain, canonical, sealed
from perdure.checkpoints.journal import Journal, JournalReader, LogWalk
from perdure.checkpoints.replay_session import event_of
from perdure.checkpoints.states import CheckpointStates, read_bytes
from perdure.errors import ConfigError
from perdure.records.checkpoints import (
    PRUNED,
    SNAPSHOT_CREATED,
    CapturedState,
    Checkpoint,
    ExplicitState,
    KernelEvent,
)
from perdure.records.json import MAX_VALUE_DEPTH, encode, is_deeper
from perdure.records.records import CHECKPOINT, EVENT, Entry

PART: Final = 1024 * 1024
"""Bytes written to the disk at a time."""
SOME: Final = 2000
"""Events appended at a time."""


async def save_pair(reading: JournalReader, folder: Path) -> list[str]:
    """Write what a replay needs into a folder; return the names of the files.

    A checkpoint of the session itself is written with the state that it leads to, in full. A
    folder that is not there is made.

    Raises:
        ConfigError: A file of these names is there.
        CorruptRecordError: A state is lost or damaged.

    """
    await anyio.Path(folder).mkdir(parents=True, exist_ok=True)
    digests: dict[int, str] = {}
    await _write(folder / CHECKPOINTS_FILE, _checkpoint_lines(reading, digests))
    seal, cut = EventSigner(), await reading.cut()
    await _write(folder / EVENTS_FILE, _event_lines(reading, digests, seal))
    summary = AuditSummary(seal.count, seal.hash, cut=bool(cut))
    await _write(folder / SUMMARY_FILE, _one(msgspec.json.encode(summary) + b"\n"))
    return [CHECKPOINTS_FILE, EVENTS_FILE, SUMMARY_FILE]


async def _write(path: Path, lines: AsyncGenerator[bytes, None]) -> None:
    new = await anyio.to_thread.run_sync(NewFile, path)
    try:
        async with aclosing(lines):
            async for line in lines:
                if new.add(line) >= PART:
                    await anyio.to_thread.run_sync(new.write)
        await anyio.to_thread.run_sync(new.publish)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(new.close)


async def _one(line: bytes) -> AsyncGenerator[bytes, None]:
    yield line


async def _checkpoint_lines(
    reading: JournalReader, digests: dict[int, str]
) -> AsyncGenerator[bytes, None]:
    cut, walk = await reading.cut(), reading.walk()
    for checkpoint in list((await reading.chain()).by_id.values()):
        if isinstance(checkpoint.state, CapturedState) and checkpoint.event_seq < cut:
            continue
        state = await _state_of(reading, checkpoint, walk)
        digests[checkpoint.id] = state_digest(state)
        line = SavedSnapshot(
            checkpoint.id, checkpoint.label, checkpoint.timestamp, msgspec.Raw(state)
        )
        yield msgspec.json.encode(line) + b"\n"


async def _state_of(reading: JournalReader, checkpoint: Checkpoint, walk: LogWalk) -> bytes:
    if isinstance(checkpoint.state, ExplicitState):
        return await read_bytes(reading.store, reading.key.tenant, checkpoint.state)
    state: Any = await walk.at(checkpoint.event_seq)
    state["context"] = list(state["context"].values())
    return canonical(state)


async def _event_lines(
    reading: JournalReader, digests: dict[int, str], seal: EventSigner
) -> AsyncGenerator[bytes, None]:
    async with aclosing(reading.store.read_log(reading.key, before=reading.head + 1)) as log:
        async for chunk in log:
            for record in chunk.records:
                event = event_of(record.payload) if record.kind == EVENT else None
                if event is not None:
                    yield seal.line(_with_digest(event, digests))


def _with_digest(event: KernelEvent, digests: dict[int, str]) -> KernelEvent:
    if event.kind != SNAPSHOT_CREATED:
        return event
    digest = digests.get(event.detail.get("snapshot", 0))
    more = {PRUNED: True} if digest is None else {_DIGEST: digest}
    return msgspec.structs.replace(event, detail={**event.detail, **more})


def check_pair(folder: Path, *, newest: int = -1) -> None:
    """Look whether the checkpoints of a pair of files can be taken in; blocking.

    Args:
        folder: Where the files lie.
        newest: The newest checkpoint that the session has; -1 for none.

    Raises:
        ConfigError: Their ids do not go up from there, or a state is too deep.
        ReplayError: A file cannot be read.

    """
    for line, snapshot in saved_snapshots(folder, lambda *_: None):
        place = f"{folder / CHECKPOINTS_FILE}, line {line}: checkpoint {snapshot.snapshot_id}"
        if snapshot.snapshot_id <= newest:
            raise ConfigError(
                f"{place} comes after {newest}: ids must go up from 0, and be new to the session: "
                "sort the lines, or take them into a new session",
                checkpoint=snapshot.snapshot_id,
            )
        if is_deeper(bytes(snapshot.state), MAX_VALUE_DEPTH):
            raise ConfigError(
                f"{place} nests deeper than {MAX_VALUE_DEPTH} levels: remove the line",
                checkpoint=snapshot.snapshot_id,
            )
        newest = snapshot.snapshot_id


class AuditPair(msgspec.Struct, frozen=True):
    """What was read from a pair of files."""

    events: int
    checkpoints: int
    findings: tuple[str, ...]
    """What was left out, and why."""


async def take_pair(journal: Journal, folder: Path) -> AuditPair:
    """Append the events and checkpoints of a pair of files to a session, by their times.

    They continue the session's own clock: the order stays, the timestamps may change.
    Everything is durable when this returns; events are saved some thousands at a time.

    Raises:
        ConfigError: The checkpoints' ids do not go up, or the session has some already; nothing
            was appended.
        TooLargeError: An event is larger than any record; the events before it may be there.

    """
    chain = await journal.chain()
    newest = chain.newest_id if chain.links else -1
    await anyio.to_thread.run_sync(partial(check_pair, folder, newest=newest))
    return await _AuditPairReader(journal, folder).run()


@final
class _AuditPairReader:
    def __init__(self, journal: Journal, folder: Path) -> None:
        self._journal = journal
        self._folder = folder
        self._findings: list[str] = []
        self._states = CheckpointStates(journal.store, journal.key.tenant)
        self._snapshots = saved_snapshots(folder, self._tell)
        self._ahead: SavedSnapshot | None = None
        self._created = self._events = 0

    def _tell(self, what: str, line: int) -> None:
        self._findings.append(f"line {line}: {what}")

    async def run(self) -> AuditPair:
        chain = await self._journal.chain()
        events = events_by_time(self._folder, self._tell)
        while some := await anyio.to_thread.run_sync(_some, events):
            for event in some:
                await self._take(event, chain)
            await self._journal.save()
        while (ahead := await self._peek()) is not None:
            await self._make(chain, _told_of(ahead))
        await self._journal.save()
        return AuditPair(self._events, self._created, tuple(self._findings))

    async def _take(self, event: KernelEvent, chain: CheckpointChain) -> None:
        self._events += 1
        which = event.detail.get("snapshot") if event.kind == SNAPSHOT_CREATED else None
        while isinstance(which, int) and (ahead := await self._peek()) is not None:
            if ahead.snapshot_id > which:
                break
            await self._make(chain, event if ahead.snapshot_id == which else _told_of(ahead))
            if ahead.snapshot_id == which:
                return
        if event.kind == SNAPSHOT_CREATED and not event.detail.get(PRUNED):
            missing = f"checkpoint {which} is not in {CHECKPOINTS_FILE}: its event came alone"
            self._findings.append(missing)
        self._journal.accept((self._entry(event, 1, (_DIGEST,)),))

    async def _peek(self) -> SavedSnapshot | None:
        if self._ahead is None:
            upcoming = await anyio.to_thread.run_sync(next, self._snapshots, None)
            self._ahead = None if upcoming is None else upcoming[1]
        return self._ahead

    async def _make(self, chain: CheckpointChain, event: KernelEvent) -> None:
        """Append the next checkpoint, in one group with its event."""
        saved, self._ahead, journal = self._ahead, None, self._journal
        assert saved is not None
        given = await self._states.keep(canonical(saved.state), None, None)
        checkpoint: Checkpoint = sealed(
            Checkpoint(
                id=saved.snapshot_id,
                label=saved.label,
                timestamp=journal.clock + 1,
                event_seq=journal.version,
                state=given,
                previous=chain.head,
                hash="",
            )
        )
        entry = Entry(CHECKPOINT, encode(checkpoint), end=False)
        journal.accept((entry, self._entry(event, 2, _OURS)))
        self._created += 1

    def _entry(self, event: KernelEvent, later: int, without: tuple[str, ...]) -> Entry:
        """Return the record of an event, with none of what is only for files."""
        ours = without if event.kind == SNAPSHOT_CREATED else ()
        detail = {name: event.detail[name] for name in event.detail if name not in ours}
        placed = KernelEvent(
            token_id=event.token_id,
            timestamp=self._journal.clock + later,
            kind=event.kind,
            label=event.label,
            detail=detail,
        )
        return Entry(EVENT, encode(placed))


def _told_of(saved: SavedSnapshot) -> KernelEvent:
    """Return an event for a checkpoint that came without one: each of a session's has its own."""
    detail = {"snapshot": saved.snapshot_id}
    return KernelEvent(
        token_id=0, timestamp=0, kind=SNAPSHOT_CREATED, label=saved.label, detail=detail
    )


def _some(events: Iterator[tuple[int, KernelEvent]]) -> list[KernelEvent]:
    return [event for _, event in itertools.islice(events, SOME)]
