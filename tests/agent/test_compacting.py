"""Compactions within their budget, one after the other (S1-11, S1-14 to S1-17)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import anyio
import pytest

from perdure import Limits, Message, Shutdown, StoreUnavailableError, ToolCall, connect
from perdure.agent import (
    AgentConfig,
    AgentFactory,
    CompactionPolicy,
    EchoModel,
    MemoryManager,
    ScriptedModel,
    WorkingContextSnapshotBootstrapOptions,
    call,
)
from perdure.agent.llm.model import Chunk, Usage
from perdure.memory.compaction import Compactor, EpisodicItem, Fact, Summary, TurnTrace, item_entry
from perdure.providers.tool_pairs import paired
from perdure.restore.rebuild import is_memory
from perdure.session.internals import working_context
from perdure.session.session import Session
from perdure.stores.memory import MemoryStore
from perdure.testing.faulty import FaultyStore
from tests.agent.conftest import Configure, World
from tests.forged import forge

PLANTED = {
    "critical_issue": "The bilge pump of the Sula is broken.",
    "unresolved_work": "Remind me to renew the berth by May.",
    "user_preference": "I prefer answers in knots.",
    "durable_fact": "My boat is called Sula.",
    "important_artifact": "The charts are at https://example.org/charts now.",
}


def words(message: Message) -> int:
    """Count tokens as some model would."""
    result = message.tool_result
    said = [message.text, *(str(one.arguments) for one in message.tool_calls)]
    return sum(map(len, said)) // 5 + (0 if result is None else len(str(result.result)) // 5) + 4


def check_pairs(messages: Sequence[Message]) -> None:
    """Refuse what a provider would: a call without its result right behind it, or the reverse."""
    assert paired(messages).messages == tuple(messages)
    for before, message in itertools.pairwise(messages):
        if message.role == "tool":
            assert before.role == "tool" or before.tool_calls


class Harbor:
    """A model that calls tools in every other turn, and checks what it is asked with."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.most = 0

    def __call__(self, messages: Sequence[Message]) -> Any:
        tokens = sum(map(words, messages))
        assert tokens <= self.budget, f"{tokens} tokens for a budget of {self.budget}"
        self.most = max(self.most, tokens)
        check_pairs(messages)
        last = messages[-1]
        if last.role == "tool":
            return "The tide is as the gauges say. " * 8
        number = int(last.text.split()[-1].rstrip("."))
        if number % 2:
            return [call("gauge", hour=number % 24), call("gauge", hour=(number + 1) % 24)]
        return "The wind is from the west. " * 24


async def gauge(hour: int) -> str:
    """Read the gauge."""
    return f"At {hour} it is {hour % 5} m. " * 6


@pytest.mark.deep
async def test_two_hundred_compactions_keep_what_matters_and_their_budget(
    memory_world: World, anyio_backend: str
) -> None:
    """S1-11, S1-14, S1-15, S1-16: and the log has every message still."""
    model = Harbor(budget=460)
    policy = CompactionPolicy(max_tokens=460, count_tokens=words, keep_turns=1)
    config = AgentConfig(
        name="tester",
        model=ScriptedModel(model),
        tools=[gauge],
        instructions="Be kind.",
        compaction=policy,
    )
    said: list[str] = []
    count = 200 if anyio_backend == "asyncio" else 40
    async with memory_world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            first = " ".join(PLANTED.values()) + " This is number 0."
            said += [first, await agent.ask(first)]
            for number in itertools.count(1):
                if working_context(agent.session).epoch_id >= count:
                    break
                question = f"How is it now? This is number {number}."
                said += [question, await agent.ask(question)]
            retriever = agent.memory.retriever
            for category, fact in PLANTED.items():
                found, *_ = await retriever.search(fact, kind="semantic")
                assert (found.text, found.item.category) == (fact, category)  # type: ignore[union-attr]
            episodes = await retriever.episodic()
            history = await agent.session.history(limit=10_000)
    spoken = [one.value for one in history if one.value.role in {"user", "assistant"}]
    assert [one.text for one in spoken if one.text] == said
    assert sum(one.value.role == "tool" for one in history) == number // 2 * 2
    check_pairs([one.value for one in history])
    seqs = [one.as_of_seq for one in episodes]
    assert seqs == sorted(set(seqs))
    assert model.most > 350


