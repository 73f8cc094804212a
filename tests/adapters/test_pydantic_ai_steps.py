"""`PerdureStepStore` against the harness's own store in memory, its capability, and other processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pydantic
import pytest
from hypothesis import given, strategies as st
from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    RetryPromptPart,
    TextPart,
    ThinkingPart,
    UserPromptPart,
)
from pydantic_ai.models.test import TestModel

import perdure
from perdure import (
    FormatError,
    LeaseLostError,
    Message,
    NotStorableError,
    SessionError,
    SessionManager,
    UnsupportedVersionError,
    adapters,
)
from perdure.testing import MemoryBacking, MemoryStore

harness: Any = pytest.importorskip("pydantic_ai_harness.step_persistence")
PerdureStepStore = adapters.PerdureStepStore

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
RUNS = ("one", "two")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The SDK's agents run on asyncio; the store does on trio, too: there is a test for that."""
    return "asyncio"


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[SessionManager]:
    async with perdure.connect(tmp_path / "store") as manager:
        yield manager


def history(*texts: str) -> list[ModelMessage]:
    thinking = ThinkingPart("low", signature="c2ln", provider_name="x")
    return [
        ModelRequest(parts=[UserPromptPart(text, timestamp=NOON)])
        if at % 2 == 0
        else ModelResponse(parts=[thinking, TextPart(text)], timestamp=NOON)
        for at, text in enumerate(texts)
    ]


def snapshot(run: str, *texts: str, **more: Any) -> Any:
    return harness.ContinuableSnapshot(
        run_id=run, step_index=len(texts), messages=history(*texts), timestamp=NOON, **more
    )


def event(run: str, at: int, **more: Any) -> Any:
    return harness.StepEvent(
        run_id=run, kind="tool_call_started", step_index=at, timestamp=NOON, **more
    )


def effect(run: str, call: str, status: Any) -> Any:
    return harness.ToolEffectRecord(
        tool_call_id=call, tool_name="tide", run_id=run, status=status, started_at=NOON
    )


def record(run: str, at: int, **more: Any) -> Any:
    started = NOON + timedelta(minutes=at)
    return harness.RunRecord(run_id=run, started_at=started, metadata={"n": str(at)}, **more)


keys = st.sampled_from([None, "a", "0:a", "1:a", "1:b", "2:a", "-1:a", "x:a"])
runs = st.sampled_from(RUNS)
writes = st.one_of(
    st.builds(
        lambda run, at, parent, talk: (
            "register_run",
            record(run, at, parent_run_id=parent, conversation_id=talk),
        ),
        runs,
        st.integers(0, 9),
        st.sampled_from([None, "one"]),
        st.sampled_from([None, "talk"]),
    ),
    st.builds(
        lambda run, at, key: ("append_event", event(run, at, idempotency_key=key)),
        runs,
        st.integers(0, 3),
        keys,
    ),
    st.builds(
        lambda run, texts, key, state: (
            "save_snapshot",
            snapshot(run, *texts, idempotency_key=key, state=state),
        ),
        runs,
        st.lists(st.sampled_from("ab"), max_size=4),
        keys,
        st.sampled_from(["complete", "interrupted"]),
    ),
    st.builds(
        lambda run, call, status: ("record_tool_effect", effect(run, call, status)),
        runs,
        st.sampled_from("cd"),
        st.sampled_from(["started", "completed", "failed"]),
    ),
)


async def shown(store: Any) -> list[Any]:
    """Return all that a store tells of the runs."""
    found: list[Any] = [
        await store.list_runs(),
        await store.list_runs(parent_run_id="one"),
        await store.list_runs(conversation_id="talk", parent_run_id="one"),
    ]
    for run in RUNS:
        found += [await store.get_run(run_id=run), await store.list_events(run_id=run)]
        for both in (False, True):
            found.append(await store.latest_snapshot(run_id=run, include_interrupted=both))
            found.append(await store.list_snapshots(run_id=run, include_interrupted=both))
        for call in "cd":
            found.append(await store.get_tool_effect(run_id=run, tool_call_id=call))
        found.append(await store.list_unresolved_tool_effects(run_id=run))
    return found


