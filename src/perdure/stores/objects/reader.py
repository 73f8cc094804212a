"""Reader of a log: plans where its parts are, and reads their records.

A log is segments, then loose commits; each part begins where the one before it ends. A plan is made
from the head and one listing of the commits after its floor. Merging removes objects only after it
has replaced the head. So if the head is the same before and after the listing, the listing is
complete; if an object is missing later, the reader plans again.

Functions block; each is part of one call in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.manifest import matching_documents
from perdure.records.records import Entry, Position, Record
from perdure.store import Documents
from perdure.stores.objects import layout
from perdure.stores.objects.bucket import Bucket, ListedObject, StoredObject
from perdure.stores.objects.layout import Commit, SessionHead, decode, folded_up_to

T = TypeVar("T")

_ATTEMPTS = 50
"""Merges in a row after which a reader gives up."""
WINDOW = 16
"""Parts that are read at a time."""
_MAX_BYTES = 1024 * 1024
"""Of a log's end that is read together with a lease."""


class ObjectMergedAway(Exception):  # noqa: N818  # internal control flow, not an error
    """An object was merged away meanwhile: the reader has to plan again."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name: str = name


class ObjectReadPlan(msgspec.Struct, frozen=True):
    """The objects of a session's log."""

    head: SessionHead
    tag: str
    loose: tuple[ListedObject, ...]
    """Commits after the floor; their names show no gap."""
    after: int = 0
    """The plan is of the records after this one; 0: of all."""
    known: Mapping[str, Commit] = {}
    """Commits that were read already."""


class LogRange(msgspec.Struct, frozen=True):
    """A part of the log that one request reads."""

    name: str
    first: int
    last: int | None
    """None: the object's header has it."""
    span: tuple[int, int] | None = None
    """Its byte range in a segment."""
    crc: int | None = None
    """The checksum of the record before it, if it is known."""


def read_head(bucket: Bucket, key: SessionKey) -> tuple[SessionHead, str] | None:
    """Return a session's head with its tag, None if there is none.

    Raises:
        CorruptRecordError: It is not what was written.

    """
    name = f"{layout.folder_of(key)}/head"
    stored: StoredObject | None = bucket.get(name)
    return None if stored is None else (decode(name, stored.data, key), stored.tag)


def plan(bucket: Bucket, key: SessionKey, *, hidden: bool = False) -> ObjectReadPlan | None:
    """Return the plan of a log, None if the session does not exist, is deleted, or is hidden."""
    current = read_head(bucket, key)
    for _ in range(_ATTEMPTS):
        if current is None or current[0].is_over or (current[0].deleted and not hidden):
            return None
        head, tag = current
        loose = loose_commits(bucket, key, head)
        current = read_head(bucket, key)
        latest = None if current is None or current[0].is_over else current[0]
        if latest is not None and (latest.floor, latest.generation) == (
            head.floor,
            head.generation,
        ):
            # No commit was removed between the two reads of the head.
            require_first_commit(key, head, loose)
            return ObjectReadPlan(head, tag, tuple(loose))
    raise unstable_log_error(key)


def loose_commits(bucket: Bucket, key: SessionKey, head: SessionHead) -> list[ListedObject]:
    """List the commits after a head's floor, by name."""
    folder = layout.folder_of(key)
    after = layout.log_name(folder, head.generation, head.floor)
    listed = bucket.listed(layout.log_prefix(folder, head.generation), after)
    return [entry for entry in listed if layout.first_of(entry.name) > head.floor]


def require_first_commit(key: SessionKey, head: SessionHead, loose: Sequence[ListedObject]) -> None:
    """Raise CorruptRecordError if the commit after the floor is missing."""
    first = layout.first_of(loose[0].name) if loose else 0
    if first != head.floor + 1:
        # The newest commit is never merged, so there is always one after the floor.
        name = layout.log_name(layout.folder_of(key), head.generation, head.floor + 1)
        raise layout.damage_error(
            name, f"the log of {key} lacks the commit of record {head.floor + 1}"
        )


def ranges(plan: ObjectReadPlan, after: int, before: int | None) -> list[LogRange]:
    """Return the ranges that may have records with ``after < seq < before``, oldest first."""
    parts: list[LogRange] = []
    for segment in plan.head.segments:
        marks = segment.marks
        ends = [*((mark.seq, mark.offset) for mark in marks[1:]), (segment.last, segment.size)]
        for mark, (last, end) in zip(marks, ends, strict=True):
            parts.append(LogRange(segment.object, mark.seq + 1, last, (mark.offset, end), mark.crc))
    firsts = [layout.first_of(entry.name) for entry in plan.loose]
    lasts = [*(first - 1 for first in firsts[1:]), None]
    for entry, first, before_next in zip(plan.loose, firsts, lasts, strict=True):
        crc = plan.head.crc if first == plan.head.floor + 1 else None
        parts.append(LogRange(entry.name, first, before_next, None, crc))
    return [
        part
        for part in parts
        if (part.last is None or part.last > after) and (before is None or part.first < before)
    ]


