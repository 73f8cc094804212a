"""The figures of managers, and their text for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import anyio

import perdure
from perdure.errors import SessionClosedError, WrongLoopError
from perdure.observe import names
from perdure.observe.names import FIGURES, SECONDS, Figure
from perdure.session.internals import in_managers_background

if TYPE_CHECKING:
    from perdure.autosave.events import Lost, Saved, SaveFailed
    from perdure.autosave.reports import Health
    from perdure.session.manager import SessionManager
    from perdure.session.runtime import SessionClosed, SessionOpened, SessionPosted

LOOK: Final = 0.25
"""Seconds between two looks at the event loop."""
_HEALTH: Final = {"ok": 0, "degraded": 1, "failing": 2}

Observer = Callable[[Figure, str, float], object]
"""Gets a histogram, the label's value, and what was measured."""


@final
class Count:
    """What a counter has counted."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


@final
class Distribution:
    """What a histogram has counted."""

    __slots__ = ("buckets", "sum")

    def __init__(self) -> None:
        self.buckets: list[int] = [0] * (len(SECONDS) + 1)
        """By `SECONDS`, the last for all that is above; each counts its own."""
        self.sum: float = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.buckets[bisect_left(SECONDS, value)] += 1
        self.sum += value


class Sample(NamedTuple):
    """A figure as it is now."""

    figure: Figure
    label: str
    value: float | Distribution


@final
class Metrics:
    """Count what managers do, from now on: ``metrics = Metrics(sessions)``.

    The text of `render` is for a scrape by Prometheus. It needs no library, and costs nothing
    between two scrapes but the counting. There is no session's id in it: those are in the logs.

    Args:
        sessions: Managers that are open, of one event loop.

    """

    content_type: Final = "text/plain; version=0.0.4; charset=utf-8"
    """Of what `render` returns."""

    def __init__(self, *sessions: SessionManager) -> None:
        self._counts: dict[tuple[Figure, str], Count] = {}
        self._distributions: dict[tuple[Figure, str], Distribution] = {}
        self._observer: Observer | None = None
        self._sessions: list[SessionManager] = []
        self._latest: list[Health] = []
        self._off: list[Callable[[], None]] = []
        for outcome in ("ok", "failed", "in_doubt", "refused"):
            self._counts[names.SAVES, outcome] = Count()
        for change in ("acquired", "released", "lost"):
            self._counts[names.LEASE_CHANGES, change] = Count()
        for outcome in ("ok", "failed"):
            self._counts[names.FOLDS, outcome] = Count()
        for figure in (names.SAVED_RECORDS, names.SAVED_BYTES, names.POSTS, names.STALLS):
            self._counts[figure, ""] = Count()
        for figure in (names.SAVE_DURATION, names.SAVE_WINDOW, names.LOOP_LAG):
            self._distributions[figure, ""] = Distribution()
        # Each save needs these: a look-up by a figure costs more than the counting.
        self._ok = self._counts[names.SAVES, "ok"]
        self._records = self._counts[names.SAVED_RECORDS, ""]
        self._bytes = self._counts[names.SAVED_BYTES, ""]
        self._durations = self._distributions[names.SAVE_DURATION, ""]
        self._windows = self._distributions[names.SAVE_WINDOW, ""]
        for manager in sessions:
            self.add(manager)

    def add(self, sessions: SessionManager) -> None:
        """Count what another manager does, too.

        Raises:
            SessionClosedError: It is not open.

        """
        on = sessions.on
        self._off += [
            on("saved", self._saved),
            on("save_failed", self._save_failed),
            on("quarantined", lambda _: self._count(names.SAVES, "refused")),
            on("lost", self._lost),
            on("opened", self._opened),
            on("closed", self._closed),
            on("folded", lambda _: self._count(names.FOLDS, "ok")),
            on("fold_failed", lambda _: self._count(names.FOLDS, "failed")),
            on("posted", self._posted),
            on("stalled", lambda _: self._count(names.STALLS)),
        ]
        self._sessions.append(sessions)
        in_managers_background(sessions, self._watch_loop)

    def close(self) -> None:
        """Stop counting."""
        for off in self._off:
            off()
        self._off.clear()
        self._sessions.clear()

    # What is counted as it happens

    def _count(self, figure: Figure, label: str = "", by: float = 1) -> None:
        self._counts[figure, label].value += by

    def _measure(self, figure: Figure, value: float, label: str = "") -> None:
        known = self._distributions.get((figure, label))
        if known is None:
            known = self._distributions[figure, label] = Distribution()
        known.add(value)
        if self._observer is not None:
            self._observer(figure, label, value)

    def _saved(self, event: Saved) -> None:
        self._ok.value += 1
        self._records.value += event.records
        self._bytes.value += event.written
        self._durations.add(event.took)
        self._windows.add(event.window)
        if self._observer is not None:
            self._observer(names.SAVE_DURATION, "", event.took)
            self._observer(names.SAVE_WINDOW, "", event.window)

    def _save_failed(self, event: SaveFailed) -> None:
        self._count(names.SAVES, "in_doubt" if event.in_doubt else "failed")

    def _lost(self, _: Lost) -> None:
        self._count(names.LEASE_CHANGES, "lost")

    def _opened(self, event: SessionOpened) -> None:
        self._count(names.LEASE_CHANGES, "acquired")
        self._measure(names.RESTORE_DURATION, event.took, event.report.source)

    def _closed(self, event: SessionClosed) -> None:
        if event.why != "lost":
            self._count(names.LEASE_CHANGES, "released")

    def _posted(self, event: SessionPosted) -> None:
        self._count(names.POSTS, by=len(event.keys))

    async def _watch_loop(self) -> None:
        while self._sessions:
            due = anyio.current_time() + LOOK
            await anyio.sleep_until(due)
            self._measure(names.LOOP_LAG, max(anyio.current_time() - due, 0.0))
            self._healths()

    # What is read when somebody looks

    def _samples(self) -> Iterator[Sample]:
        """Return all figures as they are now."""
        for (figure, label), count in self._counts.items():
            yield Sample(figure, label, count.value)
        for (figure, label), distribution in self._distributions.items():
            yield Sample(figure, label, distribution)
        yield Sample(names.BUILD, perdure.__version__, 1)
        yield from _gauges(self._healths())

    def _healths(self) -> list[Health]:
        healths: list[Health] = []
        for manager in self._sessions:
            try:
                healths.append(manager.health())
            except WrongLoopError:  # a thread asks: as of the last look
                return self._latest
            except SessionClosedError:  # it has ended since
                continue
        self._latest = healths
        return healths

    def render(self) -> str:
        """Return the figures in Prometheus's text format, version 0.0.4."""
        samples: dict[Figure, list[Sample]] = {figure: [] for figure in FIGURES}
        for sample in self._samples():
            samples[sample.figure].append(sample)
        lines: list[str] = []
        for figure, some in samples.items():
            if some:
                name = figure.in_prometheus
                lines += [f"# HELP {name} {_escaped(figure.help)}", f"# TYPE {name} {figure.kind}"]
                for sample in some:
                    lines += _lines(name, sample)
        return "\n".join(lines) + "\n"


