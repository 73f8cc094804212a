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
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, islice
from typing import final

import msgspec

from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.posts import (
    UNREADABLE,
    decode_dead_letter,
    encode_dead_letter,
    key_of_dead_letter,
    oldest_first,
)
from perdure.store import DeadLetter, HeartbeatRequests, InboxLimit, PendingItem
from perdure.stores.objects import head, layout, reader
from perdure.stores.objects.bucket import Bucket, StoredObject
from perdure.stores.objects.leases import HeartbeatFile
from perdure.stores.objects.log import lost

_log = logging.getLogger("perdure")

_TRIES = 100
_WINDOW = 64
"""Posts that are read at a time."""
_HANDOVER, _MAIL = "handover", "mail"


class _Post(msgspec.Struct):
    """What one ``post`` left."""

    key: SessionKey
    items: list[PendingItem]


class _PendingObject(msgspec.Struct):
    """A post as it lies there."""

    name: str
    tag: str
    items: list[PendingItem]
    """Of a damaged post, one that says so."""
    key: SessionKey | None = None
    """None for a damaged one."""


def _names(bucket: Bucket, key: SessionKey) -> list[str]:
    """Return the names of a session's posts, oldest first; the last one may be empty."""
    prefix = layout.inbox_name(layout.folder_of(key), 0).rpartition("/")[0] + "/"
    return sorted(one.name for one in bucket.listed(prefix))


def _posts(bucket: Bucket, names: Sequence[str]) -> Iterator[_PendingObject]:
    """Give posts in the order of their names, some read at a time."""
    for at in range(0, len(names), _WINDOW):
        window = names[at : at + _WINDOW]
        for name, one in zip(window, bucket.many(bucket.get, window), strict=True):
            if one is not None:
                yield _opened(name, one)


def _opened(name: str, found: StoredObject) -> _PendingObject:
    try:
        post = head.opened(name, found.data, _Post)
    except CorruptRecordError:
        damage = f"the post in {name} is damaged"
        item = PendingItem(f"{UNREADABLE}{name.rpartition('/')[2]}", "", found.data, 0.0, damage)
        return _PendingObject(name, found.tag, [item])
    return _PendingObject(name, found.tag, post.items, post.key)


def waiting(bucket: Bucket, dead_letters: bool) -> list[SessionKey]:  # noqa: FBT001  # passed on by position
    """List the sessions for which something waits: one look at every inbox that was ever used."""
    if dead_letters:
        return _with_dead_letters(bucket)
    names = [one.name for page in bucket.pages(layout.INBOX) for one in page]
    inboxes = [list(run) for _, run in groupby(names, key=lambda name: name.rpartition("/")[0])]
    found = bucket.many(lambda names: _waits_in(bucket, names), inboxes)
    return sorted(key for key in found if key is not None)


def _waits_in(bucket: Bucket, names: Sequence[str]) -> SessionKey | None:
    """Return whose inbox it is, if something waits there; where all was taken, that is one look."""
    for name in names:
        found = bucket.get(name)
        post = None if found is None else _opened(name, found)
        if post is not None and post.items and post.key is not None:
            return post.key
    return None


def reject(bucket: Bucket, key: SessionKey, epoch: int, letters: Sequence[DeadLetter]) -> None:
    """Keep dead letters, then remove their items from the inbox."""
    _require_newest(bucket, key, epoch)
    folder = layout.folder_of(key)

    def put(letter: DeadLetter) -> None:
        name = layout.dead_letter_name(folder, letter.item.op_id)
        bucket.put(name, encode_dead_letter(key, letter))

    bucket.many(put, letters)
    settle(bucket, key, epoch, [letter.item.op_id for letter in letters])


def dead_letters(bucket: Bucket, key: SessionKey) -> list[DeadLetter]:
    """Return a session's dead letters."""
    prefix = layout.dead_letters_prefix(layout.folder_of(key))
    names = [one.name for one in bucket.listed(prefix)]
    letters = [
        decode_dead_letter(key, f"{UNREADABLE}{name.removeprefix(prefix)}", one.data)
        for name, one in zip(names, bucket.many(bucket.get, names), strict=True)
        if one is not None
    ]
    return oldest_first(letters)


