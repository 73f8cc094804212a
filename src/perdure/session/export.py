"""Exporting and importing a session's state: whole states, trace files, events and checkpoints."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio.to_thread
import msgspec

from perdure.checkpoints.audit_files import AuditPair, save_pair, take_pair
from perdure.checkpoints.chain import CheckpointChain
from perdure.errors import (
    CorruptRecordError,
    FormatError,
    InvalidArgumentError,
    PerdureError,
    SessionError,
    UnsupportedVersionError,
)
from perdure.formats.json_folder import guarded
from perdure.formats.migrations import Finding
from perdure.formats.records import (
    NewLog,
    StateMemories,
    agrees,
    log_in,
    state_of,
    unfold,
    with_history,
    with_log,
    with_memories,
)
from perdure.formats.state import FullAgentState
from perdure.formats.trace_files import has_memories, read_memories, write_memories
from perdure.memory.compaction import MemoryBundle
from perdure.memory.context import SNAPSHOT, Snapshot, WorkingContext
from perdure.memory.documents import (
    EPISODIC,
    SEMANTIC,
    SESSION,
    MetadataPayload,
    SessionDocument,
    StateSet,
    TurnPayload,
    fold_items,
    typed,
)
from perdure.memory.index import MEMORY
from perdure.memory.traces import read_turns
from perdure.memory.working_memory import SessionValues
from perdure.records.checkpoints import CHECKPOINTS
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey, session_key
from perdure.records.media import LIFTED_KINDS, filled, referred, without_references
from perdure.records.messages import Message, decode_message
from perdure.records.records import CONTEXT, EPOCH, META, STATE, TURN, Entry, Record
from perdure.restore.rebuild import (
    CompactionSnapshotBuilder,
    context_entry,
    prompt_sha256,
    system_prompt_of,
)
from perdure.session.checkpoints import journal_of, reading_of
from perdure.session.internals import grouped
from perdure.session.lifecycle import groups_of, read_again
from perdure.session.media import media_of, referred_in, with_its_media
from perdure.session.options import Limits
from perdure.session.point_in_time import base_documents, items_back, memory_back
from perdure.session.rebuild import fold_afresh
from perdure.session.stored import SessionStore, followed
from perdure.store import all_records

if TYPE_CHECKING:
    from perdure.session.manager import SessionManager
    from perdure.session.session import Session, SessionView
    from perdure.store import Store


EPISODES, FACTS = 3, 20
"""Most episodes and facts that a rebuilt context shows."""


async def export_memories(view: SessionView, folder: Path) -> list[str]:
    """Write raw_traces.jsonl, its archive, and what is remembered; return the files' names.

    Raises:
        InvalidArgumentError: A file of these names is there.
        CorruptRecordError: A message or an item is damaged.

    """
    contents = view._contents
    snapshot = contents.context.snapshot(view.key.agent, view.key.session)
    context = without_references(await _whole_context(contents._store, view.key, snapshot))
    async with aclosing(read_turns(contents._store, view.key)) as turns:
        return await write_memories(
            folder,
            turns,
            episodic=fold_items(*await contents._read(EPISODIC)),
            semantic=fold_items(*await contents._read(SEMANTIC)),
            snapshot=context + b"\n",
            upto=view.seq,
            types=contents._registry,
        )


async def memories_in(folder: Path, state: FullAgentState | None) -> StateMemories | None:
    """Return what a folder has besides a state; None if that is nothing, or is in the state."""
    if state is not None and log_in(state) is not None:
        return None
    if not await anyio.to_thread.run_sync(has_memories, folder):
        return None
    return await anyio.to_thread.run_sync(guarded, read_memories, folder)


def unfold_with(state: FullAgentState, read: StateMemories, *, now: float) -> NewLog:
    """Return the records that a state and its memories are made of. Blocking."""
    state = with_history(state, read)
    unfolded = unfold(state, now=now)
    return with_memories(unfolded, read, _context(read, _newest(state, read)))


def _newest(state: FullAgentState, read: StateMemories) -> list[Message]:
    """Return the messages since the last compaction; the last item, if there are no traces."""
    if read.active or read.archived:
        return [trace.message for trace in read.active]
    try:
        return [decode_message(bytes(raw)) for raw in state.context.core.history[-1:]]
    except FormatError:  # another program's item, which is no message
        return []


def _context(read: StateMemories, spoken_messages: list[Message]) -> list[Entry]:
    """Return what replaces the context: the one that was saved, else the memories and the tail."""
    if read.context is not None:
        messages = [decode_message(payload) for payload in read.context.messages()]
        if agrees(messages, spoken_messages):
            return [Entry(CONTEXT, read.context.as_record("import"))]
    if not read.archived and not read.episodic:
        return []
    return [_rebuilt(read, spoken_messages)]


def _rebuilt(read: StateMemories, messages: list[Message]) -> Entry:
    old = read.context or WorkingContext(0)
    prompt = system_prompt_of([decode_message(payload) for payload in old.messages()]) or ""
    facts = sorted(read.semantic, key=lambda item: -item.salience)[:FACTS]
    bundle = MemoryBundle(read.episodic[-EPISODES:], tuple(facts))
    return context_entry(
        CompactionSnapshotBuilder().build(prompt, bundle, messages),
        epoch_id=old.epoch_id,
        last_compaction_ts=old.last_compaction_ts,
        system_prompt_sha256=prompt_sha256(prompt) if prompt else None,
        reason="import",
    )


# Whole states out of sessions, and sessions out of whole states


class Imported(msgspec.Struct, frozen=True):
    """Result of an import."""

    key: SessionKey
    version: int
    """The session's, and durable."""
    findings: tuple[Finding, ...] = ()
    """Defects that were found, and what was done about each."""


