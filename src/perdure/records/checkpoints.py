"""Checkpoints: labelled points of a session, each chained to the previous one; kernel events.

A checkpoint is a record of the kind ``checkpoint``. It holds no copy of the session: the log has
that, and the checkpoint says up to which record. Only a state that the caller gives is stored:
a small one in the record, a larger one as blobs that checkpoints share.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

CHECKPOINTS = "checkpoints.jsonl"
"""The document with the chain of checkpoints: a line for each link."""

GROUP = 2
"""A checkpoint's record and its event, which end their group after ``event_seq``."""

FIRST = ""
"""The hash before the first link."""


class CapturedState(msgspec.Struct, frozen=True, tag_field="of", tag="session"):
    """The session itself, as of the checkpoint's ``event_seq``."""

    since: int
    """The record after which ``log`` begins: an earlier checkpoint's, or 0."""
    log: str
    """The digest of the records from there up to ``event_seq``."""


class ExplicitState(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="of", tag="caller"
):
    """A state that the caller gave."""

    value: msgspec.Raw | UnsetType = UNSET
    """A small one, as canonical JSON."""
    root: str = ""
    """The blob at the root of the tree that holds a larger one."""
    size: int = 0
    """Bytes of its JSON."""
    types: dict[str, str] | None = None
    """The table of its tags, by JSON pointer: see `perdure.records.values`."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, tag_field="link", tag="checkpoint"):
    """One checkpoint, without its state: ``restore`` returns that."""

    id: int
    """Counted from 1 in each session, and never used again."""
    label: str
    timestamp: int
    """Its time on the session's logical clock."""
    event_seq: int
    """The last record before it: a replay continues with the events after that."""
    state: CapturedState | ExplicitState
    previous: str
    """The hash of the link before it."""
    hash: str
    """The digest of all its fields, ``previous`` included."""


class Pruning(msgspec.Struct, frozen=True, kw_only=True, tag_field="link", tag="pruning"):
    """The removal of some checkpoints, as a link of the chain."""

    ids: tuple[int, ...]
    timestamp: int
    event_seq: int
    previous: str
    hash: str


class Tombstone(msgspec.Struct, frozen=True, kw_only=True, tag_field="link", tag="pruned"):
    """The rest of a pruned checkpoint, so that the chain stays valid."""

    id: int
    event_seq: int
    captured: bool
    """True if it was of the session itself."""
    previous: str
    hash: str


Link: TypeAlias = Checkpoint | Pruning | Tombstone


SNAPSHOT_CREATED = "snapshot_created"
"""The kind of the event in the group of each checkpoint."""

PRUNED = "pruned"
"""In the detail of an event that is, or was, in a file: its checkpoint was pruned."""


class KernelEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A kernel event: something that an agent did, a record of the kind ``event``.

    Its time is a number that the session counts, never the machine's clock, so that a replay sees
    the same times. Checkpoints count on the same clock.
    """

    token_id: int
    """The number of the turn that caused it, 0 outside of one."""
    timestamp: int
    """Its time on the session's logical clock."""
    kind: str
    label: str | None = None
    detail: dict[str, Any] = {}


class TimestampPayload(msgspec.Struct, frozen=True):
    """The time field of records that have one."""

    timestamp: int
