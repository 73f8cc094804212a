"""Log writer of a held session: commits at the log's end, one at a time, merged into segments.

**Why a late append fails.** A commit is created under the seq of its first record, and only if no
object has that name. If a holder knows the log up to *h*, the only name that it ever tries is
*h* + 1.

* As long as that name is free, no other process has written after *h*, since every later object
  comes after an object at *h* + 1. So no later epoch exists, and the holder may append.
* A takeover creates its epoch record under the name at the end of the log. If the old holder
  wrote up to *h*, that name is *h* + 1. If it wrote more without learning of it (the response was
  lost), *h* + 1 is its own commit, which it recognizes by epoch and bytes.
* Merging commits into segments must not free such a name. So two kinds of names stay forever:
  those of epoch records, and of the last commit before each of them, which shrinks to its header
  (a tombstone). Any other merged commit is followed by one of the same epoch, whose writer knew
  both, so no process tries its name again. The newest commit is never merged.

So each append is one request, and does not need to check the lease. An abandoned request that
arrives late may create a name that merging made free; that object is below the head's ``floor``,
where no reader looks, and its write was never acknowledged.

**A bucket that reverted** to an earlier state lets a holder append after records that no longer
exist. Its heartbeat notices that at no cost; then one listing, and a read of its newest commit,
show whether the acknowledged records exist.

The methods block; they run in a thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import msgspec

from perdure._lib.ids import random_id
from perdure.errors import (
    CorruptRecordError,
    FormatError,
    LeaseLostError,
    NotStorableError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey
from perdure.records.manifest import lease_lost, new_entries, refusal_of
from perdure.records.records import EPOCH, Entry, Position
from perdure.store import About, Batch, Outcome, Status
from perdure.stores.objects import layout, reader
from perdure.stores.objects.bucket import Bucket, ListedObject
from perdure.stores.objects.layout import Commit, MergedSegment, ReadMark, SessionHead

LISTED_EVERY = 60.0
"""Seconds: what changes with each save is written to the directory at most so often."""
_MAX_FIRSTS = 1024
"""Remembered commits from which on merged ones are dropped."""


class Said(msgspec.Struct):
    """Facts for listings that a holder's saves bring, and when they were last written."""

    epoch: int
    seq: int = 0
    turns: int | None = None
    about: About | None = None
    at: float = 0.0
    """Time of the last save; 0.0 before the first."""
    listed_at: float = 0.0