async def export_state(
    sessions: SessionManager,
    id: str,
    *,
    session: str = "default",
    tenant: str = "",
    log: bool = True,
) -> FullAgentState | None:
    """Return all of a session as one state, its history included; None if there is none.

    Of a session that is open here, what is unsaved is saved first.

    Args:
        sessions: The manager.
        id: The agent's id.
        session: Which of its conversations.
        tenant: Whose it is.
        log: Whether the state carries the log, for an import that loses nothing. Without it:
            only what the format has a place for.

    """
    connected, key = sessions._check(), session_key(id, session, tenant)
    open_session = connected.lifecycle.sessions.get(key)
    if open_session is not None:
        await open_session.save()
    return await state_from(connected.runtime.store, key, log=log)


async def state_from(store: Store, key: SessionKey, *, log: bool = True) -> FullAgentState | None:
    """Return what is durable of a session as one state, None if there is no such session."""
    records = await _pruned_history(store, key)
    records += await all_records(followed(store).read_log(key))
    if not records:
        return None
    if store.capabilities.blobs:
        records = await _with_media(followed(store), key, records)

    def fold() -> FullAgentState:
        state = state_of(key, records)
        return with_log(state, key, records) if log else state

    return await anyio.to_thread.run_sync(fold)


async def _pruned_history(store: Store, key: SessionKey) -> list[Record]:
    """Return records that fold to what was pruned of a session; none for most sessions.

    A state has records alone. So the documents as of the cut become records again, which take the
    last numbers up to it; empty ones take those before.
    """
    cut = (await followed(store).beginning_of(key)).cut
    if not cut:
        return []
    found = (await base_documents(store, key)).found
    documents = {name: document.data for name, document in found.items()}
    values = SessionValues(followed(store), key)
    entries = [*_described(documents.pop(SESSION, None)), *items_back({}, documents)]
    entries += await memory_back({}, documents, values)
    snapshot = documents.pop(SNAPSHOT, None)
    for name in (EPISODIC, SEMANTIC, MEMORY, CHECKPOINTS):  # checkpoints are of this log alone
        documents.pop(name, None)
    for name in sorted({name.removeprefix("typed/") for name in documents}):
        plain, change = documents.get(name, b"null"), documents.get(typed(name))
        entries.append(Entry(STATE, change or encode(StateSet(name, msgspec.Raw(plain)))))
    if snapshot is not None:
        context = WorkingContext.of_snapshot(decode(snapshot, Snapshot), 2**62)
        entries.append(Entry(CONTEXT, context.as_record("pruned")))
    begun = Entry(EPOCH, b'{"owner":""}')
    # Blank ones in front, so that the records after the cut keep their numbers.
    blank = [Entry(META, b"{}")] * (cut - len(entries) - 1)
    return [Record(seq, 1, *entry) for seq, entry in enumerate([begun, *blank, *entries], 1)]


def _described(data: bytes | None) -> list[Entry]:
    if data is None:
        return []
    document = decode(data, SessionDocument)
    metadata, about = document.metadata, document.about
    meta = MetadataPayload(
        title=metadata.title,
        tags=list(metadata.tags) or None,
        owner=metadata.owner,
        metadata=metadata.extra,
        agent_type=document.agent_type,
        created_at=about.created_at,
    )
    at = about.updated_at or 0.0
    turns = [
        TurnPayload(turn=turn, number=number, phase="end", given=True, at=at)
        for turn, number in document.turn_ids.items()
    ]
    # More turns were counted than have ids: one more record brings the count along.
    if document.turns > max((turn.number for turn in turns), default=0):
        turns.append(TurnPayload(turn="", number=document.turns, phase="end", at=at))
    return [Entry(META, encode(meta)), *(Entry(TURN, encode(turn)) for turn in turns)]


MOST_MEDIA: Final = 8 * 1024 * 1024
"""Bytes of media in one context that is exported: it has to fit into one record again."""


