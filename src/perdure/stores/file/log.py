"""What became of an epoch's records: how far a successor sealed it, and what it holds.

For the rare cases only: a batch that is sent again, or that met a takeover.
Blocking; part of one hop into a thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, final

import msgspec

from perdure._lib.files import FULL, Folder, store_error
from perdure._lib.platform import drop_cache, sync_data
from perdure.errors import CorruptRecordError, LeaseLostError, NotStorableError, TooLargeError
from perdure.records import frames
from perdure.records.frames import Position, Scanner
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Entry, Record
from perdure.store import Batch, Outcome, Status
from perdure.stores.file import segments
from perdure.stores.file.layout import (
    LOG,
    segment_name,
    segment_of,
    session_path,
    start_name,
    start_of,
)
from perdure.stores.file.leases import AcquiredSession, Fence
from perdure.stores.file.segments import (
    SEGMENT,
    DurablePosition,
    LogSegment,
    SegmentEnd,
    SegmentHeader,
)

# What became of an epoch's records: how far a successor sealed it, and what it holds


def sealed_end(folder: Folder, key: SessionKey, epoch: int) -> SegmentEnd | None:
    """Return where a later epoch sealed *epoch*, None while none has."""
    with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
        tip = segments.find_tip(log, key)
        while tip is not None and tip.epoch > epoch and tip.first.prev is not None:
            prev = tip.first.prev
            if prev.epoch == epoch:
                return prev
            tip = segments.read_first(log, prev.epoch, prev.number, key)
    return None


def holds(
    folder: Folder, key: SessionKey, end: DurablePosition, first: int, records: Sequence[Entry]
) -> bool:
    """Say whether an epoch's log up to *end* has exactly these records from *first* on."""
    found: list[Record] = []
    length = end.at.offset
    with folder.enter(LOG) as log:
        segment = segments.read_first(log, end.epoch, end.number, key)
        while segment is not None:
            scanned = segments.scan(log, segment, segment.start, upto=length, keep=length)
            found[:0] = scanned.records or ()
            prev = segment.first.prev
            if segment.start.seq < first or segment.number == 0 or prev is None:
                break
            length = prev.length
            segment = segments.read_first(log, prev.epoch, prev.number, key)
    there = [record for record in found if record.seq >= first][: len(records)]
    return [Entry(one.kind, one.payload, one.end) for one in there] == list(records)


# Which files stay open: those of the sessions that were written to last


class SupportsCloseFiles(Protocol):
    """Somebody with files that may be closed, and are opened again when needed."""

    lock: threading.Lock
    """Held by whoever uses the files."""

    def close_files(self) -> None:
        """Close them. The caller has the lock."""


@final
class OpenFiles:
    """Keep the files of the sessions that were written to last open, and no others.

    Thread-safe. A writer that is busy is left alone: it comes up again when it is done.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._closed = False
        self._writers: OrderedDict[SupportsCloseFiles, None] = OrderedDict()
        self._lock = threading.Lock()

    def used(self, writer: SupportsCloseFiles) -> None:
        """Note that a writer, whose lock the caller has, may have files open."""
        if self._closed:
            writer.close_files()
            return
        with self._lock:
            writers = self._writers
            writers[writer] = None
            writers.move_to_end(writer)
            spare = len(writers) - self._limit
            oldest = list(itertools.islice(writers, spare)) if spare > 0 else ()
        for other in oldest:
            self.close(other)

    def close(self, writer: SupportsCloseFiles) -> bool:
        """Close a writer's files unless it is busy; say whether they are closed."""
        if not writer.lock.acquire(blocking=False):
            return False
        try:
            writer.close_files()
            with self._lock:
                self._writers.pop(writer, None)
        finally:
            writer.lock.release()
        return True

    def close_all(self) -> None:
        """Close every file; a writer that is busy closes its own when it is done."""
        self._closed = True
        for writer in list(self._writers):
            self.close(writer)


# Appending to a session's log: one write, one sync, one look at the lease
#
# A `LogWriter` is what a store remembers of a session that it holds. ``append`` blocks,
# made in one hop into a thread, and the thread holds the session's lock to its end: a caller who
# was cancelled leaves a thread behind that goes on alone, and whoever sends the same again waits
# for what became of it.
# OK means: written, synced, and the epoch was still ours afterwards. After an error in a sync the
# same file is never synced again, since the next sync would succeed with the bytes lost: the file
# is closed for good, and the epoch goes on in a new segment, which seals the old one at the length
# that is known to be durable. A full disk is milder: what was written stays, and the next attempt
# writes the rest behind it.


SEGMENT_BYTES = 8 * 1024 * 1024
MAX_RECORD_BYTES = 16 * 1024 * 1024
_FRAME_BYTES = 80
"""What a line has beside its payload, about."""

