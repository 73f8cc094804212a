"""OpenTelemetry: the names of the Prometheus text, spans with a session's id, an agent's tools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import perdure
from perdure import Message, Shutdown
from perdure.agent import Agent, ScriptedModel, call
from perdure.memory.compaction import CompactionPolicy
from perdure.observe import Telemetry
from perdure.store import take_after
from tests.observe.test_metrics import read

QUIET = Shutdown(signals=False)


class Collected:
    """A set-up of OpenTelemetry that keeps everything in memory."""

    def __init__(self) -> None:
        self.reader, self.spans = InMemoryMetricReader(), InMemorySpanExporter()
        self._meters = MeterProvider(metric_readers=[self.reader])
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.telemetry = Telemetry(meter_provider=self._meters, tracer_provider=tracers)

    def figures(self) -> dict[str, list[Any]]:
        data = self.reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
        return {one.name: list(one.data.data_points) for scope in scopes for one in scope.metrics}


async def test_figures_and_spans_of_a_session(tmp_path: Path) -> None:
    collected = Collected()
    store = collected.telemetry.observed(perdure.store_for(f"sqlite:///{tmp_path}/x.db"))
    async with perdure.connect(store, shutdown=QUIET) as sessions:
        collected.telemetry.add(sessions)
        async with sessions.open("ada") as session, session.turn():
            session.append(Message.user("a secret"))
        found = collected.figures()
        there = await anyio.to_thread.run_sync(collected.figures)  # as an exporter's thread does
    assert found.keys() == there.keys()
    (saves,) = [one for one in found["perdure.saves"] if one.attributes == {"outcome": "ok"}]
    assert saves.value == 1
    (took,) = found["perdure.save.duration"]
    assert (took.count, took.sum > 0) == (1, True)
    operations = {
        one.attributes["db.operation.name"]: one for one in found["db.client.operation.duration"]
    }
    assert {"acquire", "append_many"} <= operations.keys()
    assert operations["append_many"].attributes["db.system.name"] == "sqlite"
    spans = {one.name: one for one in collected.spans.get_finished_spans()}
    assert spans.keys() == {"perdure.restore", "perdure.save"}
    for span in spans.values():
        assert span.attributes["gen_ai.conversation.id"] == "ada"
        assert span.end_time > span.start_time
    assert spans["perdure.save"].attributes["perdure.records"] == 3
    assert "secret" not in repr(found) + repr([one.to_json() for one in spans.values()])


async def test_an_error_of_the_store_is_named() -> None:
    collected = Collected()
    store = collected.telemetry.observed(perdure.store_for("memory:"))
    await store.open()
    with pytest.raises(perdure.LeaseError):
        from perdure.records.keys import SessionKey

        await take_after(store, SessionKey("ada"), after=0)
        await store.delete(SessionKey("ada"), 9)
    points = collected.figures()["db.client.operation.duration"]
    assert {one.attributes.get("error.type") for one in points} == {None, "LeaseLostError"}
    await store.aclose()


async def test_an_agent_s_turns_and_tools_are_spans_within_each_other() -> None:
    collected = Collected()

    async def look(where: str) -> str:
        """Look."""
        if where == "down":
            raise ValueError(where)
        return "it"

    model = ScriptedModel([call("look", where="up"), call("look", where="down")], "done")
    async with perdure.connect("memory:", shutdown=QUIET) as sessions:
        async with anyio.create_task_group() as group:
            agent = Agent.create("ada", model=model, tools=[look], sessions=sessions)
            async with agent as running:
                group.start_soon(collected.telemetry.follow, running)
                await anyio.wait_all_tasks_blocked()
                assert await running.ask("look") == "done"
    found = collected.figures()
    (turn,) = found["gen_ai.invoke_agent.duration"]
    assert (turn.count, dict(turn.attributes)) == (1, {"gen_ai.operation.name": "invoke_agent"})
    tools = {one.attributes.get("error.type"): one for one in found["gen_ai.execute_tool.duration"]}
    assert tools.keys() == {None, "tool_error"}
    *inner, outer = collected.spans.get_finished_spans()
    assert outer.name == "invoke_agent ada"
    assert [one.name for one in inner] == ["execute_tool look"] * 2
    assert {one.parent.span_id for one in inner} == {outer.context.span_id}
    assert outer.attributes["gen_ai.conversation.id"] == "ada"


async def test_a_compaction_is_a_span_within_its_turn() -> None:
    collected = Collected()
    policy = CompactionPolicy(max_tokens=60, count_tokens=lambda message: len(message.text))
    model = ScriptedModel(lambda messages: "It is " + "deep " * 10)
    async with perdure.connect("memory:", shutdown=QUIET) as sessions:
        async with anyio.create_task_group() as group:
            agent = Agent.create("ada", model=model, compaction=policy, sessions=sessions)
            async with agent as running:
                group.start_soon(collected.telemetry.follow, running)
                await anyio.wait_all_tasks_blocked()
                for _ in range(4):
                    await running.ask("How deep is it?")
    spans = collected.spans.get_finished_spans()
    turns = {one.context.span_id for one in spans if one.name == "invoke_agent ada"}
    memory = [one for one in spans if one.name == "upsert_memory"]
    assert memory
    assert all(one.parent.span_id in turns for one in memory)
    assert memory[0].attributes["gen_ai.operation.name"] == "upsert_memory"
    assert memory[0].attributes["gen_ai.conversation.id"] == "ada"
    assert memory[0].attributes["perdure.turns"] > 0


async def test_a_search_of_a_memory_is_a_span_of_whoever_searches() -> None:
    collected = Collected()
    tracer = collected.telemetry._tracer
    model = ScriptedModel("done")
    async with perdure.connect("memory:", shutdown=QUIET) as sessions:
        collected.telemetry.add(sessions)
        async with sessions.open("ada") as session:
            session.memory.set("secret-boat", {"name": "Swallow"}, description="the boat")
            with tracer.start_as_current_span("outer"):
                assert len(await session.memory.search("secret-boat")) == 1
                assert await session.memory.search("herring") == []
        async with Agent.create("bob", model=model, sessions=sessions) as agent:
            assert await agent.memory.retriever.search("herring") == []
            await agent.ask("Hello")
    spans = collected.spans.get_finished_spans()
    (outer,) = [one for one in spans if one.name == "outer"]
    searches = [one for one in spans if one.name == "search_memory"]
    assert [
        (one.attributes["gen_ai.conversation.id"], one.attributes["gen_ai.memory.record.count"])
        for one in searches
    ] == [("ada", 1), ("ada", 0), ("bob", 0)]
    assert {one.attributes["gen_ai.operation.name"] for one in searches} == {"search_memory"}
    parents = [one.parent and one.parent.span_id for one in searches]
    assert parents == [outer.context.span_id] * 2 + [None]
    assert "secret" not in repr([one.to_json() for one in searches])


async def test_a_search_that_fails_names_its_error() -> None:
    def rank(query: str, texts: Sequence[str]) -> Sequence[float]:
        raise ValueError(query)

    collected = Collected()
    policy = CompactionPolicy(max_tokens=60, count_tokens=lambda message: len(message.text))
    model = ScriptedModel(lambda messages: "It is " + "deep " * 10)
    async with perdure.connect("memory:", shutdown=QUIET) as sessions:
        collected.telemetry.add(sessions)
        agent = Agent.create("ada", model=model, compaction=policy, sessions=sessions)
        async with agent as running:
            for _ in range(4):
                await running.ask("How deep is it?")
            with pytest.raises(ValueError, match="deep"):
                await running.memory.retriever.using(rank=rank).search("deep")
    finished = collected.spans.get_finished_spans()
    (search,) = [one for one in finished if one.name == "search_memory"]
    assert search.attributes["error.type"] == "ValueError"
    assert not search.status.is_ok


@pytest.mark.parametrize("kind", ["postgres", "redis"])
async def test_connections_to_a_server_are_counted(kind: str, tmp_path: Path) -> None:
    collected = Collected()
    if kind == "postgres":
        from tests.servers import postgres

        url = f"{postgres.shared().url}?schema={postgres.schema_of(tmp_path)}"
    else:
        from tests.servers import valkey

        url = f"{valkey.shared().url}?prefix={tmp_path.name}"
    store = collected.telemetry.observed(perdure.store_for(url))
    assert states(collected) == {"idle": 0, "used": 0}
    async with perdure.connect(store, shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session, session.turn():
            session.append(Message.user("x"))
        assert sum(states(collected).values()) >= 1  # one may be renewing the heartbeat
        found = collected.figures()
        for name in ("create_time", "wait_time", "use_time"):
            (times,) = found[f"db.client.connection.{name}"]
            assert (times.count > 0, times.sum > 0) == (True, True)
            assert times.attributes == {"db.client.connection.pool.name": store.location}
        numbers = {name: found[f"db.client.connection.{name}"][0].value for name in POOL}
        assert numbers["max"] == numbers["idle.max"] > 1
        assert numbers["idle.min"] == numbers["pending_requests"] == 0
        assert "db.client.connection.timeouts" not in found


POOL = ("max", "idle.max", "idle.min", "pending_requests")


@pytest.mark.parametrize("kind", ["postgres", "redis"])
async def test_a_server_that_accepts_and_says_nothing_is_a_timeout(kind: str) -> None:
    collected = Collected()
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        url = {
            "postgres": f"postgresql://u@127.0.0.1:{port}/d?connect_timeout=2&sslmode=disable",
            "redis": f"redis://127.0.0.1:{port}?connect_timeout=0.1",
        }[kind]
        store = collected.telemetry.observed(perdure.store_for(url))
        with pytest.raises(perdure.StoreUnavailableError):
            await store.open()
    (timeouts,) = collected.figures()["db.client.connection.timeouts"]
    assert timeouts.value >= 1
    assert timeouts.attributes == {"db.client.connection.pool.name": store.location}


def states(collected: Collected) -> dict[str, float]:
    points = collected.figures()["db.client.connection.count"]
    return {one.attributes["db.client.connection.state"]: one.value for one in points}


def test_the_exporter_for_prometheus_gives_the_same_names() -> None:
    exporter = pytest.importorskip("opentelemetry.exporter.prometheus")
    from prometheus_client import REGISTRY, generate_latest

    async def main() -> tuple[str, str]:
        reader = exporter.PrometheusMetricReader()
        provider = MeterProvider(metric_readers=[reader])
        telemetry = Telemetry(meter_provider=provider)
        async with perdure.connect("memory:", shutdown=QUIET) as sessions:
            telemetry.add(sessions)
            async with sessions.open("ada") as session, session.turn():
                session.append(Message.user("x"))
            await asyncio.sleep(0.3)
            theirs = generate_latest(REGISTRY).decode()
            ours = telemetry.metrics.render()
            provider.shutdown()
            return theirs, ours

    theirs, ours = asyncio.run(main())

    def families(text: str) -> set[tuple[str, str]]:
        return {
            (line.split()[2], line.split()[3])
            for line in text.splitlines()
            if line.startswith("# TYPE perdure")
        }

    assert families(ours) - families(theirs) == set()
    ours_saved, theirs_saved = read(ours), theirs
    assert ours_saved['perdure_saves_total{outcome="ok"}'] == 1
    assert "perdure_saves_total{" in theirs_saved
    assert 'le="0.0005"' in theirs_saved
