"""How autosave stands, for people and for readiness checks; not for liveness checks.

A restart would destroy the only copy of what is unsaved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Final, Literal

import msgspec

from perdure._lib.display import card
from perdure.autosave.books import Books
from perdure.autosave.breaker import BreakerState
from perdure.autosave.core import Core
from perdure.autosave.tracked import State, Tracked

__all__ = ["Health", "health_of"]

NAMED: Final = 3
"""Sessions that a reason names."""
_STUCK: Final = {
    State.QUARANTINED: "quarantined: the store refuses a record",
    State.LOST: "taken over by another process with records unsaved here: see sessions.lost",
}


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How autosave stands."""

    status: Literal["ok", "degraded", "failing"]
    """Degraded: saves fail, or much is unsaved. Failing: new records wait or are rejected."""
    oldest_unsaved_age: float
    """For how long the oldest change has not been durable, in seconds."""
    sessions: int
    unsaved: dict[str, int]
    """Sessions with changes that are not durable: dirty (some of them are being saved), failed
    (the last save did not succeed), quarantined, lost."""
    unsaved_bytes: int
    breaker: BreakerState
    reasons: tuple[str, ...] = ()
    """Why it is not ok, one sentence each, for people; empty while it is."""
    lost: dict[str, int] = {}
    """Sessions that another process has taken over, or of which the store has lost records, with
    how many records of each are not in the store. They stay until somebody forks or discards
    them: ``sessions.lost``."""
    undelivered: dict[str, str] = {}
    """Sessions that are open here and whose posts cannot be taken, with why. It is tried again."""
    dead_letters: dict[str, int] = {}
    """Posted items that were set aside here, by session, until they are retried or dropped here."""

    def _repr_html_(self) -> str:
        return card("Health", msgspec.structs.asdict(self))


def health_of(core: Core, now: float, stalled: Sequence[str] = ()) -> Health:
    """Return how it stands now; cheap, however many sessions are unsaved.

    Args:
        core: Knows it.
        now: The engine's time.
        stalled: Why work that is due is not being served.

    """
    books = core.books
    failing = [*stalled, *_failing(core)]
    degraded = _degraded(core)
    status: Literal["ok", "degraded", "failing"] = "degraded" if degraded else "ok"
    if failing:
        status = "failing"
    return Health(
        status=status,
        oldest_unsaved_age=books.oldest_age(now),
        sessions=len(books.sessions),
        unsaved=_states(books),
        unsaved_bytes=books.pressure.dirty_bytes,
        breaker=core.breaker.state,
        reasons=(*failing, *degraded),
        lost=_lost(books),
    )


def _failing(core: Core) -> list[str]:
    if core.stopped:
        return ["autosave has stopped: connect again"]
    if core.books.pressure.blocking:
        return [f"{core.books.pressure.dirty_bytes} bytes are unsaved: new records wait or fail"]
    return []


def _degraded(core: Core) -> list[str]:
    books = core.books
    reasons: list[str] = []
    if core.breaker.state != "closed":
        reasons.append("the store does not answer, or has just begun to again")
    if books.failed:
        t = next(iter(books.failed))
        reasons.append(f"{_sessions(books.failed)} could not be saved, last error: {t.last_error}")
    reasons += books.warnings
    gone = [t for t in books.stuck if t.missing]
    if gone:
        reasons.append(
            f"{_sessions(gone)}: the store no longer has records that it had acknowledged: see "
            "sessions.lost"
        )
    for end in (State.QUARANTINED, State.LOST):
        stuck = [t for t in books.stuck if t.end is end and not t.missing]
        reasons += [f"{_sessions(stuck)} {_STUCK[end]}"] if stuck else []
    if books.pressure.rising and not books.pressure.blocking:
        reasons.append(f"{books.pressure.dirty_bytes} bytes are unsaved")
    return reasons


def _sessions(sessions: Collection[Tracked]) -> str:
    named = ", ".join(str(t.key) for t in islice(sessions, NAMED))
    more = len(sessions) - NAMED
    return f"session {named}" + (f" and {more} more" if more > 0 else "")


def _lost(books: Books) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for t in books.stuck:
        if t.undecided:
            counts[str(t.key)] += t.version - t.durable + t.missing
    return dict(counts)


def _states(books: Books) -> dict[str, int]:
    states = Counter(
        t.end.value for t in books.stuck if t.end and (t.version > t.durable or t.missing)
    )
    states[State.FAILED.value] = len(books.failed)
    states[State.DIRTY.value] = len(books.unsaved) - len(books.failed)
    return {name: count for name, count in states.items() if count}
