"""Opening a session: one load at a time for each, however many ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, final

import anyio
import anyio.to_thread
import msgspec

from perdure.autosave.core import INHERIT, Inherit
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    SessionClosedError,
    SessionError,
    SessionNotFoundError,
)
from perdure.lease.lease import obtain
from perdure.model.keys import SessionKey
from perdure.model.records import Entry, Record
from perdure.restore.ladder import restore
from perdure.session import spilling
from perdure.session.events import SessionOpened
from perdure.session.inbox import Inbox
from perdure.session.keeping import Keeper
from perdure.session.options import Autosave, OnHeld
from perdure.session.remembering import read_again
from perdure.session.runtime import Runtime, wrong_loop
from perdure.session.session import Session
from perdure.store import Grant

__all__ = ["Flight", "Opener", "Opening", "Wanted"]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody asked to open."""

    key: SessionKey
    owner: str | None = None
    tags: tuple[str, ...] = ()
    create: bool = True
    new: bool = False
    on_held: OnHeld = "handover"
    wait: float = 10.0
    force: bool = False
    strict: bool = False
    autosave: Autosave | Inherit | None = INHERIT

    def __post_init__(self) -> None:
        if self.new and not self.create:
            message = "new=True makes a session and create=False forbids it: leave one of them out"
            raise ConfigError(message, option="new")


class Flight:
    """A load or a close under way, for others to wait for."""

    __slots__ = ("done", "error", "session")

    def __init__(self) -> None:
        self.done: anyio.Event = anyio.Event()
        self.session: Session | None = None
        self.error: Exception | None = None


@final
class Opening:
    """What ``sessions.open(…)`` returns: await it, or enter it."""

    __slots__ = ("_opener", "_session", "_wanted")

    def __init__(self, opener: Opener, wanted: Wanted) -> None:
        self._opener = opener
        self._wanted = wanted
        self._session: Session | None = None

    def __await__(self) -> Generator[Any, None, Session]:
        return self._opener.open(self._wanted).__await__()

    async def __aenter__(self) -> Session:
        self._session = await self._opener.open(self._wanted)
        return self._session

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.__aexit__(exc_type, exc, traceback)


