"""What a session was at an earlier record, also where the records before that are gone."""

from __future__ import annotations

from contextlib import aclosing

from perdure.errors import ConfigError
from perdure.memory.context import SNAPSHOT, WorkingContext
from perdure.model.keys import SessionKey
from perdure.restore.validity import snapshot_of
from perdure.session import keepsakes
from perdure.session.lineage import followed
from perdure.store import Documents, Store

__all__ = ["base_documents", "context_at"]


async def base_documents(store: Store, key: SessionKey) -> Documents:
    """Return the documents that a pruned session's log goes on from; none for any other."""
    lineage = followed(store)
    base = await lineage.base_of(key)
    if base is None or not base.cut:
        return Documents()
    return await keepsakes.folded(lineage.inner, key, base, None)


async def context_at(store: Store, key: SessionKey, seq: int, limit: int) -> WorkingContext:
    """Return the working context that a session had at a durable record.

    Raises:
        ConfigError: The history before that record was pruned.

    """
    lineage = followed(store)
    base = await lineage.base_of(key)
    context, since = WorkingContext(limit), 0
    if base is not None and base.cut:
        if seq < base.cut:
            message = (
                f"session {key} was pruned up to record {base.cut}: what it was at record {seq} "
                "is not known any more"
            )
            raise ConfigError(message, key=str(key), seq=seq, cut=base.cut)
        found = (await keepsakes.folded(lineage.inner, key, base, {SNAPSHOT})).found.get(SNAPSHOT)
        snapshot = None if found is None else snapshot_of(found.data, key, found.as_of_seq)
        if found is not None and snapshot is not None and not isinstance(snapshot, str):
            context, since = WorkingContext.of_snapshot(snapshot, limit), found.as_of_seq
    async with aclosing(lineage.read_log(key, after=since, before=seq + 1)) as log:
        async for chunk in log:
            for record in chunk.records:
                context.feed(record.seq, record.kind, record.payload)
    return context
