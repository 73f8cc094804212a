"""Directory of the sessions: listings, deletion, rebuilding and scrubbing.

Names are in the order of keys, so a page of a listing reads about one page. Ids that are too long
for a name are next to those with the same beginning, and are sorted when they are listed.

Functions block; each is part of one call in a thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

from perdure._lib.ids import random_id
from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.manifest import SessionQuery, session_info
from perdure.records.refusals import lease_lost
from perdure.store import SessionInfo
from perdure.stores.objects import inbox, layout, layout as heads, leases, reader
from perdure.stores.objects.bucket import Bucket
from perdure.stores.objects.layout import GONE, SessionHead
from perdure.stores.objects.log import ObjectLogWriter
from perdure.stores.objects.tenants import add_to_directory

_log = logging.getLogger("perdure")

_WINDOW = 32
_ATTEMPTS = 50


def sessions(bucket: Bucket, query: SessionQuery) -> list[SessionInfo]:
    """List sessions by key."""
    listed: list[SessionInfo] = []
    keys = _keys(bucket, query)
    while len(listed) < query.limit and (
        window := list(itertools.islice(keys, min(_WINDOW, query.limit - len(listed) + 4)))
    ):
        infos = bucket.many(lambda key: _info(bucket, key), window)
        listed += [info for info in infos if info is not None and query.matches(info)]
    return listed[: query.limit]


def _keys(bucket: Bucket, query: SessionQuery) -> Iterator[SessionKey]:
    """Yield the directory's keys that match the prefix, each once, in order."""
    before: SessionKey | None = query.after
    for key in _ordered(bucket, query):
        if not key.agent.startswith(query.prefix):
            continue
        if before is None or key > before:
            before = key
            yield key


def _ordered(bucket: Bucket, query: SessionQuery) -> Iterator[SessionKey]:
    prefix = layout.directory_prefix(query.tenant)
    begin = prefix + layout.encode_id(query.prefix).partition("~")[0]
    start = begin
    if query.after is not None:
        name = layout.directory_name(query.after, 0).rpartition("-")[0]
        start = max(start, name.partition("~")[0])
    # One digit less: some services skip names that extend the one that a listing starts after.
    pages = bucket.pages(prefix, None if start == prefix else start[:-1])
    names = (entry.name for page in pages for entry in page if entry.name > begin)
    fitting = itertools.takewhile(lambda name: name.startswith(begin), names)
    for alike, run in itertools.groupby(fitting, key=_shared_prefix):
        keys = filter(None, (_key(bucket, name, query.tenant) for name in run))
        yield from sorted(keys) if alike.endswith("~") else keys


def _shared_prefix(name: str) -> str:
    """Return the prefix shared by names whose order differs from their keys'."""
    known, long, _ = name.partition("~")
    return known + long


def _key(bucket: Bucket, name: str, tenant: str) -> SessionKey | None:
    key = layout.key_of(name, tenant)
    if key is not None:
        return key
    stored = bucket.get(name)
    return None if stored is None else heads.decode_object(name, stored.data, SessionKey)


def _info(bucket: Bucket, key: SessionKey) -> SessionInfo | None:
    try:
        current = reader.read_head(bucket, key)
        if current is None or current[0].deleted:
            return None
        head = current[0]
        manifest = heads.manifest_of(f"{layout.folder_of(key)}/head", head)
    except CorruptRecordError as error:  # list it as damaged; opening it raises
        _log.warning("session %s is damaged: %s", key, error, extra={"session": str(key)})
        return SessionInfo(key=key, damaged=True)
    return session_info(
        key,
        manifest,
        epoch=head.epoch,
        head=max(head.floor, 0 if manifest is None else manifest.as_of_seq),
        created_at=head.created_at,
        updated_at=head.updated_at,
    )


def rebuild(bucket: Bucket) -> int:
    """Add all sessions to the directory, by reading their heads; return how many."""

    def enter(folder: str) -> bool:
        head = _head_in(bucket, f"s/{folder}")
        if head is None or head.deleted:
            return False
        add_to_directory(bucket, head.key, head.generation)
        return True

    return sum(bucket.many(enter, bucket.folders("s/")))


def _head_in(bucket: Bucket, folder: str) -> SessionHead | None:
    """Return the head in a folder; None if it is missing or damaged."""
    name = f"{folder}/head"
    stored = bucket.get(name)
    try:
        return None if stored is None else heads.decode(name, stored.data, None)
    except CorruptRecordError as error:
        _log.warning("a session is damaged: %s: %s", name, error, extra={"object": name})
        return None


def delete(bucket: Bucket, writer: ObjectLogWriter) -> None:
    """Delete the objects of a session, as its holder.

    Its head stays, with the epoch; and so do the names of its commits, emptied, so that no late
    append finds one free.

    Raises:
        LeaseLostError: Another process has the session.

    """
    key = writer.key
    with writer.log_lock, writer.head_lock:
        current = writer.stored_head or reader.read_head(bucket, key)
        for _ in range(_ATTEMPTS):
            if current is None or current[0].epoch != writer.epoch or current[0].deleted:
                raise lease_lost(key, writer.epoch, newest=current[0].epoch if current else None)
            if leases.replace_head(bucket, key, current, deleted_head(current[0])) is not None:
                break
            current = reader.read_head(bucket, key)
        else:
            raise StoreUnavailableError(
                f"the head of {key} changed at each attempt: try again", key=key
            )
        writer.has_lost_lease = True
        _remove_content(bucket, current[0])


def deleted_head(head: SessionHead) -> SessionHead:
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
    )


def _remove_content(bucket: Bucket, head: SessionHead) -> None:
    """Remove a deleted session's objects; idempotent."""
    key, folder = head.key, layout.folder_of(head.key)
    places = bucket.listed(layout.log_prefix(folder, head.generation))
    bucket.many(
        lambda entry: bucket.put(entry.name, GONE),
        [entry for entry in places if entry.size != len(GONE)],
    )
    inbox.clear(bucket, key)
    owned = [*bucket.listed(f"{folder}/doc/"), *bucket.listed(f"{folder}/seg/")]
    bucket.remove([entry.name for entry in owned if layout.epoch_of(entry.name) <= head.epoch])
    bucket.remove([layout.directory_name(key, head.generation)])


def scrub(bucket: Bucket) -> None:
    """Remove what killed deletions and folds have left."""
    for folder in bucket.folders("s/"):
        head = _head_in(bucket, f"s/{folder}")
        if head is not None and head.deleted:
            _remove_content(bucket, head)
        elif head is not None:
            _remove_unreferenced(bucket, f"s/{folder}", head)


def _remove_unreferenced(bucket: Bucket, folder: str, head: SessionHead) -> None:
    """Remove objects that past epochs wrote and no head references."""
    named = heads.referenced_objects(head)
    names = [e.name for part in ("doc", "seg") for e in bucket.listed(f"{folder}/{part}/")]
    bucket.remove(
        [name for name in names if name not in named and layout.epoch_of(name) < head.epoch]
    )
    for generation in bucket.folders(f"{folder}/log/"):
        if int(generation) < head.generation:
            old = bucket.listed(f"{folder}/log/{generation}/")
            full = [entry.name for entry in old if entry.size != len(GONE)]
            bucket.many(lambda name: bucket.put(name, GONE), full)
