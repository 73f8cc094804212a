"""Leases: the epoch record's place in the log decides who writes; the head reports it.

*Acquiring*: read the head, list the commits after its floor, read the newest one; create the epoch
record under the next seq. That name can be created once (see `perdure.stores.objects.log`), so one
process wins; the others start again. Then the head is replaced by compare-and-swap, and only then
is the lease granted. If the head is still the one that was read first, nothing was merged since,
and the epoch record is at the end of the log. If it changed, its floor decides: a name that merging
made free is below it, and the record that was created there is removed again.

A process that dies between the two steps leaves an epoch that the head does not have. The old
holder then finds its next name taken, and the next process that acquires the lease first brings the
head up to that epoch.

Functions block; each is part of one call in a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from perdure._lib.ids import random_id
from perdure.errors import CorruptRecordError, LeaseLostError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.manifest import (
    Beginning,
    epoch_payload,
    lease_held,
    lease_lost,
)
from perdure.records.records import EPOCH, Entry
from perdure.store import About, Documents, Held, LeaseState, Terms
from perdure.stores.objects import layout, reader
from perdure.stores.objects.bucket import Bucket, ListedObject, StoredObject
from perdure.stores.objects.layout import Commit, Header, SessionHead
from perdure.stores.objects.log import ObjectLogWriter

_OWNERS = 1000
_ATTEMPTS = 50
_RESENDS = 5


class HeartbeatFile(msgspec.Struct):
    """An owner's heartbeat."""

    owner: str
    beat: int
    host: str = ""
    pid: int = 0


class _NewHolder(msgspec.Struct, frozen=True):
    """A process that acquires a session, and its epoch."""

    owner: str
    epoch: int
    host: str = ""
    pid: int = 0


class _LogEnd(msgspec.Struct, frozen=True):
    """The end of a log."""

    generation: int
    seq: int = 0
    crc: int = 0
    newest: Header | None = None
    """The newest commit's header."""
    after: int = 0
    """The record after which all commits were read; 0: all of the log."""
    loose: tuple[ListedObject, ...] = ()
    known: Mapping[str, Commit] = {}
    """The loose commits of it that were read, by name."""


class Acquired(msgspec.Struct, frozen=True):
    """A lease, and what was read with it."""

    writer: ObjectLogWriter
    record: bytes
    """The payload of the epoch record."""
    documents: Documents | None
    """Those that the terms name, if they could be read."""
    plan: reader.ObjectReadPlan | None
    """The end of the log; None if something else was written meanwhile, or it is a draft."""
    replaced: SessionHead | None = None
    """The draft that was taken over, or the deleted session, until what it has is removed."""


def lease_state(bucket: Bucket, current: tuple[SessionHead, str] | None) -> LeaseState | None:
    """Return the state of a lease; the heartbeat is read only of an owner that holds it."""
    if current is None:
        return None
    head = current[0]
    name = layout.owner_name(head.owner)
    is_free = head.released or head.is_over
    heartbeat = None if is_free else bucket.get(name)
    return LeaseState(
        epoch=head.epoch,
        owner=head.owner,
        released=head.released,
        alive=False if heartbeat is None and not is_free else None,
        beat=0 if heartbeat is None else _number(heartbeat.tag),
        deleted=head.deleted,
        host=head.host,
        pid=head.pid,
        listed=name,
        draft=head.draft,
    )


def beats(bucket: Bucket, owner: str) -> dict[str, int] | None:
    """Return the heartbeats of other owners by their objects' names: one listing for all."""
    own = layout.owner_name(owner)
    page = next(bucket.pages(layout.OWNERS), [])[:_OWNERS]
    if not all(entry.tag for entry in page):
        return None
    return {entry.name: _number(entry.tag) for entry in page if entry.name != own}


def _number(tag: str) -> int:
    """Return an object's tag as a number, which changes with each write."""
    return int.from_bytes(hashlib.sha256(tag.encode()).digest()[:6], "big")


