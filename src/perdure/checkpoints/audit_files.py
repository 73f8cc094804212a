"""The pair of files that a replay needs: ``events.jsonl`` and ``checkpoints.jsonl``.

Lines are as other kernels write them: ``{"token_id","timestamp","kind","label","detail"}``, and
``{"snapshot_id","label","timestamp","state"}``. What perdure writes has more: each event is sealed
to the one before it (``hash``), each ``snapshot_created`` has the digest of the state
(``state_sha256``), and ``replay.json`` says where the events end. So a payload that was changed,
and a line that was changed, moved or taken away, is found. Files without seals are replayed, too.

Blocking; lines are read one by one. Those out of order are sorted by SQLite, on the disk.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, closing
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import new_file, open_regular, read_line
from perdure.checkpoints.chain import CheckpointChain, canonical, sealed
from perdure.checkpoints.journal import Journal, JournalReader
from perdure.checkpoints.replay import Replay, ReplayReport, TimelineRow, event_of
from perdure.checkpoints.states import CheckpointStates, read_bytes
from perdure.errors import ConfigError, CorruptRecordError, FormatError, ReplayError
from perdure.records.checkpoints import (
    PRUNED,
    SNAPSHOT_CREATED,
    Checkpoint,
    ExplicitState,
    KernelEvent,
)
from perdure.records.chunks import name_of
from perdure.records.json import (
    MAX_VALUE_DEPTH,
    as_utf8,
    check_depth,
    decoder_of,
    encode,
    is_deeper,
)
from perdure.records.records import CHECKPOINT, EVENT, Entry

T = TypeVar("T")

EVENTS_FILE: Final = "events.jsonl"
CHECKPOINTS_FILE: Final = "checkpoints.jsonl"
SUMMARY_FILE: Final = "replay.json"

LINE: Final = 64 * 1024 * 1024
"""Bytes that a line may have."""
LAST: Final = 2**63 - 1
"""Last time that events are sorted by."""
SUMMARY_BYTES: Final = 4096

_DIGEST: Final = "state_sha256"
_OURS: Final = (_DIGEST, PRUNED)
"""Fields of an event's detail that only files have."""


class SavedSnapshot(msgspec.Struct, frozen=True):
    """A line of ``checkpoints.jsonl``."""

    snapshot_id: int
    label: str
    timestamp: int
    state: msgspec.Raw


class SavedEvent(KernelEvent, frozen=True, kw_only=True, omit_defaults=True):
    """A line of ``events.jsonl``."""

    hash: str | None = None


class AuditSummary(msgspec.Struct, frozen=True):
    """``replay.json``."""

    events: int
    last_hash: str
    cut: bool = False
    """True if the session's beginning had been pruned when it was written."""


class EventSigner:
    """Seals events, each to the one before."""

    def __init__(self) -> None:
        self.hash: str = ""
        self.count: int = 0

    def next(self, event: KernelEvent) -> str:
        """Return the seal of the next event."""
        plain = {name: getattr(event, name) for name in KernelEvent.__struct_fields__}
        data = self.hash.encode() + msgspec.json.encode(plain, order="sorted")
        self.hash = hashlib.sha256(data).hexdigest()[:32]
        self.count += 1
        return self.hash

    def line(self, event: KernelEvent) -> bytes:
        """Return the line of the next event."""
        sealed = {**msgspec.to_builtins(event), "hash": self.next(event)}
        return msgspec.json.encode(sealed) + b"\n"


def has_pair(folder: Path) -> bool:
    """Say whether there is something to replay in a folder."""
    return (folder / EVENTS_FILE).is_file()


