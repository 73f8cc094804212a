"""The effect ledger: intent before a call, its outcome after, and what a crash leaves unknown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar, get_args

import anyio
import pytest
from hypothesis import given, strategies as st

from perdure import ConfigError, Message, SessionError, ToolCall
from perdure.agent import (
    Agent,
    AgentFactory,
    EffectUnknown,
    EventStream,
    OpenMatters,
    PersistentSession,
    ScriptedModel,
    ToolFinished,
    TurnEnded,
    TurnInterrupted,
    call,
    open_matters,
    tool,
)
from perdure.agent.effects import SKIPPED, is_unknown, progress, verdict
from perdure.agent.tools import Tool
from perdure.memory.ledger import Approval, Effect, Policy
from perdure.providers.tool_pairs import INTERRUPTED, interrupted_result
from perdure.records.records import EFFECT, EVENT
from tests.agent.conftest import Configure, World

E = TypeVar("E")

# the decision


def effects() -> st.SearchStrategy[Effect]:
    decided = st.sampled_from(["replay", "skip", "done"])
    plain = st.builds(
        Effect,
        id=st.just("k"),
        turn=st.just("t"),
        call=st.just("c"),
        tool=st.just("mail"),
        policy=st.sampled_from(get_args(Policy)),
        at=st.just(0.0),
        state=st.sampled_from(["planned", "begun", "unknown"]),
        decision=st.none(),
    )
    return plain | decided.map(
        lambda one: Effect(
            id="k",
            turn="t",
            call="c",
            tool="mail",
            policy="ask",
            at=0.0,
            state="decided",
            decision=one,
        )
    )


def approvals() -> st.SearchStrategy[Approval | None]:
    answers = st.sampled_from([None, "approved", "denied"])
    return st.none() | st.builds(
        Approval,
        id=st.just("a"),
        turn=st.just("t"),
        call=st.just("c"),
        tool=st.just("mail"),
        at=st.just(0.0),
        answer=answers,
        why=st.none(),
    )


@given(effects(), approvals(), st.booleans())
def test_what_may_have_begun_is_called_again_only_if_somebody_said_so(
    effect: Effect, approval: Approval | None, can_run: bool
) -> None:
    what = verdict(effect, approval, can_run=can_run)
    wished = effect.decision == "replay" or (effect.decision is None and effect.policy == "replay")
    assert what != "again" or wished
    if is_unknown(effect):
        assert what != "run"
        assert what == {"replay": "again", "skip": "skip", "ask": "ask"}[effect.policy] or (
            what == "ask" and not can_run
        )
    if not can_run:
        assert what not in {"run", "again"}
    if effect.decision is not None and not (effect.decision == "replay" and not can_run):
        assert what == {"replay": "again"}.get(effect.decision, effect.decision)


@given(approvals(), st.booleans())
def test_a_call_without_a_declared_effect_is_never_repeated(
    approval: Approval | None, can_run: bool
) -> None:
    """What is still to be approved has not begun; of all else nobody knows."""
    never_began = approval is not None and can_run
    assert verdict(None, approval, can_run=can_run) == ("run" if never_began else "interrupted")


CALLS = (ToolCall("c1", "look", {}), ToolCall("c2", "mail", {}))


def said() -> st.SearchStrategy[list[Message]]:
    """A turn that was cut off anywhere: asked, called, answered by tools, answered."""
    whole = [
        Message.user("go"),
        Message.assistant(tool_calls=CALLS),
        Message.tool("c2", "sent", name="mail"),
        Message.tool("c1", "found", name="look"),
        Message.assistant("done"),
    ]
    return st.integers(0, len(whole)).map(lambda upto: whole[:upto])


@given(said(), st.booleans())
def test_a_turn_goes_on_where_it_was_cut_off(messages: list[Message], repaired: bool) -> None:
    """What a restore has made up for a missing result is no result."""
    done = progress([*messages, *(map(interrupted_result, CALLS) if repaired else ())])
    assert done.has_input == bool(messages)
    results = {one.tool_result.call_id for one in messages if one.tool_result}
    asked = any(one.tool_calls for one in messages)
    ended = len(messages) == 5
    left = [one.id for one in CALLS if one.id not in results] if asked and not ended else []
    assert [one.id for one in done.open_calls] == left
    if ended and not repaired:
        assert done.answer == messages[-1]


async def until(events: EventStream, kind: type[E]) -> E:
    """Return the next event of a kind."""
    async for event in events:
        if isinstance(event, kind):
            return event
    raise AssertionError(f"no {kind.__name__} came")


# a tool


def test_a_tool_that_takes_a_key_may_be_replayed() -> None:
    def mail(to: str, idempotency_key: str) -> None:
        """Send a mail."""

    assert Tool(mail).effect == "replay"
    assert list(Tool(mail).parameters["properties"]) == ["to"]
    assert Tool(mail, effect="ask").effect == "ask"
    assert Tool(lambda to: None, name="plain").effect is None


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="effect='again'"):
        Tool(lambda: None, name="x", effect="again")  # type: ignore[arg-type]


class Mail:
    """A tool that sends, and may get stuck before or after."""

    def __init__(self) -> None:
        self.sent: list[str | None] = []
        self.reached = anyio.Event()
        self.go = anyio.Event()

    def tool(self, policy: Policy, *, stuck: bool = False) -> Tool:
        async def send_mail(to: str) -> str:
            """Send a mail."""
            self.sent.append(None)
            self.reached.set()
            if stuck:
                await self.go.wait()
            return "sent"

        async def with_key(to: str, idempotency_key: str) -> str:
            """Send a mail."""
            self.sent.append(idempotency_key)
            self.reached.set()
            if stuck:
                await self.go.wait()
            return "sent"

        function = with_key if policy == "replay" else send_mail
        return tool(function, name="send_mail", effect=policy)


def mails(messages: Sequence[Message]) -> Any:
    last = messages[-1]
    return "done" if last.tool_result is not None else call("send_mail", to="bea")


async def killed_amid(world: World, configured: Configure, mail: Mail, policy: Policy) -> World:
    """Return what a kill leaves while the tool runs."""
    config = configured(model=ScriptedModel(mails), tools=[mail.tool(policy, stuck=True)])
    async with world.agent(config, autosave=None) as agent:
        await agent.post_user_message("mail bea")
        await mail.reached.wait()
        assert agent.unknown_effects == ()  # it runs
        left = world.killed()
        mail.go.set()
    return left


async def test_the_intent_is_durable_before_the_call_and_settled_with_the_result(
    world: World, configured: Configure
) -> None:
    mail = Mail()
    async with world.connect(autosave=None) as sessions:
        config = configured(model=ScriptedModel(mails), tools=[mail.tool("replay")])
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            assert await agent.ask("mail bea") == "done"
            assert agent.context.ledger.effects == ()
            kinds = [
                (record.kind, record.end)
                async for chunk in world.store.read_log(agent.session.key)
                for record in chunk.records
            ]
    names = [kind for kind, _ in kinds]
    assert names.count(EFFECT) == 2
    assert names.index("tool_call") < names.index(EFFECT) < names.index("tool_result")
    at = names.index("tool_result")
    one_group = [("tool_result", False), (EFFECT, False), (EVENT, True)]
    assert kinds[at : at + 3] == one_group


async def test_a_session_tells_what_is_under_way_without_its_agent(
    world: World, configured: Configure
) -> None:
    """From a view, as an inspector has it, and from a copy."""
    left = await killed_amid(world, configured, Mail(), "ask")
    async with left.connect() as sessions:
        view = await sessions.load("ada")
        assert view is not None
        found = await open_matters(view)
        assert [one.message.text for one in found.unfinished] == ["mail bea"]
        assert [(one.tool, one.state) for one in found.effects] == [("send_mail", "begun")]
        await sessions.copy("ada", "bea")
        async with sessions.open("bea") as session:
            assert await open_matters(session) == found
        async with sessions.open("new") as session:
            assert await open_matters(session) == OpenMatters()


async def test_what_was_begun_is_the_origins_and_not_a_forks(
    world: World, configured: Configure
) -> None:
    """S1-9: whoever goes on with both makes no call twice; what the fork begins is its own."""
    first, mail = Mail(), Mail()
    left = await killed_amid(world, configured, first, "replay")
    async with left.connect() as sessions:
        await sessions.fork("ada", "bea")
        config = configured(
            model=ScriptedModel(mails), tools=[mail.tool("replay")], on_unfinished="resume"
        )
        for agent_id in ("bea", "bea", "ada"):  # the second time, from what the first one folded
            view = await sessions.load(agent_id)
            assert view is not None
            assert (await open_matters(view) == OpenMatters()) == (agent_id == "bea")
            async with await AgentFactory(sessions).create_agent(config, agent_id=agent_id):
                pass
            assert mail.sent == (first.sent if agent_id == "ada" else [])
        tools = [Mail().tool("ask", stuck=True)]
        config = configured(model=ScriptedModel(mails), tools=tools, tool_timeout=0.01)
        async with await AgentFactory(sessions).create_agent(config, agent_id="bea") as agent:
            await agent.ask("mail bea")
    async with left.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="bea") as agent:
            assert [one.tool for one in agent.unknown_effects] == ["send_mail"]


async def test_a_new_conversation_knows_what_the_one_before_has_begun(
    memory_world: World, configured: Configure
) -> None:
    """S2-13: what was said is set aside; what may have been done is not."""
    left = await killed_amid(memory_world, configured, Mail(), "ask")
    async with left.connect() as sessions:
        anew = PersistentSession(load_on_create=False)
        config = configured(on_unfinished="resume")
        made = Agent.create("ada", config=config, sessions=sessions, persistent_session=anew)
        async with made as agent:
            assert [one.tool for one in agent.unknown_effects] == ["send_mail"]
            assert [one.message.text for one in agent.unfinished] == ["mail bea"]
            await agent.ask("something else")
            assert agent.unfinished == ()
            said = [one.text for one in agent.session.context()]
            assert said == ["something else", "You said: something else"]
    async with left.agent(config) as agent:
        assert [one.tool for one in agent.unknown_effects] == ["send_mail"]
        assert [one.text for one in agent.session.context()][0] == "something else"


@pytest.mark.parametrize("policy", get_args(Policy))
async def test_after_a_kill_amid_a_call_the_restore_says_so(
    world: World, configured: Configure, policy: Policy
) -> None:
    """An unknown effect stands in the report, in an event, and in a listing of the agent's."""
    left = await killed_amid(world, configured, Mail(), policy)
    mail = Mail()
    async with left.connect() as sessions:
        config = configured(model=ScriptedModel(mails), tools=[mail.tool(policy)])
        agent = await AgentFactory(sessions).restore_agent("ada", config)
        events = agent.events()
        async with agent:
            (effect,) = agent.unknown_effects
            assert (effect.tool, effect.policy, effect.state) == ("send_mail", policy, "unknown")
            assert agent.restore_report is not None
            told = [step for step in agent.restore_report.steps if step.what == "unknown effect"]
            assert len(told) == 1
            assert "send_mail" in told[0].detail
            assert agent.session.restore_report.steps[-1] in agent.restore_report.steps
            assert mail.sent == []  # nothing was done about it
        assert [one async for one in events if isinstance(one, EffectUnknown)][0].effect == effect