@pytest.mark.parametrize(
    ("times", "asks", "keep_turns"),
    [(6, 1, 4), (6, 1, 0), (40, 1, 4), (20, 18, 4)],
    ids=["even legs", "no turn is kept", "a large leg behind small ones", "a long question"],
)
async def test_a_turn_that_is_larger_than_the_budget_is_compacted_within(
    world: World, configured: Configure, times: int, asks: int, keep_turns: int
) -> None:
    """S1-16: the running turn stays raw where it fits; else its newest leg, its question, and as
    much between them as fits."""

    async def gauge(hour: int) -> str:
        """Read the gauge."""
        return f"At {hour} it is {hour % 5} m. " * (times if hour % 7 == 6 else 6)

    seen: list[Sequence[Message]] = []
    question = "Read the gauge until it is low. " * asks

    def answer(messages: Sequence[Message]) -> Any:
        seen.append(messages)
        assert sum(map(words, messages)) <= 400
        check_pairs(messages)
        return call("gauge", hour=len(seen)) if len(seen) < 20 else "Done."

    config = configured(
        model=ScriptedModel(answer),
        tools=[gauge],
        instructions="Be kind.",
        compaction=CompactionPolicy(max_tokens=400, count_tokens=words, keep_turns=keep_turns),
    )
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            assert await agent.ask(question) == "Done."
            for messages in seen:
                asked = [one.text for one in messages if one.role == "user" and not is_memory(one)]
                assert asked == [question]
            if times == 6:
                legs = [sum(one.role == "tool" for one in messages) for messages in seen[2:]]
                assert min(legs) > 1
            assert working_context(agent.session).epoch_id > 1
            assert await agent.ask("Thanks for that.") == "Done."
            history = await agent.session.history(limit=1000)
            assert sum(one.value.role == "tool" for one in history) == 19
            episodes = await agent.memory.retriever.episodic()
            assert {id for one in episodes for id in one.turn_ids} <= {"turn_0001", "turn_0002"}
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            check_pairs(agent.session.context())


async def test_what_the_model_reads_beside_the_messages_counts(
    memory_world: World, configured: Configure
) -> None:
    """S1-11: tools, for one; they are seen only in what the model reports."""

    class Reports:
        def __init__(self) -> None:
            self.read: list[int] = []

        async def stream(self, messages: Sequence[Message], tools: object) -> Any:
            self.read.append(300 + sum(map(words, messages)))
            yield Chunk(text="It is calm today. " * 10, usage=Usage(input_tokens=self.read[-1]))

    model = Reports()
    policy = CompactionPolicy(max_tokens=900, count_tokens=words, keep_turns=9)
    config = configured(model=model, compaction=policy)
    async with memory_world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            for number in range(60):
                await agent.ask(f"This is number {number}.")
            assert working_context(agent.session).epoch_id >= 3
    assert 700 < max(model.read) <= 900


async def test_the_tools_count_before_the_model_has_said_what_they_take(
    memory_world: World, configured: Configure
) -> None:
    """S1-11: so the first request after a restore keeps the budget, too."""
    asked: list[int] = []

    async def verbose(hour: int) -> str:
        return ""

    verbose.__doc__ = "Read the gauge. " * 60  # 200 tokens

    def answer(messages: Sequence[Message]) -> str:
        asked.append(sum(map(words, messages)))
        return "It is calm today. " * 10

    config = configured(
        model=ScriptedModel(answer),
        tools=[verbose],
        compaction=CompactionPolicy(max_tokens=600, count_tokens=words),
    )
    async with memory_world.connect() as sessions:
        for number in range(12):
            async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
                await agent.ask(f"This is number {number}.")
        assert working_context(agent.session).epoch_id >= 1
    assert 200 < max(asked) <= 400


