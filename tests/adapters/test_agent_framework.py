"""`PerdureHistoryProvider` against the framework's own providers, its agents, and other processes."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import msgspec
import pytest
from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    Content,
    FileHistoryProvider,
    FunctionInvocationLayer,
    InMemoryHistoryProvider,
    Message,
    tool,
)
from hypothesis import given, settings, strategies as st

import perdure
from perdure import (
    FormatError,
    InvalidArgumentError,
    LeaseHeldError,
    NotStorableError,
    SessionManager,
    TooLargeError,
)
from perdure.adapters import PerdureHistoryProvider
from perdure.store import Capabilities
from perdure.stores.delegate import DelegatingStore
from perdure.testing import MemoryBacking, MemoryStore
from tests.servers.postgres import schema_of, shared

pytestmark = pytest.mark.filterwarnings("ignore:.*FILE_HISTORY.*experimental")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The framework's agents run on asyncio; the provider does on trio, too: see below."""
    return "asyncio"


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[SessionManager]:
    async with perdure.connect(tmp_path / "store") as manager:
        yield manager


def url_of(store: str, place: Path) -> str:
    """Return the URL of a store of one kind that is empty."""
    urls = {"file": str(place / "store"), "sqlite": f"sqlite:///{place}/agents.db"}
    return urls.get(store) or f"{shared().url}?schema={schema_of(place)}"


STORES = pytest.mark.parametrize(
    "store", ["file", "sqlite", pytest.param("postgres", marks=pytest.mark.deep)]
)

# As the framework's own

texts = st.sampled_from(["", "a", "b", "low tide", "é" * 70])
contents = st.one_of(
    texts.map(Content.from_text),
    st.builds(lambda text: Content.from_text_reasoning(text=text, protected_data="c2ln"), texts),
    st.builds(
        lambda call, arguments: Content.from_function_call(call, "tide", arguments=arguments),
        st.sampled_from("cd"),
        st.sampled_from([None, "", '{"hour": 1}', "{", {"hour": 1}]),
    ),
    st.builds(
        lambda call, result, error: Content.from_function_result(
            call, result=result, exception=error
        ),
        st.sampled_from("cd"),
        st.sampled_from([None, "noon", {"hour": [12, None, 1.5]}, ["a"]]),
        st.sampled_from([None, "no tide"]),
    ),
    st.just(Content("function_call")),
    st.just(Content.from_uri("https://harbor/map.png", media_type="image/png")),
    st.just(Content.from_data(b"map" * 50, "image/png")),
    st.just(Content.from_error(message="it rains", error_code="e7")),
)
messages = st.builds(
    lambda role, contents, id_, author, more: Message(
        role, contents, message_id=id_, author_name=author, additional_properties=more
    ),
    st.sampled_from(["user", "assistant", "tool", "system", "developer"]),
    st.lists(contents, max_size=3),
    st.sampled_from([None, None, "m1", "m2"]),
    st.sampled_from([None, "pilot"]),
    st.sampled_from([{}, {"at": [1, {"x": None}]}, {"_excluded": True}, {"nan": float("nan")}]),
)
TALKS = ("one", "two")
saves = st.tuples(st.sampled_from(TALKS), st.lists(messages, max_size=3), st.integers(0, 3))
"""A conversation, new messages, and how many of its newest ones are given again before these."""


def shown(found: list[Message]) -> list[str]:
    return [repr(message.to_dict()) for message in found]  # NaN is not equal to itself


def as_the_framework(processes: list[list[Any]], *, skips: bool) -> None:
    async def run(folder: str) -> None:
        backing = MemoryBacking()
        in_memory = InMemoryHistoryProvider(skip_excluded=skips)
        in_files = FileHistoryProvider(folder, skip_excluded=skips)
        states: dict[str, Any] = {name: {} for name in TALKS}
        for acts in processes:
            async with perdure.connect(MemoryStore(backing=backing)) as manager:
                history = PerdureHistoryProvider(manager, skip_excluded=skips)
                for name, new, again in acts:
                    known = await in_memory.get_messages(name, state=states[name])
                    given = [*copy.deepcopy(known[len(known) - again :]), *new]
                    await in_memory.save_messages(name, copy.deepcopy(given), state=states[name])
                    await in_files.save_messages(name, given)
                    await history.save_messages(name, given)
                    for talk in TALKS:
                        found = shown(await history.get_messages(talk))
                        assert found == shown(await in_files.get_messages(talk))
                        own = await in_memory.get_messages(talk, state=states[talk])
                        assert found == shown(own)
            async with perdure.connect(MemoryStore(backing=backing)) as reader:
                history = PerdureHistoryProvider(reader)
                for talk in TALKS:
                    stored = await FileHistoryProvider(folder).get_messages(talk)
                    assert shown(await history.get_messages(talk)) == shown(stored)

    with TemporaryDirectory() as folder:
        asyncio.run(run(folder))