async def test_a_replay_gives_the_tool_the_same_key(world: World, configured: Configure) -> None:
    first, again = Mail(), Mail()
    left = await killed_amid(world, configured, first, "replay")
    async with left.connect() as sessions:
        config = configured(
            model=ScriptedModel(mails), tools=[again.tool("replay")], on_unfinished="resume"
        )
        agent = await AgentFactory(sessions).restore_agent("ada", config)
        async with agent.events() as events, agent:
            ended = await until(events, TurnEnded)
            assert ended.text == "done"
            assert agent.unknown_effects == agent.unfinished == ()
            roles = [one.role for one in await anext_history(agent)]
    assert again.sent == first.sent != [None]
    assert roles[:2] == ["user", "assistant"]


async def anext_history(agent: Agent) -> list[Message]:
    return [item.value for item in await agent.session.history(limit=100)]


async def test_a_tool_that_is_blocked_by_now_is_not_called_again(
    memory_world: World, configured: Configure
) -> None:
    """S1-9: whoever blocks a tool after a crash means its unfinished calls, too."""
    mail, after = Mail(), Mail()
    left = await killed_amid(memory_world, configured, mail, "replay")
    config = configured(model=ScriptedModel(mails), tools=[after.tool("replay")])
    async with left.agent(config) as agent:
        agent.permissions.block("send_mail")
        await agent.resume()
        assert after.sent == []
        results = [one.tool_result for one in agent.session.context() if one.tool_result]
        assert str(results[-1].error).endswith("the tool 'send_mail' is blocked")
        assert [one.told for one in agent.unknown_effects] == [True]


