"""The real clients against a local server that speaks the providers' protocols, and checks them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import msgspec
import pytest

from perdure import ConfigError, Message, MissingExtraError, ModelError, ModelUnavailableError
from perdure.agent import Agent, AgentConfig, PersistentSession, TurnFailed
from perdure.agent.events import Segment, ToolFinished, TurnInterrupted
from perdure.agent.llm import (
    AnthropicModel,
    OpenAIModel,
    ToolSpec,
    anthropic as anthropic_api,
    gemini as gemini_api,
    named_model,
    openai as openai_api,
)
from perdure.agent.llm.model import ReplyStream, Usage
from tests.servers.models import KEY, Server

TIME = ToolSpec("get_current_time", "The time.", {"type": "object", "properties": {}})
Make = Callable[..., Any]


def chat(server: Server, **options: Any) -> OpenAIModel:
    return OpenAIModel("m", **{"base_url": server.openai_url, "api_key": KEY, **options})


def responses(server: Server, **options: Any) -> OpenAIModel:
    # As for a model that reasons: what it thinks comes encrypted, to be sent back.
    return chat(
        server, **{"api": "responses", "options": {"reasoning": {"effort": "low"}}, **options}
    )


def anthropic(server: Server, **options: Any) -> AnthropicModel:
    return AnthropicModel("m", **{"base_url": server.url, "api_key": KEY, **options})


ALL = pytest.mark.parametrize("make", [chat, responses, anthropic])


@pytest.fixture
async def closing() -> AsyncIterator[Callable[[Any], Any]]:
    """Close in the end what is made: without an agent, nobody else does."""
    made: list[Any] = []
    yield lambda model: made.append(model) or model
    for model in made:
        await model.aclose()


async def asked(model: Any, messages: list[Any]) -> tuple[Message, ReplyStream]:
    reply = ReplyStream()
    async for chunk in model.stream(messages, [TIME]):
        reply.take(chunk)
    return reply.message(), reply


@ALL
async def test_an_answer_streams_calls_tools_and_goes_back(
    make: Make, models: Server, closing: Any
) -> None:
    """S1-8: text, reasoning and parallel calls come in pieces; C14: nothing of them is lost."""
    model = closing(make(models))
    messages = [
        Message.system("Be kind."),
        Message.user("think about time in Europe/Berlin and time in Asia/Tokyo"),
    ]
    message, reply = await asked(model, messages)
    assert [call.arguments for call in message.tool_calls] == [
        {"timezone": "Europe/Berlin"},
        {"timezone": "Asia/Tokyo"},
    ]
    assert message.reasoning == "Let me think about it."
    assert reply.usage is not None
    usage = (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.cached_tokens)
    assert usage == (11, 5, 3)
    assert reply.usage.cache_write_tokens == 2
    assert b'"usage":' in bytes(message.extra["perdure_issued"])  # kept with the message, too
    results = [
        Message.tool(call.id, {"hour": at}, name=call.name)
        for at, call in enumerate(message.tool_calls)
    ]
    message = msgspec.json.decode(msgspec.json.encode(message), type=Message)  # as if restored
    last, reply = await asked(model, [*messages, message, *results])
    assert last.text == 'The tools say: {"hour":0}; {"hour":1}' == reply.text
    # Encrypted reasoning and signatures went back: without them the server would have refused.
    assert models.seen()["broken"] == []
    request = models.seen()["requests"][-1]
    sent = msgspec.json.encode(request)
    assert make is chat or b"sealed" in sent or b"signed" in sent
    assert make is not responses or request["include"] == ["reasoning.encrypted_content"]


@ALL
async def test_what_may_pass_is_asked_again_by_the_client(
    make: Make, models: Server, closing: Any
) -> None:
    model = closing(make(models))
    for status in (429, 500):
        text = f"fail {status} once for {make.__name__} {closing}"
        message, _ = await asked(model, [Message.user(text)])
        assert message.text == f"You said: {text}"
        with pytest.raises(ModelUnavailableError, match=f"{status}") as caught:
            await asked(model, [Message.user(f"fail {status} always")])
        assert caught.value.facts["status"] == status
        assert caught.value.facts["retry_after"] == 0.01
        assert KEY not in str(caught.value)
        assert type(caught.value.__cause__).__module__.startswith(("openai", "anthropic"))


@ALL
async def test_what_will_not_pass_is_said_plainly(make: Make, models: Server, closing: Any) -> None:
    with pytest.raises(ModelError, match=r"refused the key \(401\).*_API_KEY") as caught:
        await asked(closing(make(models, api_key="a-wrong-key")), [Message.user("Hello")])
    assert not isinstance(caught.value, ModelUnavailableError)
    assert "a-wrong-key" not in str(caught.value)
    with pytest.raises(ModelError, match=r"not found \(404\)"):
        away = closing(make(models, base_url=f"{models.url}/nowhere"))
        await asked(away, [Message.user("Hello")])
    with pytest.raises(ModelUnavailableError, match="cannot be reached: check base_url"):
        away = closing(make(models, base_url="http://127.0.0.1:9/v1", max_retries=0))
        await asked(away, [Message.user("Hello")])


@ALL
async def test_what_the_client_says_of_an_option_comes_as_it_is(
    make: Make, models: Server, closing: Any
) -> None:
    with pytest.raises(TypeError, match="tempreature"):
        await asked(closing(make(models, options={"tempreature": 0.5})), [Message.user("Hello")])


@ALL
async def test_an_answer_that_is_cut_is_kept_in_part(make: Make, models: Server) -> None:
    """S1-8: what had come of it is in the conversation, marked, and the next turn goes on."""
    async with Agent.create("ada", model=make(models)) as agent:
        events = [event async for event in agent.stream("cut this long sentence, please")]
        (failed,) = [event for event in events if isinstance(event, TurnFailed)]
        assert isinstance(failed.error, ModelUnavailableError)
        assert "was cut on its way" in str(failed.error)
        partial = "".join(event.text for event in events if isinstance(event, Segment))
        assert 0 < len(partial) < len("You said: cut this long sentence, please")
        kept = agent.session.context()[-1]
        assert kept.text == partial
        assert kept.extra["perdure_interrupted"] == msgspec.Raw(b"true")
        assert await agent.ask("Hello") == "You said: Hello"
        assert models.seen()["broken"] == []


@ALL
async def test_an_agent_goes_on_with_what_a_provider_said(
    make: Make, models: Server, tmp_path: Any
) -> None:
    """S1-8, S0-9: reasoning and signatures come back from the store, and go to the provider."""

    async def get_current_time(timezone: str) -> dict[str, str]:
        """Return the time."""
        return {"timezone": timezone}

    kept = PersistentSession(storage=f"file:{tmp_path}")

    async def life(text: str) -> str:
        made = Agent.create(
            "ada", model=make(models), tools=[get_current_time], persistent_session=kept
        )
        async with made as agent:
            return await agent.ask(text)

    said = await life("think about time in Asia/Tokyo")
    assert said == 'The tools say: {"timezone":"Asia/Tokyo"}'
    assert await life("And now?") == "You said: And now?"
    assert models.seen()["broken"] == []


@ALL
async def test_an_interrupted_answer_leaves_the_client_whole(make: Make, models: Server) -> None:
    async with Agent.create("ada", model=make(models)) as agent:
        ended = None
        async for event in agent.stream("hang amid this sentence, please"):
            ended = event
            if isinstance(event, Segment):
                agent.interrupt()
        assert isinstance(ended, TurnInterrupted)
        assert await agent.ask("Hello") == "You said: Hello"
        assert models.seen()["broken"] == []


COUNTS: dict[Any, list[tuple[dict[str, Any], Usage]]] = {
    anthropic_api: [
        ({"input_tokens": 3}, Usage(input_tokens=3)),
        ({"output_tokens": 3}, Usage(output_tokens=3)),
        ({"cache_read_input_tokens": 3}, Usage(input_tokens=3, cached_tokens=3)),
        ({"cache_creation_input_tokens": 3}, Usage(input_tokens=3, cache_write_tokens=3)),
    ],
    gemini_api: [
        ({"promptTokenCount": 3}, Usage(input_tokens=3)),
        ({"toolUsePromptTokenCount": 3}, Usage(input_tokens=3)),
        ({"candidatesTokenCount": 3}, Usage(output_tokens=3)),
        ({"thoughtsTokenCount": 3}, Usage(output_tokens=3, reasoning_tokens=3)),
        ({"cachedContentTokenCount": 3}, Usage(cached_tokens=3)),
    ],
    openai_api: [
        ({"prompt_tokens": 3}, Usage(input_tokens=3)),
        ({"input_tokens": 3}, Usage(input_tokens=3)),
        ({"completion_tokens": 3}, Usage(output_tokens=3)),
        ({"output_tokens": 3}, Usage(output_tokens=3)),
        ({"prompt_tokens_details": {"cached_tokens": 3}}, Usage(cached_tokens=3)),
        ({"input_tokens_details": {"cache_write_tokens": 3}}, Usage(cache_write_tokens=3)),
        ({"completion_tokens_details": {"reasoning_tokens": 3}}, Usage(reasoning_tokens=3)),
        ({"output_tokens_details": {"reasoning_tokens": 3}}, Usage(reasoning_tokens=3)),
    ],
}


@pytest.mark.parametrize("api", COUNTS, ids=lambda api: api.__name__.rpartition(".")[2])
def test_a_count_that_a_server_leaves_out_or_does_not_know_is_zero(api: Any) -> None:
    unknown = {name: None for given, _ in COUNTS[api] for name in given}
    assert api._usage({}) == api._usage(unknown) == Usage()
    for given, usage in COUNTS[api]:
        assert api._usage(given) == api._usage({**unknown, **given}) == usage


async def test_who_asks_while_the_client_is_being_made_gets_the_same(models: Server) -> None:
    model = chat(models)
    said: list[str] = []

    async def ask() -> None:
        message, _ = await asked(model, [Message.user("Hello")])
        said.append(message.text)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(ask)
    await model.aclose()
    assert said == ["You said: Hello"] * 3


async def test_a_tool_that_fails_is_an_answer_too(models: Server) -> None:
    async with Agent.create("ada", model=chat(models)) as agent:
        events = [event async for event in agent.stream("time in Asia/Tokyo")]
        (finished,) = [event for event in events if isinstance(event, ToolFinished)]
        assert "there is no tool" in (finished.result.error or "")
        assert "there is no tool" in agent.session.context()[-1].text


def test_a_missing_key_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        AgentConfig(name="x", model="openai:m")
    with pytest.raises(ConfigError, match="ANTHROPIC_API_KEY"):
        AgentConfig(name="x", model="anthropic:m")
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    config = AgentConfig(name="x", model="openai-responses:m")
    assert repr(config.model) == "<OpenAIModel m at https://api.openai.com/v1>"
    assert "a-key" not in repr(config)
    # A server of one's own may want none.
    assert "localhost" in repr(OpenAIModel("m", base_url="http://me:secret@localhost:1/v1"))
    assert "secret" not in repr(OpenAIModel("m", base_url="http://me:secret@localhost:1/v1"))


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'perdure\[openai\]'"):
        named_model("openai:m")
    with pytest.raises(MissingExtraError, match=r"pip install 'perdure\[anthropic\]'"):
        named_model("anthropic:m")


@pytest.mark.parametrize("name", ["m", "other:m", "openai:"])
def test_an_unknown_model_says_what_there_is(name: str) -> None:
    with pytest.raises(ConfigError, match="openai:NAME, openai-responses:NAME, anthropic:NAME"):
        named_model(name)