def acquire(bucket: Bucket, key: SessionKey, terms: Terms, owner: str) -> Held | Acquired:
    """Acquire a session's lease with the next epoch, if the terms allow it.

    Raises:
        LeaseHeldError: Another process was faster.
        UnsupportedVersionError: Its documents have a newer format.

    """
    folder, new = layout.folder_of(key), terms.beginning
    for attempt in range(_ATTEMPTS):
        # 1. Who has it?
        current = reader.read_head(bucket, key)
        holder = lease_state(bucket, current)
        if not terms.allows(holder):
            return Held(holder)
        after = 0 if holder is None else holder.epoch
        new_holder = _NewHolder(owner, after + 1, platform.node(), os.getpid())
        head = None if current is None else current[0]
        created = head is None or head.deleted
        facts = {"host": new_holder.host, "pid": new_holder.pid}
        payload = epoch_payload(
            owner, new.base if created else None, **facts, at=time.time(), id=random_id(8)
        )
        record = Entry(EPOCH, payload)
        is_hidden = head is not None and head.hidden
        # Where the log does not begin at 1, or its head is hidden, the head decides first.
        if is_hidden or (created and (new.first != 1 or new.draft is not None)):
            acquired = _begin_hidden(bucket, key, current, record, new, new_holder)
            if acquired is not None:
                return acquired
            continue
        # 2. Where does its log end? Only the first attempt guesses.
        documents, end = _documents_and_end(bucket, folder, head, terms, guess=not attempt)
        end = end or _log_end(bucket, key, folder, head)
        if end is None:
            continue
        # Its process died before the head had its epoch: finish that, then start again.
        if end.newest is not None and end.newest.epoch > after:
            _publish_epoch(bucket, key, current, end)
            continue
        # 3. Take the place after it: of several processes, one can.
        end = _append_epoch_record(bucket, folder, end, record, new_holder)
        if end is None:
            continue
        if end.seq == 1:
            add_to_directory(bucket, key, end.generation, new.about)
        # 4. Publish that in the head.
        wanted = _next_head(key, current, end, new_holder)
        name = layout.log_name(folder, end.generation, end.seq)
        granted = _publish_head(bucket, name, current, wanted, new_holder)
        plan = None
        if granted[0].nonce == wanted.nonce:
            # The head that was read was replaced, so nothing was merged since it was read.
            plan = reader.ObjectReadPlan(*granted, end.loose, end.after, end.known)
        writer = ObjectLogWriter(bucket, key, granted, end.seq, end.crc)
        replaced = head if created else None
        return Acquired(writer, record.payload, documents, plan, replaced=replaced)
    raise StoreUnavailableError(
        f"the lease of {key} was not acquired: its log kept growing; try again", key=key
    )


def _documents_and_end(
    bucket: Bucket, folder: str, head: SessionHead | None, terms: Terms, *, guess: bool
) -> tuple[Documents | None, _LogEnd | None]:
    """Read the documents that the terms name, and meanwhile where the log probably ends.

    Before the lease is granted: if the head is the same then, the documents are.
    """

    def find_end() -> _LogEnd | None:
        return _guessed_end(bucket, folder, head) if guess else None

    if head is None:
        return Documents(), find_end()
    try:
        return reader.documents_beside(bucket, head, terms.names, find_end)
    except CorruptRecordError:  # of documents, raised when they are read; or of the end
        return None, find_end()


def _begin_hidden(
    bucket: Bucket,
    key: SessionKey,
    current: tuple[SessionHead, str] | None,
    record: Entry,
    new: Beginning,
    new_holder: _NewHolder,
) -> Acquired | None:
    """Begin a log where no earlier one continues; None: start again.

    The head decides, not the log: where it begins differs. It stays hidden until there is an epoch
    record, and a draft beyond that.
    """
    generation = new_holder.epoch
    head = _new_head(key, new_holder, generation)
    head = msgspec.structs.replace(
        head, deleted=True, hidden=True, floor=new.first - 1, draft=new.draft
    )
    # Listed before it exists: one whose process is killed is found all the same.
    if new.draft is not None:
        bucket.put(layout.draft_name(key, generation), layout.with_checksum(key))
    tag = replace_head(bucket, key, current, head)
    if tag is None:
        return None
    name = layout.log_name(layout.folder_of(key), generation, new.first)
    data, crc = layout.encode(
        [record], first=new.first, epoch=generation, owner=new_holder.owner, seed=head.crc
    )
    if bucket.create(name, data) is None:
        stored = bucket.get(name)
        if stored is not None and stored.data == layout.GONE:
            raise lease_held(key, generation - 1, generation + 1)  # it was taken over already
        bucket.put(name, data)  # of a process that began at 1, and whose head came too late
    plan = None
    # No draft: it is shown as soon as its record is there.
    if new.draft is None:
        add_to_directory(bucket, key, generation, new.about, new.first)
        shown = msgspec.structs.replace(head, deleted=False, hidden=False, nonce=random_id(8))
        tag = replace_head(bucket, key, (head, tag), shown)
        if tag is None:
            raise lease_held(key, generation - 1, generation + 1)
        head = shown
        loose = (ListedObject(name, len(data), 0.0),)
        known = {name: layout.commit(name, new.first, data)}
        plan = reader.ObjectReadPlan(head, tag, loose, 0, known)
    writer = ObjectLogWriter(bucket, key, (head, tag), new.first, crc)
    replaced = None if current is None else current[0]
    return Acquired(writer, record.payload, Documents(), plan, replaced=replaced)


