"""A session and a view of one, as their checkpoints see them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar, final

import anyio

from perdure._lib.tasks import wait_through
from perdure.checkpoints.chain import LogDigest
from perdure.checkpoints.journal import Journal, JournalReader, LogWalk, RollbackEntries
from perdure.errors import CorruptRecordError
from perdure.memory.working_memory import SessionValues
from perdure.records.records import RETRACT
from perdure.session.media import Filled
from perdure.session.options import Limits
from perdure.session.point_in_time import (
    HistoricalFold,
    conversation_back,
    folded_at,
    items_back,
    memory_back,
    picture,
    states_back,
)
from perdure.session.stored import SessionStore, followed
from perdure.store import require_same

if TYPE_CHECKING:
    from perdure.checkpoints.chain import CheckpointChain
    from perdure.records.keys import SessionKey
    from perdure.records.records import Entry
    from perdure.records.types import Registry
    from perdure.session.base import SessionBase
    from perdure.session.contents import Contents, ReadableSession


T = TypeVar("T")


class _Reading:
    """Common part of sessions and views, as their checkpoints see them."""

    __slots__ = ("_owner", "filled", "key", "store", "types", "values")

    def __init__(self, owner: ReadableSession) -> None:
        self._owner = owner
        self.key: SessionKey = self.contents.key
        self.store: SessionStore = followed(self.contents._store)
        self.filled: Filled = Filled(self.store)
        self.types: Registry = self.contents._registry
        self.values: SessionValues = SessionValues(self.store, self.key, seen=self.contents.epoch)

    @property
    def contents(self) -> Contents:
        """Its contents as of its newest record."""
        return self._owner._contents

    async def cut(self) -> int:
        return (await self.store.beginning_of(self.key)).cut

    async def chain(self) -> CheckpointChain:
        return await self.contents.chain.get()

    async def settle(self, seq: int) -> None:
        """See that a record that was accepted is durable, as all that a view shows is."""

    async def folded_at(self, seq: int, *, onto: HistoricalFold | None = None) -> HistoricalFold:
        limits = Limits(context_bytes=self.contents.context.limit)
        return await folded_at(self.store, self.key, seq, limits, onto=onto)

    def walk(self) -> LogWalk:
        last: HistoricalFold | None = None

        async def state_at(seq: int) -> dict[str, Any]:
            nonlocal last
            await self.settle(seq)
            onto = last if last is not None and last.manifest.as_of_seq <= seq else None
            last = await self.folded_at(seq, onto=onto)
            return await picture(last.data, self.values)

        return state_at


@final
class _ViewReading(_Reading):
    """A view as its checkpoints see it."""

    __slots__ = ("head",)

    def __init__(self, view: ReadableSession, head: int) -> None:
        super().__init__(view)
        self.head: int = head

    async def require_same(self) -> None:
        await require_same(self.store, self.key, seen=self.contents.epoch)


@final
class _SessionJournal(_Reading):
    """A session that is open, as its checkpoints see it."""

    __slots__ = ("_session",)

    def __init__(self, session: SessionBase) -> None:
        super().__init__(session)
        self._session = session

    @property
    def head(self) -> int:
        return self._session.durable_version

    @property
    def version(self) -> int:
        return self._session.version

    @property
    def clock(self) -> int:
        return self.contents.clock

    @property
    def token(self) -> int:
        return self._session._turns.number

    async def save(self) -> object:
        return await self._session.save()

    def accept(self, entries: tuple[Entry, ...], *, captured: int | None = None) -> int:
        if any(entry.kind == RETRACT for entry in entries):  # with memory and states: it stays
            entries = (*entries, *self._session._mark())
        version = self._session._accept(entries)
        if captured is not None:  # what comes after is the next checkpoint's
            lifts = self._session._behind.context.lifts
            self._session._behind.digest = LogDigest(captured, lifts=lifts)
        return version

    async def digest(self) -> LogDigest:
        """Return the digest up to the newest record: durable ones are read, others are here."""
        tracked = self._session._tracked
        while True:
            since, cut = (await self.chain()).captured_upto, await self.cut()
            digest = self.contents.digest
            if digest is None or digest.since < since or digest.seq < cut:
                self.contents.digest = LogDigest(max(since, cut), lifts=self.contents.context.lifts)
                continue
            if digest.seq < tracked.durable:
                await self._read_into(digest, tracked.durable)
                continue
            for seq, entry in enumerate(tracked.pending, tracked.durable + 1):
                digest.accept(seq, entry.kind, entry.payload)
            return digest

    async def _read_into(self, digest: LogDigest, upto: int) -> None:
        begun = digest.seq
        async with aclosing(self.store.read_log(self.key, after=begun, before=upto + 1)) as log:
            async for chunk in log:
                for record in chunk.records:
                    digest.feed(record.seq, record.kind, record.payload)
        if digest.seq == begun and begun >= await self.cut():
            raise CorruptRecordError(
                f"session {self.key}: its log continues at record {begun + 1}, which is missing",
                key=str(self.key),
                seq=begun + 1,
            )

    async def require_same(self) -> None:
        self._session._check_open()
        await require_same(self.store, self.key, held=self._session.epoch)

    async def settle(self, seq: int) -> None:
        if seq > self._session.durable_version:
            await self._session.save()

    async def contribute(self) -> None:
        runtime = self._session._runtime
        if self._session._contributors is not None:
            await runtime.host.call(runtime.saver.contribute, self._session._tracked)

    async def way_back(self, seq: int) -> RollbackEntries:
        await self._session.save()  # contributors are asked, too
        version = self._session.version
        if version > self._session.durable_version:
            return RollbackEntries(-1, ())
        before = await self.folded_at(seq)
        now, then = (await self.folded_at(version, onto=before)).data, before.data
        entries = [
            *conversation_back(then, self.contents.context, seq),
            *await memory_back(now, then, self.values),
            *states_back(now, then),
            *items_back(now, then),
        ]
        return RollbackEntries(version, tuple(entries))

    def going_back(self) -> None:
        if self._session._contributors is not None:
            self._session._contributors.set_aside()

    async def gone_back(self) -> None:
        if self._session._contributors is not None:
            await self._session._contributors.take_back()

    async def call(self, act: Callable[[], Awaitable[T]]) -> T:
        return await self._session._runtime.host.call(act)

    async def finish(self, act: Callable[[], Awaitable[object]]) -> None:
        done = anyio.Event()

        async def run() -> None:
            try:
                await act()
            finally:
                done.set()

        self._session._runtime.host.spawn(run)
        await wait_through(done)


def journal_of(session: SessionBase) -> Journal:
    """Return a session as its checkpoints see it."""
    return _SessionJournal(session)


def reading_of(view: ReadableSession, seq: int) -> JournalReader:
    """Return a view as of a record as its checkpoints see it."""
    return _ViewReading(view, seq)