@settings(max_examples=12)
@given(st.lists(st.lists(saves, min_size=4, max_size=5), min_size=2, max_size=3), st.booleans())
def test_it_does_what_the_framework_s_own_providers_do(
    processes: list[list[Any]], skips: bool
) -> None:
    as_the_framework(processes, skips=skips)


@pytest.mark.deep
@settings(max_examples=300)
@given(st.lists(st.lists(saves, max_size=5), max_size=3), st.booleans())
def test_it_does_what_the_framework_s_own_providers_do_always(
    processes: list[list[Any]], skips: bool
) -> None:
    as_the_framework(processes, skips=skips)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_conversation_is_stored_on_each_loop(backend: str) -> None:
    async def run() -> None:
        async with PerdureHistoryProvider.in_memory() as history:
            await history.save_messages("ada", [Message("user", ["Hello"])])
            assert [each.text for each in await history.get_messages("ada")] == ["Hello"]
            session = await history.load_session("ada")
            session.state["color"] = "blue"
            await history.save_session(session)
            assert (await history.load_session("ada")).state == {"color": "blue"}

    anyio.run(run, backend=backend)


async def test_copies_go_in_and_come_out(sessions: SessionManager) -> None:
    history = PerdureHistoryProvider(sessions)
    message = Message("user", ["Hello"], additional_properties={"list": [1]})
    await history.save_messages("ada", [message])
    for mine in (message, *await history.get_messages("ada")):
        mine.contents.append(Content.from_text("changed"))
        mine.additional_properties["list"].append(2)
    (stored,) = await history.get_messages("ada")
    assert (stored.text, stored.additional_properties) == ("Hello", {"list": [1]})


async def test_a_save_appends_what_is_new(sessions: SessionManager) -> None:
    history = PerdureHistoryProvider(sessions)
    transcript = [Message("user" if at % 2 == 0 else "assistant", [f"{at}"]) for at in range(40)]
    sizes = []
    for end in range(2, 41, 2):  # the whole transcript each time
        await history.save_messages("ada", transcript[:end])
        view = await sessions.load("ada")
        assert view is not None
        sizes.append(view.seq)
    assert len({after - before for before, after in zip(sizes, sizes[1:], strict=False)}) == 1
    assert [each.text for each in await history.get_messages("ada")] == [
        f"{at}" for at in range(40)
    ]
    view = await sessions.load("ada")
    assert view is not None
    assert len(view.context()) == 40


async def test_several_tasks_save_at_once(sessions: SessionManager) -> None:
    history = PerdureHistoryProvider(sessions)
    async with anyio.create_task_group() as tasks:
        for at in range(20):
            tasks.start_soon(history.save_messages, "ada", [Message("user", [f"{at}"])])
    found = [each.text for each in await history.get_messages("ada")]
    assert sorted(found, key=int) == [f"{at}" for at in range(20)]


# With an agent


class Scripted(FunctionInvocationLayer[Any], ChatMiddlewareLayer[Any], BaseChatClient):
    """A chat client that answers as it was told, and notes what it is asked."""

    def __init__(self, *answers: Message) -> None:
        super().__init__()
        self.answers = list(answers)
        self.asked: list[list[str]] = []

    def _inner_get_response(self, *, messages: Any, **kwargs: Any) -> Any:
        async def answer() -> ChatResponse[Any]:
            self.asked.append([f"{each.role}: {each.text}" for each in messages])
            return ChatResponse(messages=[self.answers.pop(0)])

        return answer()


def said(text: str) -> Message:
    return Message("assistant", [text])


@tool(approval_mode="never_require")
def tide(harbor: str) -> str:
    """Say when the tide is low."""
    return f"low in {harbor} at noon"


