"""Models of Gemini's generateContent, in Google's API for developers or in its cloud."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, final

from perdure._lib.loop import on_trio
from perdure.agent.llm.failures import Endpoint, failure_of
from perdure.agent.llm.model import Chunk, PrewarmContext, ToolSpec, Usage
from perdure.agent.llm.sdk import (
    MAX_RETRIES,
    TIMEOUT,
    SdkClient,
    chunks_of,
    key_for,
    require,
    require_alone,
)
from perdure.errors import ConfigError, InvalidArgumentError, ModelError
from perdure.providers import render
from perdure.providers.streams import GeminiAnswer
from perdure.records.messages import Message

OFFICIAL: Final = "https://generativelanguage.googleapis.com"
VARIABLE: Final = "GEMINI_API_KEY"


@final
class GeminiModel:
    """A model that is reached through the ``google-genai`` package, on asyncio.

        GeminiModel("gemini-3-pro")
        GeminiModel("gemini-3-pro", client=genai.Client(vertexai=True, project="p", location="eu"))

    Its client knows no trio: there ``OpenAIModel`` asks Gemini at the address that speaks OpenAI's
    protocol. Agents may share a model: its connections are closed with the last one that runs.

    Args:
        name: The model's name there.
        base_url: Where it is, if not at Google.
        api_key: The key, instead of the environment variable GEMINI_API_KEY or GOOGLE_API_KEY.
        max_retries: How often the client asks again by itself: twice if not given.
        context_window: How many tokens the model may be asked with, if you know: then old turns are
            compacted before it refuses a request, not after.
        timeout: Seconds that an answer may take to begin, or pause: 600 if not given.
        client: A ``genai.Client`` to use as it is, and not to close: for Google's cloud, say.
        options: What else goes into each request's config, such as ``thinking_config``.

    Raises:
        MissingExtraError: The ``google-genai`` package is not installed.
        ConfigError: There is no key, or ``client`` was given with what it has itself.

    """

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        max_retries: int | None = None,
        context_window: int | None = None,
        timeout: float | None = None,
        client: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        require("google.genai", "google-genai", extra="gemini")
        self.name: str = name
        self.context_window: int | None = context_window
        self._options = dict(options or {})
        if client is not None:
            require_alone(
                base_url=base_url, api_key=api_key, max_retries=max_retries, timeout=timeout
            )
            if not hasattr(client, "aio"):
                raise InvalidArgumentError(
                    f"client= is a {type(client).__name__}: give a genai.Client", option="client"
                )
            self._asked = Endpoint(provider="gemini", model=name, url="", variable="", key="")
            self._sdk = SdkClient("google.genai", given=client.aio)
            return
        url = base_url or OFFICIAL
        key = key_for(
            VARIABLE, api_key or os.environ.get(VARIABLE) or os.environ.get("GOOGLE_API_KEY")
        )
        self._asked = Endpoint(provider="gemini", model=name, url=url, variable=VARIABLE, key=key)
        attempts = 1 + (MAX_RETRIES if max_retries is None else max_retries)
        milliseconds = int((TIMEOUT if timeout is None else timeout) * 1000)

        def make(genai: Any) -> Any:
            http = {
                "base_url": url,
                "timeout": milliseconds,
                "retry_options": {"attempts": attempts},
            }
            return genai.Client(api_key=key, vertexai=False, http_options=http).aio

        self._sdk = SdkClient("google.genai", make)

    def __repr__(self) -> str:
        return f"<GeminiModel {self._asked!r}>"

    async def prewarm(self, context: PrewarmContext) -> None:
        """Make the client before the first message."""
        _require_asyncio()
        await self._sdk.prewarm(context)

    async def aclose(self) -> None:
        """Close the connections; they are made again if need be."""
        await self._sdk.aclose()

    def stream(
        self, messages: Sequence[Any], tools: Sequence[ToolSpec]
    ) -> AsyncGenerator[Chunk, None]:
        """Answer, in chunks; the last one has the whole message.

        Args:
            messages: `Message` objects, or what the API takes as ``contents``.
            tools: What may be called.

        Raises:
            ModelUnavailableError: The same may be asked again.
            ModelError: It will not help to ask again.

        """
        _require_asyncio()
        events = self._events(self._request(messages, tools))
        return chunks_of(self._asked, events, GeminiAnswer(), "gemini", _usage)

    async def _events(self, request: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of an answer as the API wrote them."""
        client = await self._sdk.get()
        begun, blocked = False, None
        try:
            coming = await client.models.generate_content_stream(model=self.name, **request)
            async with aclosing(coming):
                async for chunk in coming:
                    begun = True
                    event = chunk.model_dump(mode="json", by_alias=True, exclude_none=True)
                    blocked = (event.get("promptFeedback") or {}).get("blockReason") or blocked
                    yield event
        except Exception as error:
            failure = failure_of(self._asked, error, begun=begun)
            if failure is None:
                raise
            raise failure from error
        if blocked is not None:
            raise ModelError(
                f"{self._asked!r} refused the request: it was blocked ({blocked})",
                provider="gemini",
                model=self.name,
            )

    def _request(self, messages: Sequence[Any], tools: Sequence[ToolSpec]) -> dict[str, Any]:
        config: dict[str, Any] = {"automatic_function_calling": {"disable": True}, **self._options}
        if tools:
            declared = [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters_json_schema": tool.parameters,
                }
                for tool in tools
            ]
            config["tools"] = [*config.get("tools", ()), {"function_declarations": declared}]
        if not all(isinstance(message, Message) for message in messages):
            return {"contents": list(messages), "config": config}
        context = render(messages, "gemini")
        if context.system is not None:
            config["system_instruction"] = context.system
        return {"contents": context.messages, "config": config}


def _require_asyncio() -> None:
    if on_trio():
        raise ConfigError(
            "Google's client runs on asyncio only: on trio use OpenAIModel(NAME, "
            f"base_url='{OFFICIAL}/v1beta/openai/', api_key=…)",
            option="model",
        )


def _usage(usage: Mapping[str, Any]) -> Usage:
    thought = usage.get("thoughtsTokenCount") or 0
    return Usage(
        input_tokens=(usage.get("promptTokenCount") or 0)
        + (usage.get("toolUsePromptTokenCount") or 0),
        output_tokens=(usage.get("candidatesTokenCount") or 0) + thought,
        cached_tokens=usage.get("cachedContentTokenCount") or 0,
        reasoning_tokens=thought,
    )
