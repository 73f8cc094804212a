"""A provider's own client, as a model holds it: created late, closed with its last user."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Final, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.loop import Affinity
from perdure.agent.llm.failures import Endpoint, failure_of
from perdure.agent.llm.model import PrewarmContext
from perdure.errors import ConfigError, InvalidArgumentError, MissingExtraError

# Server-sent events, from the lines of an answer: pure


_END: Final = "[DONE]"


class EventLines:
    """Put the lines of a stream together to events, each of which is JSON.

    >>> lines = EventLines()
    >>> lines.take('data: {"text": "Hello"}'), lines.take("")
    (None, {'text': 'Hello'})
    """

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data: list[str] = []

    def take(self, line: str) -> dict[str, Any] | None:
        """Return the event that ends with this line, None if none does.

        Raises:
            msgspec.DecodeError: It is no JSON.

        """
        name, _, value = line.partition(":")
        if line and name == "data":
            self._data.append(value.removeprefix(" "))
            return None
        if line or not self._data:
            return None  # a name, an id or a comment: the data say it all
        data = "\n".join(self._data)
        self._data.clear()
        event = {} if data.strip() == _END else msgspec.json.decode(data)
        return event if isinstance(event, dict) and event else None


# A provider's own client, as a model holds it: made late, and closed with its last user
#
# Importing a client takes seconds, so it is done in a thread, and only once it is needed.


CONNECT_TIMEOUT: Final = 10.0
"""Seconds that a connection may take."""
MAX_RETRIES: Final = 2
TIMEOUT: Final = 600.0
"""Seconds that an answer may take to begin, or pause."""


def asked_with(client: Any, provider: str, model: str) -> Endpoint:
    """Return who is asked with a client that was given, for messages."""
    key = getattr(client, "api_key", None)
    url = str(getattr(client, "base_url", ""))
    return Endpoint(
        provider=provider,
        model=model,
        url=url,
        variable="",
        key=key if isinstance(key, str) else "",
    )


def client_of(
    package: str,
    model: str,
    client: Any,
    given: dict[str, Any],
    *,
    make: str,
    official: str,
    is_official: Callable[[str], bool],
    warm: Callable[[Any], object],
) -> tuple[Endpoint, SdkClient]:
    """Return who is asked, and the client that asks: the given one, or one to be made.

    For the packages of OpenAI and Anthropic, whose clients take the same options.

    Args:
        package: What to import; its variables begin with its name.
        model: Which model is asked.
        client: A client of the user's own, or None.
        given: base_url, api_key, max_retries and timeout, each None if it was left out.
        make: The name of the package's asynchronous client.
        official: Where the provider itself is.
        is_official: Whether an address needs a key.
        warm: Uses what the client imports with its first use, half a second's work: better done
            with the client, in a thread.

    Raises:
        ConfigError: There is no key, or ``client`` is a blocking one or not alone.

    """
    if client is not None:
        require_no_other(client, package, **given)
        return asked_with(client, package, model), SdkClient(package, given=client)
    variable = f"{package.upper()}_API_KEY"
    url = given["base_url"] or os.environ.get(f"{package.upper()}_BASE_URL") or official
    key = key_for(variable, given["api_key"], keyless=not is_official(url))
    retries = MAX_RETRIES if given["max_retries"] is None else given["max_retries"]
    timeout = TIMEOUT if given["timeout"] is None else given["timeout"]

    def create(module: Any) -> Any:
        limits = module.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT))
        new_client = getattr(module, make)(
            base_url=url, api_key=key or "none", max_retries=retries, timeout=limits
        )
        warm(new_client)
        return new_client

    endpoint = Endpoint(provider=package, model=model, url=url, variable=variable, key=key)
    return endpoint, SdkClient(package, create)


def require(package: str) -> None:
    """Check that a provider's client is installed, without importing it.

    Raises:
        MissingExtraError: It is not.

    """
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(
            f"these models need the package {package}: pip install 'perdure[{package}]'",
            extra=package,
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


async def events_of(
    endpoint: Endpoint, opening: AbstractAsyncContextManager[Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a streamed answer, as the provider wrote them.

    The client opens the stream: it knows the keys, and asks again where that may help.

    Args:
        asked: Who is asked.
        opening: What a ``with_streaming_response.create`` of the client returns.

    Raises:
        ModelUnavailableError: The same may be asked again.
        ModelError: It will not help to ask again.

    """
    lines = EventLines()
    begun = False
    try:
        async with opening as response:
            begun = True
            # In frames that only its client reads, as those of Bedrock.
            if "amazon.eventstream" in str(response.headers.get("content-type", "")):
                async with await response.parse() as stream:
                    async for event in stream:
                        yield event.model_dump(mode="json", exclude_unset=True, warnings=False)
                return
            async with aclosing(response.iter_lines()) as incoming:
                async for line in incoming:
                    event = lines.take(line)
                    if event is not None:
                        yield event
    except Exception as error:
        failure = failure_of(endpoint, error, begun=begun)
        if failure is None:
            raise
        raise failure from error


def require_alone(**others: Any) -> None:
    """Check that no client options were given together with a client.

    Raises:
        ConfigError: There are options that only the client can have.

    """
    known = [f"{name}=" for name, value in others.items() if value is not None]
    if known:
        raise InvalidArgumentError(
            f"{', '.join(known)} beside client=: give them to the client itself",
            option=known[0].removesuffix("="),
        )


def require_no_other(client: Any, package: str, **others: Any) -> None:
    """Check a client that was given, and that nothing was given for one to be made with.

    Raises:
        ConfigError: It is a blocking one, or there are options that only it can have.

    """
    require_alone(**others)
    if not inspect.iscoroutinefunction(getattr(client, "close", None)):
        raise InvalidArgumentError(
            f"client= is a {type(client).__name__}: give one of the asynchronous clients of the "
            f"package {package}, whose names begin with Async",
            option="client",
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
        self._lock = anyio.Lock()
        self._client: Any = None
        self._home: Affinity | None = None
        self._users = 0

    async def get(self) -> Any:
        """Return the client, made if this loop has none yet."""
        if self._given is not None:
            return self._given
        if self._client is not None and self._is_home():
            return self._client
        if self._home is None or not self._is_home():
            self._lock, self._home, self._client = anyio.Lock(), Affinity(), None
        async with self._lock:
            if self._client is None:
                package = await anyio.to_thread.run_sync(importlib.import_module, self._package)
                assert self._make is not None  # there is a way to make it, or one was given
                self._client = await anyio.to_thread.run_sync(self._make, package)
            return self._client

    def _is_home(self) -> bool:
        return self._home is not None and self._home.stray() is None

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
        client, self._client = self._client, None
        if client is not None and self._is_home():
            closing = getattr(client, "aclose", None) or client.close
            await closing()
