"""Opening a session: one load at a time for each, however many ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast, final, get_args

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.misnamed import async_only
from perdure._lib.tasks import HostClosedError
from perdure.autosave.options import KEEP, Autosave, Inherit
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    FormatError,
    InvalidArgumentError,
    LeaseHeldError,
    OwnerMismatchError,
    SessionClosedError,
)
from perdure.lease import (
    LATE,
    OnDamage,
    OnHeld,
    acquire_lease,
    lease_held,
    not_found,
    session_exists,
)
from perdure.lineage import require_plain
from perdure.memory.attempts import continued
from perdure.records.keys import SessionKey
from perdure.records.records import Entry, Record
from perdure.restore.ladder import RESTORED, restore
from perdure.session import spill
from perdure.session.contents import validate_labels
from perdure.session.events import Opened
from perdure.session.inbox import Inbox
from perdure.session.lifecycle import SessionLifecycle, groups_of, read_again
from perdure.session.media import hold_media
from perdure.session.options import require_options
from perdure.session.refused import is_begun_by
from perdure.session.runtime import (
    Patience,
    PendingLoad,
    Runtime,
    require_seconds,
    wrong_loop,
)
from perdure.session.session import Session
from perdure.session.spill import SpillFile
from perdure.store import About, Beginning, Store, Taken, Terms, all_records, require_same

_LONGEST_OWNER = 64
_ON_HELD: tuple[str, ...] = get_args(OnHeld)
_ON_DAMAGE: tuple[str, ...] = get_args(OnDamage)


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A caller's request to open a session."""

    key: SessionKey
    owner: str | None = None
    tags: Sequence[str] = ()
    create: bool = True
    new: bool = False
    on_held: OnHeld = "handover"
    wait: float = 10.0
    force: bool = False
    strict: bool = False
    on_damage: OnDamage = "raise"
    autosave: Autosave | Inherit | None = KEEP

    def __post_init__(self) -> None:
        if self.new and not self.create:
            raise InvalidArgumentError(
                "new=True makes a session and create=False forbids it: leave one of them out",
                option="new",
            )
        if self.on_held not in _ON_HELD:
            choices = ", ".join(_ON_HELD)
            raise InvalidArgumentError(
                f"invalid on_held={self.on_held!r}: choose {choices}",
                option="on_held",
                value=self.on_held,
            )
        if self.on_damage not in _ON_DAMAGE:
            raise InvalidArgumentError(
                f"invalid on_damage={self.on_damage!r}: choose {', '.join(_ON_DAMAGE)}",
                option="on_damage",
                value=self.on_damage,
            )
        if self.strict and self.on_damage == "fresh":
            raise InvalidArgumentError(
                "strict=True raises for a damaged document and on_damage='fresh' begins anew for a "
                "damaged log: leave one of them out",
                option="on_damage",
            )
        require_seconds("wait", self.wait)
        validate_labels(owner=self.owner, tags=self.tags)
        if not isinstance(self.autosave, Inherit):
            require_options(autosave=self.autosave)


@final
class SessionOpening:
    """The result of ``sessions.open(…)``: await it, or enter it."""

    __slots__ = ("_opener", "_session", "_wanted")

    def __init__(self, opener: Opener, wanted: OpenRequest) -> None:
        self._opener = opener
        self._wanted = wanted
        self._session: Session | None = None

    def __repr__(self) -> str:
        return f"<SessionOpening of {self._wanted.key}: await it, or enter it by async with>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            cure = "write `async with sessions.open(…) as session`, or await it"
            raise AttributeError(f"{name}: this is no session yet: {cure}")

        def __enter__(self) -> NoReturn:
            raise async_only("sessions.open(…) as session")

        def __exit__(self, *_: object) -> None:
            """Never called."""

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


