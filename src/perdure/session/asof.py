"""A session's documents as of an earlier record: folded from what there was up to there."""

from __future__ import annotations

from contextlib import aclosing

import anyio.to_thread
import msgspec

from perdure.errors import ConfigError
from perdure.memory.documents import names_of
from perdure.model.keys import SessionKey
from perdure.model.manifest import Manifest
from perdure.model.records import Record
from perdure.session.folding import Work, manifest_of
from perdure.session.lineage import Lineage
from perdure.session.options import Limits

__all__ = ["FoldedAt", "folded_at", "require_known"]


class FoldedAt(msgspec.Struct, frozen=True):
    """What a session was."""

    data: dict[str, bytes]
    """Its documents by name."""
    manifest: Manifest
    blobs: dict[str, bytes]
    """Large values that they refer to, and that may not be in blobs yet; the log has them."""


async def folded_at(store: Lineage, key: SessionKey, seq: int, limits: Limits) -> FoldedAt:
    """Return a session's documents as of a durable record; nothing of it is changed.

    Raises:
        ConfigError: The history before that record was pruned.

    """
    await require_known(store, key, seq)
    have = await store.documents_upto(key, seq)
    since = 0 if have.manifest is None or have.damaged else have.manifest.as_of_seq
    records: list[Record] = []
    async with aclosing(store.read_log(key, after=since, before=seq + 1)) as log:
        async for chunk in log:
            records += chunk.records
    work = Work(key, have.found, records, seq, limits)
    touched = {name for record in records for name in names_of(record)} | set(have.damaged)
    changed = await anyio.to_thread.run_sync(work.documents, touched)
    manifest = manifest_of(key, 0, seq, have.manifest, changed)
    data = {name: one.data for name, one in have.found.items()}
    data |= {name: new for name, new in changed.items() if new is not None}
    return FoldedAt({name: data[name] for name in manifest.documents}, manifest, work.blobs)


async def require_known(store: Lineage, key: SessionKey, seq: int) -> None:
    """Raise ConfigError if what a session was at a record is not known any more."""
    base = await store.base_of(key)
    if base is not None and seq < base.cut:
        message = (
            f"session {key} was pruned up to record {base.cut}: what it was at record {seq} "
            "is not known any more"
        )
        raise ConfigError(message, key=str(key), seq=seq, cut=base.cut)