async def test_skip_leaves_it_and_tells_the_model(
    memory_world: World, configured: Configure
) -> None:
    again = Mail()
    left = await killed_amid(memory_world, configured, Mail(), "skip")
    async with left.connect() as sessions:
        model = ScriptedModel(mails)
        config = configured(model=model, tools=[again.tool("skip")])
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            (ending,) = await agent.resume()
            assert isinstance(ending, TurnEnded)
            assert again.sent == []
            assert agent.unknown_effects == ()
    (result,) = [one.tool_result for one in model.last_messages if one.tool_result]
    assert result.error == SKIPPED


@pytest.mark.parametrize(
    ("decision", "sends", "result"),
    [("done", 0, "it is there"), ("replay", 1, "sent"), ("skip", 0, None)],
)
@pytest.mark.parametrize("before", [True, False], ids=["before", "while"])
async def test_ask_waits_for_a_decision(
    memory_world: World,
    configured: Configure,
    decision: Any,
    sends: int,
    result: str | None,
    before: bool,
) -> None:
    """Decided before the turn goes on, or while it waits for that: never repeated unasked."""
    again = Mail()
    left = await killed_amid(memory_world, configured, Mail(), "ask")
    async with left.connect() as sessions:
        model = ScriptedModel(mails)
        config = configured(model=model, tools=[again.tool("ask")])
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            (effect,) = agent.unknown_effects
            if before:
                await agent.resolve_effect(effect.id, decision, result="it is there")
                (ending,) = await agent.resume()
            else:
                async with agent.events() as events, anyio.create_task_group() as group:
                    endings: list[Any] = []

                    async def go_on() -> None:
                        endings.extend(await agent.resume())

                    group.start_soon(go_on)
                    await until(events, EffectUnknown)
                    assert again.sent == []
                    await agent.resolve_effect("call_1_0", decision, result="it is there")
                (ending,) = endings
            assert isinstance(ending, TurnEnded)
            assert agent.unknown_effects == ()
    assert len(again.sent) == sends
    (kept,) = [one.tool_result for one in model.last_messages if one.tool_result]
    assert kept.result == result
    assert kept.error == (SKIPPED if decision == "skip" else None)


