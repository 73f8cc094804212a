"""Parts that the adapters share: their sessions' manager, and what was said in a session."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, Generic, NoReturn, ParamSpec, Protocol, Self, TypeVar, final
from weakref import WeakKeyDictionary

import anyio

from perdure._lib.loop import Affinity
from perdure.adapters.claims import claimed_record, filled, filled_record
from perdure.adapters.envelopes import SdkEnvelope, read_entry
from perdure.errors import (
    InvalidArgumentError,
    LeaseLostError,
    SessionClosedError,
    SessionError,
    SessionNotFoundError,
    WrongLoopError,
)
from perdure.lease import OnHeld
from perdure.records.json import encode
from perdure.records.keys import SessionKey, session_key
from perdure.records.media import decode_read
from perdure.records.messages import Message
from perdure.records.records import Entry
from perdure.session.internals import (
    LogPlace,
    accept,
    begin_turn,
    contents_of,
    discard_lost,
    has_content,
    is_in_log,
    let_go,
    loop_of,
    other_holder,
    running_turn,
    session_open_here,
    store_of,
    working_context,
)
from perdure.session.manager import SessionManager, require_manager
from perdure.session.runtime import wrong_loop
from perdure.session.session import Session, SessionView
from perdure.store import SessionInfo, all_records

PAGE: Final = 200
"""Records that are read from the log at a time."""
LISTED: Final = 500
"""Sessions that are listed at once."""

B = TypeVar("B", bound="BlockingAdapter")
E = TypeVar("E", bound=SdkEnvelope)
F = TypeVar("F", bound="SupportsAdd[Any]")
P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
T_contra = TypeVar("T_contra", contravariant=True)


@final
class Recent(Generic[K, V]):
    """Newest values, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._values: dict[K, V] = {}
        self._sizes: dict[K, int] = {}
        self._room = max_bytes
        self.get: Callable[[K], V | None] = self._values.get
        """Returns a value, or None."""

    def put(self, key: K, value: V, size: int) -> None:
        """Keep a value, and let go of the oldest ones."""
        if key in self._values:
            del self._values[key]
            self._room += self._sizes.pop(key)
        self._values[key] = value
        self._sizes[key] = size
        self._room -= size
        while self._room < 0 and len(self._values) > 1:
            oldest = next(iter(self._values))
            del self._values[oldest]
            self._room += self._sizes.pop(oldest)


def append_turn(
    session: Session, entries: Sequence[Entry], *, is_asked: bool, at: float | None = None
) -> None:
    """Append entries in one group; a user's message begins a turn with them, unless one runs.

    Args:
        session: Where to.
        entries: What is appended.
        is_asked: Whether they begin with a user's message.
        at: When the turn begins, in seconds since 1970; None for now.

    """
    if is_asked and not running_turn(session):
        begin_turn(session, *entries, at=time.time() if at is None else at)
    else:
        accept(session, tuple(entries))


def at_path(value: Mapping[str, Any], path: str) -> Any:
    """Return what is under a key, or under the keys of a dotted path; None if there is nothing.

    >>> at_path({"user": {"name": "ada"}, "a.b": 1}, "user.name"), at_path({"a.b": 1}, "a.b")
    ('ada', 1)
    """
    if path in value or "." not in path:
        return value.get(path)
    first, _, rest = path.partition(".")
    inner = value.get(first)
    return at_path(inner, rest) if isinstance(inner, Mapping) else None


async def newest_messages(
    source: Session | SessionView, count: int | None
) -> tuple[list[tuple[int, Message]], bool]:
    """Return the newest messages (None: all), oldest first, and whether there are no others."""
    known = working_context(source).whole()
    if known is not None:
        begin = 0 if count is None else max(len(known) - count, 0)
        newest = await contents_of(source).filled(known[begin:])
        shown = [(seq, decode_read(payload)) for seq, payload in newest]
        return await filled(source, shown), not begin
    messages: list[tuple[int, Message]] = []
    before: int | None = None
    while count is None or len(messages) < count:
        page = await source.history(before=before, limit=PAGE)
        messages[:0] = [(item.seq, item.value) for item in page if isinstance(item.value, Message)]
        if len(page) < PAGE:
            unsaved = source.unsaved() if isinstance(source, Session) else ()
            older = await contents_of(source).before_log(reversed(unsaved))
            messages[:0] = [(seq, decode_read(payload)) for seq, payload in older]
            return await filled(source, messages), True
        before = page[0].seq
    return await filled(source, messages), False


