"""A session service of Google ADK in a store of perdure: `PerdureSessionService`.

A session of the SDK is a session, and an event a message of it. The session's own state is a named
state, of which a write stores only the keys that changed. State of an app and of a user belongs to
many sessions, and is kept in scopes.

What one call adds to a session is one group of the log: a crash leaves all of it or nothing.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, final

import msgspec

from perdure._lib.lazy import from_extra
from perdure._lib.logs import log_facts
from perdure.adapters.claims import (
    Large,
    as_kept,
    claimed,
    in_parts,
    is_large,
    storable,
    unwrapped,
    unwrapped_here,
)
from perdure.adapters.exact import refused_part
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
    event_of,
    not_json,
    origin_in,
    origin_of,
    read_log,
    state_delta_of,
    tail_behind,
    with_base,
)
from perdure.adapters.google_adk_shared import (
    APP,
    TEMP,
    USER,
    SharedChange,
    SharedState,
    app_of,
    scope_key_of,
    user_of,
)
from perdure.adapters.imports import diverged
from perdure.adapters.items import Adapter, AdapterManager, Recent, append_turn, named_key, quoted
from perdure.adapters.versions import require_readable
from perdure.errors import (
    LeaseLostError,
    SessionNotFoundError,
)
from perdure.memory.documents import StateSet
from perdure.records.keys import SessionKey
from perdure.records.records import STATE, Entry
from perdure.records.values import is_plain
from perdure.session.contents import meta_entry
from perdure.session.internals import (
    accept,
    contents_of,
    has_content,
    in_background,
    other_holder,
    parts_of,
    read_stored,
    release_unused,
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

_log = logging.getLogger(__name__)

STATE_DOCUMENT: Final = f"state/{SDK}.json"
"""The named state that is the state of the SDK's session."""
CREATED_DOCUMENT: Final = f"state/{SDK}/created.json"
"""The named state that is the one that the session was created with."""
TAIL_DOCUMENT: Final = f"state/{SDK}/tail.json"
"""The named state that says from where on events are needed next to the last summary."""
IMPORTED: Final = 200
"""Events of a session that are imported between two saves."""
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
        self._shared = SharedState(self._connection)
        self._logs: Recent[SessionKey, EventLog] = Recent(CACHED_BYTES)

    @classmethod
    def in_memory(cls, **options: Any) -> Self:
        """Return a service in memory, for your tests."""
        return cls("memory:", **options)

    async def close(self) -> None:
        """Close it, as `aclose` does: the SDK's own service has this name."""
        await self.aclose()

    async def prepare_tables(self) -> None:
        """Open the store, as the SDK's database service prepares its tables; nothing needs it."""
        await self._connection.manager()

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
        noted = SharedChange(self._shared, key, delta.shared, at=now)

        def require_new(source: Session | SessionView | None) -> None:
            if source is not None and origin_of(source) is not None:
                raise AlreadyExistsError(f"Session with id {session_id} already exists.")

        async def begin(held: Session) -> bool:
            require_new(held)
            version = held.version
            own = await storable(held, delta.session)
            entries = [meta_entry(owner=user_id or None, metadata=origin), *_state_entries(own)]
            if own:  # what a rewind to the beginning restores
                entries += _state_entries(own, name=CREATED_DOCUMENT)
            await noted.prepare(version)
            if held.version != version:
                return False
            accept(held, tuple(entries))
            return True

        require_new(await self._connection.peek(key))  # whoever has it is not asked for it
        await self._connection.change(key, begin, create=True)
        await noted.commit()
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
        state = await self._state(source, log) | await self._shared.state(APP, app_name)
        state |= await self._shared.state(USER, app_name, user_id)
        return _as_session(key, state, log, events)

    async def list_sessions(
        self, *, app_name: str, user_id: str | None = None
    ) -> sdk.ListSessionsResponse:
        """List sessions with their state and without events, the oldest update first."""
        sessions = await self._connection.manager()
        prefix = f"{quoted(app_name)}/{user_id or ''}"
        listing = self._connection.listed(prefix=prefix)
        keys = [info.key async for info in listing if user_id in (None, user_of(info.key))]
        app = await self._shared.state(APP, app_name)
        users = {
            user: await self._shared.state(USER, app_name, user) for user in set(map(user_of, keys))
        }
        found: list[AdkSession] = []

        def add(key: SessionKey, state: Mapping[str, Any], updated_at: float) -> None:
            user = user_of(key)
            listed = AdkSession(id=key.session, app_name=app_name, user_id=user)
            listed.state = {**state, **copy.deepcopy(app | users[user])}
            listed.last_update_time = updated_at
            found.append(listed)

        stored = [key for key in keys if session_open_here(sessions, key) is None]
        read = await read_stored(sessions, stored, STATE_DOCUMENT)
        looked: set[SessionKey] = set()
        for key, (info, state, active_at) in read.items():
            origin = origin_in(info)
            if origin is not None:
                updated_at = active_at if info.messages else None
                own = json.loads(state or "{}")
                if not any(map(is_large, own.values())):
                    add(key, unwrapped_here(own), updated_at or origin.created_at)
                    looked.add(key)
            else:
                looked.add(key)
        for key in keys:
            if key not in looked:  # it is open here, or takes more than a look
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
        key = self._key(app_name, user_id, session_id.strip())
        for prefix in (APP, USER):
            await self._shared.finish(await self._shared.scope(prefix, app_name, user_id), key)
        await self._connection.delete(key)

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Return a user's state, by keys without their prefix."""
        state = await self._shared.state(USER, app_name, user_id)
        return {key.removeprefix(USER): value for key, value in state.items()}

    async def append_event(self, session: AdkSession, event: Event) -> Event:
        """Append an event, and return it once it is durable; a partial one is not stored.

        An event that was stored before, and is given again, is stored once: so a call that was
        cancelled or has failed can be repeated. The state that it changes of the user and the app
        is stored with it, or not at all.

        Raises:
            AlreadyExistsError: Another event of the session has its id. It is the SDK's error.
            StaleSessionError: The session was continued since it was loaded; nothing was stored.
                It is the SDK's error, and names the process that did so.
            SessionNotFoundError: There is no such session. It is the SDK's error.
            NotStorableError: The event is not JSON, or could not be read back; nothing was stored.
            TooLargeError: The event is larger than a record, and the store keeps no blobs; nothing
                was stored.
            LeaseHeldError: Another process keeps holding the session.

        """
        if event.partial:
            return event
        self._apply_temp_state(session, event)
        event = self._trim_temp_delta_state(event)
        key = self._key(session.app_name, session.user_id, session.id)
        change = _Change(event)
        noted = SharedChange(self._shared, key, change.delta.shared, event=event.id)
        held = await self._append(key, session, change, noted)
        if not self.durable:
            if noted.is_any:
                in_background(held, partial(noted.commit_after, held, held.version))
        else:
            try:
                await held.save()
            except LeaseLostError as error:
                if self._connection.is_own:
                    await held.discard_unsaved()  # the caller is told that it was not stored
                await self._refuse(key, error)
            except SessionNotFoundError as error:
                raise UnknownSessionError(f"Session {session.id} not found.") from error
            await noted.commit()
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
        entries = change.small()
        for prefix, changed in change.delta.shared.items():
            if changed:
                await (await self._shared.scope(prefix, app_name, user_id)).update(changed)
        await parts_of(sessions).inbox.post_entries(session_key, entries, key or event.id)

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
        delta = _Delta(EventActions(state_delta=session.state))
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
            has_state = is_known and await _fields(held) == delta.shown
            if len(stored) > len(wanted) or (not missing and has_state):
                return len(stored), 0
            if not is_known:
                about = {SDK: msgspec.to_builtins(origin)}
                accept(held, (meta_entry(owner=session.user_id or None, metadata=about),))
                version += 1
            for at in range(0, len(missing) or 1, IMPORTED):
                part = [
                    (change, await change.entries(held)) for change in missing[at : at + IMPORTED]
                ]
                own = await storable(held, delta.session)
                if held.version != version:
                    raise diverged(key, "something was added while it was imported")
                for change, entries in part:
                    change.append_to(held, entries)
                if at + IMPORTED >= len(missing):
                    accept(held, tuple(_state_entries(own)))
                version = held.version
                await held.save()
        await release_unused(held)
        return len(stored), len(missing)

    # Inside

    def _key(self, app_name: str, user_id: str, session_id: str) -> SessionKey:
        tenant = self._connection.tenant
        return named_key(
            f"{quoted(app_name)}/{user_id}",
            session_id,
            tenant,
            agent_is="app_name/user_id",
            session_is="session_id",
        )

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
            state = await _fields(source)
            if as_of(source) == log.as_of:
                log.state = state
        return copy.deepcopy(state)

    async def _append(
        self, key: SessionKey, session: AdkSession, change: _Change, noted: SharedChange
    ) -> Session:
        """Append an event where nothing else was appended since the caller's session."""
        sessions = await self._connection.manager()
        while True:
            try:
                if session_open_here(sessions, key) is None:
                    # Who was overtaken does not ask for the lease.
                    view = await sessions.load(key.agent, session=key.session, tenant=key.tenant)
                    await self._require_current(view, session, change)
                async with await self._connection.open(key, create=False) as held:
                    while not await self._apply(held, session, change, noted):
                        pass
                    return held
            except SessionNotFoundError as error:
                raise UnknownSessionError(f"Session {session.id} not found.") from error
            except LeaseLostError:  # handed over before anything was appended
                continue

    async def _apply(
        self, held: Session, session: AdkSession, change: _Change, noted: SharedChange
    ) -> bool:
        """Append an event; False if something was appended while this was waiting."""
        version = held.version
        log = await self._require_current(held, session, change)
        may_be_older = not log.is_all and change.event.id not in log.by_id
        if may_be_older and any(event.id == change.event.id for event in session.events):
            log = await self._log(held, EventRange())
        known = log.named(change.event.id, change.data)
        if known is not None:
            if known is log.written and change.event.id not in {e.id for e in session.events}:
                self._commit(session, change.event, log)  # a call that was cancelled
            return True
        if change.event.id in log.by_id:
            raise AlreadyExistsError(
                f"Event with id {change.event.id} already exists in session {session.id}, with "
                "other content: give each event an id of its own."
            )
        if change.event.actions.rewind_before_invocation_id:
            given = await _fields(held, CREATED_DOCUMENT)
            change = change.restoring(given, session)
        entries = await change.entries(held)
        if self.compacted and change.event.actions.compaction is not None:
            entries += await self._tail_entry(held, change.event)
        await noted.prepare(version)
        if held.version != version:
            return False
        change.append_to(held, entries)
        # Nothing is awaited from here on: the session object knows what it has to.
        seq = held.version - sum(entry.kind == STATE for entry in entries)
        log.add(change.stored(seq), as_of(held), change.delta.shown)
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
        kept = msgspec.structs.replace(tail, state=as_kept(tail.state))
        return (_state_entry(msgspec.to_builtins(kept), name=TAIL_DOCUMENT, is_new=True),)

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


