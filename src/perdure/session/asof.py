"""A session's documents as of an earlier record: folded from what there was up to there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Final

import anyio.to_thread
import msgspec

from perdure.errors import ConfigError
from perdure.memory.documents import names_of
from perdure.memory.index import blob_names
from perdure.model.keys import SessionKey
from perdure.model.manifest import Manifest
from perdure.model.records import Record
from perdure.session.folding import Work, manifest_of
from perdure.session.lineage import Lineage
from perdure.session.options import Limits
from perdure.store import Document, Documents

__all__ = ["FoldedAt", "folded_at", "require_known"]

PART: Final = 8 * 1024 * 1024
"""Bytes of the log that are folded at a time: its length may be any."""


class FoldedAt(msgspec.Struct, frozen=True):
    """What a session was."""

    found: dict[str, Document]
    """Its documents by name."""
    manifest: Manifest
    blobs: Mapping[str, bytes]
    """Large values that they refer to, and that may not be in blobs yet; the log has them."""

    @property
    def data(self) -> dict[str, bytes]:
        """Its documents' bytes."""
        return {name: one.data for name, one in self.found.items()}


async def folded_at(
    store: Lineage, key: SessionKey, seq: int, limits: Limits, *, onto: FoldedAt | None = None
) -> FoldedAt:
    """Return a session's documents as of a durable record; nothing of it is changed.

    Args:
        store: Where it lies.
        key: Whose they are.
        seq: The record.
        limits: How much of the working context they hold.
        onto: What it was at an earlier record: the log is read from there on.

    Raises:
        ConfigError: The history before that record was pruned.

    """
    await require_known(store, key, seq)
    blobs: Mapping[str, bytes] = {}
    if onto is None:
        have = await store.documents_upto(key, seq)
    else:
        have, blobs = Documents(onto.manifest, onto.found), onto.blobs
    since = 0 if have.manifest is None or have.damaged else have.manifest.as_of_seq
    furthest = max((one.as_of_seq for one in have.found.values()), default=0)
    records: list[Record] = []
    size = 0
    async with aclosing(store.read_log(key, after=since, before=seq + 1)) as log:
        async for chunk in log:
            records += chunk.records
            size += sum(len(record.payload) for record in chunk.records)
            if size >= PART and records[-1].seq >= furthest:
                work = Work(key, have.found, records, records[-1].seq, limits)
                part = await anyio.to_thread.run_sync(_folded, work, have, blobs)
                have, blobs = Documents(part.manifest, part.found), part.blobs
                records, size = [], 0
    work = Work(key, have.found, records, seq, limits)
    return await anyio.to_thread.run_sync(_folded, work, have, blobs)


def _folded(work: Work, have: Documents, blobs: Mapping[str, bytes]) -> FoldedAt:
    touched = {name for record in work.records for name in names_of(record)} | set(have.damaged)
    changed = work.documents(touched)
    manifest = manifest_of(work.key, 0, work.upto, have.manifest, changed)
    found = dict(have.found)
    for name, new in changed.items():
        if new is not None:
            found[name] = Document(new, work.upto)
    found = {name: found[name] for name in manifest.documents}
    needed = blob_names({name: one.data for name, one in found.items()})
    known = {**blobs, **work.blobs}
    return FoldedAt(found, manifest, {name: known[name] for name in known.keys() & needed})


async def require_known(store: Lineage, key: SessionKey, seq: int) -> None:
    """Raise ConfigError if what a session was at a record is not known any more."""
    base = await store.base_of(key)
    if base is not None and seq < base.cut:
        message = (
            f"session {key} was pruned up to record {base.cut}: what it was at record {seq} "
            "is not known any more"
        )
        raise ConfigError(message, key=str(key), seq=seq, cut=base.cut)
