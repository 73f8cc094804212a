"""Reading a log: where its parts are, and the records in them.

A log is segments, then loose commits: each begins where the one before it ends. A plan is made
from the head and one listing behind its floor. Merging takes objects away only after it has
replaced the head, so a head that is the same before and behind the listing makes the listing
whole; an object that is gone afterwards means: plan again.

Blocking; each function is part of one hop into a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import msgspec

from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records.frames import Position
from perdure.records.keys import SessionKey
from perdure.records.records import Entry, Record
from perdure.stores.objects import commits, layout
from perdure.stores.objects.bucket import Bucket, ListedObject, StoredObject
from perdure.stores.objects.head import MergedSegment, SessionHead, decode, folded

# Reading a log: where its parts are, and the records in them


_TRIES = 50
"""How many merges a reader may meet in a row."""
_WINDOW = 16
"""Parts that are read at a time."""


class ObjectMergedAway(Exception):  # noqa: N818  # no error, and nobody outside sees it
    """An object was merged away meanwhile: plan again."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name: str = name


class ObjectReadPlan(msgspec.Struct, frozen=True):
    """Where a session's log lies."""

    head: SessionHead
    tag: str
    loose: tuple[ListedObject, ...]
    """Commits behind the floor, without a gap as far as their names can tell."""


class LogRange(msgspec.Struct, frozen=True):
    """A part of the log that is read with one request."""

    name: str
    first: int
    last: int | None
    """None: as the object says."""
    span: tuple[int, int] | None = None
    """Its bytes, in a segment."""
    crc: int | None = None
    """The checksum of the record before it, where that is known."""


class RecordRun(msgspec.Struct, frozen=True):
    """Records that follow one another."""

    records: list[Record]
    seed: int
    """The checksum of the record before the first one."""
    crc: int
    """That of the last one."""


def look(bucket: Bucket, key: SessionKey) -> tuple[SessionHead, str] | None:
    """Return a session's head with its tag, None where there is none.

    Raises:
        CorruptRecordError: It is not what was written.

    """
    name = f"{layout.folder_of(key)}/head"
    found: StoredObject | None = bucket.get(name)
    return None if found is None else (decode(name, found.data, key), found.tag)


def plan(bucket: Bucket, key: SessionKey) -> ObjectReadPlan | None:
    """Return where a log lies, None for no session or one that is deleted."""
    seen = look(bucket, key)
    for _ in range(_TRIES):
        if seen is None or seen[0].deleted:
            return None
        head, tag = seen
        loose = loose_of(bucket, key, head)
        seen = look(bucket, key)
        if seen is not None and _same_places(head, seen[0]):
            require_whole(key, head, loose)
            return ObjectReadPlan(head, tag, tuple(loose))
    raise restless(key)


def _same_places(before: SessionHead, after: SessionHead) -> bool:
    """Say whether no commit was taken away between two looks at a head."""
    return (after.floor, after.life) == (before.floor, before.life) and not after.deleted


def loose_of(bucket: Bucket, key: SessionKey, head: SessionHead) -> list[ListedObject]:
    """List the commits behind a head's floor."""
    folder = layout.folder_of(key)
    after = layout.log_name(folder, head.life, head.floor)
    found = bucket.listed(layout.log_prefix(folder, head.life), after)
    return sorted(
        (one for one in found if layout.first_of(one.name) > head.floor), key=lambda one: one.name
    )


def require_whole(key: SessionKey, head: SessionHead, loose: Sequence[ListedObject]) -> None:
    """Raise CorruptRecordError if the commit behind the floor is not there."""
    first = layout.first_of(loose[0].name) if loose else 0
    if first != head.floor + 1:
        # The newest commit is never merged, so there is always one behind the floor.
        name = layout.log_name(layout.folder_of(key), head.life, head.floor + 1)
        raise commits.damaged(name, f"the log of {key} lacks the commit of record {head.floor + 1}")