async def settle_listed(agent: Agent) -> None:
    """Decide on what is listed, as the guide shows it, once a turn waits for that."""
    async with agent.events() as events, anyio.create_task_group() as group:
        group.start_soon(agent.resume)
        await until(events, EffectUnknown)
        (effect,) = agent.unknown_effects
        assert (await open_matters(agent.session)).effects == (effect,)
        await agent.resolve_effect(effect.id, "done", result="it is there")
        assert (await open_matters(agent.session)).effects == agent.unknown_effects == ()
        await until(events, TurnEnded)


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_what_a_resumed_turn_waits_for_is_listed(
    world: World, configured: Configure, how: str
) -> None:
    mail = Mail()
    if how == "killed":
        world = await killed_amid(world, configured, mail, "ask")
    else:
        config = configured(model=ScriptedModel(mails), tools=[mail.tool("ask", stuck=True)])
        async with world.agent(config) as agent:
            await agent.post_user_message("mail bea")
            await mail.reached.wait()
            await agent.stop(finish=False)
    config = configured(model=ScriptedModel(mails), tools=[Mail().tool("ask")])
    async with world.agent(config) as agent:
        await settle_listed(agent)


async def test_what_an_agent_resumes_by_itself_is_listed_all_the_time(
    world: World, configured: Configure
) -> None:
    """From its first moment on, also before its turn has come to the call."""
    left = await killed_amid(world, configured, Mail(), "ask")
    tools, looks = [Mail().tool("ask")], list[int]()

    async def look(event: Any, context: Any) -> None:
        looks.append(len(agent.unknown_effects))

    config = configured(
        model=ScriptedModel(mails), tools=tools, on_unfinished="resume", lifecycle_hooks=[look]
    )
    async with left.connect() as sessions:
        agent = await AgentFactory(sessions).restore_agent("ada", config)
        async with agent.events() as events, agent:
            (effect,) = agent.unknown_effects
            for _ in range(2):  # told at the start, then asked for
                await until(events, EffectUnknown)
            assert agent.unknown_effects == (effect,)
            assert looks == [1, 1]  # ready, and its turn has begun
            await agent.resolve_effect(effect.id, "skip")
            await until(events, TurnEnded)
            assert agent.unknown_effects == ()


