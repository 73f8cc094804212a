"""What went wrong at a provider, as perdure's errors, never with a key in it: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from perdure.agent.llm.overflow import Overflow, overflow_in
from perdure.errors import ContextOverflowError, ModelError, ModelUnavailableError

__all__ = ["Asked", "cut", "ended", "failure_of"]

_LONGEST: Final = 500
_REFUSED: Final = 400
_TOO_LARGE: Final = 413
_NEVER_OVERFLOW: Final = frozenset({401, 403, 404, 429})
_FOR_NOW: Final = frozenset({408, 409, 425, 429})


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Who was asked, for messages."""

    provider: str
    model: str
    url: str
    variable: str
    """The environment variable of its key; empty for a client that signs in by itself."""
    key: str
    """Left out of every message; empty if there is none."""

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


def failure_of(asked: Asked, error: Exception, *, begun: bool) -> ModelError | None:
    """Return what a client raised as one of perdure's errors; None if it is none of the client's.

    Args:
        asked: Who was asked.
        error: What was raised.
        begun: Whether the answer had begun.

    """
    status = _status_of(error)
    if isinstance(status, int) and status < _REFUSED:
        return ended(asked, getattr(error, "body", None))
    if isinstance(status, int):
        return _answered(asked, error, status)
    names = {kind.__name__ for kind in type(error).__mro__}
    facts = {"provider": asked.provider, "model": asked.model}
    if begun and names & {"APIConnectionError", "TransportError", "ClientError"}:
        return cut(asked, _short(asked, error))
    if names & {"APITimeoutError", "TimeoutException", "TimeoutError"}:
        message = f"{asked!r} has not answered in time: ask again, or give a longer timeout="
        return ModelUnavailableError(message, **facts)
    if names & {"APIConnectionError", "TransportError", "ClientConnectionError"}:
        message = (
            f"{asked!r} cannot be reached: check base_url and the network "
            f"({_short(asked, error.__cause__ or error)})"
        )
        return ModelUnavailableError(message, **facts)
    return None


def _status_of(error: Exception) -> object:
    """Return the status with which a provider answered; Google's client calls it the code."""
    status: object = getattr(error, "status_code", None)
    is_googles = type(error).__module__.startswith("google.genai")
    return getattr(error, "code", None) if status is None and is_googles else status


def cut(asked: Asked, cause: str = "") -> ModelUnavailableError:
    """Return the error for an answer that ended before its end."""
    because = f" ({cause})" if cause else ""
    message = (
        f"the answer of {asked!r} was cut on its way{because}: what had come is kept, marked as "
        "interrupted; ask again"
    )
    return ModelUnavailableError(message, provider=asked.provider, model=asked.model)


def ended(asked: Asked, error: Any) -> ModelError:
    """Return the error for an answer that the provider ended with one.

    Args:
        asked: Who was asked.
        error: What the provider says of it.

    """
    said = error.get("message") if isinstance(error, Mapping) else None
    why = asked.without_key(str(said or error or "it gave no reason"))
    overflow = overflow_in(str(error))
    if overflow is not None:
        return _too_long(asked, overflow, why)
    message = f"{asked!r} ended its answer with an error: {why}"
    return ModelUnavailableError(message, provider=asked.provider, model=asked.model)


def _answered(asked: Asked, error: Exception, status: int) -> ModelError:
    retry_after = _retry_after(getattr(getattr(error, "response", None), "headers", {}))
    facts: dict[str, Any] = {
        "provider": asked.provider,
        "model": asked.model,
        "status": status,
        "retry_after": retry_after,
    }
    why = _short(asked, error)
    overflow = overflow_in(f"{error} {getattr(error, 'body', '')}")
    if status == _TOO_LARGE or (overflow is not None and status not in _NEVER_OVERFLOW):
        return _too_long(asked, overflow or Overflow(), why, **facts)
    if status in {401, 403}:
        cure = "check what the client signs in with"
        if asked.variable:
            cure = f"check the environment variable {asked.variable}"
        text = f"{asked!r} refused the key ({status}): {cure}"
        return ModelError(text, **facts)
    if status == 404:
        text = f"{asked!r} was not found (404): check the model's name and base_url: {why}"
        return ModelError(text, **facts)
    if status == 429:
        wait = "" if retry_after is None else f"; it asks to wait {retry_after:g} s"
        text = f"{asked!r} limits the rate of requests (429){wait}: {why}"
        return ModelUnavailableError(text, **facts)
    if status >= 500 or status in _FOR_NOW:
        return ModelUnavailableError(f"{asked!r} failed ({status}): {why}; ask again", **facts)
    return ModelError(f"{asked!r} refused the request ({status}): {why}", **facts)


def _too_long(asked: Asked, overflow: Overflow, why: str, **facts: Any) -> ContextOverflowError:
    message = f"{asked!r} was asked with more than its window holds: {why}"
    facts = {"provider": asked.provider, "model": asked.model, **facts}
    return ContextOverflowError(message, tokens=overflow.tokens, window=overflow.window, **facts)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return float(headers.get("retry-after", ""))
    except ValueError:  # none, or a date
        return None


def _short(asked: Asked, error: BaseException) -> str:
    return asked.without_key(str(error) or type(error).__name__)