def drop_dead_letters(bucket: Bucket, key: SessionKey, op_ids: Collection[str]) -> int:
    """Remove dead letters; return how many."""
    folder = layout.folder_of(key)
    prefix = layout.dead_letters_prefix(folder)
    wanted = {layout.dead_letter_name(folder, op_id) for op_id in op_ids}
    wanted |= {f"{prefix}{op_id.removeprefix(UNREADABLE)}" for op_id in op_ids}
    gone = [one.name for one in bucket.listed(prefix) if one.name in wanted]
    bucket.remove(gone)
    return len(gone)


def _with_dead_letters(bucket: Bucket) -> list[SessionKey]:
    names = [one.name for page in bucket.pages(layout.DEAD_LETTERS) for one in page]
    inboxes = [list(run) for _, run in groupby(names, key=lambda name: name.rpartition("/")[0])]

    def whose(names: Sequence[str]) -> SessionKey | None:
        found = (bucket.get(name) for name in names)
        keys = (None if one is None else key_of_dead_letter(one.data) for one in found)
        return next((key for key in keys if key is not None), None)

    return sorted(key for key in bucket.many(whose, inboxes) if key is not None)


def post(
    bucket: Bucket, key: SessionKey, items: Sequence[PendingItem], limit: InboxLimit | None
) -> int:
    """Leave items, all or none; return how many are new.

    Raises:
        InboxFullError: There is no room for them.

    """
    folder = layout.folder_of(key)
    for _ in range(_TRIES):
        names = _names(bucket, key)
        sizes = {
            item.op_id: len(item.payload) for one in _posts(bucket, names) for item in one.items
        }
        waiting = sizes.keys()
        new = {item.op_id: item for item in reversed(items) if item.op_id not in waiting}
        fresh = [item for item in items if new.get(item.op_id) is item]
        if not fresh:
            if items:  # whoever posts again may have been cut off before it told of it
                _tell(bucket, key)
            return 0
        if limit is not None:
            added = sum(len(item.payload) for item in fresh)
            size = sum(sizes.values())
            limit.require_room(key, waiting=len(sizes), size=size, new=len(fresh), added=added)
        number = layout.number_of(names[-1]) + 1 if names else 1
        name = layout.inbox_name(folder, number)
        if bucket.create(name, head.sealed(_Post(key, fresh))) is not None:
            _tell(bucket, key)
            return len(fresh)
    message = f"the inbox of {key} changes each time that something is posted: try again"
    raise StoreUnavailableError(message, key=key)


def _tell(bucket: Bucket, key: SessionKey) -> None:
    seen = reader.look(bucket, key)
    if seen is not None and not seen[0].deleted and not seen[0].released:
        _leave(bucket, key, seen[0].owner, _MAIL)


def ask(bucket: Bucket, key: SessionKey, owner: str) -> None:
    """Ask an owner for a session."""
    _leave(bucket, key, owner, _HANDOVER)


def _leave(bucket: Bucket, key: SessionKey, owner: str, what: str) -> None:
    bucket.put(layout.ask_name(owner, what, layout.folder_of(key)), head.sealed(key))


def take(bucket: Bucket, key: SessionKey, epoch: int, limit: int) -> list[PendingItem]:
    """Return what waits, oldest first."""
    seen = reader.look(bucket, key)
    if (0 if seen is None else seen[0].epoch) != epoch:
        raise lost(key, epoch, newest=seen[0].epoch if seen else None)
    posts = _posts(bucket, _names(bucket, key))
    return list(islice((item for one in posts for item in one.items), max(limit, 0)))


