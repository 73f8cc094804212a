"""Writer of a session's log: appends with one write, one sync and one fence check; trims.

A `LogWriter` is the store's state of one held session. ``append`` blocks and runs in one thread
call, which holds the session's lock to its end: a cancelled caller leaves a thread that finishes
alone, and a caller that sends the same batch again waits for its outcome.

OK means: written, synced, and the epoch was still the newest afterwards. After a failed sync the
same file is never synced again, since that sync would succeed with the bytes lost: the file is
abandoned, and the epoch continues in a new segment, which seals the old one at the length that is
known to be durable. A full disk is milder: what was written stays, and the next attempt appends
the remaining bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import final

import msgspec

from perdure._lib.files import FULL, Folder, store_error
from perdure._lib.platform import drop_cache, sync_data
from perdure.errors import CorruptRecordError, LeaseLostError, NotStorableError
from perdure.records import records as frames
from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.keys import SessionKey
from perdure.records.manifest import other_records, too_large
from perdure.records.records import EPOCH, Entry, Position, Record, Scanner
from perdure.store import Batch, Outcome, Status
from perdure.stores.file import documents, segments
from perdure.stores.file.documents import Manifests
from perdure.stores.file.layout import (
    LOG,
    segment_name,
    segment_of,
    session_path,
    start_name,
    start_of,
)
from perdure.stores.file.leases import Fence
from perdure.stores.file.reader import records_of, spans_to
from perdure.stores.file.segments import (
    SEGMENT,
    DurablePosition,
    SegmentEnd,
    SegmentHeader,
    SegmentSpan,
)

# What an epoch's log has, for the rare batch that is sent again or met a takeover


def sealed_end(folder: Folder, key: SessionKey, epoch: int) -> SegmentEnd | None:
    """Return where a later epoch sealed *epoch*'s log, None if none has."""
    with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
        tip = segments.find_tip(log, key)
        while tip is not None and tip.epoch > epoch and tip.first.prev is not None:
            prev = tip.first.prev
            if prev.epoch == epoch:
                return prev
            tip = segments.read_first(log, prev.epoch, prev.number, key)
    return None


def has_entries(
    folder: Folder, key: SessionKey, end: DurablePosition, first: int, records: Sequence[Entry]
) -> bool:
    """Return whether an epoch's log up to *end* has exactly these records from *first* on."""
    logged: list[Record] = []
    with folder.enter(LOG) as log:
        segment = segments.read_first(log, end.epoch, end.number, key)
        if segment is not None:
            newest = SegmentSpan(segment, segment.start, end.at)
            for span in spans_to(log, key, newest, first - 1, Manifests()):
                logged += records_of(log, span, span.stop.offset) or ()
    entries = [record for record in logged if record.seq >= first][: len(records)]
    return [Entry(record.kind, record.payload, record.end) for record in entries] == list(records)


@final
class OpenFiles:
    """LRU of open files: those of the sessions that were written to last stay open.

    Thread-safe. A busy writer is skipped: it calls `touch` again when it is done.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._closed = False
        self._writers: OrderedDict[LogWriter, None] = OrderedDict()
        self._lock = threading.Lock()

    def touch(self, writer: LogWriter) -> None:
        """Note that a writer, whose lock the caller has, may have files open."""
        if self._closed:
            writer.close_files()
            return
        with self._lock:
            writers = self._writers
            writers[writer] = None
            writers.move_to_end(writer)
            surplus = len(writers) - self._limit
            oldest = list(itertools.islice(writers, surplus)) if surplus > 0 else ()
        for other in oldest:
            self.close(other)

    def close(self, writer: LogWriter) -> None:
        """Close a writer's files unless it is busy."""
        if writer.lock.acquire(blocking=False):
            try:
                writer.close_files()
                with self._lock:
                    self._writers.pop(writer, None)
            finally:
                writer.lock.release()

    def close_all(self) -> None:
        """Close every file; a busy writer closes its own when it is done."""
        self._closed = True
        for writer in list(self._writers):
            self.close(writer)


SEGMENT_BYTES = 8 * 1024 * 1024
_FRAME_BYTES = 80
"""Approximate overhead of a line."""

_OURS = frozenset({EPOCH, SEGMENT})
"""Record kinds that only the store writes."""


class _Tail(msgspec.Struct, gc=False, eq=False):
    """The segment that is written to. Its file may be closed and reopened."""

    number: int
    at: Position
    """The place of the next record."""
    head: bytes = b""
    """The first line, until it is durable."""
    partial: bytes = b""
    """Bytes of a write that a full disk cut short."""
    fd: int | None = None

    def __repr__(self) -> str:
        return object.__repr__(self)  # a log has no messages

    @property
    def size(self) -> int:
        """The length that the file must have."""
        return (0 if self.head else self.at.offset) + len(self.partial)


