"""A session service of Google ADK in a store of perdure: `PerdureSessionService`.

A session of the SDK is a session, and an event a message of it. The session's own state is a named
state, of which a write stores only the keys that changed. State of an app and of a user belongs to
many sessions, and is kept in scopes.

What one call adds to a session is one group of the log: a crash leaves all of it or nothing.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, final

import msgspec

from perdure._lib.lazy import from_extra
from perdure.adapters.google_adk_events import (
    SDK,
    SHAPE,
    EventLog,
    EventRange,
    SessionOrigin,
    StoredEvent,
    Tail,
    as_json,
    as_of,
    encoded,
    not_json,
    origin_in,
    origin_of,
    read_log,
    tail_behind,
    with_base,
)
from perdure.adapters.imports import diverged
from perdure.adapters.items import Adapter, AdapterManager, Recent, quoted
from perdure.adapters.versions import require_readable
from perdure.errors import InvalidArgumentError, LeaseLostError, SessionNotFoundError
from perdure.memory.documents import StateSet
from perdure.records.json import MAX_VALUE_DEPTH, is_deeper, too_deep
from perdure.records.keys import SessionKey, session_key
from perdure.records.records import STATE, Entry
from perdure.session.contents import meta_entry
from perdure.session.internals import (
    accept,
    begin_turn,
    contents_of,
    has_content,
    other_holder,
    parts_of,
    read_stored,
    release_unused,
    running_turn,
    session_open_here,
)
from perdure.session.manager import SessionManager
from perdure.session.session import Session, SessionView

with from_extra(
    "google.adk", used_by="PerdureSessionService", name="Google ADK", extra="google-adk"
):
    from google.adk.errors import StaleSessionError
    from google.adk.errors.already_exists_error import AlreadyExistsError
    from google.adk.errors.session_not_found_error import (
        SessionNotFoundError as UnknownSessionError,
    )
    from google.adk.events.event import Event
    from google.adk.events.event_actions import EventActions
    from google.adk.platform import time as platform_time, uuid as platform_uuid
    from google.adk.sessions import base_session_service as sdk
    from google.adk.sessions.session import Session as AdkSession

if TYPE_CHECKING:
    from perdure.lease import OnHeld
    from perdure.session.scope import Scope

STATE_DOCUMENT: Final = f"state/{SDK}.json"
"""The named state that is the state of the SDK's session."""
TAIL_DOCUMENT: Final = f"state/{SDK}/tail.json"
"""The named state that says from where on events are needed next to the last summary."""
IMPORTED: Final = 200
"""Events of a session that are imported between two saves."""
APP, USER, TEMP = "app:", "user:", "temp:"
"""Prefixes of keys that are no state of a session's own."""
CACHED_BYTES: Final = 16 * 1024 * 1024
"""JSON of events that is kept in memory, of sessions that were held here last."""


