"""Models of Anthropic's Messages API, with prompt caching."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, Literal, final

from perdure.agent.llm.model import Chunk, PrewarmContext, ToolSpec, Usage
from perdure.agent.llm.sdk import chunks_of, client_of, events_of, require
from perdure.errors import InvalidArgumentError
from perdure.providers import render
from perdure.providers.request_rules import MARKERS, places
from perdure.providers.streams import AnthropicAnswer
from perdure.records.messages import Message

# Cache breakpoints in a request to Anthropic: pure
#
# Anthropic caches a request's beginning up to each block that is marked, in the order tools,
# instructions, messages, and takes at most four marks. One is at the end of the conversation
# and moves with it, one where the request before ended, so that what that one wrote is found
# however much a tool loop has added since; two hold what stays: the tools and the instructions.


CacheTime = Literal["5m", "1h"]
"""Time that a cached beginning stays after it was used."""

_STANDING: Final = ("tools[]", "system[]")
_MOVING: Final = "messages[].content[*]"
_NEVER: Final = frozenset({"thinking", "redacted_thinking"})
"""Blocks that take no mark."""

Block = dict[str, Any]


def with_breakpoints(request: dict[str, Any], stay: CacheTime) -> dict[str, Any]:
    """Return a request with marks; it is not changed itself.

    Marks that it has stay as they are, except for the oldest ones in the messages if there are
    so many that none is left for the end.
    """
    marked = {**request, "messages": [_copied(message) for message in request.get("messages", ())]}
    for name in ("tools", "system"):
        if request.get(name):
            marked[name] = _blocks(request[name])
    # The oldest marks in the messages go, so that one is left for the end.
    standing, moving = _marked(marked, *_STANDING), _marked(marked, _MOVING)
    for block in moving[: max(len(standing) + len(moving) - (MARKERS - 1), 0)]:
        del block["cache_control"]
    free = MARKERS - len(_marked(marked, *_STANDING, _MOVING))
    for place in _places(marked)[: max(free, 0)]:
        place["cache_control"] = _mark(marked, place, stay)
    return marked


def _all(request: dict[str, Any], *paths: str) -> list[Block]:
    """Return everything on these paths that may have a mark, in the order in which it is cached."""
    return [place.value for path in paths for place in places(request, path)]


def _marked(request: dict[str, Any], *paths: str) -> list[Block]:
    return [block for block in _all(request, *paths) if "cache_control" in block]


def _copied(message: Any) -> Any:
    return (
        {**message, "content": _blocks(message["content"])} if message.get("content") else message
    )


def _blocks(content: Any) -> list[Block]:
    """Return content as blocks that may be changed, those within blocks too."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [
        {**block, "content": _blocks(block["content"])}
        if isinstance(block.get("content"), list)
        else {**block}
        for block in content
    ]


def _places(request: dict[str, Any]) -> list[Block]:
    """Return the blocks to mark, the most useful first; none that has a mark."""
    messages = request["messages"]
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    before = messages[answers[-1] - 1] if answers and answers[-1] else None
    wanted = [
        _last(messages[-1].get("content") if messages else None),
        _last(before and before.get("content")),
        _last(request.get("system")),
        _last(request.get("tools")),
    ]
    return [block for block in wanted if block is not None and "cache_control" not in block]


def _last(blocks: list[Block] | None) -> Block | None:
    fit = [
        block
        for block in blocks or ()
        if block.get("type") not in _NEVER and block.get("text") != ""
    ]
    return fit[-1] if fit else None


def _mark(request: dict[str, Any], place: Block, stay: CacheTime) -> Block:
    """Return a mark that fits its place: those that stay longer come before those that do not."""
    blocks = _all(request, *_STANDING, _MOVING)
    at = next(number for number, block in enumerate(blocks) if block is place)
    if any(_cache_lifetime(block) == "1h" for block in blocks[at:]):
        stay = "1h"
    elif any(_cache_lifetime(block) == "5m" for block in blocks[:at]):
        stay = "5m"
    return {"type": "ephemeral"} if stay == "5m" else {"type": "ephemeral", "ttl": stay}


def _cache_lifetime(block: Block) -> str | None:
    mark = block.get("cache_control")
    return str(mark.get("ttl", "5m")) if isinstance(mark, dict) else None