class _Delta:
    """Changes of an event to the state: of the session, of the user, of the app; as JSON.

    Raises:
        InvalidArgumentError: A key is only a prefix.
        NotStorableError: A value is not JSON.
        TooLargeError: A value is nested too deep.

    """

    def __init__(self, actions: EventActions) -> None:
        changed = _changed(actions) if actions.state_delta else {}
        kept = as_kept(changed)
        self.shared: dict[str, dict[str, Any]] = {
            prefix: {
                scope_key_of(key.removeprefix(prefix)): value
                for key, value in kept.items()
                if key.startswith(prefix)
            }
            for prefix in (APP, USER)
        }
        """By prefix, and by the scope's keys."""
        self.session: dict[str, Any] = {
            key: value for key, value in kept.items() if not key.startswith((APP, USER, TEMP))
        }
        self.shown: dict[str, Any] = {key: changed[key] for key in self.session}
        """The session's own, as it is given out."""


def _changed(actions: EventActions) -> dict[str, Any]:
    try:
        changed = state_delta_of(actions)
    except ValueError as error:
        raise not_json("the state", actions.state_delta, error) from error
    if not is_plain(actions.state_delta):
        place, part = refused_part(actions.state_delta, _is_foreign, "state")
        if _is_foreign(part):
            _tell(type(part).__qualname__, place)
    return changed