class Opener:
    """Load sessions, each once, in the manager's own task."""

    def __init__(self, runtime: Runtime, keeper: Keeper, inbox: Inbox) -> None:
        self._runtime = runtime
        self._keeper = keeper
        self._inbox = inbox
        self._loads = anyio.CapacityLimiter(runtime.limits.loads)

    async def open(self, wanted: Wanted) -> Session:
        """Return the session, pinned once more."""
        runtime = self._runtime
        while True:
            stray = runtime.home.stray()
            if stray is not None:
                raise wrong_loop("this manager", stray)
            if runtime.draining:
                message = f"session {wanted.key} cannot be opened: the manager is stopping"
                raise SessionClosedError(message, key=str(wanted.key))
            flight = runtime.flights.get(wanted.key)
            session = runtime.sessions.get(wanted.key)
            if flight is None or (session is not None and session._turns.mine):
                # Inside of a turn that a handover waits for, too.
                if session is not None:
                    return self._pinned(session, wanted)
                flight = runtime.flights[wanted.key] = Flight()
                runtime.host.spawn(self._fly, flight, wanted)
                wanted = msgspec.structs.replace(wanted, new=False)  # what it makes is ours
            # Cancelled while waiting: the load goes on, and the next open finds the session.
            await flight.done.wait()
            if flight.error is not None:
                raise flight.error.with_traceback(None)

    def _pinned(self, session: Session, wanted: Wanted) -> Session:
        if wanted.new:
            raise _exists(wanted.key)
        self._keeper.pin(session, force=wanted.force)
        return session

    async def _fly(self, flight: Flight, wanted: Wanted) -> None:
        try:
            async with self._loads:
                flight.session = await self._load(wanted)
        except Exception as error:  # noqa: BLE001  # it goes to those who wait
            flight.error = error
        finally:
            del self._runtime.flights[wanted.key]
            flight.done.set()

    async def _load(self, wanted: Wanted) -> Session:
        runtime, key = self._runtime, wanted.key
        await self._check_exists(wanted)
        grant = await obtain(
            runtime.store,
            key,
            me=runtime.store.owner,
            lease=runtime.lease,
            on_held=wanted.on_held,
            wait=wanted.wait,
            clock=runtime.clock,
            given=self._keeper.given(key),
        )
        try:
            session = await self._restore(grant, wanted)
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                await runtime.store.release(key, grant.epoch)
            raise
        await self._replay(session)
        runtime.sessions[key] = session
        changes = _changes(session, wanted)
        if changes:
            session.describe(**changes)
        runtime.hooks.emit("opened", SessionOpened(str(key), grant.epoch, session.restore_report))
        await self._inbox.begin(session)
        return session

    async def _check_exists(self, wanted: Wanted) -> None:
        """Refuse to make a session, or to go on with one, against what was asked."""
        key = wanted.key
        if wanted.create and not wanted.new:
            return
        exists = await self._runtime.store.head(key) > 0
        if wanted.new and exists:
            raise _exists(key)
        if not wanted.create and not exists:
            message = f"there is no session {key}: leave out create=False to make it"
            raise SessionNotFoundError(message, key=str(key))

    async def _replay(self, session: Session) -> None:
        """Append what a shutdown spilled of this session, unless others have written since."""
        folder, key = self._runtime.shutdown.spill, session.key
        if folder is None:
            return
        for found in await anyio.to_thread.run_sync(spilling.find, folder, key):
            spilled = await spilling.opened(self._runtime.store, key, found)
            records: list[Record] = []
            log = self._runtime.store.read_log(key, after=spilled.base)
            async with contextlib.aclosing(log):
                async for chunk in log:
                    records.extend(chunk.records)
            left = spilling.left_of(spilled, records)
            if left is None:
                session.report_step("spill kept", f"{spilled.name}: the log has gone on without it")
                continue
            for group in _groups(left):
                session.accept(group)
            await self._runtime.saver.save(session.tracked)
            await read_again(session)  # turns that ended there are known by their ids
            await anyio.to_thread.run_sync(spilling.remove, folder, spilled.name)
            session.report_step("spill replayed", f"{len(left)} records of {spilled.name}")

    async def _restore(self, grant: Grant, wanted: Wanted) -> Session:
        if wanted.new and not grant.created:  # somebody was faster
            raise _exists(grant.key)
        runtime = self._runtime
        restored = await restore(
            runtime.store,
            grant.key,
            context_bytes=runtime.limits.context_bytes,
            strict=wanted.strict,
        )
        if restored.head != grant.head:
            message = (
                f"session {grant.key}: its log ends at record {restored.head}, but epoch "
                f"{grant.epoch} began at {grant.head}: run `perdure check`"
            )
            raise CorruptRecordError(message, key=str(grant.key), head=restored.head)
        tracked = runtime.saver.track(
            grant.key, epoch=grant.epoch, head=grant.head, autosave=wanted.autosave
        )
        session = Session(runtime, self._keeper, restored, tracked)
        await session.memory.load()
        return self._keeper.keep(session)


def _exists(key: SessionKey) -> SessionError:
    message = (
        f"session {key} exists, and a new one was asked for: choose another id, leave out "
        "new=True (an agent: if_exists='resume') to go on with it, or delete it first"
    )
    return SessionError(message, key=str(key))


def _groups(records: Sequence[Record]) -> Iterator[tuple[Entry, ...]]:
    """Give the groups that records were appended in."""
    group: list[Entry] = []
    for record in records:
        group.append(Entry(record.kind, record.payload, record.end))
        if record.end:
            yield tuple(group)
            group = []


def _changes(session: Session, wanted: Wanted) -> dict[str, Any]:
    """Return what the opener says about the session and it does not know yet."""
    if wanted.owner is None and not wanted.tags:
        return {}
    metadata = session.info.metadata
    changes: dict[str, Any] = {}
    if wanted.owner is not None and wanted.owner != metadata.owner:
        changes["owner"] = wanted.owner
    if wanted.tags and list(wanted.tags) != metadata.tags:
        changes["tags"] = list(wanted.tags)
    return changes