async def test_an_agent_goes_on_with_what_was_said(sessions: SessionManager) -> None:
    call = Content.from_function_call("c1", "tide", arguments='{"harbor": "Oosthaven"}')
    client = Scripted(Message("assistant", [call]), said("At noon."))
    agent = Agent(client, tools=[tide], context_providers=[PerdureHistoryProvider(sessions)])
    await agent.run("When is low tide?", session=AgentSession(session_id="ada"))
    view = await sessions.load("ada")
    assert view is not None
    shown = [(each.role, each.text) for each in view.context()]
    assert shown[0] == ("user", "When is low tide?")
    assert [role for role, _ in shown] == ["user", "assistant", "tool", "assistant"]
    (result,) = [each.tool_result for each in view.context() if each.tool_result is not None]
    assert result.result == "low in Oosthaven at noon"

    again = Scripted(said("At midnight."))
    agent = Agent(again, context_providers=[PerdureHistoryProvider(sessions)])
    await agent.run("And high tide?", session=AgentSession(session_id="ada"))
    assert again.asked[0][0] == "user: When is low tide?"
    assert again.asked[0][-2:] == ["assistant: At noon.", "user: And high tide?"]
    view = await sessions.load("ada")
    assert view is not None
    assert len(view.context("anthropic").messages) == 6


async def test_a_run_can_save_after_each_answer_of_its_model(sessions: SessionManager) -> None:
    history, seen = PerdureHistoryProvider(sessions), []

    @tool(approval_mode="never_require")
    async def look(harbor: str) -> str:
        """Look at a harbor."""
        seen.extend([each.role for each in await history.get_messages("ada")])
        return "calm"

    call = Content.from_function_call("c1", "look", arguments='{"harbor": "Oosthaven"}')
    agent = Agent(
        Scripted(Message("assistant", [call]), said("It is calm.")),
        tools=[look],
        context_providers=[history],
        require_per_service_call_history_persistence=True,
    )
    await agent.run("How is it there?", session=AgentSession(session_id="ada"))
    assert seen == ["user", "assistant"]
    found = [each.role for each in await history.get_messages("ada")]
    assert found == ["user", "assistant", "tool", "assistant"]


async def talk_and_die(url: str) -> None:
    async with perdure.connect(url) as sessions:
        history = PerdureHistoryProvider(sessions)
        agent = Agent(Scripted(said("At noon."), said("At midnight.")), context_providers=[history])
        session = AgentSession(session_id="ada")
        for question in ("When is low tide?", "And high tide?"):
            await agent.run(question, session=session)
        session.state["harbor"] = "Oosthaven"
        await history.save_session(session)
        os.kill(os.getpid(), signal.SIGKILL)


def worker(act: Callable[[str], Any], url: str) -> None:
    asyncio.run(act(url))


