"""The figures of managers, what they are called, and their text for Prometheus.

perdure's own names are stable. Those of OpenTelemetry for databases are stable, too; those for
generative AI are in development, and stand here as of semantic conventions 1.43.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, final

import anyio

import perdure
from perdure.errors import SessionClosedError, WrongLoopError
from perdure.session.internals import parts_of

if TYPE_CHECKING:
    from perdure.autosave.events import Saved, SaveFailed
    from perdure.autosave.options import Autosave
    from perdure.autosave.reports import Health
    from perdure.session.events import Closed, Opened
    from perdure.session.manager import SessionManager
    from perdure.session.retention import PruneReport


SEMCONV: Final = "https://opentelemetry.io/schemas/1.43.0"

Kind = Literal["counter", "gauge", "histogram"]
Read = Callable[[Any], Mapping[str, float]]
"""Reads a gauge, by its label's value: of the managers' `Health`, or of a store's connections."""

SECONDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""The upper bounds of a histogram's buckets."""
_UNITS: Final = {"s": "_seconds", "By": "_bytes"}


class Figure(NamedTuple):
    """One thing that is counted or measured."""

    name: str
    kind: Kind
    help: str
    unit: str = ""
    """In UCUM, as OpenTelemetry wants it."""
    label: str = ""
    """The label that divides it, if one does. Never a session's id."""
    labels: tuple[str, ...] = ()
    """The label's values that are shown before anything was counted."""
    read: Read | None = None
    """Reads a gauge."""

    @property
    def in_prometheus(self) -> str:
        """Its name there, as OpenTelemetry's exporter for Prometheus makes it, too."""
        total = "_total" if self.kind == "counter" else ""
        return self.name.replace(".", "_") + _UNITS.get(self.unit, "") + total


SAVES = Figure(
    "perdure.saves",
    "counter",
    "Saves of a session: ok, failed (it is tried again), in_doubt (the same, and some of it may"
    " be stored), or refused (the store refuses a record permanently).",
    label="outcome",
    labels=("ok", "failed", "in_doubt", "refused"),
)
SAVE_DURATION = Figure("perdure.save.duration", "histogram", "How long saves took.", "s")
SAVE_WINDOW = Figure(
    "perdure.save.window",
    "histogram",
    "How old the oldest change was when its save was done: what a crash just before could have"
    " lost.",
    "s",
)
SAVED_RECORDS = Figure("perdure.saved.records", "counter", "Records that became durable.")
SAVED_BYTES = Figure("perdure.saved", "counter", "Bytes that the store wrote for saves.", "By")
LEASE_CHANGES = Figure(
    "perdure.lease.changes",
    "counter",
    "Sessions that were acquired, released, or lost to another process.",
    label="change",
    labels=("acquired", "released", "lost"),
)
RESTORE_DURATION = Figure(
    "perdure.restore.duration",
    "histogram",
    "How long opening a session took, lease included, by where it came from.",
    "s",
    "source",
)
FOLDS = Figure(
    "perdure.folds",
    "counter",
    "Folds of a session's log.",
    label="outcome",
    labels=("ok", "failed"),
)
POSTS = Figure("perdure.inbox.posts", "counter", "Posts that entered a session that is open here.")
RETENTION = Figure(
    "perdure.retention.sessions",
    "counter",
    "Sessions that a retention has forgotten (expired) or cut, or has left alone: held by another"
    " process, damaged, or refused.",
    label="outcome",
    labels=("expired", "pruned", "held", "damaged", "refused"),
)
STALLS = Figure("perdure.stalls", "counter", "Times that due saves made no progress.")
LOOP_LAG = Figure(
    "perdure.loop.lag", "histogram", "How late the event loop was, looked at each 0.25 s.", "s"
)
_HEALTH: Final = {"ok": 0, "degraded": 1, "failing": 2}


def _total(value: Callable[[Health], float]) -> Read:
    return lambda healths: {"": sum(map(value, healths))}


def _unsaved_sessions(healths: Sequence[Health]) -> dict[str, float]:
    states: dict[str, float] = dict.fromkeys(("dirty", "failed", "quarantined", "lost"), 0)
    for one in healths:
        for state, count in one.unsaved.items():
            states[state] = states.get(state, 0) + count
    return states


def _in_force(time: Callable[[Autosave], float | None]) -> Read:
    """Return a reader of a time that is in force: the longest of the managers'; none without."""

    def read(healths: Sequence[Health]) -> dict[str, float]:
        settings = [one.autosave.in_force for one in healths]
        times = [time(setting) for setting in settings if setting is not None]
        return {"": max([value or 0.0 for value in times])} if times else {}

    return read


