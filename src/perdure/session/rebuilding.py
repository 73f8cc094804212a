"""Rebuilding: all documents of a session made anew, from nothing but its log.

What a fold writes is a function of the log's records alone. So whatever became of the
documents, folding the whole log gives them back, and comparing them with such a fold
tells whether they are true. Never changes the log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence

import anyio.to_thread
import msgspec

from perdure.codec.json import decode
from perdure.errors import CorruptRecordError, FormatError
from perdure.memory.context import SNAPSHOT, Snapshot
from perdure.memory.documents import names_of
from perdure.model.keys import SessionKey
from perdure.model.manifest import Manifest
from perdure.model.records import Record
from perdure.restore.ladder import require_plain
from perdure.restore.quarantine import keep_evidence
from perdure.restore.validity import judged
from perdure.session.folding import Work, manifest_of, put_blobs
from perdure.session.hindsight import base_documents
from perdure.session.lineage import followed
from perdure.session.options import Limits
from perdure.store import Document, Store

__all__ = ["context_bytes_of", "fold_afresh", "rebuild"]


def fold_afresh(
    key: SessionKey,
    records: Sequence[Record],
    *,
    limits: Limits,
    began: Mapping[str, Document] | None = None,
) -> dict[str, bytes]:
    """Return the documents that a log amounts to, from its first record on.

    The log of a pruned session goes on from documents: those that it *began* with.
    """
    return _folded(Work(key, began or {}, list(records), records[-1].seq, limits))


def _folded(work: Work) -> dict[str, bytes]:
    touched = {name for record in work.records for name in names_of(record)}
    documents = work.documents(touched)
    kept = {name: one.data for name, one in work.old.items() if name not in documents}
    return {**kept, **{name: data for name, data in documents.items() if data is not None}}


def context_bytes_of(snapshot: bytes | None) -> int:
    """Return how much of the working context a stored snapshot holds, 0 if that is unknown.

    With this as the limit, a fresh fold cuts where the stored one was cut.
    """
    try:
        stored = decode(snapshot or b"", Snapshot)
    except FormatError:
        return 0
    return sum(len(bytes(raw)) for raw in stored.messages[int(stored.pinned) :])


async def rebuild(
    store: Store,
    key: SessionKey,
    *,
    epoch: int,
    limits: Limits,
    wrong: Collection[str] = (),
) -> Manifest:
    """Write all documents anew, as the holder of an epoch; return the new manifest.

    The snapshot keeps at least as much of the context as the stored one holds. What lay there is
    kept as evidence where it could not be used, or is *wrong* by the caller's judgement.

    Raises:
        CorruptRecordError: The log itself is damaged before its tail, or empty.
        LeaseLostError: The epoch is not the newest any more.
        ConfigError: It is encrypted, and the store was opened without its key.

    """
    store = followed(store)
    began = (await base_documents(store, key)).found
    have = judged(await store.read_documents(key, None), key)
    require_plain(have.manifest, key)
    stored = have.found.get(SNAPSHOT)
    held = context_bytes_of(None if stored is None else stored.data)
    limits = msgspec.structs.replace(limits, context_bytes=max(limits.context_bytes, held))
    records = await _read_all(store, key)
    if not records:
        message = f"session {key} has no records to rebuild from: check its id"
        raise CorruptRecordError(message, key=str(key))
    work = Work(key, began, records, records[-1].seq, limits)
    documents = await anyio.to_thread.run_sync(_folded, work)
    remains = {name: have.found[name].data for name in wrong if name in have.found}
    have = msgspec.structs.replace(have, remains={**remains, **have.remains})
    await keep_evidence(store, key, have)
    await put_blobs(store, key.tenant, work.blobs)
    manifest = manifest_of(key, epoch, records[-1].seq, None, documents)
    await store.write_documents(key, documents, manifest)
    return manifest


async def _read_all(store: Store, key: SessionKey) -> list[Record]:
    records: list[Record] = []
    async with contextlib.aclosing(store.read_log(key)) as log:
        async for chunk in log:
            records.extend(chunk.records)
    return records