@final
class PerdureSessionService(Adapter, sdk.BaseSessionService):
    """A ``BaseSessionService`` of Google ADK in any store of perdure.

    ``append_event`` returns once the event is durable. Several processes may run the same session,
    one after another: one whose session object does not know the newest event gets the SDK's
    ``StaleSessionError``, which names the process that has continued it. Reading takes no lease.
    The first write of a session does, and it is given back when another process asks for it, when
    it has been idle for some minutes, or by `aclose`.

    Args:
        store: Where sessions are kept: a URL as for `perdure.connect`, opened at the first call; or
            what ``perdure.connect(url)`` returns, once that is open. None for the default store.
        tenant: Whose they are, where customers share a store.
        durable: Whether a write returns once it is durable. If not, autosave saves it soon, and
            ``flush`` at once.
        compacted: Whether a session is read from its last summary on, where the summary of the
            SDK's compaction stands for everything before. A rewind then reaches back to there.
        on_held: What a write does if another process holds the session: ``"handover"`` asks for it,
            ``"steal"`` waits for it to be released or to expire, ``"raise"`` raises at once.
        wait: Seconds to wait for another process.

    Raises:
        InvalidArgumentError: ``store`` is neither a URL nor a manager.

    """

    def __init__(
        self,
        store: SessionManager | str | os.PathLike[str] | None = None,
        *,
        tenant: str = "",
        durable: bool = True,
        compacted: bool = False,
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> None:
        is_url = store is None or isinstance(store, str | os.PathLike)
        self._connection = AdapterManager(
            None if is_url else store,  # type: ignore[arg-type]  # which checks it
            instead="PerdureSessionService(url)",
            tenant=tenant,
            on_held=on_held,
            wait=wait,
        )
        self._connection.url = store if is_url else None  # type: ignore[assignment]  # as above
        self.durable: bool = durable
        self.compacted: bool = compacted
        self._logs: Recent[SessionKey, EventLog] = Recent(CACHED_BYTES)

    @classmethod
    def in_memory(cls, **options: Any) -> Self:
        """Return a service in memory, for your tests."""
        return cls("memory:", **options)

    async def close(self) -> None:
        """Close it, as `aclose` does: the SDK's own service has this name."""
        await self.aclose()

    # What the SDK calls

    async def create_session(
        self,
        *,
        app_name: str,
        user_id: str,
        state: dict[str, Any] | None = None,
        session_id: str | None = None,
    ) -> AdkSession:
        """Create a session, durably.

        Raises:
            AlreadyExistsError: There is one of this id. It is the SDK's error.
            InvalidArgumentError: An id cannot be used; it is a ``ValueError``.
            NotStorableError: The state is not JSON.
            LeaseHeldError: Another process keeps holding the session.

        """
        session_id = (session_id or "").strip() or platform_uuid.new_uuid()
        key = self._key(app_name, user_id, session_id)
        delta = _Delta(EventActions(state_delta=state or {}))
        now = platform_time.get_time()
        origin = {SDK: msgspec.to_builtins(SessionOrigin(SHAPE, now))}
        entries = (
            meta_entry(owner=user_id or None, metadata=origin),
            _state_entry(delta.session, is_new=True),
        )

        def require_new(source: Session | SessionView | None) -> None:
            if source is not None and origin_of(source) is not None:
                raise AlreadyExistsError(f"Session with id {session_id} already exists.")

        async def begin(held: Session) -> bool:
            require_new(held)
            version = held.version
            await self._share(key, delta)
            if held.version != version:
                return False
            accept(held, entries)
            return True

        require_new(await self._connection.peek(key))  # whoever has it is not asked for it
        await self._connection.change(key, begin, create=True)
        created = await self.get_session(app_name=app_name, user_id=user_id, session_id=session_id)
        if created is None:  # deleted by another process at once
            raise UnknownSessionError(f"Session {session_id} not found.")
        return created

    async def get_session(
        self,
        *,
        app_name: str,
        user_id: str,
        session_id: str,
        config: sdk.GetSessionConfig | None = None,
    ) -> AdkSession | None:
        """Return a session with its events; None if there is none. Takes no lease.

        With a config only the end of its log is read, if the number or the time allows that.

        Raises:
            FormatError: Another version of the SDK wrote an event that the installed one cannot
                read; the error names it.

        """
        key = self._key(app_name, user_id, session_id.strip())
        source = await self._connection.peek(key)
        if source is None or origin_of(source) is None:
            return None
        if config is not None:
            wanted = EventRange(config.num_recent_events, config.after_timestamp)
            log = await self._log(source, wanted)
            events = log.as_events(log.recent(wanted))
        else:
            log, events = await self._events(source)
        state = await self._state(source, log) | await self._state_of(APP, app_name)
        state |= await self._state_of(USER, app_name, user_id)
        return _as_session(key, state, log, events)

    async def list_sessions(
        self, *, app_name: str, user_id: str | None = None
    ) -> sdk.ListSessionsResponse:
        """List sessions with their state and without events, the oldest update first."""
        sessions = await self._connection.manager()
        prefix = f"{quoted(app_name)}/{user_id or ''}"
        listing = self._connection.listed(prefix=prefix)
        keys = [info.key async for info in listing if user_id in (None, _user_of(info.key))]
        app = await self._state_of(APP, app_name)
        users = {
            user: await self._state_of(USER, app_name, user) for user in set(map(_user_of, keys))
        }
        found: list[AdkSession] = []

        def add(key: SessionKey, state: dict[str, Any], updated_at: float) -> None:
            user = _user_of(key)
            listed = AdkSession(id=key.session, app_name=app_name, user_id=user)
            listed.state = state | copy.deepcopy(app | users[user])
            listed.last_update_time = updated_at
            found.append(listed)

        stored = [key for key in keys if session_open_here(sessions, key) is None]
        read = await read_stored(sessions, stored, STATE_DOCUMENT)
        for key, (info, state, active_at) in read.items():
            origin = origin_in(info)
            if origin is not None:
                updated_at = active_at if info.messages else None
                add(key, json.loads(state or "{}"), updated_at or origin.created_at)
        for key in keys:
            if key not in read:  # it is open here, or takes more than a look
                source = await self._connection.peek(key)
                if source is not None and origin_of(source) is not None:
                    log = await self._log(source, EventRange(newest=1))
                    add(key, await self._state(source, log), log.updated_at)
        found.sort(key=lambda session: (session.last_update_time, session.user_id, session.id))
        return sdk.ListSessionsResponse(sessions=found)

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Delete a session, if there is one. State of the app and of the user stays.

        Raises:
            LeaseHeldError: Another process keeps holding it.

        """
        await self._connection.delete(self._key(app_name, user_id, session_id.strip()))

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Return a user's state, by keys without their prefix."""
        return await (await self._scope(USER, app_name, user_id)).values()

    async def append_event(self, session: AdkSession, event: Event) -> Event:
        """Append an event, and return it once it is durable; a partial one is not stored.

        An event that was stored before, and is given again, is stored once: so a call that was
        cancelled or has failed can be repeated.

        Raises:
            StaleSessionError: The session was continued since it was loaded; nothing was stored.
                It is the SDK's error, and names the process that did so.
            SessionNotFoundError: There is no such session. It is the SDK's error.
            NotStorableError: The event is not JSON, or could not be read back; nothing was stored.
            TooLargeError: The event is larger than the limit for a record; nothing was stored.
            LeaseHeldError: Another process keeps holding the session.

        """
        if event.partial:
            return event
        self._apply_temp_state(session, event)
        event = self._trim_temp_delta_state(event)
        key = self._key(session.app_name, session.user_id, session.id)
        change = _Change(event)
        held = await self._append(key, session, change)
        if self.durable:
            try:
                await held.save()
            except LeaseLostError as error:
                if self._connection.is_own:
                    await held.discard_unsaved()  # the caller is told that it was not stored
                await self._refuse(key, error)
            except SessionNotFoundError as error:
                raise UnknownSessionError(f"Session {session.id} not found.") from error
        return event

    async def flush(self) -> None:
        """Make everything durable that was appended."""
        if self._connection.opened is not None:
            await self._connection.opened.flush()

    # Beyond the SDK's interface

    async def post_event(
        self, *, app_name: str, user_id: str, session_id: str, event: Event, key: str | None = None
    ) -> None:
        """Add an event from outside of a run, durably, whichever process has the session.

        It takes no lease, and makes no session object of a run stale. The session's holder adds it
        at once; without a holder, the next process that opens the session to write.

        Args:
            app_name: Whose session.
            user_id: Of which user.
            session_id: Which.
            event: What to add.
            key: What names this event, such as a request's id: a retry with the same key adds
                nothing twice. By default the event's id.

        Raises:
            SessionNotFoundError: There is no such session. It is the SDK's error.
            NotStorableError: The event is not JSON, or the store has no inbox.
            InboxFullError: Too much waits for the session.

        """
        session_key = self._key(app_name, user_id, session_id.strip())
        sessions = await self._connection.manager()
        source = await self._connection.peek(session_key)
        if source is None or origin_of(source) is None:
            raise UnknownSessionError(f"Session {session_id} not found.")
        change = _Change(self._trim_temp_delta_state(event), is_posted=True)
        await self._share(session_key, change.delta)
        inbox = parts_of(sessions).inbox
        await inbox.post_entries(session_key, change.entries, key or event.id)

    async def import_session(self, session: AdkSession) -> tuple[int, int]:
        """Store a session that another service has returned: its events and its own state.

        Events that are here already, as its first ones, are not added again; and nothing is if
        there are more of them than it has. State of the app and of the user is left as it is.

        Returns:
            How many events were here, and how many were added.

        Raises:
            SessionError: Its first events are not those that are here.
            NotStorableError: An event or the state is not JSON; nothing was stored.
            LeaseHeldError: Another process keeps holding the session.

        """
        key = self._key(session.app_name, session.user_id, session.id.strip())
        changes = [_Change(event) for event in session.events]
        state = _Delta(EventActions(state_delta=session.state)).session
        created_at = session.events[0].timestamp if changes else session.last_update_time
        origin = SessionOrigin(SHAPE, created_at)
        async with await self._connection.open(key) as held:
            version = held.version
            stored = [each.data for each in (await read_log(held, EventRange())).events]
            wanted = [change.data for change in changes]
            is_known = origin_of(held) is not None
            if (not is_known and has_content(held)) or stored[: len(wanted)] != wanted[
                : len(stored)
            ]:
                raise diverged(key, "its events are not how the source's begin")
            missing = changes[len(stored) :]
            has_state = is_known and await _session_state(held) == state
            if len(stored) > len(wanted) or (not missing and has_state):
                return len(stored), 0
            if not is_known:
                about = {SDK: msgspec.to_builtins(origin)}
                accept(held, (meta_entry(owner=session.user_id or None, metadata=about),))
                version += 1
            for at in range(0, len(missing) or 1, IMPORTED):
                if held.version != version:
                    raise diverged(key, "something was added while it was imported")
                for change in missing[at : at + IMPORTED]:
                    change.append_to(held)
                if at + IMPORTED >= len(missing):
                    accept(held, (_state_entry(state, is_new=True),))
                version = held.version
                await held.save()
        await release_unused(held)
        return len(stored), len(missing)

    # Inside

    def _key(self, app_name: str, user_id: str, session_id: str) -> SessionKey:
        tenant = self._connection.tenant
        return session_key(f"{quoted(app_name)}/{user_id}", session_id, tenant)

    async def _log(self, source: Session | SessionView, wanted: EventRange) -> EventLog:
        """Return a session's events, as many as are asked for, or more."""
        log, now = self._logs.get(source.key), as_of(source)
        if log is None or now is None or log.as_of != now or not log.has_enough(wanted):
            log = await read_log(source, wanted)
            if now is not None:
                self._logs.put(source.key, log, log.size)
        return log

    async def _events(self, source: Session | SessionView) -> tuple[EventLog, list[Event]]:
        """Return the events that a run needs: all, or those behind the last summary."""
        tail = await _tail_of(source) if self.compacted else None
        if tail is not None:
            wanted = EventRange(seq=tail.seq)
            log = await self._log(source, wanted)
            events = with_base(log.as_events(log.recent(wanted)), tail)
            if events is not None:
                return log, events
        log = await self._log(source, EventRange())
        return log, log.as_events(log.events)

    async def _state(self, source: Session | SessionView, log: EventLog) -> dict[str, Any]:
        """Return the session's own state, for the caller to change."""
        state = log.state
        if state is None:
            state = await _session_state(source)
            if as_of(source) == log.as_of:
                log.state = state
        return copy.deepcopy(state)

    async def _append(self, key: SessionKey, session: AdkSession, change: _Change) -> Session:
        """Append an event where nothing else was appended since the caller's session."""
        sessions = await self._connection.manager()
        while True:
            try:
                if session_open_here(sessions, key) is None:
                    # Who was overtaken does not ask for the lease.
                    view = await sessions.load(key.agent, session=key.session, tenant=key.tenant)
                    await self._require_current(view, session, change)
                async with await self._connection.open(key, create=False) as held:
                    while not await self._apply(held, session, change):
                        pass
                    return held
            except SessionNotFoundError as error:
                raise UnknownSessionError(f"Session {session.id} not found.") from error
            except LeaseLostError:  # handed over before anything was appended
                continue

    async def _apply(self, held: Session, session: AdkSession, change: _Change) -> bool:
        """Append an event; False if something was appended while this was waiting."""
        version = held.version
        log = await self._require_current(held, session, change)
        known = log.named(change.event.id, change.data)
        if known is not None:
            if known is log.written and change.event.id not in {e.id for e in session.events}:
                self._commit(session, change.event, log)  # a call that was cancelled
            return True
        await self._share(held.key, change.delta)
        entries = change.entries
        if self.compacted and change.event.actions.compaction is not None:
            entries += await self._tail_entry(held, change.event)
        if held.version != version:
            return False
        change.append_to(held, entries)
        # Nothing is awaited from here on: the session object knows what it has to.
        seq = held.version - sum(entry.kind == STATE for entry in entries)
        log.add(change.stored(seq), as_of(held), change.delta.session)
        self._logs.put(held.key, log, log.size)
        self._commit(session, change.event, log)
        return True

    async def _tail_entry(self, held: Session, summary: Event) -> tuple[Entry, ...]:
        """Return the record that says from where on events are needed next to a summary."""
        before = await _tail_of(held)
        log = await self._log(held, EventRange(seq=None if before is None else before.seq))
        tail = tail_behind(log, summary, before)
        if tail is None:
            return ()
        return (_state_entry(msgspec.to_builtins(tail), name=TAIL_DOCUMENT, is_new=True),)

    def _commit(self, session: AdkSession, event: Event, log: EventLog) -> None:
        session.last_update_time = event.timestamp
        session._storage_update_marker = log.marker  # noqa: SLF001  # it is for session services
        self._commit_event_to_session(session, event)

    async def _require_current(
        self, source: Session | SessionView | None, session: AdkSession, change: _Change
    ) -> EventLog:
        """Return the newest events, if the caller's session knows them, or the event is stored."""
        if source is None or origin_of(source) is None:
            raise UnknownSessionError(f"Session {session.id} not found.")
        log = await self._log(source, EventRange(newest=1))
        if log.named(change.event.id, change.data) is None and _is_stale(session, log):
            await self._refuse(source.key)
        return log

    async def _refuse(self, key: SessionKey, cause: Exception | None = None) -> NoReturn:
        """Raise StaleSessionError, and name the process that has continued the session."""
        other = await other_holder(await self._connection.manager(), key)
        message = (
            f"session {key} was continued by {other or 'another run of this process'} since it was "
            "loaded: call get_session again before you append to it"
        )
        raise StaleSessionError(message) from cause

    # State that sessions share

    async def _scope(self, prefix: str, app_name: str, user_id: str) -> Scope:
        """Return where the state of an app, or of a user, is kept."""
        name, owner = f"{prefix}{quoted(app_name)}", None
        if prefix == USER:
            name, owner = f"{name}/{user_id}", user_id or None
        about = self._connection
        sessions = await about.manager()
        return sessions.scope(name, tenant=about.tenant, owner=owner, wait=about.wait)

    async def _share(self, key: SessionKey, delta: _Delta) -> None:
        """Write what an event changes in the state of the app and of the user, once."""
        for prefix, changed in delta.shared.items():
            if changed:
                scope = await self._scope(prefix, _app_of(key), _user_of(key))
                await scope.update(changed)
                delta.shared[prefix] = {}

    async def _state_of(self, prefix: str, app_name: str, user_id: str = "") -> dict[str, Any]:
        """Return the state of an app, or of a user, by the keys that a session shows."""
        values = await (await self._scope(prefix, app_name, user_id)).values()
        return {f"{prefix}{name}": value for name, value in values.items()}


class _Delta:
    """Changes of an event to the state: of the session, of the user, of the app; as JSON.

    Raises:
        InvalidArgumentError: A key is only a prefix.
        NotStorableError: A value is not JSON.
        TooLargeError: A value is nested too deep.

    """

    def __init__(self, actions: EventActions) -> None:
        changed = _changed(actions) if actions.state_delta else {}
        self.shared: dict[str, dict[str, Any]] = {
            prefix: {
                key.removeprefix(prefix): value
                for key, value in changed.items()
                if key.startswith(prefix)
            }
            for prefix in (APP, USER)
        }
        """By prefix, and by keys without it."""
        self.session: dict[str, Any] = {
            key: value for key, value in changed.items() if not key.startswith((APP, USER, TEMP))
        }
        if any("" in changed for changed in self.shared.values()):
            message = "the state has a key without a name behind its prefix: give it one"
            raise InvalidArgumentError(message, option="state")


def _changed(actions: EventActions) -> dict[str, Any]:
    try:
        data = actions.model_dump_json(include={"state_delta"})
    except ValueError as error:
        raise not_json("the state", error) from error
    if is_deeper(data.encode(), MAX_VALUE_DEPTH):
        raise too_deep("the state", MAX_VALUE_DEPTH)
    changed: dict[str, Any] = json.loads(data)["state_delta"]
    return changed


class _Change:
    """Stored form of an event."""

    def __init__(self, event: Event, *, is_posted: bool = False) -> None:
        self.event: Event = event
        try:
            self.data: bytes = as_json(event)
        except ValueError as error:
            raise not_json(f"event {event.id}", error) from error
        read = partial(Event.model_validate_json, self.data)
        self._read: Event = require_readable(f"event {event.id}", "google-adk", read)
        self.delta: _Delta = _Delta(event.actions)
        parts = None if event.content is None else event.content.parts
        self.is_asked: bool = event.author == "user" and any(
            part.function_response is None for part in parts or ()
        )
        """Whether it is a user's message, with which an invocation begins."""
        entries = encoded(self.data, is_posted=is_posted)
        if self.delta.session:
            entries.append(_state_entry(self.delta.session))
        self.entries: tuple[Entry, ...] = tuple(entries)

    def append_to(self, held: Session, entries: tuple[Entry, ...] | None = None) -> None:
        """Append it, or these records instead; a user's message begins a turn."""
        entries = self.entries if entries is None else entries
        if self.is_asked and not running_turn(held):
            begin_turn(held, *entries, at=self.event.timestamp)
        else:
            accept(held, entries)

    def stored(self, seq: int) -> StoredEvent:
        """Return the event as it is stored, its last message being that record."""
        id_, at = self.event.id, self.event.timestamp
        return StoredEvent(id_, seq, at, self.data, is_posted=False, given=self._read)


def _app_of(key: SessionKey) -> str:
    quoted = key.agent.partition("/")[0]
    return quoted.replace("%2F", "/").replace("%25", "%")


def _user_of(key: SessionKey) -> str:
    return key.agent.partition("/")[2]


# Reading


async def _session_state(source: Session | SessionView) -> dict[str, Any]:
    data = await contents_of(source).state_document(STATE_DOCUMENT)
    state: dict[str, Any] = {} if data is None else json.loads(data)
    return state


async def _tail_of(source: Session | SessionView) -> Tail | None:
    data = await contents_of(source).state_document(TAIL_DOCUMENT)
    return None if data is None else msgspec.convert(json.loads(data), Tail)


def _state_entry(
    fields: Mapping[str, Any], *, name: str = STATE_DOCUMENT, is_new: bool = False
) -> Entry:
    """Return the record that changes some keys of a session's state, or begins it."""
    value = msgspec.Raw(json.dumps(fields).encode())
    return Entry(STATE, msgspec.json.encode(StateSet(name, value, partial=not is_new)))


def _is_stale(session: AdkSession, log: EventLog) -> bool:
    """Whether a session object does not know the newest event that a run has appended."""
    marker = session._storage_update_marker  # noqa: SLF001  # it is for session services
    if marker is not None:
        return marker != log.marker
    # Another service's, or made by hand: as the SDK's own database service does.
    if log.updated_at <= session.last_update_time or log.written is None:
        return False
    return log.written.id not in {event.id for event in session.events}


def _as_session(
    key: SessionKey, state: dict[str, Any], log: EventLog, events: list[Event]
) -> AdkSession:
    session = AdkSession(
        id=key.session,
        app_name=_app_of(key),
        user_id=_user_of(key),
        state=state,
        last_update_time=log.updated_at,
    )
    session.events = events
    session._storage_update_marker = log.marker  # noqa: SLF001  # it is for session services
    return session