async def test_a_budget_is_kept_where_nothing_that_is_said_is_stored(
    memory_world: World, configured: Configure
) -> None:
    from perdure.agent import Features

    def answer(messages: Sequence[Message]) -> str:
        assert sum(map(words, messages)) <= 300
        assert messages[0].role == "system"
        return "It is calm today. " * 10

    config = configured(
        model=ScriptedModel(answer),
        instructions="Be kind.",
        compaction=CompactionPolicy(max_tokens=300, count_tokens=words),
        features=Features(history=False),
    )
    async with memory_world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            for number in range(20):
                await agent.ask(f"This is number {number}.")
            assert agent.session.context()[-2].text == "This is number 19."
            assert await agent.session.history() == []


class Plain:
    """A summarizer that says how much it was shown, and one fact."""

    async def summarize(self, turns: Sequence[TurnTrace]) -> Summary:
        return Summary(f"{sum(len(one.messages) for one in turns)} messages", (Fact("It rained."),))


def managed(session: Session) -> MemoryManager:
    policy = CompactionPolicy(keep_turns=1, episode_turns=2)
    return MemoryManager(
        session, compactor=Compactor(Plain()), compaction_policy=policy, clock=lambda: 1000.0
    )


async def test_next_to_a_long_message_earlier_turns_leave_and_their_summaries_stay(
    memory_world: World, configured: Configure
) -> None:
    seen: list[Sequence[Message]] = []

    def answer(messages: Sequence[Message]) -> str:
        seen.append(messages)
        return "It is so. " * 4

    policy = CompactionPolicy(
        max_tokens=400, count_tokens=words, keep_turns=9, episode_turns=1, max_summaries=9
    )
    config = configured(model=ScriptedModel(answer), compaction=policy)
    async with memory_world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            for number in range(9):
                await agent.ask(f"My boat is number {number}.")
            await agent.ask("at length " * 120)
    assert sum(map(words, seen[-1])) <= 400
    assert any(map(is_memory, seen[-1]))
    known = "\n".join(one.text for one in seen[-1])
    assert [number for number in range(9) if f"My boat is number {number}." not in known] == []


async def talk(session: Session, turns: int) -> None:
    for number in range(turns):
        async with session.turn():
            session.append(Message.user(f"q{number}"))
            session.append(Message.assistant(tool_calls=[ToolCall("c", "look")]))
            session.append(Message.tool("c", number))
            session.append(Message.assistant(f"a{number}"))


async def test_a_compaction_done_twice_is_done_once(world: World) -> None:
    """S1-14: what is in memory is not summed up again, and a fact that is known not added."""
    async with world.connect() as sessions, sessions.open("ada") as session:
        await talk(session, 6)
        memory = managed(session)
        first = await memory.compact("Be kind.")
        assert [one.turn_ids for one in first.episodic] == [
            ("turn_0001", "turn_0002"),
            ("turn_0003", "turn_0004"),
            ("turn_0005",),
        ]
        assert [one.fact for one in first.semantic] == ["It rained."]
        version, context = session.version, session.context()
        again = await managed(session).compact("Be kind.")
        assert (again.episodic, again.semantic) == ((), ())
        assert (session.version, session.context()) == (version, context)


async def test_a_session_in_which_nothing_was_said_is_compacted_to_its_prompt(
    memory_world: World,
) -> None:
    async with memory_world.connect() as sessions, sessions.open("ada") as session:
        done = await managed(session).compact("Be kind.")
        assert (done.episodic, done.semantic) == ((), ())
        assert [one.text for one in session.context()] == ["Be kind."]