FIGURES: Final = (
    *(SAVES, SAVE_DURATION, SAVE_WINDOW, SAVED_RECORDS, SAVED_BYTES),
    Figure(
        "perdure.unsaved.age",
        "gauge",
        "For how long the oldest change has not been durable.",
        "s",
        read=lambda healths: {"": max((one.oldest_unsaved_age for one in healths), default=0.0)},
    ),
    Figure(
        "perdure.unsaved",
        "gauge",
        "Bytes that are only in memory.",
        "By",
        read=_total(lambda health: health.unsaved_bytes),
    ),
    Figure(
        "perdure.unsaved.sessions",
        "gauge",
        "Sessions with changes that are not durable.",
        label="state",
        read=_unsaved_sessions,
    ),
    Figure(
        "perdure.open.sessions",
        "gauge",
        "Sessions that are open here.",
        read=_total(lambda health: health.sessions),
    ),
    Figure(
        "perdure.autosave.debounce",
        "gauge",
        "The debounce in force; none if there are no timers.",
        "s",
        read=_in_force(lambda setting: setting.debounce),
    ),
    Figure(
        "perdure.autosave.max_delay",
        "gauge",
        "The longest delay of a save in force; none if there are no timers.",
        "s",
        read=_in_force(lambda setting: setting.max_delay),
    ),
    *(LEASE_CHANGES, RESTORE_DURATION, FOLDS, POSTS, RETENTION),
    Figure(
        "perdure.inbox.dead_letters",
        "gauge",
        "Posts that could not be received, and wait for you.",
        read=_total(lambda health: sum(health.dead_letters.values())),
    ),
    Figure(
        "perdure.inbox.undelivered",
        "gauge",
        "Sessions whose posts cannot be received right now.",
        read=_total(lambda health: len(health.undelivered)),
    ),
    Figure(
        "perdure.lost.records",
        "gauge",
        "Records of lost sessions that are only in memory, until they are forked or discarded.",
        read=_total(lambda health: sum(health.lost.values())),
    ),
    *(STALLS, LOOP_LAG),
    Figure(
        "perdure.health",
        "gauge",
        "0: ok, 1: degraded, 2: failing.",
        read=lambda healths: {"": max((_HEALTH[one.status] for one in healths), default=0)},
    ),
    Figure(
        "perdure.store.up",
        "gauge",
        "Whether the store answers: 1 or 0.",
        read=lambda healths: {"": float(all(one.breaker == "closed" for one in healths))},
    ),
    Figure(
        "perdure.build.info",
        "gauge",
        "Always 1.",
        label="version",
        read=lambda _: {perdure.__version__: 1},
    ),
)
"""All figures of managers, as they are shown."""

# OpenTelemetry's, for spans and for what an agent and a store do

CONVERSATION: Final = "gen_ai.conversation.id"
AGENT: Final = "gen_ai.agent.name"
OPERATION: Final = "gen_ai.operation.name"
TOOL: Final = "gen_ai.tool.name"
ERROR: Final = "error.type"
DB_SYSTEM: Final = "db.system.name"
DB_OPERATION: Final = "db.operation.name"
RECORDS: Final = "gen_ai.memory.record.count"
DB_POOL: Final = "db.client.connection.pool.name"
DB_STATE: Final = "db.client.connection.state"

INVOKE_AGENT = Figure(
    "gen_ai.invoke_agent.duration", "histogram", "How long an agent's turns took.", "s"
)
EXECUTE_TOOL = Figure(
    "gen_ai.execute_tool.duration", "histogram", "How long an agent's tools took.", "s"
)
DB_DURATION = Figure(
    "db.client.operation.duration", "histogram", "How long the store's operations took.", "s"
)
DB_POOL_FIGURES: Final = (
    Figure(
        "db.client.connection.count",
        "gauge",
        "Connections to the store, idle and used.",
        "{connection}",
        DB_STATE,
        read=lambda pool: {"idle": pool.idle, "used": pool.used},
    ),
    Figure(
        "db.client.connection.max",
        "gauge",
        "Connections to the store that there may be.",
        "{connection}",
        read=lambda pool: {"": pool.most},
    ),
    Figure(
        "db.client.connection.idle.max",
        "gauge",
        "Idle connections that are kept at the most.",
        "{connection}",
        read=lambda pool: {"": pool.most},
    ),
    Figure(
        "db.client.connection.idle.min",
        "gauge",
        "Idle connections that are kept at the least.",
        "{connection}",
        read=lambda _: {"": 0},
    ),
    Figure(
        "db.client.connection.pending_requests",
        "gauge",
        "Calls that wait for a connection to the store.",
        "{request}",
        read=lambda pool: {"": pool.waiting},
    ),
)
"""The gauges of a store's connections."""
DB_TIMEOUTS = Figure(
    "db.client.connection.timeouts",
    "counter",
    "Connections to the store that could not be made in time.",
    "{timeout}",
)
DB_CREATE_TIME = Figure(
    "db.client.connection.create_time",
    "histogram",
    "How long making a connection to the store took.",
    "s",
)
DB_WAIT_TIME = Figure(
    "db.client.connection.wait_time",
    "histogram",
    "How long calls waited for a connection to the store.",
    "s",
)
DB_USE_TIME = Figure(
    "db.client.connection.use_time",
    "histogram",
    "How long calls kept a connection to the store.",
    "s",
)