def _guessed_end(bucket: Bucket, folder: str, head: SessionHead | None) -> _LogEnd | None:
    """Return where the log probably ends, without a listing; None if nothing says it.

    A wrong guess does no harm. The name after the end of a log is taken forever by the next epoch
    record, so an epoch record cannot be created anywhere but there.
    """
    if head is None:
        return _LogEnd(1, crc=layout.generation_seed(folder, 1))
    if not head.released or head.deleted or not head.newest:
        return None
    name = layout.log_name(folder, head.generation, head.newest)
    return _end_at(bucket, head, head.generation, name)


def _log_end(
    bucket: Bucket, key: SessionKey, folder: str, head: SessionHead | None
) -> _LogEnd | None:
    """Return the end of the log, for the epoch record to follow; None: start again."""
    if head is None or head.deleted:
        generation = 1 if head is None else head.epoch + 1
        loose = bucket.listed(layout.log_prefix(folder, generation))
        if not loose:
            return _LogEnd(generation, crc=layout.generation_seed(folder, generation))
        return _end_at(bucket, None, generation, loose[-1].name, loose)
    loose = reader.loose_commits(bucket, key, head)
    if loose:
        return _end_at(bucket, head, head.generation, loose[-1].name, loose)
    latest = reader.read_head(bucket, key)
    if latest is not None and latest[0].floor == head.floor:
        reader.require_first_commit(key, head, loose)
    return None


def _end_at(
    bucket: Bucket,
    head: SessionHead | None,
    generation: int,
    name: str,
    loose: Sequence[ListedObject] = (),
) -> _LogEnd | None:
    """Return the end of a log, whose newest commit has this name; None if it was merged away.

    Without a listing of the *loose* commits, nothing is known of the records before that one.
    """
    try:
        commit = reader.whole_commit(bucket, name)
    except reader.ObjectMergedAway:
        return None
    last, after = commit.header.last, 0
    if head is not None:
        reader.require_folded(head, last)
    if not loose:
        loose, after = [ListedObject(name, len(commit.lines), 0.0)], commit.header.first - 1
    known = {name: commit}
    return _LogEnd(generation, last, commit.crc, commit.header, after, tuple(loose), known)


def _append_epoch_record(
    bucket: Bucket, folder: str, end: _LogEnd, record: Entry, new_holder: _NewHolder
) -> _LogEnd | None:
    """Create the epoch record at the end of the log; return the new end, None: start again.

    While a holder continues to append, its commits are followed one by one (two requests for each
    one of the holder) until it pauses that long.
    """
    for _ in range(_ATTEMPTS):
        first = end.seq + 1
        name = layout.log_name(folder, end.generation, first)
        data, _ = layout.encode(
            [record], first=first, epoch=new_holder.epoch, owner=new_holder.owner, seed=end.crc
        )
        tag = bucket.create(name, data)
        # A taken name is ours, if an answer was lost; or a commit of the holder; or a faster
        # process's.
        stored = bucket.get(name) if tag is None else StoredObject(data, tag)
        try:
            commit = reader.commit_in(name, stored)
        except reader.ObjectMergedAway:  # or deleted
            return None
        is_ours = stored is not None and stored.data == data
        if commit.header.epoch >= new_holder.epoch and not is_ours:
            return None  # another process was faster
        end = msgspec.structs.replace(
            end,
            seq=commit.header.last,
            crc=commit.crc,
            newest=commit.header,
            loose=(*end.loose, ListedObject(name, len(data), 0.0)),
            known={**end.known, name: commit},
        )
        if is_ours:
            return end
    return None


