"""Inboxes of the sessions, dead letters, and requests to owners.

Each ``enqueue`` creates one object under the next number. So posts are ordered, and of two
processes that saw the same inbox only one can add to it. Numbers never start again: the last
object stays when it is emptied, so a late removal never removes a newer post.

A request to an owner (pending items, or a handover) is an object under the owner's prefix, which
the owner's next heartbeat reads.

Functions block; each is part of one call in a thread.
"""

from __future__ import annotations

import logging
import os
import platform
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, islice

import msgspec

from perdure._lib.logs import log_facts
from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.manifest import lease_lost
from perdure.records.posts import (
    UNREADABLE,
    acked_ids,
    decode_dead_letter,
    encode_dead_letter,
    key_of_dead_letter,
    oldest_first,
)
from perdure.store import DeadLetter, InboxLimit, PendingItem
from perdure.stores.objects import layout, reader
from perdure.stores.objects.bucket import Bucket, ListedObject
from perdure.stores.objects.leases import HeartbeatFile

_log = logging.getLogger("perdure")

_ATTEMPTS = 100
_WINDOW = 64
"""Posts that are read concurrently."""
HANDOVER, MAIL = "handover", "mail"
Request = tuple[str, SessionKey]
"""A request to an owner, and the session that it is about."""


class _Post(msgspec.Struct):
    """The items of one ``enqueue``."""

    key: SessionKey | None
    """None for a damaged post, whose one item reports the damage."""
    items: list[PendingItem]


def _entries(bucket: Bucket, key: SessionKey) -> list[ListedObject]:
    """Return a session's posts, oldest first; the last one may be empty."""
    return bucket.listed(layout.inbox_prefix(layout.folder_of(key)))


def _names(bucket: Bucket, key: SessionKey) -> list[str]:
    return [entry.name for entry in _entries(bucket, key)]


def _posts(bucket: Bucket, names: Sequence[str]) -> Iterator[tuple[str, str, _Post]]:
    """Yield names, tags and posts in the order of the names, some read concurrently."""
    for at in range(0, len(names), _WINDOW):
        window = names[at : at + _WINDOW]
        for name, stored in zip(window, bucket.many(bucket.get, window), strict=True):
            if stored is not None:
                yield name, stored.tag, _decode_post(name, stored.data)


def _items(bucket: Bucket, names: Sequence[str]) -> Iterator[PendingItem]:
    return (item for _, _, post in _posts(bucket, names) for item in post.items)


def _decode_post(name: str, data: bytes) -> _Post:
    try:
        return layout.decode_object(name, data, _Post)
    except CorruptRecordError:
        damage = f"the post in {name} is damaged"
        op_id = f"{UNREADABLE}{name.rpartition('/')[2]}"
        return _Post(None, [PendingItem(op_id, "", data, 0.0, damage)])


def sessions_with_pending_items(bucket: Bucket, dead_letters: bool) -> list[SessionKey]:  # noqa: FBT001  # passed on by position
    """List the sessions with pending items, or dead letters, by reading each inbox ever used."""
    prefix = layout.DEAD_LETTERS if dead_letters else layout.INBOX
    names = [entry.name for page in bucket.pages(prefix) for entry in page]
    inboxes = [list(run) for _, run in groupby(names, key=lambda name: name.rpartition("/")[0])]
    whose = _dead_in if dead_letters else _pending_in
    keys = bucket.many(lambda names: whose(bucket, names), inboxes)
    return sorted(key for key in keys if key is not None)


def _dead_in(bucket: Bucket, names: Sequence[str]) -> SessionKey | None:
    """Return the session of these dead letters, None if all are damaged."""
    stored = (bucket.get(name) for name in names)
    keys = (None if entry is None else key_of_dead_letter(entry.data) for entry in stored)
    return next((key for key in keys if key is not None), None)