async def test_a_long_prompt_leaves_less_room_for_what_was_said(memory_world: World) -> None:
    policy = CompactionPolicy(max_tokens=400, count_tokens=words, keep_turns=9, episode_turns=2)
    kept: list[int] = []
    async with memory_world.connect() as sessions, sessions.open("ada") as session:
        await talk(session, 12)
        for prompt in ("Be kind.", "Be kind. " * 100):
            memory = MemoryManager(session, compactor=Compactor(Plain()), compaction_policy=policy)
            await memory.compact(prompt)
            assert sum(map(words, session.context())) <= 400
            kept.append(sum(one.text.startswith("q") for one in session.context()))
    assert kept[0] > kept[1]


async def test_a_manager_by_hand_gives_as_many_memories_as_it_is_told(
    memory_world: World,
) -> None:
    policy = CompactionPolicy(keep_turns=1, episode_turns=1)
    options = WorkingContextSnapshotBootstrapOptions(max_episodic=2)
    async with memory_world.connect() as sessions, sessions.open("ada") as session:
        await talk(session, 8)
        memory = MemoryManager(
            session, compactor=Compactor(Plain()), compaction_policy=policy, options=options
        )
        await memory.compact("Be kind.")
        (memories,) = (one for one in session.context() if is_memory(one))
        assert memories.text.count("4 messages") == 2


async def test_counters_go_on_after_a_restore_and_do_not_move_for_one(world: World) -> None:
    """Defects c and d of seed 1's project; S1-14."""
    async with world.connect() as sessions, sessions.open("ada") as session:
        await talk(session, 3)
        await managed(session).compact("Be kind.")
        seq = session.version
    async with world.connect() as sessions, sessions.open("ada") as session:
        context = working_context(session)
        assert (context.epoch_id, context.last_compaction_ts) == (1, 1000.0)
        memory = managed(session)
        assert memory.turn_tracker.number == 3
        assert session.version >= seq
        await talk(session, 2)
        await memory.compact("Be kind.")
        assert working_context(session).epoch_id == 2
        turns = [id for one in await memory.retriever.episodic() for id in one.turn_ids]
        assert turns == ["turn_0001", "turn_0002", "turn_0003", "turn_0004"]


async def test_what_is_pruned_from_the_context_can_be_read_as_traces(world: World) -> None:
    """S1-15; defects d and e: every trace has an id of its own, before and after a restore."""
    async with world.connect() as sessions, sessions.open("ada") as session:
        await talk(session, 3)
        await managed(session).compact("Be kind.")
    async with world.connect() as sessions, sessions.open("ada") as session:
        await talk(session, 1)
        traces = [one async for one in managed(session).raw_traces()]
    assert [one.trace_type for one in traces[:5]] == [
        "user",
        "tool_call",
        "tool_result",
        "tool_continuation",
        "assistant",
    ]
    assert {one.turn_id for one in traces} == {f"turn_000{number}" for number in range(1, 5)}
    assert len({one.id for one in traces}) == len(traces) == 20
    assert [one.seq for one in traces] == sorted(one.seq for one in traces)
    assert (traces[2].tool_name, traces[2].tool_call_id, traces[2].tool_result) == (None, "c", 0)


async def test_a_small_answer_to_a_large_budget_is_left_alone(memory_world: World) -> None:
    """S1-11: nothing is compacted that fits, and nobody asks the summarizer."""
    config = AgentConfig(name="tester", model=EchoModel(), summarizer=Plain())
    async with memory_world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            for number in range(8):
                await agent.ask(str(number))
            assert len(agent.session.context()) == 16
            assert await agent.memory.retriever.episodic() == []


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"count_tokens": 4}])
def test_a_budget_that_does_not_fit_is_named(bad: dict[str, Any]) -> None:
    from perdure import ConfigError

    with pytest.raises(ConfigError, match=next(iter(bad))):
        CompactionPolicy(**bad)


