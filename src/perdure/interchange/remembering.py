"""What was read of an agent's memory, as records behind those of its state. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from perdure.codec.messages import encode_message
from perdure.interchange.reading import Finding
from perdure.interchange.state import FullAgentState
from perdure.interchange.traces import Spoken
from perdure.interchange.unfolding import Unfolded
from perdure.memory.context import WorkingContext
from perdure.memory.items import EpisodicItem, SemanticItem, item_entry
from perdure.model.messages import Message
from perdure.model.records import MESSAGE_KINDS, Entry

__all__ = ["Remembered", "agrees", "with_history", "with_memories"]

_FIRST = 2
"""The seq of the first record of an `Unfolded`: the epoch record comes before it."""


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """What was read."""

    archived: tuple[Spoken, ...] = ()
    """What was said before the last compaction, oldest first."""
    active: tuple[Spoken, ...] = ()
    """And since."""
    episodic: tuple[EpisodicItem, ...] = ()
    semantic: tuple[SemanticItem, ...] = ()
    context: WorkingContext | None = None
    agent_id: str = ""
    """Whose it is, as far as the files say."""
    findings: tuple[Finding, ...] = ()


def with_history(state: FullAgentState, read: Remembered) -> FullAgentState:
    """Return a state whose history is what the traces say, if it has none of its own."""
    core = state.context.core
    if core.history:
        return state
    said = [*read.archived, *read.active]
    history = [msgspec.Raw(encode_message(one.message).payload) for one in said]
    core = msgspec.structs.replace(core, history=history)
    context = msgspec.structs.replace(state.context, core=core)
    return msgspec.structs.replace(state, context=context)


def with_memories(unfolded: Unfolded, read: Remembered, context: Sequence[Entry] = ()) -> Unfolded:
    """Return the records with the memories behind them, and all of it one group.

    Args:
        unfolded: What the state was made into; it carried no log.
        read: What is remembered.
        context: What the working context is replaced by, if it is.

    """
    entries = unfolded.entries
    seqs = [_FIRST + at for at, entry in enumerate(entries) if entry.kind in MESSAGE_KINDS]
    memories = [
        *(item_entry(_placed(item, read, seqs)) for item in read.episodic),
        *(item_entry(item) for item in read.semantic),
        *context,
    ]
    whole = [entry._replace(end=False) for entry in (*entries, *memories)]
    whole[-1] = whole[-1]._replace(end=True)
    return Unfolded(tuple(whole), (*unfolded.findings, *read.findings))


def _placed(item: EpisodicItem, read: Remembered, seqs: Sequence[int]) -> EpisodicItem:
    """Return an item as of the record that the last message it sums up has here.

    Counted from the end: a state's own history may begin earlier than the traces.
    """
    later = len(read.active)
    if item.as_of_seq > 0:
        known = [one.seq for one in (*read.archived, *read.active)]
        later = len(known) - bisect_right(known, item.as_of_seq)
    upto = len(seqs) - later
    as_of = seqs[upto - 1] if upto > 0 and (read.archived or read.active) else 0
    return msgspec.structs.replace(item, as_of_seq=as_of)


def agrees(context: Sequence[Message], said: Sequence[Message]) -> bool:
    """Say whether a context ends with what was said last, so that nothing was said since."""
    return not said or (bool(context) and _gist(context[-1]) == _gist(said[-1]))


def _gist(message: Message) -> tuple[object, ...]:
    result = message.tool_result
    calls = tuple((call.id, call.name) for call in message.tool_calls)
    return message.role, message.text, calls, None if result is None else result.call_id
