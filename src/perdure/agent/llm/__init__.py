"""Models: what an agent asks of one, and one that follows a script."""

from perdure.agent.llm.model import Chunk, Model, ToolSpec, Usage
from perdure.agent.llm.scripted import EchoModel, ScriptedModel, call

__all__ = ["Chunk", "EchoModel", "Model", "ScriptedModel", "ToolSpec", "Usage", "call"]
