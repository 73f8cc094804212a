"""A session's raw traces and long-term memory as the files that other runtimes know."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread

from perdure.codec.messages import decode_message
from perdure.errors import FormatError
from perdure.interchange.folder import guarded
from perdure.interchange.memory_reading import has_memories, read_memories
from perdure.interchange.memory_writing import Memories, write_memories
from perdure.interchange.own import log_in
from perdure.interchange.remembering import Remembered, agrees, with_history, with_memories
from perdure.interchange.state import FullAgentState
from perdure.interchange.unfolding import Unfolded, unfold
from perdure.memory.context import WorkingContext
from perdure.memory.documents import EPISODIC, SEMANTIC, fold_items
from perdure.memory.items import MemoryBundle
from perdure.memory.traces import read_turns
from perdure.model.messages import Message
from perdure.model.records import CONTEXT, Entry
from perdure.restore.rebuild import (
    CompactionSnapshotBuilder,
    context_entry,
    prompt_sha256,
    system_prompt_of,
)

if TYPE_CHECKING:
    from perdure.session.view import SessionView

__all__ = ["export_memories", "memories_in", "unfold_with"]

EPISODES, FACTS = 3, 20
"""How much of what is remembered a context that is made anew shows."""


async def export_memories(view: SessionView, folder: Path) -> list[str]:
    """Write raw_traces.jsonl, its archive, and what is remembered; return the files' names.

    Raises:
        ConfigError: A file of these names is there.
        CorruptRecordError: A message or an item is damaged.

    """
    contents = view._contents
    memories = Memories(
        episodic=fold_items(*await contents._read(EPISODIC)),
        semantic=fold_items(*await contents._read(SEMANTIC)),
        snapshot=contents.context.snapshot(view.key.agent, view.key.session) + b"\n",
        upto=view.seq,
    )
    async with aclosing(read_turns(contents._store, view.key)) as turns:
        return await write_memories(folder, turns, memories, types=contents._registry)


async def memories_in(folder: Path, state: FullAgentState | None) -> Remembered | None:
    """Return what a folder says beside a state; None if there is nothing, or the state has all."""
    if state is not None and log_in(state) is not None:
        return None
    if not await anyio.to_thread.run_sync(has_memories, folder):
        return None
    read = partial(guarded, lambda path, _: read_memories(Path(path)), str(folder), None)
    return await anyio.to_thread.run_sync(read)


def unfold_with(state: FullAgentState, read: Remembered, *, now: float) -> Unfolded:
    """Return the records that a state and its memories are made of. Blocking."""
    state = with_history(state, read)
    unfolded = unfold(state, now=now)
    return with_memories(unfolded, read, _context(read, _newest(state, read)))


def _newest(state: FullAgentState, read: Remembered) -> list[Message]:
    """Return what was said since the last compaction; the last item, if no traces tell."""
    if read.active or read.archived:
        return [one.message for one in read.active]
    try:
        return [decode_message(bytes(raw)) for raw in state.context.core.history[-1:]]
    except FormatError:  # somebody else's item, which is no message
        return []


def _context(read: Remembered, said: list[Message]) -> list[Entry]:
    """Return what replaces the context: the one that was saved, else the memories and the tail."""
    if read.context is not None:
        messages = [decode_message(payload) for payload in read.context.messages()]
        if agrees(messages, said):
            return [Entry(CONTEXT, read.context.as_record("import"))]
    if not read.archived and not read.episodic:
        return []
    return [_rebuilt(read, said)]


def _rebuilt(read: Remembered, said: list[Message]) -> Entry:
    old = read.context or WorkingContext(0)
    prompt = system_prompt_of([decode_message(payload) for payload in old.messages()]) or ""
    facts = sorted(read.semantic, key=lambda item: -item.salience)[:FACTS]
    bundle = MemoryBundle(read.episodic[-EPISODES:], tuple(facts))
    return context_entry(
        CompactionSnapshotBuilder().build(prompt, bundle, said),
        epoch_id=old.epoch_id,
        last_compaction_ts=old.last_compaction_ts,
        system_prompt_sha256=prompt_sha256(prompt) if prompt else None,
        reason="import",
    )
