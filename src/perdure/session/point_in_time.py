"""Sessions as of an earlier record: documents, also from a pruned log, and the way back to them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import anyio.to_thread
import msgspec

from perdure.errors import (
    CorruptRecordError,
    HistoryPrunedError,
    StoreUnavailableError,
)
from perdure.memory.context import SNAPSHOT, RetractionPayload, Snapshot, WorkingContext
from perdure.memory.documents import (
    EPISODIC,
    SEMANTIC,
    SESSION,
    ItemsRestoredPayload,
    StateSet,
    names_of,
    typed,
)
from perdure.memory.index import (
    MEMORY,
    DroppedPayload,
    MemoryChange,
    MemoryEntry,
    MemoryIndex,
    blob_names,
)
from perdure.memory.working_memory import SessionValues
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.records.records import (
    CONTEXT,
    ITEM,
    MEMORY_DROP,
    MEMORY_SET,
    RETRACT,
    STATE,
    Entry,
    Record,
)
from perdure.restore.ladder import cached_context, stored_snapshot
from perdure.session.fold import OFFLOAD, FoldInput, manifest_of, refers_to_media
from perdure.session.options import Limits
from perdure.session.stored import SessionStore, folded, followed
from perdure.store import Document, Documents, Store, require_same

PART: Final = 8 * 1024 * 1024
"""Bytes of the log that are folded at a time: its length may be any."""


class HistoricalFold(msgspec.Struct, frozen=True):
    """A session as of a record."""

    found: dict[str, Document]
    """Its documents by name."""
    manifest: Manifest
    blobs: Mapping[str, bytes]
    """Large values that they refer to, and that may not be in blobs yet; the log has them."""

    @property
    def data(self) -> dict[str, bytes]:
        """Its documents' bytes."""
        return {name: document.data for name, document in self.found.items()}


async def folded_at(
    store: SessionStore,
    key: SessionKey,
    seq: int,
    limits: Limits,
    *,
    onto: HistoricalFold | None = None,
) -> HistoricalFold:
    """Return a session's documents as of a durable record; nothing of it is changed.

    The log is read from what it was *onto*, at an earlier record; from the stored documents else.

    Raises:
        CorruptRecordError: Its log lacks records up to that one.
        HistoryPrunedError: The history before that record was pruned, or is just being pruned.
        SessionNotFoundError: The session was deleted meanwhile.
        StoreUnavailableError: It is just being taken over.

    """
    cut = await require_known(store, key, seq)
    blobs: Mapping[str, bytes] = {}
    if onto is None:
        have = await store.documents_upto(key, seq)
    else:
        have, blobs = Documents(onto.manifest, onto.found), onto.blobs
    since = 0 if have.manifest is None or have.damaged else have.manifest.as_of_seq
    if have.manifest is not None and since == seq and {SESSION, SNAPSHOT} <= have.found.keys():
        return HistoricalFold(dict(have.found), have.manifest, blobs)  # it is what was folded last
    furthest = max((document.as_of_seq for document in have.found.values()), default=0)
    records: list[Record] = []
    size = 0
    async with aclosing(_log_upto(store, key, max(since, cut), seq)) as log:
        async for part in log:
            records += part
            size += sum(len(record.payload) for record in part)
            if size >= PART and records[-1].seq >= furthest:
                work = FoldInput(key, have.found, records, records[-1].seq, limits)
                was = await anyio.to_thread.run_sync(fold_onto, work, have, blobs)
                have, blobs = Documents(was.manifest, was.found), was.blobs
                records, size = [], 0
    work = FoldInput(key, have.found, records, seq, limits)
    if size + sum(len(document.data) for document in have.found.values()) <= OFFLOAD:
        return fold_onto(work, have, blobs)
    return await anyio.to_thread.run_sync(fold_onto, work, have, blobs)