async def _joined(
    store: Store, pending_load: PendingLoad, wanted: OpenRequest, began: float, *, is_own: bool
) -> None:
    """Wait for a load, but for a holder or a store that is silent only as long as wanted.

    Raises:
        LeaseHeldError: Another process still has the session then; of one's own, the load says so.
        StoreUnavailableError: The store gives no sign.

    """
    wait = 0.0 if wanted.on_held == "raise" else wanted.wait
    patience = Patience(store, wanted.key, wait)
    until = inf if is_own else began + wait
    while True:
        await patience.wait_for(pending_load.done, until)
        if pending_load.done.is_set():
            return
        now = anyio.current_time()
        if pending_load.holder is not None:
            raise lease_held(wanted.key, pending_load.holder, wanted.on_held, now - began)
        until = now + LATE


class Opener:
    """Load sessions, each once, in the manager's own task."""

    def __init__(self, runtime: Runtime, lifecycle: SessionLifecycle, inbox: Inbox) -> None:
        self._runtime = runtime
        self._lifecycle = lifecycle
        self._inbox = inbox
        self._loads = anyio.Semaphore(runtime.limits.loads, fast_acquire=True)

    async def open(self, wanted: OpenRequest, *, in_turn: bool = False) -> Session:
        """Return the session, pinned once more; *in_turn* for a thread that has a turn of it."""
        runtime, began = self._runtime, self._runtime.clock()
        own: PendingLoad | None = None
        while True:
            # Each time: the manager may have begun to stop during the wait.
            self._require_running(wanted.key)
            pending_load = runtime.pending_loads.get(wanted.key)
            session = cast("Session | None", self._lifecycle.sessions.get(wanted.key))  # made below
            is_current_turn = (
                session is not None
                and (in_turn or session._turns.is_own)
                and session._closed_by is None
            )
            if pending_load is None or is_current_turn:
                # Inside of a turn that a handover waits for, too.
                if session is not None:
                    return self._pinned(session, wanted)
                pending_load = own = self._begin_load(wanted, began)
                if wanted.new:  # what it makes is ours
                    wanted = msgspec.structs.replace(wanted, new=False)
            # Cancelled while waiting: the load continues, and the next open finds the session.
            is_own = pending_load is own
            await _joined(runtime.store.inner, pending_load, wanted, began, is_own=is_own)
            error = pending_load.error
            if error is not None and (is_own or not isinstance(error, LeaseHeldError)):
                raise error.with_traceback(None)

    def _require_running(self, key: SessionKey) -> None:
        stray = self._runtime.home.stray()
        if stray is not None:
            raise wrong_loop("this manager", stray)
        if self._runtime.draining:
            raise SessionClosedError(
                f"session {key} cannot be opened: the manager is stopping", key=str(key)
            )

    def _begin_load(self, wanted: OpenRequest, began: float) -> PendingLoad:
        """Begin to load a session for a caller that has waited since *began*."""
        scope = anyio.CancelScope()
        pending_load = PendingLoad(scope)
        remaining = max(wanted.wait - (self._runtime.clock() - began), 0.0)
        self._runtime.host.spawn(self._run_load, pending_load, scope, wanted, remaining)
        # Only once there is a task that will remove it.
        self._runtime.pending_loads[wanted.key] = pending_load
        return pending_load

    def _pinned(self, session: Session, wanted: OpenRequest) -> Session:
        if wanted.new:
            raise session_exists(wanted.key)
        _require_own(session, wanted)
        self._lifecycle.pin(session, force=wanted.force)
        try:
            if wanted.autosave is not KEEP:
                self._runtime.saver.tune_one(session._tracked, wanted.autosave)
            if wanted.owner is not None or wanted.tags:
                _describe(session, wanted)
        except BaseException:
            self._lifecycle.unpin(session)
            raise
        return session

    async def _run_load(
        self,
        pending_load: PendingLoad,
        scope: anyio.CancelScope,
        wanted: OpenRequest,
        wait: float,
    ) -> None:
        try:
            with scope:
                async with self._loads:
                    await self._load(pending_load, wanted, wait)
        except Exception as error:  # noqa: BLE001  # it goes to those who wait
            pending_load.error = error
        except (KeyboardInterrupt, SystemExit):
            pending_load.error = HostClosedError("the load ended with its program")
            raise
        finally:
            del self._runtime.pending_loads[wanted.key]
            pending_load.done.set()

    async def _load(self, pending_load: PendingLoad, wanted: OpenRequest, wait: float) -> None:
        """Take the session with all that a restore reads, restore it, replay what was spilled."""
        runtime, key = self._runtime, wanted.key
        began = runtime.clock()
        names = None if wanted.strict else RESTORED
        labels = About(owner=wanted.owner, tags=tuple(wanted.tags))
        terms = Terms(
            me=runtime.store.owner,
            beginning=Beginning(about=None if labels == About() else labels),
            create=wanted.create,
            new=wanted.new,
            given=self._lifecycle.last_handover_epoch(key),
            names=names,
        )
        try:
            taken, session, may_have_items = await self._take(pending_load, wanted, terms, wait)
        except CorruptRecordError as error:
            if wanted.on_damage != "fresh":
                raise
            terms = await self._terms_aside(key, terms, error)
            try:
                taken, session, may_have_items = await self._take(pending_load, wanted, terms, wait)
            except CorruptRecordError as still:
                raise CorruptRecordError(
                    f"{still}. {runtime.store.location} cannot set the log aside, as "
                    "on_damage='fresh' asks: a store of files can",
                    **still.facts,
                ) from None
        # 3. Whole, it is registered: from here on others get it.
        self._lifecycle.keep(session)
        took = runtime.clock() - began
        report = session.restore_report
        self._lifecycle.set_aside.pop(key, None)
        if cut := [step.detail for step in report.steps if step.what == "cut"]:
            self._lifecycle.set_aside[key] = "; ".join(cut)
        runtime.hooks.emit(Opened(key=key, epoch=taken.epoch, report=report, took=took))
        if may_have_items:
            await self._inbox.begin(session)

    async def _take(
        self, pending_load: PendingLoad, wanted: OpenRequest, terms: Terms, wait: float
    ) -> tuple[Taken, Session, bool]:
        """Return a session as it was taken and restored, and whether its inbox may have items."""
        runtime, key = self._runtime, wanted.key
        # 1. Take it, with all that a restore reads.
        taken = await acquire_lease(
            runtime.store,
            key,
            terms,
            watch=runtime.watch,
            on_held=wanted.on_held,
            wait=wait,
            on_wait=pending_load.note_holder,
        )
        pending_load.holder = None
        session: Session | None = None
        try:
            # 2. Restore it, and append what a shutdown has spilled.
            require_plain(key, await runtime.store.base_of(key))
            if taken.created and not (wanted.create or terms.set_aside):
                # Its owner died before the log began.
                await runtime.store.delete(key, taken.epoch, keep_posts=True)
                raise not_found(key)  # noqa: TRY301  # released below, as after any error
            session, may_have_items = await self._restore(taken, wanted)
            _require_own(session, wanted)
            await session._load_memory()
            await self._replay(session)
        except BaseException:
            # It is left as it was found: what was not replayed is still in its spill file.
            with self._lifecycle.giving_up():
                if session is not None:
                    with contextlib.suppress(HostClosedError):  # nothing is looked after any more
                        await runtime.saver.abandon(session._tracked)
                await self._lifecycle.release(key, taken.epoch)
            raise
        return taken, session, may_have_items

    async def _terms_aside(self, key: SessionKey, terms: Terms, error: CorruptRecordError) -> Terms:
        """Return the terms that begin a session anew whose log was found damaged."""
        holder = await self._runtime.store.holder(key)
        # Only what was found damaged is set aside: not what another process has made of it since.
        if holder is None or holder.owner != terms.me:
            raise error
        return msgspec.structs.replace(terms, after=holder.epoch, given=0, set_aside=True)

    async def _replay(self, session: Session) -> None:
        """Append what a shutdown spilled of this session, unless others have written since."""
        folder, key = self._runtime.spill_folder, session.key
        if folder is None or not spill.exists(folder):
            return
        for spilled in await anyio.to_thread.run_sync(spill.find, folder, key):
            remaining = await self._unsaved_records(spilled)
            if isinstance(remaining, str):
                session._report_step("spill kept", f"{spilled.name}: {remaining}")
                continue
            entries = [Entry(record.kind, record.payload, record.end) for record in remaining]
            if entries:
                entries = [
                    *await continued(self._runtime.store, key, spilled.header.epoch),
                    *entries,
                ]
            for group in groups_of(entries):
                session._accept(group)
            await self._runtime.saver.save(session._tracked)
            session._may_be_cut = True
            await read_again(session)  # turns that ended there are known by their ids
            # Only now that its records are durable.
            await anyio.to_thread.run_sync(spill.remove, folder, spilled.name)
            session._report_step("spill replayed", f"{len(remaining)} records of {spilled.name}")

    async def _unsaved_records(self, spilled: SpillFile) -> tuple[Record, ...] | str:
        """Return the records of a spill file that the log lacks, or why they cannot be appended."""
        store, header = self._runtime.store, spilled.header
        try:
            spilled = await spill.restored(store, spilled)
        except (ConfigError, FormatError) as error:  # encrypted for a session whose key is gone
            return str(error)
        if not await is_begun_by(
            store, header.key, begun=header.begun, epoch=header.epoch, owner=header.owner
        ):
            return "it is of another store, which was at this place before"
        records = await all_records(store.read_log(header.key, after=max(header.base - 1, 0)))
        remaining = spill.missing_records(spilled, records)
        return "other records follow in the log" if remaining is None else remaining

    async def _restore(self, taken: Taken, wanted: OpenRequest) -> tuple[Session, bool]:
        """Return the session, and whether something may be waiting in its inbox."""
        runtime, key = self._runtime, taken.key
        restored = await restore(
            runtime.store,
            key,
            context_bytes=runtime.limits.context_bytes,
            strict=wanted.strict,
            found=taken.found,
        )
        await hold_media(runtime.store, key, restored.context, runtime.media_budget)
        if restored.head != taken.head:
            # No damage if another process has taken it meanwhile.
            await require_same(runtime.store, key, held=taken.epoch)
            raise CorruptRecordError(
                f"session {key}: its log ends at record {restored.head}, but epoch "
                f"{taken.epoch} began at {taken.head}: run `perdure check`",
                key=str(key),
                head=restored.head,
            )
        tracked = runtime.saver.track(
            key, epoch=taken.epoch, head=taken.head, autosave=wanted.autosave
        )
        session = Session(runtime, self._lifecycle, restored, tracked)
        return session, restored.may_have_items


