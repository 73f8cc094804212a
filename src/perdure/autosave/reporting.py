"""Telling people: every event to ``on_event``, and the few that need a person to the log.

A failing autosave is logged at its first failure, when the breaker opens and at recovery,
not otherwise; a store that is down for an hour must not fill a disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

from perdure._lib.logs import log_failure
from perdure.autosave import events

__all__ = ["Reporter"]

log: logging.Logger = logging.getLogger("perdure.autosave")

LOGGED: dict[type[events.Event], tuple[int, str]] = {
    events.SaveFailed: (logging.WARNING, "autosave failed, it goes on trying"),
    events.BreakerOpened: (logging.ERROR, "the store is taken for down, unsaved changes pile up"),
    events.Recovered: (logging.INFO, "autosave works again"),
    events.Quarantined: (logging.ERROR, "the store refuses a record for good"),
    events.Lost: (logging.ERROR, "another process has taken it over"),
    events.LoopBlocked: (logging.WARNING, "something blocked the event loop and delayed a save"),
    events.StoreWarned: (logging.ERROR, "the store may lose what it keeps"),
    events.CaptureFailed: (logging.WARNING, "a contributor failed, the save went on without it"),
    events.GroupOpenTooLong: (logging.WARNING, "a group stays open, its changes are not saved"),
}


@final
class Reporter:
    """Deliver events.

    Args:
        waiting: Where they are noted; taken from there.
        on_event: Called with each; an exception from it is logged.

    """

    def __init__(
        self, waiting: list[events.Event], on_event: Callable[[events.Event], None] | None
    ) -> None:
        self._waiting = waiting
        self._on_event = on_event

    def deliver(self) -> None:
        """Report what has happened since the last time."""
        while self._waiting:
            taken = self._waiting.copy()
            self._waiting.clear()
            for event in taken:
                self._report(event)

    def _report(self, event: events.Event) -> None:
        logged = LOGGED.get(type(event))
        if logged is not None and not (isinstance(event, events.SaveFailed) and not event.first):
            level, message = logged
            error = getattr(event, "error", None)
            if isinstance(event, events.Lost) and event.missing:
                message = "the store no longer has %d records of it that it had acknowledged"
                message %= event.missing
            if isinstance(event, (events.Lost, events.Quarantined)):  # somebody has to act
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


def _facts(event: events.Event) -> dict[str, object]:
    facts = {name: getattr(event, name) for name in event.__struct_fields__ if name != "error"}
    if "key" in facts:
        facts["session"] = str(facts.pop("key"))
    return facts