async def _log_upto(
    store: SessionStore, key: SessionKey, after: int, seq: int
) -> AsyncGenerator[Sequence[Record], None]:
    """Yield the records after one up to another one, all of them; errors as of `folded_at`."""
    last, settled = after, True
    async with aclosing(store.read_log(key, after=after, before=seq + 1)) as log:
        async for chunk in log:
            settled = settled and chunk.settled
            if chunk.records:
                if chunk.records[0].seq != last + 1:
                    break
                last = chunk.records[-1].seq
                yield chunk.records
    if last == seq:
        return
    first = last + 1
    await require_same(store, key)
    if await require_known(store, key, seq) >= first:
        raise HistoryPrunedError(
            f"session {key}: record {first} was pruned while it was read: do it again",
            key=str(key),
            seq=first,
        )
    if not settled:
        raise StoreUnavailableError(
            f"session {key} is just being taken over: try again in a moment",
            key=str(key),
            seq=first,
        )
    raise CorruptRecordError(
        f"session {key}: its log continues at record {first}, which is missing",
        key=str(key),
        seq=first,
    )


def fold_onto(work: FoldInput, have: Documents, blobs: Mapping[str, bytes]) -> HistoricalFold:
    """Return what documents become with records after them; *blobs* are large values of theirs."""
    touched = {name for record in work.records for name in names_of(record)} | set(have.damaged)
    changed = work.documents(touched)
    refers = refers_to_media(work.records)
    manifest = manifest_of(work.key, 0, work.upto, have.manifest, changed, refers=refers)
    documents = dict(have.found)
    for name, new in changed.items():
        if new is not None:
            documents[name] = Document(new, work.upto)
    documents = {name: documents[name] for name in manifest.documents}
    needed = blob_names({name: document.data for name, document in documents.items()})
    known = {**blobs, **work.blobs}
    return HistoricalFold(
        documents, manifest, {name: known[name] for name in known.keys() & needed}
    )


async def require_known(store: SessionStore, key: SessionKey, seq: int) -> int:
    """Return the last record that was pruned, 0 for none.

    Raises:
        HistoryPrunedError: What the session was at record *seq* is not known any more.

    """
    cut = (await store.beginning_of(key)).cut
    if seq < cut:
        raise HistoryPrunedError(
            f"session {key} was pruned up to record {cut}: what it was at record {seq} "
            "is not known any more",
            key=str(key),
            seq=seq,
            cut=cut,
        )
    return cut


# Earlier states, also of a pruned log


async def base_documents(store: Store, key: SessionKey) -> Documents:
    """Return the documents that a pruned session's log starts from, or that of a fork of one."""
    lineage = followed(store)
    base = await lineage.beginning_of(key)
    if not base.cut:
        return Documents()
    return await folded(lineage.inner, key, base, None)


async def context_at(
    store: Store,
    key: SessionKey,
    seq: int,
    limit: int,
    *,
    without: RetractionPayload | None = None,
) -> WorkingContext:
    """Return the working context that a session had at a durable record, without some of it.

    Errors as of `folded_at`.
    """
    lineage = followed(store)
    await require_known(lineage, key, seq)
    base = await lineage.beginning_of(key)
    began = await folded(lineage.inner, key, base, {SNAPSHOT}) if base.cut else Documents()
    context, since = cached_context(stored_snapshot(began.found, key), limit)
    async with aclosing(_log_upto(lineage, key, max(since, base.cut), seq)) as log:
        async for part in log:
            for record in part:
                if without is None or not without.takes(record.seq):
                    context.feed(record.seq, record.kind, record.payload)
    return context


# Earlier states as plain JSON: to show, compare and export


_FOLDERS = {"state": "state/", "plugins": "plugins/"}


