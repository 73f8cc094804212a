"""Content-addressed storage for history that was moved out of a log: a parent's, or a pruned one.

Blobs are written before the record that names them, and read when a caller reads that far back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing

import msgspec

from perdure.errors import CorruptRecordError, FormatError, HistoryPrunedError
from perdure.memory.context import SNAPSHOT, Snapshot
from perdure.memory.documents import SESSION, WholeSessionDocument
from perdure.records.chunks import RunCutter, name_of, records_of
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import (
    FoldedDocument,
    FoldedDocuments,
    HistoryIndex,
    HistorySegment,
    Manifest,
    Origin,
)
from perdure.store import Document, Documents, LogChunk, Store


def to_global_seq(have: Documents, at: int) -> Documents:
    """Return a session's own documents, numbered after the history before its log."""
    if have.manifest is None or not at:
        return have
    records = {
        name: Document(record.data, record.as_of_seq + at) for name, record in have.found.items()
    }
    return msgspec.structs.replace(have, manifest=_shifted(have.manifest, at), found=records)


def up_to(have: Documents, seq: int) -> Documents:
    """Return documents as of a record up to *seq*, none if they are of a later one.

    A killed fold leaves documents that are newer than their manifest: those are unusable.
    """
    if have.manifest is None or have.manifest.as_of_seq > seq:
        return Documents()
    late = {name for name, segment in have.found.items() if segment.as_of_seq > seq}
    if not late:
        return have
    return msgspec.structs.replace(
        have,
        found={name: segment for name, segment in have.found.items() if name not in late},
        damaged=(*have.damaged, *sorted(late)),
        why={**have.why, **dict.fromkeys(late, f"it is newer than record {seq}")},
    )


def to_local_seq(manifest: Manifest, base: Origin) -> Manifest:
    """Return a manifest as the inner store takes it, numbered by the session's own log."""
    return msgspec.structs.replace(_shifted(manifest, -base.at), base=base)


def _shifted(manifest: Manifest, by: int) -> Manifest:
    documents = {
        name: msgspec.structs.replace(document, as_of_seq=max(document.as_of_seq + by, 0))
        for name, document in manifest.documents.items()
    }
    as_of = max(manifest.as_of_seq + by, 0)
    return msgspec.structs.replace(manifest, as_of_seq=as_of, documents=documents)


def inherit(have: Documents, key: SessionKey, base: Origin) -> Documents:
    """Return another session's documents as those that a session with this key begins with."""
    if have.manifest is None:
        return Documents()
    documents = {name: _renamed(name, document, key) for name, document in have.found.items()}
    listed = dict(have.manifest.documents)
    for name, document in documents.items():
        listed[name] = FoldedDocument.of(document.as_of_seq, document.data)
    manifest = msgspec.structs.replace(
        have.manifest, key=key, epoch=0, documents=listed, base=base, position=msgspec.Raw(b"null")
    )
    return msgspec.structs.replace(have, manifest=manifest, found=documents)


def _renamed(name: str, document: Document, key: SessionKey) -> Document:
    """Return a document with the session's own ids, if it contains ids."""
    try:
        if name == SNAPSHOT:
            snapshot = decode(document.data, Snapshot)
            if (snapshot.agent_id, snapshot.session_id) == (key.agent, key.session):
                return document
            snapshot.agent_id, snapshot.session_id = key.agent, key.session
            return Document(encode(snapshot), document.as_of_seq)
        if name == SESSION:
            described = decode(document.data, WholeSessionDocument)
            if (described.agent_id, described.session_id) == (key.agent, key.session):
                return document
            described.agent_id, described.session_id = key.agent, key.session
            described.tenant = key.tenant
            data = msgspec.json.format(encode(described), indent=2)
            return Document(data, document.as_of_seq)
    except FormatError:
        return document  # the reader finds out, and rebuilds it
    return document


