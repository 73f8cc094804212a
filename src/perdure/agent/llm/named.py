"""Models by name: ``PROVIDER:NAME``, such as ``anthropic:NAME``; `PROVIDERS` lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from perdure.errors import InvalidArgumentError

if TYPE_CHECKING:
    from perdure.agent.llm.model import Model


PROVIDERS: Final = ("openai", "openai-responses", "anthropic", "gemini")


def named_model(name: str, **options: Any) -> Model:
    """Return a model of a provider.

    Args:
        name: The provider, a colon, and the model's name there.
        options: What the provider's class takes, such as ``base_url``.

    Raises:
        InvalidArgumentError: There is no such provider, or no key.
        MissingExtraError: Its client is not installed.

    """
    provider, separator, model = name.partition(":")
    if not separator or not model or provider not in PROVIDERS:
        known = ", ".join(f"{provider_name}:NAME" for provider_name in PROVIDERS)
        raise InvalidArgumentError(f"there is no model {name!r}: give one of {known}", model=name)
    if provider == "anthropic":
        from perdure.agent.llm.anthropic import AnthropicModel

        return AnthropicModel(model, **options)
    if provider == "gemini":
        from perdure.agent.llm.gemini import GeminiModel

        return GeminiModel(model, **options)
    from perdure.agent.llm.openai import OpenAIModel

    return OpenAIModel(model, api="responses" if provider != "openai" else "chat", **options)