def _next_head(
    key: SessionKey, current: tuple[SessionHead, str] | None, end: _LogEnd, new_holder: _NewHolder
) -> SessionHead:
    """Return the head of a session under a new holder."""
    if current is not None and not current[0].deleted:
        return _with_holder(current[0], new_holder)
    return _new_head(key, new_holder, end.generation)


def _new_head(key: SessionKey, holder: _NewHolder, generation: int) -> SessionHead:
    """Return the first head of a generation."""
    seed = layout.generation_seed(layout.folder_of(key), generation)
    head = SessionHead(
        key=key,
        epoch=holder.epoch,
        owner=holder.owner,
        generation=generation,
        crc=seed,
        created_at=time.time(),
    )
    return _with_holder(head, holder)


def _with_holder(head: SessionHead, holder: _NewHolder) -> SessionHead:
    return msgspec.structs.replace(
        head,
        epoch=holder.epoch,
        owner=holder.owner,
        host=holder.host,
        pid=holder.pid,
        released=False,
        newest=0,
        updated_at=time.time(),
        nonce=random_id(8),
    )


def _publish_head(
    bucket: Bucket,
    name: str,
    current: tuple[SessionHead, str] | None,
    head: SessionHead,
    new_holder: _NewHolder,
) -> tuple[SessionHead, str]:
    """Replace the head so that it matches the log, or remove the epoch record again."""
    key, epoch_seq = head.key, layout.first_of(name)
    for _ in range(_ATTEMPTS):
        tag = replace_head(bucket, key, current, head)
        if tag is not None:
            return head, tag
        current = reader.read_head(bucket, key)
        latest = None if current is None else current[0]
        if latest is None:
            continue
        # Case 1: another process has it by now.
        if latest.epoch > new_holder.epoch or (
            latest.epoch == new_holder.epoch and (latest.owner != new_holder.owner or latest.hidden)
        ):
            raise lease_held(key, new_holder.epoch - 1, latest.epoch)
        # Case 2: merging had made the name free again, so the record is in no log.
        if latest.epoch < new_holder.epoch and (
            latest.generation != head.generation or latest.deleted or latest.floor >= epoch_seq
        ):
            bucket.remove([name])
            raise lease_held(key, new_holder.epoch - 1, latest.epoch)
        # Case 3: the old holder has replaced its head meanwhile: take the lease in that one.
        head = _with_holder(latest, new_holder)
    raise StoreUnavailableError(
        f"the lease of {key} was not acquired: its head kept changing; try again", key=key
    )


def replace_head(
    bucket: Bucket, key: SessionKey, current: tuple[SessionHead, str] | None, head: SessionHead
) -> str | None:
    """Replace the head that was read; return the new tag.

    None: the head has changed, so the replacement did not happen and never will. A request whose
    response was lost may still arrive. So the same bytes are sent again, until the head is either
    ours or another one.

    Raises:
        StoreUnavailableError: It is not known whether it was replaced.

    """
    data = layout.with_checksum(head)
    name = f"{layout.folder_of(key)}/head"
    before = None if current is None else current[1]
    failure = StoreUnavailableError(f"the head of {key} can be neither replaced nor read", key=key)
    for _ in range(_RESENDS):
        tag = None
        try:
            if before is None:
                tag = bucket.create(name, data)
            else:
                tag = bucket.replace(name, data, before)
        except StoreUnavailableError as error:
            if error.facts.get("unwritten"):
                raise
            failure = error
        if tag is not None:
            return tag
        latest = reader.read_head(bucket, key)
        # It was replaced after all, and the answer was lost.
        if latest is not None and latest[0].nonce == head.nonce:
            return latest[1]
        # Another head: the request can replace nothing any more, since its tag is past.
        if (None if latest is None else latest[1]) != before:
            return None
    raise failure


def _publish_epoch(
    bucket: Bucket, key: SessionKey, current: tuple[SessionHead, str] | None, end: _LogEnd
) -> None:
    """Publish an epoch in the head whose process has not done so, perhaps since it died."""
    assert end.newest is not None
    if current is None or current[0].deleted:
        add_to_directory(bucket, key, end.generation)
    holder = _NewHolder(end.newest.owner, end.newest.epoch)
    replace_head(bucket, key, current, _next_head(key, current, end, holder))


