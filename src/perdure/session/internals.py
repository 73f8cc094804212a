"""The inner parts of sessions and managers, for perdure's other packages.

The one door from `perdure.agent`, `perdure.adapters`, `perdure.asgi`, `perdure.inspector` and
`perdure.observe` into a session: the working context as it is folded, the store below it,
long-term memory, and the claim that makes a worker the only one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from perdure.autosave.deadline import Deadline
from perdure.autosave.tracked import State
from perdure.errors import SessionAlreadyActiveError, SessionClosedError, StoreUnavailableError
from perdure.lease import named
from perdure.memory.context import CONTEXT_KINDS, RetractionPayload
from perdure.memory.documents import (
    SESSION,
    SessionDocument,
    StateSet,
    TurnPayload,
    fold_session,
    fold_state,
    names_of,
    time_of,
)
from perdure.memory.ledger import LEDGER, Ledger, fold_ledger
from perdure.memory.state import FOLDER
from perdure.records.json import decode, encode
from perdure.records.records import (
    CONTEXT,
    EPOCH,
    ITEM,
    MESSAGE_KINDS,
    RETRACT,
    STATE,
    TURN,
    Entry,
    Record,
)
from perdure.session.base import SessionBase
from perdure.session.copier import BRANCHES
from perdure.session.delete import delete
from perdure.session.fork import fork
from perdure.session.lifecycle import HandoverTerms
from perdure.session.media import Filled
from perdure.session.point_in_time import context_at
from perdure.session.prune import drop
from perdure.session.stored import followed
from perdure.store import SupportsFolders, all_records, capability, first_record

if TYPE_CHECKING:
    from perdure._lib.loop import Affinity
    from perdure.autosave.tracked import Tracked
    from perdure.memory.context import WorkingContext
    from perdure.memory.working_memory import MemorySearch
    from perdure.records.keys import SessionKey
    from perdure.records.manifest import LogChunk
    from perdure.records.types import Registry
    from perdure.session.base import Turn
    from perdure.session.connected import ManagerParts
    from perdure.session.contents import Contents
    from perdure.session.contributors import Attachment, Contributor
    from perdure.session.manager import SessionManager
    from perdure.session.scope import Scope
    from perdure.session.session import Session, SessionView
    from perdure.store import Documents, Store


async def attach(session: Session, contributor: Contributor, *, restore: bool) -> Attachment:
    """Attach a contributor; without ``restore``, what is stored of it will be replaced."""
    return await session._attach(contributor, restore=restore)


def claim(session: Session, worker: object) -> None:
    """Make a worker the session's only one in this process.

    Raises:
        SessionAlreadyActiveError: Another worker has it.

    """
    if session._worker is not None and session._worker is not worker:
        raise SessionAlreadyActiveError(
            f"an agent is already active on session {session.key}: "
            "post to that one, or stop it first",
            key=str(session.key),
        )
    session._worker = worker


def time_to_leave(session: Session) -> float:
    """Return the seconds in which what was cut may keep what it has: half of ``turn_grace``.

    A turn has one half, and its agent the other one.
    """
    return session._runtime.shutdown.turn_grace / 2


def is_draining(session: Session) -> bool:
    """Return whether the session's manager saves everything, by a deadline of its own."""
    return session._runtime.draining


def disclaim(session: Session, worker: object) -> None:
    """Let another worker have the session."""
    if session._worker is worker:
        session._worker = None


def has_worker(session: Session) -> bool:
    """Return whether an agent's worker has the session in this process."""
    return session._worker is not None


def has_content(session: Session) -> bool:
    """Return whether anything was ever said in a session."""
    contents = session._contents
    return bool(contents.document.turns or contents.document.messages or contents.context.size)


def accept(session: Session, entries: tuple[Entry, ...]) -> int:
    """Append entries of any kind as one group, to the turn that runs; return the new version.

    Raises as `Session.append` does.
    """
    if session._turns.running is None:
        entries = (*entries, *session._mark())
    return session._accept(entries)


