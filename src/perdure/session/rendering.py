"""A working context in the shape that a model's client takes: pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from perdure.errors import ConfigError
from perdure.model.messages import Message

if TYPE_CHECKING:
    from perdure.providers import Issuer, ReasoningPolicy, RenderedContext

__all__ = ["ContextFormat", "Listed", "Rendered", "Separate", "render"]

Listed = Literal["openai", "openai-responses"]
"""Formats whose conversation holds the instructions too: a context is a list of dicts."""
Separate = Literal["anthropic", "gemini"]
"""Formats with the instructions apart: a context is a `RenderedContext`."""
ContextFormat = Literal["openai", "openai-responses", "anthropic", "gemini"] | None
"""None for `Message` objects, else whose API the context is for."""


def render(
    messages: Sequence[Message],
    format: ContextFormat,
    *,
    to: Issuer | str | None = None,
    reasoning: ReasoningPolicy = "strip_foreign",
) -> list[Any] | RenderedContext:
    """Return messages in a format, as every provider of it takes them.

    Raises:
        ConfigError: There is no such format or policy.

    """
    if format is None:
        return list(messages)
    # Imported when used: who opens a session need not render it.
    from perdure.providers import FORMATS
    from perdure.providers import render as rendered

    if format not in FORMATS:
        choices = ", ".join(map(repr, FORMATS))
        message = f"context format {format!r} is unknown: choose None, {choices}"
        raise ConfigError(message, format=format)
    context = rendered(messages, format, to=to, reasoning=reasoning)
    return context if format in {"anthropic", "gemini"} else context.messages


class _Decoding(Protocol):
    def decoded(self) -> list[Message]: ...


class _Holding(Protocol):
    """What the method below needs of a session, or of a view of one."""

    @property
    def _contents(self) -> _Decoding: ...


class Rendered:
    """What a model is shown of a session; `Session` and `SessionView` have this method."""

    __slots__ = ()

    @overload
    def context(
        self: _Holding,
        format: Listed | None = None,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> list[Any]: ...

    @overload
    def context(
        self: _Holding,
        format: Separate,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> RenderedContext: ...

    def context(
        self: _Holding,
        format: ContextFormat = None,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> list[Any] | RenderedContext:
        """Return what the model sees next: the newest whole messages within the limit.

        A provider takes it as it is, whatever became of the last turn. Calls without a result are
        shown as interrupted.

        Args:
            format: None for `Message` objects, as they are in the log. ``"openai"`` and
                ``"openai-responses"`` give a list of dicts; ``"anthropic"`` and ``"gemini"`` a
                `RenderedContext` with ``messages`` and ``system``.
            to: Who reads it, if that is not the one whose format it is: ``"deepseek"``, or an
                `Issuer` with a model.
            reasoning: Who gets reasoning, signatures and unknown fields: ``"strip_foreign"``
                sends them to the one who issued them, ``"strip_all"`` to nobody, ``"keep"`` to
                whoever speaks the format.

        Raises:
            ConfigError: There is no such format or policy.

        """
        return render(self._contents.decoded(), format, to=to, reasoning=reasoning)
