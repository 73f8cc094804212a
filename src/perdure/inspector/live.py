"""Live figures without a metrics store: a manager's health and events, sampled while asked for.

A sample is taken when a page asks, at most one in `APART` seconds, so no task runs while no one
looks. All who look share the samples.
"""

from __future__ import annotations

import os
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, final, get_args

import anyio

from perdure.inspector.query import Page
from perdure.session.internals import store_below
from perdure.session.manager import SessionManager

if TYPE_CHECKING:
    from perdure.autosave.events import LoopBlocked, Saved
    from perdure.session.events import EventName

APART: Final = 0.5
"""Seconds between two samples at least."""
KEPT: Final = 900
"""Samples to keep."""
NAP: Final = 0.02
"""Seconds to sleep to see how late the event loop wakes a task."""
STALE: Final = 10.0
"""Seconds without a sample, after which counts begin again: rates over a long pause say nothing."""

Notable = Literal[
    "save_failed",
    "recovered",
    "quarantined",
    "lost",
    "degraded",
    "loop_blocked",
    "store_warned",
    "stalled",
    "resumed",
    "fold_failed",
    "drain",
]


@final
class Live:
    """The samples of one manager."""

    def __init__(self, sessions: SessionManager) -> None:
        self.sessions: SessionManager = sessions
        self._samples: deque[Page] = deque(maxlen=KEPT)
        self._events: deque[Page] = deque(maxlen=50)
        self._lock = anyio.Lock()
        self._since = 0.0
        self._reset(time.monotonic())
        sessions.on("saved", self._saved)
        sessions.on("loop_blocked", self._blocked)
        for name in get_args(Notable):
            sessions.on(name, partial(self._note, name))

    def _reset(self, now: float) -> None:
        self._since = now
        self._saves = self._records = 0
        self._slowest = self._lag = 0.0

    def _saved(self, event: Saved) -> None:
        self._saves += 1
        self._records += event.records
        self._slowest = max(self._slowest, event.took)

    def _blocked(self, event: LoopBlocked) -> None:
        self._lag = max(self._lag, event.delay)

    def _note(self, name: EventName, event: Any) -> None:
        facts = {
            fact: getattr(event, fact)
            for fact in getattr(event, "__struct_fields__", ())
            if getattr(event, fact) is not None
        }
        text = ", ".join(f"{fact} {value}" for fact, value in facts.items())
        self._events.appendleft({"at": time.time(), "name": name, "text": text})

    async def page(self, after: float) -> Page:
        """Return the samples after a time, with a new one."""
        async with self._lock:
            now = time.monotonic()
            if now - self._since > STALE:
                self._reset(now)
                await anyio.sleep(APART)
            if time.monotonic() - self._since >= APART:
                await self._sample()
        health = self.sessions.health()
        return {
            "location": store_below(self.sessions).location,
            "pid": os.getpid(),
            "status": health.status,
            "reasons": health.reasons,
            "samples": [sample for sample in self._samples if sample["at"] > after],
            # newest first
            "events": list(self._events),
        }

    async def _sample(self) -> None:
        began = time.monotonic()
        await anyio.sleep(NAP)
        now = time.monotonic()
        passed, health = now - self._since, self.sessions.health()
        self._samples.append(
            {
                # seconds since 1970
                "at": time.time(),
                # saves of a session in a second
                "saves": self._saves / passed,
                # records that became durable in a second
                "records": self._records / passed,
                # seconds that the slowest of these saves took
                "slowest": self._slowest,
                "unsaved_bytes": health.unsaved_bytes,
                # the age of the oldest change that is not durable, in seconds
                "unsaved_age": health.oldest_unsaved_age,
                # seconds by which the event loop was late at worst
                "loop_lag": max(self._lag, now - began - NAP),
                # open sessions
                "sessions": health.sessions,
            }
        )
        self._reset(now)