class SupportsAdd(Protocol[T_contra]):
    """State that is made of records, in their order."""

    def add(self, stored: T_contra, /) -> None:
        """Take a record in."""


@final
class LogFold(Generic[E, F]):
    """Contents of sessions' logs that are an SDK's own records, folded.

    Those of a session that is held here are kept as of a version, also what is not durable yet.

    Args:
        empty: Makes the state of a session without records.
        shape: The class of a record.
        sdk: Whose records they are.
        newest: The newest version of their shape that can be read.

    """

    def __init__(self, empty: Callable[[], F], shape: type[E], *, sdk: str, newest: int) -> None:
        self._empty = empty
        self._shape = shape
        self._sdk = sdk
        self._newest = newest
        self._known: WeakKeyDictionary[Session, tuple[int, F]] = WeakKeyDictionary()

    async def read(self, source: Session | SessionView) -> F:
        """Return what a session's records make."""
        if isinstance(source, Session):
            version, folded = self._known.get(source, (0, self._empty()))
            if version == source.version:
                return folded
        folded = self._empty()
        unsaved = source.unsaved() if isinstance(source, Session) else ()
        records = await all_records(store_of(source).read_log(source.key))
        last = records[-1].seq if records else 0
        records += [record for record in unsaved if record.seq > last]
        for record in records:
            whole = await filled_record(source, record)
            stored = read_entry(whole, self._shape, sdk=self._sdk, newest=self._newest)
            if stored is not None:
                folded.add(stored)
        if isinstance(source, Session) and records:
            self._known[source] = records[-1].seq, folded
        return folded

    async def read_to_append(self, session: Session) -> F | None:
        """Return what an open session's records make; None if it was appended to meanwhile.

        Raises:
            SessionError: The session has messages, so it is not one of the SDK's.

        """
        folded = await self.read(session)
        if self._known[session][0] != session.version:
            return None
        if has_content(session):
            message = (
                f"session {session.key} has messages, and is not {self._sdk}'s: choose another id"
            )
            raise SessionError(message, key=str(session.key))
        return folded

    async def append(self, session: Session, *records: E) -> bool:
        """Append records in one group to a session that was just read.

        What is large is in blobs then. False if the session was appended to meanwhile.

        Raises:
            TooLargeError: One is larger than a record, and the store keeps no blobs.

        """
        version, folded = self._known[session]
        entries = [await claimed_record(session, encode(one), self._sdk) for one in records]
        if version != session.version:
            return False
        version = accept(session, tuple(entries))
        for record in records:
            folded.add(record)
        self._known[session] = version, folded
        return True


class _Shared:
    """The manager of a URL in one event loop, for all adapters that were made of the URL there."""

    def __init__(self) -> None:
        self.lock: anyio.Lock = anyio.Lock()
        self.manager: SessionManager | None = None
        self.users: int = 0


_shared: dict[tuple[object, str], _Shared] = {}
"""By event loop and URL."""
_guard = threading.Lock()


