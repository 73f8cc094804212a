"""Turns for tests of memory."""

from __future__ import annotations

from perdure.memory.compaction import TurnTrace
from perdure.records.messages import Message


def said(number: int, *messages: Message) -> TurnTrace:
    """Return a turn in which this was said; its last record is ten times its number."""
    return TurnTrace(f"turn_{number:04d}", messages, number * 10)