@given(st.lists(st.lists(writes, max_size=6), max_size=3))
def test_it_does_what_the_harness_s_store_in_memory_does(processes: list[list[Any]]) -> None:
    async def run() -> None:
        backing, own = MemoryBacking(), harness.InMemoryStepStore()
        for acts in processes:
            async with perdure.connect(MemoryStore(backing=backing)) as manager:
                store = PerdureStepStore(manager)
                for name, value in acts:
                    await getattr(store, name)(value)
                    await getattr(own, name)(value)
                    assert await shown(store) == await shown(own)
            async with perdure.connect(MemoryStore(backing=backing)) as reader:
                assert await shown(PerdureStepStore(reader)) == await shown(own)

    anyio.run(run)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_run_is_stored_on_each_loop(backend: str) -> None:
    async def run() -> None:
        async with PerdureStepStore.in_memory() as store:
            assert isinstance(store, harness.StepStore)
            await store.register_run(record("one", 1))
            assert await store.get_run(run_id="one") == record("one", 1)

    anyio.run(run, backend=backend)


async def test_large_values_and_what_json_lacks_come_back_and_owners_are_forgotten(
    tmp_path: Path,
) -> None:
    texts = ("x" * 17_000_000, "half \ud83d")
    made = [snapshot("one", *texts), snapshot("one", *texts, "more")]
    async with perdure.connect(tmp_path) as sessions:
        store = PerdureStepStore(sessions, owner="ada")
        for each in made:
            await store.save_snapshot(each)
    async with perdure.connect(tmp_path) as sessions:
        store = PerdureStepStore(sessions)
        assert await store.list_snapshots(run_id="one") == made
        await store.save_snapshot(snapshot("one", *texts, "more", "and more"))
        assert await store.latest_snapshot(run_id="one") == snapshot(
            "one", *texts, "more", "and more"
        )
        await store.save_snapshot(snapshot("two", "other"))
        await sessions.forget(owner="ada")
        assert await store.list_snapshots(run_id="one") == []
        assert await store.list_snapshots(run_id="two") != []
        with pytest.raises(perdure.InvalidArgumentError, match="run_id is empty"):
            await store.list_snapshots(run_id="")


async def test_a_run_is_continued_after_a_restart(tmp_path: Path) -> None:
    def tide(place: str) -> str:
        return f"noon at {place}"

    async with PerdureStepStore.from_url(tmp_path / "store") as store:
        steps = harness.StepPersistence(store=store, run_id="r1")
        agent = Agent(TestModel(), tools=[tide], capabilities=[steps])
        first = await agent.run("When is low tide?")
    async with PerdureStepStore.from_url(tmp_path / "store") as store:
        messages = await harness.continue_run(store, run_id="r1")
        dump = ModelMessagesTypeAdapter.dump_json
        assert dump(messages) == dump(first.all_messages())
        kinds = [each.kind for each in await store.list_events(run_id="r1")]
        assert kinds[0] == "run_started"
        assert kinds[-1] == "run_completed"
        assert not await store.list_unresolved_tool_effects(run_id="r1")
        assert (await Agent(TestModel()).run("And then?", message_history=messages)).output


async def test_a_snapshot_costs_what_was_added(sessions: SessionManager, tmp_path: Path) -> None:
    store = PerdureStepStore(sessions)
    texts = [f"{at} " * 500 for at in range(40)]
    for size in range(1, len(texts) + 1):
        await store.save_snapshot(snapshot("one", *texts[:size]))
    view = await sessions.load("one", session="steps")
    assert view is not None
    total = 0
    async with perdure.connect(place := perdure.store_for(tmp_path / "store")):
        async for chunk in place.read_log(view.key):
            total += sum(len(each.payload) for each in chunk.records)
    assert total < 2 * sum(map(len, texts))
    latest = await store.latest_snapshot(run_id="one")
    assert latest.messages == history(*texts)


