"""State of an app and of its users: an event and the changes that it makes there are one unit.

This state is in scopes, and the event in its session's log: no store writes both at once. So a
scope first notes what the event will change, and after which record of the session the event will
be. The event is the commit: the changes count for every reader once the event is in its log, and
never if something else is there. Then they become values of the scope.

A crash between any two of these steps leaves the event with its changes, or neither.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import msgspec

from perdure.adapters.claims import claim_in, storable, unwrapped
from perdure.adapters.envelopes import read_envelope
from perdure.adapters.google_adk_events import SDK, SHAPE, EventEnvelope, origin_of
from perdure.adapters.items import AdapterManager, quoted, unquoted
from perdure.errors import PerdureError
from perdure.memory.documents import StateSet
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.messages import decode_message
from perdure.records.records import MESSAGE_KINDS, STATE, Entry, Record
from perdure.session.internals import (
    accept,
    begin_turn,
    change_of,
    contents_of,
    grouped,
    running_turn,
    scope_source,
    store_of,
)
from perdure.session.scope import Scope
from perdure.session.session import Session, SessionView

APP, USER, TEMP = "app:", "user:", "temp:"
"""Prefixes of keys that are no state of a session's own."""
NAMELESS: Final = "perdure:key"
"""Beginning of a scope's key for a name that would be no key, or begins so itself."""
PENDING_DOCUMENT: Final = f"state/{SDK}/pending.json"
"""The named state of a scope that lists changes whose events may not be stored yet."""
ABANDONED: Final = 86_400.0
"""Seconds after which a change whose event was never stored is dropped."""
LOOKED: Final = 100
"""Records of a session among which an event is looked for."""