def read(
    bucket: Bucket, parts: Sequence[LogRange], known: Mapping[str, Commit] = MappingProxyType({})
) -> tuple[list[Record], int, int]:
    """Return the records of consecutive ranges, read concurrently unless they are *known*.

    With the checksum of the record before the first one, and that of the last one.

    Raises:
        ObjectMergedAway: One of them was merged away.
        CorruptRecordError: One of them is damaged, or does not follow the one before it.

    """
    unread = [part for part in parts if part.name not in known]
    fetched = dict(zip(unread, bucket.many(lambda part: _lines(bucket, part), unread), strict=True))
    lines = [fetched.get(part) or _commit_lines(part, known[part.name]) for part in parts]
    records: list[Record] = []
    seed, crc = lines[0][0], None
    for part, (before, data) in zip(parts, lines, strict=True):
        if crc is not None and before != crc:
            raise unlinked_error(part.name, part.first)
        more, end = layout.records_of(part.name, data, Position(0, part.first - 1, before))
        if (part.last is not None and end.seq != part.last) or not more:
            raise layout.damage_error(
                part.name, f"records {end.seq + 1} to {part.last} are not in it"
            )
        records += more
        crc = end.crc
    return records, seed, seed if crc is None else crc


def unlinked_error(name: str, first: int) -> CorruptRecordError:
    """Return the error for a commit whose seed is not the checksum of the record before it."""
    return layout.damage_error(name, f"record {first} does not follow the one before it")


def _lines(bucket: Bucket, part: LogRange) -> tuple[int, bytes]:
    """Return a range's bytes, and the checksum before them."""
    if part.span is None:
        return _commit_lines(part, whole_commit(bucket, part.name))
    data = bucket.part(part.name, *part.span)
    if data is not None:
        return part.crc or 0, data
    entry = bucket.stat(part.name)
    if entry is None:
        raise ObjectMergedAway(part.name)
    raise layout.damage_error(part.name, f"it ends at byte {entry.size}, before {part.span[1]}")


def _commit_lines(part: LogRange, commit: Commit) -> tuple[int, bytes]:
    """Return the record lines of a commit, and the checksum before them."""
    if part.crc is not None and commit.header.seed != part.crc:
        raise unlinked_error(part.name, part.first)
    return commit.header.seed, commit.lines


def whole_commit(bucket: Bucket, name: str) -> Commit:
    """Return a stored commit.

    Raises:
        ObjectMergedAway: It was merged or removed.

    """
    return commit_in(name, bucket.get(name))


def commit_in(name: str, stored: StoredObject | None) -> Commit:
    """Return the commit in an object that was read; raises as `whole_commit`."""
    if stored is None or stored.data == layout.GONE:
        raise ObjectMergedAway(name)
    commit = layout.commit(name, layout.first_of(name), stored.data)
    if commit.header.cut:
        raise ObjectMergedAway(name)
    return commit


def documents_of(bucket: Bucket, head: SessionHead, names: Collection[str] | None) -> Documents:
    """Return the documents of a head, each checked against the manifest's hash.

    Raises:
        UnsupportedVersionError: The manifest has a newer format.

    """
    return documents_beside(bucket, head, names, lambda: None)[0]


def documents_beside(
    bucket: Bucket, head: SessionHead, names: Collection[str] | None, beside: Callable[[], T]
) -> tuple[Documents, T]:
    """Return the documents of a head as `documents_of` does, and *beside*'s result meanwhile."""
    manifest = None
    if not head.deleted:
        manifest = layout.manifest_of(f"{layout.folder_of(head.key)}/head", head)
    listed = head.documents if manifest is None else manifest.documents
    refs = {
        name: head.documents[name]
        for name in (() if head.deleted else listed)
        if name in head.documents and (names is None or name in names)
    }
    spans: dict[str, tuple[int, int]] = {}  # the bytes to read of each object
    for ref in refs.values():
        low, high = spans.get(ref.object, (ref.offset, 0))
        spans[ref.object] = min(low, ref.offset), max(high, ref.offset + ref.size)
    calls: list[Callable[[], Any]] = [
        partial(bucket.part, name, *span) for name, span in spans.items()
    ]
    result, *parts = bucket.many(lambda call: call(), [beside, *calls])
    objects = dict(zip(spans, parts, strict=True))
    stored: dict[str, bytes] = {}
    for name, ref in refs.items():
        data, start = objects[ref.object], ref.offset - spans[ref.object][0]
        if data is None and spans[ref.object] != (ref.offset, ref.offset + ref.size):
            # It is shorter than it should be: the other documents in it may be whole.
            data, start = bucket.part(ref.object, ref.offset, ref.offset + ref.size), 0
        if data is not None:
            stored[name] = data[start : start + ref.size]
    if manifest is None:  # nothing was folded yet, or the manifest is lost
        return Documents(damaged=tuple(stored), remains=stored), result
    return matching_documents(manifest, stored, names), result


