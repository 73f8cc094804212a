"""What autosave reports: small frozen values, given to ``on_event`` one by one.

They hold ids, counts and sizes, never content. Durations are seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias, final

import msgspec

from perdure._lib.logs import log_failure
from perdure.records.keys import SessionKey


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    pass


class Saved(_Event, frozen=True, kw_only=True):
    """A session's records became durable."""

    key: SessionKey
    durable: int
    records: int
    written: int
    """Bytes that the store handed to its storage."""
    took: float
    """With the store."""
    window: float
    """From the oldest of the changes until now: what a crash could have cost."""


class SaveFailed(_Event, frozen=True, kw_only=True):
    """A save did not succeed; it will be tried again."""

    key: SessionKey
    attempt: int
    in_doubt: bool
    """Whether the records may have been written all the same."""
    error: Exception | None
    retry_in: float
    first: bool
    """Whether no other session was failing."""


class Recovered(_Event, frozen=True, kw_only=True):
    """No session's last save has failed any more."""


class Quarantined(_Event, frozen=True, kw_only=True):
    """The store refuses a session's next group for good."""

    key: SessionKey
    seq: int
    """The first record that is refused."""
    unsaved: int
    error: Exception | None


class Lost(_Event, frozen=True, kw_only=True):
    """Another process has taken a session over, or its store has lost records of it."""

    key: SessionKey
    epoch: int
    unsaved: int
    """Records that are still only in memory."""
    missing: int = 0
    """Records that the store had acknowledged, and has no more."""
    error: Exception | None


class BreakerOpened(_Event, frozen=True, kw_only=True):
    """The store is taken for down: only probes are sent."""

    error: Exception | None
    unsaved: int
    """Sessions that wait for it."""


class BreakerClosed(_Event, frozen=True, kw_only=True):
    """The store is well again, and gets everything."""

    outage: float
    unsaved: int


class Degraded(_Event, frozen=True, kw_only=True):
    """Much is unsaved: sessions save without waiting, or must wait to go on."""

    dirty_bytes: int
    oldest_age: float
    blocking: bool
    """Whether a limit is reached, so that appends wait or are rejected."""


class LoopBlocked(_Event, frozen=True, kw_only=True):
    """Something kept the event loop from running while a save was due."""

    delay: float


class Stalled(_Event, frozen=True, kw_only=True):
    """What was due has not been served, though the store would have taken it."""

    reason: str
    sessions: int
    """How many wait."""
    error: Exception | None
    """Why a task could not be started, if that is known."""


class Resumed(_Event, frozen=True, kw_only=True):
    """What had stalled is being served again."""


class CaptureFailed(_Event, frozen=True, kw_only=True):
    """A contributor failed or took too long; the save went on without it."""

    key: SessionKey
    error: Exception


class StoreWarned(_Event, frozen=True, kw_only=True):
    """The store is set up, by now, so that it may lose what it keeps; saving goes on."""

    reason: str


class GroupOpenTooLong(_Event, frozen=True, kw_only=True):
    """A group has been open for longer than a change may stay unsaved."""

    key: SessionKey
    age: float


class Idle(_Event, frozen=True, kw_only=True):
    """Nobody has used a clean session for a while."""

    key: SessionKey


Event: TypeAlias = (
    Saved
    | SaveFailed
    | Recovered
    | Quarantined
    | Lost
    | BreakerOpened
    | BreakerClosed
    | Degraded
    | LoopBlocked
    | Stalled
    | Resumed
    | CaptureFailed
    | StoreWarned
    | GroupOpenTooLong
    | Idle
)


# Telling people: every event to ``on_event``, and the few that need a person to the log
#
# A failing autosave is logged at its first failure, when the breaker opens and at recovery, not
# otherwise; a store that is down for an hour must not fill a disk.


log: logging.Logger = logging.getLogger("perdure.autosave")

LOGGED: dict[type[Event], tuple[int, str]] = {
    SaveFailed: (logging.WARNING, "autosave failed, it goes on trying"),
    BreakerOpened: (logging.ERROR, "the store is taken for down, unsaved changes pile up"),
    Recovered: (logging.INFO, "autosave works again"),
    Quarantined: (logging.ERROR, "the store refuses a record for good"),
    Lost: (logging.ERROR, "another process has taken it over"),
    LoopBlocked: (logging.WARNING, "something blocked the event loop and delayed a save"),
    StoreWarned: (logging.ERROR, "the store may lose what it keeps"),
    CaptureFailed: (logging.WARNING, "a contributor failed, the save went on without it"),
    GroupOpenTooLong: (logging.WARNING, "a group stays open, its changes are not saved"),
}


@final
class Reporter:
    """Deliver events.

    Args:
        waiting: Where they are noted; taken from there.
        on_event: Called with each; an exception from it is logged.

    """

    def __init__(self, waiting: list[Event], on_event: Callable[[Event], None] | None) -> None:
        self._waiting = waiting
        self._on_event = on_event

    def deliver(self) -> None:
        """Report what has happened since the last time."""
        while self._waiting:
            waiting = self._waiting.copy()
            self._waiting.clear()
            for event in waiting:
                self._report(event)

    def _report(self, event: Event) -> None:
        logged = LOGGED.get(type(event))
        if logged is not None and not (isinstance(event, SaveFailed) and not event.first):
            level, message = logged
            error = getattr(event, "error", None)
            if isinstance(event, Lost) and event.missing:
                message = "the store no longer has %d records of it that it had acknowledged"
                message %= event.missing
            if isinstance(event, (Lost, Quarantined)):  # somebody has to act
                message = f"session %s: {message}; %s of its records are only in memory"
                log.log(
                    level, message, event.key, event.unsaved, extra=_facts(event), exc_info=error
                )
            else:
                log_failure(log, level, message, error, extra=_facts(event))
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            log.exception("on_event failed")


def _facts(event: Event) -> dict[str, object]:
    facts = {name: getattr(event, name) for name in event.__struct_fields__ if name != "error"}
    if "key" in facts:
        facts["session"] = str(facts.pop("key"))
    return facts
