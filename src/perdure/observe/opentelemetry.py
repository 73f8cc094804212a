"""The figures of managers, spans of what they do, and an agent's turns, by OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

import perdure
from perdure._lib.lazy import import_extra
from perdure.observe import metrics as names
from perdure.observe.metrics import FIGURES, SECONDS, Distribution, Figure, Metrics
from perdure.store import ConnectionEvent, SupportsConnections, capability

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation
    from opentelemetry.trace import Tracer, TracerProvider

    from perdure.agent import Agent
    from perdure.agent.events import CompactionCompleted, CompactionFailed
    from perdure.autosave.events import Saved
    from perdure.session.events import MemorySearched, Opened
    from perdure.session.manager import SessionManager
    from perdure.store import Store

_SYSTEMS = {"postgres": "postgresql"}
"""OpenTelemetry's names of stores, where they are not those of their modules."""
_TIMED = frozenset(
    {"acquire", "ack", "append_many", "delete", "enqueue", "get_blob", "head", "holder"}
    | {"put_blobs", "read_documents", "receive", "release", "sessions", "write_documents"}
)
"""The operations of a store that a caller waits for."""


@final
class Telemetry:
    """Give OpenTelemetry what managers and agents do: ``telemetry.add(sessions)``.

    Your own set-up decides where it goes: perdure uses OpenTelemetry's API alone. Figures have the
    names of `Metrics`; a session's id is on spans only, as ``gen_ai.conversation.id``.

    Args:
        meter_provider: Where figures go; None for the global one.
        tracer_provider: Where spans go; None for the global one.

    Raises:
        MissingExtraError: OpenTelemetry's API is not installed.

    """

    def __init__(
        self,
        *,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        package = {"used_by": "Telemetry", "name": "OpenTelemetry's API", "extra": "otel"}
        metrics = import_extra("opentelemetry.metrics", **package)
        trace = import_extra("opentelemetry.trace", **package)
        self.metrics: Metrics = Metrics()
        """The same figures, for `Metrics.render`."""
        self.metrics._observer = self._observe
        self._trace = trace
        about = ("perdure", perdure.__version__)
        self._meter = metrics.get_meter(*about, meter_provider, names.SEMCONV)
        self._tracer = trace.get_tracer(*about, tracer_provider, names.SEMCONV)
        self._observation = metrics.Observation
        own = (names.INVOKE_AGENT, names.EXECUTE_TOOL, names.DB_DURATION)
        figures = [figure for figure in (*FIGURES, *own) if figure.kind == "histogram"]
        self._histograms = {figure: self._histogram(figure) for figure in figures}
        for figure in FIGURES:
            self._create(figure)
        self._pools: _Pools | None = None
        self._off: list[Callable[[], None]] = []

    def _histogram(self, figure: Figure) -> Histogram:
        histogram: Histogram = self._meter.create_histogram(
            figure.name,
            unit=figure.unit,
            description=figure.help,
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        return histogram

    def __repr__(self) -> str:
        return f"<Telemetry with {self.metrics!r}>"

    def add(self, sessions: SessionManager) -> None:
        """Follow a manager until it is closed.

        Raises:
            SessionClosedError: It is not open.

        """
        self.metrics.add(sessions)
        self._off += [
            sessions.on("saved", self._saved),
            sessions.on("opened", self._opened),
            sessions.on("memory_searched", self._searched),
        ]

    def close(self) -> None:
        """Follow no manager any more."""
        self.metrics.close()
        for off in self._off:
            off()
        self._off.clear()

    def observed(self, store: Store) -> Store:
        """Return a store that measures its operations: ``db.client.operation.duration``.

        Of PostgreSQL and Redis also ``db.client.connection.*``.

        Connect with it: ``perdure.connect(telemetry.observed(perdure.store_for(url)))``. Leave it
        out where the driver itself is instrumented. It costs SQLite its fastest way to save.
        """
        pooled = capability(store, SupportsConnections)
        if pooled is not None:
            if self._pools is None:
                self._pools = _Pools(self._meter, self._histogram, self._observation)
            self._pools.add(pooled, store.location)
        return cast("Store", _ObservedStore(store, self._histograms[names.DB_DURATION].record))

    async def follow(self, agent: Agent) -> None:
        """Measure an agent's turns and tools until it stops: start it next to the agent.

        The spans are named after OpenTelemetry's conventions: ``invoke_agent`` and, in it,
        ``execute_tool``, and ``upsert_memory`` for a compaction. Searches of a memory are
        ``search_memory`` spans wherever they are made.
        """
        from perdure.agent.events import (
            CompactionCompleted,
            CompactionFailed,
            CompactionStarted,
            ToolFinished,
            ToolStarted,
            TurnEnded,
            TurnFailed,
            TurnInterrupted,
            TurnStarted,
        )

        spans = _AgentSpans(agent.context.agent_id, self._trace, self._tracer, self._histograms)
        async with agent.events() as events:
            async for event in events:
                if isinstance(event, TurnStarted):
                    spans.begin(event.turn_id)
                elif isinstance(event, ToolStarted):
                    spans.begin_tool(event.call.id, event.call.name)
                elif isinstance(event, ToolFinished):
                    spans.end_tool(event.call.id, event.call.name, event.result.error)
                elif isinstance(event, CompactionStarted):
                    spans.begin_memory()
                elif isinstance(event, CompactionCompleted | CompactionFailed):
                    spans.end_memory(event)
                elif isinstance(event, TurnEnded | TurnInterrupted | TurnFailed):
                    spans.end(None if isinstance(event, TurnEnded) else type(event).__name__)

    # Figures

    def _create(self, figure: Figure) -> None:
        read = [partial(self._read, figure)]
        about = {"unit": figure.unit, "description": figure.help}
        if figure.kind == "counter":
            self._meter.create_observable_counter(figure.name, read, **about)
        elif figure.kind == "gauge":
            self._meter.create_observable_gauge(figure.name, read, **about)

    def _read(self, figure: Figure, _: CallbackOptions) -> Iterable[Observation]:
        return [
            self._observation(sample.value, {figure.label: sample.label} if figure.label else None)
            for sample in self.metrics._samples()
            if sample.figure is figure and not isinstance(sample.value, Distribution)
        ]

    def _observe(self, figure: Figure, label: str, value: float) -> None:
        self._histograms[figure].record(value, {figure.label: label} if figure.label else None)

    # Spans of what has happened already

    def _saved(self, event: Saved) -> None:
        facts = {"perdure.records": event.records}
        self._span("perdure.save", event.took, str(event.key), facts)

    def _opened(self, event: Opened) -> None:
        report = event.report
        facts: dict[str, str | int] = {
            "perdure.source": report.source,
            "perdure.records": report.records_read,
        }
        self._span("perdure.restore", event.took, str(event.key), facts)

    def _searched(self, event: MemorySearched) -> None:
        facts: dict[str, str | int] = {names.OPERATION: "search_memory", names.RECORDS: event.found}
        self._span("search_memory", event.took, str(event.key), facts, event.error)

    def _span(
        self,
        name: str,
        took: float,
        session: str,
        facts: Mapping[str, str | int],
        error: str | None = None,
    ) -> None:
        end = time.time_ns()
        attributes = {names.CONVERSATION: session, **facts}
        span = self._tracer.start_span(
            name, attributes=attributes, start_time=end - int(took * 1e9)
        )
        _note_error(self._trace, span, error)
        span.end(end)


def _note_error(trace: Any, span: Any, error: str | None) -> None:
    if error is not None:
        span.set_attribute(names.ERROR, error)
        span.set_status(trace.StatusCode.ERROR)


class _AgentSpans:
    """The spans of one agent: a turn, and the tools in it."""

    def __init__(
        self, name: str, trace: Any, tracer: Tracer, histograms: Mapping[Figure, Histogram]
    ) -> None:
        self._name = name
        self._trace = trace
        self._tracer = tracer
        self._histograms = histograms
        self._turn: Any = None
        self._memory: Any = None
        self._began = 0.0
        self._tools: dict[str, tuple[Any, float]] = {}

    def begin(self, turn_id: str) -> None:
        self._began = time.perf_counter()
        attributes = {**self._attributes("invoke_agent"), "perdure.turn.id": turn_id}
        self._turn = self._tracer.start_span(f"invoke_agent {self._name}", attributes=attributes)

    def end(self, error: str | None) -> None:
        if self._turn is None:
            return
        self.end_memory(None)
        # Tools that an interrupted turn left running report no end of their own.
        for id_ in list(self._tools):
            self.end_tool(id_, "", error)
        self._finish(self._turn, self._began, names.INVOKE_AGENT, "invoke_agent", error)
        self._turn = None

    def begin_memory(self) -> None:
        self._memory = self._tracer.start_span(
            "upsert_memory",
            context=self._in_turn(),
            attributes=self._attributes("upsert_memory"),
        )

    def end_memory(self, event: CompactionCompleted | CompactionFailed | None) -> None:
        span, self._memory = self._memory, None
        if span is not None:
            error = getattr(event, "error", None)
            _note_error(self._trace, span, type(error).__qualname__ if error is not None else None)
            span.set_attribute("perdure.turns", getattr(event, "turns", 0))
            span.end()

    def _in_turn(self) -> Any:
        return self._trace.set_span_in_context(self._turn) if self._turn else None

    def begin_tool(self, id: str, tool: str) -> None:
        attributes = {**self._attributes("execute_tool"), names.TOOL: tool}
        span = self._tracer.start_span(
            f"execute_tool {tool}", context=self._in_turn(), attributes=attributes
        )
        self._tools[id] = (span, time.perf_counter())

    def end_tool(self, id: str, tool: str, error: str | None) -> None:
        if id in self._tools:
            span, began = self._tools.pop(id)
            more = {names.TOOL: tool} if tool else {}
            why = None if error is None else "tool_error"
            self._finish(span, began, names.EXECUTE_TOOL, "execute_tool", why, **more)

    def _attributes(self, operation: str) -> dict[str, str]:
        return {
            names.OPERATION: operation,
            names.AGENT: self._name,
            names.CONVERSATION: self._name,
        }

    def _finish(
        self,
        span: Any,
        began: float,
        figure: Figure,
        operation: str,
        error: str | None,
        **more: str,
    ) -> None:
        attributes = {names.OPERATION: operation, **more}
        if error is not None:
            attributes[names.ERROR] = error
        _note_error(self._trace, span, error)
        took = time.perf_counter() - began
        self._histograms[figure].record(took, attributes)
        span.end()


class _Pools:
    """The connections of observed stores to their servers."""

    def __init__(
        self,
        meter: Meter,
        histogram: Callable[[Figure], Histogram],
        observation: type[Observation],
    ) -> None:
        self._pools: list[tuple[SupportsConnections, str]] = []
        self._observation = observation
        self._timeouts = meter.create_counter(
            names.DB_TIMEOUTS.name,
            unit=names.DB_TIMEOUTS.unit,
            description=names.DB_TIMEOUTS.help,
        )
        self._times: dict[ConnectionEvent, Histogram] = {
            "created": histogram(names.DB_CREATE_TIME),
            "waited": histogram(names.DB_WAIT_TIME),
            "used": histogram(names.DB_USE_TIME),
        }
        for figure in names.DB_POOL_FIGURES:
            meter.create_observable_up_down_counter(
                figure.name,
                [partial(self._read, figure)],
                unit=figure.unit,
                description=figure.help,
            )

    def add(self, store: SupportsConnections, name: str) -> None:
        self._pools.append((store, name))
        store.watch_connections(partial(self._note, {names.DB_POOL: name}))

    def _note(self, pool: dict[str, str], event: ConnectionEvent, took: float) -> None:
        if event == "timed_out":
            self._timeouts.add(1, pool)
        else:
            self._times[event].record(took, pool)

    def _read(self, figure: Figure, _: CallbackOptions) -> Iterable[Observation]:
        assert figure.read is not None
        for store, name in self._pools:
            for label, count in figure.read(store.connection_pool()).items():
                more = {figure.label: label} if figure.label else {}
                yield self._observation(count, {names.DB_POOL: name, **more})


class _ObservedStore:
    """Measure the operations of a store, those beyond the port included."""

    def __init__(self, store: Store, record: Callable[[float, dict[str, str]], object]) -> None:
        self._inner = store
        self._record = record
        backend = type(store).__module__.removeprefix("perdure.stores.").partition(".")[0]
        self._system = _SYSTEMS.get(backend, backend)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "begin_append":  # no one waits for its return
            raise AttributeError(name)
        value = getattr(self._inner, name)
        if name in _TIMED:
            value = partial(self._timed, name, value)
            # Kept on the object, so that the next call finds it at once.
            with suppress(AttributeError):
                setattr(self, name, value)
        return value

    async def _timed(
        self, name: str, call: Callable[..., Awaitable[Any]], /, *args: Any, **options: Any
    ) -> Any:
        attributes = {names.DB_SYSTEM: self._system, names.DB_OPERATION: name}
        began = time.perf_counter()
        try:
            return await call(*args, **options)
        except BaseException as error:
            attributes[names.ERROR] = type(error).__qualname__
            raise
        finally:
            self._record(time.perf_counter() - began, attributes)
