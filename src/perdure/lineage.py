"""Sessions of releases before 0.1.0 that are numbered after a base: forks, copies and renames.

The log of such a session begins with number 1 and continues other records: those of its parent, up
to ``base.at``, or those that blobs hold. It is read here under the numbers that its records refer
to. Such a session can be deleted, forgotten, and made plain by `migrate`; it is never written.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

from msgspec.structs import replace

from perdure.errors import CorruptRecordError, LeaseLostError, SessionError
from perdure.records.chunks import records_of
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import ForkNote, HistoryIndex, Origin, RestoreData, origin_in
from perdure.records.records import FORK, HOLDER_KINDS, Record
from perdure.store import Document, Documents, LogChunk, Store, first_record, record_at
from perdure.stores.delegate import DelegatingStore

_ALL = 2**62


async def base_of(store: Store, key: SessionKey, read: RestoreData) -> Origin | None:
    """Return what comes before a session's own log; None for most sessions.

    Its manifest was *read*, and maybe the beginning of its log with it.
    """
    manifest = read.documents.manifest
    if manifest is not None:
        is_old = manifest.base is not None and manifest.base.at > 0
        return await newest_base(store, key) or manifest.base if is_old else manifest.base
    if read.records is not None and read.after == 0:
        begins_elsewhere = _begins_elsewhere(read.records)
    else:
        begins_elsewhere, records = None, list[Record]()
        async with aclosing(store.read_log(key, limit=64)) as log:
            async for chunk in log:
                records += chunk.records
                begins_elsewhere = _begins_elsewhere(records)
                if begins_elsewhere is not None:
                    break
    return await newest_base(store, key) if begins_elsewhere else None


def _begins_elsewhere(records: Sequence[Record]) -> bool | None:
    """Return whether something comes before the first records of a log; None if unknown yet."""
    if records and records[0].seq > 1:
        return True
    for record in records:
        if origin_in(record) is not None:
            return True
        if record.kind not in HOLDER_KINDS:
            return False
    return None


async def newest_base(store: Store, key: SessionKey) -> Origin | None:
    """Return the newest base that a session's own log names."""
    log = store.read_log(key, reverse=True)
    record = await first_record(log, lambda record: origin_in(record) is not None)
    return None if record is None else origin_in(record)


def require_plain(key: SessionKey, base: Origin | None) -> None:
    """Raise SessionError for a session that is numbered after a base."""
    if base is not None and base.at:
        message = (
            f"session {key} is a fork, copy or rename of a release before 0.1.0, which can be read "
            "and not written: make it plain with `perdure migrate`, or fork it"
        )
        raise SessionError(message, key=str(key), at=base.at)


async def above(store: DelegatingStore, key: SessionKey, base: Origin) -> Origin | None:
    """Return the base of the session whose records another one continues, as its *base* says.

    CorruptRecordError if there are no such records of its own, as where sessions of a stranger's
    store follow each other. *store* reads whole logs.
    """
    parent = base.parent
    assert parent is not None
    read = RestoreData(await store.inner.read_documents(parent, ()))
    theirs = await base_of(store.inner, parent, read)
    if theirs is None or theirs.parent is None or theirs.at < base.at:
        point = await record_at(store, parent, base.at)
        if point is not None and point.epoch == base.epoch:
            return theirs
    message = (
        f"session {key} continues record {base.at} of {parent}, which does not exist, or not any "
        f"more: restore that session from a copy, or remove this one with `perdure forget "
        f"{key.agent}`"
    )
    raise CorruptRecordError(message, key=str(key), parent=str(parent), at=base.at)


