"""Replay: events fed to a dry run, which checks them and says what was decided and used.

Nothing is done again. The dry run takes each event at its place, looks whether the logical clock
goes on without a gap, and keeps count; what it keeps does not grow with the number of events.
Where rows of a report go, the caller decides. Pure.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, NamedTuple, final

import msgspec

from perdure.records.checkpoints import KernelEvent

CUSTOM: Final = "custom"
"""Kind of the events by which an agent records a decision."""

CAPABILITY_KINDS: Final = {
    "capability_requested": "requested",
    "capability_granted": "granted",
    "capability_denied": "denied",
    "capability_used": "used",
    "capability_failed": "failed",
}
"""The kinds of events about a capability, whose name is the event's label, and what they count."""

MOST: Final = 1000
"""Problems, and names, that a report holds; of more it has the number."""
LONGEST: Final = 1000
"""Characters that one of them may have there."""


def shortened(text: str, most: int = LONGEST) -> str:
    """Return a text, truncated to a readable length.

    >>> shortened("a long one", 7)
    'a long…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


class ReplayItem(NamedTuple):
    """Something that has a time: an event, or another entry of the log."""

    place: int
    """The record, or the line of a file."""
    timestamp: int
    event: KernelEvent | None = None
    """None for a checkpoint or a pruning of checkpoints."""


class TimelineRow(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, or the use of a capability."""

    what: str
    """"decision", "requested", "granted", "denied", "used", "failed"."""
    place: int
    timestamp: int
    token_id: int
    name: str
    """The decision's label, or the capability."""
    detail: dict[str, Any] = {}
    at: float | None = None
    """When the newest message before it was created, in seconds since 1970, if that is known."""
    arguments: Any = None
    """What a tool was requested with."""
    result: Any = None
    """What a tool that was used returned."""
    error: str | None = None
    """Why there is no result."""


class CapabilityUse(msgspec.Struct):
    """How often a capability was asked for, and what came of it."""

    requested: int = 0
    granted: int = 0
    denied: int = 0
    used: int = 0
    failed: int = 0


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay has seen."""

    source: str
    """The session, or the files."""
    since: int | None = None
    """The checkpoint after which it began; None for the beginning."""
    events: int = 0
    first_timestamp: int | None = None
    last_timestamp: int | None = None
    turns: int = 0
    """Runs of events that one turn caused."""
    by_kind: dict[str, int] = {}
    decisions: int = 0
    capabilities: dict[str, CapabilityUse] = {}
    snapshots: int = 0
    """Checkpoints whose content was compared with what their event, or the log, says."""
    unverified: int = 0
    """Checkpoints that cannot be compared: they were pruned, or have no event."""
    problems: tuple[str, ...] = ()
    """What does not fit, the first of them; each names its place."""
    problem_count: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything fits."""
        return not self.problem_count


@final
class Replay:
    """A dry run.

    Args:
        unit: What a place is called: "record" or "line".
        gapless: Whether times go up by one each; otherwise they only must not go back.
        clock: The time before the first item; None to begin with the first one's.

    """

    def __init__(self, unit: str, *, gapless: bool, clock: int | None = None) -> None:
        self._unit = unit
        self._gapless = gapless
        self._clock = clock
        self._first: int | None = None
        self._token: int | None = None
        self._turns = 0
        self._by_kind: Counter[str] = Counter()
        self._decisions = 0
        self._capabilities: dict[str, CapabilityUse] = {}
        self._problems: list[str] = []
        self._problem_count = 0
        self.snapshots: int = 0
        self.unverified: int = 0

    def problem(self, what: str, place: int | None = None) -> None:
        """Note something that does not fit."""
        self._problem_count += 1
        if len(self._problems) < MOST:
            where = "" if place is None else f"{self._unit} {place}: "
            self._problems.append(shortened(f"{where}{what}"))

    def feed(self, item: ReplayItem) -> TimelineRow | None:
        """Take the next item; return what a report should list of it."""
        self._tell_time(item)
        event = item.event
        if event is None:
            return None
        self._first = item.timestamp if self._first is None else self._first
        self._count(self._by_kind, event.kind)
        if event.token_id != self._token:
            self._token = event.token_id
            self._turns += event.token_id != 0
        return self._row(item.place, event)

    def _tell_time(self, item: ReplayItem) -> None:
        now, before = item.timestamp, self._clock
        if before is not None:
            if now < before or (self._gapless and now == before):
                what = f"time {now} comes after {before}: something was put in, doubled or moved"
                self.problem(what, item.place)
            elif self._gapless and now > before + 1:
                lost = f"{before + 1}" if now == before + 2 else f"{before + 1} to {now - 1}"
                self.problem(f"nothing is there for time {lost}: it is missing", item.place)
        self._clock = now if before is None else max(now, before)

    def _row(self, place: int, event: KernelEvent) -> TimelineRow | None:
        what, name = CAPABILITY_KINDS.get(event.kind), event.label
        if event.kind == CUSTOM:
            self._decisions += 1
            what = "decision"
        elif what is None:
            name = event.detail.get("capability")  # other kernels tell it beside
            if not isinstance(name, str):
                return None
            what = "used"
        if what != "decision":
            self._use(name or "", what)
        return TimelineRow(
            what=what,
            place=place,
            timestamp=event.timestamp,
            token_id=event.token_id,
            name=name or "",
            detail=event.detail,
        )

    def _use(self, name: str, what: str) -> None:
        uses, name = self._capabilities, shortened(name)
        if name not in uses and len(uses) >= MOST:
            name = "(others)"
        use = uses.setdefault(name, CapabilityUse())
        setattr(use, what, getattr(use, what) + 1)

    def _count(self, counter: Counter[str], name: str) -> None:
        name = shortened(name)
        counter[name if name in counter or len(counter) < MOST else "(others)"] += 1

    def report(self, source: str, *, since: int | None = None) -> ReplayReport:
        """Return what was seen."""
        return ReplayReport(
            source=source,
            since=since,
            events=self._by_kind.total(),
            first_timestamp=self._first,
            last_timestamp=self._clock if self._first is not None else None,
            turns=self._turns,
            by_kind=dict(sorted(self._by_kind.items())),
            decisions=self._decisions,
            capabilities=dict(sorted(self._capabilities.items())),
            snapshots=self.snapshots,
            unverified=self.unverified,
            problems=tuple(self._problems),
            problem_count=self._problem_count,
        )