def refusal_of(session: Session) -> Exception | None:
    """Return the error that an append is refused with; None while the session is open."""
    return session._closed_by


def discard_lost(session: Session) -> None:
    """Drop the unsaved records of a session that another process has taken over.

    Not of one whose store has lost what it had acknowledged: that stays in the reports.
    """
    tracked = session._tracked
    if tracked.end is State.LOST and not tracked.missing:
        session._runtime.saver.discard(tracked)


def tracked_of(session: Session) -> Tracked:
    """Return autosave's side of a session."""
    return session._tracked


def running_turn(session: Session) -> int:
    """Return the number of the turn that is running, 0 between turns."""
    return session._turns.number


def next_turn(session: Session) -> int:
    """Return the number of a new turn."""
    number = session._contents.document.turns + 1
    session._count_turns(number)
    return number


def begin_turn(session: Session, *entries: Entry, at: float) -> int:
    """Begin a turn that the next one ends, with entries in the same group; return the version."""
    number = session._contents.document.turns + 1
    turned = TurnPayload(turn=f"turn_{number:04d}", number=number, phase="begin", at=at)
    version = session._accept((Entry(TURN, encode(turned)), *entries))
    session._turns.unended = None
    session._count_turns(number)
    return version


def report_step(session: Session, what: str, detail: str) -> None:
    """Add a step to the session's restore report."""
    session._report_step(what, detail)


def in_background(session: Session, job: Callable[[], Awaitable[object]]) -> None:
    """Start a job next to the session's own tasks.

    Raises:
        SessionClosedError: The manager is closed: nothing was started.

    """
    session._runtime.host.spawn(job)


def home_of(session: Session) -> Affinity:
    """Return the loop, thread and process that the session belongs to."""
    return session._runtime.home


async def let_go(session: Session) -> None:
    """Unpin a session; if it is unused here, release it to other processes at once."""
    session._lifecycle.unpin(session)
    await release_unused(session)


async def close_unsaved(session: Session) -> None:
    """Close a session that no caller has, without the records that are not durable.

    Those of a turn, or of a post, are not dropped: they were promised, and the manager saves them.
    """
    if session.is_writable and not any(record.kind in (TURN, ITEM) for record in session.unsaved()):
        await session._runtime.host.call(session._lifecycle.drop, session)


async def release_unused(session: Session) -> None:
    """Release a session to other processes, unless a caller here uses it or it is unsaved."""
    await session._runtime.host.call(session._lifecycle.idle, session)


def registry_of(session: Session | SessionView) -> Registry:
    """Return the application's types."""
    return session._contents._registry


def store_of(session: Session | SessionView) -> Store:
    """Return the session's store."""
    return session._contents._store


def parts_of(sessions: SessionManager) -> ManagerParts:
    """Return what a manager consists of, and what can be done to sessions of perdure's own.

    Raises:
        SessionClosedError: The manager is not open.

    """
    return sessions._check()


def store_below(sessions: SessionManager) -> Store:
    """Return the store of an open manager, to read only.

    Raises:
        SessionClosedError: The manager is not open.

    """
    return sessions._check().runtime.store


class LogPlace(NamedTuple):
    """A record of a session's own log: a later session of the same id does not have it."""

    seq: int
    epoch: int


def place_of(session: Session | SessionView) -> LogPlace:
    """Return where a session's durable log ended, when it was read or written last."""
    if isinstance(session, SessionBase):
        return LogPlace(session.durable_version, session.epoch)
    return LogPlace(session.seq, session._epoch)


async def is_in_log(store: Store, key: SessionKey, place: LogPlace) -> bool:
    """Return whether the session that has an id now is the one that a place was found in.

    Also False if that session was pruned beyond the place: then nothing proves it.
    """
    lineage = followed(store)
    base = await lineage.base_of(key)
    # Epochs never start again under an id; but what it began with has another session's.
    is_own = base is None or place.seq > base.at
    return is_own and await lineage.has(key, *place)


