"""The threads of a LangGraph saver, each of them a session: appended to, and read.

A change is appended in the order of the calls, before the first ``await`` of a call, where the
session is held here; else the calls wait for it in that order. What this process knows of a thread
is its index; values are read from the log when they are asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import anyio

from perdure.adapters.items import AdapterManager, Recent, deleted
from perdure.adapters.thread_log import (
    CheckpointPut,
    Holder,
    Leaf,
    PutChange,
    ThreadIndex,
    ThreadRecord,
    WritesChange,
    compacted,
    entries_of,
    read_record,
)
from perdure.errors import (
    InvalidArgumentError,
    LeaseLostError,
    SessionError,
    SessionNotFoundError,
)
from perdure.records.keys import DEFAULT_SESSION, SessionKey, session_key
from perdure.records.records import Record
from perdure.session.contents import meta_entry
from perdure.session.internals import (
    accept,
    drop_history,
    has_content,
    read_logs,
    session_open_here,
    store_below,
    tracked_of,
)
from perdure.session.open import require_owner
from perdure.session.session import Session
from perdure.store import records_near

if TYPE_CHECKING:
    from perdure.store import SessionInfo

BACKLOG: Final = 4 * 1024 * 1024
"""Bytes that a thread may have unsaved while LangGraph already goes on, by ``durability="async"``.
"""
RECENT_BYTES: Final = 32 * 1024 * 1024
"""Memory for records that were read or written."""
KNOWN: Final = 1000
"""Threads whose index is kept in memory."""
BEGINNINGS: Final = 100
"""Checkpoints of a thread of which it is known when they were read."""

Change: TypeAlias = PutChange | WritesChange
At: TypeAlias = tuple[str, str | None]
"""A namespace, and the id of a checkpoint in it; None where a run begins."""


@final
class Thread:
    """State of one thread that this process knows."""

    def __init__(self, key: SessionKey) -> None:
        self.key: SessionKey = key
        self.index: ThreadIndex = ThreadIndex()
        self.lock: anyio.Lock = anyio.Lock()
        self.queued: int = 0
        """Calls that wait for the session, or append when it is there."""
        self.seen: int = 0
        """The newest record when this process last read or wrote the thread, 0 if it never did."""
        self._seen_at: Recent[At, int] = Recent(BEGINNINGS)
        """The same for a checkpoint, which a run goes on from: others may have read since."""
        self.foreign_put: tuple[int, int] = (0, 0)
        """The record of another process's newest change, and its epoch."""
        self.epochs: set[int] = set()
        """Those that were held here."""
        self.writing: int = 0
        """Calls of ``aput_writes`` that wait until everything is durable."""
        self.released: int = 0
        """Up to which record these have to wait."""
        self.waiting: dict[tuple[str, str], tuple[anyio.CancelScope, int]] = {}
        """Calls of ``aput`` that wait until their checkpoints are durable."""
        self.owned: tuple[int, int, str | None] = (0, 0, None)
        """The record of which the owner was read, its epoch, and the owner."""

    def restart(self) -> None:
        """Know nothing of its log, to read it from its beginning."""
        self.index, self.foreign_put, self.released = ThreadIndex(), (0, 0), 0

    def note(self, ns: str, checkpoint: str, seen: int | None = None) -> None:
        """Say that a run may go on from a checkpoint.

        Args:
            ns: The namespace.
            checkpoint: The id of one that is there; or of one that is to be stored.
            seen: What the run knows then, up to which record; None for all that there is now.

        """
        self._seen_at.put((ns, checkpoint), self.index.upto if seen is None else seen, 1)

    def seen_by(self, at: At) -> int:
        """Return the newest record that a run knew when it came to a checkpoint."""
        seen = self._seen_at.get(at)
        return self.seen if seen is None else seen

    def knows(self, at: At) -> bool:
        """Whether a run may have gone on from a checkpoint here."""
        return self._seen_at.get(at) is not None

    def has(self, at: At) -> bool:
        """Whether a checkpoint is there."""
        return self.index.mark(at[0], str(at[1])) is not None

    @property
    def is_idle(self) -> bool:
        """Whether no call uses it."""
        return not (self.queued or self.writing or self.waiting or self.lock.locked())