def _is_foreign(value: Any) -> bool:
    """Whether a value comes back as another one, be it in a dict or a list."""
    if isinstance(value, dict):
        return any(type(key) is not str for key in value) or any(map(_is_foreign, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_foreign, value))
    return type(value) not in (str, int, float, bool, type(None))


@lru_cache
def _tell(name: str, place: str) -> None:
    """Warn that an object of a class comes back as JSON: once for each place."""
    message = (
        "a %(type)s at %(path)s is stored as its JSON, and comes back as that: keep plain values "
        "in the state"
    )
    log_facts(_log, logging.WARNING, message, type=name, path=place)


class _Change:
    """Stored form of an event."""

    def __init__(self, event: Event, *, is_posted: bool = False) -> None:
        self.event: Event = event
        try:
            self.data: bytes = as_json(event)
        except ValueError as error:
            raise not_json(f"event {event.id}", event, error) from error
        read = partial(event_of, self.data)
        self._read: Event = require_readable(f"event {event.id}", "google-adk", read)
        self.delta: _Delta = _Delta(event.actions)
        parts = None if event.content is None else event.content.parts
        self.is_asked: bool = event.author == "user" and any(
            part.function_response is None for part in parts or ()
        )
        """Whether it is a user's message, with which an invocation begins."""
        self._messages: list[Entry | Large] = encoded(self.data, is_posted=is_posted)

    def small(self) -> tuple[Entry, ...]:
        """Return its records.

        Raises:
            TooLargeError: It is larger than a record may be.

        """
        records = [each for each in self._messages if not isinstance(each, Large)]
        for each in self._messages:
            if isinstance(each, Large):
                raise each.error
        own = self.delta.session
        return (*records, *([_state_entry(own)] if own else ()))

    async def entries(self, held: Session) -> tuple[Entry, ...]:
        """Return its records for a session; what is large is in blobs then.

        Raises:
            TooLargeError: The store keeps no blobs.

        """
        messages = await claimed(held, self._messages)
        own = await storable(held, self.delta.session)
        return (*messages, *(_state_entries(own, is_new=False) if own else ()))

    def restoring(self, given: Mapping[str, Any], session: AdkSession) -> _Change:
        """Return a rewind that restores what a session was created with.

        The SDK knows of the state only what events have changed: it clears the rest.
        """
        actions = self.event.actions
        before = takewhile(
            lambda event: event.invocation_id != actions.rewind_before_invocation_id,
            session.events,
        )
        set_later = {key for event in before for key in event.actions.state_delta}
        missing = object()
        for key in given.keys() - set_later:
            if actions.state_delta.get(key, missing) is None:
                actions.state_delta[key] = copy.deepcopy(given[key])
        return _Change(self.event)

    def append_to(self, held: Session, entries: tuple[Entry, ...]) -> None:
        """Append its records; a user's message begins a turn."""
        append_turn(held, entries, is_asked=self.is_asked, at=self.event.timestamp)

    def stored(self, seq: int) -> StoredEvent:
        """Return the event as it is stored, its last message being that record."""
        id_, at = self.event.id, self.event.timestamp
        return StoredEvent(id_, seq, at, self.data, is_posted=False, given=self._read)


# Reading


async def _fields(source: Session | SessionView, name: str = STATE_DOCUMENT) -> dict[str, Any]:
    """Return a state as it was given."""
    data = await contents_of(source).state_document(name)
    return {} if data is None else await unwrapped(source, json.loads(data))


async def _tail_of(source: Session | SessionView) -> Tail | None:
    data = await contents_of(source).state_document(TAIL_DOCUMENT)
    if data is None:
        return None
    tail = msgspec.convert(json.loads(data), Tail)
    return msgspec.structs.replace(tail, state=await unwrapped(source, tail.state))


def _state_entries(
    fields: Mapping[str, Any], *, name: str = STATE_DOCUMENT, is_new: bool = True
) -> list[Entry]:
    """Return the records that change some keys of a session's state, or begin it."""
    return [
        _state_entry(part, name=name, is_new=is_new and not at)
        for at, part in enumerate(in_parts(fields))
    ]


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
        app_name=app_of(key),
        user_id=user_of(key),
        state=state,
        last_update_time=log.updated_at,
    )
    session.events = events
    session._storage_update_marker = log.marker  # noqa: SLF001  # it is for session services
    return session