# The figures of managers


LOOK: Final = 0.25
"""Seconds between two looks at the event loop."""

Observer = Callable[[Figure, str, float], object]
"""Gets a histogram, the label's value, and what was measured."""


@final
class Count:
    """The count of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


@final
class Distribution:
    """The counts of a histogram."""

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

    It is an ASGI application, too, which answers a scrape:
    ``app.add_route("/metrics", metrics)``. It asks for no token.

    Args:
        sessions: Managers that are open, of one event loop.

    """

    content_type: Final = "text/plain; version=0.0.4; charset=utf-8"
    """The media type of the text that `render` returns."""

    def __init__(self, *sessions: SessionManager) -> None:
        self._counts: dict[tuple[Figure, str], Count] = {}
        self._distributions: dict[tuple[Figure, str], Distribution] = {}
        self._observer: Observer | None = None
        self._sessions: list[SessionManager] = []
        self._latest: list[Health] = []
        self._off: list[Callable[[], None]] = []
        for figure in FIGURES:
            for label in figure.labels if figure.label else ("",):
                if figure.kind == "counter":
                    self._counts[figure, label] = Count()
                elif figure.kind == "histogram":
                    self._distributions[figure, label] = Distribution()
        # Each save needs these: a look-up by a figure costs more than the counting.
        self._ok = self._counts[SAVES, "ok"]
        self._records = self._counts[SAVED_RECORDS, ""]
        self._bytes = self._counts[SAVED_BYTES, ""]
        self._durations = self._distributions[SAVE_DURATION, ""]
        self._windows = self._distributions[SAVE_WINDOW, ""]
        for manager in sessions:
            self.add(manager)

    def __repr__(self) -> str:
        return f"<Metrics of {len(self._sessions)} managers>"

    def add(self, sessions: SessionManager) -> None:
        """Count what another manager does, too.

        Raises:
            SessionClosedError: It is not open.

        """
        on = sessions.on
        self._off += [
            on("saved", self._saved),
            on("save_failed", self._save_failed),
            on("quarantined", lambda _: self._count(SAVES, "refused")),
            on("lost", lambda _: self._count(LEASE_CHANGES, "lost")),
            on("opened", self._opened),
            on("closed", self._closed),
            on("folded", lambda _: self._count(FOLDS, "ok")),
            on("fold_failed", lambda _: self._count(FOLDS, "failed")),
            on("posted", lambda event: self._count(POSTS, by=len(event.posts))),
            on("pruned", self._pruned),
            on("stalled", lambda _: self._count(STALLS)),
        ]
        self._sessions.append(sessions)
        parts_of(sessions).runtime.host.spawn(self._watch_loop)

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
            self._observer(SAVE_DURATION, "", event.took)
            self._observer(SAVE_WINDOW, "", event.window)

    def _save_failed(self, event: SaveFailed) -> None:
        self._count(SAVES, "in_doubt" if event.in_doubt else "failed")

    def _opened(self, event: Opened) -> None:
        self._count(LEASE_CHANGES, "acquired")
        self._measure(RESTORE_DURATION, event.took, event.report.source)

    def _closed(self, event: Closed) -> None:
        if event.why != "lost":
            self._count(LEASE_CHANGES, "released")

    def _pruned(self, report: PruneReport) -> None:
        for outcome in RETENTION.labels:
            self._count(RETENTION, outcome, len(getattr(report, outcome)))

    async def _watch_loop(self) -> None:
        while self._sessions:
            due = anyio.current_time() + LOOK
            await anyio.sleep_until(due)
            self._measure(LOOP_LAG, max(anyio.current_time() - due, 0.0))
            self._healths()

    # Values that are read when a page asks

    def _samples(self) -> Iterator[Sample]:
        """Return all figures as they are now."""
        for (figure, label), count in self._counts.items():
            yield Sample(figure, label, count.value)
        for (figure, label), distribution in self._distributions.items():
            yield Sample(figure, label, distribution)
        healths = self._healths()
        for figure in FIGURES:
            if figure.read is not None:
                for label, value in figure.read(healths).items():
                    yield Sample(figure, label, value)

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

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request with the figures in Prometheus's text format."""
        status, body, about = 405, b"", (b"allow", b"GET, HEAD")
        if scope["method"] in {"GET", "HEAD"}:
            status, body = 200, self.render().encode()
            about = (b"content-type", self.content_type.encode())
        length = (b"content-length", b"%d" % len(body))
        headers = [about, length, (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        shown = b"" if scope["method"] == "HEAD" else body
        await send({"type": "http.response.body", "body": shown})

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
