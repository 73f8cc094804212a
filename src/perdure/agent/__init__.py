"""perdure's own agents: a worker that answers messages in a session that keeps itself.

    async with perdure.connect("file:~/agents") as sessions:
        factory = AgentFactory(sessions)
        config = AgentConfig(name="helper", model=EchoModel())
        async with await factory.create_agent(config, agent_id="ada") as agent:
            print(await agent.ask("Hello"))

The layers below know nothing of agents; an agent knows its session, and never its store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.agent.agent import Agent as Agent
    from perdure.agent.agent import AgentFactory as AgentFactory
    from perdure.agent.bootstrap import BootstrapStep as BootstrapStep
    from perdure.agent.bootstrap import McpServerPrewarmingStep as McpServerPrewarmingStep
    from perdure.agent.bootstrap import OpenMatters as OpenMatters
    from perdure.agent.bootstrap import SystemPromptProcessingStep as SystemPromptProcessingStep
    from perdure.agent.bootstrap import (
        WorkingContextSnapshotRestoreStep as WorkingContextSnapshotRestoreStep,
    )
    from perdure.agent.bootstrap import (
        WorkspaceContextInitializationStep as WorkspaceContextInitializationStep,
    )
    from perdure.agent.bootstrap import open_matters as open_matters
    from perdure.agent.context import AgentConfig as AgentConfig
    from perdure.agent.context import AgentContext as AgentContext
    from perdure.agent.context import AgentRuntimeState as AgentRuntimeState
    from perdure.agent.context import Features as Features
    from perdure.agent.context import PersistentSession as PersistentSession
    from perdure.agent.events import AgentEvent as AgentEvent
    from perdure.agent.events import AgentReady as AgentReady
    from perdure.agent.events import AgentStopped as AgentStopped
    from perdure.agent.events import ApprovalRequested as ApprovalRequested
    from perdure.agent.events import BootstrapStarted as BootstrapStarted
    from perdure.agent.events import BootstrapStartedEvent as BootstrapStartedEvent
    from perdure.agent.events import BootstrapStepDone as BootstrapStepDone
    from perdure.agent.events import CompactionCompleted as CompactionCompleted
    from perdure.agent.events import CompactionFailed as CompactionFailed
    from perdure.agent.events import CompactionStarted as CompactionStarted
    from perdure.agent.events import ContextRestored as ContextRestored
    from perdure.agent.events import EffectUnknown as EffectUnknown
    from perdure.agent.events import EventStream as EventStream
    from perdure.agent.events import LLMUserMessageReadyEvent as LLMUserMessageReadyEvent
    from perdure.agent.events import Segment as Segment
    from perdure.agent.events import ToolFinished as ToolFinished
    from perdure.agent.events import ToolInvocationRequestEvent as ToolInvocationRequestEvent
    from perdure.agent.events import ToolResultEvent as ToolResultEvent
    from perdure.agent.events import ToolStarted as ToolStarted
    from perdure.agent.events import TurnEnded as TurnEnded
    from perdure.agent.events import TurnFailed as TurnFailed
    from perdure.agent.events import TurnInterrupted as TurnInterrupted
    from perdure.agent.events import TurnStarted as TurnStarted
    from perdure.agent.events import TurnUnfinished as TurnUnfinished
    from perdure.agent.events import UnfinishedMessage as UnfinishedMessage
    from perdure.agent.events import UserMessageReceivedEvent as UserMessageReceivedEvent
    from perdure.agent.handlers import BootstrapEventHandler as BootstrapEventHandler
    from perdure.agent.handlers import Handler as Handler
    from perdure.agent.handlers import (
        LLMUserMessageReadyEventHandler as LLMUserMessageReadyEventHandler,
    )
    from perdure.agent.handlers import (
        ToolInvocationRequestEventHandler as ToolInvocationRequestEventHandler,
    )
    from perdure.agent.handlers import ToolResultEventHandler as ToolResultEventHandler
    from perdure.agent.handlers import UserInputMessageEventHandler as UserInputMessageEventHandler
    from perdure.agent.handlers import WorkerEventDispatcher as WorkerEventDispatcher
    from perdure.agent.llm import AnthropicModel as AnthropicModel
    from perdure.agent.llm import Chunk as Chunk
    from perdure.agent.llm import EchoModel as EchoModel
    from perdure.agent.llm import GeminiModel as GeminiModel
    from perdure.agent.llm import Model as Model
    from perdure.agent.llm import OpenAIModel as OpenAIModel
    from perdure.agent.llm import PrewarmContext as PrewarmContext
    from perdure.agent.llm import ScriptedModel as ScriptedModel
    from perdure.agent.llm import ToolSpec as ToolSpec
    from perdure.agent.llm import Usage as Usage
    from perdure.agent.llm import call as call
    from perdure.agent.llm import named_model as named_model
    from perdure.agent.mcp import McpServer as McpServer
    from perdure.agent.memory import MemoryManager as MemoryManager
    from perdure.agent.memory import TurnTracker as TurnTracker
    from perdure.agent.plugins import InContextMemory as InContextMemory
    from perdure.agent.plugins import PersistentInstructions as PersistentInstructions
    from perdure.agent.plugins import ToolSettings as ToolSettings
    from perdure.agent.requests import LLMRequest as LLMRequest
    from perdure.agent.requests import LLMRequestAssembler as LLMRequestAssembler
    from perdure.agent.requests import render_openai as render_openai
    from perdure.agent.results import ResultReference as ResultReference
    from perdure.agent.results import reference_of as reference_of
    from perdure.agent.results import resolved as resolved
    from perdure.agent.runtime import AgentRuntime as AgentRuntime
    from perdure.agent.summarizer import ModelSummarizer as ModelSummarizer
    from perdure.agent.tools import Permissions as Permissions
    from perdure.agent.tools import Tool as Tool
    from perdure.agent.tools import tool as tool
    from perdure.agent.worker import AgentWorker as AgentWorker
    from perdure.formats.memory_files import FileMemoryStorage as FileMemoryStorage
    from perdure.memory.compaction import Compaction as Compaction
    from perdure.memory.compaction import CompactionPolicy as CompactionPolicy
    from perdure.memory.compaction import Compactor as Compactor
    from perdure.memory.compaction import ExtractiveSummarizer as ExtractiveSummarizer
    from perdure.memory.compaction import Summarizer as Summarizer
    from perdure.memory.compaction import Summary as Summary
    from perdure.memory.compaction import TurnTrace as TurnTrace
    from perdure.memory.context import estimated_tokens as estimated_tokens
    from perdure.memory.facts import EpisodicItem as EpisodicItem
    from perdure.memory.facts import Fact as Fact
    from perdure.memory.facts import FactLimits as FactLimits
    from perdure.memory.facts import MemoryBundle as MemoryBundle
    from perdure.memory.facts import SemanticItem as SemanticItem
    from perdure.memory.ledger import Approval as Approval
    from perdure.memory.ledger import Effect as Effect
    from perdure.memory.retrieval import RetrievedMemory as RetrievedMemory
    from perdure.memory.retrieval import Retriever as Retriever
    from perdure.memory.retrieval import Weights as Weights
    from perdure.memory.traces import RawTrace as RawTrace
    from perdure.memory.working_memory import MemoryInfo as MemoryInfo
    from perdure.memory.working_memory import MemoryItem as MemoryItem
    from perdure.memory.working_memory import MemoryStorage as MemoryStorage
    from perdure.memory.working_memory import SessionMemoryStorage as SessionMemoryStorage
    from perdure.restore import CompactionSnapshotBuilder as CompactionSnapshotBuilder
    from perdure.restore import WorkingContextSnapshot as WorkingContextSnapshot
    from perdure.restore import (
        WorkingContextSnapshotBootstrapOptions as WorkingContextSnapshotBootstrapOptions,
    )
    from perdure.restore import (
        WorkingContextSnapshotBootstrapper as WorkingContextSnapshotBootstrapper,
    )
    from perdure.restore import WorkingContextSnapshotSerializer as WorkingContextSnapshotSerializer
    from perdure.restore import WorkingContextSnapshotStore as WorkingContextSnapshotStore

_HOMES = {
    "perdure.agent.agent": ("Agent", "AgentFactory"),
    "perdure.agent.bootstrap": (
        "BootstrapStep",
        "McpServerPrewarmingStep",
        "OpenMatters",
        "SystemPromptProcessingStep",
        "WorkingContextSnapshotRestoreStep",
        "WorkspaceContextInitializationStep",
        "open_matters",
    ),
    "perdure.agent.context": (
        "AgentConfig",
        "AgentContext",
        "AgentRuntimeState",
        "Features",
        "PersistentSession",
    ),
    "perdure.agent.events": (
        "AgentEvent",
        "AgentReady",
        "AgentStopped",
        "ApprovalRequested",
        "BootstrapStarted",
        "BootstrapStartedEvent",
        "BootstrapStepDone",
        "CompactionCompleted",
        "CompactionFailed",
        "CompactionStarted",
        "ContextRestored",
        "EffectUnknown",
        "EventStream",
        "LLMUserMessageReadyEvent",
        "Segment",
        "ToolFinished",
        "ToolInvocationRequestEvent",
        "ToolResultEvent",
        "ToolStarted",
        "TurnEnded",
        "TurnFailed",
        "TurnInterrupted",
        "TurnStarted",
        "TurnUnfinished",
        "UnfinishedMessage",
        "UserMessageReceivedEvent",
    ),
    "perdure.agent.handlers": (
        "BootstrapEventHandler",
        "Handler",
        "LLMUserMessageReadyEventHandler",
        "ToolInvocationRequestEventHandler",
        "ToolResultEventHandler",
        "UserInputMessageEventHandler",
        "WorkerEventDispatcher",
    ),
    "perdure.agent.llm": (
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
    ),
    "perdure.agent.mcp": ("McpServer",),
    "perdure.agent.memory": ("MemoryManager", "TurnTracker"),
    "perdure.agent.plugins": ("InContextMemory", "PersistentInstructions", "ToolSettings"),
    "perdure.agent.tools": ("Permissions", "Tool", "tool"),
    "perdure.agent.requests": ("LLMRequest", "LLMRequestAssembler", "render_openai"),
    "perdure.agent.results": ("ResultReference", "reference_of", "resolved"),
    "perdure.agent.runtime": ("AgentRuntime",),
    "perdure.agent.summarizer": ("ModelSummarizer",),
    "perdure.agent.worker": ("AgentWorker",),
    "perdure.formats.memory_files": ("FileMemoryStorage",),
    "perdure.memory.context": ("estimated_tokens",),
    "perdure.memory.compaction": (
        "Compaction",
        "CompactionPolicy",
        "Compactor",
        "ExtractiveSummarizer",
        "Summarizer",
        "Summary",
        "TurnTrace",
    ),
    "perdure.memory.facts": ("EpisodicItem", "Fact", "FactLimits", "MemoryBundle", "SemanticItem"),
    "perdure.memory.working_memory": (
        "MemoryInfo",
        "MemoryItem",
        "MemoryStorage",
        "SessionMemoryStorage",
    ),
    "perdure.memory.ledger": ("Approval", "Effect"),
    "perdure.memory.traces": ("RawTrace",),
    "perdure.memory.retrieval": ("RetrievedMemory", "Retriever", "Weights"),
    "perdure.restore": (
        "CompactionSnapshotBuilder",
        "WorkingContextSnapshot",
        "WorkingContextSnapshotBootstrapOptions",
        "WorkingContextSnapshotBootstrapper",
        "WorkingContextSnapshotSerializer",
        "WorkingContextSnapshotStore",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def _order(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


__all__ = sorted(_HOME_OF, key=_order)  # noqa: PLE0605  # a list of strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