async def test_a_replay_that_is_cut_is_listed_again(world: World, configured: Configure) -> None:
    left = await killed_amid(world, configured, Mail(), "ask")
    again = Mail()
    config = configured(model=ScriptedModel(mails), tools=[again.tool("ask", stuck=True)])
    async with left.agent(config) as agent:
        await agent.resolve_effect(agent.unknown_effects[0].id, "replay")
        async with anyio.create_task_group() as group:
            group.start_soon(agent.resume)
            await again.reached.wait()
            assert agent.unknown_effects == ()  # it runs
            with pytest.raises(SessionError, match="runs just now"):
                await agent.resolve_effect("call_1_0", "done", result="lost")
            await agent.stop(finish=False)
    config = configured(model=ScriptedModel(mails), tools=[Mail().tool("ask")])
    async with left.agent(config) as agent:
        await settle_listed(agent)


async def test_a_replay_of_a_tool_that_is_gone_asks_again(
    memory_world: World, configured: Configure
) -> None:
    left = await killed_amid(memory_world, configured, Mail(), "ask")
    async with left.agent(configured(tools=[Mail().tool("ask")]), autosave=None) as agent:
        await agent.resolve_effect(agent.unknown_effects[0].id, "replay")
        again = left.killed()
    async with again.agent(configured(model=ScriptedModel(mails))) as agent:
        await settle_listed(agent)


async def test_a_decision_survives_another_kill(memory_world: World, configured: Configure) -> None:
    left = await killed_amid(memory_world, configured, Mail(), "ask")
    async with left.connect(autosave=None) as sessions:
        config = configured(model=ScriptedModel(mails), tools=[Mail().tool("ask")])
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            await agent.resolve_effect(agent.unknown_effects[0].id, "done", result="there")
            again = left.killed()
    async with again.connect() as sessions:
        mail, model = Mail(), ScriptedModel(mails)
        config = configured(model=model, tools=[mail.tool("ask")], on_unfinished="resume")
        agent = await AgentFactory(sessions).restore_agent("ada", config)
        async with agent.events() as events, agent:
            await until(events, TurnEnded)
    assert mail.sent == []
    assert [one.tool_result.result for one in model.last_messages if one.tool_result] == ["there"]


async def test_an_effect_of_a_turn_that_is_over_can_be_settled_and_not_replayed(
    memory_world: World, configured: Configure
) -> None:
    """The conversation went on: the effect stays unknown, and listed, until somebody says more."""
    left = await killed_amid(memory_world, configured, Mail(), "ask")
    async with left.connect() as sessions:
        mail = Mail()
        config = configured(model=ScriptedModel("never mind"), tools=[mail.tool("ask")])
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            assert await agent.ask("something else") == "never mind"
            assert agent.unfinished == ()
            (effect,) = agent.unknown_effects
            with pytest.raises(SessionError, match="cannot be replayed"):
                await agent.resolve_effect(effect.id, "replay")
            with pytest.raises(ConfigError, match="choose done, skip or replay"):
                await agent.resolve_effect(effect.id, "maybe")  # type: ignore[arg-type]
            await agent.resolve_effect(effect.id, "done")
            assert agent.unknown_effects == ()
            with pytest.raises(SessionError, match="no effect"):
                await agent.resolve_effect(effect.id, "done")
    assert mail.sent == []