def _gauges(healths: list[Health]) -> Iterator[Sample]:
    def total(figure: Figure, value: Callable[[Health], float]) -> Sample:
        return Sample(figure, "", sum(value(one) for one in healths))

    ages = [one.oldest_unsaved_age for one in healths]
    yield Sample(names.UNSAVED_AGE, "", max(ages, default=0.0))
    yield total(names.UNSAVED_BYTES, lambda one: one.unsaved_bytes)
    states: dict[str, int] = dict.fromkeys(("dirty", "failed", "quarantined", "lost"), 0)
    for one in healths:
        for state, count in one.unsaved.items():
            states[state] = states.get(state, 0) + count
    for state, count in states.items():
        yield Sample(names.UNSAVED_SESSIONS, state, count)
    yield total(names.OPEN_SESSIONS, lambda one: one.sessions)
    yield total(names.DEAD_LETTERS, lambda one: sum(one.dead_letters.values()))
    yield total(names.UNDELIVERED, lambda one: len(one.undelivered))
    yield total(names.LOST_RECORDS, lambda one: sum(one.lost.values()))
    worst = max((_HEALTH[one.status] for one in healths), default=0)
    yield Sample(names.HEALTH, "", worst)
    yield Sample(names.STORE_UP, "", float(all(one.breaker == "closed" for one in healths)))


def _lines(name: str, sample: Sample) -> Iterator[str]:
    label, value = _pair(sample.figure.label, sample.label), sample.value
    if not isinstance(value, Distribution):
        yield f"{name}{_braces(label)} {_number(value)}"
        return
    *below, total = accumulate(value.buckets)
    for bound, count in zip(SECONDS, below, strict=True):
        yield f"{name}_bucket{_braces(label, _pair('le', str(bound)))} {count}"
    yield f"{name}_bucket{_braces(label, _pair('le', '+Inf'))} {total}"
    yield f"{name}_sum{_braces(label)} {_number(value.sum)}"
    yield f"{name}_count{_braces(label)} {total}"


def _pair(name: str, value: Any) -> str:
    quoted = _escaped(str(value)).replace('"', r"\"")
    return f'{name}="{quoted}"' if name else ""


def _braces(*pairs: str) -> str:
    given = ",".join(filter(None, pairs))
    return f"{{{given}}}" if given else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
