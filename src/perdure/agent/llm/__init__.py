"""Models: what an agent asks of one, those of providers, and one that follows a script."""

from perdure.agent.llm.anthropic import AnthropicModel
from perdure.agent.llm.gemini import GeminiModel
from perdure.agent.llm.model import Chunk, Model, PrewarmContext, ToolSpec, Usage
from perdure.agent.llm.named import named_model
from perdure.agent.llm.openai import OpenAIModel
from perdure.agent.llm.scripted import EchoModel, ScriptedModel, call

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
