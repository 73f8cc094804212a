"""Making and restoring agents (S0-24, S0-25, S1-G4, S2-13 to S2-15, S2-31)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure import (
    ConfigError,
    LeaseHeldError,
    Message,
    SessionAlreadyActiveError,
    SessionError,
    SessionManager,
    SessionNotFoundError,
)
from perdure.agent import (
    Agent,
    AgentConfig,
    AgentFactory,
    EchoModel,
    PersistentSession,
    ScriptedModel,
    WorkerEventDispatcher,
)
from perdure.errors import SessionClosedError
from perdure.stores.memory import MemoryStore
from tests.agent.conftest import Configure, World


def texts(agent: Agent) -> list[str]:
    return [one.text for one in agent.session.context()]


async def test_a_restored_agent_goes_on_where_it_was(world: World, configured: Configure) -> None:
    """S0-24: the same id, not started yet, everything back once it is."""
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="ada") as agent:
            await agent.ask("hello")
    async with world.connect() as sessions:
        agent = await AgentFactory(sessions).restore_agent("ada", configured())
        assert agent.id == "ada"
        assert not agent.runtime.is_running
        assert agent.context.state.restore_options is not None
        async with agent:
            await agent.ask("again")
            assert texts(agent) == ["hello", "You said: hello", "again", "You said: again"]


async def test_turn_numbers_go_on_after_a_restore(world: World, configured: Configure) -> None:
    """Defect d."""
    ids: list[str] = []
    for _ in range(3):
        async with world.connect() as sessions:
            factory = AgentFactory(sessions)
            async with await factory.create_agent(configured(), agent_id="ada") as agent:
                async for event in agent.stream("x"):
                    last = event
                ids.append(last.turn_id)  # type: ignore[attr-defined]
                assert agent.memory.turn_tracker.number == len(ids)
    assert ids == ["turn_0001", "turn_0002", "turn_0003"]


async def test_what_waited_in_the_inbox_is_not_restored(
    world: World, configured: Configure
) -> None:
    """S0-3, S0-25: no queue, no running call comes back."""
    reached = anyio.Event()

    class Stuck:
        async def stream(self, messages: Any, tools: Any) -> Any:
            reached.set()
            await anyio.sleep_forever()
            yield

    async with world.connect() as sessions:
        agent = await AgentFactory(sessions).create_agent(configured(model=Stuck()), agent_id="ada")
        await agent.start()
        await agent.post_user_message("in work")
        await agent.post_user_message("waiting")
        await reached.wait()
        left = world.killed()
        await agent.stop(finish=False)
    async with left.connect() as sessions:
        model = EchoModel()
        config = configured(model=model)
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            assert texts(agent) == ["in work"]
        assert model.calls == 0


async def test_a_missing_agent_leaves_no_trace(world: World, configured: Configure) -> None:
    """C13: no ghost records."""
    async with world.connect() as sessions:
        with pytest.raises(SessionNotFoundError, match="nobody"):
            await AgentFactory(sessions).restore_agent("nobody", configured())
        assert await sessions.list() == []


async def test_two_workers_on_one_session_are_refused(
    memory_world: World, configured: Configure
) -> None:
    """S1-G4."""
    async with memory_world.connect() as sessions:
        first = await AgentFactory(sessions).create_agent(configured(), agent_id="ada")
        for make in (
            lambda: AgentFactory(sessions).restore_agent("ada", configured()),
            lambda: AgentFactory(sessions).create_agent(configured(), agent_id="ada"),
        ):
            with pytest.raises(SessionAlreadyActiveError, match="already active on session ada"):
                await make()
        async with first:
            assert await first.ask("mine") == "You said: mine"
        async with await AgentFactory(sessions).restore_agent("ada", configured()) as second:
            assert await second.ask("mine now") == "You said: mine now"


async def test_another_process_is_refused_by_its_lease(world: World, configured: Configure) -> None:
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="ada"):
            async with world.connect() as others:
                config = configured(on_held="raise")
                with pytest.raises(LeaseHeldError):
                    await AgentFactory(others).restore_agent("ada", config)


async def test_an_agent_that_exists_is_resumed_refused_or_replaced(
    world: World, configured: Configure
) -> None:
    """S1-G4: if_exists."""
    async with world.connect() as sessions:
        factory = AgentFactory(sessions)
        async with await factory.create_agent(configured(), agent_id="ada") as agent:
            await agent.ask("first")
        with pytest.raises(SessionError, match="agent 'ada' exists"):
            await factory.create_agent(configured(), agent_id="ada", if_exists="error")
        async with await factory.create_agent(configured(), agent_id="ada") as agent:
            assert texts(agent) == ["first", "You said: first"]
        replaced = await factory.create_agent(configured(), agent_id="ada", if_exists="replace")
        async with replaced:
            assert texts(replaced) == []
            await replaced.ask("anew")
            assert texts(replaced) == ["anew", "You said: anew"]


async def test_a_running_agent_is_not_replaced(memory_world: World, configured: Configure) -> None:
    async with memory_world.connect() as sessions:
        factory = AgentFactory(sessions)
        async with await factory.create_agent(configured(), agent_id="ada") as agent:
            await agent.ask("x")
            with pytest.raises(SessionAlreadyActiveError):
                await factory.create_agent(configured(), agent_id="ada", if_exists="replace")
            assert await agent.ask("still here") == "You said: still here"


async def test_an_unknown_choice_is_refused(memory_world: World, configured: Configure) -> None:
    async with memory_world.connect() as sessions:
        factory = AgentFactory(sessions)
        with pytest.raises(ConfigError, match="if_exists='merge'"):
            await factory.create_agent(
                configured(),
                agent_id="ada",
                if_exists="merge",  # type: ignore[arg-type]
            )
        assert not await sessions.exists("ada")


async def test_an_id_is_made_where_none_is_given(
    memory_world: World, configured: Configure
) -> None:
    async with memory_world.connect() as sessions:
        factory = AgentFactory(sessions)
        first, second = [await factory.create_agent(configured(name="bot")) for _ in range(2)]
        assert first.id.startswith("bot-")
        assert first.id != second.id
        await first.stop()
        await second.stop()


async def test_memory_dir_restores_from_another_folder(
    tmp_path: Path, memory_world: World, configured: Configure
) -> None:
    """S0-24: agents of one folder share its store; it closes with the last of them."""
    elsewhere = World(tmp_path / "memory")
    async with elsewhere.connect() as sessions:
        for name in ("ada", "bob"):
            async with await AgentFactory(sessions).create_agent(
                configured(), agent_id=name
            ) as agent:
                await agent.ask(f"I am {name}")
    async with memory_world.connect() as sessions:
        factory = AgentFactory(sessions)
        folder = tmp_path / "memory"
        ada = await factory.restore_agent("ada", configured(), memory_dir=folder)
        bob = await factory.restore_agent("bob", configured(), memory_dir=str(folder))
        with pytest.raises(SessionAlreadyActiveError):
            await factory.restore_agent("ada", configured(), memory_dir=folder)
        with pytest.raises(SessionNotFoundError):
            await factory.restore_agent("eve", configured(), memory_dir=folder)
        async with ada:
            assert texts(ada) == ["I am ada", "You said: I am ada"]
        async with bob:
            assert await bob.ask("and on") == "You said: and on"
        assert factory._elsewhere == {}
        assert await sessions.list() == []
    async with elsewhere.connect() as sessions:
        view = await sessions.load("bob")
        assert view is not None
        assert view.context()[-1].text == "You said: and on"


# Agent.create


async def test_an_agent_of_its_own_keeps_no_files(tmp_path: Path) -> None:
    """S2-5, S0-20: not persistent by default, and saving is nothing to worry about."""
    async with Agent.create("ada", model=EchoModel()) as agent:
        assert await agent.ask("x") == "You said: x"
        await agent.save_persisted_session()
        await agent.memory.persist_working_context_snapshot()
    assert list(tmp_path.iterdir()) == []


async def test_persistent_session_true_is_kept_in_the_default_store(untouched_home: Path) -> None:
    """S2-14."""
    for expected in ([], ["x", "You said: x"]):
        async with Agent.create("shorthand", model=EchoModel(), persistent_session=True) as agent:
            assert texts(agent) == expected
            if not expected:
                await agent.ask("x")
    assert any(untouched_home.rglob("*shorthand*"))
    async with Agent.create(
        "shorthand", model=EchoModel(), persistent_session=True, if_exists="replace"
    ) as agent:
        assert texts(agent) == []


async def test_persistent_session_says_where(tmp_path: Path) -> None:
    kept = PersistentSession(storage=tmp_path / "here", autosave_interval=0)
    for expected in ([], ["x", "You said: x"]):
        async with Agent.create("ada", model=EchoModel(), persistent_session=kept) as agent:
            assert texts(agent) == expected
            if not expected:
                await agent.ask("x")


async def test_sessions_that_are_given_are_used(memory_world: World) -> None:
    async with memory_world.connect() as sessions:
        agent = await Agent.create("ada", model=EchoModel(), sessions=sessions)
        async with agent:
            await agent.ask("x")
        assert await sessions.exists("ada")
        async with Agent.create(
            "bob", model=EchoModel(), sessions=sessions, persistent_session=False
        ) as agent:
            await agent.ask("x")
        assert not await sessions.exists("bob")


async def test_the_stored_conversation_is_loaded_when_asked_for(world: World) -> None:
    """S2-15: manual control."""
    kept = PersistentSession(load_on_create=False, autosave_interval=0)
    async with world.connect() as sessions:
        async with Agent.create("ada", model=EchoModel(), sessions=sessions) as agent:
            assert await agent.load_persisted_session() is False
            await agent.ask("before")
    async with world.connect() as sessions:
        async with Agent.create(
            "ada", model=EchoModel(), sessions=sessions, persistent_session=kept
        ) as agent:
            assert await agent.load_persisted_session() is True
            await agent.ask("after")
            assert texts(agent) == ["before", "You said: before", "after", "You said: after"]


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["of the manager's", "of its own"])
async def test_closing_saves_what_came_after_the_last_turn_if_it_is_to(
    world: World, tmp_path: Path, save: bool, own: bool
) -> None:
    """S2-13: saveOnDestroy. What the turn has saved stays in either case."""
    kept = PersistentSession(
        storage=tmp_path / "own" if own else None, autosave_interval=0, save_on_close=save
    )

    async def run(sessions: SessionManager | None, *, first: bool) -> None:
        async with Agent.create(
            "ada", model=EchoModel(), sessions=sessions, persistent_session=kept
        ) as agent:
            if first:
                await agent.ask("hello")
                agent.working_memory.set("k", 1)
                agent.context.state.custom_data["c"] = 1
                return
            assert texts(agent) == ["hello", "You said: hello"]
            assert await agent.working_memory.get("k") == (1 if save else None)
            assert agent.context.state.custom_data == ({"c": 1} if save else {})

    async with world.connect() as sessions:
        for first in (True, False):
            await run(None if own else sessions, first=first)
    async with world.connect() as sessions:
        await run(None if own else sessions, first=False)


async def test_what_others_of_a_session_wrote_is_saved_without_save_on_close(world: World) -> None:
    kept = PersistentSession(autosave_interval=0, save_on_close=False)
    async with world.connect() as sessions, sessions.open("ada") as other:
        async with Agent.create(
            "ada", model=EchoModel(), sessions=sessions, persistent_session=kept
        ) as agent:
            await agent.ask("hello")
            agent.working_memory.set("k", 1)
        assert await other.memory.get("k") == 1  # it is open still
    async with world.connect() as sessions, sessions.open("ada") as session:
        assert await session.memory.get("k") == 1


async def test_a_conversation_that_is_not_loaded_is_set_aside_not_lost(world: World) -> None:
    kept = PersistentSession(load_on_create=False)
    async with world.connect() as sessions:
        async with Agent.create("ada", model=EchoModel(), sessions=sessions) as agent:
            await agent.ask("before")
        async with Agent.create(
            "ada", model=EchoModel(), sessions=sessions, persistent_session=kept
        ) as agent:
            await agent.ask("anew")
            assert texts(agent) == ["anew", "You said: anew"]
            with pytest.raises(SessionError, match="before the first message"):
                await agent.load_persisted_session()
            said = [item.value.text for item in await agent.session.history()]
            assert said == ["before", "You said: before", "anew", "You said: anew"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "model is missing"),
        ({"model": EchoModel(), "colour": 1}, "'colour' is no option"),
        ({"model": object()}, "is no model"),
        ({"model": EchoModel(), "inbox_size": 0}, "inbox_size=0"),
        ({"model": EchoModel(), "approve": "always"}, "approve='always'"),
        ({"model": EchoModel(), "tool_timeout": 0.0}, "tool_timeout=0.0"),
        ({"model": EchoModel(), "config": AgentConfig(name="x", model=EchoModel())}, "not both"),
    ],
)
async def test_what_does_not_fit_is_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Agent.create("ada", **options)


async def test_two_places_for_one_agent_are_refused(memory_world: World) -> None:
    async with memory_world.connect() as sessions:
        with pytest.raises(ConfigError, match="two places"):
            await Agent.create(
                "ada",
                model=EchoModel(),
                sessions=sessions,
                persistent_session=PersistentSession(storage=MemoryStore()),
            )


async def test_what_an_agent_opened_itself_is_closed_if_making_it_fails(tmp_path: Path) -> None:
    async def fine() -> int:
        return 1

    kept = PersistentSession(storage=tmp_path / "here")
    with pytest.raises(ConfigError, match="two tools"):
        await Agent.create("ada", model=EchoModel(), tools=[fine, fine], persistent_session=kept)
    # The session was given back: it is to be had at once.
    async with Agent.create(
        "ada", model=EchoModel(), persistent_session=kept, on_held="raise"
    ) as agent:
        assert await agent.ask("x") == "You said: x"


async def test_a_class_of_ones_own_that_fails_leaves_nothing_claimed(memory_world: World) -> None:
    class Broken(Agent):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            raise KeyError("broken")

    async with memory_world.connect() as sessions:
        with pytest.raises(KeyError):
            await Broken.create("ada", model=EchoModel(), sessions=sessions)
        async with Agent.create("ada", model=EchoModel(), sessions=sessions) as agent:
            assert await agent.ask("x") == "You said: x"


async def test_agents_of_one_store_talk_at_the_same_time(world: World) -> None:
    async with world.connect() as sessions:

        async def one(number: int) -> None:
            model = ScriptedModel(lambda messages: f"{number}: {len(messages)}")
            async with Agent.create(f"agent-{number}", model=model, sessions=sessions) as agent:
                for turn in range(3):
                    assert await agent.ask("x") == f"{number}: {2 * turn + 1}"

        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(one, number)
        assert len(await sessions.list()) == 10


def test_a_config_keeps_what_it_was_given() -> None:
    config = AgentConfig(name="x", model=EchoModel(), instructions="y")
    assert (config.name, config.instructions, config.compaction.keep_turns) == ("x", "y", 4)
    assert Message.system(config.instructions).text == "y"


async def test_what_is_appended_before_the_first_message_stays(
    memory_world: World, configured: Configure
) -> None:
    async with memory_world.connect() as sessions:
        factory = AgentFactory(sessions)
        config = configured(instructions="Be kind.")
        async with await factory.create_agent(config, agent_id="ada") as agent:
            agent.session.append(Message.user("The harbor is closed."))
            await agent.ask("hello")
            assert texts(agent) == [
                "Be kind.",
                "The harbor is closed.",
                "hello",
                "You said: hello",
            ]
            tail = [one.text for one in await agent.memory.get_raw_tail(9)]
            assert tail == ["The harbor is closed.", "hello", "You said: hello"]


async def test_an_event_goes_to_the_handler_of_its_type_or_is_refused(
    world: World, configured: Configure
) -> None:
    """S1-5: an event that nobody handles is never dropped."""
    handled: list[Any] = []

    class Note:
        async def handle(self, event: Any, context: Any) -> None:
            handled.append((event, context))

    dispatcher = WorkerEventDispatcher({str: Note()})
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="a") as agent:
            await dispatcher.dispatch("text", agent.context)
            with pytest.raises(SessionError, match="nothing handles a int"):
                await dispatcher.dispatch(5, agent.context)
            assert handled == [("text", agent.context)]


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_class_of_ones_own_gets_ready_before_the_first_message(
    memory_world: World, kind: str
) -> None:
    order: list[str] = []

    class Plain(Agent):
        def setup(self) -> None:  # type: ignore[override]
            order.append("setup")

    class Async(Agent):
        async def setup(self) -> None:
            await anyio.sleep(0)
            order.append("setup")

    def answer(_messages: Any) -> str:
        order.append("model")
        return "yes"

    made = Plain if kind == "plain" else Async
    async with memory_world.connect() as sessions:
        async with made.create("ada", model=ScriptedModel(answer), sessions=sessions) as agent:
            assert await agent.ask("ready?") == "yes"
    assert order == ["setup", "model"]


async def test_an_agent_that_has_stopped_resumes_nothing(memory_world: World) -> None:
    async with memory_world.connect() as sessions:
        agent = await Agent.create("ada", model=EchoModel(), sessions=sessions)
        async with agent:
            await agent.ask("x")
        with pytest.raises(SessionClosedError, match="does not run"):
            await agent.resume()