async def is_branch(session: Session) -> bool:
    """Return whether the session began as a fork or a copy of one that may be in use, too."""
    holder = await store_of(session).holder(session.key)
    return holder is not None and holder.draft is not None and holder.draft.purpose in BRANCHES


def contents_of(session: Session | SessionView) -> Contents:
    """Return what a session has in memory, and reads when it is awaited."""
    return session._contents


def working_context(session: Session | SessionView) -> WorkingContext:
    """Return the working context, to read only."""
    return session._contents.context


async def messages_in_log(
    source: Session | SessionView, unsaved: Sequence[Record]
) -> list[tuple[int, bytes]]:
    """Return all messages of the log with their records, those that were retracted too.

    The store does not have yet what is *unsaved*.
    """
    stored = await all_records(store_of(source).read_log(source.key))
    records = {record.seq: record for record in (*unsaved, *stored)}
    return [
        (seq, records[seq].payload) for seq in sorted(records) if records[seq].kind in MESSAGE_KINDS
    ]


def loop_of(sessions: SessionManager) -> object:
    """Return the event loop that a manager was opened in; None before."""
    parts = sessions._connected
    return None if parts is None else parts.runtime.loop


def session_open_here(sessions: SessionManager, key: SessionKey) -> Session | None:
    """Return a session that this manager has open, without pinning it."""
    return cast("Session | None", sessions._check().lifecycle.sessions.get(key))


READ_AT_ONCE: Final = 64
"""Sessions that are read together."""


class StoredSummary(NamedTuple):
    """A session's labels and counters, and one of its documents."""

    info: SessionDocument
    document: bytes | None
    active_at: float | None
    """The time of its newest record that has one; a folded one's in milliseconds, rounded up."""


async def read_stored(
    sessions: SessionManager, keys: Sequence[SessionKey], name: str
) -> dict[SessionKey, StoredSummary]:
    """Read what sessions say of themselves, and a document of STATE records of each.

    Left out is what is no session, or takes more than a look, as where a document is lost.
    """
    store = sessions._store
    found: dict[SessionKey, StoredSummary] = {}
    for at in range(0, len(keys), READ_AT_ONCE):
        part = keys[at : at + READ_AT_ONCE]
        read = await store.read_many_for_restore(part, {SESSION, name})
        for key, data in zip(part, read, strict=True):
            if data is not None and not data.documents.damaged:
                records = data.records
                if records is None:
                    log = store.read_log(key, after=data.after)
                    records = tuple(await all_records(log))
                summary = _summary_in(key, name, data.documents, records)
                if summary is not None:
                    found[key] = summary
    return found


async def read_logs(
    sessions: SessionManager, keys: Sequence[SessionKey]
) -> list[tuple[Record, ...] | None]:
    """Read the whole logs of sessions together; None for what has to be read by itself."""
    found: list[tuple[Record, ...] | None] = []
    for at in range(0, len(keys), READ_AT_ONCE):
        part = keys[at : at + READ_AT_ONCE]
        found += await sessions._store.read_logs(part)
    return found


def _summary_in(
    key: SessionKey, name: str, documents: Documents, records: Sequence[Record]
) -> StoredSummary | None:
    folded, document = documents.found.get(SESSION), documents.found.get(name)
    counted = 0 if folded is None else folded.as_of_seq
    newer = [one for one in records if one.seq > counted and one.kind != EPOCH]
    if folded is None and not newer:
        return None
    encoded = None if folded is None else folded.data
    if encoded is None or newer:
        encoded = fold_session(encoded, key, newer)
    info = decode(encoded, SessionDocument)
    times = (at for one in reversed(newer) if (at := time_of(one)) is not None)
    active_at = next(times, None)
    if active_at is None and (folded_at := info.about.updated_at) is not None:
        active_at = folded_at + 0.001
    since = 0 if document is None else document.as_of_seq
    changes = [one for one in records if one.seq > since and name in names_of(one)]
    state = fold_state(name, None if document is None else document.data, changes)
    return StoredSummary(info, state, active_at)


