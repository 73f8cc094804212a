"""Merging commits into segments, so that a long log is few objects.

A segment is written first, then the head that names it, then what it replaces is taken away; a
kill after any step loses nothing, since the head says where the log is. What may not be taken
away, `perdure.stores.objects.log` explains: places shrink to tombstones, and epoch
records stay.

Segments of about equal size are merged with one another, so that a record is copied a number
of times that grows with the logarithm of the segment's size, which is bounded.

Blocking; for the holder, who has the head to itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure._lib.ids import random_id
from perdure.records.frames import Position
from perdure.records.records import EPOCH
from perdure.stores.objects import commits as framing
from perdure.stores.objects import layout, reader
from perdure.stores.objects.bucket import Bucket, ListedObject
from perdure.stores.objects.commits import Commit
from perdure.stores.objects.head import MergedSegment, ReadMark, SessionHead
from perdure.stores.objects.log import ObjectLogWriter

LEAST = 8
"""Fewer commits than this are left alone."""
NEVER = 2**62
MOST = 2000
"""Commits that one merge takes."""
MAX_SEGMENT = 8 * 1024 * 1024
"""A segment of this size is merged no more."""
_EPOCH_KIND = b',"k":"%b",' % EPOCH.encode()
_MARK_EVERY = 256 * 1024
"""Bytes between two places where reading may begin."""


class CommitMerge(msgspec.Struct, frozen=True):
    """What to do when the head says that commits were merged."""

    head: SessionHead
    """The next head, without what its replacement adds."""
    gone: tuple[str, ...] = ()
    """Commits to remove."""
    cut: tuple[tuple[str, bytes], ...] = ()
    """Objects to shrink, and to what."""


def merge(
    bucket: Bucket, writer: ObjectLogWriter, head: SessionHead, *, least: int = LEAST
) -> CommitMerge:
    """Write a segment of the loose commits if that is worth it; return what follows from it.

    Raises:
        CorruptRecordError: A commit is not what was written; nothing has changed.

    """
    loose = reader.loose_of(bucket, writer.key, head)
    reader.require_whole(writer.key, head, loose)
    if len(loose) <= max(least, 1):
        return CommitMerge(head)
    names, sizes = loose[:MOST], 0
    for place, one in enumerate(names[:-1]):
        sizes += one.size
        if sizes > MAX_SEGMENT:
            names = names[: place + 2]
            break
    commits = _commits(bucket, head, names)
    merged, successors = commits[:-1], commits[1:]
    segment, absorbed = _written(bucket, writer, head, merged)
    gone, cut = removable(
        [
            (one.name, commit, after)
            for one, commit, after in zip(names[:-1], merged, successors, strict=True)
        ]
    )
    kept = head.segments[: len(head.segments) - absorbed]
    next_head = msgspec.structs.replace(
        head,
        floor=merged[-1].header.last,
        crc=merged[-1].crc,
        segments=(*kept, segment),
    )
    return CommitMerge(next_head, tuple(gone), tuple(cut))


def _commits(bucket: Bucket, head: SessionHead, names: Sequence[ListedObject]) -> list[Commit]:
    """Read commits, each behind the one before it."""
    found = bucket.many(lambda one: bucket.get(one.name), names)
    commits: list[Commit] = []
    seq, crc = head.floor, head.crc
    for one, there in zip(names, found, strict=True):
        if there is None:
            raise framing.damaged(one.name, "it was removed by somebody else")
        commit = framing.commit(one.name, layout.first_of(one.name), there.data)
        if commit.header.first != seq + 1 or commit.header.seed != crc or commit.header.cut:
            raise reader.unlinked(one.name, commit.header.first)
        commits.append(commit)
        seq, crc = commit.header.last, commit.crc
    return commits


def removable(
    commits: Sequence[tuple[str, Commit, Commit]],
) -> tuple[list[str], list[tuple[str, bytes]]]:
    """Say which commits may go and which must shrink, given each with its successor."""
    gone: list[str] = []
    cut: list[tuple[str, bytes]] = []
    for name, commit, after in commits:
        if is_epoch_record(commit):
            continue
        if after.header.epoch == commit.header.epoch:
            gone.append(name)
        else:
            cut.append((name, framing.tombstone(commit.header)))
    return gone, cut


def is_epoch_record(commit: Commit) -> bool:
    """Say whether a commit is where an epoch begins; these have a commit of their own."""
    return commit.header.count == 1 and _EPOCH_KIND in commit.lines[:100]


def _written(
    bucket: Bucket, writer: ObjectLogWriter, head: SessionHead, commits: Sequence[Commit]
) -> tuple[MergedSegment, int]:
    """Write a segment; return it, and how many of the last ones before are in it."""
    size = sum(len(commit.lines) for commit in commits)
    absorbed = 0
    for segment in reversed(head.segments):
        if segment.size > 2 * size or segment.size + size > MAX_SEGMENT:
            break
        size += segment.size
        absorbed += 1
    before = head.segments[len(head.segments) - absorbed :]
    marks: list[ReadMark] = []
    chunks: list[bytes] = []
    offset = 0
    for segment in before:
        data = bucket.part(segment.object, 0, segment.size)
        if data is None:
            raise framing.damaged(segment.object, "it is gone or cut")
        start = segment.marks[0]
        framing.records_of(segment.object, data, Position(0, start.seq, start.crc))
        marks += [ReadMark(one.seq, offset + one.offset, one.crc) for one in segment.marks]
        chunks.append(data)
        offset += len(data)
    for commit in commits:
        if not marks or offset - marks[-1].offset >= _MARK_EVERY:
            header = commit.header
            marks.append(ReadMark(header.first - 1, offset, header.seed))
        chunks.append(commit.lines)
        offset += len(commit.lines)
    name = f"{writer.folder}/seg/{writer.epoch:010d}-{marks[0].seq + 1:016d}-{random_id(10)}"
    bucket.put(name, b"".join(chunks))
    return MergedSegment(name, commits[-1].header.last, offset, _thinned(marks)), absorbed


def _thinned(marks: Sequence[ReadMark]) -> tuple[ReadMark, ...]:
    """Leave out marks that lie close behind another; merging brings them together."""
    kept: list[ReadMark] = []
    for mark in marks:
        if not kept or mark.offset - kept[-1].offset >= _MARK_EVERY:
            kept.append(mark)
    return tuple(kept)


def tidy(bucket: Bucket, merge: CommitMerge) -> None:
    """Take away what the head, as it is now, no longer needs."""
    bucket.many(lambda one: bucket.put(*one), merge.cut)
    bucket.remove(merge.gone)
