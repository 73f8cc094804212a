"""Documents, blobs, and the directory of the sessions: folds, merging, trimming; listing, deletion.

A fold writes its documents first, into one object (large ones into objects of their own), under new
names. The head is replaced last, by compare-and-swap, which fails for a past epoch: the next holder
has replaced it before. Commits that are merged or trimmed keep their names occupied; only their
records go.

Names in the directory are in the order of keys, so a page of a listing reads about one page. Ids
that are too long for a name are next to those with the same beginning, and are sorted when they are
listed.

Functions block; each is part of one call in a thread.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import msgspec

from perdure._lib.ids import random_id
from perdure._lib.logs import log_facts
from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records.chunks import is_name, require_named, verified
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, SessionQuery, session_info
from perdure.store import BlobSweep, Documents, DraftInfo, RestoreData, SessionInfo
from perdure.stores.objects import inbox, layout, leases, log as merging, reader
from perdure.stores.objects.bucket import Bucket, ListedObject
from perdure.stores.objects.layout import (
    GONE,
    DirectoryEntry,
    DocumentRef,
    SessionHead,
    tenant_name,
)
from perdure.stores.objects.leases import Acquired, record_tenant
from perdure.stores.objects.log import ObjectLogWriter, Said

_LARGE_DOCUMENT = 64 * 1024
"""Bytes from which on a document is an object of its own, not copied with others."""
_ATTEMPTS = 50


def found(bucket: Bucket, acquired: Acquired, *, whole: bool) -> RestoreData | None:
    """Return what was read with a lease, and what a restore needs besides; None: it has to read.

    Args:
        bucket: The bucket.
        acquired: The lease.
        whole: Whether records may cost requests, as after a crash.

    """
    plan, have = acquired.plan, acquired.documents
    if plan is None or have is None:
        return None
    after = have.log_after
    try:
        records = None if after is None else reader.rest_of(bucket, plan, after, whole=whole)
        # After the head was replaced: posts from now on notify this owner.
        may_have_items = inbox.may_have_items(bucket, acquired.writer.key)
    except StoreUnavailableError:  # raised where it is missed
        return None
    return RestoreData(have, after or 0, records, may_have_items)


def documents(bucket: Bucket, key: SessionKey, names: Collection[str] | None) -> Documents:
    """Return documents, each checked against the manifest's hash.

    Raises:
        UnsupportedVersionError: The manifest has a newer format.

    """
    result = Documents()
    refs: dict[str, DocumentRef] | None = None
    for _ in range(_ATTEMPTS):
        current = reader.read_head(bucket, key)
        if current is None:
            return Documents()
        if result.damaged and current[0].documents == refs:
            return result  # no fold removed anything meanwhile, so this is damage
        refs = current[0].documents
        result = reader.documents_of(bucket, current[0], names)
        if result.manifest is None or not result.damaged:
            return result
    return result


def fold(
    bucket: Bucket, writer: ObjectLogWriter, written: Mapping[str, bytes], manifest: Manifest
) -> None:
    """Write documents, then the head that references them; merge commits on the way.

    Raises:
        LeaseLostError: Another process has the session.

    """
    with writer.head_lock:
        refs = _write_documents(bucket, writer, written)

        def change(head: SessionHead) -> SessionHead:
            all_refs = {**head.documents, **refs}
            listed = {name: all_refs[name] for name in manifest.documents if name in all_refs}
            return msgspec.structs.replace(
                head, documents=listed, manifest=msgspec.Raw(msgspec.json.encode(manifest))
            )

        _merge(bucket, writer, merging.MIN_COMMITS, change)
    writer.list_said()


def compact(bucket: Bucket, writer: ObjectLogWriter) -> None:
    """Merge commits without a fold.

    Raises:
        LeaseLostError: Another process has the session.

    """
    with writer.head_lock:
        _merge(bucket, writer, merging.MIN_COMMITS)


def trim(bucket: Bucket, writer: ObjectLogWriter, below: int) -> int:
    """Remove records below a seq, up to the newest commit; return the bytes freed.

    Raises:
        CorruptRecordError: A remaining segment is damaged; nothing was removed.
        LeaseLostError: Another process has the session.

    """
    with writer.head_lock:
        # 1. Merge all but the newest commit, as far as they are to go.
        head = _merge(bucket, writer, 1)
        floor = -1
        # One merge takes a limited number of commits.
        while head.floor + 1 < below and head.floor != floor:
            floor = head.floor
            head = _merge(bucket, writer, 1)
        # 2. Drop whole segments, and write the rest of the one that has the first record to keep.
        remaining = [segment for segment in head.segments if segment.last >= below]
        if remaining and remaining[0].first < below:
            remaining[0] = merging.cut_segment(bucket, writer, remaining[0], below)
        segments = tuple(remaining)
        if segments == head.segments:
            return 0
        _merge(
            bucket,
            writer,
            merging.NEVER,
            lambda head: msgspec.structs.replace(head, segments=segments),
        )
    before = sum(segment.size for segment in head.segments)
    return before - sum(segment.size for segment in segments)


def _write_documents(
    bucket: Bucket, writer: ObjectLogWriter, written: Mapping[str, bytes]
) -> dict[str, DocumentRef]:
    """Write documents under new names, all in one object but large ones; return their positions."""
    together = _written_each_time(writer, written)
    groups: dict[str, list[str]] = {}  # by the large document, "" for the others
    for name, data in written.items():
        is_apart = len(data) >= _LARGE_DOCUMENT and name not in together
        groups.setdefault(name if is_apart else "", []).append(name)
    refs: dict[str, DocumentRef] = {}
    objects: dict[str, bytes] = {}
    for names in groups.values():
        place = f"{writer.folder}/doc/{writer.epoch:010d}-{random_id(10)}"
        offset = 0
        for name in names:
            refs[name] = DocumentRef(place, offset, len(written[name]))
            offset += len(written[name])
        objects[place] = b"".join(written[name] for name in names)
    bucket.many(lambda item: bucket.put(*item), objects.items())
    return refs


def _written_each_time(writer: ObjectLogWriter, written: Mapping[str, bytes]) -> set[str]:
    """Return the documents that the last fold wrote, too: one object is enough for them.

    The next fold probably replaces all of them, so none keeps the bytes of the others alive.
    """
    if writer.stored_head is None:
        return set()
    before = writer.stored_head[0].documents
    epochs = {name: layout.epoch_of(ref.object) for name, ref in before.items()}
    last = max(epochs.values(), default=0)
    return {name for name in written if epochs.get(name) == last}


def _merge(
    bucket: Bucket,
    writer: ObjectLogWriter,
    min_commits: int,
    change: Callable[[SessionHead], SessionHead] = lambda head: head,
) -> SessionHead:
    """Replace the head, with more than *min_commits* loose commits merged, and return it.

    What it no longer needs is removed once it is stored, by the next holder if this one is killed.
    """
    tombstones: list[tuple[str, bytes]] = []

    def merged(before: SessionHead) -> SessionHead:
        head, removable, tombstones[:] = merging.merge(bucket, writer, change(before), min_commits)
        unused = layout.referenced_objects(before) - layout.referenced_objects(head)
        trash = (*before.trash, *removable, *sorted(unused))
        return msgspec.structs.replace(head, trash=trash, updated_at=time.time())

    head, tag = leases.update_head(bucket, writer, merged)
    writer.loose = 0
    # Killed before this, the head still lists what is to be removed.
    bucket.many(lambda replacement: bucket.put(*replacement), tombstones)
    bucket.remove(head.trash)
    head = msgspec.structs.replace(head, trash=())
    writer.stored_head = (head, tag)
    return head


# Blobs named by their content, and a quarantine for unreachable ones


def _prefix(tenant: str) -> str:
    return f"blobs/{tenant_name(tenant)}/"


def _quarantine(tenant: str) -> str:
    return f"quarantine/{tenant_name(tenant)}/"


def put(bucket: Bucket, tenant: str, blobs: Mapping[str, bytes]) -> None:
    """Store blobs; an existing blob gets the age of a new one."""
    prefix = _prefix(tenant)
    require_named(blobs)
    if blobs:
        leases.record_tenant(bucket, tenant)
    bucket.many(lambda blob: bucket.put(prefix + blob[0], blob[1]), blobs.items())


def get(bucket: Bucket, tenant: str, name: str) -> bytes | None:
    """Return a blob, verified; None when there is none."""
    if not is_name(name):
        return None
    stored = bucket.get(_prefix(tenant) + name) or bucket.get(_quarantine(tenant) + name)
    # A sweep may have moved it back between the two reads.
    stored = stored or bucket.get(_prefix(tenant) + name)
    return None if stored is None else verified(name, stored.data)


def names(bucket: Bucket, tenant: str) -> list[str]:
    """List the blobs that can be read."""
    return sorted(
        _listed(bucket, _prefix(tenant)).keys() | _listed(bucket, _quarantine(tenant)).keys()
    )


def _listed(
    bucket: Bucket, prefix: str, among: Collection[str] | None = None
) -> dict[str, ListedObject]:
    listed = {entry.name.removeprefix(prefix): entry for entry in bucket.listed(prefix)}
    return listed if among is None else {name: listed[name] for name in listed.keys() & among}


def renew(bucket: Bucket, tenant: str, requested: Collection[str]) -> set[str]:
    """Make blobs young, also those in quarantine; return those that do not exist."""
    prefix, quarantine = _prefix(tenant), _quarantine(tenant)

    def renewed(name: str) -> bool:
        if not is_name(name):
            return False
        for _ in range(2):  # a sweep may move it in between
            # To and fro, since services copy no object to itself. The next sweep removes the other.
            bucket.copy(prefix + name, quarantine + name)
            if bucket.copy(quarantine + name, prefix + name):
                return True
        return False

    names = list(set(requested))
    found = bucket.many(renewed, names)
    return {name for name, is_there in zip(names, found, strict=True) if not is_there}


def remove(bucket: Bucket, tenant: str, requested: Collection[str]) -> int:
    """Remove blobs without quarantine; return how many bytes were freed."""
    known = [name for name in requested if is_name(name)]
    places = [prefix + name for name in known for prefix in (_prefix(tenant), _quarantine(tenant))]
    existing = [entry for entry in bucket.many(bucket.stat, places) if entry is not None]
    bucket.remove([entry.name for entry in existing])
    return sum(entry.size for entry in existing)


def sweep(
    bucket: Bucket,
    tenant: str,
    reachable: Collection[str],
    older_than: float,
    among: Collection[str] | None = None,
) -> BlobSweep:
    """Move unreachable blobs to quarantine, and remove those that are there long enough."""
    prefix, quarantine = _prefix(tenant), _quarantine(tenant)
    now = _server_time(bucket)
    quarantined = _listed(bucket, quarantine, among)
    current = _listed(bucket, prefix, among)
    returning = [name for name in quarantined if name in reachable and name not in current]
    bucket.many(lambda name: bucket.copy(quarantine + name, prefix + name), returning)
    known = [name for name in quarantined if name in reachable or name in current]
    old = [
        name
        for name, entry in quarantined.items()
        if name not in reachable and name not in current and now - entry.modified >= older_than
    ]
    # Only now that those which return are in their place again.
    bucket.remove([quarantine + name for name in (*known, *old)])
    idle = [
        name
        for name, entry in current.items()
        if name not in reachable and now - entry.modified >= older_than
    ]
    bucket.many(lambda name: bucket.copy(prefix + name, quarantine + name), idle)
    # Again: one that was renewed meanwhile stays; the next sweep removes its copy.
    again = _listed(bucket, prefix) if idle else {}
    idle = [name for name in idle if name in again and again[name] == current[name]]
    bucket.remove([prefix + name for name in idle])
    return BlobSweep(len(idle), len(old), sum(quarantined[name].size for name in old))


def _server_time(bucket: Bucket) -> float:
    """Return the time of the clock that the ages of objects refer to."""
    name = f"probe/{random_id()}"
    bucket.put(name, b"now")
    probe = bucket.stat(name)
    bucket.remove([name])
    return 0.0 if probe is None else probe.modified


# The directory of the sessions


_log = logging.getLogger("perdure")

_WINDOW = 32


class _Listed(NamedTuple):
    """A session in the directory, and its last activity."""

    key: SessionKey
    name: str
    at: float


def sessions(
    bucket: Bucket, query: SessionQuery, said: Mapping[SessionKey, Said]
) -> list[SessionInfo]:
    """List a page of a tenant's sessions; of those held here, *said* is what is not written yet."""
    listed: list[SessionInfo] = []
    entries = _entries(bucket, query, said)
    if query.newest_first:
        entries = iter(sorted(entries, key=lambda entry: (entry.at, entry.key), reverse=True))
    while len(listed) < query.limit and (
        window := list(itertools.islice(entries, min(_WINDOW, query.limit - len(listed) + 4)))
    ):
        infos = bucket.many(lambda entry: _info(bucket, entry, said.get(entry.key), query), window)
        listed += [info for info in infos if info is not None and query.matches(info)]
    return listed[: max(query.limit, 0)]