def _pending_in(bucket: Bucket, names: Sequence[str]) -> SessionKey | None:
    """Return the session of an inbox with pending items; one read if all were removed."""
    for name in names:
        stored = bucket.get(name)
        post = _Post(None, []) if stored is None else _decode_post(name, stored.data)
        if post.items and post.key is not None:
            return post.key
    return None


def dead_letters(bucket: Bucket, key: SessionKey) -> list[DeadLetter]:
    """Return a session's dead letters."""
    prefix = layout.dead_letters_prefix(layout.folder_of(key))
    names = [entry.name for entry in bucket.listed(prefix)]
    letters = [
        decode_dead_letter(key, f"{UNREADABLE}{name.removeprefix(prefix)}", entry.data)
        for name, entry in zip(names, bucket.many(bucket.get, names), strict=True)
        if entry is not None
    ]
    return oldest_first(letters)


def enqueue(
    bucket: Bucket, key: SessionKey, items: Sequence[PendingItem], limit: InboxLimit | None
) -> int:
    """Add items to an inbox, all or none; return how many are new.

    Raises:
        InboxFullError: The limit has no room for them.

    """
    folder = layout.folder_of(key)
    for _ in range(_ATTEMPTS):
        names = _names(bucket, key)
        sizes = {item.op_id: len(item.payload) for item in _items(bucket, names)}
        new = {item.op_id: item for item in reversed(items) if item.op_id not in sizes}
        fresh = [item for item in items if new.get(item.op_id) is item]
        if not fresh:
            if items:  # the first post may have been cut off before it notified the holder
                _notify_holder(bucket, key)
            return 0
        if limit is not None:
            added = sum(len(item.payload) for item in fresh)
            size = sum(sizes.values())
            limit.require_room(key, waiting=len(sizes), size=size, new=len(fresh), added=added)
        number = layout.first_of(names[-1]) + 1 if names else 1
        name = layout.inbox_name(folder, number)
        if bucket.create(name, layout.with_checksum(_Post(key, fresh))) is not None:
            _notify_holder(bucket, key)
            return len(fresh)
    raise StoreUnavailableError(
        f"the inbox of {key} changed at each attempt to post: try again", key=key
    )


def _notify_holder(bucket: Bucket, key: SessionKey) -> None:
    current = reader.read_head(bucket, key)
    if current is not None and not current[0].deleted and not current[0].released:
        _put_request(bucket, key, current[0].owner, MAIL)


def request_handover(bucket: Bucket, key: SessionKey, owner: str) -> None:
    """Request a session from its owner."""
    _put_request(bucket, key, owner, HANDOVER)


def _put_request(bucket: Bucket, key: SessionKey, owner: str, what: str) -> None:
    bucket.put(layout.request_name(owner, what, layout.folder_of(key)), layout.with_checksum(key))


def may_have_items(bucket: Bucket, key: SessionKey) -> bool:
    """Return whether something may be pending, by one listing."""
    # Any item makes a post longer than one whose items were removed.
    empty = len(layout.with_checksum(_Post(key, [])))
    return any(entry.size != empty for entry in _entries(bucket, key))


def receive(bucket: Bucket, key: SessionKey, epoch: int, limit: int) -> list[PendingItem]:
    """Return the pending items, oldest first."""
    entries = _entries(bucket, key)
    current = reader.read_head(bucket, key)
    if (0 if current is None else current[0].epoch) != epoch:
        raise lease_lost(key, epoch, newest=current[0].epoch if current else None)
    items = _items(bucket, [entry.name for entry in entries])
    return list(islice(items, max(limit, 0)))


