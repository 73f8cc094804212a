"""Taking a session: one visit to its folder, from who holds it to all that a restore reads.

1. The names in the folder, and the newest lease, say who holds it: the terms decide.
2. The next epoch is published. The names are listed again: the previous holder has written
   all that counts by then, so nothing that may still grow is read before. The manifests are read:
   what is folded was durable in the log by then.
3. The predecessor's log is read from the manifest's mark on, sealed at its last whole group, and
   made durable up to there. If it was not released, what counts is read once more, from the disk.
4. The epoch record begins this epoch's own segment. The epoch is still the newest afterwards, or
   another process was faster.
5. What is left over is removed. The documents are read, earlier segments where the fold is older,
   and whether posts wait.

Blocking: all of it is one call into a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection
from functools import partial

import msgspec

from perdure._lib.files import Folder, write_all
from perdure._lib.logs import log_facts
from perdure._lib.platform import drop_cache, sync_data, sync_file
from perdure.errors import CorruptRecordError
from perdure.records import records
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Entry, Position, Record
from perdure.store import Beginning, Documents, Held, RestoreData, Taken, Terms
from perdure.stores.file import documents, leases, segments
from perdure.stores.file.documents import Manifests
from perdure.stores.file.layout import (
    DRAFT,
    DROPPED,
    INBOX,
    LOG,
    QUARANTINE,
    RELEASED,
    segment_name,
    segment_of,
    session_path,
    tail_name,
)
from perdure.stores.file.leases import FORMAT, Fence, FileOwner, LeaseFile, Owners
from perdure.stores.file.reader import SMALL, kept_tails, records_of, spans_to
from perdure.stores.file.segments import LogSegment, SegmentEnd, SegmentHeader, SegmentSpan

_log = logging.getLogger("perdure")


class _OvertakenError(Exception):
    """Another process was faster."""


def acquire(
    root: Folder, key: SessionKey, terms: Terms, owners: Owners
) -> Held | tuple[Taken, Fence, Position]:
    """Take a session with the next epoch, if its newest holder and the terms allow it.

    Return with it the proof that it is held, and the position after the epoch record.

    Raises:
        CorruptRecordError: The log is damaged before its tail.
        UnsupportedVersionError: A newer release wrote it.

    """
    path = session_path(key)
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(root.enter(*path))
        except FileNotFoundError:
            if not terms.allows(None):
                return Held(None)
            folder = stack.enter_context(root.make(*path))
        dropped = 0
        while True:
            # 1. Who holds it?
            newest, previous, names = leases.newest_lease(folder)
            holder = leases.state_of(folder, key, newest, previous, names, owners)
            if not terms.allows(holder):
                return Held(holder)
            if previous is None or not previous.is_draft or dropped == newest:
                break
            # Then it is looked at again: its holder may have published it before it was marked.
            leases.create_mark(folder, DROPPED.name(newest))
            dropped = newest
        # 2. Publish the next epoch: of several processes, one can.
        lease = _next_lease(key, newest + 1, previous, terms, owners.me)
        published = leases.publish(folder, lease)
        if published is not None:
            with contextlib.suppress(_OvertakenError):
                return _Taking(root, folder, lease, *published).run(terms)
    # Another process was faster: report the holder as it is now.
    return Held(leases.lease_state(root, key, owners))


def _next_lease(
    key: SessionKey, epoch: int, previous: LeaseFile | None, terms: Terms, me: FileOwner
) -> LeaseFile:
    lease = partial(LeaseFile, key=key, epoch=epoch, **msgspec.structs.asdict(me))
    new = terms.beginning
    is_there = previous is not None and not previous.deleted
    if previous is not None and is_there and not terms.set_aside:
        is_copy = previous.draft is not None
        return lease(
            format=previous.format,
            since=previous.since,
            draft=previous.draft,
            published=is_copy,
            inbox=previous.inbox,
            aside=previous.aside,
        )
    since = epoch if previous else 1
    inbox = previous.inbox_generation if previous else since
    is_plain = new.draft is None and new.first == 1 and inbox == since
    return lease(
        format=1 if is_plain else FORMAT,
        since=since,
        draft=new.draft,
        inbox=0 if inbox == since else inbox,
        aside=is_there,
    )


class _Begun(msgspec.Struct):
    """An epoch whose record is durable, and what was read of the log on the way."""

    end: Position
    entry: Entry
    tip: SegmentSpan | None
    """The predecessor's last segment, and the part of it that was read."""
    places: list[tuple[int, int]]
    """All segments before this epoch's, oldest first."""