def killed(act: Callable[[str], Any], url: str) -> None:
    """Run a process until it kills itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=worker, args=(act, url), daemon=True)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@STORES
async def test_a_history_outlives_a_kill(tmp_path: Path, store: str) -> None:
    url = url_of(store, tmp_path)
    await asyncio.to_thread(killed, talk_and_die, url)
    async with PerdureHistoryProvider.from_url(url) as history:
        client = Scripted(said("Both."))
        session = await history.load_session("ada")
        assert session.state["harbor"] == "Oosthaven"
        await Agent(client, context_providers=[history]).run("Which?", session=session)
        assert client.asked == [
            [
                "user: When is low tide?",
                "assistant: At noon.",
                "user: And high tide?",
                "assistant: At midnight.",
                "user: Which?",
            ]
        ]


# The rest of a session


async def test_a_session_s_state_keeps_its_types(sessions: SessionManager) -> None:
    history = PerdureHistoryProvider(sessions)
    session = AgentSession(session_id="ada", service_session_id="resp_1")
    session.state["last"] = said("At noon.")
    await history.save_session(session)
    await sessions.fork("ada", "bert")
    for name in ("ada", "bert"):
        stored = await history.load_session(name)
        assert (stored.session_id, stored.service_session_id) == (name, "resp_1")
        assert stored.state["last"].text == "At noon."
    assert (await history.load_session("new")).state == {}


async def test_a_conversation_has_its_owner_and_its_labels(sessions: SessionManager) -> None:
    history = PerdureHistoryProvider(sessions, tenant="acme", tags=["harbor"])
    session = AgentSession(session_id="ada")
    session.state["perdure"] = {"owner": "customer 7"}
    agent = Agent(Scripted(said("Hello.")), context_providers=[history])
    await agent.run("Hello", session=session)
    (info,) = await sessions.list(tenant="acme", owner="customer 7")
    assert (info.key.agent, info.tags) == ("ada", ("harbor",))
    await sessions.forget(owner="customer 7", tenant="acme")
    assert await history.get_messages("ada") == []


async def test_what_perdure_has_said_is_shown(sessions: SessionManager) -> None:
    async with sessions.open("ada") as session:
        session.append(perdure.Message.user("When?", image_urls=["https://harbor/map.png"]))
        calls = [perdure.ToolCall("c", "tide", {"at": 1})]
        session.append(perdure.Message.assistant("Wait.", reasoning="hm", tool_calls=calls))
        session.append(perdure.Message.tool("c", {"hour": 12}))
        await session.save()
    history = PerdureHistoryProvider(sessions)
    await history.save_messages("ada", [said("At noon.")])
    found = await history.get_messages("ada")
    assert [each.role for each in found] == ["user", "assistant", "tool", "assistant"]
    kinds = [[content.type for content in each.contents] for each in found]
    assert kinds == [
        ["text", "uri"],
        ["text_reasoning", "text", "function_call"],
        ["function_result"],
        ["text"],
    ]


# Refusals


async def test_a_session_that_another_process_holds_is_named(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    async with perdure.connect(url) as mine, perdure.connect(url) as theirs:
        await PerdureHistoryProvider(mine).save_messages("ada", [said("Hello.")])
        refused = PerdureHistoryProvider(theirs, on_held="raise")
        with pytest.raises(LeaseHeldError, match=f"process {os.getpid()}"):
            await refused.save_messages("ada", [said("Bye.")])
        await PerdureHistoryProvider(theirs).save_messages("ada", [said("Bye.")])  # asks for it
        found = await PerdureHistoryProvider(mine).get_messages("ada")
        assert [each.text for each in found] == ["Hello.", "Bye."]


async def test_a_message_and_the_state_of_a_session_may_be_large(tmp_path: Path) -> None:
    large = said("x" * (17 * 1024 * 1024))
    async with perdure.connect(tmp_path / "store") as sessions:
        history = PerdureHistoryProvider(sessions)
        await history.save_messages("ada", [said("Hello."), large])
        await history.save_messages("ada", [said("Hello."), large, said("Bye.")])
        session = AgentSession(session_id="ada")
        session.state["log"] = "y" * (17 * 1024 * 1024)
        await history.save_session(session)
    async with perdure.connect(tmp_path / "store") as sessions:
        history = PerdureHistoryProvider(sessions)
        found = await history.get_messages("ada")
        assert shown(found) == shown([said("Hello."), large, said("Bye.")])
        assert (await history.load_session("ada")).state == session.state
        view = await sessions.load("ada")
        assert view is not None
        assert len(repr(view.context())) < 1000


async def test_without_blobs_a_large_message_is_named_and_nothing_is_stored() -> None:
    async with perdure.connect(Plain(MemoryStore())) as sessions:
        history = PerdureHistoryProvider(sessions)
        large = said("x" * (17 * 1024 * 1024))
        with pytest.raises(TooLargeError, match=r"messages\[1\]: "):
            await history.save_messages("ada", [said("Hello."), large])
        assert await history.get_messages("ada") == []


class Plain(DelegatingStore):
    """A store that keeps no blobs."""

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self.inner.capabilities, blobs=False)


async def test_what_cannot_be_stored_is_named_and_nothing_is(sessions: SessionManager) -> None:
    history = PerdureHistoryProvider(sessions)
    unstorable = Message("user", [Content.from_text("\ud800")])
    with pytest.raises(NotStorableError, match=r"messages\[1\] is not JSON"):
        await history.save_messages("ada", [said("Hello."), unstorable])
    session = AgentSession(session_id="ada")
    session.state["socket"] = object()
    with (
        pytest.warns(RuntimeWarning, match="unsupported type"),
        pytest.raises(NotStorableError, match="register_state_type"),
    ):
        await history.save_session(session)
    with pytest.raises(InvalidArgumentError, match="session_id is None"):
        await history.get_messages(None)
    assert await sessions.list() == []


async def test_a_message_of_another_version_is_named(
    sessions: SessionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.adapters import agent_framework as adapter

    history = PerdureHistoryProvider(sessions)
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "_decoded", lambda data: said("secret"))
        patch.setattr(Message, "to_dict", lambda self: {**NEWER})
        await history.save_messages("ada", [said("secret")])
    with pytest.raises(FormatError, match=r"session ada: the message of record \d+.*1\.23") as no:
        await history.get_messages("ada")
    assert "secret" not in str(no.value)


NEWER = {"type": "message-2", "role": "user", "contents": [{"type": "text", "text": "secret"}]}