@final
class AdapterManager:
    """The manager that an adapter uses: a given one, or a URL's, opened at the first call.

    Adapters that are made of the same URL, in the same event loop, share a manager, which the last
    of them closes: so two objects of one session do not wait for each other's lease.

    Args:
        sessions: The given one; None for its own.
        instead: What to call for one of its own, as an error says it.
        tenant: Whose the sessions are.
        owner: Who new ones belong to, unless `open` is told.
        tags: As for `SessionManager.open`,
        on_held: and this,
        wait: and this.

    Raises:
        InvalidArgumentError: It is no manager.

    """

    def __init__(
        self,
        sessions: SessionManager | None,
        *,
        instead: str,
        tenant: str = "",
        owner: str | None = None,
        tags: Sequence[str] = (),
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> None:
        if sessions is not None:
            require_manager(sessions, instead)
        self.tenant: str = tenant
        self.wait: float = wait
        self._owner = owner
        self._tags = tags
        self._on_held: OnHeld = on_held
        self.opened: SessionManager | None = sessions
        self.is_own: bool = sessions is None
        """Whether the manager is connected and closed here."""
        self.url: str | os.PathLike[str] | None = None
        self._is_closed = False
        self._home: Affinity | None = None
        self._share: _Shared | None = None
        self._lock = anyio.Lock()

    async def manager(self) -> SessionManager:
        """Return the manager, opened.

        Raises:
            WrongLoopError: The first call was made in another event loop.
            SessionClosedError: It was closed.

        """
        self.leave_ended_loop()
        if self._is_closed:
            message = "this was closed, and its store with it: make another one"
            raise SessionClosedError(message)
        if self.opened is None:
            from perdure._connect import connect

            self.require_home()  # a task of another loop would wait for this one's lock
            async with self._lock:
                if self.opened is None:
                    share = self._share = self._join(self.require_home())
                    try:
                        async with share.lock:
                            if share.manager is None:
                                share.manager = await connect(self.url)
                    except BaseException:
                        self._leave(share)
                        self._home = None  # another event loop may try
                        raise
                    self.opened = share.manager
        return self.opened

    def leave_ended_loop(self) -> None:
        """Open the URL anew if the event loop that it was opened in has ended, as by `asyncio.run`.

        The manager of that loop has closed with it.
        """
        share, home = self._share, self._home
        if share is not None and home is not None and self.opened is not None:
            is_closed = getattr(home.loop, "is_closed", None)
            if is_closed is not None and is_closed():
                self.opened, self._home, self._lock = None, None, anyio.Lock()
                self._leave(share)

    def enter(self) -> None:
        """Open the store again at the next call, if it was closed."""
        self._is_closed = False

    def require_home(self) -> object:
        """Return the event loop of the first call; a call from another one would wait for ever.

        Raises:
            WrongLoopError: This is another one.

        """
        with _guard:
            home = self._home = self._home or Affinity()
        stray = home.stray()
        if stray is not None:
            raise wrong_loop("what opens its store at its first call", stray)
        return home.loop

    def _join(self, loop: object) -> _Shared:
        """Use the manager of the URL; one in memory is this object's alone."""
        from perdure._connect import URL_VARIABLE

        place: Any = os.environ.get(URL_VARIABLE, "") if self.url is None else self.url
        is_alone = not isinstance(place, str | os.PathLike) or "memory:" in str(place)
        with _guard:
            for old in [key for key, share in _shared.items() if _is_closed(share)]:
                del _shared[old]
            key = loop, str(place)
            share = _Shared() if is_alone else _shared.setdefault(key, _Shared())
            share.users += 1
        return share

    def _leave(self, share: _Shared) -> None:
        """Use a shared manager no more."""
        self._share = None
        with _guard:
            share.users -= 1
            if not share.users:
                for key in [key for key, each in _shared.items() if each is share]:
                    del _shared[key]

    @property
    def is_last(self) -> bool:
        """Whether `aclose` closes the manager."""
        return self._share is not None and self._share.users == 1

    async def peek(self, key: SessionKey) -> Session | SessionView | None:
        """Return a session to read: as it is here, or else as it is stored."""
        sessions = await self.manager()
        session = session_open_here(sessions, key)
        if session is not None:
            return session
        return await sessions.load(key.agent, session=key.session, tenant=key.tenant)

    async def open(
        self,
        key: SessionKey,
        *,
        create: bool = True,
        owner: str | None = None,
        of: Collection[LogPlace] = (),
    ) -> Session:
        """Open a session to write.

        Args:
            key: Which.
            create: Whether it may be new.
            owner: Whose it is then.
            of: Places in the log of the session that is meant: it is not new, and a later session
                of the same id does not have them.

        Raises:
            SessionNotFoundError: There is no such session, and ``create`` is false.
            LeaseLostError: The session that is meant was deleted.
            LeaseHeldError: Another process keeps holding it.

        """
        sessions = await self.manager()
        try:
            session = await sessions.open(
                key.agent,
                session=key.session,
                tenant=key.tenant,
                owner=self._owner if owner is None else owner,
                tags=self._tags,
                create=create and not of,
                on_held=self._on_held,
                wait=self.wait,
            )
        except SessionNotFoundError as error:
            if of:
                raise deleted(key) from error
            raise
        is_same = False
        try:
            # The same epoch is the same holder, so nothing has to be read.
            older = [place for place in of if place.epoch != session.epoch]
            is_same = all([await is_in_log(store_of(session), key, place) for place in older])
        finally:
            if not is_same:
                await let_go(session)  # to its own users
        if not is_same:
            raise deleted(key)
        return session

    async def change(
        self,
        key: SessionKey,
        append: Callable[[Session], Awaitable[bool]],
        *,
        create: bool = True,
        owner: str | None = None,
        of: Collection[LogPlace] = (),
    ) -> LogPlace:
        """Open a session, append to it, and make that durable; return where its log ends then.

        Args:
            key: Which.
            append: Appends to it, unless something else was appended while it was reading: then
                it returns False, and is called again.
            create: As for `open`,
            owner: this,
            of: and this.

        Raises as `open` and `save` do.
        """
        while True:
            opening = self.open(key, create=create, owner=owner, of=of)
            async with await opening as session:
                try:
                    while not await append(session):
                        pass
                except LeaseLostError:  # handed over before anything was appended: ask for it back
                    continue
                version = session.version
                await self.save(session)
                return LogPlace(version, session.epoch)

    async def delete(self, key: SessionKey) -> None:
        """Delete a session, if there is one."""
        sessions = await self.manager()
        await sessions.delete(
            key.agent,
            session=key.session,
            tenant=key.tenant,
            on_held=self._on_held,
            wait=self.wait,
        )

    async def listed(
        self, *, owner: str | None = None, prefix: str = "", newest_first: bool = False
    ) -> AsyncGenerator[SessionInfo, None]:
        """Yield what the store lists of the tenant's sessions."""
        sessions, after = await self.manager(), None
        while page := await sessions.list(
            tenant=self.tenant,
            owner=owner,
            prefix=prefix,
            after=after,
            limit=LISTED,
            newest_first=newest_first,
        ):
            after = page[-1]
            for info in page:
                yield info
            if len(page) < LISTED:
                return

    async def save(self, session: Session) -> None:
        """Make a session durable.

        Raises:
            LeaseLostError: Another process has taken it over, and is named; or it was deleted.

        """
        try:
            await session.save()
        except LeaseLostError as error:
            await self.refuse(session, error)
        except SessionNotFoundError as error:
            raise deleted(session.key) from error

    async def refuse(
        self, session: Session, cause: LeaseLostError, *, discard: bool = True
    ) -> NoReturn:
        """Raise a LeaseLostError that names the process that has taken a session over.

        Args:
            session: Which.
            cause: What the session raised.
            discard: Whether what it has unsaved is dropped: its callers are told that it was not
                stored, so neither ``health()`` nor the end of the manager has to. Not in a manager
                of the program's own, which may have appended to the session as well.

        """
        if discard and self.is_own:
            discard_lost(session)
        other = await other_holder(await self.manager(), session.key)
        message = f"session {session.key} was taken over by {other or 'another process'}: {cause}"
        raise LeaseLostError(message, **{**cause.facts, "key": str(session.key)}) from cause

    async def aclose(self) -> None:
        """Close the manager if it is its own, and nobody else's.

        Raises:
            UnsavedChangesError: Something could not be saved.

        """
        self.leave_ended_loop()
        share, sessions = self._share, self.opened
        if share is None or sessions is None:
            return
        self.opened, self._home, self._is_closed = None, None, True
        self._leave(share)
        if not share.users:
            (await sessions.aclose()).raise_if_unsaved()
        elif sessions.shutdown_report is None:
            await sessions.flush()


def named_key(
    agent: str, session: str, tenant: str, *, agent_is: str, session_is: str
) -> SessionKey:
    """Return the key of a session by ids of an SDK's.

    Args:
        agent: The first id,
        session: and the second.
        tenant: Whose session it is.
        agent_is: The SDK's word for the first,
        session_is: and for the second, as errors have them.

    Raises:
        InvalidArgumentError: It is no key.

    """
    try:
        return session_key(agent, session, tenant)
    except InvalidArgumentError as error:
        option = str(error.facts.get("option", ""))
        word = {"agent id": agent_is, "session id": session_is}.get(option, option)
        message = str(error).replace(option, word)
        raise InvalidArgumentError(message, **{**error.facts, "option": word}) from None


def deleted(key: SessionKey) -> LeaseLostError:
    """Return the error for a write of a run that knows a session from before it was deleted."""
    message = (
        f"session {key} was deleted or renamed after it was read or written here: this was not "
        "stored, since it is of that session; read it again, to continue what has its id now"
    )
    return LeaseLostError(message, key=str(key))


def quoted(name: str) -> str:
    """Return a name without what ends it in an agent's id."""
    return name.replace("%", "%25").replace("/", "%2F")


def unquoted(name: str) -> str:
    """Return the name that `quoted` was given."""
    return name.replace("%2F", "/").replace("%25", "%")


def _is_closed(shared: _Shared) -> bool:
    return shared.manager is not None and shared.manager.shutdown_report is not None


class Adapter:
    """Base of every adapter: a manager, and an end that closes the one it opened."""

    _connection: AdapterManager

    @classmethod
    def _made_of(
        cls, url: str | os.PathLike[str] | None, *first: object, **options: object
    ) -> Self:
        """Return one that opens a store of its own at the first call."""
        self = cls(*first, None, **options)  # type: ignore[call-arg]  # as its subclasses take it
        self._connection.url = url
        return self

    async def __aenter__(self) -> Self:
        self._connection.enter()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close what ``from_url`` has opened. A manager that you have opened stays open."""
        await self._connection.aclose()


class StoreAdapter(Adapter):
    """An adapter whose objects have many sessions, made of a manager or of a URL."""

    @classmethod
    def from_url(cls, url: str | os.PathLike[str] | None = None, **options: Any) -> Self:
        """Return a store that opens perdure's at the first call; close it with `aclose`.

        Args:
            url: As for `perdure.connect`.
            options: As for the class.

        """
        return cls._made_of(url, **options)

    @classmethod
    def in_memory(cls, **options: Any) -> Self:
        """Return a store in memory, for your tests."""
        return cls.from_url("memory:", **options)


class SessionAdapter(Adapter):
    """An adapter whose objects are one session each, made of a manager or of a URL."""

    _key: SessionKey

    @classmethod
    def from_url(
        cls, session_id: str, url: str | os.PathLike[str] | None = None, **options: Any
    ) -> Self:
        """Return an object that opens its own store at the first call; close it with `aclose`.

        Args:
            session_id: The id of the session in the store.
            url: As for `perdure.connect`.
            options: As for the class.

        """
        return cls._made_of(url, session_id, **options)

    @classmethod
    def in_memory(cls, session_id: str = "test", **options: Any) -> Self:
        """Return an object in memory, for your tests."""
        return cls.from_url(session_id, "memory:", **options)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._key}>"


class _Nothing(Awaitable[None]):
    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class BlockingAdapter(Adapter):
    """An adapter that its SDK also calls from threads, where nothing can be awaited."""

    _portal: ExitStack | None = None

    @classmethod
    def from_conn_string(
        cls, conn_string: str | os.PathLike[str] | None = None, **options: Any
    ) -> Self:
        """Return one that opens a store of its own: ``async with`` it, or `aclose` it.

        Args:
            conn_string: As for `perdure.connect`.
            options: As for the class.

        """
        return cls._made_of(conn_string, **options)

    @classmethod
    def in_memory(cls, **options: Any) -> Self:
        """Return one in memory, for your tests."""
        return cls.from_conn_string("memory:", **options)

    def setup(self) -> Awaitable[None]:
        """Do nothing, whether it is awaited or not: perdure's stores set themselves up."""
        return _Nothing()

    async def __aenter__(self) -> Self:
        self._connection.enter()
        await self._connection.manager()
        return self

    def __enter__(self) -> Self:
        from anyio.from_thread import start_blocking_portal

        with ExitStack() as stack:  # a store that does not open must not leave its thread behind
            portal = stack.enter_context(start_blocking_portal(name="perdure adapter"))
            portal.call(self.__aenter__)
            self._portal = stack.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        portal, self._portal = self._portal, None
        try:
            self._wait_for(self.aclose())
        finally:
            if portal is not None:
                portal.__exit__(None, None, None)

    def _wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call on the manager's event loop, from another thread.

        Raises:
            WrongLoopError: This is that loop's own thread, it does not run, or the manager is not
                open.

        """
        from asyncio import AbstractEventLoop, _get_running_loop, run_coroutine_threadsafe

        opened = self._connection.opened
        loop = None if opened is None else loop_of(opened)
        name = type(self).__name__
        if not isinstance(loop, AbstractEventLoop):
            message = (
                f"this {name} has no event loop yet: `async with` it and use the asynchronous "
                "calls, or, in a program without an event loop, `with "
                f"{name}.from_conn_string(url) as …`"
            )
        elif _get_running_loop() is loop:
            message = (
                f"a synchronous call on the event loop of this {name} would wait for itself: use "
                "the asynchronous one (ainvoke, aget and so on), or call it in a thread"
            )
        elif not loop.is_running():
            message = (
                f"the event loop of this {name} is not running: call it while that loop runs, or "
                f"use `with {name}.from_conn_string(url) as …`"
            )
        else:
            return run_coroutine_threadsafe(call, loop).result()
        call.close()
        raise WrongLoopError(message)