async def test_a_compaction_that_is_cancelled_has_not_happened(world: World) -> None:
    """S1-17: whoever interrupts the turn loses nothing."""

    class Waits:
        def __init__(self) -> None:
            self.asked = anyio.Event()

        async def summarize(self, turns: Sequence[TurnTrace]) -> Summary:
            self.asked.set()
            await anyio.sleep_forever()
            raise AssertionError

    async with world.connect() as sessions, sessions.open("ada") as session:
        await talk(session, 5)
        waits, memory = Waits(), managed(session)
        memory.compactor = Compactor(waits)
        memory.request_compaction()
        version, context = session.version, session.context()
        async with anyio.create_task_group() as group:
            group.start_soon(memory.compact, "Be kind.")
            await waits.asked.wait()
            group.cancel_scope.cancel()
        assert (session.version, session.context()) == (version, context)
        assert memory.compaction_required
        assert (await managed(session).compact("Be kind.")).episodic


async def remembered(session: Session) -> list[Any]:
    memory = managed(session).retriever
    return [*await memory.episodic(), *await memory.semantic(), *session.context()]


async def compacted(world: World, nth: int) -> tuple[list[Any], FaultyStore]:
    """Compact over a store of which one read fails, again until it is done."""
    store = FaultyStore(MemoryStore(backing=world.content), fail_on="read_log", nth=nth)  # type: ignore[arg-type]
    options = {"shutdown": Shutdown(signals=False), "autosave": None}
    async with connect(store, **options) as sessions, sessions.open("ada") as session:  # type: ignore[arg-type]
        for _ in range(2):
            with contextlib.suppress(StoreUnavailableError):
                await managed(session).compact("Be kind.")
        found = await remembered(session)
    return found, store


async def test_a_read_that_fails_is_an_error_and_the_next_try_does_it(memory_world: World) -> None:
    """S1-17."""
    async with memory_world.connect() as sessions, sessions.open("ada") as session:
        await talk(session, 5)
    wanted, store = await compacted(memory_world.killed(), 10**9)
    assert len(wanted) > 6
    failed = 0
    for nth in range(2, store.calls["read_log"] + 1):  # the first is that of the open
        found, faulty = await compacted(memory_world.killed(), nth)
        assert found == wanted
        failed += faulty.injected
    assert failed >= 2


class Meanwhile:
    """A summarizer during whose work something else happens, the first time."""

    def __init__(self, happens: Callable[[], Awaitable[object]]) -> None:
        self._happens: Callable[[], Awaitable[object]] | None = happens
        self.shown: list[str] = []

    async def summarize(self, turns: Sequence[TurnTrace]) -> Summary:
        self.shown = [one.id for one in turns]
        if self._happens is not None:
            happens, self._happens = self._happens, None
            await happens()
        return Summary("They talked.")


async def test_what_is_said_while_a_summary_is_made_stays_in_the_context(world: World) -> None:
    """S1-14: a summary by a model takes a while; somebody else may append meanwhile."""
    async with world.connect() as sessions, sessions.open("ada") as session:
        await talk(session, 5)

        async def happens() -> None:
            session.append(Message.user("And by the way, the pump leaks."))

        memory = managed(session)
        memory.compactor = Compactor(Meanwhile(happens))
        assert (await memory.compact("Be kind.")).episodic
        assert [one.text for one in session.context()].count("And by the way, the pump leaks.") == 1
        context = session.context()
    async with world.connect() as sessions, sessions.open("ada") as session:
        assert session.context() == context
        assert (await managed(session).compact("Be kind.")).turn_ids == ("turn_0005",)


