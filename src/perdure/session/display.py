"""How sessions and managers show themselves to people: in notebooks, and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.display import card

if TYPE_CHECKING:
    from perdure.session.connected import ManagerParts
    from perdure.session.session import Session


def session_text(session: Session) -> str:
    """Return a session's state in one line."""
    return (
        f"<Session {session.key} {_state(session)} version={session.version} "
        f"durable={session.durable_version}>"
    )


def session_card(session: Session) -> str:
    """Return a session's state as HTML."""
    about = session.info
    facts = {
        "title": about.metadata.title or "",
        "state": _state(session),
        "turns": about.turns,
        "records": session.version,
        "durable up to": session.durable_version,
        "unsaved for": f"{session.unsaved_age:.1f} s",
    }
    return card(f"Session {session.key}", facts)


def _state(session: Session) -> str:
    if session._closed_by is not None or not session._runtime.host.running:
        return "closed"
    return "open" if session._tracked.end is None else session._tracked.end.value


def manager_facts(connected: ManagerParts | None) -> dict[str, object]:
    """Return how a manager stands; from any thread, at any time."""
    if connected is None:
        return {"state": "not connected"}
    store, report = connected.runtime.store.location, connected.closing.report
    if report is not None:
        return {"state": "closed", "store": store, "report": report}
    health = connected.health()
    return {
        "state": "open",
        "store": store,
        "sessions": f"{health.sessions} sessions",
        "saving": health.status,
        "unsaved": f"{health.unsaved_bytes} bytes unsaved",
    }
