"""Planning how to read a session's log, without a lease.

A plan names the parts of the chain that hold what is asked for, each with the length that
counts. It is made between two looks at the epoch: if a takeover is under way, the newest
records may be missing, and it says so. What a plan names never changes afterwards, so
that its bytes can be read in peace, whoever writes meanwhile.

Blocking: one hop into a thread. Nothing is written.
"""

from __future__ import annotations

import contextlib

import msgspec

from perdure._lib.files import Folder
from perdure.codec.frames import Position
from perdure.errors import CorruptRecordError
from perdure.model.keys import SessionKey
from perdure.model.records import Record
from perdure.stores.file import chain, documents
from perdure.stores.file.chain import Known, Segment
from perdure.stores.file.layout import LOG, released_name, session_path
from perdure.stores.file.leases import LeaseFile, newest_epoch, read_lease, require_key
from perdure.stores.file.owners import Owners
from perdure.stores.file.sealed import decoded

__all__ = ["Plan", "Span", "plan", "position_of"]

SMALL = 1024 * 1024
"""A tip of this size is read once, for the plan and for its records."""


class Span(msgspec.Struct, frozen=True):
    """A part of one segment that is in the log."""

    segment: Segment
    start: Position
    stop: Position
    records: tuple[Record, ...] | None = None
    """Its records, where the plan had to read them anyway."""


class Plan(msgspec.Struct):
    """Where the records that are asked for lie, oldest first."""

    spans: tuple[Span, ...] = ()
    head: int = 0
    epoch: int = 0
    """The newest one that has a record."""
    settled: bool = True


def plan(
    root: Folder,
    key: SessionKey,
    after: int,
    before: int | None,
    held: Known | None,
    owners: Owners,
) -> Plan:
    """Look where the log is now; a plan that is not settled is worth another look.

    Args:
        root: The store's folder.
        key: Which session.
        after: Records up to this one are not asked for.
        before: Nor are those from this one on.
        held: How far the log lasts, if this store holds the session.
        owners: Who can tell whether a taker is alive.

    Raises:
        CorruptRecordError: The log is damaged before its tail.

    """
    try:
        folder = root.enter(*session_path(key))
    except FileNotFoundError:
        return Plan()
    with folder:
        epoch = newest_epoch(folder)
        lease = read_lease(folder, epoch)
        if lease is not None:
            require_key(folder, key, lease)
            if lease.deleted:
                return Plan()
        since = 1 if lease is None else lease.since
        if held is not None and held.epoch != epoch:
            held = None
        try:
            found = _plan(folder, key, since, after, held)
        except CorruptRecordError:
            if newest_epoch(folder) != epoch:
                return Plan(settled=False)  # it was deleted under our eyes
            raise
        if before is not None:
            found.spans = tuple(span for span in found.spans if span.start.seq + 1 < before)
        found.settled = newest_epoch(folder) == epoch and _is_over(folder, found, lease, owners)
        return found


def _is_over(folder: Folder, found: Plan, lease: LeaseFile | None, owners: Owners) -> bool:
    """Say whether no takeover is under way: the newest epoch has its record, or never will."""
    if lease is None or found.epoch == lease.epoch:
        return True
    if folder.stat(released_name(lease.epoch)) is not None:
        return True
    return owners.alive(lease.owner, lease.boot) is False


def _plan(folder: Folder, key: SessionKey, since: int, after: int, held: Known | None) -> Plan:
    # First: what is folded was in the log by then, and may have moved on since.
    manifests = documents.read_manifests(folder, key, since=since)
    found = Plan()
    with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
        tip = chain.find_tip(log, key, since=since)
        if tip is not None:
            spans = _spans(log, key, tip, after, _marks(manifests), held)
            found = Plan(tuple(spans), spans[-1].stop.seq, tip.epoch)
    documents.require_folded(folder, key, manifests, found.head)
    return found


def _marks(manifests: list[documents.Seen]) -> dict[tuple[int, int], Position]:
    """Return the positions that manifests vouch for, by segment."""
    marks: dict[tuple[int, int], Position] = {}
    for one in manifests:
        known = position_of(one.manifest.position)
        if known is not None:
            marks.setdefault((known.epoch, known.number), known.at)
    return marks


def position_of(raw: msgspec.Raw) -> Known | None:
    """Return what a manifest says of where the log goes on, None if it says nothing."""
    return decoded(raw, Known)  # another release's is passed over: reading more is as good


def _spans(
    log: Folder,
    key: SessionKey,
    tip: Segment,
    after: int,
    marks: dict[tuple[int, int], Position],
    held: Known | None,
) -> list[Span]:
    newest = _newest_span(log, tip, after, marks, held)
    spans = [newest]
    below = newest.segment
    if newest.start.seq > after:
        for segment in chain.walk(log, tip, key, down_to=after)[1:]:
            prev = below.first.prev
            assert prev is not None  # this is how the walk came here
            stop = Position(prev.length, prev.seq, prev.crc)
            mark = marks.get((segment.epoch, segment.number))
            near = mark is not None and segment.start.seq <= mark.seq <= min(after, stop.seq)
            spans.append(Span(segment, mark if near and mark else segment.start, stop))
            below = segment
    return spans[::-1]


def _newest_span(
    log: Folder,
    tip: Segment,
    after: int,
    marks: dict[tuple[int, int], Position],
    held: Known | None,
) -> Span:
    """Find out how far the tip counts, reading from as near its end as is known."""
    start = marks.get((tip.epoch, tip.number), tip.start)
    end = held.at if held is not None and held.number == tip.number else None
    if end is not None:
        if after >= end.seq:
            return Span(tip, end, end, ())
        if start.offset > end.offset:
            start = tip.start
        if end.offset - start.offset > SMALL:
            return Span(tip, start if start.seq <= after else tip.start, end)
    upto = None if end is None else end.offset
    found = chain.scan(log, tip, start, upto=upto, keep=SMALL)
    if found.size < start.offset:
        raise chain.damaged(f"{log.path}/{tip.name}", found.size, start.offset)
    if start is not tip.start and found.end == start and found.size > start.offset:
        # Nothing sound follows: a torn write, or a wrong mark. Only the beginning can tell.
        start = tip.start
        found = chain.scan(log, tip, start, upto=upto, keep=SMALL)
    if start.seq > after:
        return Span(tip, tip.start, found.end)
    return Span(tip, start, found.end, found.records)
