"""Clients of the providers, and the one reader of what they stream.

A client is created late, in a thread, since importing one takes seconds, and closed with its last
user. Every provider's streamed answer is read in `chunks_of`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, final

import anyio.to_thread
import msgspec

from perdure._lib.loop import Affinity
from perdure.agent.llm.failures import Endpoint, cut, ended, failure_of
from perdure.agent.llm.model import Chunk, PrewarmContext, Usage
from perdure.errors import ConfigError, InvalidArgumentError, MissingExtraError
from perdure.memory.working_memory import Lazy
from perdure.providers import parse
from perdure.providers.context_fit import Format
from perdure.providers.streams import StreamedAnswer

_END: Final = "[DONE]"
CONNECT_TIMEOUT: Final = 10.0
"""Seconds that a connection may take."""
MAX_RETRIES: Final = 2
TIMEOUT: Final = 600.0
"""Seconds that an answer may take to begin, or pause."""


def client_of(
    package: str,
    model: str,
    client: Any,
    *,
    base_url: str | None,
    api_key: str | None,
    max_retries: int | None,
    timeout: float | None,
    make: str,
    official: str,
    is_official: Callable[[str], bool],
    resource: Callable[[Any], Any],
) -> tuple[Endpoint, SdkClient]:
    """Return who is asked, and the client that asks: the given one, or one to be made.

    For the packages of OpenAI and Anthropic, whose clients take the same options.

    Args:
        package: What to import; its variables begin with its name.
        model: Which model is asked.
        client: A client of the user's own, or None.
        base_url: Where it is; these four are None where they were left out.
        api_key: Its key.
        max_retries: How often the client asks again.
        timeout: Seconds that an answer may take to begin, or pause.
        make: The name of the package's asynchronous client.
        official: Where the provider itself is.
        is_official: Whether an address needs a key.
        resource: Returns what of the client answers. It is imported with its first use, half a
            second's work: better done with the client, in a thread.

    Raises:
        ConfigError: There is no key, or ``client`` is a blocking one or not alone.

    """
    if client is not None:
        require_alone(base_url=base_url, api_key=api_key, max_retries=max_retries, timeout=timeout)
        if not inspect.iscoroutinefunction(getattr(client, "close", None)):
            raise InvalidArgumentError(
                f"client= is a {type(client).__name__}: give one of the asynchronous clients of "
                f"the package {package}, whose names begin with Async",
                option="client",
            )
        key, url = getattr(client, "api_key", None), str(getattr(client, "base_url", ""))
        key = key if isinstance(key, str) else ""
        endpoint = Endpoint(provider=package, model=model, url=url, variable="", key=key)
        return endpoint, SdkClient(package, given=client)
    variable = f"{package.upper()}_API_KEY"
    url = base_url or os.environ.get(f"{package.upper()}_BASE_URL") or official
    key = key_for(variable, api_key, keyless=not is_official(url))
    retries = MAX_RETRIES if max_retries is None else max_retries
    seconds = TIMEOUT if timeout is None else timeout

    def create(module: Any) -> Any:
        limits = module.Timeout(seconds, connect=min(seconds, CONNECT_TIMEOUT))
        new_client = getattr(module, make)(
            base_url=url, api_key=key or "none", max_retries=retries, timeout=limits
        )
        resource(new_client)
        return new_client

    endpoint = Endpoint(provider=package, model=model, url=url, variable=variable, key=key)
    return endpoint, SdkClient(package, create)


def require(module: str, package: str, extra: str) -> None:
    """Check that a provider's client is installed, without importing it.

    Raises:
        MissingExtraError: It is not.

    """
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the package that its own is part of is not there either
        spec = None
    if spec is None:
        raise MissingExtraError(
            f"these models need the package {package}: pip install 'perdure[{extra}]'", extra=extra
        )


def key_for(variable: str, given: str | None, *, keyless: bool = False) -> str:
    """Return the key that was given, or else the environment's.

    Args:
        variable: The environment variable.
        given: The key that counts if there is one.
        keyless: Whether the server may need none: nothing is returned then.

    Raises:
        ConfigError: There is none; the message names the variable.

    """
    key = given or os.environ.get(variable)
    if key:
        return key
    if keyless:
        return ""
    raise ConfigError(
        f"there is no key: set the environment variable {variable}, or give api_key=",
        variable=variable,
    )


async def chunks_of(
    endpoint: Endpoint,
    events: AsyncGenerator[dict[str, Any], None],
    answer: StreamedAnswer,
    format: Format,
    usage_of: Callable[[Mapping[str, Any]], Usage],
    *,
    issuer: str | None = None,
) -> AsyncGenerator[Chunk, None]:
    """Yield a streamed answer in chunks; the last one has the whole message.

    Args:
        endpoint: Who is asked.
        events: What the provider sends; closed here.
        answer: Puts the events together.
        format: The format of the whole answer.
        usage_of: Reads what the provider says that the answer took.
        issuer: Who wrote it, if that is not the one whose format it is.

    Raises:
        ModelUnavailableError: The same may be asked again.
        ModelError: It will not help to ask again.

    """
    async with aclosing(events):
        async for event in events:
            text, reasoning = answer.take(event)
            if answer.error is not None:
                raise ended(endpoint, answer.error)
            if text or reasoning:
                yield Chunk(text=text, reasoning=reasoning)
    if not answer.complete:
        raise cut(endpoint)
    message = parse(answer.whole(), format, issuer=issuer)
    yield Chunk(message=message, usage=None if answer.usage is None else usage_of(answer.usage))


async def events_of(
    endpoint: Endpoint,
    sdk: SdkClient,
    resource: Callable[[Any], Any],
    request: Mapping[str, Any],
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a streamed answer, as the provider wrote them.

    The client opens the stream: it knows the keys, and asks again where that may help.

    Args:
        endpoint: Who is asked.
        sdk: Has the client.
        resource: Returns what of the client answers.
        request: What it is asked with.

    Raises:
        ModelUnavailableError: The same may be asked again.
        ModelError: It will not help to ask again.

    """
    create = resource(await sdk.get()).with_streaming_response.create
    begun = False
    try:
        async with create(model=endpoint.model, stream=True, **request) as response:
            begun = True
            # In frames that only its client reads, as those of Bedrock.
            if "amazon.eventstream" in str(response.headers.get("content-type", "")):
                async with await response.parse() as stream:
                    async for event in stream:
                        yield event.model_dump(mode="json", exclude_unset=True, warnings=False)
                return
            async with aclosing(response.iter_lines()) as incoming:
                async for sent in sent_events(incoming):
                    yield sent
    except Exception as error:
        failure = failure_of(endpoint, error, begun=begun)
        if failure is None:
            raise
        raise failure from error


