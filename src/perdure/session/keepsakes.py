"""What a session keeps of history that is not in a log any more: blobs, by content.

Written before the record that names them, read when somebody looks that far back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing

import msgspec

from perdure.codec.json import decode, encode
from perdure.errors import CorruptRecordError
from perdure.model.base import Base, Index, Piece
from perdure.model.keys import SessionKey
from perdure.model.manifest import Folded, Manifest
from perdure.session import heirlooms
from perdure.session.pieces import Cutter, name_of, records_of
from perdure.store import Document, Documents, LogChunk, Store

__all__ = ["folded", "keep_documents", "keep_history", "read"]


async def keep_history(store: Store, key: SessionKey, *, after: int, upto: int) -> str:
    """Make a session's records durable as blobs; return the name of their index, "" for none.

    Raises:
        NotStorableError: The store keeps no blobs.

    """
    cutter, pieces = Cutter(), list[Piece]()
    async with aclosing(store.read_log(key, after=after, before=upto + 1)) as log:
        async for chunk in log:
            for record in chunk.records:
                pieces += await _put(store, key.tenant, cutter.feed(record))
    pieces += await _put(store, key.tenant, cutter.rest())
    if not pieces:
        return ""
    index = encode(Index(tuple(pieces)))
    await store.put_blobs(key.tenant, {name_of(index): index})
    return name_of(index)


async def _put(store: Store, tenant: str, piece: tuple[int, int, bytes] | None) -> list[Piece]:
    if piece is None:
        return []
    first, last, data = piece
    name = name_of(data)
    await store.put_blobs(tenant, {name: data})
    return [Piece(first, last, name)]


async def keep_documents(store: Store, tenant: str, documents: Documents) -> str:
    """Make documents durable as blobs; return the name of their list, "" for none."""
    manifest = documents.manifest
    if manifest is None or documents.damaged:
        return ""
    await store.put_blobs(tenant, {name_of(one.data): one.data for one in documents.found.values()})
    names = {name: name_of(one.data) for name, one in documents.found.items()}
    listed = {
        name: msgspec.structs.replace(manifest.documents[name], sha256=names[name])
        for name in names
    }
    whole = Folded(manifest.as_of_seq, listed, manifest.counters, manifest.about)
    data = encode(whole)
    await store.put_blobs(tenant, {name_of(data): data})
    return name_of(data)


async def folded(
    store: Store, key: SessionKey, base: Base, names: Collection[str] | None
) -> Documents:
    """Return the documents that a base keeps, as those of the session."""
    if not base.folded:
        return Documents()
    kept = decode(await _get(store, key, base.folded), Folded)
    manifest = Manifest(
        key=key,
        epoch=0,
        as_of_seq=kept.as_of_seq,
        counters=kept.counters,
        documents=kept.documents,
        about=kept.about,
    )
    found = {
        name: Document(await _get(store, key, one.sha256), one.as_of_seq)
        for name, one in kept.documents.items()
        if names is None or name in names
    }
    return heirlooms.handed_down(Documents(manifest, found), key, base)


async def read(
    store: Store, key: SessionKey, base: Base, after: int, before: int, *, reverse: bool
) -> AsyncGenerator[LogChunk, None]:
    """Read records that a base keeps, ``after < seq < before``."""
    index = decode(await _get(store, key, base.kept), Index)
    pieces = [one for one in index.pieces if one.last > after and one.first < before]
    for piece in reversed(pieces) if reverse else pieces:
        data = await _get(store, key, piece.blob)
        records = tuple(one for one in records_of(data) if after < one.seq < before)
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
