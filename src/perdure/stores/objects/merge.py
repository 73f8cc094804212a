"""Merging of commits into segments, so that a long log is few objects.

A segment is written first, then the head that references it, then the replaced objects are removed.
A kill after any step loses nothing, since the head says where the log is. What must stay is
explained in `perdure.stores.objects.log`: some commits shrink to tombstones, and epoch records are
kept.

Segments of similar size are merged with one another, so the number of times that a record is copied
grows with the logarithm of the segment's size, which is bounded.

Functions block, and are for the holder, who alone replaces the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure._lib.ids import random_id
from perdure.records.records import EPOCH, Position
from perdure.stores.objects import commits as framing
from perdure.stores.objects import layout, reader
from perdure.stores.objects.bucket import Bucket, ListedObject
from perdure.stores.objects.commits import Commit
from perdure.stores.objects.head import MergedSegment, ReadMark, SessionHead
from perdure.stores.objects.log import ObjectLogWriter

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


class CommitMerge(msgspec.Struct, frozen=True):
    """Result of a merge, and what to do once its head is stored."""

    head: SessionHead
    """The next head, without the fields that its replacement sets."""
    to_remove: tuple[str, ...] = ()
    """Commits to remove."""
    cut: tuple[tuple[str, bytes], ...] = ()
    """Objects to replace by tombstones, with their new bytes."""


def merge(
    bucket: Bucket, writer: ObjectLogWriter, head: SessionHead, *, min_commits: int = MIN_COMMITS
) -> CommitMerge:
    """Write a segment of the loose commits, if they are enough; return the resulting merge.

    Raises:
        CorruptRecordError: A commit is damaged; nothing has changed.

    """
    loose = reader.loose_commits(bucket, writer.key, head)
    reader.require_first_commit(writer.key, head, loose)
    if len(loose) <= max(min_commits, 1):
        return CommitMerge(head)
    names, sizes = loose[:MAX_COMMITS], 0
    for place, entry in enumerate(names[:-1]):
        sizes += entry.size
        if sizes > MAX_SEGMENT:
            names = names[: place + 2]
            break
    commits = _read_commits(bucket, head, names)
    merged, successors = commits[:-1], commits[1:]
    segment, absorbed = _write_segment(bucket, writer, head, merged)
    to_remove, cut = removable(
        [
            (entry.name, commit, after)
            for entry, commit, after in zip(names[:-1], merged, successors, strict=True)
        ]
    )
    segments = head.segments[: len(head.segments) - absorbed]
    next_head = msgspec.structs.replace(
        head,
        floor=merged[-1].header.last,
        crc=merged[-1].crc,
        segments=(*segments, segment),
    )
    return CommitMerge(next_head, tuple(to_remove), tuple(cut))


def _read_commits(bucket: Bucket, head: SessionHead, names: Sequence[ListedObject]) -> list[Commit]:
    """Read commits, and check that each follows the one before it."""
    objects = bucket.many(lambda entry: bucket.get(entry.name), names)
    commits: list[Commit] = []
    seq, crc = head.floor, head.crc
    for entry, stored in zip(names, objects, strict=True):
        if stored is None:
            raise framing.damage_error(entry.name, "another program removed it")
        commit = framing.commit(entry.name, layout.first_of(entry.name), stored.data)
        if commit.header.first != seq + 1 or commit.header.seed != crc or commit.header.cut:
            raise reader.unlinked_error(entry.name, commit.header.first)
        commits.append(commit)
        seq, crc = commit.header.last, commit.crc
    return commits


def removable(
    commits: Sequence[tuple[str, Commit, Commit]],
) -> tuple[list[str], list[tuple[str, bytes]]]:
    """Return the commits to remove and those to shrink, given each with its successor."""
    to_remove: list[str] = []
    cut: list[tuple[str, bytes]] = []
    for name, commit, after in commits:
        if is_epoch_record(commit):
            continue
        if after.header.epoch == commit.header.epoch:
            to_remove.append(name)
        else:
            cut.append((name, framing.tombstone(commit.header)))
    return to_remove, cut


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
    before = head.segments[len(head.segments) - absorbed :]
    marks: list[ReadMark] = []
    chunks: list[bytes] = []
    offset = 0
    for segment in before:
        data = bucket.part(segment.object, 0, segment.size)
        if data is None:
            raise framing.damage_error(segment.object, "it is missing or truncated")
        start = segment.marks[0]
        framing.records_of(segment.object, data, Position(0, start.seq, start.crc))
        marks += [ReadMark(mark.seq, offset + mark.offset, mark.crc) for mark in segment.marks]
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
    return MergedSegment(name, commits[-1].header.last, offset, _thin_marks(marks)), absorbed


def _thin_marks(marks: Sequence[ReadMark]) -> tuple[ReadMark, ...]:
    """Return marks without those close after another, which merging creates."""
    thinned: list[ReadMark] = []
    for mark in marks:
        if not thinned or mark.offset - thinned[-1].offset >= _MARK_EVERY:
            thinned.append(mark)
    return tuple(thinned)


def clean_up(bucket: Bucket, merge: CommitMerge) -> None:
    """Remove or shrink the objects that the stored head no longer needs."""
    bucket.many(lambda replacement: bucket.put(*replacement), merge.cut)
    bucket.remove(merge.to_remove)
