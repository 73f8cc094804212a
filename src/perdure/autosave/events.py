"""Events of autosave: small frozen values, given to ``on_event`` one by one.

They hold ids, counts and sizes, never content. Durations are seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias, final

import msgspec

from perdure._lib.logs import log_facts
from perdure.records.keys import SessionKey


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A session's records became durable."""

    key: SessionKey
    durable: int
    records: int
    written: int
    """Bytes that the store passed to its storage."""
    took: float
    """Seconds that the save took."""
    window: float
    """From the oldest of the changes until now: how much a crash could have lost."""


class SaveFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A save failed; it will be tried again."""

    key: SessionKey
    attempt: int
    in_doubt: bool
    """True if the records may have been written although the save failed."""
    error: Exception | None
    retry_in: float
    first: bool
    """True if no other session was failing."""


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """No session is failing any more."""


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """The store refuses a session's next group permanently."""

    key: SessionKey
    seq: int
    """The first record that is refused."""
    unsaved: int
    error: Exception | None


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """Another process has taken a session over, or its store has lost records of it."""

    key: SessionKey
    epoch: int
    unsaved: int
    """Records that are still only in memory."""
    missing: int = 0
    """Acknowledged records that the store no longer has."""
    error: Exception | None


class BreakerOpened(msgspec.Struct, frozen=True, kw_only=True):
    """The store counts as down: only probes are sent."""

    error: Exception | None
    unsaved: int
    """Sessions that wait for it."""


class Degraded(msgspec.Struct, frozen=True, kw_only=True):
    """Much is unsaved: sessions save without debounce, or appends must wait."""

    dirty_bytes: int
    oldest_age: float
    blocking: bool
    """True if a limit is reached, so that appends wait or are rejected."""


class LoopBlocked(msgspec.Struct, frozen=True, kw_only=True):
    """Something kept the event loop from running while a save was due."""

    delay: float


class Stalled(msgspec.Struct, frozen=True, kw_only=True):
    """Due sessions made no progress, although the store would have accepted them."""

    reason: str
    sessions: int
    """Number of sessions that wait."""
    error: Exception | None
    """Reason why a task could not be started, if it is known."""


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """Stalled sessions are being saved again."""


class CaptureFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A contributor failed or took too long; the save continued without it."""

    key: SessionKey
    error: Exception


class StoreWarned(msgspec.Struct, frozen=True, kw_only=True):
    """The store's settings are now such that it may lose records; saving continues."""

    reason: str


Event: TypeAlias = (
    Saved
    | SaveFailed
    | Recovered
    | Quarantined
    | Lost
    | BreakerOpened
    | Degraded
    | LoopBlocked
    | Stalled
    | Resumed
    | CaptureFailed
    | StoreWarned
)


log: logging.Logger = logging.getLogger("perdure.autosave")

LOGGED: dict[type[Event], tuple[int, str]] = {
    SaveFailed: (logging.WARNING, "autosave failed, and is retried"),
    BreakerOpened: (logging.ERROR, "the store counts as down, unsaved changes pile up"),
    Recovered: (logging.INFO, "autosave works again"),
    Quarantined: (logging.ERROR, "the store refuses a record permanently"),
    Lost: (logging.ERROR, "another process has taken it over"),
    LoopBlocked: (logging.WARNING, "something blocked the event loop and delayed a save"),
    StoreWarned: (logging.ERROR, "the store may lose records"),
    CaptureFailed: (logging.WARNING, "a contributor failed, the save continued without it"),
}


@final
class Reporter:
    """Deliver every event to ``on_event``, and the few that need a person to the log.

    A failing autosave is logged at its first failure, when the breaker opens, and at recovery, so
    that a store that is down for an hour does not fill a disk.

    Args:
        waiting: The events to deliver; they are removed from there.
        on_event: Called with each; an exception from it is logged.

    """

    def __init__(self, waiting: list[Event], on_event: Callable[[Event], None] | None) -> None:
        self._waiting = waiting
        self._on_event = on_event

    def deliver(self) -> None:
        """Deliver the events since the last call."""
        while self._waiting:
            waiting = self._waiting.copy()
            self._waiting.clear()
            for event in waiting:
                self._report(event)

    def _report(self, event: Event) -> None:
        logged = LOGGED.get(type(event))
        if logged is not None and not (isinstance(event, SaveFailed) and not event.first):
            level, message = logged
            if isinstance(event, Lost) and event.missing:
                message = (
                    "the store no longer has %(missing)s records of it that it had acknowledged"
                )
            if isinstance(event, (Lost, Quarantined)):  # a person has to act
                message = f"session %(session)s: {message}; %(unsaved)s records are only in memory"
            log_facts(log, level, message, getattr(event, "error", None), **_facts(event))
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            log.exception("on_event failed")


def _facts(event: Event) -> dict[str, object]:
    """Return what a log line has of an event, its session first."""
    facts = msgspec.structs.asdict(event)
    key = facts.pop("key", None)
    for name in ("error", "first"):  # the error is logged as one; only a first failure is logged
        facts.pop(name, None)
    return facts if key is None else {"session": str(key), **facts}
