"""Errors of model providers, as perdure's errors; never with a key in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from perdure.errors import ContextOverflowError, ModelError, ModelUnavailableError

# How providers report that a request exceeds the model's context window
#
# OpenAI and most servers that speak its protocol have a code, or name the maximum context length;
# Anthropic says that the prompt is too long, Gemini that a count exceeds the maximum, llama.cpp has
# a type of error. Some report how many tokens there were and may be, some only that there were too
# many.


_SAYS_SO: Final = re.compile(
    r"context_length_exceeded|context_window_exceeded|exceed_context_size_error|request_too_large"
    r"|maximum context length|longer than the maximum model length|context length of only"
    r"|maximum number of tokens allowed|(prompt|input) is too long"
    r"|exceeds? (the |this |this model's |the model's )?(available |maximum )?context"
    r"|context (size|length|window) (was |is )?exceeded",
    re.IGNORECASE,
)
_WITH_ANSWER: Final = (
    re.compile(r"context limit: (?P<asked>\d+) \+ (?P<answer>\d+) > (?P<window>\d+)"),
    re.compile(
        r"maximum context length is (?P<window>\d+).*?"
        r"\((?P<asked>\d+) in (?:the messages|your prompt).*?"
        r"(?P<answer>\d+) (?:in|for) the completion",
        re.DOTALL,
    ),
)
"""The window has to hold the answer, too."""
_WINDOW: Final = re.compile(
    r"maximum context length (?:is|of) (\d+)|> (\d+) maximum|tokens allowed \((\d+)\)"
    r"|n_ctx\W{1,4}(\d+)|maximum model length of (\d+)|context window of (\d+)"
    r"|context length of only (\d+)|(\d+) maximum context length",
    re.IGNORECASE,
)
_ASKED: Final = re.compile(
    r"resulted in (\d+) tokens|requested (\d+) tokens|too long: (\d+) tokens"
    r"|token count \((\d+)\)|n_prompt_tokens\W{1,4}(\d+)|\(length (\d+)\)"
    r"|requested tokens \((\d+)\)|prompt contains (\d+) tokens",
    re.IGNORECASE,
)


class Overflow(msgspec.Struct, frozen=True):
    """Facts about a request that was too long."""

    tokens: int | None = None
    """Its tokens, as the provider counts."""
    window: int | None = None
    """Tokens that it may have."""


def overflow_in(text: str) -> Overflow | None:
    """Return the context window that an error's text names; None if it is about something else.

    >>> overflow_in("prompt is too long: 208310 tokens > 200000 maximum")
    Overflow(tokens=208310, window=200000)
    >>> overflow_in("input length and `max_tokens` exceed context limit: 178959 + 64000 > 200000")
    Overflow(tokens=178959, window=136000)
    >>> overflow_in("unknown role 'wizard'") is None
    True
    """
    if _SAYS_SO.search(text) is None:
        return None
    for pattern in _WITH_ANSWER:
        match = pattern.search(text)
        if match is not None:
            return Overflow(int(match["asked"]), int(match["window"]) - int(match["answer"]))
    return Overflow(_number(_ASKED, text), _number(_WINDOW, text))


def overflow_of(error: BaseException) -> Overflow | None:
    """Return the facts of a model's error, also of a model of the application's own."""
    if not isinstance(error, ContextOverflowError):
        return overflow_in(str(error))
    tokens, window = error.facts.get("tokens"), error.facts.get("window")
    return Overflow(
        tokens if isinstance(tokens, int) else None, window if isinstance(window, int) else None
    )


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return None if match is None else int(next(filter(None, match.groups())))


# What went wrong at a provider, as perdure's errors, never with a key in it: pure


_LONGEST: Final = 500
_REFUSED: Final = 400
_TOO_LARGE: Final = 413
_NEVER_OVERFLOW: Final = frozenset({401, 403, 404, 429})
_FOR_NOW: Final = frozenset({408, 409, 425})


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is asked, for messages."""

    provider: str
    model: str
    url: str
    variable: str
    """The environment variable of its key; empty for a client that signs in by itself."""
    key: str
    """Left out of every message; empty if there is none."""

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that errors carry besides their message."""
        return {"provider": self.provider, "model": self.model}

    def __repr__(self) -> str:
        return f"{self.model} at {self.place}"

    @property
    def place(self) -> str:
        """The address without user, password and query."""
        if not self.url:
            return "its client's address"
        parts = urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"

    def without_key(self, text: str) -> str:
        """Return a text for a message: without the key, and not too long."""
        return (text.replace(self.key, "<key>") if self.key else text)[:_LONGEST]


def failure_of(endpoint: Endpoint, error: Exception, *, begun: bool) -> ModelError | None:
    """Return what a client raised as one of perdure's errors; None if it is none of the client's.

    Args:
        asked: Who was asked.
        error: What was raised.
        begun: Whether the answer had begun.

    """
    status = _status_of(error)
    if isinstance(status, int) and status < _REFUSED:
        return ended(endpoint, getattr(error, "body", None))
    if isinstance(status, int):
        return _answered(endpoint, error, status)
    names = {kind.__name__ for kind in type(error).__mro__}
    facts = endpoint.facts
    if begun and names & {"APIConnectionError", "TransportError", "ClientError"}:
        return cut(endpoint, _short(endpoint, error))
    if names & {"APITimeoutError", "TimeoutException", "TimeoutError"}:
        return ModelUnavailableError(
            f"{endpoint!r} has not answered in time: ask again, or give a longer timeout=", **facts
        )
    if names & {"APIConnectionError", "TransportError", "ClientConnectionError"}:
        return ModelUnavailableError(
            f"{endpoint!r} cannot be reached: check base_url and the network "
            f"({_short(endpoint, error.__cause__ or error)})",
            **facts,
        )
    return None


def _status_of(error: Exception) -> object:
    """Return the status with which a provider answered; Google's client calls it the code."""
    status: object = getattr(error, "status_code", None)
    is_googles = type(error).__module__.startswith("google.genai")
    return getattr(error, "code", None) if status is None and is_googles else status


