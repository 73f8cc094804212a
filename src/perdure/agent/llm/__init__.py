"""Models: what an agent asks of one, those of providers, and one that follows a script."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from perdure.agent.llm.anthropic import AnthropicModel
from perdure.agent.llm.gemini import GeminiModel
from perdure.agent.llm.model import Chunk, Model, PrewarmContext, ToolSpec, Usage
from perdure.agent.llm.openai import OpenAIModel
from perdure.agent.llm.scripted import EchoModel, ScriptedModel, call
from perdure.errors import InvalidArgumentError

__all__ = [
    "AnthropicModel",
    "Chunk",
    "EchoModel",
    "GeminiModel",
    "Model",
    "OpenAIModel",
    "PrewarmContext",
    "ScriptedModel",
    "ToolSpec",
    "Usage",
    "call",
    "named_model",
]

PROVIDERS: Final[dict[str, Callable[..., Model]]] = {
    "openai": OpenAIModel,
    "openai-responses": partial(OpenAIModel, api="responses"),
    "anthropic": AnthropicModel,
    "gemini": GeminiModel,
}


def named_model(name: str, **options: Any) -> Model:
    """Return a model of a provider: ``PROVIDER:NAME``, such as ``anthropic:NAME``.

    Args:
        name: The provider, a colon, and the model's name there.
        options: What the provider's class takes, such as ``base_url``.

    Raises:
        InvalidArgumentError: There is no such provider, or no key.
        MissingExtraError: Its client is not installed.

    """
    provider, _, model = name.partition(":")
    if not model or provider not in PROVIDERS:
        known = ", ".join(f"{provider}:NAME" for provider in PROVIDERS)
        raise InvalidArgumentError(f"there is no model {name!r}: give one of {known}", model=name)
    return PROVIDERS[provider](model, **options)
