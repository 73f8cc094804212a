"""Sessions of other agent SDKs in a store of perdure, in the shape that each SDK asks for.

An adapter imports its SDK when it is used, so that this package needs none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.adapters.agent_framework import PerdureHistoryProvider as PerdureHistoryProvider
    from perdure.adapters.agent_framework_checkpoints import (
        PerdureCheckpointStorage as PerdureCheckpointStorage,
    )
    from perdure.adapters.claude_agent import PerdureSessionStore as PerdureSessionStore
    from perdure.adapters.google_adk import PerdureSessionService as PerdureSessionService
    from perdure.adapters.langgraph import PerdureSaver as PerdureSaver
    from perdure.adapters.langgraph_store import PerdureStore as PerdureStore
    from perdure.adapters.openai_agents import PerdureSession as PerdureSession
    from perdure.adapters.pydantic_ai import PerdureConversationStore as PerdureConversationStore
    from perdure.adapters.pydantic_ai_steps import PerdureStepStore as PerdureStepStore

_HOME_OF = {
    "PerdureCheckpointStorage": "perdure.adapters.agent_framework_checkpoints",
    "PerdureConversationStore": "perdure.adapters.pydantic_ai",
    "PerdureHistoryProvider": "perdure.adapters.agent_framework",
    "PerdureSaver": "perdure.adapters.langgraph",
    "PerdureSession": "perdure.adapters.openai_agents",
    "PerdureSessionService": "perdure.adapters.google_adk",
    "PerdureSessionStore": "perdure.adapters.claude_agent",
    "PerdureStepStore": "perdure.adapters.pydantic_ai_steps",
    "PerdureStore": "perdure.adapters.langgraph_store",
}

__all__ = list(_HOME_OF)

if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
