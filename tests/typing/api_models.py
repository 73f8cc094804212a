"""Code that type checkers must accept: real models and MCP servers. It is never run."""

# pyright: strict
from __future__ import annotations

from typing import assert_type

from perdure import ModelError, ModelUnavailableError, ToolOutcomeUnknownError, ToolServerError
from perdure.agent import (
    Agent,
    AgentConfig,
    AnthropicModel,
    GeminiModel,
    McpServer,
    Model,
    OpenAIModel,
    PrewarmContext,
    Usage,
    named_model,
)


async def models() -> None:
    assert_type(named_model("openai:m", base_url="http://localhost:1"), Model)
    chat = OpenAIModel("m", api="responses", max_retries=0, timeout=10.0, options={"x": 1})
    claude = AnthropicModel("m", max_tokens=100)
    await chat.aclose()
    one: Model = claude
    AgentConfig(name="x", model=one, mcp=["uvx some-server"])
    AgentConfig(name="x", model="anthropic:m")
    async with Agent.create("ada", model=chat, mcp=["http://localhost:1/mcp"]) as agent:
        try:
            await agent.ask("Hello")
        except ModelUnavailableError as error:
            print(error.facts["retry_after"])
        except ModelError:
            raise
    assert_type(Usage().cached_tokens, int)
    assert_type(Usage().reasoning_tokens, int)
    assert_type(Usage().cache_write_tokens, int)
    AnthropicModel("m", prompt_cache="1h")
    AnthropicModel("m", prompt_cache=None)
    gemini: Model = GeminiModel("m", api_key="k", options={"temperature": 0.5})
    AgentConfig(name="x", model=gemini)


async def servers() -> None:
    server = McpServer(["prog", "-x"], name="tools", prefix="t_", only=["a"], env={}, cwd="/")
    assert_type(McpServer.of("http://localhost"), McpServer)
    async with server as started:
        assert_type(started, McpServer)
        assert_type(server.is_connected, bool)
        assert_type(server.starts, int)
        assert_type(server.name, str)
        print([tool.name for tool in server.tools()])
        try:
            print(await server.call("a", {"b": 1}, repeatable=True))
        except ToolOutcomeUnknownError:
            raise
        except ToolServerError:
            raise
    async with Agent.create("ada", model="openai:m", mcp=[server]):
        pass


async def a_model_gets_ready(model: OpenAIModel, context: PrewarmContext) -> None:
    context.at_stop.append(model.aclose)
    await model.prewarm(context)