class Pending(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes of a scope that an event makes."""

    agent: str
    session: str
    after: int
    """The last record before the event's; the event is the next group of the log."""
    at: float
    """When it was noted; of a session that begins, when that is. Seconds since 1970."""
    values: dict[str, Any]
    """By the scope's keys."""
    event: str | None = None
    """The event's id; None for a session that begins."""

    def is_of(self, other: Pending) -> bool:
        """Whether both are of the same event."""
        mine = self.agent, self.session, self.event
        return mine == (other.agent, other.session, other.event)


@final
class SharedState:
    """The scopes of a service."""

    def __init__(self, connection: AdapterManager) -> None:
        self._connection = connection
        self._known: WeakKeyDictionary[Session, tuple[int, list[Pending]]] = WeakKeyDictionary()
        """Of scopes that are held here: a version, and what is noted as of it."""

    async def scope(self, prefix: str, app_name: str, user_id: str = "") -> Scope:
        """Return where the state of an app, or of a user, is kept."""
        name, owner = f"{prefix}{quoted(app_name)}", None
        if prefix == USER:
            name, owner = f"{name}/{user_id}", user_id or None
        about = self._connection
        sessions = await about.manager()
        return sessions.scope(name, tenant=about.tenant, owner=owner, wait=about.wait)

    async def state(self, prefix: str, app_name: str, user_id: str = "") -> dict[str, Any]:
        """Return the state of an app, or of a user, by the keys that a session shows."""
        values = await self._values(await self.scope(prefix, app_name, user_id))
        return {f"{prefix}{key.removeprefix(NAMELESS)}": each for key, each in values.items()}

    async def _values(self, scope: Scope) -> dict[str, Any]:
        source = await scope_source(scope)
        if source is None:
            return {}
        while True:
            version = source.version if isinstance(source, Session) else 0
            noted = await self._noted(source)
            values = {key: await source.memory.get(key) for key in await source.memory.keys()}
            stored = [each for each in noted if await self._is_stored(each)]
            if not isinstance(source, Session) or source.version == version:
                break
        for pending in stored:
            values |= pending.values
        return await unwrapped(source, values)

    async def prepare(self, scope: Scope, pending: Pending) -> Pending:
        """Note what an event will change, durably, and return that. Raises as `Scope.update`."""
        noted = [pending]

        async def change(session: Session) -> None:
            values = await storable(session, pending.values)
            noted[0] = msgspec.structs.replace(pending, values=values)
            await self._rewrite(session, noted)

        await change_of(scope, change)
        return noted[0]

    async def commit(self, scope: Scope, pending: Pending) -> None:
        """Make values of what an event has changed, once the event is durable; saved soon.

        If that cannot be done now, the next change of the scope does it.
        """
        with suppress(PerdureError):
            session = await scope_source(scope)
            if not isinstance(session, Session):
                return
            while True:
                version, noted = session.version, await self._noted(session)
                if session.version == version:
                    break
            # Not in another one's turn: that may be taken back.
            if pending in noted and not running_turn(session):
                self._write(session, [pending], [each for each in noted if each != pending])

    async def finish(self, scope: Scope, key: SessionKey) -> None:
        """Make values of what a session's events have changed, before it is deleted."""
        source = await scope_source(scope)
        noted = [] if source is None else await self._noted(source)
        if any((each.agent, each.session) == (key.agent, key.session) for each in noted):

            async def change(session: Session) -> None:
                await self._rewrite(session, [])

            await change_of(scope, change)

    async def _rewrite(self, session: Session, new: Sequence[Pending]) -> None:
        """Write what is noted anew: without what has become values, or never will."""
        while True:
            version, noted = session.version, await self._noted(session)
            stored: list[Pending] = []
            kept: list[Pending] = []
            for each in noted:
                if any(each.is_of(other) for other in new):  # a call that is repeated
                    continue
                is_stored = await self._is_stored(each, durable=True)
                if is_stored:
                    stored.append(each)
                elif is_stored is None and each.at + ABANDONED > time.time():
                    kept.append(each)
            # Not if something was appended while this was looking.
            if session.version == version:
                self._write(session, stored, [*kept, *new])
                return

    async def _noted(self, source: Session | SessionView) -> list[Pending]:
        known = self._known.get(source) if isinstance(source, Session) else None
        version = source.version if isinstance(source, Session) else 0
        if known is not None and known[0] == version:  # only its holder changes a scope
            return known[1]
        data = await contents_of(source).state_document(PENDING_DOCUMENT)
        noted = [] if data is None else decode(data, list[Pending])
        if isinstance(source, Session) and source.version == version:
            self._known[source] = version, noted
        return noted

    def _write(self, session: Session, stored: Iterable[Pending], noted: list[Pending]) -> None:
        """Append, as one group, what has become values, and what is noted from now on."""
        value = msgspec.Raw(encode(noted))
        with grouped(session):
            if not running_turn(session):
                begin_turn(session, at=time.time())
            for pending in stored:
                for key, each in pending.values.items():
                    session.memory.set(key, each, pinned=True)  # no limit takes it away
            accept(session, (Entry(STATE, encode(StateSet(PENDING_DOCUMENT, value))),))
        self._known[session] = session.version, noted

    async def _is_stored(self, pending: Pending, *, durable: bool = False) -> bool | None:
        """Whether the event is in its log; None if it may still come there."""
        tenant = self._connection.tenant
        key = SessionKey(pending.agent, pending.session, tenant)
        source = await self._connection.peek(key)
        if source is None:  # not begun yet, or deleted
            return None if pending.event is None else False
        head = source.durable_version if durable and isinstance(source, Session) else math.inf
        if pending.event is None:
            origin = origin_of(source)
            if origin is None:
                return None
            if origin.created_at != pending.at:
                return False
            return True if head > pending.after else None
        found = None
        async for record in _records(source, pending.after):
            found = found or False
            if record.kind in MESSAGE_KINDS and _event_of(record) == pending.event:
                return True if record.seq <= head else None
        return found


@final
class SharedChange:
    """Changes of the app's and the user's state that one event makes, or a new session.

    Args:
        shared: The scopes.
        key: Whose event it is.
        values: By prefix, and by the scope's keys.
        event: Its id; None for a new session.
        at: When that begins; seconds since 1970.

    """

    def __init__(
        self,
        shared: SharedState,
        key: SessionKey,
        values: Mapping[str, dict[str, Any]],
        *,
        event: str | None = None,
        at: float | None = None,
    ) -> None:
        self._shared = shared
        self._key = key
        self._event = event
        self._at = time.time() if at is None else at
        self._values = {prefix: changed for prefix, changed in values.items() if changed}
        self._noted: dict[str, Pending] = {}

    @property
    def is_any(self) -> bool:
        """Whether there are any."""
        return bool(self._values)

    async def prepare(self, version: int) -> None:
        """Note them, before the event that follows a version of the session is appended."""
        for prefix, changed in self._values.items():
            agent, session = self._key.agent, self._key.session
            pending = Pending(agent, session, version, self._at, changed, self._event)
            self._noted[prefix] = await self._shared.prepare(await self._scope(prefix), pending)

    async def commit(self) -> None:
        """Make values of them, once the event is durable."""
        for prefix, pending in self._noted.items():
            await self._shared.commit(await self._scope(prefix), pending)

    async def commit_after(self, held: Session, version: int) -> None:
        """Do so when a version of the session is durable; never, if it is lost."""
        with suppress(PerdureError):
            await held.wait_durable(version)
            await self.commit()

    async def _scope(self, prefix: str) -> Scope:
        return await self._shared.scope(prefix, app_of(self._key), user_of(self._key))


def app_of(key: SessionKey) -> str:
    """Return the app that a session is of."""
    return unquoted(key.agent.partition("/")[0])


def user_of(key: SessionKey) -> str:
    """Return the user that a session is of."""
    return key.agent.partition("/")[2]


def scope_key_of(name: str) -> str:
    """Return the scope's key for a name of a state's, which may be empty."""
    return f"{NAMELESS}{name}" if not name or name.startswith(NAMELESS) else name


async def _records(source: Session | SessionView, after: int) -> AsyncGenerator[Record, None]:
    """Yield the first records after one, also what is not durable, if the session is held here."""
    last = after
    async with aclosing(store_of(source).read_log(source.key, after=after, limit=LOOKED)) as log:
        async for chunk in log:
            for record in chunk.records:
                last = record.seq
                yield record
    if isinstance(source, Session):
        for record in source.unsaved():
            if record.seq > last:
                yield record


def _event_of(record: Record) -> str | None:
    message = decode_message(record.payload)
    claim = claim_in(message)
    if claim is not None:
        return claim.id
    envelope = read_envelope(message, EventEnvelope, sdk=SDK, newest=SHAPE)
    return None if envelope is None else envelope.id
