"""The state of a session now: its status, what is unsaved, the intervals in force, its holder.

A look at the end of the log and at the lease; no session is opened, and none is read whole.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from perdure.autosave.options import Autosave
from perdure.autosave.tracked import State
from perdure.inspector.activity import TAIL, SessionStatus, is_held, status_of
from perdure.inspector.threads import thread_status
from perdure.records.keys import SessionKey
from perdure.records.manifest import LeaseState
from perdure.records.records import TURN, Record
from perdure.session.internals import running_turn, session_open_here, tracked_of
from perdure.session.manager import SessionManager
from perdure.session.session import Session
from perdure.store import Store

STUCK = frozenset({State.FAILED, State.QUARANTINED, State.LOST})


async def newest_records(store: Store, key: SessionKey) -> list[Record]:
    """Return a log's newest records, newest first, up to the newest turn's or `TAIL`."""
    found: list[Record] = []
    async with aclosing(store.read_log(key, limit=TAIL, reverse=True)) as log:
        async for chunk in log:
            for record in chunk.records:
                found.append(record)
                if record.kind == TURN:
                    return found
    return found


async def stored_status(store: Store, key: SessionKey, holder: LeaseState | None) -> SessionStatus:
    """Return a session's status, as its log and its lease tell it."""
    newest, held = await newest_records(store, key), is_held(holder)
    return thread_status(newest, held=held) or status_of(newest, held=held)


def status_here(sessions: SessionManager, key: SessionKey) -> SessionStatus | None:
    """Return the status of a session that works, or cannot be saved, in this process."""
    session = session_open_here(sessions, key)
    if session is None:
        return None
    tracked = tracked_of(session)
    if tracked.state in STUCK:
        return SessionStatus("failed", f"saving: {tracked.last_error or tracked.state.value}")
    turn = running_turn(session)
    return SessionStatus("running", f"turn {turn}") if turn else None


def saving_here(session: Session | None) -> dict[str, Any] | None:
    """Return what is unsaved of a session, and the intervals in force; None if not open here."""
    if session is None:
        return None
    tracked = tracked_of(session)
    in_force = session.autosave.in_force
    return {
        "unsaved_records": tracked.version - tracked.durable,
        "unsaved_bytes": tracked.pending_bytes,
        # seconds since the oldest change that is not durable
        "unsaved_age": session.unsaved_age,
        "intervals": intervals(in_force),
    }


def intervals(autosave: Autosave | None) -> dict[str, float | None] | None:
    """Return the intervals of a setting in seconds; None without timers."""
    if autosave is None:
        return None
    return {"debounce": autosave.debounce, "max_delay": autosave.max_delay}