_OURS = frozenset({EPOCH, SEGMENT})
"""Kinds that the store alone writes."""


class _Tail:
    """The segment that is written to. Its file may be closed and opened again."""

    __slots__ = ("at", "fd", "head", "number", "torn")

    def __init__(self, number: int, at: Position, head: bytes = b"") -> None:
        self.number = number
        self.at = at
        """Where the next record goes."""
        self.head = head
        """The first line, as long as it is not durable."""
        self.torn = b""
        """What a write left behind that the disk was too full for."""
        self.fd: int | None = None

    @property
    def size(self) -> int:
        """The length that the file must have."""
        return (0 if self.head else self.at.offset) + len(self.torn)


@final
class LogWriter:
    """A session that this store holds: where its log ends, and the right to go on there."""

    __slots__ = (
        "_files",
        "_folder",
        "_in_doubt",
        "_last_number",
        "_overtaken",
        "_root",
        "_tail",
        "before",
        "durable",
        "fence",
        "first_seq",
        "is_intact",
        "key",
        "lock",
    )

    def __init__(
        self, root: Folder, key: SessionKey, taken: AcquiredSession, files: OpenFiles
    ) -> None:
        self.key: SessionKey = key
        self.fence: Fence = taken.fence
        self.first_seq: int = taken.end.seq + 1
        """The first record behind the epoch's own."""
        self.durable: DurablePosition = DurablePosition(taken.fence.epoch, 0, taken.end)
        """How far the log is known to last."""
        self.before: DurablePosition = self.durable
        """The same, one append ago."""
        self.is_intact: bool = True
        """False once the files are not what was written here: *durable* says nothing of them."""
        self.lock: threading.Lock = threading.Lock()
        self._root = root
        self._files = files
        self._folder: Folder | None = None
        self._tail: _Tail | None = _Tail(0, taken.end)
        self._last_number = 0
        self._in_doubt = 0
        """The last record that was written and may or may not last; 0 for none."""
        self._overtaken = False

    @property
    def epoch(self) -> int:
        """The fencing token."""
        return self.fence.epoch

    def append(self, batch: Batch) -> Outcome:
        """Make a batch durable. Blocks; takes the lock; raises nothing that is foreseen."""
        with self.lock:
            try:
                return self._append(batch)
            except OSError as error:
                status = Status.IN_DOUBT if self._in_doubt else Status.TRANSIENT
                return Outcome(status, _caused(error, f"the log of {self.key}", self._root.path))
            except (CorruptRecordError, NotStorableError) as error:
                if not self._is_mine():
                    return self._conflict(self.durable.at.seq)
                return Outcome(Status.PERMANENT, error)
            finally:
                self._files.used(self)

    def _append(self, batch: Batch) -> Outcome:
        try:
            folder = self._opened()
        except FileNotFoundError:
            return self._conflict(0)
        if self._overtaken and not self.fence.holds(folder):
            return self._after_takeover(folder, batch)
        size = sum([len(entry.payload) for entry in batch.records])
        self._require_fit(batch, size)
        fresh = self._fresh(folder, batch)
        if not fresh:
            return Outcome(Status.OK)
        written = self._write(folder, fresh, size)
        self._in_doubt = batch.first + len(batch.records) - 1
        if not self.fence.holds(folder):
            return self._after_takeover(folder, batch)
        self._settle()
        return Outcome(Status.OK, None, written)

    def _require_fit(self, batch: Batch, size: int) -> None:
        """Raise what makes a batch one that will never be accepted."""
        records = batch.records
        head = self.durable.at.seq
        if not self.first_seq <= batch.first <= head + 1 or (records and not records[-1].end):
            message = (
                f"a batch of {self.key} begins at {batch.first}, where {self.first_seq} to "
                f"{head + 1} fit, or ends within a group: send whole groups from the head on"
            )
            raise NotStorableError(message, key=str(self.key), first=batch.first, head=head)
        if not _OURS.isdisjoint([entry.kind for entry in records]):
            message = f"records of the kinds {sorted(_OURS)} are the store's own: choose another"
            raise NotStorableError(message, key=str(self.key))
        if size > MAX_RECORD_BYTES:
            largest = max([len(entry.payload) for entry in records])
            if largest > MAX_RECORD_BYTES:
                message = (
                    f"a record of {self.key} has {largest} bytes, the limit is "
                    f"{MAX_RECORD_BYTES}: keep large values as blobs"
                )
                raise TooLargeError(message, key=str(self.key), size=largest)

    def _fresh(self, folder: Folder, batch: Batch) -> tuple[Entry, ...]:
        """Return what of a batch the log does not hold yet; the rest must be the same."""
        held = self.durable.at.seq + 1 - batch.first
        if not held:
            return batch.records
        if holds(folder, self.key, self.durable, batch.first, batch.records[:held]):
            return batch.records[held:]
        message = (
            f"the log of {self.key} holds other records from {batch.first} on: read the head "
            "again and append behind it"
        )
        raise NotStorableError(message, key=str(self.key), first=batch.first)

    # writing

    def _write(self, folder: Folder, records: tuple[Entry, ...], size: int) -> int:
        """Write and sync, in a new segment if this one fails us."""
        tail = self._tail_for(folder, size + _FRAME_BYTES * len(records))
        try:
            return self._write_to(folder, tail, records)
        except OSError:
            if self._tail is not None or not self.fence.holds(folder):
                raise  # the disk is full, or the session is somebody else's
        return self._write_to(folder, self._tail_for(folder, 0), records)

    def _write_to(self, folder: Folder, tail: _Tail, records: tuple[Entry, ...]) -> int:
        at = tail.at
        lines, crc = frames.encode(records, first=at.seq + 1, epoch=self.epoch, crc=at.crc)
        data = tail.head + lines if tail.head else lines
        if tail.torn and not data.startswith(tail.torn):
            self._give_up(tail)  # other records than last time: what is there stays behind a seal
            return self._write_to(folder, self._tail_for(folder, 0), records)
        fd = tail.fd if tail.fd is not None else self._open_tail(folder, tail)
        self._require_there(folder, tail, fd)
        done = len(tail.torn)
        try:
            while done < len(data):
                done += os.write(fd, data[done:] if done else data)
        except OSError as error:
            self._failed(tail, data[:done], error)
            raise
        try:
            sync_data(fd)
            if tail.head:
                with folder.enter(LOG) as log:
                    log.sync()
        except OSError:
            self._in_doubt = at.seq + len(records)
            drop_cache(fd)  # what memory still shows of it the disk may not have
            self._give_up(tail)
            raise
        tail.at = Position(at.offset + len(lines), at.seq + len(records), crc)
        tail.head = tail.torn = b""
        return len(data)

    def _failed(self, tail: _Tail, torn: bytes, error: OSError) -> None:
        """Remember what a write left behind, which may hold whole groups."""
        tail.torn = torn
        start = Position(0, tail.at.seq, tail.at.crc)
        if Scanner(self.epoch, start).feed(torn[len(tail.head) :]):
            self._in_doubt = max(self._in_doubt, tail.at.seq + 1)
        if error.errno not in FULL:
            self._give_up(tail)

    def _settle(self) -> None:
        """What was written counts: it is durable, and it was ours."""
        tail = self._tail
        assert tail is not None  # it was written to just now
        self.before = self.durable
        self.durable = DurablePosition(self.epoch, tail.number, tail.at)
        self._in_doubt = 0

    def _give_up(self, tail: _Tail) -> None:
        """Close a segment for good; the next one seals it where it is known to last."""
        self._tail = None
        fd, tail.fd = tail.fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _tail_for(self, folder: Folder, size: int) -> _Tail:
        """Return the segment to write to: the one at hand, or a new one that seals it.

        A seal stands at what is known to be durable: so a full segment is left only where
        nothing is torn, and one that holds more than was ever settled is left at once.
        """
        tail, settled = self._tail, self.durable.at
        if tail is not None:
            full = tail.at.offset + size > SEGMENT_BYTES and tail.at == settled and not tail.torn
            if (full and settled.seq >= self.first_seq) or tail.at.seq != settled.seq:
                self._give_up(tail)
        return self._tail or self._new_segment(folder)

    def _new_segment(self, folder: Folder) -> _Tail:
        number = self._last_number + 1
        known = self.durable
        prev = SegmentEnd(known.epoch, known.number, known.at.offset, known.at.seq, known.at.crc)
        entry = Entry(SEGMENT, msgspec.json.encode(SegmentHeader(self.key, prev)))
        line, crc = frames.encode((entry,), first=prev.seq, epoch=self.epoch, crc=prev.crc)
        with folder.enter(LOG) as log:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
            self._last_number = number
            fd = log.open(segment_name(self.epoch, number), flags)
        tail = self._tail = _Tail(number, Position(len(line), prev.seq, crc), line)
        tail.fd = fd
        return tail

    # files

    def _opened(self) -> Folder:
        if self._folder is None:
            self._folder = self._root.enter(*session_path(self.key))
        return self._folder

    def _open_tail(self, folder: Folder, tail: _Tail) -> int:
        name = segment_name(self.epoch, tail.number)
        try:
            with folder.enter(LOG) as log:
                fd = log.open(name, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            fd = -1
        size = os.fstat(fd).st_size if fd >= 0 else 0
        if size != tail.size:
            if fd >= 0:
                os.close(fd)
            self.is_intact = False
            message = (
                f"{folder.path}/{LOG}/{name} has {size} bytes where {tail.size} were written: "
                "somebody else changed it; close the session and see what `perdure check` says"
            )
            raise CorruptRecordError(message, path=f"{folder.path}/{LOG}/{name}", offset=size)
        tail.fd = fd
        return fd

    def _require_there(self, folder: Folder, tail: _Tail, fd: int) -> None:
        """Raise if a file that is open was removed or cut: an older copy may be in its place."""
        there = os.fstat(fd)
        if there.st_nlink and there.st_size == tail.size:
            return
        self.is_intact = False
        self.close_files()  # what is there now is found by its name
        where = f"{folder.path}/{LOG}/{segment_name(self.epoch, tail.number)}"
        message = (
            f"{where} was removed, replaced or cut under its writer: an older copy may have been "
            "put in its place; close the session and see what `perdure check` says"
        )
        raise CorruptRecordError(message, path=where, offset=there.st_size)

    def close_files(self) -> None:
        """Close what is open; the next append opens it again. The caller has the lock."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()
        tail = self._tail
        if tail is not None and tail.fd is not None:
            fd, tail.fd = tail.fd, None
            os.close(fd)

    # others

    def rest(self) -> None:
        """Leave the files that are open to be closed in time. The caller has the lock."""
        self._files.used(self)

    def require_mine(self) -> None:
        """Raise LeaseLostError unless the session is ours. The caller has the lock."""
        if not self._is_mine():
            raise lost(self.key, self.epoch)

    def _is_mine(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self.fence.holds(self._opened())
        return False

    def folder(self) -> Folder:
        """Return the session's open folder. The caller has the lock."""
        return self._opened()

    def _conflict(self, sealed: int) -> Outcome:
        return Outcome(Status.CONFLICT, lost(self.key, self.epoch, sealed))

    def _after_takeover(self, folder: Folder, batch: Batch) -> Outcome:
        """Answer a batch that met a newer epoch: its seal tells what got into the log."""
        self._overtaken = True
        last = batch.first + len(batch.records) - 1
        sealed = sealed_end(folder, self.key, self.epoch)
        if sealed is None:
            end = self.durable
        else:
            at = Position(sealed.length, sealed.seq, sealed.crc)
            end = DurablePosition(sealed.epoch, sealed.number, at)
        if last <= end.at.seq and holds(folder, self.key, end, batch.first, batch.records):
            return Outcome(Status.OK)
        if sealed is None and self._in_doubt >= batch.first:
            return Outcome(Status.IN_DOUBT, lost(self.key, self.epoch))
        return self._conflict(end.at.seq)


def lost(key: SessionKey, epoch: int, sealed: int = 0) -> LeaseLostError:
    """Return the error for a write under an epoch that is over."""
    message = (
        f"epoch {epoch} of {key} may not write: somebody else has the session by now, or it "
        "was released; open it again"
    )
    return LeaseLostError(message, key=str(key), epoch=epoch, sealed_seq=sealed)


def _caused(error: OSError, what: str, where: str) -> Exception:
    problem = store_error(error, "append to", f"{what} in {where}")
    problem.__cause__ = error
    return problem


# Removing the oldest files of a log: those that lie wholly below a record
#
# First a mark says which file the log begins with, durably; then the older ones go. The chain of
# files is followed as far as it reaches, and may end at the mark: so a kill at any step leaves a
# log that reads well, with more of the old in it than was asked for at worst.
# Blocking; one hop into a thread.


def trim(writer: LogWriter, below: int) -> int:
    """Remove files whose records are all older than one, as the holder; return their bytes.

    Raises:
        LeaseLostError: The session is somebody else's by now.

    """
    with writer.lock:
        folder = writer.folder()
        try:
            writer.require_mine()
            with folder.enter(LOG) as log:
                tip = segments.find_tip(log, writer.key)
                if tip is None:
                    return 0
                first = segments.walk(log, tip, writer.key, down_to=max(below, 1) - 1)[-1]
                return _begin_with(log, first)
        finally:
            writer.rest()


def _begin_with(log: Folder, first: LogSegment) -> int:
    place = (first.epoch, first.number)
    names = log.names()
    old = [found for found in filter(None, map(segment_of, names)) if found < place]
    if not old:
        return 0
    os.close(log.open(start_name(*place), os.O_WRONLY | os.O_CREAT))
    log.sync()
    for start in filter(None, map(start_of, names)):
        if start < place:
            log.remove(start_name(*start))
    freed = 0
    for segment in sorted(old, reverse=True):  # the chain may end nowhere but at the mark
        name = segment_name(*segment)
        found = log.stat(name)
        if found is not None and log.remove(name):
            freed += found.st_size
    log.sync()
    return freed