class _Taking:
    """An epoch that was just published, until it holds the session."""

    def __init__(
        self, root: Folder, folder: Folder, lease: LeaseFile, fence: Fence, names: Collection[str]
    ) -> None:
        self._root = root
        self._folder = folder
        self._lease = lease
        self._fence = fence
        self._names = names
        self._manifests = Manifests()

    def run(self, terms: Terms) -> tuple[Taken, Fence, Position]:
        """Begin the epoch, and read what the terms name; released if that fails."""
        folder, lease, epoch = self._folder, self._lease, self._fence.epoch
        key, since = lease.key, lease.since
        try:
            if lease.draft is not None and not lease.published:
                leases.create_mark(folder, DRAFT.name(epoch))
            if since > 1:  # finish an interrupted deletion
                # Before anything is removed: a kill between the two loses no evidence.
                if lease.aside:
                    documents.set_aside(folder, key, below=since)
                generation = lease.inbox_generation
                is_deleted = since == epoch and not lease.aside
                documents.remove_owned(
                    folder, key, below=since, evidence=is_deleted, inbox=generation
                )
                self._names = folder.names()
            # First: what is folded was durable in the log by then.
            self._manifests = documents.read_manifests(folder, key, since=since, names=self._names)
            with folder.enter(LOG) if LOG in self._names else folder.make(LOG) as log:
                try:
                    # 3. and 4. Seal the predecessor's log, and begin this epoch's own.
                    begun = self._begin_epoch(log, terms.beginning)
                except (CorruptRecordError, FileNotFoundError):
                    self._require_newest()  # a faster process may have removed files
                    raise
                self._require_newest()
                # 5. It is held from here on.
                self._remove_leftovers(begun)
                about = terms.beginning.about
                if begun.tip is None and about is not None:
                    documents.save_labels(folder, epoch, begun.end.seq, about)
                found = self._found(log, begun, terms.names)
        except BaseException:
            leases.release_unused(folder, epoch)
            raise
        created, record = begun.tip is None, begun.entry.payload
        return Taken(key, epoch, begun.end.seq, created, record, found), self._fence, begun.end

    def _require_newest(self) -> None:
        if not self._fence.is_valid(self._folder):
            raise _OvertakenError

    def _begin_epoch(self, log: Folder, new: Beginning) -> _Begun:
        """Append the epoch record, which seals all that was written before."""
        lease, epoch = self._lease, self._fence.epoch
        key, since = lease.key, lease.since
        names = log.names()
        tip: SegmentSpan | None = None
        segment = None
        # A segment that only the page cache had is none: then the one before it is the tip.
        while tip is None and (
            found := segments.open_tip(
                log, key, since=since, below=epoch, names=names, flags=os.O_RDWR
            )
        ):
            segment, fd = found
            with os.fdopen(fd, "r+b", buffering=0):
                tip = self._seal(log, segment, fd)
        # These have no valid first line, so nothing in them counts.
        for name in segments.unbegun(log, segment, names, since=since, below=epoch):
            self._quarantine_tail(log, name, 0)
        header = SegmentHeader(
            key, owner=lease.owner, host=lease.host, pid=lease.pid, at=time.time()
        )
        if tip is None:
            # The process that created these folders may have died before they were durable.
            self._root.sync_path(*session_path(key), LOG)
            seq, crc = new.first - 1, 0
            header = msgspec.structs.replace(header, first=new.first, base=new.base)
        else:
            end, seq, crc = tip.stop, tip.stop.seq, tip.stop.crc
            prev = SegmentEnd(tip.segment.epoch, tip.segment.number, end.offset, seq, crc)
            header = msgspec.structs.replace(header, prev=prev)
        # Not what a higher epoch folded: it has overtaken us, and its log continues after ours.
        known = [file for file in self._manifests.files if file.manifest.epoch < epoch]
        documents.require_folded(self._folder, key, known, seq)
        entry = Entry(EPOCH, msgspec.json.encode(header))
        line, crc = records.encode((entry,), first=seq + 1, epoch=epoch, crc=crc)
        # This seals the log before it: late bytes of the old holder come after the seal.
        create_segment(log, segment_name(epoch, 0), line)
        places = filter(None, map(segment_of, names))
        before = sorted(place for place in places if since <= place[0] < epoch)
        return _Begun(Position(len(line), seq + 1, crc), entry, tip, before)

    def _seal(self, log: Folder, tip: LogSegment, fd: int) -> SegmentSpan | None:
        """Decide up to where the predecessor's log counts, and make it durable up to there.

        None if only the page cache had it: a sync that failed for the old holder succeeds for us,
        with its bytes lost, so only what is read back from the disk counts.
        """
        mark = self._manifests.mark_in(tip)
        span = segments.scan_from(log, tip, mark, keep_bytes=SMALL, fd=fd)
        # What is sealed has to be durable before an epoch record says that it counts.
        sync_file(fd)
        log.sync()
        if RELEASED.name(tip.epoch) not in self._names:
            drop_cache(fd)
            if segments.first_of(log, fd, tip.epoch, tip.number, self._lease.key) is None:
                return None
            up_to = span.stop.offset
            span = segments.scan(log, tip, span.start, up_to=up_to, keep_bytes=SMALL, fd=fd)
        if span.size > span.stop.offset:
            self._quarantine_tail(log, tip.name, span.stop.offset)
        return span

    def _quarantine_tail(self, log: Folder, name: str, offset: int) -> None:
        """Keep the bytes after the last whole group, and warn; the log continues without them."""
        path, tail = f"{log.path}/{name}", (log.read(name) or b"")[offset:]
        with self._folder.make(QUARANTINE) as quarantine:
            kept = tail_name(name, offset)
            quarantine.replace(kept, tail)
            quarantine.sync()
            log_facts(
                _log,
                logging.WARNING,
                "%(bytes)s bytes at the end of %(path)s do not count, as an unfinished write or "
                "damage: they are kept in %(copy)s",
                path=path,
                offset=offset,
                bytes=len(tail),
                copy=f"{quarantine.path}/{kept}",
            )
        self._names = [*self._names, QUARANTINE]

    def _remove_leftovers(self, begun: _Begun) -> None:
        """Remove what earlier holders left, which blocks no acquire."""
        folder, names, tip = self._folder, self._names, begun.tip
        with contextlib.suppress(OSError):
            if tip is not None and RELEASED.name(tip.segment.epoch) in names:
                folder.remove_temporary(names)
            else:  # its holder may have died at any step
                documents.remove_unfinished(folder, self._manifests)
        leases.remove_lower_leases(folder, self._fence.epoch, names)

    def _found(self, log: Folder, begun: _Begun, names: Collection[str] | None) -> RestoreData:
        """Return the documents of these names, the log after them, and whether posts may wait."""
        folder, key, listed = self._folder, self._lease.key, self._names
        have = Documents()
        if begun.tip is not None:
            since, manifests = self._lease.since, self._manifests
            have = documents.read(folder, key, names, since=since, manifests=manifests)
            if have.damaged:
                documents.quarantine_damaged(folder, key, have.damaged)
        if QUARANTINE in listed:
            have = msgspec.structs.replace(have, cut=tuple(map(str, kept_tails(folder))))
        after = have.log_after
        tail = None if after is None else self._tail(log, begun, after)
        box = INBOX.name(self._lease.inbox_generation)
        found = RestoreData(have, after or 0, tail, box in listed and _has_files(folder, box))
        base = None if have.manifest is None else have.manifest.base
        return found if base is None else found.with_low(self._second(log, begun))

    def _second(self, log: Folder, begun: _Begun) -> int:
        """Return the last record of the oldest segment: a trim removes all of it, or nothing."""
        places = begun.places
        if len(places) < 2:
            return begun.end.seq - 1
        second = None if begun.tip is None else begun.tip.segment
        if second is None or places[1] != (second.epoch, second.number):
            second = segments.read_first(log, *places[1], self._lease.key)
        return 0 if second is None else second.start.seq

    def _tail(self, log: Folder, begun: _Begun, after: int) -> tuple[Record, ...] | None:
        """Return the log after a record, this epoch's included; None if it is long or damaged."""
        tip = begun.tip
        found: list[Record] = []
        if tip is not None:
            if tip.start.seq > after and tip.start != tip.segment.start:
                return None  # the documents are older than what a fold that was killed vouches for
            try:
                spans = spans_to(log, self._lease.key, tip, after, self._manifests)
                if spans[0].start.seq > after and spans[0].segment.first.prev is not None:
                    return None  # it was trimmed
                for span in spans:
                    read = tip.records if span is tip else records_of(log, span)
                    if read is None:
                        return None
                    found += [record for record in read if record.seq > after]
            except CorruptRecordError:
                return None  # a reader of the log says what is wrong
        entry = begun.entry
        found.append(Record(begun.end.seq, self._fence.epoch, *entry))
        return tuple(found)


def create_segment(log: Folder, name: str, data: bytes) -> None:
    """Create a segment under an unused name, and make it durable."""
    fd = log.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_all(fd, data)
        sync_data(fd)
    finally:
        os.close(fd)
    # The name, too: a power cut could take the file with it.
    log.sync()


def _has_files(folder: Folder, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError), folder.enter(name) as inner:
        return any(not each.startswith(".") for each in inner.names())
    return False
