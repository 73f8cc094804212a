"""Where an MCP server is: a command that is run, or an address; and how to speak to it there."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, Protocol, final
from urllib.parse import urlsplit

from perdure.agent.mcp.connection import StderrTail
from perdure.records.values import REDACTED, redact

CONNECT_TIMEOUT: Final = 30.0
SILENCE: Final = 300.0
"""Seconds that a server at a URL may say nothing while it works."""
_PASSWORD: Final = re.compile(r"(://[^/@\s:]*:)[^/@\s]+@")


class ServerAddress(Protocol):
    """A place that a server is reached at."""

    failed: str
    """What to say if it is not: it "did not start"."""

    @property
    def name(self) -> str:
        """What to call a server of no other name."""
        ...

    def __str__(self) -> str:
        """Say where it is, without credentials."""
        ...

    def transport(self) -> contextlib.AbstractAsyncContextManager[tuple[Any, Any]]:
        """Return what yields a stream to read from and one to write to."""
        ...

    def why(self, error: BaseException) -> str:
        """Say why it was not reached."""
        ...

    @property
    def last_words(self) -> str:
        """What it wrote last, for the end of a message; mostly empty."""
        ...


@final
class Command:
    """A command, spoken to by its standard input and output.

    Args:
        words: The program and its arguments.
        env: Environment variables beside PATH, HOME and the like.
        cwd: Where it runs.

    """

    failed: str = "did not start"

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self._words = list(words)
        self._env, self._cwd = env, cwd
        self._stderr: StderrTail | None = None

    @property
    def name(self) -> str:
        """See `ServerAddress`."""
        return PurePath(self._words[0]).name

    def __str__(self) -> str:
        return shown_command(self._words)

    @contextlib.asynccontextmanager
    async def transport(self) -> AsyncIterator[tuple[Any, Any]]:
        """See `ServerAddress`."""
        from mcp import StdioServerParameters, stdio_client

        self._stderr = StderrTail()
        parameters = StdioServerParameters(
            command=self._words[0],
            args=self._words[1:],
            env=None if self._env is None else dict(self._env),
            cwd=None if self._cwd is None else os.fspath(self._cwd),
        )
        with self._stderr.pipe as pipe:
            async with stdio_client(parameters, errlog=pipe) as streams:
                pipe.close()
                yield streams

    def why(self, error: BaseException) -> str:
        """See `ServerAddress`."""
        if isinstance(error, FileNotFoundError):
            return f"there is no program {self._words[0]!r}: install it, or give its whole path"
        return str(error) or type(error).__name__

    @property
    def last_words(self) -> str:
        """See `ServerAddress`."""
        text = "" if self._stderr is None else self._stderr.text
        return f"; it last wrote:\n{text}" if text else ""


@final
class Address:
    """A URL, spoken to by streamable HTTP.

    Args:
        url: Where it listens.
        headers: HTTP headers; they are never shown.

    """

    failed: str = "could not be reached"
    last_words: str = ""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        self._url = url
        self._headers = dict(headers or {})

    @property
    def name(self) -> str:
        """See `ServerAddress`."""
        return urlsplit(self._url).hostname or self._url

    def __str__(self) -> str:
        url = urlsplit(self._url)
        return f"{url.scheme}://{url.hostname}:{url.port or ''}{url.path}"

    @contextlib.asynccontextmanager
    async def transport(self) -> AsyncIterator[tuple[Any, Any]]:
        """See `ServerAddress`."""
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        limits = httpx2.Timeout(CONNECT_TIMEOUT, read=SILENCE)
        async with (
            httpx2.AsyncClient(headers=self._headers, timeout=limits) as http,
            streamable_http_client(self._url, http_client=http) as streams,
        ):
            yield streams

    def why(self, error: BaseException) -> str:
        """See `ServerAddress`."""
        return f"nobody answers there as one: {error}"


def shown_command(words: Sequence[str]) -> str:
    """Return a command line for people, without what looks like a credential in it.

    >>> shown_command(["serve", "--api-key", "k", "--token=t", "db://me:pw@host/x"])
    'serve --api-key [redacted] --token=[redacted] db://me:[redacted]@host/x'
    """
    return " ".join(
        word if REDACTED in word else shlex.quote(word) for word in _without_credentials(words)
    )


def _without_credentials(words: Sequence[str]) -> Iterator[str]:
    is_next = False
    for word in words:
        name, given, value = word.partition("=")
        if is_next and not word.startswith("-"):
            yield REDACTED
        elif given and _is_credential(name, value):
            yield f"{name}={REDACTED}"
        else:
            yield _PASSWORD.sub(rf"\g<1>{REDACTED}@", word)
        is_next = word.startswith("-") and not given and _is_credential(word, "a value")


def _is_credential(name: str, value: str) -> bool:
    return bool(redact({name.lstrip("-"): value})[1])
