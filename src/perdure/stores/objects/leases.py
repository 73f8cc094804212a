"""Who writes a session: the epoch record's place in the log decides, the head tells.

*Taking*: read the head, list the commits behind its floor, read the newest one; create the epoch
record under the next seq. That name can be taken once (see `perdure.stores.objects.log`), so
there is one winner. Whoever finds it taken looks again. Then the head is replaced by
compare-and-swap, and only then is the lease granted: if the head is still the one that was read
first, nothing was merged meanwhile, and the epoch record lies where the log ends. If it
changed, its floor tells: a name that merging made free lies below it, and what was put there
is taken back.

A taker that dies between the two steps leaves an epoch that the head does not know. The old
holder then finds its place taken, and the next taker brings the head up to it and looks again.

Blocking; each function is part of one hop into a thread.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time

import msgspec

from perdure._lib.ids import random_id
from perdure.errors import LeaseHeldError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Entry
from perdure.store import LeaseState
from perdure.stores.objects import commits, layout, reader, tenants
from perdure.stores.objects import head as heads
from perdure.stores.objects.bucket import Bucket
from perdure.stores.objects.commits import Header
from perdure.stores.objects.head import SessionHead
from perdure.stores.objects.log import ObjectLogWriter

_OWNERS = 1000
_TRIES = 50
_RESENDS = 5


class HeartbeatFile(msgspec.Struct):
    """An owner's heartbeat."""

    owner: str
    beat: int
    host: str = ""
    pid: int = 0


class _Taker(msgspec.Struct, frozen=True):
    """Who takes a session, and under which epoch."""

    owner: str
    epoch: int
    host: str = ""
    pid: int = 0


class _End(msgspec.Struct, frozen=True):
    """Where a log ends."""

    life: int
    seq: int = 0
    crc: int = 0
    newest: Header | None = None
    """The newest commit's."""


def holder(bucket: Bucket, key: SessionKey) -> LeaseState | None:
    """Say who has a session, as its head tells."""
    seen = reader.look(bucket, key)
    if seen is None:
        return None
    head = seen[0]
    name = layout.owner_name(head.owner)
    found = bucket.get(name)
    return LeaseState(
        epoch=head.epoch,
        owner=head.owner,
        released=head.released,
        alive=False if found is None else None,
        beat=0 if found is None else _number(found.tag),
        deleted=head.deleted,
        host=head.host,
        pid=head.pid,
        listed=name,
    )


def beats(bucket: Bucket, owner: str) -> dict[str, int] | None:
    """Return the heartbeats of other owners by their objects' names: one listing for all."""
    mine = layout.owner_name(owner)
    page = next(bucket.pages(layout.OWNERS), [])[:_OWNERS]
    if not all(one.tag for one in page):
        return None
    return {one.name: _number(one.tag) for one in page if one.name != mine}


def _number(tag: str) -> int:
    """Return an object's tag as a counter: another one after each write."""
    return int.from_bytes(hashlib.sha256(tag.encode()).digest()[:6], "big")


def take(bucket: Bucket, key: SessionKey, after: int, owner: str) -> ObjectLogWriter:
    """Take a session with the epoch behind *after*.

    Raises:
        LeaseHeldError: Somebody else was faster, or *after* is not the newest epoch.

    """
    folder = layout.folder_of(key)
    taker = _Taker(owner, after + 1, platform.node(), os.getpid())
    who = {"owner": owner, "host": taker.host, "pid": taker.pid, "at": time.time()}
    begun = Entry(EPOCH, msgspec.json.encode({**who, "id": random_id(8)}))
    for _ in range(_TRIES):
        seen = reader.look(bucket, key)
        newest = 0 if seen is None else seen[0].epoch
        if newest != after:
            raise _held(key, newest, after)
        end = _end(bucket, key, folder, None if seen is None else seen[0])
        if end is None:
            continue
        if end.newest is not None and end.newest.epoch > after:
            _help(bucket, key, seen, end)
            continue
        placed = _placed(bucket, folder, end, begun, taker)
        if placed is None:
            continue
        end = placed
        if end.seq == 1:
            tenants.enter_directory(bucket, key, end.life)
        name = layout.log_name(folder, end.life, end.seq)
        granted = _granted(bucket, name, seen, _headed(key, seen, end, taker), taker)
        return ObjectLogWriter(bucket, key, granted, end.seq, end.crc)
    message = f"{key} cannot be taken: its log moves on each time; try again"
    raise StoreUnavailableError(message, key=key)


def _end(bucket: Bucket, key: SessionKey, folder: str, head: SessionHead | None) -> _End | None:
    """Return where the log ends that an epoch record would go on with; None: look again."""
    life = 1 if head is None else head.epoch + 1 if head.deleted else head.life
    if head is None or head.deleted:
        found = bucket.listed(layout.log_prefix(folder, life))
        if not found:
            return _End(life, crc=layout.life_seed(folder, life))
    else:
        found = reader.loose_of(bucket, key, head)
        if not found:
            again = reader.look(bucket, key)
            if again is not None and again[0].floor == head.floor:
                reader.require_whole(key, head, found)
            return None
    try:
        commit = reader.newest(bucket, sorted(found, key=lambda one: one.name))
    except reader.ObjectMergedAway:
        return None
    if head is not None and not head.deleted:
        reader.require_folded(head, commit.header.last)
    return _End(life, commit.header.last, commit.crc, commit.header)