def pieces(found: ObjectReadPlan, after: int, before: int | None) -> list[LogRange]:
    """Return the parts that may hold records with ``after < seq < before``, oldest first. Pure."""
    parts: list[LogRange] = []
    for segment in found.head.segments:
        parts += pieces_of(segment)
    firsts = [layout.first_of(one.name) for one in found.loose]
    for place, one in enumerate(found.loose):
        last = firsts[place + 1] - 1 if place + 1 < len(firsts) else None
        crc = found.head.crc if place == 0 else None
        parts.append(LogRange(one.name, firsts[place], last, None, crc))
    return [
        part
        for part in parts
        if (part.last is None or part.last > after) and (before is None or part.first < before)
    ]


def pieces_of(segment: MergedSegment) -> list[LogRange]:
    """Return the parts of a segment, from mark to mark. Pure."""
    marks = segment.marks
    ends = [(mark.seq, mark.offset) for mark in marks[1:]] + [(segment.last, segment.size)]
    return [
        LogRange(segment.object, mark.seq + 1, last, (mark.offset, end), mark.crc)
        for mark, (last, end) in zip(marks, ends, strict=True)
    ]


def read(bucket: Bucket, parts: Sequence[LogRange]) -> RecordRun:
    """Return the records of parts that follow one another, read several at a time.

    Raises:
        Vanished: One of them was merged away.
        CorruptRecordError: One of them is not what was written, or does not follow.

    """
    lines = bucket.many(lambda part: _lines(bucket, part), parts)
    records: list[Record] = []
    seed, crc = lines[0][0], None
    for part, (before, data) in zip(parts, lines, strict=True):
        if crc is not None and before != crc:
            raise unlinked(part.name, part.first)
        more, end = commits.records_of(part.name, data, Position(0, part.first - 1, before))
        if (part.last is not None and end.seq != part.last) or not more:
            raise commits.damaged(part.name, f"records {end.seq + 1} to {part.last} are not in it")
        records += more
        crc = end.crc
    return RecordRun(records, seed, seed if crc is None else crc)


def unlinked(name: str, first: int) -> CorruptRecordError:
    """Return the error for a commit that is sealed to another one than lies before it."""
    return commits.damaged(name, f"record {first} does not follow the one before it")


def _lines(bucket: Bucket, part: LogRange) -> tuple[int, bytes]:
    """Return a part's bytes, and the checksum that seeds them."""
    if part.span is not None:
        data = bucket.part(part.name, *part.span)
        if data is not None:
            return part.crc or 0, data
        there = bucket.stat(part.name)
        if there is None:
            raise ObjectMergedAway(part.name)
        raise commits.damaged(part.name, f"it ends at byte {there.size}, before {part.span[1]}")
    found = bucket.get(part.name)
    if found is None or found.data == commits.GONE:
        raise ObjectMergedAway(part.name)
    commit = commits.commit(part.name, part.first, found.data)
    if commit.header.cut:
        raise ObjectMergedAway(part.name)
    if part.crc is not None and commit.header.seed != part.crc:
        raise unlinked(part.name, part.first)
    return commit.header.seed, commit.lines


def newest(bucket: Bucket, loose: Sequence[ListedObject]) -> commits.Commit:
    """Return the newest commit.

    Raises:
        Vanished: It was merged or removed meanwhile.

    """
    name = loose[-1].name
    there = bucket.get(name)
    if there is None or there.data == commits.GONE:
        raise ObjectMergedAway(name)
    commit = commits.commit(name, layout.first_of(name), there.data)
    if commit.header.cut:
        raise ObjectMergedAway(name)
    return commit


def head_of(bucket: Bucket, key: SessionKey) -> int:
    """Return the seq of a log's last record, 0 for an unknown session."""
    for _ in range(_TRIES):
        found = plan(bucket, key)
        if found is None:
            return 0
        try:
            last = newest(bucket, found.loose).header.last
        except ObjectMergedAway as gone:
            require_moved(bucket, found, gone)
            continue
        require_folded(found.head, last)
        return last
    raise restless(key)