async def test_runs_of_two_processes_are_both_stored(tmp_path: Path) -> None:
    async with (
        perdure.connect(tmp_path / "store") as mine,
        perdure.connect(tmp_path / "store") as theirs,
    ):
        stores = PerdureStepStore(mine), PerdureStepStore(theirs)
        for at in range(6):
            await stores[at % 2].append_event(event("one", at, idempotency_key=f"{at // 2}"))
        for store in stores:
            assert [each.step_index for each in await store.list_events(run_id="one")] == [0, 2, 4]


async def test_writes_at_the_same_time_are_each_stored_once(sessions: SessionManager) -> None:
    store = PerdureStepStore(sessions)
    async with anyio.create_task_group() as tasks:
        for at in range(20):
            tasks.start_soon(
                store.append_event, event("one", at % 10, idempotency_key=str(at % 10))
            )
    steps = [each.step_index for each in await store.list_events(run_id="one")]
    assert sorted(steps) == list(range(10))


async def test_a_session_with_messages_is_no_run(sessions: SessionManager) -> None:
    async with sessions.open("one", session="steps") as session:
        session.append(Message.user("hello"))
        await session.save()
    with pytest.raises(SessionError, match="choose another id"):
        await PerdureStepStore(sessions).append_event(event("one", 1))


async def test_what_cannot_be_read_here_is_named(
    sessions: SessionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.adapters import pydantic_ai_steps

    store = PerdureStepStore(sessions)
    odd = event("one", 1)
    odd.kind = "invented"
    with monkeypatch.context() as newer:  # a version that knows this kind
        newer.setitem(pydantic_ai_steps.KINDS, "event", pydantic.TypeAdapter(Any))
        await store.append_event(odd)
    with pytest.raises(FormatError, match="a run's event cannot be read .*kind"):
        await store.list_events(run_id="one")
    monkeypatch.setattr(pydantic_ai_steps, "SHAPE", 2)
    await store.append_event(event("two", 1))
    monkeypatch.setattr(pydantic_ai_steps, "SHAPE", 1)
    with pytest.raises(UnsupportedVersionError, match="upgrade perdure"):
        await PerdureStepStore(sessions).list_events(run_id="two")


async def test_a_run_does_not_bring_back_what_was_forgotten(sessions: SessionManager) -> None:
    store = PerdureStepStore(sessions)
    await store.register_run(harness.RunRecord(run_id="one", started_at=NOON))
    await store.save_snapshot(snapshot("one", "a telephone number"))
    await sessions.forget("one")
    with pytest.raises(LeaseLostError, match="was deleted"):
        await store.save_snapshot(snapshot("one", "a telephone number", "low"))
    assert await sessions.list() == []
    await store.register_run(harness.RunRecord(run_id="one", started_at=NOON))  # a new one
    await store.save_snapshot(snapshot("one", "high"))
    assert len(await store.list_snapshots(run_id="one")) == 1


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings", "ignore:`RetryPromptPart`")
async def test_what_could_not_be_read_back_is_refused(sessions: SessionManager) -> None:
    store = PerdureStepStore(sessions)
    await store.save_snapshot(snapshot("one", "a"))
    odd = snapshot("one", "a")
    errors: Any = [{"type": "missing", "loc": ("harbor",), "msg": "m"}]  # without its input
    retry = RetryPromptPart(errors, tool_name="tide", tool_call_id="1")
    odd.messages.append(ModelRequest(parts=[retry], timestamp=NOON))
    with pytest.raises(NotStorableError, match="could never be read back"):
        await store.save_snapshot(odd)
    with pytest.raises(NotStorableError, match="could never be read back"):
        await store.append_event(event("one", "not a number"))  # type: ignore[arg-type]
    assert len(await store.list_snapshots(run_id="one")) == 1
    assert await store.list_events(run_id="one") == []
