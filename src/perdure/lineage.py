"""Sessions of releases before 0.1.0 that are numbered after a base: forks, copies and renames.

The log of such a session begins with number 1 and continues other records: those of its parent, up
to ``base.at``, or those that blobs hold. It is read here under the numbers that its records refer
to. Such a session can be deleted, forgotten, and made plain by `migrate`; it is never written.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import msgspec

from perdure.errors import CorruptRecordError, LeaseLostError, SessionError
from perdure.records.chunks import records_of
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import ForkNote, HistoryIndex, Manifest, Origin, origin_in
from perdure.records.records import FORK, HOLDER_KINDS, Record
from perdure.store import Document, Documents, LogChunk, PendingItem, Store, first_record

_ALL = 1_000_000


async def base_of(store: Store, key: SessionKey, manifest: Manifest | None) -> Origin | None:
    """Return what comes before a session's own log; None for most sessions."""
    if manifest is not None:
        is_old = manifest.base is not None and manifest.base.at > 0
        return await newest_base(store, key) or manifest.base if is_old else manifest.base
    first = 0
    async with aclosing(store.read_log(key, limit=64)) as log:
        async for chunk in log:
            for record in chunk.records:
                first = first or record.seq
                if first > 1 or origin_in(record) is not None:
                    return await newest_base(store, key)
                if record.kind not in HOLDER_KINDS:
                    return None
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


async def above(store: Store, inner: Store, key: SessionKey, base: Origin) -> Origin | None:
    """Return the base of the session that another one continues.

    Args:
        store: Reads whole logs.
        inner: The store below it.
        key: The session that continues another one's records, which its *base* names.
        base: Its base.

    Raises:
        CorruptRecordError: There are no such records of their own, as where sessions of a
            stranger's store follow each other.

    """
    parent = base.parent
    assert parent is not None
    theirs = await base_of(inner, parent, (await inner.read_documents(parent, ())).manifest)
    if theirs is None or theirs.parent is None or theirs.at < base.at:
        log = store.read_log(parent, after=base.at - 1, before=base.at + 1)
        if await first_record(log, lambda record: record.epoch == base.epoch) is not None:
            return theirs
    message = (
        f"session {key} continues record {base.at} of {parent}, which does not exist, or not any "
        f"more: restore that session from a copy, or remove this one with `perdure forget "
        f"{key.agent}`"
    )
    raise CorruptRecordError(message, key=str(key), parent=str(parent), at=base.at)


async def read(
    store: Store,
    inner: Store,
    key: SessionKey,
    base: Origin,
    after: int,
    before: int | None,
    *,
    reverse: bool,
) -> AsyncGenerator[LogChunk, None]:
    """Read a session's records, ``after < seq < before``; stores and base as for `above`."""
    at = base.at
    upto = at + 1 if before is None else min(before, at + 1)
    for is_own in (True, False) if reverse else (False, True):
        if is_own and (before is None or before > at + 1):
            end = None if before is None else before - at
            log = inner.read_log(key, after=max(after - at, 0), before=end, reverse=reverse)
        elif is_own or after >= at:
            continue
        elif base.kept:
            log = _kept(inner, key, base, after, upto, reverse=reverse)
        elif base.parent is not None:
            await above(store, inner, key, base)
            log = store.read_log(base.parent, after=after, before=upto, reverse=reverse)
        else:
            continue
        async with aclosing(log):
            async for chunk in log:
                records = _shifted(chunk.records, at) if is_own else chunk.records
                yield LogChunk(records, chunk.settled)


def _shifted(records: tuple[Record, ...], at: int) -> tuple[Record, ...]:
    return tuple(msgspec.structs.replace(record, seq=record.seq + at) for record in records)


async def _kept(
    store: Store, key: SessionKey, base: Origin, after: int, before: int, *, reverse: bool
) -> AsyncGenerator[LogChunk, None]:
    index = decode(await blob_of(store, key, base.kept), HistoryIndex)
    pieces = [piece for piece in index.pieces if piece.last > after and piece.first < before]
    for piece in reversed(pieces) if reverse else pieces:
        records = records_of(await blob_of(store, key, piece.blob))
        wanted = tuple(record for record in records if after < record.seq < before)
        yield LogChunk(wanted[::-1] if reverse else wanted)


async def blob_of(store: Store, key: SessionKey, name: str) -> bytes:
    """Return a blob that a session's history is in."""
    data = await store.get_blob(key.tenant, name)
    if data is None:
        message = (
            f"session {key} keeps a part of its history as blob {name}, which is not there: "
            "restore it from a copy"
        )
        raise CorruptRecordError(message, key=str(key), blob=name)
    return data


def renumbered(have: Documents, at: int) -> Documents:
    """Return a session's own documents as of the records that its log is read with."""
    manifest = have.manifest
    if manifest is None or not at:
        return have
    listed = {
        name: msgspec.structs.replace(document, as_of_seq=document.as_of_seq + at)
        for name, document in manifest.documents.items()
    }
    return msgspec.structs.replace(
        have,
        manifest=msgspec.structs.replace(
            manifest, as_of_seq=manifest.as_of_seq + at, documents=listed
        ),
        found={
            name: Document(document.data, document.as_of_seq + at)
            for name, document in have.found.items()
        },
    )


async def require_unread(
    store: Store, inner: Store, key: SessionKey, besides: frozenset[SessionKey] = frozenset()
) -> None:
    """Raise SessionError if a session is read by a fork of before, *besides* some.

    The notes that it has of its forks stand in its log, or wait for it.
    """
    children: set[SessionKey] = set()
    async with aclosing(inner.read_log(key)) as log:
        async for chunk in log:
            for record in chunk.records:
                if record.kind == FORK:
                    children.add(decode(record.payload, ForkNote).child)
    children |= {decode(item.payload, ForkNote).child for item in await _notes(inner, key)}
    for child in sorted(children - besides):
        manifest = (await inner.read_documents(child, ())).manifest
        base = await base_of(inner, child, manifest)
        if base is None or base.parent != key:
            continue
        try:
            await above(store, inner, child, base)
        except CorruptRecordError:  # it has nothing of this one
            continue
        message = (
            f"session {key} is read by {child}, which is a fork of a release before 0.1.0: make "
            f"that plain with `perdure migrate`, or forget both at once"
        )
        raise SessionError(message, key=str(key), fork=str(child))


async def _notes(store: Store, key: SessionKey) -> list[PendingItem]:
    """Return the notes of forks that wait for a session, whoever holds it."""
    while True:
        holder = await store.holder(key)
        if holder is None or holder.deleted:
            return []
        with suppress(LeaseLostError):  # it was just taken over
            waiting = await store.receive(key, holder.epoch, limit=_ALL)
            return [item for item in waiting if item.kind == FORK]
