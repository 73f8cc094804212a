"""Gemini through Google's own client, against a local server that checks what it is asked."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from perdure import ConfigError, Message, MissingExtraError, ModelError, ModelUnavailableError
from perdure.agent import Agent, PersistentSession
from perdure.agent.llm import GeminiModel, ToolSpec, named_model
from perdure.agent.llm.model import ReplyStream
from tests.servers.models import KEY, Server

TIME = ToolSpec(
    "get_current_time",
    "The time.",
    {"type": "object", "properties": {"timezone": {"type": "string"}}},
)
pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio"])


def gemini(server: Server, **options: Any) -> GeminiModel:
    return GeminiModel("m", **{"base_url": server.url, "api_key": KEY, "max_retries": 0, **options})


async def asked(model: GeminiModel, messages: list[Message]) -> tuple[Message, ReplyStream]:
    reply = ReplyStream()
    try:
        async with aclosing(model.stream(messages, [TIME])) as chunks:
            async for chunk in chunks:
                reply.take(chunk)
    finally:
        await model.aclose()  # it is made again if need be
    return reply.message(), reply


async def test_an_answer_streams_calls_tools_and_goes_back(models: Server) -> None:
    model = gemini(models, options={"temperature": 0.5})
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
    usage = reply.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.cached_tokens) == (11, 5, 3)
    assert usage.reasoning_tokens == 2
    results = [Message.tool(call.id, {"hour": 1}, name=call.name) for call in message.tool_calls]
    last, reply = await asked(model, [*messages, message, *results])
    assert last.text == 'The tools say: {"hour": 1}; {"hour": 1}' == reply.text
    seen = models.seen()
    assert seen["broken"] == []
    body = seen["requests"][-1]
    assert body["systemInstruction"]["parts"] == [{"text": "Be kind."}]
    assert body["generationConfig"] == {"temperature": 0.5}
    assert body["tools"][0]["functionDeclarations"][0]["name"] == "get_current_time"
    assert body["contents"][1]["parts"][1]["thoughtSignature"] == "c2lnbmVk"


async def test_an_agent_goes_on_with_what_gemini_said(models: Server, tmp_path: Path) -> None:
    async def get_current_time(timezone: str) -> dict[str, str]:
        """Return the time."""
        return {"timezone": timezone}

    kept = PersistentSession(storage=f"file:{tmp_path}")

    async def life(text: str) -> str:
        made = Agent.create(
            "ada", model=gemini(models), tools=[get_current_time], persistent_session=kept
        )
        async with made as agent:
            return await agent.ask(text)

    said = await life("think about time in Asia/Tokyo")
    assert said == 'The tools say: {"timezone": "Asia/Tokyo"}'
    assert await life("And now?") == "You said: And now?"
    assert models.seen()["broken"] == []


async def test_what_goes_wrong_is_said_plainly(models: Server) -> None:
    with pytest.raises(ModelError, match=r"refused the key \(401\).*GEMINI_API_KEY") as caught:
        await asked(gemini(models, api_key="a-wrong-key"), [Message.user("Hello")])
    assert "a-wrong-key" not in str(caught.value)
    with pytest.raises(ModelUnavailableError, match="429") as caught:
        await asked(gemini(models), [Message.user("fail 429 always")])
    assert caught.value.facts["retry_after"] == 0.01
    with pytest.raises(ModelError, match=r"it was blocked \(SAFETY\)"):
        await asked(gemini(models), [Message.user("this is blocked")])
    with pytest.raises(ModelUnavailableError, match="cannot be reached"):
        await asked(gemini(models, base_url="http://127.0.0.1:9"), [Message.user("Hello")])
    with pytest.raises(ModelUnavailableError, match="was cut on its way"):
        await asked(gemini(models), [Message.user("cut this long sentence, please, somewhere")])


async def test_what_the_client_says_of_an_option_comes_as_it_is(models: Server) -> None:
    with pytest.raises(ValueError, match="extra_forbidden"):
        await asked(gemini(models, options={"tempreature": 0.5}), [Message.user("Hello")])


async def test_a_given_client_asks_and_stays_open(models: Server) -> None:
    from google import genai

    client = genai.Client(api_key=KEY, vertexai=False, http_options={"base_url": models.url})
    for text in ("Hello", "And again"):
        async with Agent.create(model=GeminiModel("m", client=client)) as agent:
            assert await agent.ask(text) == f"You said: {text}"
    await client.aio.aclose()
    with pytest.raises(ConfigError, match="api_key= next to client="):
        GeminiModel("m", client=client, api_key=KEY)
    with pytest.raises(ConfigError, match=r"is a str: give a genai\.Client"):
        GeminiModel("m", client="Hello")


def test_a_key_and_the_package_are_needed(
    monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    for name in ("GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="GEMINI_API_KEY"):
        named_model("gemini:m")
    monkeypatch.setenv("GOOGLE_API_KEY", "a-key")
    assert isinstance(named_model("gemini:m"), GeminiModel)
    official = "https://generativelanguage.googleapis.com"
    assert repr(named_model("gemini:m")) == f"<GeminiModel m at {official}>"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'perdure\[gemini\]'"):
        named_model("gemini:m")


def test_on_trio_it_names_what_works_there(anyio_backend: str) -> None:
    import trio

    async def main() -> None:
        async for _ in GeminiModel("m", api_key=KEY).stream([Message.user("Hello")], []):
            pass

    with pytest.raises(ConfigError, match="on trio use OpenAIModel"):
        trio.run(main)
