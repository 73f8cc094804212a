"""What a log has no place for, of a state that came from elsewhere: carried beside it.

It lies in a document of its own, and goes back to where it was when the state is written
again. Values only, and pure.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from perdure.formats.lossless import Fields
from perdure.formats.state import FullAgentState
from perdure.memory.documents import StateSet
from perdure.records.json import decode, encode
from perdure.records.records import STATE, Entry, Record

CARRIED = "interchange.json"
"""The document."""


_OURS = ("perdure", "pluginVersions")


class ForeignFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The parts, and how far the session was when it was filled."""

    system_prompt: str = ""
    instructions: str = ""
    tool_calls: list[msgspec.Raw] = []
    created_at: str = ""
    last_active_at: str = ""
    context_version: int = 1
    items: int = 0
    """How long the history was."""
    state: Fields = {}
    context: Fields = {}
    core: Fields = {}
    memory: Fields = {}
    stats: Fields = {}
    entries: dict[str, Fields] = {}
    """By the key of the memory entry."""
    seq: int = 0
    """The record that it lies in; not written."""


def carried_of(state: FullAgentState) -> Entry:
    """Return the record that carries what a state has beyond the log."""
    core, memory = state.context.core, state.memory
    carried = ForeignFields(
        system_prompt=core.system_prompt,
        instructions=core.instructions,
        tool_calls=core.tool_calls,
        created_at=state.created_at,
        last_active_at=state.last_active_at,
        context_version=state.context.version,
        items=len(core.history),
        state={name: raw for name, raw in state.extra.items() if name not in _OURS},
        context=state.context.extra,
        core=core.extra,
    )
    if memory is not None:
        carried.memory = memory.extra
        carried.stats = memory.stats.extra
        carried.entries = {entry.key: entry.extra for entry in memory.entries if entry.extra}
    return Entry(STATE, encode(StateSet(CARRIED, msgspec.Raw(encode(carried)))))


def carried_by(records: Iterable[Record]) -> ForeignFields:
    """Return what a log carries; nothing for a log that was not filled from elsewhere."""
    carried = ForeignFields()
    for record in records:
        if record.kind == STATE and CARRIED.encode() in record.payload:
            change = decode(record.payload, StateSet)
            if change.name == CARRIED:
                carried = decode(bytes(change.value), ForeignFields)
                carried.seq = record.seq
    return carried
