"""Contexts as providers take them, and replies as messages: pure.

`render` turns messages into a request that keeps a provider's rules, for any history: calls
and results are paired, roles alternate where they have to, fields are as `request_rules` has them,
and reasoning and signatures go only to the provider that issued them. `parse` makes a message of
a provider's reply, without losing a field; rendering it again for the same provider gives the
reply's own content back.

    render(messages, "openai").messages            a list for `chat.completions.create`
    render(messages, "openai-responses").messages  a list of items for `responses.create`
    render(messages, "anthropic").request          `messages`, and `system` if there is one
    render(messages, "gemini").request             `contents`, and `systemInstruction`

    session.append(parse(reply, "anthropic"))      the reply as a dict, or as the SDK's object
    session.append(*parse_history(history, "openai"))      another program's list of messages

Each format has a module of its own (`perdure.providers.anthropic` and so on), which holds
that provider's rules: ``render(exchanges, target)``, ``parse(reply)`` and ``parse_history``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.providers.context_fit import (
        Format as Format,
        ReasoningPolicy as ReasoningPolicy,
        RenderedContext as RenderedContext,
    )
    from perdure.providers.formats import (
        FORMATS as FORMATS,
        parse as parse,
        parse_history as parse_history,
        render as render,
    )
    from perdure.providers.issued import (
        Issued as Issued,
        IssuedPart as IssuedPart,
        Issuer as Issuer,
    )
    from perdure.providers.tool_pairs import groups as groups, newest as newest

_HOME_OF = {
    "FORMATS": "formats",
    "Format": "context_fit",
    "Issued": "issued",
    "Issuer": "issued",
    "IssuedPart": "issued",
    "ReasoningPolicy": "context_fit",
    "RenderedContext": "context_fit",
    "groups": "tool_pairs",
    "newest": "tool_pairs",
    "parse": "formats",
    "parse_history": "formats",
    "render": "formats",
}
_MODULES = ("anthropic", "gemini", "openai", "openai_responses")

__all__ = list(_HOME_OF)


if not TYPE_CHECKING:  # a checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"perdure.providers.{name}")
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'perdure.providers' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"perdure.providers.{home}"), name)
        globals()[name] = value
        return value
