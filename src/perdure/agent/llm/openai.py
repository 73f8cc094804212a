"""Models of OpenAI's API, and of servers that speak it: Chat Completions, and Responses."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, Literal, final
from urllib.parse import urlsplit

from perdure.agent.llm.model import Chunk, PrewarmContext, ToolSpec, Usage
from perdure.agent.llm.sdk import chunks_of, client_of, events_of, require
from perdure.errors import InvalidArgumentError
from perdure.providers import render
from perdure.providers.streams import ChatAnswer, ResponsesAnswer
from perdure.records.messages import Message

OFFICIAL: Final = "https://api.openai.com/v1"
_REASONS: Final = re.compile(r"(o\d|gpt-[5-9])")
"""Models of OpenAI whose reasoning can be had encrypted, to be sent back."""


@final
class OpenAIModel:
    """A model that is reached through the ``openai`` package, on asyncio and trio.

        OpenAIModel("gpt-5")
        OpenAIModel("gpt-5", api="responses", options={"reasoning": {"effort": "low"}})
        OpenAIModel("qwen3", base_url="http://localhost:8000/v1")

    The client retries by itself what may be retried, and honors ``retry-after``. Agents may share
    a model: its connections are closed with the last one that runs.

    Args:
        name: The model's name there.
        api: ``chat`` for Chat Completions, which most servers speak, or ``responses``.
        base_url: Where it is, if not at OpenAI; the environment may have OPENAI_BASE_URL.
        api_key: The key, instead of the environment variable OPENAI_API_KEY. A server of one's own
            may do without.
        issuer: Whose reasoning and signatures it understands; by default OpenAI, or the host.
        max_retries: How often the client asks again by itself: twice if not given.
        context_window: How many tokens the model may be asked with, if you know: then old turns are
            compacted before it refuses a request, not after.
        timeout: Seconds that an answer may take to begin, or pause: 600 if not given.
        client: The package's asynchronous client to use as it is, and not to close: an
            ``AsyncAzureOpenAI``, say. ``name`` is the deployment's then.
        options: What else goes into each request, such as ``temperature``.

    Raises:
        MissingExtraError: The ``openai`` package is not installed.
        InvalidArgumentError: There is no key, ``api`` is invalid, or ``client`` is a
            blocking client or comes with options that it has itself.

    """

    def __init__(
        self,
        name: str,
        *,
        api: Literal["chat", "responses"] = "chat",
        base_url: str | None = None,
        api_key: str | None = None,
        issuer: str | None = None,
        max_retries: int | None = None,
        context_window: int | None = None,
        timeout: float | None = None,
        client: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if api not in {"chat", "responses"}:
            raise InvalidArgumentError(
                f"invalid api={api!r}: choose chat or responses", option="api"
            )
        require("openai", "openai", extra="openai")
        self._resource = _chat_completions if api == "chat" else _responses
        self._asked, self._sdk = client_of(
            "openai",
            name,
            client,
            base_url=base_url,
            api_key=api_key,
            max_retries=max_retries,
            timeout=timeout,
            make="AsyncOpenAI",
            official=OFFICIAL,
            is_official=_is_official,
            resource=self._resource,
        )
        url = self._asked.url
        self.name: str = name
        self.context_window: int | None = context_window
        self._format: Literal["openai", "openai-responses"] = (
            "openai" if api == "chat" else "openai-responses"
        )
        self._issuer = issuer or ("openai" if _is_official(url) else urlsplit(url).hostname or url)
        self._options = dict(options or {})

    def __repr__(self) -> str:
        return f"<OpenAIModel {self._asked!r}>"

    async def prewarm(self, context: PrewarmContext) -> None:
        """Make the client before the first message."""
        await self._sdk.prewarm(context)

    async def aclose(self) -> None:
        """Close the connections; they are made again if need be."""
        await self._sdk.aclose()

    def stream(
        self, messages: Sequence[Any], tools: Sequence[ToolSpec]
    ) -> AsyncGenerator[Chunk, None]:
        """Answer, in chunks; the last one has the whole message.

        Args:
            messages: `Message` objects, or what the API takes.
            tools: What may be called.

        Raises:
            ModelUnavailableError: The same may be asked again.
            ModelError: It will not help to ask again.

        """
        answer: ChatAnswer | ResponsesAnswer
        request: dict[str, Any]
        rendered = list(messages)
        if all(isinstance(message, Message) for message in messages):
            rendered = list(render(messages, self._format, to=self._issuer).messages)
        if self._format == "openai":
            answer = ChatAnswer()
            request = {"messages": rendered, "stream_options": {"include_usage": True}}
            request |= self._options
            if tools:
                request["tools"] = [
                    {"type": "function", "function": _function(tool)} for tool in tools
                ]
        else:
            answer = ResponsesAnswer()
            # The conversation is kept here: the provider needs no copy of it to continue.
            request = {"input": rendered, "store": False}
            if _REASONS.match(self.name) or "reasoning" in self._options:
                request["include"] = ["reasoning.encrypted_content"]
            request |= self._options
            if tools:
                request["tools"] = [
                    {"type": "function", "strict": False, **_function(tool)} for tool in tools
                ]
        events = events_of(self._asked, self._sdk, self._resource, request)
        return chunks_of(self._asked, events, answer, self._format, _usage, issuer=self._issuer)


def _is_official(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host == "openai.com" or host.endswith(".openai.com")


def _chat_completions(client: Any) -> Any:
    return client.chat.completions


def _responses(client: Any) -> Any:
    return client.responses


def _function(tool: ToolSpec) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _usage(usage: Mapping[str, Any]) -> Usage:
    """Return what an answer took, from either API."""
    read = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    written = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return Usage(
        input_tokens=usage.get("prompt_tokens") or usage.get("input_tokens") or 0,
        output_tokens=usage.get("completion_tokens") or usage.get("output_tokens") or 0,
        cached_tokens=read.get("cached_tokens") or 0,
        cache_write_tokens=read.get("cache_write_tokens") or 0,
        reasoning_tokens=written.get("reasoning_tokens") or 0,
    )