class ObjectLogWriter:
    """Writer of a session that this process holds."""

    __slots__ = (
        "_bucket",
        "_commit_firsts",
        "crc",
        "epoch",
        "epoch_seq",
        "folder",
        "generation",
        "has_lost_lease",
        "head",
        "head_lock",
        "is_doubted",
        "key",
        "log_lock",
        "loose",
        "owner",
        "said",
        "stored_head",
    )

    def __init__(
        self,
        bucket: Bucket,
        key: SessionKey,
        stored_head: tuple[SessionHead, str],
        epoch_seq: int,
        crc: int,
    ) -> None:
        head = stored_head[0]
        self._bucket = bucket
        self.key: SessionKey = key
        self.folder: str = layout.folder_of(key)
        self.owner: str = head.owner
        self.epoch: int = head.epoch
        self.generation: int = head.generation
        self.epoch_seq: int = epoch_seq
        """The seq of the epoch record."""
        self.head: int = epoch_seq
        self.crc: int = crc
        self.loose: int = 0
        """Commits since the last merge."""
        self._commit_firsts: list[int] = [epoch_seq]
        """First seqs of the commits that this writer created and that are not merged."""
        self.said: Said = Said(head.epoch, listed_at=time.time())
        """For listings."""
        self.is_doubted: bool = False
        """True if the bucket may have reverted to an earlier state."""
        self.log_lock: threading.Lock = threading.Lock()
        """Guards the end of the log."""
        self.head_lock: threading.Lock = threading.Lock()
        """Guards the head."""
        self.has_lost_lease: bool = False
        """True once another process has the session."""
        self.stored_head: tuple[SessionHead, str] | None = stored_head
        """The head as it was last written, with its tag."""

    @property
    def created(self) -> bool:
        """True if the log begins with this epoch."""
        return self.generation == self.epoch

    @property
    def newest(self) -> int:
        """The first record of the newest commit."""
        return self._commit_firsts[-1]

    def append(self, batch: Batch) -> Outcome:
        """Append a batch; return expected errors as the outcome."""
        with self.log_lock:
            if self.has_lost_lease:
                return Outcome(Status.CONFLICT, lease_lost(self.key, batch.epoch))
            try:
                if self.is_doubted:
                    self._require_commits()
                outcome = self._append(batch)
                self._note_said(batch)
                return outcome
            except LeaseLostError as error:
                self.has_lost_lease = True
                return Outcome(Status.CONFLICT, error)
            except (NotStorableError, FormatError) as error:
                return Outcome(Status.PERMANENT, error)
            except StoreUnavailableError as error:
                sure = bool(error.facts.get("unwritten"))
                return Outcome(Status.TRANSIENT if sure else Status.IN_DOUBT, error)

    def _append(self, batch: Batch) -> Outcome:
        refusal = refusal_of(batch)
        if refusal is not None:
            raise refusal
        while True:
            entries = self._unwritten(batch)
            if not entries:
                return Outcome(Status.OK)
            name = layout.log_name(self.folder, self.generation, self.head + 1)
            data, crc = layout.encode(
                entries, first=self.head + 1, epoch=self.epoch, owner=self.owner, seed=self.crc
            )
            # Case 1: the name was free, so no other process has written after this log's end.
            if self._bucket.create(name, data) is not None:
                self._note(self.head + 1)
                self.head += len(entries)
                self.crc = crc
                self.loose += 1
                return Outcome(Status.OK, written=len(data))
            # Case 2: it was taken by an earlier attempt, whose answer was lost. Anything else
            # raises.
            if self._adopt_own_commit(name, data):
                return Outcome(Status.OK)

    def _note_said(self, batch: Batch) -> None:
        """Note what a save says for listings; new labels are written at once."""
        said = self.said
        said.at, said.seq = time.time(), self.head
        said.turns = said.turns if batch.turns is None else batch.turns
        said.about = batch.about or said.about
        if batch.about is not None:
            said.listed_at = 0.0
        if said.at - said.listed_at >= LISTED_EVERY:
            self.list_said()

    def list_said(self) -> None:
        """Write to the directory what the last saves have said; the log has it, too."""
        said = self.said
        if said.at <= said.listed_at or (said.turns is None and said.about is None):
            return
        # Even if something fails here, the save is in the log: the next one tries again.
        with contextlib.suppress(StoreUnavailableError, CorruptRecordError):
            about = said.about or self._folded_about()
            entry = layout.directory_entry(self.key, said.seq, said.turns or 0, about)
            self._bucket.put(layout.directory_name(self.key, self.generation), entry)
            said.listed_at = said.at

    def _folded_about(self) -> About:
        """Return the labels of the last fold."""
        # The head is not known while a fold replaces it, in another thread.
        current = self.stored_head or reader.read_head(self._bucket, self.key)
        head = None if current is None else current[0]
        manifest = None if head is None else layout.manifest_of(f"{self.folder}/head", head)
        return About() if manifest is None else manifest.about

    def _note(self, first: int) -> None:
        self._commit_firsts.append(first)
        if len(self._commit_firsts) > _MAX_FIRSTS and self.stored_head is not None:
            floor = self.stored_head[0].floor
            self._commit_firsts = [seq for seq in self._commit_firsts if seq > floor]

    def _require_commits(self) -> None:
        """Raise LeaseLostError if acknowledged commits no longer exist."""
        prefix = layout.log_prefix(self.folder, self.generation)
        existing = {layout.first_of(entry.name) for entry in self._bucket.listed(prefix)}
        # After the listing: what was merged meanwhile is below the floor now.
        current = self.stored_head or reader.read_head(self._bucket, self.key)
        floor = 0 if current is None else current[0].floor
        missing = [seq for seq in self._commit_firsts if seq > floor and seq not in existing]
        last = self._commit(self._commit_firsts[-1])
        if not missing and (last is None or last.crc != self.crc):
            missing = self._commit_firsts[-1:]  # another process has written at its place
        if missing:
            gap = min(missing)
            self._move_aside([seq for seq in self._commit_firsts if seq > gap and seq in existing])
            raise LeaseLostError(
                f"epoch {self.epoch} of {self.key} may not write: its records from {gap} on no "
                "longer exist; open the session again",
                key=str(self.key),
                epoch=self.epoch,
                gone=gap,
            )
        self.is_doubted = False

    def _commit(self, first: int) -> layout.Commit | None:
        """Return a stored commit, None if it is missing or deleted."""
        name = layout.log_name(self.folder, self.generation, first)
        stored = self._bucket.get(name)
        if stored is None or stored.data == layout.GONE:
            return None
        return layout.commit(name, first, stored.data)

    def _move_aside(self, firsts: Sequence[int]) -> None:
        """Move commits after a gap out of the log, which they would damage for all readers.

        They are removed with the session, or by a scrub under a later epoch.
        """
        for first in firsts:
            commit = self._commit(first)
            written_by = None if commit is None else (commit.header.epoch, commit.header.owner)
            if written_by != (self.epoch, self.owner):
                continue
            name = layout.log_name(self.folder, self.generation, first)
            aside = f"{self.folder}/doc/{self.epoch:010d}-behind-{first:020d}"
            if self._bucket.copy(name, aside):
                self._bucket.remove([name])

    def _adopt_own_commit(self, name: str, data: bytes) -> bool:
        """Continue after a commit that an earlier attempt created, whose response was lost.

        Returns True if its records were merged by a later holder, and are the same.
        Raises LeaseLostError if it is another process's.
        """
        stored = self._bucket.get(name)
        if stored is None:  # concurrent requests: the service let neither win
            raise StoreUnavailableError(
                f"{name} can be neither created nor read: try again", object=name, unwritten=True
            )
        if stored.data == layout.GONE:
            raise lease_lost(self.key, self.epoch)
        commit = layout.commit(name, self.head + 1, stored.data)
        if commit.header.epoch != self.epoch or commit.header.owner != self.owner:
            raise lease_lost(self.key, self.epoch, newest=commit.header.epoch)
        if not commit.header.cut:
            self._note(self.head + 1)
            self.head, self.crc = commit.header.last, commit.crc
            return False
        self.has_lost_lease = True
        if stored.data == layout.tombstone(layout.commit(name, self.head + 1, data).header):
            return True
        raise lease_lost(self.key, self.epoch)

    def _unwritten(self, batch: Batch) -> Sequence[Entry]:
        """Return the entries of a batch that are not in the log, if its other entries are."""
        stored: list[Entry] = []
        if batch.first <= self.head:
            last = min(self.head, batch.first + len(batch.records) - 1)
            stored = reader.entries(self._bucket, self.key, batch.first, last)
        unwritten = new_entries(batch, self.head, self.epoch_seq, stored)
        if isinstance(unwritten, Exception):
            current = reader.read_head(self._bucket, self.key)
            if current is None or current[0].epoch != self.epoch or current[0].is_over:
                raise lease_lost(self.key, self.epoch, newest=current[0].epoch if current else None)
            raise unwritten
        return unwritten