@final
class LogWriter:
    """A held session's writer: where its log ends, and the fence that allows appending there."""

    __slots__ = (
        "_files",
        "_folder",
        "_in_doubt",
        "_is_overtaken",
        "_last_number",
        "_root",
        "_tail",
        "before",
        "durable",
        "epoch",
        "fence",
        "first_seq",
        "is_intact",
        "key",
        "listed_at",
        "lock",
        "saved_at",
        "turns",
    )

    def __init__(
        self, root: Folder, key: SessionKey, fence: Fence, end: Position, files: OpenFiles
    ) -> None:
        self.key: SessionKey = key
        self.fence: Fence = fence
        self.epoch: int = fence.epoch
        """The fencing token."""
        self.first_seq: int = end.seq + 1
        """The first record after the epoch record."""
        self.durable: DurablePosition = DurablePosition(fence.epoch, 0, end)
        """The end of the part that is known to be durable."""
        self.before: DurablePosition = self.durable
        """The same, one append ago."""
        self.is_intact: bool = True
        """False once another process changed the files: then *durable* does not hold."""
        self.turns: int | None = None
        """The turns that the last save said."""
        self.listed_at: int = 0
        """The last record that came with them."""
        self.saved_at: float | None = None
        """The time of the last save; None before the first one."""
        self.lock: threading.Lock = threading.Lock()
        self._root = root
        self._files = files
        self._folder: Folder | None = None
        self._tail: _Tail | None = _Tail(0, end)
        self._last_number = 0
        self._in_doubt = False
        """True if records were written that may or may not be durable."""
        self._is_overtaken = False

    def append(self, batch: Batch) -> Outcome:
        """Make a batch durable. Blocks and takes the lock; expected errors become the outcome."""
        with self.lock:
            try:
                return self._append(batch)
            except OSError as error:
                status = Status.IN_DOUBT if self._in_doubt else Status.TRANSIENT
                what = f"the log of {self.key} in {self._root.path}"
                cause = store_error(error, "append to", what)
                cause.__cause__ = error
                return Outcome(status, cause)
            except (CorruptRecordError, NotStorableError) as error:
                if not self.is_held():
                    return self._conflict(self.durable.at.seq)
                return Outcome(Status.PERMANENT, error)
            finally:
                self._files.touch(self)

    def _append(self, batch: Batch) -> Outcome:
        try:
            folder = self.folder()
        except FileNotFoundError:
            return self._conflict(0)
        # It writes nothing more; what it wrote before may still be in the log.
        if self._is_overtaken and not self.fence.is_valid(folder):
            return self._after_takeover(folder, batch)
        size = sum([len(entry.payload) for entry in batch.records])
        self._require_fit(batch, size)
        # 1. Leave out what an earlier attempt has written.
        new_entries = self._new_entries(folder, batch)
        if not new_entries:
            self._note_listed(folder, batch)
            return Outcome(Status.OK)
        # 2. Write and sync.
        written = self._write(folder, new_entries, size)
        # 3. It counts only if the epoch is still the newest after the sync.
        self._in_doubt = True
        if not self.fence.is_valid(folder):
            return self._after_takeover(folder, batch)
        tail = self._tail
        assert tail is not None  # it was written to just now
        self.before = self.durable
        self.durable = DurablePosition(self.epoch, tail.number, tail.at)
        self._in_doubt = False
        self._note_listed(folder, batch)
        return Outcome(Status.OK, None, written)

    def _note_listed(self, folder: Folder, batch: Batch) -> None:
        """Note what a save says for listings: only changed labels cost a file."""
        self.saved_at = time.time()
        if batch.turns is not None:
            self.turns, self.listed_at = batch.turns, self.durable.at.seq
        if batch.about is not None:
            documents.save_labels(folder, self.epoch, self.durable.at.seq, batch.about)

    def _require_fit(self, batch: Batch, size: int) -> None:
        """Raise if a batch can never be accepted."""
        records = batch.records
        head = self.durable.at.seq
        if not self.first_seq <= batch.first <= head + 1 or (records and not records[-1].end):
            raise NotStorableError(
                f"a batch of {self.key} begins at {batch.first}, where {self.first_seq} to "
                f"{head + 1} is valid, or ends within a group: send whole groups from the head on",
                key=str(self.key),
                first=batch.first,
                head=head,
            )
        if not _OURS.isdisjoint([entry.kind for entry in records]):
            raise NotStorableError(
                f"records of the kinds {sorted(_OURS)} are the store's own: choose another",
                key=str(self.key),
            )
        if size > MAX_RECORD_BYTES:
            largest = max([len(entry.payload) for entry in records])
            if largest > MAX_RECORD_BYTES:
                raise too_large(self.key, largest)

    def _new_entries(self, folder: Folder, batch: Batch) -> tuple[Entry, ...]:
        """Return the entries that the log does not have yet; the others must be the same."""
        logged_count = self.durable.at.seq + 1 - batch.first
        if not logged_count:
            return batch.records
        if has_entries(folder, self.key, self.durable, batch.first, batch.records[:logged_count]):
            return batch.records[logged_count:]
        raise other_records(batch, self.durable.at.seq)

    # writing

    def _write(self, folder: Folder, records: tuple[Entry, ...], size: int) -> int:
        """Write and sync, in a new segment if this one fails."""
        tail = self._tail_for(folder, size + _FRAME_BYTES * len(records))
        try:
            return self._write_to(folder, tail, records)
        except OSError:
            if self._tail is not None or not self.fence.is_valid(folder):
                raise  # the disk is full, or another process has the session
        # The segment was abandoned: a new one seals it at the end that is durable.
        return self._write_to(folder, self._tail_for(folder, 0), records)

    def _write_to(self, folder: Folder, tail: _Tail, records: tuple[Entry, ...]) -> int:
        at = tail.at
        lines, crc = frames.encode(records, first=at.seq + 1, epoch=self.epoch, crc=at.crc)
        # A new segment's first line goes out with its first records, in one sync.
        data = tail.head + lines if tail.head else lines
        if tail.partial and not data.startswith(tail.partial):
            # Other records than last time: the partial bytes stay after the seal.
            self._abandon_tail(tail)
            return self._write_to(folder, self._tail_for(folder, 0), records)
        fd = self._tail_file(folder, tail)
        done = len(tail.partial)
        try:
            while done < len(data):
                done += os.write(fd, data[done:] if done else data)
        except OSError as error:
            self._note_partial_write(tail, data[:done], error)
            raise
        try:
            sync_data(fd)
            # The file is new: its name has to be durable as well.
            if tail.head:
                with folder.enter(LOG) as log:
                    log.sync()
        except OSError:
            self._in_doubt = True
            drop_cache(fd)  # the page cache may show bytes that the disk does not have
            self._abandon_tail(tail)
            raise
        tail.at = Position(at.offset + len(lines), at.seq + len(records), crc)
        tail.head = tail.partial = b""
        return len(data)

    def _note_partial_write(self, tail: _Tail, partial: bytes, error: OSError) -> None:
        """Remember the bytes of a failed write, which may hold whole groups."""
        tail.partial = partial
        start = Position(0, tail.at.seq, tail.at.crc)
        if Scanner(self.epoch, start).feed(partial[len(tail.head) :]):
            self._in_doubt = True
        if error.errno not in FULL:
            self._abandon_tail(tail)

    def _abandon_tail(self, tail: _Tail) -> None:
        """Abandon a segment; the next one seals it where it is known to be durable."""
        self._tail = None
        fd, tail.fd = tail.fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _tail_for(self, folder: Folder, size: int) -> _Tail:
        """Return the segment to write to: the current one, or a new one that seals it.

        A seal is at the durable position: so a full segment is left only when nothing in it is
        partial, and one that holds more than was ever confirmed is left at once.
        """
        tail, durable = self._tail, self.durable.at
        if tail is not None:
            is_full = tail.at.offset + size > SEGMENT_BYTES
            is_confirmed = tail.at == durable and not tail.partial
            may_seal = is_full and is_confirmed and durable.seq >= self.first_seq
            if may_seal or tail.at.seq != durable.seq:
                self._abandon_tail(tail)
        return self._tail or self._new_segment(folder)

    def _new_segment(self, folder: Folder) -> _Tail:
        number = self._last_number + 1
        durable = self.durable
        prev = SegmentEnd(
            durable.epoch, durable.number, durable.at.offset, durable.at.seq, durable.at.crc
        )
        entry = Entry(SEGMENT, msgspec.json.encode(SegmentHeader(self.key, prev)))
        line, crc = frames.encode((entry,), first=prev.seq, epoch=self.epoch, crc=prev.crc)
        with folder.enter(LOG) as log:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
            # Before it is opened: a name that may exist already is not tried again.
            self._last_number = number
            fd = log.open(segment_name(self.epoch, number), flags)
        tail = self._tail = _Tail(number, Position(len(line), prev.seq, crc), line)
        tail.fd = fd
        return tail

    # files

    def folder(self) -> Folder:
        """Return the session's folder, opened if need be. The caller has the lock."""
        if self._folder is None:
            self._folder = self._root.enter(*session_path(self.key))
        return self._folder

    def _tail_file(self, folder: Folder, tail: _Tail) -> int:
        """Return the file that is written to, opened if need be.

        Raises:
            CorruptRecordError: It is not as it was left: an older copy may have replaced it.

        """
        name, size = segment_name(self.epoch, tail.number), 0
        if tail.fd is None:
            with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
                tail.fd = log.open(name, os.O_WRONLY | os.O_APPEND)
        if tail.fd is not None:
            status = os.fstat(tail.fd)
            size = status.st_size
            # Still under its name, and as long as it was left.
            if status.st_nlink and size == tail.size:
                return tail.fd
        self.is_intact = False
        self.close_files()  # the next open finds the present file by its name
        path = f"{folder.path}/{LOG}/{name}"
        raise CorruptRecordError(
            f"{path} has {size} bytes where {tail.size} were written, or was removed or replaced "
            "meanwhile: another process changed it, or an older copy replaced it; close the "
            "session and run `perdure check`",
            path=path,
            offset=size,
        )

    def require_present(self) -> None:
        """Raise if the file that is written to was set back; the caller has the lock.

        Raises:
            CorruptRecordError: It is not as it was left.

        """
        folder, tail = self.folder(), self._tail
        if tail is not None and not tail.head:
            self._tail_file(folder, tail)

    def close_files(self) -> None:
        """Close the open files; the next append reopens them. The caller has the lock."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()
        tail = self._tail
        if tail is not None and tail.fd is not None:
            fd, tail.fd = tail.fd, None
            os.close(fd)

    # the fence

    @contextlib.contextmanager
    def held(self) -> Iterator[Folder]:
        """Give the session's folder to a block that writes there as the holder, with the lock.

        Raises:
            LeaseLostError: The session is not held any more.

        """
        with self.lock:
            try:
                self.require_held()
                yield self.folder()
            finally:
                self._files.touch(self)

    def require_held(self) -> None:
        """Raise LeaseLostError unless the session is held. The caller has the lock."""
        if not self.is_held():
            raise lease_lost_error(self.key, self.epoch)

    def is_held(self) -> bool:
        """Return whether the session is held. The caller has the lock."""
        with contextlib.suppress(FileNotFoundError):
            return self.fence.is_valid(self.folder())
        return False

    def _conflict(self, sealed: int) -> Outcome:
        return Outcome(Status.CONFLICT, lease_lost_error(self.key, self.epoch, sealed))

    def _after_takeover(self, folder: Folder, batch: Batch) -> Outcome:
        """Return the outcome of a batch that met a newer epoch: its seal shows what is logged."""
        self._is_overtaken = True
        last = batch.first + len(batch.records) - 1
        sealed = sealed_end(folder, self.key, self.epoch)
        if sealed is None:
            # Not sealed yet: only what was acknowledged is known to count.
            end = self.durable
        else:
            at = Position(sealed.length, sealed.seq, sealed.crc)
            end = DurablePosition(sealed.epoch, sealed.number, at)
        if last <= end.at.seq and has_entries(folder, self.key, end, batch.first, batch.records):
            return Outcome(Status.OK)
        # The seal is still to come, and may include what was written.
        if sealed is None:
            return Outcome(Status.IN_DOUBT, lease_lost_error(self.key, self.epoch))
        return self._conflict(end.at.seq)


def lease_lost_error(key: SessionKey, epoch: int, sealed: int = 0) -> LeaseLostError:
    """Return the error for a write under an epoch that is not the newest."""
    return LeaseLostError(
        f"epoch {epoch} of {key} may not write: another process has acquired the session, or it "
        "was released; open it again",
        key=str(key),
        epoch=epoch,
        sealed_seq=sealed,
    )


# Trimming: removing the oldest files of a log, whose records are all below a seq
#
# First a durable mark names the file that the log begins with; then the older files are removed.
# Readers follow the chain of files until it ends, which it may only at the mark: so a kill at any
# step leaves a readable log, at worst with more old records than requested.


def trim(writer: LogWriter, below: int) -> int:
    """Remove files whose records are all below *below*, as the holder; return the bytes freed.

    Raises:
        LeaseLostError: Another process has acquired the session.

    """
    with writer.held() as folder, folder.enter(LOG) as log:
        tip = segments.find_tip(log, writer.key)
        if tip is None:
            return 0
        first = segments.walk(log, tip, writer.key, down_to=max(below, 1) - 1)[-1]
        begin = (first.epoch, first.number)
        names = log.names()
        old = [place for place in filter(None, map(segment_of, names)) if place < begin]
        if not old:
            return 0
        # 1. The mark is durable before anything is removed.
        os.close(log.open(start_name(*begin), os.O_WRONLY | os.O_CREAT))
        log.sync()
        for start in filter(None, map(start_of, names)):
            if start < begin:
                log.remove(start_name(*start))
        # 2. The newest file first: the chain may end only at the mark.
        freed = 0
        for place in sorted(old, reverse=True):
            name = segment_name(*place)
            status = log.stat(name)
            if status is not None and log.remove(name):
                freed += status.st_size
        log.sync()
        return freed