# Models with Anthropic's Messages API


OFFICIAL: Final = "https://api.anthropic.com"


@final
class AnthropicModel:
    """A model that is reached through the ``anthropic`` package, on asyncio and trio.

        AnthropicModel("claude-sonnet-4-5", max_tokens=4096)

    The client retries by itself what may be retried, and honors ``retry-after``. Agents may share
    a model: its connections are closed with the last one that runs.

    Args:
        name: The model's name there.
        max_tokens: The longest answer; the API requires it.
        base_url: Where it is, if not at Anthropic; the environment may have ANTHROPIC_BASE_URL.
        api_key: The key, instead of the environment variable ANTHROPIC_API_KEY.
        max_retries: How often the client asks again by itself: twice if not given.
        context_window: How many tokens the model may be asked with, if you know: then old turns are
            compacted before it refuses a request, not after.
        timeout: Seconds that an answer may take to begin, or pause: 600 if not given.
        client: The package's asynchronous client to use as it is, and not to close: an
            ``AsyncAnthropicBedrock`` or ``AsyncAnthropicVertex``, say.
        prompt_cache: How long Anthropic keeps what it has read of a conversation, ``"5m"`` or
            ``"1h"``: the next request reads it at a tenth of the price. None asks for no cache.
        options: What else goes into each request, such as ``thinking``.

    Raises:
        MissingExtraError: The ``anthropic`` package is not installed.
        InvalidArgumentError: There is no key, ``prompt_cache`` is invalid, or ``client`` is a
            blocking client or comes with options that it has itself.

    """

    def __init__(
        self,
        name: str,
        *,
        max_tokens: int = 8192,
        base_url: str | None = None,
        api_key: str | None = None,
        max_retries: int | None = None,
        context_window: int | None = None,
        timeout: float | None = None,
        client: Any = None,
        prompt_cache: CacheTime | None = "5m",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if prompt_cache not in {"5m", "1h", None}:
            raise InvalidArgumentError(
                f"invalid prompt_cache={prompt_cache!r}: choose '5m', '1h' or None",
                option="prompt_cache",
            )
        require("anthropic", "anthropic", extra="anthropic")
        self.name: str = name
        self.context_window: int | None = context_window
        self._max_tokens = max_tokens
        self._options = dict(options or {})
        self._prompt_cache = prompt_cache
        self._asked, self._sdk = client_of(
            "anthropic",
            name,
            client,
            base_url=base_url,
            api_key=api_key,
            max_retries=max_retries,
            timeout=timeout,
            make="AsyncAnthropic",
            official=OFFICIAL,
            is_official=lambda url: url == OFFICIAL,
            resource=_messages,
        )

    def __repr__(self) -> str:
        return f"<AnthropicModel {self._asked!r}>"

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
            messages: `Message` objects, or what the API takes as ``messages``.
            tools: What may be called.

        Raises:
            ModelUnavailableError: The same may be asked again.
            ModelError: It will not help to ask again.

        """
        request = self._request(messages, tools)
        events = events_of(self._asked, self._sdk, _messages, request)
        return chunks_of(self._asked, events, AnthropicAnswer(), "anthropic", _usage)

    def _request(self, messages: Sequence[Any], tools: Sequence[ToolSpec]) -> dict[str, Any]:
        request: dict[str, Any] = {"max_tokens": self._max_tokens, **self._options}
        if tools:
            request["tools"] = [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "input_schema": tool.parameters,
                }
                for tool in tools
            ]
        if all(isinstance(message, Message) for message in messages):
            request |= render(messages, "anthropic").request
        else:
            request["messages"] = list(messages)
        if self._prompt_cache is None or "cache_control" in request:  # the API does it by itself
            return request
        return with_breakpoints(request, self._prompt_cache)


def _messages(client: Any) -> Any:
    return client.messages


def _usage(usage: Mapping[str, Any]) -> Usage:
    cached = usage.get("cache_read_input_tokens") or 0
    written = usage.get("cache_creation_input_tokens") or 0
    return Usage(
        input_tokens=(usage.get("input_tokens") or 0) + cached + written,
        output_tokens=usage.get("output_tokens") or 0,
        cached_tokens=cached,
        cache_write_tokens=written,
    )