@final
class ThreadSessions:
    """The threads of one manager and tenant.

    Args:
        connection: Whose sessions they are.

    """

    def __init__(self, connection: AdapterManager) -> None:
        self._connection = connection
        self._threads: OrderedDict[str, Thread] = OrderedDict()
        self._records: Recent[tuple[str, int], ThreadRecord] = Recent(RECENT_BYTES)
        """By thread and number."""

    async def append(
        self,
        thread: Thread,
        at: At,
        change: Callable[[Collection[str]], Change],
        *,
        within: Collection[At] = (),
        owner: str | None = None,
    ) -> Session:
        """Append a change to a thread's session, in the order of the calls.

        Args:
            thread: Which.
            at: The checkpoint that its run has come to.
            change: Returns the change, given the names of what is stored already.
            within: Those of the graphs that this one runs in.
            owner: Whose the thread is, or shall be if it is new; None for anybody's.

        Raises:
            LeaseLostError: Another process has changed the thread since, or it was deleted.
            OwnerMismatchError: It has another owner.

        """
        self._connection.require_home()
        known = [each for each in (at, *within) if thread.knows(each)]  # now, as it was called
        session = self._ready(thread)
        if session is not None:
            if owner is not None:
                require_owner(thread.key, session.info.metadata.owner, owner)
            self._require_current(thread, at, known)
            self._accept(thread, session, change(thread.index.leaves))
            return session
        encoded = change(())  # now: the caller may change the values while this waits
        if isinstance(encoded, PutChange):
            thread.note(encoded.put.ns, encoded.put.id, thread.seen_by(at))
        thread.queued += 1
        try:
            # Writes may be called before the checkpoint that they belong to.
            goes_on = bool(known) or (at[1] is not None and thread.seen > 0)
            holding = self._held(thread, create=not goes_on, owner=owner)
            async with thread.lock, holding as session:
                self._require_current(thread, at, known)
                thread.epochs.add(session.epoch)
                self._accept(thread, session, encoded)
                return session
        finally:
            thread.queued -= 1

    def _ready(self, thread: Thread) -> Session | None:
        """Return a thread's session if it can be appended to at once."""
        is_busy = thread.queued or thread.lock.locked()
        session = None if is_busy else self.open_here(thread)
        if session is None or session.version != thread.index.upto:
            return None
        return session if session.epoch in thread.epochs else None

    def _accept(self, thread: Thread, session: Session, change: Change) -> None:
        records = change.records(thread.index)
        if records:
            entries = entries_of(records)
            if isinstance(change, PutChange) and change.is_input:
                entries = (*entries, meta_entry())  # which says when the session was used last
            first = session.version + 1
            try:
                accept(session, entries)
            except SessionNotFoundError as error:  # since it was looked at
                raise deleted(thread.key) from error
            for seq, record in enumerate(records, first):
                thread.index.add(record, seq, session.epoch)
                self._remember(thread, seq, record)
            thread.index.upto = session.version
        thread.seen = thread.index.upto
        if isinstance(change, PutChange):
            thread.note(change.put.ns, change.put.id)

    def _require_current(self, thread: Thread, at: At, known: Iterable[At]) -> None:
        """Refuse a write of a run that began before the thread was deleted or changed elsewhere.

        Args:
            thread: Which.
            at: The checkpoint that the run has come to.
            known: Checkpoints that were there, by what this process knew when the write was called.

        """
        if not all(map(thread.has, known)):
            raise deleted(thread.key)
        seq, epoch = thread.foreign_put
        seen = thread.seen_by(at)
        if not seen or seq <= seen:
            return
        holder = thread.index.holders.get(epoch, Holder())
        message = (
            f"thread {thread.key} was continued by {holder} (epoch {epoch}) after this run read "
            "it: what this run would write now was not stored; invoke the graph again, so that it "
            "begins with the newest checkpoint"
        )
        facts = {"key": str(thread.key), "owner": holder.owner, "epoch": epoch}
        raise LeaseLostError(message, **facts)

    @asynccontextmanager
    async def _held(
        self, thread: Thread, *, create: bool = True, owner: str | None = None
    ) -> AsyncGenerator[Session, None]:
        """Hold a thread's session, and know all of it."""
        key = thread.key
        try:
            opened = await self._connection.open(key, create=create, owner=owner)
        except SessionNotFoundError as error:
            raise deleted(key) from error
        async with opened as session:
            await self._catch_up(thread, session)
            if has_content(session) and not thread.index.is_known:
                message = f"session {key} is in use, and is no LangGraph thread: choose another id"
                raise SessionError(message, key=str(key))
            yield session

    async def keep(self, thread: Thread, choose: Callable[[str, set[str]], set[str]]) -> None:
        """Replace a thread by some of its checkpoints, and what they are rebuilt from."""
        async with thread.lock, self._held(thread) as session:
            if has_content(session):  # it would drop the messages
                message = f"session {thread.key} has messages beside its thread: it is not pruned"
                raise SessionError(message, key=str(thread.key))
            index = thread.index
            kept = {
                ns: index.with_sources(ns, choose(ns, {id_ for id_, _ in index.visible(ns)}))
                for ns in index.checkpoints
            }
            marks = [index.checkpoints[ns][id_] for ns, ids in kept.items() for id_ in ids]
            names = [name for mark in marks for name in mark.channels.values()]
            for ns, ids in kept.items():
                for id_ in ids:
                    names += [write.value for _, _, write in index.writes_of(ns, id_)]
            puts = await self.puts_at(thread, [mark.seq for mark in marks])
            names += [put.opaque for put in puts.values() if put.opaque]
            leaves = await self.leaves_of(thread, index.parts_of(names))
            records = compacted(index, kept, puts, leaves)
            before = session.version
            accept(session, entries_of(records))
            thread.epochs.add(session.epoch)
            await self._connection.save(session)
            await self._catch_up(thread, session)
            thread.seen = thread.index.upto
        sessions = await self._connection.manager()
        await drop_history(sessions, thread.key, before + 1, wait=self._connection.wait)

    async def current(self, thread_id: str, owner: str | None = None) -> Thread:
        """Return a thread as it is now, here or in the store.

        Raises:
            OwnerMismatchError: It has another owner than the one that is named.

        """
        await self._connection.manager()
        thread = self.thread(thread_id)
        session = self.open_here(thread)
        is_known = session is not None and session.version == thread.index.upto
        if not is_known or thread.lock.locked():
            async with thread.lock:
                await self._catch_up(thread, self.open_here(thread))
        if owner is not None:
            require_owner(thread.key, await self._owner_of(thread), owner)
        thread.seen = thread.index.upto
        return thread

    async def _owner_of(self, thread: Thread) -> str | None:
        """Return whose a thread is, which is read again once its log has more."""
        session, index = self.open_here(thread), thread.index
        if session is not None:
            return session.info.metadata.owner
        upto, epoch, owner = thread.owned
        if (upto, epoch) != (index.upto, index.epoch):
            upto, epoch = index.upto, index.epoch
            sessions, key = await self._connection.manager(), thread.key
            view = await sessions.load(key.agent, tenant=key.tenant, context=False)
            owner = None if view is None else view.info.metadata.owner
            thread.owned = upto, epoch, owner
        return owner

    async def current_of(self, thread_ids: Sequence[str]) -> list[Thread]:
        """Return threads as they are now; those that are not held here are read together."""
        sessions = await self._connection.manager()
        threads = [self.thread(thread_id) for thread_id in thread_ids]
        others = [one for one in threads if one.is_idle and self.open_here(one) is None]
        read = await read_logs(sessions, [thread.key for thread in others])
        known: set[Thread] = set()
        for thread, records in zip(others, read, strict=True):
            if records is not None and thread.is_idle and self.open_here(thread) is None:
                anchor = (thread.index.upto, thread.index.epoch)
                if anchor[0] and anchor not in {(one.seq, one.epoch) for one in records}:
                    thread.restart()  # it was deleted, or its beginning was removed
                for record in records:
                    self._take(thread, record)
                thread.seen = thread.index.upto
                known.add(thread)
        return [
            thread if thread in known else await self.current(thread.key.agent)
            for thread in threads
        ]

    async def _catch_up(self, thread: Thread, session: Session | None) -> None:
        """Take in what was appended to a thread's session since."""
        while True:
            unsaved = () if session is None else session.unsaved()
            is_ours = session is not None and session.epoch == thread.index.epoch
            if not await self._read_on(thread, is_ours=is_ours):
                thread.restart()
                continue
            for record in unsaved:
                self._take(thread, record)
            if session is None or thread.index.upto >= session.version:
                return

    async def _read_on(self, thread: Thread, *, is_ours: bool) -> bool:
        """Take in what the store has of a thread; False if what is known of it is not its log.

        Another process may have deleted the session, or have removed how it began. Then its newest
        known record is not there, or is of another epoch.
        """
        index = thread.index
        anchor = 0 if is_ours else index.upto
        store = store_below(await self._connection.manager())
        log = store.read_log(thread.key, after=index.upto - 1 if anchor else index.upto)
        async with aclosing(log):
            async for chunk in log:
                for record in chunk.records:
                    if not anchor:
                        self._take(thread, record)
                    elif (record.seq, record.epoch) == (anchor, index.epoch):
                        anchor = 0
                    else:
                        return False
        return not anchor

    def _take(self, thread: Thread, record: Record) -> None:
        if record.seq > thread.index.upto:
            stored = thread.index.apply(record)
            if stored is not None:
                if record.epoch not in thread.epochs:
                    thread.foreign_put = record.seq, record.epoch
                self._remember(thread, record.seq, stored)

    def _remember(self, thread: Thread, seq: int, stored: ThreadRecord) -> None:
        size = sum(len(value.data) for value in stored.values if isinstance(value, Leaf))
        body = 0 if stored.put is None else len(stored.put.body)
        self._records.put((thread.key.agent, seq), stored, size + body + 1000)

    async def _records_at(self, thread: Thread, seqs: Iterable[int]) -> dict[int, ThreadRecord]:
        """Return a thread's records of these numbers, and some of those between."""
        known = {seq: self._records.get((thread.key.agent, seq)) for seq in seqs}
        found = {seq: record for seq, record in known.items() if record is not None}
        missing = known.keys() - found.keys()
        if not missing:
            return found
        session = self.open_here(thread)
        unsaved = () if session is None else session.unsaved()
        records = [record for record in unsaved if record.seq in missing]
        missing -= {record.seq for record in records}
        store = store_below(await self._connection.manager())
        async with aclosing(records_near(store, thread.key, missing)) as log:
            records += [record async for record in log]
        for record in records:
            stored = read_record(record)
            if stored is not None:
                found[record.seq] = stored
                self._remember(thread, record.seq, stored)
        return found

    async def puts_at(self, thread: Thread, seqs: Iterable[int]) -> dict[int, CheckpointPut]:
        """Return the checkpoints that these records of a thread hold."""
        records = await self._records_at(thread, seqs)
        return {seq: record.put for seq, record in records.items() if record.put is not None}

    async def leaves_of(self, thread: Thread, names: Iterable[str]) -> dict[str, Leaf]:
        """Return what these values of a thread are, and others that are stored with them."""
        places = thread.index.leaves
        records = await self._records_at(thread, {places[name] for name in names if name in places})
        return {
            value.name: value
            for record in records.values()
            for value in record.values
            if isinstance(value, Leaf)
        }

    def thread(self, thread_id: Any) -> Thread:
        """Return what is known of a thread.

        Raises:
            InvalidArgumentError: Its id cannot be one.

        """
        try:
            key = session_key(str(thread_id), tenant=self._connection.tenant)
        except InvalidArgumentError as error:
            message = str(error).replace("agent id", "thread_id")
            raise InvalidArgumentError(message, option="thread_id", value=str(thread_id)) from None
        thread = self._threads.get(key.agent)
        if thread is None:
            thread = self._threads[key.agent] = Thread(key)
            surplus = max(len(self._threads) - KNOWN, 0)
            for other in list(self._threads)[:surplus] if surplus else ():
                if self._threads[other].is_idle and other != key.agent:
                    del self._threads[other]
        self._threads.move_to_end(key.agent)
        return thread

    def open_here(self, thread: Thread) -> Session | None:
        """Return a thread's session if it is held here."""
        sessions = self._connection.opened
        session = None if sessions is None else session_open_here(sessions, thread.key)
        return session if session is not None and session.is_writable else None

    async def listed(
        self, *, owner: str | None = None, newest_first: bool = False
    ) -> AsyncGenerator[SessionInfo, None]:
        """Return all sessions that may be threads."""
        listing = self._connection.listed(owner=owner, newest_first=newest_first)
        async with aclosing(listing):
            async for info in listing:
                if info.key.session == DEFAULT_SESSION:
                    yield info

    async def save_checkpoint(
        self, thread: Thread, session: Session, version: int, at: tuple[str, str]
    ) -> None:
        """Wait until a checkpoint is durable, or until writes that came after it wait for that."""
        with anyio.CancelScope() as scope:
            thread.waiting[at] = scope, version
            try:
                await self._connection.save(session)
            finally:
                if thread.waiting.get(at) == (scope, version):
                    del thread.waiting[at]

    async def delete(self, thread_id: str) -> None:
        """Delete a thread's session."""
        thread = self.thread(thread_id)
        async with thread.lock:
            await self._connection.delete(thread.key)
            thread.restart()

    async def copy(self, source: str, target: str) -> None:
        """Begin a thread with what another one has now."""
        sessions = await self._connection.manager()
        await sessions.fork(str(source), str(target), tenant=self._connection.tenant)


def release_put(thread: Thread, at: tuple[str, str]) -> None:
    """Let the call return that stores a checkpoint: this one, whose writes follow it, waits."""
    if at in thread.waiting:
        scope, version = thread.waiting.pop(at)
        thread.released = max(thread.released, version)
        scope.cancel()


def has_room(session: Session) -> bool:
    """Say whether LangGraph may go on while this much is unsaved."""
    return tracked_of(session).pending_bytes < BACKLOG