async def picture(documents: Mapping[str, bytes], values: SessionValues) -> dict[str, Any]:
    """Return a session's documents as one JSON value.

    ``context`` has its messages, each under the record that brought it; ``memory``, ``state`` and
    ``plugins`` have values by their keys; ``episodic`` and ``semantic`` are lists.
    """
    entries = MemoryIndex.of_document(documents.get(MEMORY)).entries.values()
    return {
        "context": dict(_messages(documents)),
        "memory": {entry.key: decode(await values.read(entry)) for entry in entries},
        **{name: dict(_states(documents, folder)) for name, folder in _FOLDERS.items()},
        "episodic": [decode(line) for line in documents.get(EPISODIC, b"").splitlines()],
        "semantic": [decode(line) for line in documents.get(SEMANTIC, b"").splitlines()],
    }


def _messages(documents: Mapping[str, bytes]) -> Iterator[tuple[str, Any]]:
    if SNAPSHOT not in documents:
        return
    snapshot = decode(documents[SNAPSHOT], Snapshot)
    seqs = snapshot.message_seqs or [snapshot.seq] * len(snapshot.messages)
    before, again = 0, 0
    for seq, message in zip(seqs, snapshot.messages, strict=True):
        again = again + 1 if seq == before else 0  # one record may bring several
        before = seq
        yield f"{seq}.{again}" if again else str(seq), decode(bytes(message))


def _states(documents: Mapping[str, bytes], folder: str) -> Iterator[tuple[str, Any]]:
    for name in sorted({name.removeprefix("typed/") for name in documents}):
        if not name.startswith(folder):
            continue
        data = documents.get(name)
        if data is None:  # a typed value is in a document of its own, in its record's form
            data = bytes(decode(documents[f"typed/{name}"], StateSet).value)
        yield name[len(folder) : -len(".json")], decode(data)


# Rollback: the records that make a session what it was at an earlier one


_STATES = ("state/", "plugins/")
_VALUE = ("description", "value", "types", "scope", "base_priority", "pinned", "created_at")
"""Fields that make two memory entries the same; the times of their reads do not count."""


def conversation_back(
    then: Mapping[str, bytes], context: WorkingContext, seq: int
) -> Iterator[Entry]:
    """Give what takes the conversation back to a record."""
    taken = RetractionPayload(seq)
    yield Entry(RETRACT, encode(taken))
    if not context.reaches(taken):
        was = WorkingContext.of_snapshot(decode(then[SNAPSHOT], Snapshot), context.limit)
        yield Entry(CONTEXT, was.as_record("rollback"))


async def memory_back(
    now: Mapping[str, bytes], then: Mapping[str, bytes], values: SessionValues
) -> list[Entry]:
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


def states_back(now: Mapping[str, bytes], then: Mapping[str, bytes]) -> Iterator[Entry]:
    """Give what makes states, contributors' among them, what they were."""
    names = {name.removeprefix("typed/") for name in (*now, *then)}
    for name in sorted(name for name in names if name.startswith(_STATES)):
        twin = typed(name)
        if now.get(name) != then.get(name) or now.get(twin) != then.get(twin):
            yield Entry(STATE, _state(name, then))


def _state(name: str, then: Mapping[str, bytes]) -> bytes:
    """Return the payload that sets a state as it was, or drops one that was not there."""
    data, typed_data = then.get(name), then.get(typed(name))
    if data is None:
        return encode(StateSet(name, dropped=True)) if typed_data is None else typed_data
    version = 1 if typed_data is None else decode(typed_data, StateSet).version
    return encode(
        StateSet(name, msgspec.Raw(msgspec.json.format(data, indent=-1)), version=version)
    )


def items_back(now: Mapping[str, bytes], then: Mapping[str, bytes]) -> Iterator[Entry]:
    """Yield entries that restore the long-term memories: a common head stays, then come others."""
    for name, memory in ((EPISODIC, "episodic"), (SEMANTIC, "semantic")):
        ours, theirs = now.get(name, b"").splitlines(), then.get(name, b"").splitlines()
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            keep = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            items = [msgspec.Raw(line) for line in theirs[keep:]]
            yield Entry(ITEM, encode(ItemsRestoredPayload(memory, keep, items)))