async def keep_history(store: Store, key: SessionKey, *, after: int, upto: int) -> str:
    """Store a session's records as blobs; return the name of their index, "" for none.

    Raises:
        HistoryPrunedError: Records went while they were read: another process has pruned or
            deleted the session.
        NotStorableError: The store has no blobs.

    """
    cutter, pieces, seq = RunCutter(), list[HistorySegment](), 0
    async with aclosing(store.read_log(key, after=after, before=upto + 1)) as log:
        async for chunk in log:
            for record in chunk.records:
                if seq and record.seq != seq + 1:
                    raise _went(key, seq + 1)
                seq = record.seq
                pieces += await _put(store, key.tenant, cutter.feed(record))
    if after < upto != seq:
        raise _went(key, seq + 1)
    pieces += await _put(store, key.tenant, cutter.rest())
    if not pieces:
        return ""
    index = encode(HistoryIndex(tuple(pieces)))
    await store.put_blobs(key.tenant, {name_of(index): index})
    return name_of(index)


def _went(key: SessionKey, seq: int) -> HistoryPrunedError:
    message = f"session {key}: record {seq} went while the history was read: do it again"
    return HistoryPrunedError(message, key=str(key), seq=seq)


async def _put(
    store: Store, tenant: str, piece: tuple[int, int, bytes] | None
) -> list[HistorySegment]:
    if piece is None:
        return []
    first, last, data = piece
    name = name_of(data)
    await store.put_blobs(tenant, {name: data})
    return [HistorySegment(first, last, name)]


async def keep_documents(store: Store, tenant: str, documents: Documents) -> str:
    """Store documents as blobs; return the name of their list, "" for none."""
    manifest = documents.manifest
    if manifest is None or documents.damaged:
        return ""
    await store.put_blobs(
        tenant, {name_of(document.data): document.data for document in documents.found.values()}
    )
    names = {name: name_of(document.data) for name, document in documents.found.items()}
    listed = {
        name: msgspec.structs.replace(manifest.documents[name], sha256=names[name])
        for name in names
    }
    blobs = FoldedDocuments(manifest.as_of_seq, listed, manifest.counters, manifest.about)
    data = encode(blobs)
    await store.put_blobs(tenant, {name_of(data): data})
    return name_of(data)


async def folded(
    store: Store, key: SessionKey, base: Origin, names: Collection[str] | None
) -> Documents:
    """Return the documents that an origin names, as those of the session."""
    if not base.folded:
        return Documents()
    documents_blob = decode(await _get(store, key, base.folded), FoldedDocuments)
    manifest = Manifest(
        key=key,
        epoch=0,
        as_of_seq=documents_blob.as_of_seq,
        counters=documents_blob.counters,
        documents=documents_blob.documents,
        about=documents_blob.about,
    )
    documents = {
        name: Document(await _get(store, key, document.sha256), document.as_of_seq)
        for name, document in documents_blob.documents.items()
        if names is None or name in names
    }
    return inherit(Documents(manifest, documents), key, base)


async def read(
    store: Store, key: SessionKey, base: Origin, after: int, before: int, *, reverse: bool
) -> AsyncGenerator[LogChunk, None]:
    """Read the records that an origin names, ``after < seq < before``."""
    index = decode(await _get(store, key, base.kept), HistoryIndex)
    pieces = [record for record in index.pieces if record.last > after and record.first < before]
    for piece in reversed(pieces) if reverse else pieces:
        data = await _get(store, key, piece.blob)
        records = tuple(record for record in records_of(data) if after < record.seq < before)
        yield LogChunk(records[::-1] if reverse else records)


async def _get(store: Store, key: SessionKey, name: str) -> bytes:
    data = await store.get_blob(key.tenant, name)
    if data is None:
        message = (
            f"session {key} keeps a part of its history as blob {name}, which is not there: "
            "restore it from a copy"
        )
        raise CorruptRecordError(message, key=str(key), blob=name)
    return data