def rest_of(
    bucket: Bucket, plan: ObjectReadPlan, after: int, *, whole: bool
) -> tuple[Record, ...] | None:
    """Return the records after one, that no other process writes; None if they are unknown.

    They are if the log is long or damaged, or unless *whole*, if reading them takes requests.
    """
    parts = ranges(plan, after, None)
    sizes = {entry.name: entry.size for entry in plan.loose}
    spans = [part.span or (0, sizes[part.name]) for part in parts]
    is_known = whole or all(part.name in plan.known for part in parts)
    is_long = sum(end - start for start, end in spans) > _MAX_BYTES
    if after < plan.after or is_long or not is_known:
        return None
    try:
        records, _, _ = read(bucket, parts, plan.known)
    except (ObjectMergedAway, CorruptRecordError):  # raised when the log is read
        return None
    return tuple(record for record in records if record.seq > after)


def last_seq_of(bucket: Bucket, key: SessionKey) -> int:
    """Return the seq of a log's last record, 0 for an unknown session."""
    for _ in range(_ATTEMPTS):
        current = plan(bucket, key)
        if current is None:
            return 0
        try:
            last = whole_commit(bucket, current.loose[-1].name).header.last
        except ObjectMergedAway as missing:
            require_moved(bucket, current, missing)
            continue
        require_folded(current.head, last)
        return last
    raise unstable_log_error(key)


def require_folded(head: SessionHead, last: int) -> None:
    """Raise CorruptRecordError if a log ends before the last folded record."""
    folded_from = folded_up_to(head)
    if last < folded_from:
        name = layout.log_name(layout.folder_of(head.key), head.generation, last + 1)
        raise layout.damage_error(
            name, f"the log of {head.key} ends at record {last}, its documents at {folded_from}"
        )


def require_moved(bucket: Bucket, before: ObjectReadPlan, missing: ObjectMergedAway) -> None:
    """Raise CorruptRecordError if an object is missing although the stored head references it."""
    current = read_head(bucket, before.head.key)
    if current is not None and current[1] == before.tag:
        raise layout.damage_error(missing.name, "it is missing")


def unstable_log_error(key: SessionKey) -> StoreUnavailableError:
    """Return the error for a log that is merged at each attempt to read it."""
    return StoreUnavailableError(
        f"the log of {key} was merged at each attempt to read it: try again", key=key
    )


def stream(
    bucket: Bucket,
    key: SessionKey,
    after: int = 0,
    before: int | None = None,
    *,
    reverse: bool = False,
    hidden: bool = False,
    window: int = WINDOW,
) -> Iterator[list[Record]]:
    """Yield the records with ``after < seq < before``, some ranges of the log at a time.

    Oldest first or, reversed, newest first; *window* is how many ranges are read at a time.

    Raises:
        CorruptRecordError: A part of the log is damaged or missing.
        StoreUnavailableError: The log was merged at each attempt to read it.

    """
    after = max(after, 0)
    link: int | None = None  # the checksum at the position where reading continues
    attempts = _ATTEMPTS
    while attempts:
        attempts -= 1
        current = plan(bucket, key, hidden=hidden)
        if current is None:
            return
        remaining = ranges(current, after, before)
        try:
            while remaining:
                some = remaining[-window:] if reverse else remaining[:window]
                records, seed, crc = read(bucket, some)
                first, last = records[0].seq, records[-1].seq
                # After a merge, a range may begin before the position: then there is no link.
                if link is not None and reverse and last + 1 == before and crc != link:
                    raise unlinked_error(some[-1].name, last)
                if link is not None and not reverse and first == after + 1 and seed != link:
                    raise unlinked_error(some[0].name, first)
                records = [
                    record
                    for record in records
                    if after < record.seq and (before is None or record.seq < before)
                ]
                if reverse:
                    records.reverse()
                    before, link = first, seed
                    del remaining[-window:]
                else:
                    after, link = last, crc
                    del remaining[:window]
                attempts = _ATTEMPTS
                if records:
                    yield records
        except ObjectMergedAway as missing:
            require_moved(bucket, current, missing)
        else:
            return
    raise unstable_log_error(key)


def entries(bucket: Bucket, key: SessionKey, first: int, last: int) -> list[Entry]:
    """Return the entries from one seq to another, inclusive, as the holder."""
    return [
        Entry(record.kind, record.payload, record.end)
        for part in stream(bucket, key, first - 1, last + 1, hidden=True)
        for record in part
    ]