async def test_a_call_that_was_too_slow_is_unknown(
    memory_world: World, configured: Configure
) -> None:
    mail = Mail()
    config = configured(
        model=ScriptedModel(mails), tools=[mail.tool("ask", stuck=True)], tool_timeout=0.01
    )
    async with memory_world.agent(config) as agent:
        assert await agent.ask("mail bea") == "done"
        (slow,) = agent.unknown_effects
        assert slow.state == "unknown"
        await agent.resolve_effect(slow.id, "done")


def seen(model: ScriptedModel) -> list[tuple[Any, str | None]]:
    """Return the results that the model was shown last, each right behind its call."""
    shown = list[tuple[Any, str | None]]()
    for before, message in pairwise(model.last_messages):
        if message.tool_result is not None:
            assert [one.id for one in before.tool_calls] == [message.tool_result.call_id]
            shown.append((message.tool_result.result, message.tool_result.error))
    return shown


@pytest.mark.parametrize(
    "how", ["too slow", "interrupted", "passed over", "decided before", "dismissed"]
)
@pytest.mark.parametrize("restart", [False, True], ids=["same process", "restarted"])
async def test_the_model_sees_the_result_that_is_given_when_its_turn_is_over(
    world: World, configured: Configure, how: str, restart: bool
) -> None:
    """In place of what it was told; the call may have any answer by now."""
    mail, sorry = Mail(), ["sorry"] * (how == "too slow")
    model = ScriptedModel(call("send_mail", to="bea"), *sorry, "so it is there")
    is_decided_before = how in {"decided before", "dismissed"}
    if is_decided_before or how == "passed over":
        world = await killed_amid(world, configured, mail, "ask")
        model = ScriptedModel("never mind", "so it is there")
    limit = 0.01 if how == "too slow" else None
    tools = [mail.tool("ask", stuck=True)]
    config = configured(model=model, tools=tools, tool_timeout=limit)
    async with world.agent(config) as agent:
        if is_decided_before:
            (effect,) = agent.unknown_effects
            await agent.resolve_effect(effect.id, "done", result={"at": 3})
        if how == "dismissed":
            await agent.dismiss()
        if how == "interrupted":
            async with agent.events() as events:
                await agent.post_user_message("mail bea")
                await mail.reached.wait()
                agent.interrupt()
                await until(events, TurnInterrupted)
        else:
            await agent.ask("something else")
        if not is_decided_before:
            (effect,) = agent.unknown_effects
            await agent.resolve_effect(effect.id, "done", result={"at": 3})
        assert agent.unknown_effects == ()
        if not restart:
            await agent.ask("is it there?")
    if restart:
        model = ScriptedModel("so it is there")
        async with world.agent(configured(model=model)) as agent:
            await agent.ask("is it there?")
    assert seen(model) == [({"at": 3}, None)]


async def test_a_result_that_cannot_reach_the_model_is_refused(
    memory_world: World, configured: Configure
) -> None:
    """Its call has left the context, or a newer one has its id: then it could be taken for that."""
    mail = Mail()
    again = Message.assistant(tool_calls=[ToolCall("again", "send_mail", {"to": "bea"})])
    config = configured(
        model=ScriptedModel(again, "first", again, "second", again, "third"),
        tools=[mail.tool("ask", stuck=True)],
        tool_timeout=0.01,
    )
    async with memory_world.agent(config) as agent:
        await agent.ask("mail bea")
        await agent.ask("mail bea")
        first, second = agent.unknown_effects
        with pytest.raises(SessionError, match="settle it without a result"):
            await agent.resolve_effect(first.id, "done", result="there")
        assert agent.unknown_effects == (first, second)
        await agent.resolve_effect(first.id, "done")
        await agent.resolve_effect(second.id, "done", result="there")
        given = [one.tool_result for one in agent.session.context() if one.tool_result]
        assert [one.result for one in given] == [None, None, "there"]
        await agent.ask("mail bea")
        (third,) = agent.unknown_effects
        await agent.context.memory.reset_working_context_snapshot([Message.user("mail bea")])
        with pytest.raises(SessionError, match="settle it without a result"):
            await agent.resolve_effect(third.id, "done", result="there")