def _entries(
    bucket: Bucket, query: SessionQuery, said: Mapping[SessionKey, Said]
) -> Iterator[_Listed]:
    """Yield what the directory has of the page and after it, each session once, by key."""
    runs = itertools.groupby(_ordered(bucket, query), key=lambda entry: entry.key)
    for key, generations in runs:
        *_, entry = generations
        known = said.get(key)
        entry = entry._replace(at=max(entry.at, known.at)) if known is not None else entry
        info = SessionInfo(key=key, updated_at=entry.at)
        if key.agent.startswith(query.prefix) and query.is_next(info):
            yield entry


def _ordered(bucket: Bucket, query: SessionQuery) -> Iterator[_Listed]:
    prefix = layout.directory_prefix(query.tenant)
    begin = prefix + layout.encode_id(query.prefix).partition("~")[0]
    start = begin
    if query.after is not None and not query.newest_first:
        name = layout.directory_name(query.after, 0).rpartition("-")[0]
        start = max(start, name.partition("~")[0])
    # One digit less: some services skip names that extend the one that a listing starts after.
    pages = bucket.pages(prefix, None if start == prefix else start[:-1])
    entries = (entry for page in pages for entry in page if entry.name > begin)
    fitting = itertools.takewhile(lambda entry: entry.name.startswith(begin), entries)
    # Names of long ids that are alike up to their "~" are not in the order of their keys.
    by_prefix = itertools.groupby(fitting, key=lambda entry: "".join(entry.name.partition("~")[:2]))
    for alike, run in by_prefix:
        known = [
            _Listed(key, entry.name, entry.modified)
            for entry in run
            if (key := _key(bucket, entry.name, query.tenant)) is not None
        ]
        yield from sorted(known) if alike.endswith("~") else known


