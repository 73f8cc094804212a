"""Documents, and what goes with a fold: the head's replacement, and cutting the log.

The places of commits stay taken, as they do after merging; only records go.

Blocking; for the holder, who has the head to itself.

The documents of a fold are written first, into one object (large ones into objects of their
own), under names that nobody had before. The head is replaced last, by compare-and-swap, which
an epoch that is over cannot do: whoever took the session has replaced it before.

Blocking; each function is part of one hop into a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from perdure._lib.ids import random_id
from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records.frames import Position
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.records.stored import matched
from perdure.store import Documents
from perdure.stores.objects import commits, layout, leases, reader
from perdure.stores.objects import head as heads
from perdure.stores.objects import merge as merging
from perdure.stores.objects.bucket import Bucket
from perdure.stores.objects.head import DocumentRef, MergedSegment, ReadMark, SessionHead
from perdure.stores.objects.log import ObjectLogWriter, lost
from perdure.stores.objects.merge import CommitMerge

# Cutting off the oldest part of a log, which is a matter of its segments alone


def cut_below(
    bucket: Bucket, writer: ObjectLogWriter, head: SessionHead, below: int
) -> tuple[MergedSegment, ...] | None:
    """Return the segments that hold what is left, one of them written anew; None: all stay.

    Raises:
        CorruptRecordError: What would be left is not what was written; nothing has changed.

    """
    left = [segment for segment in head.segments if segment.last >= below]
    if left and left[0].first < below:
        left[0] = _shortened(bucket, writer, left[0], below)
    return None if len(left) == len(head.segments) and left == list(head.segments) else tuple(left)


def _shortened(
    bucket: Bucket, writer: ObjectLogWriter, segment: MergedSegment, below: int
) -> MergedSegment:
    """Write what a segment has from a seq on."""
    data = bucket.part(segment.object, 0, segment.size)
    if data is None:
        raise commits.damaged(segment.object, "it is gone or cut")
    start = segment.marks[0]
    commits.records_of(segment.object, data, Position(0, start.seq, start.crc))
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
    name = f"{writer.folder}/seg/{writer.epoch:010d}-{below:016d}-{random_id(10)}"
    bucket.put(name, data[offset:])
    return MergedSegment(name, segment.last, segment.size - offset, tuple(marks))


# Documents, and what goes with a fold: the head's replacement, and merging


_LARGE = 64 * 1024
"""A document of this size is an object of its own, and is not copied with others."""
_TRIES = 50


def documents(bucket: Bucket, key: SessionKey, names: Collection[str] | None) -> Documents:
    """Return documents, each checked against the manifest's hash.

    Raises:
        UnsupportedVersionError: The manifest has a newer format.

    """
    name = f"{layout.folder_of(key)}/head"
    seen = reader.look(bucket, key)
    found = Documents()
    for _ in range(_TRIES):
        manifest = None if seen is None else heads.manifest_of(name, seen[0])
        if seen is None or seen[0].deleted:
            return Documents()
        if manifest is None:  # nothing was folded yet, or it is lost
            return _unlisted(bucket, seen[0], names)
        found = _matching(bucket, seen[0], manifest, names)
        if not found.damaged:
            return found
        again = reader.look(bucket, key)
        if again is not None and again[0].documents == seen[0].documents:
            return found  # no fold took anything away meanwhile: this is damage
        seen = again
    return found


def _matching(
    bucket: Bucket, head: SessionHead, manifest: Manifest, names: Collection[str] | None
) -> Documents:
    return matched(manifest, _lying(bucket, head, manifest.documents, names), names)


def _unlisted(bucket: Bucket, head: SessionHead, names: Collection[str] | None) -> Documents:
    """Return what lies there without a manifest that could say what it is."""
    there = _lying(bucket, head, head.documents, names)
    return Documents(damaged=tuple(there), remains=there)


def _lying(
    bucket: Bucket, head: SessionHead, listed: Iterable[str], names: Collection[str] | None
) -> dict[str, bytes]:
    wanted = [name for name in listed if names is None or name in names]
    there = [head.documents.get(name) for name in wanted]

    def read_one(kept: DocumentRef | None) -> bytes | None:
        end = 0 if kept is None else kept.offset + kept.size
        return None if kept is None else bucket.part(kept.object, kept.offset, end)

    read = zip(wanted, bucket.many(read_one, there), strict=True)
    return {name: data for name, data in read if data is not None}


def fold(
    bucket: Bucket, writer: ObjectLogWriter, written: Mapping[str, bytes], manifest: Manifest
) -> None:
    """Write documents, then the head that names them; merge commits on the way.

    Raises:
        LeaseLostError: Somebody else has the session.

    """
    with writer.folding:
        kept = _put(bucket, writer, written)

        def change(head: SessionHead) -> SessionHead:
            all_kept = {**head.documents, **kept}
            named = {name: all_kept[name] for name in manifest.documents if name in all_kept}
            return msgspec.structs.replace(
                head, documents=named, manifest=msgspec.Raw(msgspec.json.encode(manifest))
            )

        _change(bucket, writer, change, merging.LEAST)


def compact(bucket: Bucket, writer: ObjectLogWriter) -> None:
    """Merge commits without a fold.

    Raises:
        LeaseLostError: Somebody else has the session.

    """
    with writer.folding:
        _change(bucket, writer, lambda head: head, merging.LEAST)


def trim(bucket: Bucket, writer: ObjectLogWriter, below: int) -> int:
    """Remove records below a seq, up to the newest commit; return the bytes freed.

    Raises:
        LeaseLostError: Somebody else has the session.

    """
    with writer.folding:
        head = _change(bucket, writer, lambda head: head, 1)
        while head.floor + 1 < below:  # all but the newest commit into segments first
            floor = head.floor
            head = _change(bucket, writer, lambda head: head, 1)
            if head.floor == floor:
                break
        kept = cut_below(bucket, writer, head, below)
        if kept is None:
            return 0
        segments = kept
        _change(
            bucket,
            writer,
            lambda head: msgspec.structs.replace(head, segments=segments),
            merging.NEVER,
        )
    before = sum(segment.size for segment in head.segments)
    return before - sum(segment.size for segment in segments)


def _put(
    bucket: Bucket, writer: ObjectLogWriter, written: Mapping[str, bytes]
) -> dict[str, DocumentRef]:
    """Write documents under new names; return where they lie."""
    kept: dict[str, DocumentRef] = {}
    parts: dict[str, list[bytes]] = {}
    together = f"{writer.folder}/doc/{writer.epoch:010d}-{random_id(10)}"
    offset = 0
    for name, data in written.items():
        if len(data) >= _LARGE:
            alone = f"{writer.folder}/doc/{writer.epoch:010d}-{random_id(10)}"
            kept[name] = DocumentRef(alone, 0, len(data))
            parts[alone] = [data]
        else:
            kept[name] = DocumentRef(together, offset, len(data))
            parts.setdefault(together, []).append(data)
            offset += len(data)
    bucket.many(lambda one: bucket.put(one[0], b"".join(one[1])), parts.items())
    return kept


def _change(
    bucket: Bucket,
    writer: ObjectLogWriter,
    change: Callable[[SessionHead], SessionHead],
    least: int,
) -> SessionHead:
    """Replace the head, take away what it no longer needs, and return it."""
    seen = writer.seen or reader.look(bucket, writer.key)
    writer.seen = None  # until it is sure what is there
    for _ in range(_TRIES):
        if seen is None or seen[0].epoch != writer.epoch or seen[0].deleted:
            writer.over = True
            raise lost(writer.key, writer.epoch, newest=seen[0].epoch if seen else None)
        before = seen[0]
        try:
            merge = merging.merge(bucket, writer, change(before), least=least)
        except CorruptRecordError:
            now = reader.look(bucket, writer.key)
            if now is not None and now[1] == seen[1]:
                raise
            seen = now  # a later holder merges this log
            continue
        head = _next(before, merge)
        tag = leases.replaced(bucket, writer.key, seen, head)
        if tag is not None:
            writer.seen = (head, tag)
            writer.loose = 0
            merging.tidy(bucket, CommitMerge(head, (*before.trash, *head.trash), merge.cut))
            head = msgspec.structs.replace(head, trash=())
            writer.seen = (head, tag)
            return head
        seen = reader.look(bucket, writer.key)
    message = f"the head of {writer.key} changes each time: trying again may help"
    raise StoreUnavailableError(message, key=writer.key)


def _next(before: SessionHead, merge: CommitMerge) -> SessionHead:
    """Return the head to write: it names what nobody needs once it is there."""
    head = merge.head
    old = heads.named(before) - heads.named(head)
    return msgspec.structs.replace(
        head,
        trash=(*merge.gone, *sorted(old)),
        updated_at=time.time(),
        nonce=random_id(8),
    )
