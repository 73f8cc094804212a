"""The inbox: what anybody left for a session, and how its holder hears of it.

What one ``post`` leaves is one object, created under the next number: so posts are in one
order, and two posters who saw the same inbox cannot both add to it. Numbers never begin again:
the last object stays when it is emptied, so that whoever removes one late removes nothing new.

A wish (mail, or a handover) is an object among its owner's, which the next heartbeat finds.

Blocking; each function is part of one hop into a thread.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Collection, Sequence
from typing import final

import msgspec

from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.model.keys import SessionKey
from perdure.store import Asked, Posted
from perdure.stores.objects import heads, layout, reading
from perdure.stores.objects.bucket import Bucket
from perdure.stores.objects.leases import Beat
from perdure.stores.objects.writing import lost

__all__ = ["Wishes", "ask", "clear", "heartbeat", "post", "settle", "take", "waiting"]

_log = logging.getLogger("perdure")

_TRIES = 100
_HANDOVER, _MAIL = "handover", "mail"


class _Post(msgspec.Struct):
    """What one ``post`` left."""

    key: SessionKey
    items: list[Posted]


class _Found(msgspec.Struct):
    """A post as it lies there."""

    name: str
    tag: str
    post: _Post


def _posts(bucket: Bucket, key: SessionKey) -> list[_Found]:
    """Return what waits, oldest first; the last one may be empty."""
    return _posts_in(bucket, layout.inbox_name(layout.folder_of(key), 0).rpartition("/")[0] + "/")


def _posts_in(bucket: Bucket, prefix: str) -> list[_Found]:
    names = sorted(one.name for one in bucket.listed(prefix))
    found = bucket.many(bucket.get, names)
    return [
        _Found(name, one.tag, heads.opened(name, one.data, _Post))
        for name, one in zip(names, found, strict=True)
        if one is not None
    ]


def waiting(bucket: Bucket) -> list[SessionKey]:
    """List the sessions for which something waits: one look at every inbox that was ever used."""
    inboxes = bucket.folders(layout.INBOX)
    found = bucket.many(lambda one: _posts_in(bucket, f"{layout.INBOX}{one}/"), inboxes)
    return sorted({one.post.key for posts in found for one in posts if one.post.items})


def post(bucket: Bucket, key: SessionKey, items: Sequence[Posted]) -> int:
    """Leave items, all or none; return how many are new."""
    folder = layout.folder_of(key)
    for _ in range(_TRIES):
        there = _posts(bucket, key)
        waiting = {item.op_id for one in there for item in one.post.items}
        new = {item.op_id: item for item in reversed(items) if item.op_id not in waiting}
        fresh = [item for item in items if new.get(item.op_id) is item]
        if not fresh:
            return 0
        number = layout.number_of(there[-1].name) + 1 if there else 1
        name = layout.inbox_name(folder, number)
        if bucket.create(name, heads.sealed(_Post(key, fresh))) is not None:
            _tell(bucket, key)
            return len(fresh)
    message = f"the inbox of {key} changes each time that something is posted: try again"
    raise StoreUnavailableError(message, key=key)


def _tell(bucket: Bucket, key: SessionKey) -> None:
    seen = reading.look(bucket, key)
    if seen is not None and not seen[0].deleted and not seen[0].released:
        _leave(bucket, key, seen[0].owner, _MAIL)


def ask(bucket: Bucket, key: SessionKey, owner: str) -> None:
    """Ask an owner for a session."""
    _leave(bucket, key, owner, _HANDOVER)


def _leave(bucket: Bucket, key: SessionKey, owner: str, what: str) -> None:
    bucket.put(layout.ask_name(owner, what, layout.folder_of(key)), heads.sealed(key))


def take(bucket: Bucket, key: SessionKey, epoch: int, limit: int) -> list[Posted]:
    """Return what waits, oldest first."""
    _require_newest(bucket, key, epoch)
    return [item for one in _posts(bucket, key) for item in one.post.items][:limit]


def settle(bucket: Bucket, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
    """Remove items."""
    _require_newest(bucket, key, epoch)
    _remove(bucket, _posts(bucket, key), set(op_ids))


def clear(bucket: Bucket, key: SessionKey) -> None:
    """Remove all items."""
    there = _posts(bucket, key)
    _remove(bucket, there, {item.op_id for one in there for item in one.post.items})


def _remove(bucket: Bucket, there: Sequence[_Found], op_ids: Collection[str]) -> None:
    # Oldest first: whatever cuts it short leaves the order of the others.
    for one in there:
        left = [item for item in one.post.items if item.op_id not in op_ids]
        if not left and one is not there[-1]:
            bucket.remove([one.name])
        elif len(left) < len(one.post.items):
            bucket.replace(one.name, heads.sealed(_Post(one.post.key, left)), one.tag)


def _require_newest(bucket: Bucket, key: SessionKey, epoch: int) -> None:
    seen = reading.look(bucket, key)
    if seen is None or seen[0].epoch != epoch or seen[0].deleted:
        raise lost(key, epoch, newest=seen[0].epoch if seen else None)


@final
class Wishes:
    """What others want of an owner, until a heartbeat has told it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[SessionKey, None]] = {_HANDOVER: {}, _MAIL: {}}

    def add(self, what: str, key: SessionKey) -> None:
        """Keep a wish; one that is known already stays one."""
        with self._lock:
            self._waiting[what][key] = None

    def told(self) -> Asked:
        """Return all of them, once."""
        with self._lock:
            waiting, self._waiting = self._waiting, {_HANDOVER: {}, _MAIL: {}}
        return Asked(tuple(waiting[_HANDOVER]), tuple(waiting[_MAIL]))


def heartbeat(bucket: Bucket, owner: str, beat: int, wishes: Wishes) -> None:
    """Renew an owner's heartbeat, and collect what others want of it."""
    mine = Beat(owner, beat, platform.node(), os.getpid())
    bucket.put(layout.owner_name(owner), heads.sealed(mine))
    prefix = layout.ask_name(owner, "", "s/").rpartition("/")[0] + "/"
    names = [one.name for one in bucket.listed(prefix)]
    for name, one in zip(names, bucket.many(bucket.get, names), strict=True):
        what = name.rpartition("/")[2].partition("-")[0]
        if one is None or what not in {_HANDOVER, _MAIL}:
            continue
        try:
            wishes.add(what, heads.opened(name, one.data, SessionKey))
        except CorruptRecordError as error:
            _log.warning("a wish is damaged", extra={"object": name, "error": str(error)})
    # Removed before it is told: a wish that comes now is a new one.
    bucket.remove(names)
