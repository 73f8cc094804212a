"""The meaning of a store's refusal of a batch: a takeover, or lost acknowledged records."""

from __future__ import annotations

import msgspec

from perdure.errors import (
    AcknowledgedRecordsLostError,
    PerdureError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Record
from perdure.store import (
    Batch,
    Outcome,
    Status,
    Store,
    first_record,
    is_begun_since,
    record_at,
)


class _Begun(msgspec.Struct):
    owner: str = ""


async def explain_refusal(store: Store, batch: Batch, outcome: Outcome, begun: int) -> Outcome:
    """Return the meaning of a store's refusal of a batch, after comparing it with the log.

    The store may have gone back to an earlier state, and lost acknowledged records: everything
    before the batch was acknowledged. Its sender's epoch record has the seq *begun*.
    """
    durable = batch.first - 1
    try:
        last_kept = await _last_kept(
            store, batch.key, epoch=batch.epoch, begun=begun, durable=durable
        )
    except StoreUnavailableError as error:
        return Outcome(Status.IN_DOUBT, error)  # sent again, and checked then
    except PerdureError:
        last_kept = None
    if last_kept is None and isinstance(outcome.error, PerdureError):
        # Records that a bucket accepted after it had gone back are after a gap.
        first_lost = outcome.error.facts.get("gone")
        last_kept = min(first_lost - 1, durable) if isinstance(first_lost, int) else None
    if last_kept is None:
        return outcome
    lost = records_lost(batch.key, durable=durable, kept=last_kept)
    lost.__cause__ = outcome.error
    return Outcome(Status.CONFLICT, lost)


def records_lost(key: SessionKey, *, durable: int, kept: int) -> AcknowledgedRecordsLostError:
    """Return the error for a session of which the store has lost acknowledged records."""
    has = f"has only the first {kept}" if kept else "has none of them"
    return AcknowledgedRecordsLostError(
        f"session {key}: the store had acknowledged {durable} records and {has}: it went back to "
        "an earlier state (a failover, a restart without its data, an older backup). Nothing more "
        "is written here. fork_unsaved(new_id) begins a session with the rest and what this "
        "process still holds in memory, discard_unsaved() gives that up; opening the session again "
        "continues with what the store has",
        key=str(key),
        durable=durable,
        kept=kept,
    )


async def _last_kept(
    store: Store, key: SessionKey, *, epoch: int, begun: int, durable: int
) -> int | None:
    """Return the last acknowledged record that a store still has; None if it has them all."""
    holder = await store.holder(key)
    if holder is None:
        return 0
    if holder.deleted or await is_begun_since(store, key, epoch):
        return None
    head = await store.head(key)
    first = await record_at(store, key, begun) if head >= begun else None
    # A later holder may have pruned the epoch record: then the epoch was begun here.
    pruned = first is None and head >= begun and holder.epoch > epoch
    is_own = pruned or (first is not None and _is_ours(first, epoch, store.owner))
    if is_own and head >= durable and holder.epoch >= epoch:
        return None
    if holder.epoch < epoch:
        return min(head, durable)  # no other process has taken it since
    # If that epoch record is another's, no record of the epoch is this sender's.
    last = epoch if is_own else epoch - 1
    log = store.read_log(key, before=min(head, durable) + 1, reverse=True)
    newest = await first_record(log, lambda record: record.epoch <= last)
    return 0 if newest is None else newest.seq


async def is_begun_by(store: Store, key: SessionKey, *, begun: int, epoch: int, owner: str) -> bool:
    """Return whether an epoch was begun in this store, and not in another one of the same name.

    True if that is unknown: the record is not known, or was pruned.
    """
    if not begun:
        return True
    record = await first_record(store.read_log(key, after=begun - 1, limit=1))
    return record is None or record.seq > begun or _is_ours(record, epoch, owner)


def _is_ours(record: Record, epoch: int, owner: str) -> bool:
    """Return whether a record begins this epoch of this owner."""
    if record.kind != EPOCH or record.epoch != epoch:
        return False
    try:
        named = msgspec.json.decode(record.payload, type=_Begun).owner
    except msgspec.DecodeError:
        return True  # only the store can read it
    return named in ("", owner)
