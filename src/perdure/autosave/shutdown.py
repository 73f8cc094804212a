"""The end of autosave, in one honest account.

Every record that was ever accepted is durable, or spilled, or in one of the report's
lists: nothing is dropped without a word. Decisions only; `driver` does the stopping.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

import anyio
import msgspec

from perdure._lib.display import card
from perdure.autosave.background_jobs import BackgroundJobs
from perdure.autosave.contributors import StateCapture
from perdure.autosave.core import Core
from perdure.autosave.timer import Timer
from perdure.autosave.tracked import State, Tracked
from perdure.autosave.waiters import SaveWaiters
from perdure.autosave.writer import Writer
from perdure.errors import UnsavedChangesError
from perdure.records.keys import SessionKey

log: logging.Logger = logging.getLogger("perdure.autosave")

SHOWN = 5
"""Sessions that a message names; the report holds all."""

_SLOW = (
    "Leases expire by themselves; look at the store, and give Shutdown(deadline=…) more time if it "
    "is only slow"
)
_TAKEN = (
    "What is lost was taken over by another process, or the store went back to an earlier state: "
    "session.unsaved() and sessions.lost have the records, Shutdown(spill=…) keeps them in a file"
)


class Unsaved(msgspec.Struct, frozen=True, kw_only=True):
    """A session with records that are not known to be durable."""

    key: SessionKey
    version: int
    """The last record that was accepted."""
    durable: int
    """The last one that is durable."""
    in_doubt_to: int
    """Records up to this one may be in the log as well."""
    oldest_age: float
    """For how long the oldest of them has been waiting, in seconds."""
    bytes: int
    state: str
    error: str | None
    """Why the last save did not succeed."""
    missing: int = 0
    """How many records the store had acknowledged, and has no more."""
    kept_in: str | None = None
    """The folder that has them in a spill file all the same, if none was named for it."""

    @property
    def records(self) -> int:
        """How many there are."""
        return self.version - self.durable + self.missing


class ShutdownReport(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """What became of everything; each session is in one list at most."""

    duration: float
    """Seconds that stopping took."""
    clean: bool
    """Whether everything that was accepted is durable or spilled."""
    saved: int = 0
    """Sessions that were saved while stopping."""
    unsaved: tuple[Unsaved, ...] = ()
    """The store did not take it in time."""
    in_doubt: tuple[Unsaved, ...] = ()
    """A save was cut off: some of it may be in the log."""
    spilled: tuple[Unsaved, ...] = ()
    """Kept in a local file, to be replayed."""
    quarantined: tuple[Unsaved, ...] = ()
    """The store refuses a record for good."""
    lost: tuple[Unsaved, ...] = ()
    """Another process has the session."""

    @property
    def not_durable(self) -> tuple[Unsaved, ...]:
        """Every session with records that are neither durable nor spilled."""
        return self.unsaved + self.in_doubt + self.quarantined + self.lost

    def raise_if_unsaved(self) -> None:
        """Raise unless everything is durable or spilled.

        Raises:
            UnsavedChangesError: Something is not; ``facts["report"]`` is this report.

        """
        if self.clean:
            return
        keys = tuple(entry.key for entry in self.not_durable)
        records = sum([entry.records for entry in self.not_durable])
        cures = []
        if self.unsaved or self.in_doubt:
            cures.append(_SLOW)
        if self.lost:
            cures.append(_TAKEN)
        folders = sorted({entry.kept_in for entry in self.not_durable if entry.kept_in is not None})
        if folders:
            cures.append(f"It is kept in {folders[0]}, and the next open of the session appends it")
        message = ". ".join([str(self), *cures, "error.facts['report'] has all of it"])
        raise UnsavedChangesError(message, report=self, sessions=keys, records=records)

    def __str__(self) -> str:
        parts = [f"{len(ones)} {name}: {_names(ones)}" for name, ones in self._classes() if ones]
        summary = "; ".join(parts) if parts else "nothing unsaved"
        return f"stopped in {self.duration:.2f} s, saved {self.saved} sessions, {summary}"

    def _repr_html_(self) -> str:
        facts: dict[str, object] = {
            "clean": self.clean,
            "duration": f"{self.duration:.2f} s",
            "saved": f"{self.saved} sessions",
        }
        facts.update({name: _names(ones) for name, ones in self._classes() if ones})
        return card("ShutdownReport", facts)

    def _classes(self) -> list[tuple[str, tuple[Unsaved, ...]]]:
        return [
            ("unsaved", self.unsaved),
            ("in doubt", self.in_doubt),
            ("spilled", self.spilled),
            ("quarantined", self.quarantined),
            ("lost", self.lost),
        ]

    def log(self) -> None:
        """Log one line for each class that is not empty."""
        for name, ones in self._classes():
            if ones:
                records = sum([entry.records for entry in ones])
                extra = {"sessions": len(ones), "records": records, "some": _names(ones)}
                level = logging.WARNING if name == "spilled" else logging.ERROR
                log.log(level, "stopped with sessions %s: %s", name, _names(ones), extra=extra)


def report_of(core: Core, *, began: float, saved: int, now: float) -> ShutdownReport:
    """Return the account of a core that will begin no save any more."""
    lists: dict[str, list[Unsaved]] = {}
    for t in (*core.registry.unsaved, *core.registry.stuck):
        if t.version > t.durable or t.missing:
            lists.setdefault(_class_of(t), []).append(_unsaved(t, now))
    sorted_lists = {name: tuple(sorted(ones, key=_key)) for name, ones in lists.items()}
    return ShutdownReport(duration=now - began, clean=not sorted_lists, saved=saved, **sorted_lists)


def _class_of(t: Tracked) -> str:
    if t.end is State.QUARANTINED:
        return "quarantined"
    if t.end is State.LOST:
        return "lost"
    in_doubt = t.inflight is not None or t.doubt_to > t.durable
    return "in_doubt" if in_doubt else "unsaved"


def _unsaved(t: Tracked, now: float) -> Unsaved:
    return Unsaved(
        key=t.key,
        version=t.version,
        durable=t.durable,
        in_doubt_to=max(t.durable, t.doubt_to, t.inflight or 0),
        oldest_age=0.0 if t.oldest_at is None else now - t.oldest_at,
        bytes=t.pending_bytes,
        state=t.state.value,
        error=None if t.last_error is None else str(t.last_error),
        missing=t.missing,
    )


def _key(entry: Unsaved) -> SessionKey:
    return entry.key


def _names(ones: tuple[Unsaved, ...]) -> str:
    shown = [f"{entry.key} ({entry.records} records)" for entry in ones[:SHOWN]]
    more = len(ones) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


# Stopping autosave: drain, seal, flush, cut, report; never longer than it was given
#
# Runs in the host, once, however often it is asked for, so that a caller who is cancelled while it
# stops leaves nothing half-stopped.


@final
class EngineShutdown:
    """Stop one engine.

    Args:
        core: What it knows.
        clock: The loop's.
        timer: Its timer.
        batcher: Its workers.
        jobs: Its background jobs.
        contributors: Asked once more, those of clean sessions included.
        waiting: Its waiters.

    """

    def __init__(
        self,
        core: Core,
        clock: Callable[[], float],
        *,
        timer: Timer,
        writer: Writer,
        jobs: BackgroundJobs,
        contributors: StateCapture,
        waiting: SaveWaiters,
    ) -> None:
        self.report: ShutdownReport | None = None
        """What became of everything, once it is over."""
        self._core = core
        self._clock = clock
        self._timer = timer
        self._writer = writer
        self._jobs = jobs
        self._contributors = contributors
        self._waiting = waiting
        self._one = anyio.Lock()
        self._flushing: anyio.CancelScope | None = None
        self._cut = False

    def drain(self) -> None:
        """Save everything as it comes from now on."""
        if self._core.schedule.draining:
            return
        now = self._clock()
        self._core.schedule.drain(self._core.registry.unsaved, now)
        self._core.breaker.hurry(now)
        self._timer.attend()

    def cut(self) -> None:
        """Wait no longer for the store: go on to the report."""
        self._cut = True
        if self._flushing is not None:
            self._flushing.cancel()

    async def stop(self, deadline: float, hard_grace: float) -> ShutdownReport:
        """Stop within ``deadline + hard_grace`` seconds, and say what became of everything."""
        async with self._one:
            if self.report is not None:
                return self.report
            began = self._clock()
            self.drain()
            self._timer.attend()  # in a loop that ends it was cut, as all other tasks were
            self._core.intake.seal(None)
            before = list(self._core.registry.unsaved)
            with anyio.move_on_after(deadline) as self._flushing:
                if not self._cut:
                    await self._flush()
            # From here on nothing new is sent: what the report says stays true.
            self._core.stopped = True
            self._writer.cut()
            self._jobs.cut()
            with anyio.move_on_after(hard_grace):
                await self._writer.idle()
            return self.finish(began, saved=len([t for t in before if t.clean]))

    async def _flush(self) -> None:
        await self._contributors.ask_quiet()
        while self._core.registry.unsaved:
            t = next(iter(self._core.registry.unsaved))
            await self._waiting.settled(t, t.version)

    def finish(self, began: float, *, saved: int) -> ShutdownReport:
        """Begin no save any more, account for everything, and let nobody wait in vain."""
        self._core.stopped = True
        self._core.intake.seal(None)
        if self.report is None:
            self.report = report_of(self._core, began=began, saved=saved, now=self._clock())
            self.report.log()
        self._timer.stop()
        self._waiting.make_room()
        for t in self._core.registry.sessions:
            self._waiting.wake(t.take_waiters())
        return self.report