async def test_what_is_taken_back_while_a_summary_is_made_is_not_summed_up(world: World) -> None:
    """S1-14: neither the summary nor the context has it."""
    async with world.connect() as sessions, sessions.open("ada") as session:
        await talk(session, 3)
        kept = session.version
        await talk(session, 2)
        memory = managed(session)
        meanwhile = Meanwhile(lambda: session.retract(after=kept))
        memory.compactor = Compactor(meanwhile)
        done = await memory.compact("Be kind.")
        assert done.turn_ids == ("turn_0001", "turn_0002")
        assert meanwhile.shown == ["turn_0001", "turn_0002"]
        said = [one.text for one in session.context() if one.role == "user"]
        assert said[1:] == ["q2"]


@pytest.mark.parametrize("questions", [1, 3])
async def test_a_long_session_is_summed_up_in_few_summaries(
    memory_world: World, questions: int
) -> None:
    """S1-14: a session that an agent never saw is as cheap to take over as it is long to tell."""
    sizes: list[int] = []

    class Sizes:
        async def summarize(self, turns: Sequence[TurnTrace]) -> Summary:
            sizes.append(len({one.id for one in turns}))
            return Summary("They talked.")

    policy = CompactionPolicy(keep_turns=1, episode_turns=2, max_summaries=3)
    async with memory_world.connect() as sessions, sessions.open("ada") as session:
        for _ in range(41):
            async with session.turn():
                for _ in range(questions):
                    session.append(Message.user("q"), Message.assistant("a"))
        memory = MemoryManager(session, compactor=Compactor(Sizes()), compaction_policy=policy)
        done = await memory.compact("")
    assert len(done.turn_ids) == 40
    assert len(sizes) == len(done.episodic) == 3
    assert questions > 1 or sizes == [14, 14, 12]


async def test_what_a_session_keeps_less_of_than_the_budget_is_compacted_and_not_dropped(
    memory_world: World, configured: Configure
) -> None:
    """S1-11: ``Limits.context_bytes`` cuts a context; an agent sums up before that."""
    config = configured(
        model=ScriptedModel(lambda _: "It is calm today. " * 40), instructions="Be kind."
    )
    async with memory_world.connect(limits=Limits(context_bytes=4_000)) as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.ask("My boat is called Sula.")
            for number in range(20):
                await agent.ask(f"This is number {number}.")
                told = [one.text for one in agent.session.context() if one.role != "assistant"]
                assert any("My boat is called Sula." in text for text in told)
            assert working_context(agent.session).size <= 4_000
            assert working_context(agent.session).epoch_id < 15


async def test_an_episode_of_another_log_hides_nothing_that_was_said(world: World) -> None:
    """S1-15: it says that more is summed up than there is, as one that was copied by hand may."""
    foreign = EpisodicItem(id="ep_x", ts=1.0, summary="They sailed.", as_of_seq=10**9)
    async with world.connect():
        await forge(world.store, "ada", item_entry(foreign))
    async with world.connect() as sessions, sessions.open("ada") as session:
        await talk(session, 3)
        assert (await managed(session).compact("Be kind.")).turn_ids == ("turn_0001", "turn_0002")
        told = [one.text for one in session.context() if one.role == "user"]
        assert "They sailed." in told[0]
        assert told[1:] == ["q2"]


class Silent:
    """A model that does not say how many tokens it has read."""

    async def stream(self, messages: Sequence[Any], tools: Sequence[Any]) -> AsyncIterator[Chunk]:
        """Answer."""
        yield Chunk(text="y" * 4_000)


async def test_the_answer_of_a_model_that_reports_no_usage_is_counted(
    memory_world: World, configured: Configure
) -> None:
    """S1-11: over the budget after an answer, the flag is set, and nothing else happens."""
    config = configured(model=Silent(), compaction=CompactionPolicy(max_tokens=3_000))
    async with memory_world.agent(config) as agent:
        required = []
        for _ in range(3):
            await agent.ask("x")
            required.append(agent.memory.compaction_required)
        assert required == [False, False, True]
        assert len(agent.session.context()) == 6
        await agent.ask("x")
        assert len(agent.session.context()) < 8
