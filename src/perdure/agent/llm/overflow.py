"""How providers say that a request is longer than the model's window, and what they tell of it.

OpenAI and most servers that speak its protocol have a code, or name the maximum context length;
Anthropic says that the prompt is too long, Gemini that a count exceeds the maximum, llama.cpp has a
type of error. Some tell how many tokens it was and may be, some only that it was too many.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from perdure.errors import ContextOverflowError

__all__ = ["Overflow", "overflow_in", "overflow_of"]

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
    """What is known of a request that was too long."""

    tokens: int | None = None
    """How many tokens it had, as the provider counts."""
    window: int | None = None
    """How many it may have."""


def overflow_in(text: str) -> Overflow | None:
    """Return what an error's text tells of a window; None if it is about something else.

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
        found = pattern.search(text)
        if found is not None:
            return Overflow(int(found["asked"]), int(found["window"]) - int(found["answer"]))
    return Overflow(_number(_ASKED, text), _number(_WINDOW, text))


def overflow_of(error: BaseException) -> Overflow | None:
    """Return what an error of a model tells, also of a model of the application's own."""
    if not isinstance(error, ContextOverflowError):
        return overflow_in(str(error))
    tokens, window = error.facts.get("tokens"), error.facts.get("window")
    return Overflow(
        tokens if isinstance(tokens, int) else None, window if isinstance(window, int) else None
    )


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else int(next(filter(None, found.groups())))