def _lines(path: Path, tell: Callable[[str, int], object]) -> Iterator[tuple[int, bytes, bool]]:
    """Give a file's lines, if there is one: number, bytes, and whether it has its end."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    except (ConfigError, OSError) as error:
        raise ReplayError(f"{path} cannot be read: {error}", path=str(path)) from error
    with file:
        for number in itertools.count(1):
            line = read_line(file, LINE)
            if line is None:
                raise ReplayError(
                    f"{path}, line {number}, has more than {LINE} bytes: it is no event",
                    path=str(path),
                    line=number,
                )
            if not line:
                return
            if number == 1:
                try:
                    line = as_utf8(line)
                except CorruptRecordError as error:
                    raise ReplayError(f"{path} cannot be read: {error}", path=str(path)) from None
            if line.strip():
                yield number, line, line.endswith(b"\n")
            else:
                tell("the line is empty", number)


def _decoded(
    path: Path, type: type[T], tell: Callable[[str, int], object]
) -> Iterator[tuple[int, T]]:
    decode = decoder_of(type).decode
    for number, line, is_complete in _lines(path, tell):
        try:
            check_depth(line)
            value = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, FormatError) as error:
            what = f"it cannot be read ({error})" if is_complete else "the file was torn here"
            tell(f"{path.name}: {what}: the line was left out", number)
        else:
            yield number, value


def saved_snapshots(
    folder: Path, tell: Callable[[str, int], object]
) -> Iterator[tuple[int, SavedSnapshot]]:
    """Give the checkpoints of a folder, with the numbers of their lines."""
    for number, snapshot in _decoded(folder / CHECKPOINTS_FILE, SavedSnapshot, tell):
        try:
            canonical(snapshot.state)
        except FormatError as error:
            what = f"the state of checkpoint {snapshot.snapshot_id} cannot be read ({error})"
            tell(f"{CHECKPOINTS_FILE}: {what}: the line was left out", number)
        else:
            yield number, snapshot


def replay_folder(
    folder: Path,
    *,
    on_row: Callable[[TimelineRow], object] | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> ReplayReport:
    """Feed the events of a folder to a dry run, by their times; return what it has seen.

    *go_on* is called at each event; it returns False when the report is no longer needed.

    Raises:
        ReplayError: There are no events, or a line is larger than any event.

    """
    if not has_pair(folder):
        raise ReplayError(
            f"there is no {EVENTS_FILE} in {folder}: name the folder that has it", path=str(folder)
        )
    summary = _summary(folder)
    run = Replay("line", gapless=False)
    cut = summary is None or summary.cut
    snapshots = _Snapshots(folder, run)
    seals = _Sealed(run, expected=summary is not None)
    for number, event in events_by_time(folder, run.problem, seals.check, go_on):
        if not go_on():
            break
        row = run.feed(number, event.timestamp, event)
        if row is not None and on_row is not None:
            on_row(row)
        if event.kind == SNAPSHOT_CREATED:
            snapshots.compare(number, event)
    snapshots.end(all_are_told=not cut)
    if seals.unsealed:
        run.unproven.append(
            f"{seals.unsealed:,} events have no hash: nothing proves that none was changed, put in "
            "or taken away"
        )
    if summary is None:
        run.unproven.append(
            f"there is no {SUMMARY_FILE}, which says how many events there are: nothing proves "
            "that none is missing at the end"
        )
    elif (seals.seal.count, seals.last) != (
        summary.events,
        summary.last_hash,
    ):
        run.problem(
            f"{SUMMARY_FILE} says that there are {summary.events} events, and these are "
            f"{seals.seal.count}, or the last one is another"
        )
    return run.report(str(folder))


def _summary(folder: Path) -> AuditSummary | None:
    path = folder / SUMMARY_FILE
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            return decoder_of(AuditSummary).decode(as_utf8(file.read(SUMMARY_BYTES)))
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError, FormatError) as error:
        raise ReplayError(
            f"{path} cannot be read: {error}: remove it to replay without it", path=str(path)
        ) from error


class _Sealed:
    """Looks whether each event is still sealed to the one before it in the file."""

    def __init__(self, run: Replay, *, expected: bool) -> None:
        self.seal = EventSigner()
        self.last = ""
        self.unsealed = 0
        """Events of others, without a hash."""
        self._run = run
        self._expected = expected  # others write events without seals, and none with some

    def check(self, number: int, event: SavedEvent) -> None:
        before, self.last = self._expected, event.hash or ""
        self._expected = before or event.hash is not None
        if self.seal.next(event) == event.hash:
            return
        if not self._expected:
            self.unsealed += 1
            return
        self._run.problem(
            "the event was changed, or the one before it was changed, moved or taken away", number
        )
        self.seal.hash = self.last  # later events are checked independently


def events_by_time(
    folder: Path,
    tell: Callable[[str, int], object],
    each: Callable[[int, SavedEvent], object] = lambda *_: None,
    go_on: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[int, SavedEvent]]:
    """Give events by time, those of one time as they stand in the file; in bounded memory.

    *each* is called before that, with every event in the order of the file; *go_on* ends it by
    False.
    """
    path, newest, is_in_order = folder / EVENTS_FILE, 0, True
    for number, event in _decoded(path, SavedEvent, tell):
        if not go_on():
            return
        each(number, event)
        is_in_order = is_in_order and event.timestamp >= newest
        newest = event.timestamp
    events = _decoded(path, SavedEvent, lambda *_: None)
    if is_in_order:
        yield from events
        return
    import sqlite3

    # A database without a name is in a temporary file, as is its sorting, once it is large.
    with closing(sqlite3.connect("", check_same_thread=False)) as sorting:
        sorting.execute("CREATE TABLE event (time INTEGER, line INTEGER, json BLOB)")
        sorting.executemany("INSERT INTO event VALUES (?, ?, ?)", map(_row, events))
        decode = decoder_of(SavedEvent).decode
        for number, data in sorting.execute("SELECT line, json FROM event ORDER BY time, line"):
            yield number, decode(data)


def _row(numbered: tuple[int, SavedEvent]) -> tuple[int, int, bytes]:
    number, event = numbered
    time = max(min(event.timestamp, LAST), -LAST)
    return time, number, msgspec.json.encode(event)


class _CheckpointHeader(NamedTuple):
    """A checkpoint without its state."""

    line: int
    label: str
    timestamp: int
    digest: str


class _Snapshots:
    """The checkpoints of a folder, by id, each with the digest of its state."""

    def __init__(self, folder: Path, run: Replay) -> None:
        self._run = run
        self._headers: dict[int, _CheckpointHeader] = {}
        for number, snapshot in saved_snapshots(folder, run.problem):
            if snapshot.snapshot_id in self._headers:
                before = self._headers[snapshot.snapshot_id].line
                what = f"checkpoint {snapshot.snapshot_id} is in line {before}, too"
                run.problem(f"{CHECKPOINTS_FILE}: {what}", number)
                continue
            digest = name_of(bytes(snapshot.state))
            self._headers[snapshot.snapshot_id] = _CheckpointHeader(
                number, snapshot.label, snapshot.timestamp, digest
            )
        self._untold = set(self._headers)

    def compare(self, number: int, event: KernelEvent) -> None:
        """Compare an event with its checkpoint."""
        which, recorded = event.detail.get("snapshot"), event.detail.get(_DIGEST)
        header = self._headers.get(which) if isinstance(which, int) else None
        wrong = ""
        if header is None:
            wrong = f"is not in {CHECKPOINTS_FILE}"
        else:
            self._untold.discard(which)
            line = f"in line {header.line} of {CHECKPOINTS_FILE}"
            if event.label not in {None, header.label}:
                wrong = f"is called {header.label!r} {line}"
            elif recorded not in (None, header.digest):  # from a file: it may be anything
                wrong = f"has another state {line} than was recorded"
            elif recorded is not None and header.timestamp + 1 != event.timestamp:
                wrong = f"has another time {line} than was recorded"
        if event.detail.get(PRUNED) or (recorded is None and not wrong):
            self._run.unverified += 1
        elif wrong:
            self._run.problem(f"checkpoint {which} {wrong}", number)
        else:
            self._run.snapshots += 1

    def end(self, *, all_are_told: bool) -> None:
        """Report checkpoints without an event; if each must have one, they were inserted."""
        for which in sorted(self._untold):
            if all_are_told:
                what = f"no event records checkpoint {which}: it was put in"
                self._run.problem(f"{CHECKPOINTS_FILE}: {what}", self._headers[which].line)
            else:
                self._run.unverified += 1


# Export of a session into such a pair, and import from one


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
    async with new_file(folder / SUMMARY_FILE) as file:
        await file.take(msgspec.json.encode(summary) + b"\n")
    return [CHECKPOINTS_FILE, EVENTS_FILE, SUMMARY_FILE]


async def _write(path: Path, lines: AsyncGenerator[bytes, None]) -> None:
    async with new_file(path) as file, aclosing(lines):
        async for line in lines:
            await file.take(line)


async def _checkpoint_lines(
    reading: JournalReader, digests: dict[int, str]
) -> AsyncGenerator[bytes, None]:
    cut, walk = await reading.cut(), reading.walk()
    for checkpoint in list((await reading.chain()).by_id.values()):
        if isinstance(checkpoint.state, ExplicitState):
            state = await read_bytes(reading.store, reading.key.blobs, checkpoint.state)
        elif checkpoint.event_seq >= cut:
            captured = await walk(checkpoint.event_seq)
            state = canonical({**captured, "context": list(captured["context"].values())})
        else:
            continue  # its history was pruned
        digests[checkpoint.id] = name_of(state)
        line = SavedSnapshot(
            checkpoint.id, checkpoint.label, checkpoint.timestamp, msgspec.Raw(state)
        )
        yield msgspec.json.encode(line) + b"\n"


async def _event_lines(
    reading: JournalReader, digests: dict[int, str], seal: EventSigner
) -> AsyncGenerator[bytes, None]:
    async with aclosing(reading.store.read_log(reading.key, before=reading.head + 1)) as log:
        async for chunk in log:
            for record in chunk.records:
                event = event_of(record.payload) if record.kind == EVENT else None
                if event is None:
                    continue
                if event.kind == SNAPSHOT_CREATED:
                    digest = digests.get(event.detail.get("snapshot", 0))
                    more = {PRUNED: True} if digest is None else {_DIGEST: digest}
                    event = msgspec.structs.replace(event, detail={**event.detail, **more})
                yield seal.line(event)


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
    """Result of importing a pair of files."""

    events: int
    checkpoints: int
    findings: tuple[str, ...]
    """Lines that were left out, with the reasons."""


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
        self._states = CheckpointStates(journal.store, journal.key.blobs)
        self._snapshots = saved_snapshots(folder, self._tell)
        self._ahead: SavedSnapshot | None = None
        self._created = self._events = 0

    def _tell(self, what: str, line: int) -> None:
        self._findings.append(f"line {line}: {what}")

    async def run(self) -> AuditPair:
        chain = await self._journal.chain()
        events = events_by_time(self._folder, self._tell)
        while taken := await anyio.to_thread.run_sync(lambda: list(itertools.islice(events, SOME))):
            for _, event in taken:
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
            self._findings.append(
                f"checkpoint {which} is not in {CHECKPOINTS_FILE}: its event came alone"
            )
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
        entry = Entry(CHECKPOINT, encode(checkpoint))
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