def ack(
    bucket: Bucket,
    key: SessionKey,
    epoch: int | None,
    op_ids: Collection[str],
    dead: Sequence[DeadLetter],
) -> None:
    """Remove items, once those that become dead letters are stored; without an epoch, letters.

    Posts after the last of them are not read.
    """
    folder = layout.folder_of(key)
    if epoch is None:
        prefix = layout.dead_letters_prefix(folder)
        wanted = {layout.dead_letter_name(folder, op_id) for op_id in op_ids}
        wanted |= {f"{prefix}{op_id.removeprefix(UNREADABLE)}" for op_id in op_ids}
        bucket.remove([entry.name for entry in bucket.listed(prefix) if entry.name in wanted])
        return
    current = reader.read_head(bucket, key)
    if current is None or current[0].epoch != epoch or current[0].is_over:
        raise lease_lost(key, epoch, newest=current[0].epoch if current else None)

    def put(letter: DeadLetter) -> None:
        name = layout.dead_letter_name(folder, letter.item.op_id)
        bucket.put(name, encode_dead_letter(key, letter))

    bucket.many(put, dead)
    done = frozenset(acked_ids(op_ids, dead))
    pending = set(done)
    names = _names(bucket, key)
    settled: list[str] = []
    for name, tag, post in _posts(bucket, names):
        remaining = [item for item in post.items if item.op_id not in done]
        # The last object is emptied and stays, so that numbers never start again.
        if not remaining and name != names[-1]:
            settled.append(name)
        # By its tag: a removal that arrives late changes nothing.
        elif len(remaining) < len(post.items):
            bucket.replace(name, layout.with_checksum(_Post(key, remaining)), tag)
        pending.difference_update(item.op_id for item in post.items)
        if not pending:
            break
    bucket.remove(settled)


def last_number(bucket: Bucket, key: SessionKey) -> int:
    """Return the number of the newest post, 0 for none."""
    names = _names(bucket, key)
    return layout.first_of(names[-1]) if names else 0


def clear(bucket: Bucket, key: SessionKey, up_to: int) -> None:
    """Remove the posts up to a number, 0 for none; the last object stays, emptied."""
    if not up_to:
        return
    names = _names(bucket, key)
    old = [name for name in names if layout.first_of(name) <= up_to]
    bucket.remove([name for name in old if name != names[-1]])
    for name, tag, _ in _posts(bucket, [name for name in old if name == names[-1]]):
        bucket.replace(name, layout.with_checksum(_Post(key, [])), tag)


def heartbeat(
    bucket: Bucket, owner: str, beat: int, requests: deque[Request], tag: str | None
) -> tuple[str | None, bool]:
    """Renew an owner's heartbeat, and collect the *requests* to it.

    Only this owner writes the object. So if it is not the one that was written last (its *tag*
    differs), either a heartbeat arrived whose response was lost, or the bucket has reverted to an
    earlier state. Noticing that costs no extra request.

    Returns:
        The new tag, None if it is not known, and whether the bucket may have reverted.

    """
    data = layout.with_checksum(HeartbeatFile(owner, beat, platform.node(), os.getpid()))
    name = layout.owner_name(owner)
    new = bucket.create(name, data) if tag is None else bucket.replace(name, data, tag)
    is_other = new is None
    if new is None:
        stored = bucket.get(name)
        new = (
            bucket.create(name, data) if stored is None else bucket.replace(name, data, stored.tag)
        )
    _collect(bucket, owner, requests)
    return new, is_other and tag is not None


def _collect(bucket: Bucket, owner: str, requests: deque[Request]) -> None:
    prefix = layout.requests_prefix(owner)
    names = [entry.name for entry in bucket.listed(prefix)]
    stored = dict(zip(names, bucket.many(bucket.get, names), strict=True))
    # A repeated request has the same name, and an abandoned heartbeat may still be running. So each
    # request that was read is removed before it is reported; reporting it twice does no harm. An
    # object that another heartbeat removed in between is left alone: it may have been created again
    # since, and that request was not read.
    read = {name: entry for name, entry in stored.items() if entry is not None}
    bucket.remove(list(read))
    for name, entry in read.items():
        what = name.rpartition("/")[2].partition("-")[0]
        try:
            requests.append((what, layout.decode_object(name, entry.data, SessionKey)))
        except CorruptRecordError as error:
            message = "a request is damaged: %(reason)s"
            log_facts(_log, logging.WARNING, message, object=name, reason=error)
