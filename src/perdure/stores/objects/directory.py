"""Which tenants there are, and how a session enters the directory.

Blocking; each function is part of one hop into a thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator

import msgspec

from perdure._lib.ids import random_id
from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.manifest import About
from perdure.store import SessionInfo
from perdure.stores.objects import head as heads
from perdure.stores.objects import inbox, layout, leases, reader
from perdure.stores.objects.bucket import Bucket
from perdure.stores.objects.commits import GONE
from perdure.stores.objects.head import SessionHead
from perdure.stores.objects.log import ObjectLogWriter, lost
from perdure.stores.objects.tenants import enter_directory

# Which tenants there are, and how a session enters the directory


# The directory: which sessions there are, and their removal
#
# Names lie in the order of keys, so that a page of a listing reads about a page. Ids too long for
# a name lie beside those that begin alike, and are put in order when they are met.
# Blocking; each function is part of one hop into a thread.


_log = logging.getLogger("perdure")

_WINDOW = 32
_TRIES = 50


class ObjectListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which sessions to list."""

    tenant: str
    owner: str | None
    tag: str | None
    prefix: str
    after: SessionKey | None
    limit: int


def sessions(bucket: Bucket, wanted: ObjectListQuery) -> list[SessionInfo]:
    """List sessions by key."""
    found: list[SessionInfo] = []
    keys = _keys(bucket, wanted)
    while len(found) < wanted.limit and (
        window := list(itertools.islice(keys, min(_WINDOW, wanted.limit - len(found) + 4)))
    ):
        infos = bucket.many(lambda key: _info(bucket, key), window)
        found += [info for info in infos if info is not None and _fits(info, wanted)]
    return found[: wanted.limit]


def _fits(info: SessionInfo, wanted: ObjectListQuery) -> bool:
    if wanted.owner is not None and info.owner != wanted.owner:
        return False
    return wanted.tag is None or wanted.tag in info.tags


def _keys(bucket: Bucket, wanted: ObjectListQuery) -> Iterator[SessionKey]:
    """Give the keys in the directory that fit, each once, in their order."""
    before: SessionKey | None = wanted.after
    for key in _ordered(bucket, wanted):
        if not key.agent.startswith(wanted.prefix):
            continue
        if before is None or key > before:
            before = key
            yield key


def _ordered(bucket: Bucket, wanted: ObjectListQuery) -> Iterator[SessionKey]:
    prefix = layout.directory_prefix(wanted.tenant)
    begin = prefix + layout.hexed(wanted.prefix).partition("~")[0]
    start = begin
    if wanted.after is not None:
        name = layout.directory_name(wanted.after, 0).rpartition("-")[0]
        start = max(start, name.partition("~")[0])
    # One digit less: some services skip what lies below a name that listing starts after.
    pages = bucket.pages(prefix, None if start == prefix else start[:-1])
    names = (one.name for page in pages for one in page if one.name > begin)
    fitting = itertools.takewhile(lambda name: name.startswith(begin), names)
    for alike, run in itertools.groupby(fitting, key=_alike):
        if alike.endswith("~"):
            yield from sorted(filter(None, (_key(bucket, name, wanted.tenant) for name in run)))
        else:
            yield from filter(None, (_key(bucket, name, wanted.tenant) for name in run))


def _alike(name: str) -> str:
    """Return what names have in common whose order they do not tell."""
    known, long, _ = name.partition("~")
    return known + long


def _key(bucket: Bucket, name: str, tenant: str) -> SessionKey | None:
    key = layout.key_of(name, tenant)
    if key is not None:
        return key
    found = bucket.get(name)
    return None if found is None else heads.opened(name, found.data, SessionKey)


def _info(bucket: Bucket, key: SessionKey) -> SessionInfo | None:
    try:
        seen = reader.look(bucket, key)
        if seen is None or seen[0].deleted:
            return None
        head = seen[0]
        manifest = heads.manifest_of(f"{layout.folder_of(key)}/head", head)
    except CorruptRecordError as error:  # it hides no other; whoever opens this one is told
        _log.warning("session %s is damaged: %s", key, error, extra={"session": str(key)})
        return SessionInfo(key=key, damaged=True)
    about = About() if manifest is None else manifest.about
    return SessionInfo(
        key=key,
        epoch=head.epoch,
        head=max(head.floor, 0 if manifest is None else manifest.as_of_seq),
        created_at=head.created_at,
        updated_at=head.updated_at,
        owner=about.owner,
        title=about.title,
        tags=about.tags,
        turns=0 if manifest is None else manifest.counters.get("turns", 0),
    )