async def _with_media(
    store: SessionStore, key: SessionKey, records: Sequence[Record]
) -> list[Record]:
    """Return records that stand by themselves: with their media in place, as a file has them."""
    whole: list[Record] = []
    for record in records:
        payload = record.payload
        if record.kind == CONTEXT:
            payload = await _whole_context(store, key, payload)
        elif referred_in(record):
            payload = await with_its_media(store, key, payload, {})
        if record.kind in LIFTED_KINDS:
            payload = without_references(payload)
        whole.append(msgspec.structs.replace(record, payload=payload))
    return whole


async def _whole_context(store: Store, key: SessionKey, payload: bytes) -> bytes:
    """Return a context with the newest of its media in place."""
    newest = reversed(referred(payload))
    media = await media_of(store, key.blobs, newest, most=MOST_MEDIA)
    return filled(payload, media) if media else payload


async def import_state(
    sessions: SessionManager,
    state: FullAgentState,
    *,
    id: str | None = None,
    session: str = "default",
    tenant: str = "",
) -> Imported:
    """Make a session of a state; return when it is durable. All of it is there then, or nothing.

    Args:
        sessions: The manager.
        state: Read by `perdure.formats.read_state`, or exported.
        id: The agent's id; None for the one that the state names.
        session: Which of its conversations it becomes.
        tenant: Whose it is.

    Raises:
        InvalidArgumentError: No id is given, and the state names none.
        SessionError: The session exists: nothing was changed.
        TooLargeError: A record of it is over ``Limits.record_bytes``.

    """
    return await import_with(sessions, state, None, id=id, session=session, tenant=tenant)


async def import_with(
    sessions: SessionManager,
    state: FullAgentState,
    read: StateMemories | None,
    *,
    id: str | None,
    session: str,
    tenant: str,
) -> Imported:
    """Make a session from a state and the files next to it; errors as `import_state`."""
    agent = id or state.agent_id
    if not agent:
        raise InvalidArgumentError("the state names no agent: give its id")
    key = session_key(agent, session, tenant)
    unfolded = await anyio.to_thread.run_sync(partial(_unfolded, state, read, key))
    if await sessions.exists(agent, session=session, tenant=tenant):
        raise _exists(key)
    opened = await sessions.open(agent, session=session, tenant=tenant)
    async with opened:
        # Again, now that it is held: another process may have made it since the check above.
        if opened.version != opened.durable_version or opened.restore_report.source != "fresh":
            raise _exists(key)
        try:
            with grouped(opened):  # no save comes between two groups
                for group in groups_of(unfolded.entries):
                    opened._accept(group)
            receipt = await opened.save()
        except Exception:
            with contextlib.suppress(PerdureError):  # not ours any more: its holder decides
                await sessions.delete(agent, session=session, tenant=tenant)
            raise
        await read_again(opened)  # it knows its turns then, as one that was restored does
    return Imported(key, receipt.version, unfolded.findings)


def _unfolded(state: FullAgentState, read: StateMemories | None, key: SessionKey) -> NewLog:
    """Return the records of a state, after checking that they fold to a session."""
    now = time.time()
    try:
        unfolded = unfold(state, now=now) if read is None else unfold_with(state, read, now=now)
        records = [Record(seq, 1, *entry) for seq, entry in enumerate(unfolded.entries, 2)]
        # Before anything is written: records that do not fold would make a session that cannot
        # open.
        _check(fold_afresh(key, records, limits=Limits()))
    except UnsupportedVersionError:
        raise
    except (FormatError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CorruptRecordError(
            f"the state of {state.agent_id!r} holds records that make no session: {error}; import "
            "it without its field `perdure`; nothing was changed",
            agent=state.agent_id,
        ) from error
    return unfolded


def _check(documents: Mapping[str, bytes]) -> None:
    """Raise what is wrong with documents that a fold makes without reading it."""
    CheckpointChain.of(documents.get(CHECKPOINTS))
    for name in documents:
        if not all(name.split("/")):
            raise ValueError(f"nothing can be stored as {name!r}")


def _exists(key: SessionKey) -> SessionError:
    return SessionError(
        f"session {key} exists: import into another id, or delete it first", key=str(key)
    )


# A session's events and checkpoints as the pair of files that other kernels know


async def export_pair(view: SessionView, folder: str | os.PathLike[str]) -> list[str]:
    """Write events.jsonl, checkpoints.jsonl and replay.json; return their names.

    None of them is written for a session that has neither events nor checkpoints. A folder that is
    not there is made.

    Raises:
        InvalidArgumentError: A file of these names is there.
        CorruptRecordError: A checkpoint's state is lost or damaged.

    """
    if not view._contents.clock:
        return []
    return await save_pair(reading_of(view, view.seq), Path(folder))


async def import_pair(session: Session, folder: str | os.PathLike[str]) -> AuditPair:
    """Append the events and checkpoints of such files to a session, by their times.

    They continue the session's own clock: their order stays, their numbers may change.
    All is durable when this returns. After a kill some thousands of events at the end may be
    missing: remove the session then, and begin again.

    Raises:
        InvalidArgumentError: The checkpoints' ids do not increase, or the session already has some.

    """
    return await take_pair(journal_of(session), Path(folder))
