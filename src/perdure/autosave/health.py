"""How autosave stands, for people and for readiness checks; not for liveness checks.

A restart would destroy the only copy of what is unsaved.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from perdure._lib.display import card
from perdure.autosave.books import Books
from perdure.autosave.breaker import BreakerState
from perdure.autosave.core import Core
from perdure.autosave.tracked import State

__all__ = ["Health", "health_of"]


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

    def _repr_html_(self) -> str:
        return card("Health", msgspec.structs.asdict(self))


def health_of(core: Core, now: float) -> Health:
    """Return how it stands now; cheap, however many sessions are unsaved."""
    books = core.books
    troubled = books.failed or books.stuck or books.pressure.rising
    status: Literal["ok", "degraded", "failing"] = "ok"
    if books.pressure.blocking or core.stopped:
        status = "failing"
    elif troubled or core.breaker.state != "closed":
        status = "degraded"
    return Health(
        status=status,
        oldest_unsaved_age=books.oldest_age(now),
        sessions=len(books.sessions),
        unsaved=_states(books),
        unsaved_bytes=books.pressure.dirty_bytes,
        breaker=core.breaker.state,
    )


def _states(books: Books) -> dict[str, int]:
    states = Counter(t.end.value for t in books.stuck if t.end and t.version > t.durable)
    states[State.FAILED.value] = len(books.failed)
    states[State.DIRTY.value] = len(books.unsaved) - len(books.failed)
    return {name: count for name, count in states.items() if count}