def _key(bucket: Bucket, name: str, tenant: str) -> SessionKey | None:
    key = layout.key_of(name, tenant)
    if key is not None:
        return key
    stored = bucket.get(name)
    return None if stored is None else layout.decode_object(name, stored.data, SessionKey)


def _info(
    bucket: Bucket, entry: _Listed, said: Said | None, query: SessionQuery
) -> SessionInfo | None:
    key = entry.key
    try:
        current = reader.read_head(bucket, key)
        if current is None or current[0].deleted:
            return None
        head = current[0]
        manifest = layout.manifest_of(f"{layout.folder_of(key)}/head", head)
        seq = 0 if manifest is None else manifest.as_of_seq
        turns = about = None
        if not head.released or head.newest > seq:  # else everything is folded
            stored = bucket.get(entry.name)
            if stored is not None:
                saved = layout.decode_object(entry.name, stored.data, DirectoryEntry)
                if saved.seq > seq:
                    seq, turns, about = saved.seq, saved.turns, saved.about
    except CorruptRecordError as error:  # list it as damaged; opening it raises
        message = "session %(session)s is damaged: %(reason)s"
        log_facts(_log, logging.WARNING, message, session=str(key), reason=error)
        return SessionInfo(key=key, updated_at=entry.at, damaged=True)
    updated = entry.at
    if not query.newest_first and manifest is not None:
        # Releases of before wrote the entry once. A page that goes by it stays as it is ordered.
        updated = max(updated, manifest.about.updated_at or 0.0)
    info = session_info(
        key,
        manifest,
        epoch=head.epoch,
        head=max(head.floor, seq),
        created_at=head.created_at,
        updated_at=updated,
        turns=turns,
        about=about,
    )
    if said is not None and said.epoch == head.epoch and said.seq > seq:
        turns = info.turns if said.turns is None else said.turns
        return msgspec.structs.replace(info, head=said.seq, turns=turns)
    return info