def _placed(bucket: Bucket, folder: str, end: _End, begun: Entry, taker: _Taker) -> _End | None:
    """Put the epoch record behind the log's end; return the new end, None: look again.

    A holder that goes on writing is followed commit by commit, which takes two requests for
    one of its own, until it stands still for that long.
    """
    for _ in range(_TRIES):
        first = end.seq + 1
        name = layout.log_name(folder, end.life, first)
        data, crc = commits.encode(
            [begun], first=first, epoch=taker.epoch, owner=taker.owner, seed=end.crc
        )
        if bucket.create(name, data) is not None:
            return _End(end.life, first, crc)
        found = bucket.get(name)
        if found is not None and found.data == data:
            return _End(end.life, first, crc)
        if found is None or found.data == commits.GONE:
            return None
        commit = commits.commit(name, first, found.data)
        if commit.header.cut or commit.header.epoch >= taker.epoch:
            return None  # merged by a later holder, or another taker was faster
        end = _End(end.life, commit.header.last, commit.crc, commit.header)
    return None


def _headed(
    key: SessionKey, seen: tuple[SessionHead, str] | None, end: _End, taker: _Taker
) -> SessionHead:
    """Return the head that a session has under a new holder."""
    if seen is not None and not seen[0].deleted:
        return _under(seen[0], taker)
    now = time.time()
    new = SessionHead(
        key=key,
        epoch=taker.epoch,
        owner=taker.owner,
        life=end.life,
        crc=layout.life_seed(layout.folder_of(key), end.life),
        created_at=now,
    )
    return _under(new, taker)


def _under(head: SessionHead, taker: _Taker) -> SessionHead:
    return msgspec.structs.replace(
        head,
        epoch=taker.epoch,
        owner=taker.owner,
        host=taker.host,
        pid=taker.pid,
        released=False,
        updated_at=time.time(),
        nonce=random_id(8),
    )


def _granted(
    bucket: Bucket,
    place: str,
    seen: tuple[SessionHead, str] | None,
    head: SessionHead,
    taker: _Taker,
) -> tuple[SessionHead, str]:
    """Make the head say what the log says, then it is so; or take the epoch record back."""
    key, begun = head.key, layout.first_of(place)
    for _ in range(_TRIES):
        tag = replaced(bucket, key, seen, head)
        if tag is not None:
            return head, tag
        seen = reader.look(bucket, key)
        now = None if seen is None else seen[0]
        if now is None:
            continue
        if now.epoch > taker.epoch or (now.epoch == taker.epoch and now.owner != taker.owner):
            raise _held(key, now.epoch, taker.epoch - 1)
        if now.epoch < taker.epoch and (now.life != head.life or now.deleted or now.floor >= begun):
            bucket.remove([place])
            raise _held(key, now.epoch, taker.epoch - 1)
        head = _under(now, taker)
    message = f"{key} cannot be taken: its head changes each time; try again"
    raise StoreUnavailableError(message, key=key)


def replaced(
    bucket: Bucket, key: SessionKey, seen: tuple[SessionHead, str] | None, head: SessionHead
) -> str | None:
    """Replace the head that was seen; return the new tag.

    None: it is another by now, so this was not done and will not be. A request without an
    answer may still arrive. So the same bytes are sent again, until the head is seen to be ours,
    or another than it was.

    Raises:
        StoreUnavailableError: It is not known whether it was done.

    """
    data = heads.encode(head)
    before = None if seen is None else seen[1]
    trouble = StoreUnavailableError(f"the head of {key} can be neither replaced nor read", key=key)
    for _ in range(_RESENDS):
        try:
            tag = _written(bucket, key, data, before)
        except StoreUnavailableError as error:
            if error.facts.get("unwritten"):
                raise
            trouble, tag = error, None
        if tag is not None:
            return tag
        now = reader.look(bucket, key)
        if now is not None and now[0].nonce == head.nonce:
            return now[1]
        if (None if now is None else now[1]) != before:
            return None
    raise trouble


def _written(bucket: Bucket, key: SessionKey, data: bytes, before: str | None) -> str | None:
    name = f"{layout.folder_of(key)}/head"
    return bucket.create(name, data) if before is None else bucket.replace(name, data, before)


def _help(bucket: Bucket, key: SessionKey, seen: tuple[SessionHead, str] | None, end: _End) -> None:
    """Make known an epoch whose taker has not done so, perhaps because it died."""
    newest = end.newest
    assert newest is not None
    if seen is None or seen[0].deleted:
        tenants.enter_directory(bucket, key, end.life)
    replaced(bucket, key, seen, _headed(key, seen, end, _Taker(newest.owner, newest.epoch)))


def _held(key: SessionKey, newest: int, after: int) -> LeaseHeldError:
    message = (
        f"{key} is at epoch {newest}, not {after}: look again who holds it, then ask for a "
        "handover or wait"
    )
    return LeaseHeldError(message, key=key, epoch=newest)


def release(bucket: Bucket, writer: ObjectLogWriter) -> None:
    """Say that a holder writes no more; no effect when it is the holder no longer."""
    with writer.folding:
        seen = writer.seen or reader.look(bucket, writer.key)
        for _ in range(_TRIES):
            if seen is None or seen[0].epoch != writer.epoch:
                return
            head = msgspec.structs.replace(seen[0], released=True, nonce=random_id(8))
            if replaced(bucket, writer.key, seen, head) is not None:
                return
            seen = reader.look(bucket, writer.key)