# Merging of commits into segments, so that a long log is few objects


MIN_COMMITS = 8
"""Fewer commits than this are not merged."""
NEVER = 2**62
MAX_COMMITS = 2000
"""Most commits that one merge reads."""
MAX_SEGMENT = 8 * 1024 * 1024
"""Bytes from which on a segment is not merged again."""
_EPOCH_KIND = b',"k":"%b",' % EPOCH.encode()
_MARK_EVERY = 256 * 1024
"""Bytes between two marks."""


def merge(
    bucket: Bucket, writer: ObjectLogWriter, head: SessionHead, min_commits: int
) -> tuple[SessionHead, list[str], list[tuple[str, bytes]]]:
    """Write a segment of the loose commits, if they are enough.

    Returns:
        The next head; and for when it is stored, the commits to remove, and those to replace by
        tombstones, with their new bytes.

    Raises:
        CorruptRecordError: A commit is damaged; nothing has changed.

    """
    loose = reader.loose_commits(bucket, writer.key, head)
    reader.require_first_commit(writer.key, head, loose)
    if len(loose) <= max(min_commits, 1):
        return head, [], []
    names, sizes = loose[:MAX_COMMITS], 0
    for place, entry in enumerate(names[:-1]):
        sizes += entry.size
        if sizes > MAX_SEGMENT:
            names = names[: place + 2]
            break
    commits = _read_commits(bucket, head, names)
    *merged, _ = commits  # the last one only shows whose commit follows
    segment, absorbed = _write_segment(bucket, writer, head, merged)
    removable: list[str] = []
    tombstones: list[tuple[str, bytes]] = []
    for entry, commit, successor in zip(names, merged, commits[1:], strict=False):
        if is_epoch_record(commit):
            continue
        # Its writer knew both, so no process tries this name again.
        if successor.header.epoch == commit.header.epoch:
            removable.append(entry.name)
        else:
            tombstones.append((entry.name, layout.tombstone(commit.header)))
    next_head = msgspec.structs.replace(
        head,
        floor=merged[-1].header.last,
        crc=merged[-1].crc,
        segments=(*head.segments[: len(head.segments) - absorbed], segment),
    )
    return next_head, removable, tombstones