def rebuild(bucket: Bucket) -> int:
    """Add all sessions to the directory, by reading their heads; return how many."""

    def enter(folder: str) -> bool:
        head = _head_in(bucket, f"s/{folder}")
        if head is None or head.deleted:
            return False
        record_tenant(bucket, head.key.tenant)
        # One that is there stays: the age of the object is the session's last activity.
        name = layout.directory_name(head.key, head.generation)
        bucket.create(name, layout.directory_entry(head.key))
        return True

    return sum(bucket.many(enter, bucket.folders("s/")))


def _head_in(bucket: Bucket, folder: str) -> SessionHead | None:
    """Return the head in a folder; None if it is missing or damaged."""
    name = f"{folder}/head"
    stored = bucket.get(name)
    try:
        return None if stored is None else layout.decode(name, stored.data, None)
    except CorruptRecordError as error:
        message = "a session is damaged: %(object)s: %(reason)s"
        log_facts(_log, logging.WARNING, message, object=name, reason=error)
        return None


def delete(bucket: Bucket, writer: ObjectLogWriter, *, keep_posts: bool = False) -> None:
    """Delete the objects of a session, as its holder.

    Its head stays, with the epoch; and so do the names of its commits, emptied, so that no late
    append finds one free. The head says which posts go: those that come meanwhile do not.

    Raises:
        LeaseLostError: Another process has the session.

    """
    key = writer.key

    def deleted(head: SessionHead) -> SessionHead:
        # Posts are to an id, and outlive a draft.
        return deleted_head(head, posts=0 if head.hidden else posts)

    with writer.log_lock, writer.head_lock:
        posts = 0 if keep_posts else inbox.last_number(bucket, key)
        # First: no reader finds a session of which a part is gone.
        gone, _ = leases.update_head(bucket, writer, deleted)
        writer.has_lost_lease = True
        _remove_content(bucket, gone)


