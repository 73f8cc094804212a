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
    from perdure.agent.agent import Agent as Agent, AgentFactory as AgentFactory
    from perdure.agent.bootstrap import (
        BootstrapStep as BootstrapStep,
        McpServerPrewarmingStep as McpServerPrewarmingStep,
        OpenMatters as OpenMatters,
        SystemPromptProcessingStep as SystemPromptProcessingStep,
        WorkingContextSnapshotRestoreStep as WorkingContextSnapshotRestoreStep,
        WorkspaceContextInitializationStep as WorkspaceContextInitializationStep,
        open_matters as open_matters,
    )
    from perdure.agent.compaction import ModelSummarizer as ModelSummarizer
    from perdure.agent.context import (
        AgentConfig as AgentConfig,
        AgentContext as AgentContext,
        AgentRuntimeState as AgentRuntimeState,
    )
    from perdure.agent.events import (
        AgentEvent as AgentEvent,
        AgentReady as AgentReady,
        AgentStopped as AgentStopped,
        ApprovalRequested as ApprovalRequested,
        BootstrapStarted as BootstrapStarted,
        BootstrapStartedEvent as BootstrapStartedEvent,
        BootstrapStepDone as BootstrapStepDone,
        CompactionCompleted as CompactionCompleted,
        CompactionFailed as CompactionFailed,
        CompactionStarted as CompactionStarted,
        ContextRestored as ContextRestored,
        EffectUnknown as EffectUnknown,
        EventStream as EventStream,
        LLMUserMessageReadyEvent as LLMUserMessageReadyEvent,
        Segment as Segment,
        ToolFinished as ToolFinished,
        ToolInvocationRequestEvent as ToolInvocationRequestEvent,
        ToolResultEvent as ToolResultEvent,
        ToolStarted as ToolStarted,
        TurnEnded as TurnEnded,
        TurnFailed as TurnFailed,
        TurnInterrupted as TurnInterrupted,
        TurnStarted as TurnStarted,
        TurnUnfinished as TurnUnfinished,
        UnfinishedMessage as UnfinishedMessage,
        UserMessageReceivedEvent as UserMessageReceivedEvent,
    )
    from perdure.agent.handlers import (
        BootstrapEventHandler as BootstrapEventHandler,
        Handler as Handler,
        LLMUserMessageReadyEventHandler as LLMUserMessageReadyEventHandler,
        ToolInvocationRequestEventHandler as ToolInvocationRequestEventHandler,
        ToolResultEventHandler as ToolResultEventHandler,
        UserInputMessageEventHandler as UserInputMessageEventHandler,
        WorkerEventDispatcher as WorkerEventDispatcher,
    )
    from perdure.agent.llm import (
        AnthropicModel as AnthropicModel,
        Chunk as Chunk,
        EchoModel as EchoModel,
        GeminiModel as GeminiModel,
        Model as Model,
        OpenAIModel as OpenAIModel,
        PrewarmContext as PrewarmContext,
        ScriptedModel as ScriptedModel,
        ToolSpec as ToolSpec,
        Usage as Usage,
        call as call,
        named_model as named_model,
    )
    from perdure.agent.mcp import McpServer as McpServer
    from perdure.agent.memory import MemoryManager as MemoryManager, TurnTracker as TurnTracker
    from perdure.agent.options import Features as Features, PersistentSession as PersistentSession
    from perdure.agent.plugins import (
        InContextMemory as InContextMemory,
        Permissions as Permissions,
        PersistentInstructions as PersistentInstructions,
        ToolSettings as ToolSettings,
    )
    from perdure.agent.requests import (
        LLMRequest as LLMRequest,
        LLMRequestAssembler as LLMRequestAssembler,
        ResultReference as ResultReference,
        reference_of as reference_of,
        render_openai as render_openai,
        resolved as resolved,
    )
    from perdure.agent.tools import Tool as Tool, tool as tool
    from perdure.agent.worker import AgentRuntime as AgentRuntime
    from perdure.formats.memory_files import FileMemoryStorage as FileMemoryStorage
    from perdure.memory.compaction import (
        Compaction as Compaction,
        CompactionPolicy as CompactionPolicy,
        Compactor as Compactor,
        EpisodicItem as EpisodicItem,
        ExtractiveSummarizer as ExtractiveSummarizer,
        Fact as Fact,
        FactLimits as FactLimits,
        MemoryBundle as MemoryBundle,
        SemanticItem as SemanticItem,
        Summarizer as Summarizer,
        Summary as Summary,
        TurnTrace as TurnTrace,
    )
    from perdure.memory.context import estimated_tokens as estimated_tokens
    from perdure.memory.ledger import Approval as Approval, Effect as Effect
    from perdure.memory.retrieval import (
        RetrievedMemory as RetrievedMemory,
        Retriever as Retriever,
        Weights as Weights,
    )
    from perdure.memory.traces import RawTrace as RawTrace
    from perdure.memory.working_memory import (
        MemoryInfo as MemoryInfo,
        MemoryItem as MemoryItem,
        MemoryStorage as MemoryStorage,
        SessionMemoryStorage as SessionMemoryStorage,
    )
    from perdure.restore import (
        CompactionSnapshotBuilder as CompactionSnapshotBuilder,
        WorkingContextSnapshot as WorkingContextSnapshot,
        WorkingContextSnapshotBootstrapOptions as WorkingContextSnapshotBootstrapOptions,
        WorkingContextSnapshotBootstrapper as WorkingContextSnapshotBootstrapper,
        WorkingContextSnapshotSerializer as WorkingContextSnapshotSerializer,
        WorkingContextSnapshotStore as WorkingContextSnapshotStore,
    )

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
    "perdure.agent.options": ("Features", "PersistentSession"),
    "perdure.agent.plugins": (
        "InContextMemory",
        "Permissions",
        "PersistentInstructions",
        "ToolSettings",
    ),
    "perdure.agent.tools": ("Tool", "tool"),
    "perdure.agent.requests": (
        "LLMRequest",
        "LLMRequestAssembler",
        "ResultReference",
        "reference_of",
        "render_openai",
        "resolved",
    ),
    "perdure.agent.compaction": ("ModelSummarizer",),
    "perdure.agent.worker": ("AgentRuntime",),
    "perdure.formats.memory_files": ("FileMemoryStorage",),
    "perdure.memory.context": ("estimated_tokens",),
    "perdure.memory.compaction": (
        "Compaction",
        "CompactionPolicy",
        "Compactor",
        "EpisodicItem",
        "ExtractiveSummarizer",
        "Fact",
        "FactLimits",
        "MemoryBundle",
        "SemanticItem",
        "Summarizer",
        "Summary",
        "TurnTrace",
    ),
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

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # a list of strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