def _read_commits(bucket: Bucket, head: SessionHead, names: Sequence[ListedObject]) -> list[Commit]:
    """Read commits, and check that each follows the one before it."""
    try:
        commits = bucket.many(lambda entry: reader.whole_commit(bucket, entry.name), names)
    except reader.ObjectMergedAway as missing:
        raise layout.damage_error(missing.name, "another program removed it") from missing
    seq, crc = head.floor, head.crc
    for entry, commit in zip(names, commits, strict=True):
        if commit.header.first != seq + 1 or commit.header.seed != crc:
            raise reader.unlinked_error(entry.name, commit.header.first)
        seq, crc = commit.header.last, commit.crc
    return commits


def is_epoch_record(commit: Commit) -> bool:
    """Return whether a commit is an epoch record, which always has its own commit."""
    return commit.header.count == 1 and _EPOCH_KIND in commit.lines[:100]


def _write_segment(
    bucket: Bucket, writer: ObjectLogWriter, head: SessionHead, commits: Sequence[Commit]
) -> tuple[MergedSegment, int]:
    """Write a segment; return it, and how many of the last segments it includes."""
    size = sum(len(commit.lines) for commit in commits)
    absorbed = 0
    for segment in reversed(head.segments):
        if segment.size > 2 * size or segment.size + size > MAX_SEGMENT:
            break
        size += segment.size
        absorbed += 1
    marks: list[ReadMark] = []
    chunks: list[bytes] = []
    offset = 0
    for segment in head.segments[len(head.segments) - absorbed :]:
        marks += [ReadMark(mark.seq, offset + mark.offset, mark.crc) for mark in segment.marks]
        chunks.append(_segment_lines(bucket, segment))
        offset += segment.size
    for commit in commits:
        marks.append(ReadMark(commit.header.first - 1, offset, commit.header.seed))
        chunks.append(commit.lines)
        offset += len(commit.lines)
    far_apart = marks[:1]
    for mark in marks[1:]:
        if mark.offset - far_apart[-1].offset >= _MARK_EVERY:
            far_apart.append(mark)
    last = commits[-1].header.last
    return _put_segment(bucket, writer, b"".join(chunks), last, far_apart), absorbed


def cut_segment(
    bucket: Bucket, writer: ObjectLogWriter, segment: MergedSegment, below: int
) -> MergedSegment:
    """Write the part of a segment from a seq on."""
    data = _segment_lines(bucket, segment)
    offset = 0
    for _ in range(below - segment.first):
        offset = data.index(b"\n", offset) + 1
    crc = int(data[offset - 11 : offset - 3], 16)
    marks = [ReadMark(below - 1, 0, crc)]
    marks += [
        ReadMark(mark.seq, mark.offset - offset, mark.crc)
        for mark in segment.marks
        if mark.offset > offset
    ]
    return _put_segment(bucket, writer, data[offset:], segment.last, marks)


def _segment_lines(bucket: Bucket, segment: MergedSegment) -> bytes:
    """Return the lines of a segment, which were verified."""
    data = bucket.part(segment.object, 0, segment.size)
    if data is None:
        raise layout.damage_error(segment.object, "it is missing or truncated")
    start = segment.marks[0]
    layout.records_of(segment.object, data, Position(0, start.seq, start.crc))
    return data


def _put_segment(
    bucket: Bucket, writer: ObjectLogWriter, data: bytes, last: int, marks: Sequence[ReadMark]
) -> MergedSegment:
    first = marks[0].seq + 1
    name = f"{writer.folder}/seg/{writer.epoch:010d}-{first:016d}-{random_id(10)}"
    bucket.put(name, data)
    return MergedSegment(name, last, len(data), tuple(marks))
