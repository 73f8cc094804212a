"""`PerdureCheckpointStorage` against the framework's own storages, its workflows, and kills."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import msgspec
import pytest
from agent_framework import (
    Executor,
    FileCheckpointStorage,
    InMemoryCheckpointStorage,
    Message,
    WorkflowBuilder,
    WorkflowCheckpoint,
    WorkflowCheckpointException,
    WorkflowContext,
    handler,
    response_handler,
)
from agent_framework._workflows._checkpoint_encoding import encode_checkpoint_value
from hypothesis import given, settings, strategies as st

import perdure
from perdure import (
    LeaseHeldError,
    NotStorableError,
    Retention,
    SessionError,
    SessionManager,
)
from perdure.adapters import PerdureCheckpointStorage, PerdureHistoryProvider
from perdure.adapters.agent_framework_checkpoints import (
    SDK,
    SHAPE,
    CheckpointRecord,
    change_of,
    changed,
)
from perdure.records.records import FOREIGN, Entry
from perdure.session.internals import accept
from perdure.testing import MemoryBacking, MemoryStore
from tests.adapters.test_agent_framework import STORES, killed, said, url_of

NOON = datetime(2026, 11, 27, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The framework's workflows run on asyncio; the storage does on trio, too: see below."""
    return "asyncio"


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[SessionManager]:
    async with perdure.connect(tmp_path / "store") as manager:
        yield manager


def checkpoint(
    name: str, after: str | None = None, *, at: int = 0, workflow: str = "w", **state: Any
) -> WorkflowCheckpoint:
    when = (NOON + timedelta(seconds=at)).isoformat()
    return WorkflowCheckpoint(workflow, "graph", name, after, when, state=state)


# As the framework's own

