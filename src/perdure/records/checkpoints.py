"""Checkpoints: labelled points of a session, each sealed to the one before it.

A checkpoint is a record of the kind ``checkpoint``. It holds no copy of the session: the log has
that, and the checkpoint says up to where. Only a state that the caller gives is kept, small ones
in the record, larger ones as blobs which checkpoints share.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

CHECKPOINTS = "checkpoints.jsonl"
"""The document with the chain of checkpoints: a line for each link."""

GROUP = 2
"""A checkpoint's record and its event, which end their group behind ``event_seq``."""

FIRST = ""
"""What comes before the first link."""


class CapturedState(msgspec.Struct, frozen=True, tag_field="of", tag="session"):
    """The session itself, as of the checkpoint's ``event_seq``."""

    since: int
    """The record behind which ``log`` begins: an earlier checkpoint's, or 0."""
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
    """What JSON cannot tell of it, by JSON pointer."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, tag_field="link", tag="checkpoint"):
    """One checkpoint, without the state that it leads to: ``restore`` gives that."""

    id: int
    """Counted from 1 in each session, and never used again."""
    label: str
    timestamp: int
    """When, on the session's logical clock."""
    event_seq: int
    """The last record before it: a replay goes on with the events behind."""
    state: CapturedState | ExplicitState
    previous: str
    """The hash of the link before it."""
    hash: str
    """The digest of all of it, of ``previous`` too."""


class Pruning(msgspec.Struct, frozen=True, kw_only=True, tag_field="link", tag="pruning"):
    """The removal of some checkpoints, as a link of the chain."""

    ids: tuple[int, ...]
    timestamp: int
    event_seq: int
    previous: str
    hash: str


class Tombstone(msgspec.Struct, frozen=True, kw_only=True, tag_field="link", tag="pruned"):
    """What stays of a checkpoint that was pruned, so that the chain still holds."""

    id: int
    event_seq: int
    captured: bool
    """Whether it was of the session itself."""
    previous: str
    hash: str


Link: TypeAlias = Checkpoint | Pruning | Tombstone


# Kernel events: what an agent did, in order, on the session's logical clock
#
# An event is a record of the kind ``event``. Its time is a number that the session counts, never
# the machine's clock, so that a replay sees the same times. Checkpoints count on the same clock.


SNAPSHOT_CREATED = "snapshot_created"
"""The kind of the event that stands in one group with each checkpoint."""

PRUNED = "pruned"
"""In the detail of one that is in a file, or was in one: its checkpoint is gone."""


class KernelEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event."""

    token_id: int
    """The number of the turn that caused it, 0 outside of one."""
    timestamp: int
    """When, on the session's logical clock."""
    kind: str
    label: str | None = None
    detail: dict[str, Any] = {}


class TimestampPayload(msgspec.Struct, frozen=True):
    """What tells the time of a record that has one."""

    timestamp: int
