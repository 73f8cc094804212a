"""The log's records: what a session consists of.

A session's only truth is an append-only log of immutable records, numbered by
``seq`` from 1 without a gap. Records that belong together form a group, whose
last record carries ``end``. A reader carries kinds that it does not know
through untouched.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

MESSAGE = "message"
TOOL_CALL = "tool_call"
TOOL_RESULT = "tool_result"
CONTEXT = "context"
"""A working context that replaces the one before it (compaction, reset, repair)."""
RETRACT = "retract"
"""The conversation goes back to what it was at an earlier record; nothing is erased."""
TURN = "turn"
"""A turn's begin, end or interruption."""
MEMORY_SET = "memory_set"
MEMORY_DROP = "memory_drop"
ITEM = "item"
"""An episodic or semantic memory."""
STATE = "state"
"""A named state: a plugin's, or one that the user keeps under a key."""
META = "meta"
"""Changes to a session's title, tags, owner and metadata."""
EVENT = "event"
"""A kernel event: what an agent did, on the session's logical clock."""
CHECKPOINT = "checkpoint"
"""A labelled point of the session, sealed to the one before it."""
CHECKPOINTS_PRUNED = "checkpoints_pruned"
"""Checkpoints that are let go of; their places in the chain stay."""
BASE = "base"
"""Where the history before this log is, or that it was removed; the newest one counts."""
FORK = "fork"
"""Another session begins with this one's history."""
ENDING = "ending"
"""The holder is about to delete the session: no fork of it begins behind this record."""
TAKEN = "taken"
"""What was posted and stands in the same group, by op id."""
ADMITTED = "admitted"
"""A message that was posted to an agent: before its turn, when that begins, when it is over."""
EFFECT = "effect"
"""A call of a tool with side effects: before it, and what came of it."""
APPROVAL = "approval"
"""A tool call that waits for somebody's approval, and the answer."""
MISSING = "missing"
"""Records were lost to damage from here on; the payload says which."""
EPOCH = "epoch"
"""A new holder of the session; written by the store when a lease is taken."""

MESSAGE_KINDS = frozenset({MESSAGE, TOOL_CALL, TOOL_RESULT})


class Entry(NamedTuple):
    """A record that has been accepted, before it has a place in the log."""

    kind: str
    payload: bytes
    """One JSON value in one line, UTF-8."""
    end: bool = True
    """Whether the group ends with it."""


class Record(msgspec.Struct, frozen=True):
    """A record at its place in the log."""

    seq: int
    epoch: int
    kind: str
    payload: bytes
    end: bool