def settle(bucket: Bucket, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
    """Remove items; those behind the last of them are not looked at."""
    _require_newest(bucket, key, epoch)
    wanted = set(op_ids)
    names = _names(bucket, key)
    gone: list[str] = []
    for one in _posts(bucket, names):
        left = [item for item in one.items if item.op_id not in op_ids]
        if not left and one.name != names[-1]:
            gone.append(one.name)
        elif len(left) < len(one.items):
            _shorten(bucket, key, one, left)
        wanted.difference_update(item.op_id for item in one.items)
        if not wanted:
            break
    bucket.remove(gone)


def clear(bucket: Bucket, key: SessionKey) -> None:
    """Remove all items, and the dead letters."""
    names = _names(bucket, key)
    bucket.remove(names[:-1])
    for one in _posts(bucket, names[-1:]):
        _shorten(bucket, key, one, [])
    dead = bucket.listed(layout.dead_letters_prefix(layout.folder_of(key)))
    bucket.remove([one.name for one in dead])


def _shorten(bucket: Bucket, key: SessionKey, one: _PendingObject, left: list[PendingItem]) -> None:
    bucket.replace(one.name, head.sealed(_Post(key, left)), one.tag)


def _require_newest(bucket: Bucket, key: SessionKey, epoch: int) -> None:
    seen = reader.look(bucket, key)
    if seen is None or seen[0].epoch != epoch or seen[0].deleted:
        raise lost(key, epoch, newest=seen[0].epoch if seen else None)


@final
class OwnerRequests:
    """What others want of an owner, until a heartbeat has told it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[SessionKey, None]] = {_HANDOVER: {}, _MAIL: {}}

    def add(self, what: str, key: SessionKey) -> None:
        """Keep a wish; one that is known already stays one."""
        with self._lock:
            self._waiting[what][key] = None

    def told(self) -> HeartbeatRequests:
        """Return all of them, once."""
        with self._lock:
            waiting, self._waiting = self._waiting, {_HANDOVER: {}, _MAIL: {}}
        return HeartbeatRequests(tuple(waiting[_HANDOVER]), tuple(waiting[_MAIL]))


def heartbeat(
    bucket: Bucket, owner: str, beat: int, wishes: OwnerRequests, tag: str | None
) -> tuple[str | None, bool]:
    """Renew an owner's heartbeat, and collect what others want of it.

    Only this owner writes the object. So one that is not as it was written last (its *tag*) tells
    that a heartbeat arrived whose answer was lost, or that the bucket went back to an
    earlier state; it costs no request more to notice that.

    Returns:
        The new tag, None if it is not known, and whether the bucket may have gone back.

    """
    mine = head.sealed(HeartbeatFile(owner, beat, platform.node(), os.getpid()))
    name = layout.owner_name(owner)
    new = bucket.create(name, mine) if tag is None else bucket.replace(name, mine, tag)
    is_other = new is None
    if new is None:
        found = bucket.get(name)
        new = bucket.create(name, mine) if found is None else bucket.replace(name, mine, found.tag)
    _collect(bucket, owner, wishes)
    return new, is_other and tag is not None


def _collect(bucket: Bucket, owner: str, wishes: OwnerRequests) -> None:
    prefix = layout.ask_name(owner, "", "s/").rpartition("/")[0] + "/"
    names = [one.name for one in bucket.listed(prefix)]
    found = dict(zip(names, bucket.many(bucket.get, names), strict=True))
    # A request that comes again goes by the same name, and a beat that was given up may still be
    # here: what was read is removed and then told, if once too often. What another beat removed
    # in between stays alone: by now it may have been asked for again, and nobody has read that.
    read = {name: one for name, one in found.items() if one is not None}
    bucket.remove(list(read))
    for name, one in read.items():
        what = name.rpartition("/")[2].partition("-")[0]
        if what not in {_HANDOVER, _MAIL}:
            continue
        try:
            wishes.add(what, head.opened(name, one.data, SessionKey))
        except CorruptRecordError as error:
            _log.warning("a wish is damaged", extra={"object": name, "error": str(error)})