async def scope_source(scope: Scope) -> Session | SessionView | None:
    """Return what to read of a scope: the session that is held here, or else what is stored."""
    return await scope._peek()


async def change_of(
    scope: Scope, change: Callable[[Session], Awaitable[None]], *, create: bool = True
) -> None:
    """Change a scope's session as one turn of it, durably. Raises as `Scope.update` does."""
    async with scope._changing(create=create) as session:
        await change(session)


async def other_holder(sessions: SessionManager, key: SessionKey) -> str | None:
    """Name the process that holds a session, or did so last, if it is not this one."""
    store = sessions._check().runtime.store
    holder = await store.holder(key)
    return None if holder is None or holder.owner == store.owner else named(holder)


async def replace_tail(
    session: Session, after: int, *entries: Entry, version: int | None = None
) -> bool:
    """Retract everything after a record, and append entries in the same group.

    Returns:
        Whether it was done: not if ``version`` is given, and something was appended since.

    """
    retraction = await session._retraction(RetractionPayload(after))
    # Nothing is awaited from here on.
    if version not in (None, session.version):
        return False
    session._accept((*retraction, *entries))
    return True


async def fork_at(
    sessions: SessionManager, parent: SessionKey, child: SessionKey, seq: int, *entries: Entry
) -> None:
    """Begin a session with another one's conversation up to a record, and entries, at once.

    Has the log up to the end of that record's group; what is too much of it is retracted.

    Raises:
        SessionError: The new session exists.
        SessionNotFoundError: There is no such parent.

    """
    acts = sessions._check()
    store = acts.access.store

    async def begin() -> None:
        await acts.access.head(parent)  # what is unsaved of it here is saved
        last = await first_record(store.read_log(parent, after=seq - 1), lambda record: record.end)
        end = seq if last is None else last.seq
        group = await all_records(store.read_log(parent, after=seq, before=end + 1))
        more = list(entries)
        if any(record.kind in CONTEXT_KINDS for record in group):
            limit = acts.access.runtime.limits.context_bytes
            taken = RetractionPayload(seq)
            if not (await context_at(store, parent, end, limit)).reaches(taken):
                context = await context_at(store, parent, seq, limit)
                more.insert(0, Entry(CONTEXT, context.as_record("retract")))
            more.insert(0, Entry(RETRACT, encode(taken)))
        together = [*(entry._replace(end=False) for entry in more[:-1]), more[-1]]
        await fork(acts.access, parent, child, end, together)

    await acts.access.runtime.host.call(begin)


async def delete_unchanged(
    sessions: SessionManager, key: SessionKey, version: int, *, wait: float
) -> bool:
    """Delete a session that is open here; False if that is not its version any more.

    Raises:
        SessionError: A fork of before 0.1.0 reads it.

    """
    acts, terms = sessions._check(), HandoverTerms("handover", wait)
    act = partial(delete, acts.access, key, terms, unchanged=version)
    return await acts.act(key, wait, act)


async def drop_history(
    sessions: SessionManager, key: SessionKey, below: int, *, wait: float
) -> None:
    """Remove a session's records before one, where no checkpoint of it needs them.

    Raises:
        LeaseHeldError: Another process keeps holding it.

    """
    acts, terms = sessions._check(), HandoverTerms("handover", wait)
    await acts.act(key, wait, partial(drop, acts.access, key, below - 1, terms))


def state_entry(key: str, text: str | None) -> Entry:
    """Return the record that stores a text as a named state, or drops it."""
    value = msgspec.Raw(encode(text))
    return Entry(STATE, encode(StateSet(f"{FOLDER}{key}.json", value, dropped=text is None)))


def fold_soon(session: Session) -> None:
    """Have the documents written in the background, as soon as the background jobs have room."""
    session._lifecycle.fold_soon(session)


