"""Reports on autosave: its health while it runs, and the shutdown report when it has stopped.

Health is for people and for readiness checks, not for liveness checks: a restart would destroy
the only copy of what is unsaved. In a shutdown report every record that was ever accepted is
durable, spilled, or in one of the lists.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Final, Literal

import msgspec

from perdure._lib.logs import card, log_facts
from perdure.autosave.core import BreakerState, Core
from perdure.autosave.options import AutosaveStatus
from perdure.autosave.tracked import SessionRegistry, State, Tracked
from perdure.errors import UnsavedChangesError
from perdure.records.keys import SessionKey

log: logging.Logger = logging.getLogger("perdure.autosave")

NAMED: Final = 3
"""Sessions that a reason names."""
_STUCK: Final = {
    State.QUARANTINED: "quarantined: the store refuses a record",
    State.LOST: "taken over by another process with records unsaved here: see sessions.lost",
}


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The state of autosave."""

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
    """Reasons why it is not ok, one sentence each, for people; empty while it is."""
    lost: dict[str, int] = {}
    """Sessions that another process has taken over, or of which the store has lost records, with
    how many records of each are not in the store. They stay until they are forked or discarded:
    ``sessions.lost``."""
    undelivered: dict[str, str] = {}
    """Sessions open here whose posts cannot be received, with the reason. It is tried again."""
    dead_letters: dict[str, int] = {}
    """Posted items that became dead letters here, by session, until they are retried or dropped."""
    set_aside: dict[str, str] = {}
    """Damaged logs, and ends of logs that do not count, of sessions that were opened here, with the
    files that keep them: ``perdure check`` names them too, until they are accepted."""
    autosave: AutosaveStatus
    """The manager's setting, and what of it is in force; a session may have one of its own."""

    def _repr_html_(self) -> str:
        return card("Health", msgspec.structs.asdict(self))


def health_of(core: Core, now: float, stalled: Sequence[str] = ()) -> Health:
    """Return the state of autosave now; cheap, however many sessions are unsaved.

    Args:
        core: The core of the engine.
        now: The engine's time.
        stalled: Why work that is due makes no progress.

    """
    registry = core.registry
    failing = [*stalled]
    if core.stopped:
        failing.append("autosave has stopped: connect again")
    elif registry.blocking:
        failing.append(f"{registry.dirty_bytes} bytes are unsaved: new records wait or fail")
    degraded = _degraded(core)
    status: Literal["ok", "degraded", "failing"] = "degraded" if degraded else "ok"
    if failing:
        status = "failing"
    return Health(
        status=status,
        oldest_unsaved_age=registry.oldest_age(now),
        sessions=len(registry.sessions),
        unsaved=_states(registry),
        unsaved_bytes=registry.dirty_bytes,
        breaker=core.breaker.state,
        reasons=(*failing, *degraded),
        lost=_lost(registry),
        autosave=core.status(None),
    )


def _degraded(core: Core) -> list[str]:
    registry = core.registry
    reasons: list[str] = []
    if core.breaker.state != "closed":
        reasons.append("the store does not answer, or has just begun to again")
    if registry.failed:
        t = next(iter(registry.failed))
        reasons.append(
            f"{_sessions(registry.failed)} could not be saved, last error: {t.last_error}"
        )
    reasons += registry.warnings
    records_lost = [t for t in registry.stuck if t.missing]
    if records_lost:
        reasons.append(
            f"{_sessions(records_lost)}: the store no longer has records that it had "
            "acknowledged: see sessions.lost"
        )
    for end in (State.QUARANTINED, State.LOST):
        stuck = [t for t in registry.stuck if t.end is end and not t.missing]
        reasons += [f"{_sessions(stuck)} {_STUCK[end]}"] if stuck else []
    if registry.rising and not registry.blocking:
        reasons.append(f"{registry.dirty_bytes} bytes are unsaved")
    return reasons


def _sessions(sessions: Collection[Tracked]) -> str:
    named = ", ".join(str(t.key) for t in islice(sessions, NAMED))
    more = len(sessions) - NAMED
    return f"session {named}" + (f" and {more} more" if more > 0 else "")


def _lost(registry: SessionRegistry) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for t in registry.stuck:
        if t.undecided:
            counts[str(t.key)] += t.version - t.durable + t.missing
    return dict(counts)


def _states(registry: SessionRegistry) -> dict[str, int]:
    states = Counter(
        t.end.value for t in registry.stuck if t.end and (t.version > t.durable or t.missing)
    )
    states[State.FAILED.value] = len(registry.failed)
    states[State.DIRTY.value] = len(registry.unsaved) - len(registry.failed)
    return {name: count for name, count in states.items() if count}


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
    """Reason why the last save did not succeed."""
    missing: int = 0
    """Number of records that the store had acknowledged and has no longer."""
    kept_in: str | None = None
    """The default spill folder that has them in a file, if ``Shutdown(spill=…)`` named none."""

    @property
    def records(self) -> int:
        """Number of records."""
        return self.version - self.durable + self.missing


class ShutdownReport(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Fate of every unsaved record; each session is in one list at most."""

    duration: float
    """Seconds that stopping took."""
    clean: bool
    """True if everything that was accepted is durable or spilled."""
    saved: int = 0
    """Sessions that were saved while stopping."""
    unsaved: tuple[Unsaved, ...] = ()
    """The store did not take it in time."""
    in_doubt: tuple[Unsaved, ...] = ()
    """A save was cut off: some of it may be in the log."""
    spilled: tuple[Unsaved, ...] = ()
    """Kept in a local file, to be replayed."""
    quarantined: tuple[Unsaved, ...] = ()
    """The store refuses a record permanently."""
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
        raise UnsavedChangesError(
            ". ".join([str(self), *cures, "error.facts['report'] has all of it"]),
            report=self,
            sessions=keys,
            records=records,
        )

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
                level = logging.WARNING if name == "spilled" else logging.ERROR
                message = f"stopped with sessions {name}: %(some)s"
                log_facts(
                    log, level, message, sessions=len(ones), records=records, some=_names(ones)
                )


def report_of(core: Core, *, began: float, saved: int, now: float) -> ShutdownReport:
    """Return the report for a core that will begin no more saves."""
    lists: dict[str, list[Unsaved]] = {}
    for t in (*core.registry.unsaved, *core.registry.stuck):
        if t.version > t.durable or t.missing:
            lists.setdefault(_class_of(t), []).append(_unsaved(t, now))
    sorted_lists = {
        name: tuple(sorted(ones, key=lambda entry: entry.key)) for name, ones in lists.items()
    }
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


def _names(ones: tuple[Unsaved, ...]) -> str:
    shown = [f"{entry.key} ({entry.records} records)" for entry in ones[:SHOWN]]
    more = len(ones) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
