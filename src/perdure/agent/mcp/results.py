"""What MCP servers say of their tools, and what comes of calls, as perdure's values: pure."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

_UNFIT: Final = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST: Final = 64
_UNSURE: Final = frozenset({-32603, -32001})
"""Codes of JSON-RPC for what went wrong inside of the server, or on its way: 5xx, time-outs."""
_INVALID: Final = -32600


def tool_name(name: str, prefix: str = "") -> str:
    """Return what a model calls a tool: providers take letters, digits, ``_`` and ``-``.

    >>> tool_name("files.read", "disk_")
    'disk_files_read'
    """
    fit = _UNFIT.sub("_", prefix + name)
    return (fit if fit[:1].isalpha() or fit[:1] == "_" else f"_{fit}")[:_LONGEST]


def effect_of(annotations: Any, *, trusted: bool) -> Literal["replay", "ask"]:
    """Return what to do about a call of unknown outcome.

    A tool that just reads, or of which a second call does nothing more, may be called again, if
    its server says so and is trusted. Otherwise a person has to decide.
    """
    if annotations is None or not trusted:
        return "ask"
    hints = (annotations.read_only_hint, annotations.idempotent_hint)
    return "replay" if any(hints) else "ask"


def value_of(result: Any) -> Any:
    """Return what a tool has answered: its structured content, or its text, or all its parts."""
    if result.structured_content is not None:
        return result.structured_content
    if all(part.type == "text" for part in result.content):
        return "\n".join(part.text for part in result.content)
    return [
        part.model_dump(mode="json", by_alias=True, exclude_none=True) for part in result.content
    ]


def failure_of(result: Any) -> str | None:
    """Return what a tool says went wrong, None if it went well."""
    if not result.is_error:
        return None
    texts = [part.text for part in result.content if part.type == "text"]
    return "\n".join(texts) or "it gave no reason"


def is_refusal(error: Exception) -> bool:
    """Say whether a server has refused a call, so that it has certainly not been made."""
    code = getattr(error, "code", None)
    return isinstance(code, int) and code not in _UNSURE


def is_session_over(error: Exception) -> bool:
    """Whether a server at a URL does not know this connection, because it was restarted."""
    return getattr(error, "code", None) == _INVALID and "Session terminated" in str(error)