async def read(
    store: DelegatingStore,
    key: SessionKey,
    base: Origin,
    after: int,
    before: int | None,
    limit: int | None,
    *,
    reverse: bool,
) -> AsyncGenerator[LogChunk, None]:
    """Read a session's records as ``read_log`` does; *store* reads whole logs."""
    at, left = base.at, _ALL if limit is None else limit
    last = at + 1 if before is None else min(before, at + 1)
    before_own, after_own = None if before is None else max(before - at, 1), max(after - at, 0)
    own = store.inner.read_log(key, after=after_own, before=before_own, reverse=reverse)
    logs = [(own, at)]
    if after < at and base.kept:
        logs.insert(0, (_kept(store, key, base.kept, after, last, reverse=reverse), 0))
    elif after < at and base.parent is not None:
        await above(store, key, base)
        theirs = store.read_log(base.parent, after=after, before=last, reverse=reverse)
        logs.insert(0, (theirs, 0))
    for log, shift in reversed(logs) if reverse else logs:
        async with aclosing(log):
            async for chunk in log:
                some = chunk.records[:left]
                left -= len(some)
                records = tuple(replace(record, seq=record.seq + shift) for record in some)
                yield LogChunk(records, chunk.settled)
                if not left:
                    return


async def _kept(
    store: Store, key: SessionKey, name: str, after: int, before: int, *, reverse: bool
) -> AsyncGenerator[LogChunk, None]:
    pieces = decode(await blob_of(store, key, name), HistoryIndex).pieces
    for piece in reversed(pieces) if reverse else pieces:
        if piece.last > after and piece.first < before:
            records = records_of(await blob_of(store, key, piece.blob))
            wanted = tuple(record for record in records if after < record.seq < before)
            yield LogChunk(wanted[::-1] if reverse else wanted)


async def blob_of(store: Store, key: SessionKey, name: str) -> bytes:
    """Return a blob that a session's history is in."""
    data = await store.get_blob(key.blobs, name)
    if data is None:
        message = (
            f"session {key} keeps a part of its history as blob {name}, which is not there: "
            "restore it from a copy"
        )
        raise CorruptRecordError(message, key=str(key), blob=name)
    return data


def renumbered(have: Documents, at: int) -> Documents:
    """Return a session's own documents as of the records that its log is read with."""
    if have.manifest is None or not at:
        return have
    found = {
        name: Document(document.data, document.as_of_seq + at)
        for name, document in have.found.items()
    }
    listed = {
        name: replace(document, as_of_seq=document.as_of_seq + at)
        for name, document in have.manifest.documents.items()
    }
    as_of_seq = have.manifest.as_of_seq + at
    manifest = replace(have.manifest, as_of_seq=as_of_seq, documents=listed)
    return replace(have, manifest=manifest, found=found)


async def require_unread(
    store: DelegatingStore,
    inner: Store,
    key: SessionKey,
    besides: frozenset[SessionKey] = frozenset(),
) -> None:
    """Raise SessionError if a session is read by a fork of before, *besides* some.

    The notes that it has of its forks stand in its log, or wait for it.
    """
    notes = list[bytes]()
    async with aclosing(inner.read_log(key)) as log:
        async for chunk in log:
            notes += [record.payload for record in chunk.records if record.kind == FORK]
    while (holder := await inner.holder(key)) is not None and not holder.deleted:
        with suppress(LeaseLostError):  # it was just taken over
            waiting = await inner.receive(key, holder.epoch, limit=1_000_000)
            notes += [item.payload for item in waiting if item.kind == FORK]
            break
    for child in sorted({decode(note, ForkNote).child for note in notes} - besides):
        await require_not_read_by(store, inner, key, child)


async def require_not_read_by(
    store: DelegatingStore, inner: Store, key: SessionKey, child: SessionKey
) -> None:
    """Raise SessionError if a session is read by another one, a fork of before."""
    base = await base_of(inner, child, RestoreData(await inner.read_documents(child, ())))
    if base is None or base.parent != key or not base.at:
        return
    with suppress(CorruptRecordError):  # it has nothing of this one
        await above(store, child, base)
        message = (
            f"session {key} is read by {child}, which is a fork of a release before 0.1.0: "
            "make that plain with `perdure migrate`, or forget both at once"
        )
        raise SessionError(message, key=str(key), fork=str(child))