def end_replaced(bucket: Bucket, head: SessionHead) -> None:
    """Remove what a deletion that was killed has left, or a draft that was taken over has.

    Nothing follows in the log of that draft.
    """
    if not head.hidden:
        inbox.clear(bucket, head.key, head.posts)
        return
    folder = layout.folder_of(head.key)
    for _ in range(_ATTEMPTS):
        loose = reader.loose_commits(bucket, head.key, head)
        if loose and loose[-1].size == len(GONE):
            break
        try:
            last = reader.whole_commit(bucket, loose[-1].name).header.last if loose else head.floor
        except reader.ObjectMergedAway:
            continue
        if bucket.create(layout.log_name(folder, head.generation, last + 1), GONE) is not None:
            break
    else:
        raise StoreUnavailableError(
            f"the draft of {head.key} was not ended: its log kept growing; try again", key=head.key
        )
    _remove_content(bucket, head)


def drafts(bucket: Bucket, tenant: str) -> list[DraftInfo]:
    """List a tenant's drafts by key."""
    names = [entry.name for entry in bucket.listed(layout.drafts_prefix(tenant))]
    keys = {key for name in names if (key := _key(bucket, name, tenant)) is not None}
    heads = bucket.many(lambda key: reader.read_head(bucket, key), sorted(keys))
    return [
        DraftInfo(head.key, head.epoch, head.draft, head.owner)
        for head in (current[0] for current in heads if current is not None)
        if head.hidden and head.draft is not None
    ]


def deleted_head(head: SessionHead, *, posts: int = 0) -> SessionHead:
    """Return the head of a deleted session."""
    return SessionHead(
        key=head.key,
        epoch=head.epoch,
        owner=head.owner,
        generation=head.generation,
        released=True,
        deleted=True,
        crc=head.crc,
        nonce=random_id(8),
        posts=posts,
    )


def _remove_content(bucket: Bucket, head: SessionHead) -> None:
    """Remove a deleted session's objects; idempotent."""
    key, folder = head.key, layout.folder_of(head.key)
    places = bucket.listed(layout.log_prefix(folder, head.generation))
    bucket.many(
        lambda entry: bucket.put(entry.name, GONE),
        [entry for entry in places if entry.size != len(GONE)],
    )
    inbox.clear(bucket, key, head.posts)
    dead = bucket.listed(layout.dead_letters_prefix(folder))
    owned = [*bucket.listed(f"{folder}/doc/"), *bucket.listed(f"{folder}/seg/")]
    owned = [entry for entry in owned if layout.epoch_of(entry.name) <= head.epoch]
    bucket.remove(
        [
            *(entry.name for entry in (*dead, *owned)),
            layout.directory_name(key, head.generation),
            layout.draft_name(key, head.generation),
        ]
    )


def scrub(bucket: Bucket) -> None:
    """Remove what killed deletions and folds have left."""
    for folder in bucket.folders("s/"):
        head = _head_in(bucket, f"s/{folder}")
        if head is not None and head.is_over:
            _remove_content(bucket, head)
        elif head is not None:
            _remove_unreferenced(bucket, f"s/{folder}", head)


def _remove_unreferenced(bucket: Bucket, folder: str, head: SessionHead) -> None:
    """Remove objects that past epochs wrote and no head references."""
    named = layout.referenced_objects(head)
    names = [e.name for part in ("doc", "seg") for e in bucket.listed(f"{folder}/{part}/")]
    bucket.remove(
        [name for name in names if name not in named and layout.epoch_of(name) < head.epoch]
    )
    for generation in bucket.folders(f"{folder}/log/"):
        if int(generation) < head.generation:
            old = bucket.listed(f"{folder}/log/{generation}/")
            full = [entry.name for entry in old if entry.size != len(GONE)]
            bucket.many(lambda name: bucket.put(name, GONE), full)
