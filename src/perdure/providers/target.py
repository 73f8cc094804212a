"""Whom a context is rendered for, and what comes of it: values."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from perdure.providers.issued import Issued, Issuer

Format = Literal["openai", "openai-responses", "anthropic", "gemini"]
"""The shape of a provider's API: Chat Completions, Responses, Messages, generateContent."""

ReasoningPolicy = Literal["keep", "strip_foreign", "strip_all"]
"""What becomes of reasoning, signatures and unknown fields: sent to whoever speaks the format
they came in, only to the one who issued them, or to nobody."""


class ContextTarget(msgspec.Struct, frozen=True):
    """Who will read a context."""

    format: Format
    issuer: Issuer
    reasoning: ReasoningPolicy = "strip_foreign"

    def own(self, stamp: Issued | None) -> Issued | None:
        """Return a message's stamp if what it holds may be sent; None if it is to be stripped."""
        if stamp is None or stamp.format != self.format or self.reasoning == "strip_all":
            return None
        if self.reasoning == "keep" or self.issuer.wrote(stamp):
            return stamp
        return None


class RenderedContext(msgspec.Struct, frozen=True):
    """A context as a provider takes it."""

    format: Format
    messages: list[dict[str, Any]]
    """The conversation: messages, items (Responses) or contents (Gemini)."""
    system: str | list[dict[str, Any]] | None = None
    """The instructions, where the provider takes them apart from the conversation."""

    @property
    def request(self) -> dict[str, Any]:
        """What goes into the request's body, by its names: ``create(model=…, **context.request)``.

        For Gemini these are the names of the REST API. Its SDK takes ``contents=context.messages``
        and ``config={"system_instruction": context.system}``.
        """
        if self.format == "gemini":
            return {"contents": self.messages, **_instruction(self.system)}
        if self.format == "openai-responses":
            return {"input": self.messages}
        system = {} if self.system is None else {"system": self.system}
        return {"messages": self.messages, **system}


def _instruction(system: str | list[dict[str, Any]] | None) -> dict[str, Any]:
    if system is None:
        return {}
    parts = [{"text": system}] if isinstance(system, str) else system
    return {"systemInstruction": {"parts": parts}}
