"""A client that the program has made itself: used as it is, for Azure, Vertex, Bedrock or a proxy.

The clients' packages take seconds to import, so only the tests import them.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from perdure import ConfigError, Message, ModelError
from perdure.agent import Agent
from perdure.agent.llm import AnthropicModel, OpenAIModel
from perdure.agent.llm.model import ReplyStream
from tests.servers.models import KEY, Server

Made = tuple[Any, Any]


def own_openai(server: Server, key: str = KEY) -> Made:
    import openai

    client = openai.AsyncOpenAI(base_url=server.openai_url, api_key=key)
    return OpenAIModel("m", client=client), client


def responses(server: Server, key: str = KEY) -> Made:
    import openai

    client = openai.AsyncOpenAI(base_url=server.openai_url, api_key=key)
    return OpenAIModel("m", api="responses", client=client), client


def azure(server: Server, key: str = KEY) -> Made:
    import openai

    client = openai.AsyncAzureOpenAI(
        azure_endpoint=f"{server.url}/azure", api_key=key, api_version="2024-10-21"
    )
    return OpenAIModel("a-deployment", client=client), client


def own_anthropic(server: Server, key: str = KEY) -> Made:
    import anthropic

    client = anthropic.AsyncAnthropic(base_url=server.url, api_key=key)
    return AnthropicModel("m", client=client), client


def vertex(server: Server, key: str = KEY) -> Made:
    import anthropic

    client = anthropic.AsyncAnthropicVertex(
        region="eu", project_id="p", access_token=key, base_url=f"{server.url}/vertex"
    )
    return AnthropicModel("claude", client=client), client


EACH = pytest.mark.parametrize("make", [own_openai, responses, azure, own_anthropic, vertex])


@EACH
async def test_a_given_client_asks_and_stays_open(
    make: Callable[..., Made], models: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)  # it signs in by itself
    model, client = make(models)

    async def get_current_time(timezone: str) -> str:
        """Return the time."""
        return f"noon in {timezone}"

    async with Agent.create("ada", model=model, tools=[get_current_time]) as agent:
        assert await agent.ask("time in Asia/Tokyo") == "The tools say: noon in Asia/Tokyo"
    assert not client.is_closed()
    async with Agent.create("bob", model=model) as agent:  # and once more
        assert await agent.ask("Hello") == "You said: Hello"
    await model.aclose()
    assert not client.is_closed()
    await client.close()


@EACH
async def test_what_a_given_client_signs_in_with_is_told_and_not_shown(
    make: Callable[..., Made], models: Server
) -> None:
    model, client = make(models, "a-wrong-key")
    with pytest.raises(ModelError, match=r"\(401\): check what the client signs in with") as caught:
        async for _ in model.stream([Message.user("Hello")], []):
            pass
    assert "a-wrong-key" not in str(caught.value) + repr(model)
    await client.close()


async def test_what_only_the_client_can_have_is_refused_beside_it(models: Server) -> None:
    import openai

    _, client = own_openai(models)
    with pytest.raises(ConfigError, match="api_key= next to client=: give them to the client"):
        OpenAIModel("m", client=client, api_key=KEY)
    with pytest.raises(ConfigError, match="base_url=, timeout= next to client="):
        AnthropicModel("m", client=client, base_url=models.url, timeout=5.0)
    with openai.OpenAI(api_key=KEY) as blocking:
        with pytest.raises(ConfigError, match="is a OpenAI: give one of the asynchronous clients"):
            OpenAIModel("m", client=blocking)
    await client.close()


EVENTS = [
    {
        "type": "message_start",
        "message": {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "claude",
            "content": [],
            "usage": {"input_tokens": 8, "output_tokens": 1},
        },
    },
    {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": "", "unknown": {"kept": 1}},
    },
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
    {"type": "message_stop"},
]


class Frames:
    """Read events in frames as a client for Bedrock does: no lines, and a length before each."""

    async def aiter_bytes(self, coming: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        from anthropic import _streaming as streaming

        data = b"".join([chunk async for chunk in coming])
        while data:
            size = int.from_bytes(data[:4], "big")
            frame, data = data[4 : 4 + size], data[4 + size :]
            kind = json.loads(frame)["type"]
            yield streaming.ServerSentEvent(event=kind, data=frame.decode())


def framed(events: list[Any]) -> Any:
    """Return a client whose answers come in frames."""
    import anthropic
    import httpx2

    class Framed(anthropic.AsyncAnthropic):
        def _make_sse_decoder(self) -> Any:
            return Frames()

    frames = [json.dumps(event).encode() for event in events]
    body = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
    answer = httpx2.Response(
        200, headers={"content-type": "application/vnd.amazon.eventstream"}, content=body
    )
    transport = httpx2.MockTransport(lambda request: answer)
    return Framed(api_key=KEY, http_client=httpx2.AsyncClient(transport=transport))


async def test_answers_that_only_the_client_can_read_are_read_by_it() -> None:
    client = framed(EVENTS)
    reply = ReplyStream()
    async for chunk in AnthropicModel("m", client=client).stream([Message.user("Hello")], []):
        reply.take(chunk)
    assert reply.message().text == "Hi"
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (8, 5)
    assert b'"unknown":{"kept":1}' in bytes(reply.message().extra["perdure_issued"])
    await client.close()


async def test_an_error_in_such_an_answer_is_one_of_perdures() -> None:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    client = framed([*EVENTS[:2], error])
    with pytest.raises(ModelError, match="ended its answer with an error: .*Overloaded"):
        async for _ in AnthropicModel("m", client=client).stream([Message.user("Hello")], []):
            pass
    await client.close()