def cut(endpoint: Endpoint, cause: str = "") -> ModelUnavailableError:
    """Return the error for an answer that ended before its end."""
    because = f" ({cause})" if cause else ""
    return ModelUnavailableError(
        f"the answer of {endpoint!r} was cut on its way{because}: what had come is kept, marked as "
        "interrupted; ask again",
        **endpoint.facts,
    )


def ended(endpoint: Endpoint, error: Any) -> ModelError:
    """Return the error for an answer that the provider ended with one.

    Args:
        asked: Who was asked.
        error: What the provider says of it.

    """
    text = error.get("message") if isinstance(error, Mapping) else None
    reason = endpoint.without_key(str(text or error or "it gave no reason"))
    overflow = overflow_in(str(error))
    if overflow is not None:
        return _too_long(endpoint, overflow, reason)
    return ModelUnavailableError(
        f"{endpoint!r} ended its answer with an error: {reason}", **endpoint.facts
    )


def _answered(endpoint: Endpoint, error: Exception, status: int) -> ModelError:
    retry_after = _retry_after(getattr(getattr(error, "response", None), "headers", {}))
    facts = {**endpoint.facts, "status": status, "retry_after": retry_after}
    reason = _short(endpoint, error)
    overflow = overflow_in(f"{error} {getattr(error, 'body', '')}")
    if status == _TOO_LARGE or (overflow is not None and status not in _NEVER_OVERFLOW):
        return _too_long(endpoint, overflow or Overflow(), reason, **facts)
    if status in {401, 403}:
        cure = "check what the client signs in with"
        if endpoint.variable:
            cure = f"check the environment variable {endpoint.variable}"
        return ModelError(f"{endpoint!r} refused the key ({status}): {cure}", **facts)
    if status == 404:
        return ModelError(
            f"{endpoint!r} was not found (404): check the model's name and base_url: {reason}",
            **facts,
        )
    if status == 429:
        wait = "" if retry_after is None else f"; it asks to wait {retry_after:g} s"
        return ModelUnavailableError(
            f"{endpoint!r} limits the rate of requests (429){wait}: {reason}", **facts
        )
    if status >= 500 or status in _FOR_NOW:
        return ModelUnavailableError(
            f"{endpoint!r} failed ({status}): {reason}; ask again", **facts
        )
    return ModelError(f"{endpoint!r} refused the request ({status}): {reason}", **facts)


def _too_long(
    endpoint: Endpoint, overflow: Overflow, reason: str, **facts: Any
) -> ContextOverflowError:
    message = f"{endpoint!r} was asked with more than its window holds: {reason}"
    facts = {**endpoint.facts, **facts}
    return ContextOverflowError(message, tokens=overflow.tokens, window=overflow.window, **facts)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return float(headers.get("retry-after", ""))
    except ValueError:  # none, or a date
        return None


def _short(endpoint: Endpoint, error: BaseException) -> str:
    return endpoint.without_key(str(error) or type(error).__name__)