def require_folded(head: SessionHead, last: int) -> None:
    """Raise CorruptRecordError if a log ends before what was made of it."""
    folded_from = folded(head)
    if last < folded_from:
        name = layout.log_name(layout.folder_of(head.key), head.life, last + 1)
        raise commits.damaged(
            name, f"the log of {head.key} ends at record {last}, documents know {folded_from}"
        )


def require_moved(bucket: Bucket, before: ObjectReadPlan, gone: ObjectMergedAway) -> None:
    """Raise CorruptRecordError if an object is gone though the head still calls for it."""
    seen = look(bucket, before.head.key)
    if seen is not None and seen[1] == before.tag:
        raise commits.damaged(gone.name, "it is not there any more")


def restless(key: SessionKey) -> StoreUnavailableError:
    """Return the error for a log that is never the same twice."""
    message = f"the log of {key} is merged again and again while it is read: try again"
    return StoreUnavailableError(message, key=key)


@final
class ObjectLogStream:
    """Read a log's records part by part, oldest first or, reversed, newest first."""

    def __init__(
        self,
        bucket: Bucket,
        key: SessionKey,
        after: int,
        before: int | None,
        *,
        reverse: bool = False,
    ) -> None:
        self._bucket = bucket
        self._key = key
        self._after = max(after, 0)
        self._before = before
        self._reverse = reverse
        self._plan: ObjectReadPlan | None = None
        self._left: list[LogRange] | None = None
        self.window: int = _WINDOW
        """Parts that are read at a time."""
        self._link: int | None = None
        """The checksum at the end where reading goes on."""

    def part(self) -> list[Record]:
        """Return the next records in the order asked for; none when there are no more."""
        for _ in range(_TRIES):
            if self._left is None:
                self._plan = plan(self._bucket, self._key)
                self._left = self._pieces()
            if not self._left:
                return []
            some = self.window
            window = self._left[-some:] if self._reverse else self._left[:some]
            try:
                run = read(self._bucket, window)
            except ObjectMergedAway as gone:
                assert self._plan is not None
                require_moved(self._bucket, self._plan, gone)
                self._left = None
                continue
            self._left = self._left[:-some] if self._reverse else self._left[some:]
            self._check(window, run)
            if records := self._taken(run):
                return records
        raise restless(self._key)

    def _pieces(self) -> list[LogRange]:
        return [] if self._plan is None else pieces(self._plan, self._after, self._before)

    def _check(self, window: Sequence[LogRange], run: RecordRun) -> None:
        first, last = run.records[0].seq, run.records[-1].seq
        if self._link is None:
            return
        if self._reverse and last + 1 == self._before and run.crc != self._link:
            raise unlinked(window[-1].name, last)
        if not self._reverse and first == self._after + 1 and run.seed != self._link:
            raise unlinked(window[0].name, first)

    def _taken(self, run: RecordRun) -> list[Record]:
        """Return what was asked for of a run, and go on behind it."""
        low, high = self._after, self._before
        records = [
            record
            for record in run.records
            if low < record.seq and (high is None or record.seq < high)
        ]
        if self._reverse:
            self._before, self._link = run.records[0].seq, run.seed
            return records[::-1]
        self._after, self._link = run.records[-1].seq, run.crc
        return records


def entries(bucket: Bucket, key: SessionKey, first: int, last: int) -> list[Entry]:
    """Return the entries from a seq up to another."""
    stream = ObjectLogStream(bucket, key, first - 1, last + 1)
    found: list[Entry] = []
    while part := stream.part():
        found += [Entry(record.kind, record.payload, record.end) for record in part]
    return found


# Cutting off the oldest part of a log, which is a matter of its segments alone