async def exclusively(
    session: Session, job: Callable[[], Awaitable[None]], *, fold: bool = False
) -> None:
    """Run a job while nothing else writes the session's documents.

    With *fold*, everything that was appended is saved and folded first.

    Raises:
        StoreUnavailableError: The store is not well, or the session is not held any more.

    """

    async def run() -> bool:
        if fold:
            await session._lifecycle.fold(session)
        is_folded = session._contents.as_of_seq >= upto
        if is_folded:
            await job()
            session._contents.documents_changed()
        return is_folded

    upto = (await session.save()).version if fold else 0
    if not await session._runtime.saver.exclusive(session._tracked, run, urgent=True):
        raise StoreUnavailableError(
            f"session {session.key} could not be folded, the store is not well: try again",
            key=str(session.key),
        )


def note_search(session: Session, search: MemorySearch) -> None:
    """Report a search of a session's long-term memory: the event ``memory_searched``."""
    session._note_search(search)


async def ledger_of(session: Session | SessionView) -> Ledger:
    """Return what is under way, with what is not folded or saved yet."""
    data, records = await session._contents._read(LEDGER)
    return Ledger(fold_ledger(data, records))


def grouped(session: Session) -> AbstractContextManager[None]:
    """Make one group of what is appended in the block, which must not await."""
    return session._runtime.saver.grouped(session._tracked)


def end_with(turn: Turn, *entries: Entry) -> None:
    """Have entries enter the log with the turn's last record, as one group."""
    turn._closing = entries


def count_tokens(turn: Turn, read: int, written: int) -> None:
    """Have the turn's last record say how many tokens its model calls took."""
    turn._tokens = read, written


def folder_of(session: Session) -> str | None:
    """Return the folder that the store keeps the session in, None if it has none."""
    store = capability(session._runtime.store, SupportsFolders)
    return None if store is None else store.folder_of(session.key)


async def durable_head(sessions: SessionManager, key: SessionKey) -> int:
    """Return the seq up to which a session is durable, whichever process holds it."""
    session = session_open_here(sessions, key)
    if session is not None and session.is_writable:
        return session.durable_version
    return await sessions._store.head(key)


def log_of(
    sessions: SessionManager, key: SessionKey, *, after: int, before: int, reverse: bool = False
) -> AsyncGenerator[LogChunk, None]:
    """Read a part of a session's log, without its lease, with the media of messages in place."""
    return Filled(sessions._store).read_log(key, after=after, before=before, reverse=reverse)


async def kill(manager: SessionManager) -> None:
    """Kill a manager, but leave the process alive; what it had not saved is lost.

    Saves that are with the store are cancelled: as in a real crash, they may have arrived.
    Callers that wait for a save, or use a session of the manager afterwards, get an error.
    """
    connected = manager._connected
    if connected is None or connected.closing.report is not None:
        return
    runtime, closing = connected.runtime, connected.closing
    connected.signals.uninstall()
    connected.at_exit.uninstall()  # which would spill what the crash is to lose
    runtime.draining = True
    closing.begun = True
    await runtime.host.aclose()
    for session in connected.lifecycle.sessions.values():
        message = f"session {session.key} ended with its manager's crash: open it again"
        session._close_with(SessionClosedError(message, key=str(session.key)))
    # Its host has ended: this only counts what is unsaved, and ends every wait.
    closing.report = await runtime.saver.aclose(Deadline(0, 0, 0))
    closing.done.set()
    await runtime.store.aclose()


def described(view: SessionView) -> dict[str, Any]:
    """Return labels, times and counts of a session, as `perdure show` and the inspector do."""
    info = view.info
    return {
        "title": info.metadata.title,
        "owner": info.metadata.owner,
        "tags": list(info.metadata.tags),
        "created_at": info.created_at,
        "last_active_at": info.last_active_at,
        "turns": info.turns,
        "messages": info.messages,
        "records": view.seq,
        # False while a takeover was under way, so that the newest records may be missing.
        "settled": view.settled,
    }
