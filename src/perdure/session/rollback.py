"""The way back: the records that make a session what it was at an earlier one.

Only what differs is written. The conversation goes back as by `Session.retract`; memory, states
and long-term memories get the values that they had. What a tool has done outside of the session is
done, so the ledger of effects stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from perdure.memory.context import SNAPSHOT, RetractionPayload, Snapshot, WorkingContext
from perdure.memory.documents import EPISODIC, SEMANTIC, ItemsRestoredPayload, StateSet, typed
from perdure.memory.index import MEMORY, DroppedPayload, MemoryChange, MemoryEntry, MemoryIndex
from perdure.memory.working_memory import SessionValues
from perdure.records.json import decode, encode
from perdure.records.records import CONTEXT, ITEM, MEMORY_DROP, MEMORY_SET, RETRACT, STATE, Entry

Documents = Mapping[str, bytes]
"""Documents by name, as of one record."""

_STATES = ("state/", "plugins/")
_VALUE = ("description", "value", "types", "scope", "base_priority", "pinned", "created_at")
"""What makes two memory entries the same; when they were read does not count."""


def conversation_back(then: Documents, context: WorkingContext, seq: int) -> Iterator[Entry]:
    """Give what takes the conversation back to a record."""
    yield Entry(RETRACT, encode(RetractionPayload(seq)))
    if not context.reaches(seq):
        was = WorkingContext.of_snapshot(decode(then[SNAPSHOT], Snapshot), context.limit)
        yield Entry(CONTEXT, was.as_record("rollback"))


async def memory_back(now: Documents, then: Documents, values: SessionValues) -> list[Entry]:
    """Return what gives the working memory the entries that it had."""
    ours = MemoryIndex.of_document(now.get(MEMORY)).entries
    theirs = MemoryIndex.of_document(then.get(MEMORY)).entries
    entries = [Entry(MEMORY_DROP, encode(DroppedPayload(key))) for key in ours if key not in theirs]
    for key, entry in theirs.items():
        if key not in ours or not _same(ours[key], entry):
            fields = {name: getattr(entry, name) for name in MemoryEntry.__struct_fields__}
            fields |= {"value": msgspec.Raw(await values.read(entry)), "sha256": msgspec.UNSET}
            entries.append(Entry(MEMORY_SET, encode(MemoryChange(**fields))))
    return entries


def _same(left_entry: MemoryEntry, right_entry: MemoryEntry) -> bool:
    return left_entry.sha256 == right_entry.sha256 and all(
        getattr(left_entry, name) == getattr(right_entry, name) for name in _VALUE
    )


def states_back(now: Documents, then: Documents) -> Iterator[Entry]:
    """Give what makes states, contributors' among them, what they were."""
    names = {name.removeprefix("typed/") for name in (*now, *then)}
    for name in sorted(name for name in names if name.startswith(_STATES)):
        beside = typed(name)
        if now.get(name) != then.get(name) or now.get(beside) != then.get(beside):
            yield Entry(STATE, _state(name, then))


def _state(name: str, then: Documents) -> bytes:
    """Return the payload that sets a state as it was, or drops one that was not there."""
    data, beside = then.get(name), then.get(typed(name))
    if data is None:
        return encode(StateSet(name, dropped=True)) if beside is None else beside
    version = 1 if beside is None else decode(beside, StateSet).version
    return encode(
        StateSet(name, msgspec.Raw(msgspec.json.format(data, indent=-1)), version=version)
    )


def items_back(now: Documents, then: Documents) -> Iterator[Entry]:
    """Give what makes the long-term memories what they were: so many stay, then come others."""
    for name, memory in ((EPISODIC, "episodic"), (SEMANTIC, "semantic")):
        ours, theirs = now.get(name, b"").splitlines(), then.get(name, b"").splitlines()
        if ours != theirs:
            keep = _common(ours, theirs)
            items = [msgspec.Raw(line) for line in theirs[keep:]]
            yield Entry(ITEM, encode(ItemsRestoredPayload(memory, keep, items)))


def _common(left: list[bytes], right: list[bytes]) -> int:
    """Return how many lines both begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))