plain = st.recursive(
    st.sampled_from(
        [None, True, False, 0, 1, 2**70, 0.0, -0.0, 1.0, float("nan"), float("inf"), "", "a", "é"]
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=12,
)
values = st.one_of(
    plain,
    st.lists(plain, max_size=6),
    st.just({1, 2}),
    st.just(("a", NOON)),
    st.builds(said, st.sampled_from(["a", "b"])),
    st.lists(st.builds(said, st.sampled_from(["a", "b"])), max_size=3),
    st.just({"__pickled__": "no", "__type__": "pickle"}),
    st.just({1: "a", "1": "b"}),
)
acts = st.one_of(
    st.tuples(
        st.just("save"),
        st.sampled_from(["v", "w"]),
        st.integers(0, 4),
        st.dictionaries(st.sampled_from("xyz"), values, max_size=3),
    ),
    st.tuples(
        st.just("replace"),
        st.integers(0, 4),
        st.dictionaries(st.sampled_from("xyz"), values, max_size=3),
    ),
    st.tuples(st.just("delete"), st.integers(0, 4)),
)


def shown(value: Any) -> str:
    """Return all that a value is; NaN is not equal to itself, and messages compare by identity."""
    if isinstance(value, WorkflowCheckpoint):
        return shown(value.to_dict())
    if isinstance(value, Message):
        return repr(value.to_dict())
    if isinstance(value, dict):
        return repr([(key, shown(item)) for key, item in value.items()])
    if isinstance(value, list):
        return repr(list(map(shown, value)))
    return repr(value)


async def everything(storage: Any, names: list[str]) -> list[Any]:
    """Return all that a storage tells, in no order where the framework has none."""
    found: list[Any] = []
    for workflow in ("v", "w", "none"):
        listed = await storage.list_checkpoints(workflow_name=workflow)
        found.append(sorted(map(shown, listed)))
        found.append(sorted(await storage.list_checkpoint_ids(workflow_name=workflow)))
        found.append(shown(await storage.get_latest(workflow_name=workflow)))
    for name in [*names, "none"]:
        try:
            found.append(shown(await storage.load(name)))
        except WorkflowCheckpointException:
            found.append(None)
    return found


def as_the_framework(processes: list[list[Any]]) -> None:
    async def run(folder: str) -> None:
        backing = MemoryBacking()
        in_memory, in_files = InMemoryCheckpointStorage(), FileCheckpointStorage(folder)
        made: list[WorkflowCheckpoint] = []
        for steps in processes:
            async with perdure.connect(MemoryStore(backing=backing)) as manager:
                storage = PerdureCheckpointStorage("ada", manager)
                own = (in_memory, in_files, storage)
                for what, *about in steps:
                    names = [each.checkpoint_id for each in made]
                    if what == "save":
                        workflow, back, state = about
                        before = made[-back] if 0 < back <= len(made) else None
                        after = None if before is None else before.checkpoint_id
                        new = checkpoint(f"c{len(made)}", after, at=len(made), workflow=workflow)
                        made.append(replace(new, state=state))
                        assert {await each.save(made[-1]) for each in own} == {new.checkpoint_id}
                    elif made and what == "replace":
                        back, state = about
                        again = replace(made[-back % len(made)], state=state)
                        is_there = shown(await storage_has(in_memory, again.checkpoint_id))
                        if is_there == "True":  # else it is saved late, with an early time
                            for each in own:
                                await each.save(again)
                    elif made:
                        name = names[-about[0] % len(names)]
                        assert len({await each.delete(name) for each in own}) == 1
                    names = [each.checkpoint_id for each in made]
                    told = await everything(storage, names)
                    assert told == await everything(in_files, names)
                    assert await ids(storage) == await ids(in_memory)
            async with perdure.connect(MemoryStore(backing=backing)) as reader:
                names = [each.checkpoint_id for each in made]
                told = await everything(PerdureCheckpointStorage("ada", reader), names)
                assert told == await everything(in_files, names)

    with TemporaryDirectory() as folder:
        asyncio.run(run(folder))


@settings(max_examples=12)
@given(st.lists(st.lists(acts, min_size=4, max_size=6), min_size=2, max_size=3))
def test_it_does_what_the_framework_s_own_storages_do(processes: list[list[Any]]) -> None:
    as_the_framework(processes)


@pytest.mark.deep
@settings(max_examples=300)
@given(st.lists(st.lists(acts, max_size=6), max_size=3))
def test_it_does_what_the_framework_s_own_storages_do_always(processes: list[list[Any]]) -> None:
    as_the_framework(processes)


async def storage_has(storage: InMemoryCheckpointStorage, name: str) -> bool:
    try:
        await storage.load(name)
    except WorkflowCheckpointException:
        return False
    return True


async def ids(storage: Any) -> list[Any]:
    """Return what a storage tells in the order of the saves."""
    found: list[Any] = []
    for workflow in ("v", "w"):
        latest = await storage.get_latest(workflow_name=workflow)
        found.append(None if latest is None else latest.checkpoint_id)
        found.append(await storage.list_checkpoint_ids(workflow_name=workflow))
        listed = await storage.list_checkpoints(workflow_name=workflow)
        found.append([each.checkpoint_id for each in listed])
    return found


@given(plain, plain)
def test_a_change_makes_the_one_of_the_other(before: Any, after: Any) -> None:
    change = change_of(before, after)
    assert shown(before if change is None else changed(before, change)) == shown(after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0.0, -0.0),
        ([1, True, 1.0], [True, 1.0, 1]),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
        ({"a": 1, "b": 2}, {"a": 1}),
        ([1, [2, 3]], [1, [2]]),
        ({"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [1, {"c": 2, "d": None}], "e": []}}),
        ({}, []),
    ],
)
def test_a_change_tells_equal_values_apart(before: Any, after: Any) -> None:
    for one, other in ((before, after), (after, before)):
        change = change_of(one, other)
        assert change is not None
        assert shown(changed(one, change)) == shown(other)
        assert change_of(one, one) is None


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_checkpoint_is_stored_on_each_loop(backend: str) -> None:
    async def run() -> None:
        async with PerdureCheckpointStorage.in_memory() as storage:
            await storage.save(checkpoint("a", x=1))
            assert (await storage.load("a")).state == {"x": 1}

    anyio.run(run, backend=backend)


async def test_copies_go_in_and_come_out(sessions: SessionManager) -> None:
    storage = PerdureCheckpointStorage("ada", sessions)
    mine = checkpoint("a", numbers=[1], inner={"b": [said("Hello.")]})
    await storage.save(mine)
    latest = await storage.get_latest(workflow_name="w")
    assert latest is not None
    for each in (mine, await storage.load("a"), latest):
        each.state["numbers"].append(2)
        each.state["inner"]["b"][0].contents.clear()
    stored = await storage.load("a")
    assert stored.state["numbers"] == [1]
    assert stored.state["inner"]["b"][0].text == "Hello."


async def test_several_tasks_save_and_delete_at_once(sessions: SessionManager) -> None:
    storage = PerdureCheckpointStorage("ada", sessions)
    async with anyio.create_task_group() as tasks:
        for at in range(20):
            tasks.start_soon(storage.save, checkpoint(f"c{at}", at=at, number=at))
    async with anyio.create_task_group() as tasks:
        for at in range(20, 30):
            tasks.start_soon(storage.save, checkpoint(f"c{at}", at=at, number=at))
            tasks.start_soon(storage.delete, f"c{at - 20}")
    names = await storage.list_checkpoint_ids(workflow_name="w")
    assert sorted(names) == [f"c{at}" for at in range(10, 30)]
    assert [(await storage.load(name)).state["number"] for name in sorted(names)] == [
        *range(10, 30)
    ]


async def test_the_latest_is_the_end_of_the_chain_whatever_the_clocks_say(
    sessions: SessionManager,
) -> None:
    storage, own = PerdureCheckpointStorage("ada", sessions), InMemoryCheckpointStorage()
    for each in (storage, own):
        await each.save(checkpoint("a", at=0))
        await each.save(checkpoint("b", "a", at=3600))  # by a machine whose clock is an hour ahead
        await each.save(checkpoint("c", "b", at=2))
        await each.save(checkpoint("b", "a", at=4000, again=True))
    newest = [await each.get_latest(workflow_name="w") for each in (storage, own)]
    assert [each and each.checkpoint_id for each in newest] == ["c", "b"]
    moved = PerdureCheckpointStorage("moved", sessions)
    for name, after in (("b", "a"), ("c", "b"), ("a", None)):  # as files are listed: in any order
        await moved.save(checkpoint(name, after))
    latest = await moved.get_latest(workflow_name="w")
    assert latest is not None
    assert latest.checkpoint_id == "c"
    await storage.save(checkpoint("d", "a", at=1))  # a run that began again from the first one
    latest = await storage.get_latest(workflow_name="w")
    assert latest is not None
    assert latest.checkpoint_id == "d"
    await storage.save(checkpoint("a", "d"))
    await storage.delete("c")
    await storage.delete("b")
    assert await storage.get_latest(workflow_name="w") is not None  # a circle


async def test_a_state_that_grows_costs_what_was_added(
    sessions: SessionManager, tmp_path: Path
) -> None:
    storage, own = (
        PerdureCheckpointStorage("ada", sessions),
        FileCheckpointStorage(tmp_path / "own"),
    )
    talk: list[Message] = []
    after = None
    for at in range(60):
        talk.append(said(f"{at} " + "x" * 500))
        new = checkpoint(f"c{at}", after, at=at, conversation=list(talk), harbor="Oosthaven")
        for each in (storage, own):
            await each.save(new)
        after = new.checkpoint_id
    await sessions.flush()
    theirs = sum(each.stat().st_size for each in (tmp_path / "own").iterdir())
    ours = sum(each.stat().st_size for each in (tmp_path / "store").rglob("*") if each.is_file())
    assert ours * 10 < theirs
    assert shown(await storage.load("c40")) == shown(await own.load("c40"))


async def test_what_was_deleted_takes_no_room(sessions: SessionManager) -> None:
    storage = PerdureCheckpointStorage("ada", sessions)
    for at in range(60):
        new = checkpoint(f"c{at}", f"c{at - 1}" if at else None, at=at, number=at, same="x" * 100)
        await storage.save(new)
        if at >= 3:
            assert await storage.delete(f"c{at - 3}")
    view = await sessions.load("ada", session="checkpoints")
    assert view is not None
    records = [record async for chunk in log_of(sessions) for record in chunk.records]
    assert len(records) < 45
    found = await storage.list_checkpoints(workflow_name="w")
    assert [each.state["number"] for each in found] == [57, 58, 59]
    async with sessions.open("ada", session="checkpoints") as session:
        await session.save()
    again = PerdureCheckpointStorage("ada", sessions)
    assert [shown(each) for each in found] == [
        shown(each) for each in await again.list_checkpoints(workflow_name="w")
    ]
    assert not await again.delete("c3")


def log_of(sessions: SessionManager) -> Any:
    from perdure.records.keys import SessionKey
    from perdure.session.internals import store_below

    return store_below(sessions).read_log(SessionKey("ada", "checkpoints"))


# With a workflow


@dataclass
class Plan:
    """What a person is asked."""

    harbor: str


class Pilot(Executor):
    """Sails once a person has agreed."""

    @handler
    async def plan(self, harbor: str, context: WorkflowContext) -> None:
        context.set_state("log", [f"planned {harbor}"])
        await context.request_info(Plan(harbor), bool)

    @response_handler
    async def decided(
        self,
        plan: Plan,
        agreed: bool,  # as the framework calls it
        context: WorkflowContext[Any, str],
    ) -> None:
        log = context.get_state("log")
        await context.yield_output(f"{log[0]}, {'sailed' if agreed else 'stayed'}: {plan.harbor}")


TYPES = [f"{Plan.__module__}:{Plan.__qualname__}"]


def voyage(storage: Any) -> Any:
    builder = WorkflowBuilder(
        name="voyage", start_executor=Pilot(id="pilot"), checkpoint_storage=storage
    )
    return builder.build()


async def ask_and_die(url: str) -> None:
    async with perdure.connect(url) as sessions:
        storage = PerdureCheckpointStorage("ada", sessions, allowed_checkpoint_types=TYPES)
        result = await voyage(storage).run("Oosthaven")
        assert len(result.get_request_info_events()) == 1
        os.kill(os.getpid(), signal.SIGKILL)


@STORES
async def test_a_workflow_that_waits_for_a_person_outlives_a_kill(
    tmp_path: Path, store: str
) -> None:
    url = url_of(store, tmp_path)
    await asyncio.to_thread(killed, ask_and_die, url)
    given: Any = {"allowed_checkpoint_types": TYPES}
    async with PerdureCheckpointStorage.from_url("ada", url, **given) as storage:
        latest = await storage.get_latest(workflow_name="voyage")
        assert latest is not None
        (request,) = latest.pending_request_info_events.values()
        assert request.data == Plan("Oosthaven")
        responses = {request.request_id: True}
        run = voyage(storage).run(checkpoint_id=latest.checkpoint_id, responses=responses)
        assert (await run).get_outputs() == ["planned Oosthaven, sailed: Oosthaven"]
        done = await storage.get_latest(workflow_name="voyage")
        assert done is not None
        assert not done.pending_request_info_events
        assert done.previous_checkpoint_id is not None


# Refusals


class Secret:
    """A class that nobody has allowed."""


async def test_a_class_that_is_not_allowed_is_refused(sessions: SessionManager) -> None:
    storage = PerdureCheckpointStorage("ada", sessions)
    with pytest.raises(WorkflowCheckpointException, match=r"Secret.*allowed_checkpoint_types"):
        await storage.save(checkpoint("a", secret=Secret()))
    with pytest.raises(WorkflowCheckpointException, match="checkpoint a cannot be stored"):
        await storage.save(checkpoint("a", secret=lambda: None))
    assert await sessions.list() == []
    name = f"{Secret.__module__}:{Secret.__qualname__}"
    free = PerdureCheckpointStorage("ada", sessions, allowed_checkpoint_types=[name])
    await free.save(checkpoint("a", secret=Secret()))
    with pytest.raises(WorkflowCheckpointException, match="Secret"):
        await storage.load("a")
    assert await storage.list_checkpoint_ids(workflow_name="w") == ["a"]


class Planted:
    """What would leave a file behind if anybody unpickled it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


async def test_a_planted_pickle_is_refused_and_not_run(
    sessions: SessionManager, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    encoded = encode_checkpoint_value(checkpoint("a", it=Planted(ran)).to_dict())
    record = CheckpointRecord(SDK, SHAPE, "a", change=msgspec.Raw(msgspec.json.encode([encoded])))
    async with sessions.open("ada", session="checkpoints") as session:
        accept(session, (Entry(FOREIGN, msgspec.json.encode(record)),))
    storage = PerdureCheckpointStorage("ada", sessions)
    for reads in (storage.load("a"), storage.get_latest(workflow_name="w")):
        with pytest.raises(WorkflowCheckpointException, match="mkdir"):
            await reads
    assert not ran.exists()


async def test_an_unknown_id_raises_the_framework_s_own(sessions: SessionManager) -> None:
    storage = PerdureCheckpointStorage("ada", sessions)
    with pytest.raises(WorkflowCheckpointException, match="No checkpoint found with ID a"):
        await storage.load("a")
    assert not await storage.delete("a")
    assert await storage.get_latest(workflow_name="w") is None
    assert await sessions.list() == []


async def test_it_is_beside_its_conversation_and_forgotten_with_it(
    sessions: SessionManager,
) -> None:
    history = PerdureHistoryProvider(sessions)
    storage = PerdureCheckpointStorage("ada", sessions, owner="customer 7", tags=["harbor"])
    await history.save_messages("ada", [said("Hello.")])
    await storage.save(checkpoint("a"))
    (info,) = await sessions.list(owner="customer 7")
    assert (info.key.session, info.tags) == ("checkpoints", ("harbor",))
    misplaced = PerdureCheckpointStorage("ada", sessions, session="default")
    with pytest.raises(SessionError, match="choose another id"):
        await misplaced.save(checkpoint("a"))
    await sessions.forget("ada")
    assert await storage.list_checkpoint_ids(workflow_name="w") == []


async def test_a_storage_that_another_process_holds_is_named(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    async with perdure.connect(url) as mine, perdure.connect(url) as theirs:
        await PerdureCheckpointStorage("ada", mine).save(checkpoint("a"))
        refused = PerdureCheckpointStorage("ada", theirs, on_held="raise")
        with pytest.raises(LeaseHeldError, match=f"process {os.getpid()}"):
            await refused.save(checkpoint("b", "a"))
        await PerdureCheckpointStorage("ada", theirs).save(checkpoint("b", "a"))  # asks for it
        found = await PerdureCheckpointStorage("ada", mine).list_checkpoint_ids(workflow_name="w")
        assert found == ["a", "b"]


async def test_what_is_no_text_is_refused_and_what_is_large_comes_back(
    sessions: SessionManager,
) -> None:
    storage = PerdureCheckpointStorage("ada", sessions)
    with pytest.raises(NotStorableError, match=r"state\.text.*surrogate"):
        await storage.save(checkpoint("a", text="\ud800"))
    assert await storage.list_checkpoint_ids(workflow_name="w") == []
    large = checkpoint("a", text="x" * (17 * 1024 * 1024))
    await storage.save(large)
    assert await PerdureCheckpointStorage("ada", sessions).load("a") == large


async def test_pruning_leaves_checkpoints_alone(sessions: SessionManager) -> None:
    storage = PerdureCheckpointStorage("ada", sessions)
    for at in range(5):
        await storage.save(checkpoint(f"c{at}", at=at, number=at))
    await sessions.prune(Retention(keep_turns=1), id="ada", session="checkpoints")
    again = PerdureCheckpointStorage("ada", sessions)
    assert len(await again.list_checkpoints(workflow_name="w")) == 5