async def sent_events(lines: AsyncIterator[str]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the server-sent events that lines have, each of which is JSON.

    Raises:
        msgspec.DecodeError: One is none.

    """
    data: list[str] = []
    async for line in lines:
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif not line and data:  # else a name, an id or a comment: the data say it all
            text = "\n".join(data)
            data.clear()
            event = {} if text.strip() == _END else msgspec.json.decode(text)
            if isinstance(event, dict) and event:
                yield event


def require_alone(**others: Any) -> None:
    """Check that no client options were given together with a client.

    Raises:
        ConfigError: There are options that only the client can have.

    """
    known = [f"{name}=" for name, value in others.items() if value is not None]
    if known:
        raise InvalidArgumentError(
            f"{', '.join(known)} next to client=: give them to the client itself",
            option=known[0].removesuffix("="),
        )


@final
class SdkClient:
    """A client of one provider for the loop that uses it.

    Args:
        package: What to import.
        make: Makes the client of the package.
        given: A client that the caller has made, and closes: it is used as it is.

    """

    def __init__(
        self, package: str, make: Callable[[Any], Any] | None = None, given: Any = None
    ) -> None:
        self._package = package
        self._make = make
        self._given = given
        self._home: Affinity | None = None
        self._made: Lazy[Any] = Lazy(self._create)
        self._users = 0

    async def get(self) -> Any:
        """Return the client, made if this loop has none yet."""
        if self._given is not None:
            return self._given
        if self._home is None or self._home.stray() is not None:
            self._home, self._made = Affinity(), Lazy(self._create)
        return await self._made.get()

    async def _create(self) -> Any:
        package = await anyio.to_thread.run_sync(importlib.import_module, self._package)
        assert self._make is not None  # there is a way to make it, or one was given
        return await anyio.to_thread.run_sync(self._make, package)

    async def prewarm(self, context: PrewarmContext) -> None:
        """Make it for an agent; the last agent that stops closes it."""
        self._users += 1
        context.at_stop.append(self._release)
        await self.get()

    async def _release(self) -> None:
        self._users -= 1
        if self._users == 0:
            await self.aclose()

    async def aclose(self) -> None:
        """Close its connections; it is made again if it is used again."""
        client, self._made = self._made.value, Lazy(self._create)
        if client is not None and self._home is not None and self._home.stray() is None:
            closing = getattr(client, "aclose", None) or client.close
            await closing()