def update_head(
    bucket: Bucket,
    writer: ObjectLogWriter,
    change: Callable[[SessionHead], SessionHead | None],
) -> tuple[SessionHead, str]:
    """Replace the head by what *change* makes of it, as its holder; return it with its tag.

    If *change* returns None, the head stays. The caller has the writer's ``head_lock``.

    Raises:
        LeaseLostError: Another process has the session, or it was deleted.

    """
    key = writer.key
    current = writer.stored_head or reader.read_head(bucket, key)
    writer.stored_head = None  # until it is known which head is stored
    for _ in range(_ATTEMPTS):
        if current is None or current[0].epoch != writer.epoch or current[0].is_over:
            writer.has_lost_lease = True
            raise lease_lost(key, writer.epoch, newest=current[0].epoch if current else None)
        try:
            wanted = change(current[0])
        except CorruptRecordError:
            latest = reader.read_head(bucket, key)
            if latest is not None and latest[1] == current[1]:
                raise
            current = latest  # a later holder merges this log
            continue
        if wanted is None:
            writer.stored_head = current
            return current
        wanted = msgspec.structs.replace(wanted, nonce=random_id(8))
        tag = replace_head(bucket, key, current, wanted)
        if tag is not None:
            writer.stored_head = (wanted, tag)
            return wanted, tag
        current = reader.read_head(bucket, key)
    raise StoreUnavailableError(f"the head of {key} changed at each attempt: try again", key=key)


def publish(bucket: Bucket, writer: ObjectLogWriter) -> None:
    """Make a draft a session, as its holder.

    Raises:
        LeaseLostError: Another process has it, or it was deleted.

    """

    def shown(head: SessionHead) -> SessionHead | None:
        if not head.hidden:
            return None
        add_to_directory(bucket, writer.key, writer.generation)
        now = time.time()
        return msgspec.structs.replace(head, deleted=False, hidden=False, updated_at=now)

    with writer.head_lock:
        if writer.stored_head is not None and not writer.stored_head[0].hidden:
            writer.stored_head = None  # published already: it is read again, to see who has it
        update_head(bucket, writer, shown)
    # Last: a kill before this leaves a name that no listing takes for a draft.
    bucket.remove([layout.draft_name(writer.key, writer.generation)])


def release(bucket: Bucket, writer: ObjectLogWriter) -> None:
    """Mark a lease as released; without effect for a past epoch."""

    def released(head: SessionHead) -> SessionHead | None:
        if head.released:
            return None
        return msgspec.structs.replace(head, released=True, newest=writer.newest)

    with writer.head_lock, contextlib.suppress(LeaseLostError):
        update_head(bucket, writer, released)


# The directory, in which a lease registers its session


_PREFIXES = ("dir/", "blobs/", "quarantine/")


class _Tenant(msgspec.Struct):
    name: str


def add_to_directory(
    bucket: Bucket, key: SessionKey, generation: int, about: About | None = None, seq: int = 1
) -> None:
    """Add a generation of a session to the directory, with labels as of a record."""
    record_tenant(bucket, key.tenant)
    entry = layout.directory_entry(key, 0 if about is None else seq, 0, about)
    bucket.put(layout.directory_name(key, generation), entry)


def record_tenant(bucket: Bucket, tenant: str) -> None:
    """Store a tenant's name if the names of objects do not contain it."""
    name = layout.tenant_name(tenant)
    if layout.tenant_of(name) is None:
        bucket.put(f"tenants/{name}", layout.with_checksum(_Tenant(str(tenant))))


def tenants(bucket: Bucket) -> list[str]:
    """List the tenants that have sessions or blobs."""
    names = {name for folders in bucket.many(bucket.folders, _PREFIXES) for name in folders}
    found_tenants = bucket.many(lambda name: _tenant(bucket, name), names)
    return sorted(tenant for tenant in found_tenants if tenant is not None)


def _tenant(bucket: Bucket, name: str) -> str | None:
    tenant = layout.tenant_of(name)
    if tenant is not None:
        return tenant
    place = f"tenants/{name}"
    stored = bucket.get(place)
    return None if stored is None else layout.decode_object(place, stored.data, _Tenant).name