async def test_a_call_of_unknown_outcome_is_not_open_when_its_turn_continues(
    memory_world: World, configured: Configure
) -> None:
    """The model knows that it was too slow: what is cut off after that asks again, and only asks."""
    reached, go = anyio.Event(), anyio.Event()

    class Stuck:
        async def stream(self, messages: Sequence[Message], tools: Any) -> Any:
            if messages[-1].tool_result is not None:
                reached.set()
                await go.wait()
            async for chunk in ScriptedModel(mails).stream(messages, tools):
                yield chunk

    tools = [Mail().tool("ask", stuck=True)]
    config = configured(model=Stuck(), tools=tools, tool_timeout=0.01)
    async with memory_world.agent(config, autosave=None) as agent:
        await agent.post_user_message("mail bea")
        await reached.wait()
        left = memory_world.killed()
        go.set()
    model = ScriptedModel(mails)
    async with left.agent(configured(model=model, tools=[Mail().tool("ask")])) as agent:
        await agent.resume()
        assert [error for _, error in seen(model)] == ["TimeoutError: no result within 0.01 s"]
        (effect,) = agent.unknown_effects
        await agent.resolve_effect(effect.id, "done", result="there")
        shown = [one.tool_result for one in agent.context.memory.safe_messages() if one.tool_result]
    assert [one.result for one in shown] == ["there"]


async def test_a_call_that_was_too_slow_is_told_of_and_never_replayed(
    memory_world: World, configured: Configure
) -> None:
    """S1-9: nobody would call it: its turn goes on without it, and its id may come again."""
    mail, told, tried = Mail(), list[EffectUnknown](), list[str]()

    async def settle() -> str:
        """Settle what is unknown."""
        (slow,) = agent.unknown_effects
        try:
            await agent.resolve_effect(slow.id, "replay")
        except SessionError as error:
            tried.append(str(error))
        return "tried"

    slow_then_settle = ScriptedModel(
        Message.assistant(tool_calls=[ToolCall("again", "send_mail", {"to": "bea"})]),
        Message.assistant(tool_calls=[ToolCall("again", "settle")]),
        "done",
    )
    tools = [mail.tool("ask", stuck=True), settle]
    config = configured(model=slow_then_settle, tools=tools, tool_timeout=0.3)
    async with memory_world.agent(config, autosave=None) as agent:
        async for event in agent.stream("mail bea"):
            told += [event] if isinstance(event, EffectUnknown) else []
        assert [one.effect.told for one in told] == [True]
        assert "does not wait for it" in tried[0]
        other = ToolCall("again", "settle")
        assert agent.context.ledger.effect_of(told[0].effect.turn, other) is None
        assert agent.unknown_effects == (told[0].effect,)


async def test_an_interrupted_call_is_unknown(memory_world: World, configured: Configure) -> None:
    mail = Mail()
    async with memory_world.connect() as sessions:
        config = configured(model=ScriptedModel(mails), tools=[mail.tool("ask", stuck=True)])
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.post_user_message("mail bea")
            await mail.reached.wait()
            agent.interrupt()
        assert [one.state for one in agent.context.ledger.effects] == ["unknown"]
        assert agent.unfinished == ()  # it was interrupted for good


