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

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

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

_HOMES = {
    "perdure.providers.context_fit": ("Format", "ReasoningPolicy", "RenderedContext"),
    "perdure.providers.formats": ("FORMATS", "parse", "parse_history", "render"),
    "perdure.providers.issued": ("Issued", "IssuedPart", "Issuer"),
    "perdure.providers.tool_pairs": ("groups", "newest"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # a list of strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
