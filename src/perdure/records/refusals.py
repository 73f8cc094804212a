"""What every store refuses, and in which words: batches, epochs and formats. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from perdure.errors import (
    LeaseHeldError,
    LeaseLostError,
    NotStorableError,
    TooLargeError,
    UnsupportedVersionError,
)
from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.keys import SessionKey
from perdure.records.manifest import FORMAT, Batch
from perdure.records.records import Entry


def lease_lost(
    key: SessionKey, epoch: int, newest: int | None = None, *, deleted: bool = False
) -> LeaseLostError:
    """Return the error for a write under an epoch that is not the *newest*, if that is known."""
    reason = "" if newest is None else f": the newest is {newest}"
    return LeaseLostError(
        f"epoch {epoch} of {key} may not write{reason}{', and it was deleted' if deleted else ''}; "
        "open the session again",
        key=str(key),
        epoch=epoch,
        newest=newest,
    )


def lease_held(key: SessionKey, after: int, newest: int) -> LeaseHeldError:
    """Return the error for an acquire after epoch *after* that lost a race."""
    return LeaseHeldError(
        f"{key} is at epoch {newest}, not {after}: another process was faster; read its holder "
        "again, then request a handover or wait",
        key=str(key),
        epoch=newest,
        after=after,
    )


def newer_format(
    what: str, number: int, supported: int = FORMAT, **facts: object
) -> UnsupportedVersionError:
    """Return the error for data of a newer format."""
    return UnsupportedVersionError(
        f"{what} has format {number}, this release reads up to {supported}: use a newer release "
        "of perdure",
        format=number,
        **facts,
    )


def too_large(
    key: SessionKey, size: int, limit: int = MAX_RECORD_BYTES, what: str = "a record of"
) -> TooLargeError:
    """Return the error for a payload of more than *limit* bytes."""
    return TooLargeError(
        f"{what} {key} has {size} bytes, the limit is {limit}: keep large values as blobs",
        key=str(key),
        size=size,
    )


def refusal_of(
    batch: Batch, limit: int = MAX_RECORD_BYTES, own_kinds: Collection[str] = ()
) -> NotStorableError | None:
    """Return why no log can ever accept a batch; None if one can."""
    records = batch.records
    largest = max([len(entry.payload) for entry in records], default=0)
    if largest > limit:
        return too_large(batch.key, largest, limit)
    if batch.first < 1 or (records and not records[-1].end):
        return misplaced(batch)
    if own_kinds and not set(own_kinds).isdisjoint([entry.kind for entry in records]):
        return NotStorableError(
            f"records of the kinds {sorted(own_kinds)} are the store's own: choose another",
            key=str(batch.key),
        )
    return None


def misplaced(batch: Batch, head: int | None = None) -> NotStorableError:
    """Return the error for a batch that does not continue the log, or ends within a group."""
    place = "" if head is None else f" with the log's head at {head}"
    return NotStorableError(
        f"a batch of {batch.key} begins at {batch.first}{place}, or ends within a group: send "
        "whole groups from the head on",
        key=str(batch.key),
        first=batch.first,
        head=head,
    )


def other_records(batch: Batch, head: int) -> NotStorableError:
    """Return the error for a batch that repeats records which differ from the log's."""
    return NotStorableError(
        f"the log of {batch.key} holds other records from {batch.first} on: read the head again "
        "and append after it",
        key=str(batch.key),
        first=batch.first,
        head=head,
    )


def new_entries(
    batch: Batch, head: int, begun: int, logged: Sequence[Entry]
) -> tuple[Entry, ...] | NotStorableError:
    """Return the entries that a log does not have yet, or why it will never accept the batch.

    Args:
        batch: Whole groups.
        head: The log's last record.
        begun: The epoch record of the batch's epoch. Only a repeated send is idempotent: the same
            bytes, in the same epoch.
        logged: What the log has from the batch's first record on; more of it does no harm.

    """
    known = head + 1 - batch.first
    if known < 0:
        return misplaced(batch, head)
    sent = batch.records[:known]
    if known and (batch.first <= begun or list(sent) != list(logged[: len(sent)])):
        return other_records(batch, head)
    return batch.records[known:]