async def test_redacted_arguments_are_never_replayed(
    memory_world: World, configured: Configure
) -> None:
    """S2-28: what is stored of the call is not what the tool was given."""
    reached, go = anyio.Event(), anyio.Event()
    sent: list[str] = []

    @tool
    async def send_mail(to: str, password: str, idempotency_key: str) -> str:
        sent.append(password)
        reached.set()
        await go.wait()
        return "sent"

    def asks(messages: Sequence[Message]) -> Any:
        done = messages[-1].tool_result is not None
        return "done" if done else call("send_mail", to="bea", password="hunter2")

    options = {"tools": [send_mail], "redact_arguments": ["password"]}
    config = configured(model=ScriptedModel(asks), **options)
    async with memory_world.agent(config, autosave=None) as agent:
        await agent.post_user_message("mail bea")
        await reached.wait()
        left = memory_world.killed()
        go.set()
    async with left.connect() as sessions:
        config = configured(model=ScriptedModel(asks), on_unfinished="resume", **options)
        agent = await AgentFactory(sessions).restore_agent("ada", config)
        events = agent.events()
        async with agent:
            asked = 0
            async for event in events:
                if isinstance(event, EffectUnknown):
                    asked += 1
                    if asked == 2:  # told at the start, then asked for
                        break
            with pytest.raises(SessionError, match="cannot be replayed"):
                await agent.resolve_effect("call_1_0", "replay")
            await agent.resolve_effect("call_1_0", "skip")
            await until(events, TurnEnded)
    assert sent == ["hunter2"]


async def test_a_tool_without_effects_leaves_no_record_of_them(
    memory_world: World, configured: Configure
) -> None:
    async def look() -> str:
        return "found"

    async with memory_world.connect() as sessions:
        config = configured(model=ScriptedModel(call("look"), "done"), tools=[look])
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.ask("go")
            await agent.session.save()
            kinds = [
                record.kind
                async for chunk in memory_world.store.read_log(agent.session.key)
                for record in chunk.records
            ]
    assert EFFECT not in kinds


async def test_completed_results_are_kept_and_only_the_rest_is_called_again(
    world: World, configured: Configure
) -> None:
    """Kill while one of two tools has answered: its result stays, and it is not called again."""
    looked: list[int] = []

    async def look() -> str:
        looked.append(1)
        return "found"

    mail = Mail()

    def asks(messages: Sequence[Message]) -> Any:
        done = any(one.tool_result for one in messages)
        return "done" if done else [call("look"), call("send_mail", to="bea")]

    tools = [look, mail.tool("replay", stuck=True)]
    config = configured(model=ScriptedModel(asks), tools=tools)
    async with world.agent(config, autosave=None) as agent:
        stream = agent.stream("go")
        async for event in stream:
            if isinstance(event, ToolFinished):
                break
        await mail.reached.wait()
        await agent.session.save()
        left = world.killed()
        mail.go.set()
    again = Mail()
    async with left.connect() as sessions:
        model = ScriptedModel(asks)
        config = configured(model=model, tools=[look, again.tool("replay")])
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            await agent.resume()
    results = {
        one.tool_result.name: one.tool_result for one in model.last_messages if one.tool_result
    }
    assert (results["look"].result, results["send_mail"].result) == ("found", "sent")
    assert len(looked) == 1
    assert again.sent == mail.sent


async def test_an_undeclared_tool_is_told_to_be_interrupted_and_not_repeated(
    memory_world: World, configured: Configure
) -> None:
    """2.1: the model is told that it may or may not have done its work, and decides."""
    reached, go = anyio.Event(), anyio.Event()
    runs: list[int] = []

    async def look() -> str:
        runs.append(1)
        reached.set()
        await go.wait()
        return "found"

    model = ScriptedModel(lambda m: "done" if m[-1].tool_result else call("look"))
    config = configured(model=model, tools=[look])
    async with memory_world.agent(config, autosave=None) as agent:
        await agent.post_user_message("go")
        await reached.wait()
        left = memory_world.killed()
        go.set()
    async with left.connect() as sessions:
        config = configured(model=model, tools=[look])
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            (ending,) = await agent.resume()
            assert isinstance(ending, TurnEnded)
            results = [one.tool_result for one in model.last_messages if one.tool_result]
    assert [one.error for one in results] == [INTERRUPTED]
    assert len(runs) == 1