def require_owner(key: SessionKey, owner: str | None, wanted: str | None) -> None:
    """Refuse another owner's session to who names one: `forget(owner=…)` would miss it.

    Raises:
        OwnerMismatchError: It has another owner than the one that was named.

    """
    if wanted is None or owner in (None, wanted):
        return
    raise OwnerMismatchError(
        f"session {key} belongs to {_clipped(owner)}, not to {_clipped(wanted)}: choose another id "
        "or tenant; leave out owner= to open it as it is; or hand it on with "
        "session.describe(owner=…)",
        key=str(key),
        owner=owner,
        wanted=wanted,
    )


def _require_own(session: Session, wanted: OpenRequest) -> None:
    if wanted.owner is not None:  # else nothing is copied to look at it
        require_owner(wanted.key, session.info.metadata.owner, wanted.owner)


def _clipped(owner: str) -> str:
    return repr(owner if len(owner) <= _LONGEST_OWNER else f"{owner[: _LONGEST_OWNER - 1]}…")


def _describe(session: Session, wanted: OpenRequest) -> None:
    """Append what the opener says about the session and it does not know yet."""
    metadata, tags = session.info.metadata, list(wanted.tags)
    owner = wanted.owner if metadata.owner is None else None
    new_tags = None if tags in ([], list(metadata.tags)) else tags
    if owner is not None or new_tags is not None:
        session.describe(owner=owner, tags=new_tags)