def rebuilt(bucket: Bucket) -> int:
    """Enter all sessions into the directory, by a walk over their heads; return how many."""

    def enter(folder: str) -> bool:
        head = _head_in(bucket, f"s/{folder}")
        if head is None or head.deleted:
            return False
        enter_directory(bucket, head.key, head.life)
        return True

    return sum(bucket.many(enter, bucket.folders("s/")))


def _head_in(bucket: Bucket, folder: str) -> SessionHead | None:
    """Return the head in a folder; None where there is none, or none that can be read."""
    name = f"{folder}/head"
    found = bucket.get(name)
    try:
        return None if found is None else heads.decode(name, found.data, None)
    except CorruptRecordError as error:
        _log.warning("a session is damaged: %s: %s", name, error, extra={"object": name})
        return None


def delete(bucket: Bucket, writer: ObjectLogWriter) -> None:
    """Remove what a session owns, as its holder.

    Its head stays, with the epoch; and the places of its log, emptied, so that nobody who
    comes late finds one free.

    Raises:
        LeaseLostError: Somebody else has the session.

    """
    key = writer.key
    with writer.lock, writer.folding:
        seen = writer.seen or reader.look(bucket, key)
        for _ in range(_TRIES):
            if seen is None or seen[0].epoch != writer.epoch or seen[0].deleted:
                raise lost(key, writer.epoch, newest=seen[0].epoch if seen else None)
            if leases.replaced(bucket, key, seen, emptied(seen[0])) is not None:
                break
            seen = reader.look(bucket, key)
        else:
            message = f"the head of {key} changes each time: trying again may help"
            raise StoreUnavailableError(message, key=key)
        writer.over = True
        _empty(bucket, seen[0])


def emptied(head: SessionHead) -> SessionHead:
    """Return the head of a session that was deleted."""
    return SessionHead(
        key=head.key,
        epoch=head.epoch,
        owner=head.owner,
        life=head.life,
        released=True,
        deleted=True,
        crc=head.crc,
        nonce=random_id(8),
    )


def _empty(bucket: Bucket, head: SessionHead) -> None:
    """Remove what a deleted session had; again, and it has no effect."""
    key, folder = head.key, layout.folder_of(head.key)
    places = bucket.listed(layout.log_prefix(folder, head.life))
    bucket.many(
        lambda one: bucket.put(one.name, GONE),
        [one for one in places if one.size != len(GONE)],
    )
    inbox.clear(bucket, key)
    owned = [*bucket.listed(f"{folder}/doc/"), *bucket.listed(f"{folder}/seg/")]
    bucket.remove([one.name for one in owned if _epoch_of(one.name) <= head.epoch])
    bucket.remove([layout.directory_name(key, head.life)])


def _epoch_of(name: str) -> int:
    return int(name.rpartition("/")[2].partition("-")[0])


def scrub(bucket: Bucket) -> None:
    """Remove what a delete or a fold that was killed has left."""
    for folder in bucket.folders("s/"):
        head = _head_in(bucket, f"s/{folder}")
        if head is not None and head.deleted:
            _empty(bucket, head)
        elif head is not None:
            _unnamed(bucket, f"s/{folder}", head)


def _unnamed(bucket: Bucket, folder: str, head: SessionHead) -> None:
    """Remove what epochs that are over wrote and no head names."""
    named = heads.named(head)
    there = _names(bucket, (f"{folder}/doc/", f"{folder}/seg/"))
    bucket.remove([one for one in there if one not in named and _epoch_of(one) < head.epoch])
    for life in bucket.folders(f"{folder}/log/"):
        if int(life) < head.life:
            old = bucket.listed(f"{folder}/log/{life}/")
            full = [one.name for one in old if one.size != len(GONE)]
            bucket.many(lambda name: bucket.put(name, GONE), full)


def _names(bucket: Bucket, prefixes: Iterable[str]) -> list[str]:
    return [one.name for prefix in prefixes for one in bucket.listed(prefix)]
