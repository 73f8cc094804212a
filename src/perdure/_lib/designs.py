"""Names from the designs that perdure began with, for errors that say what each is called here.

These are the classes, methods and options whose names differ; docs/seeds.md has all of them, with
the reasons.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

HERE: Final[Mapping[str, tuple[str, ...]]] = {
    "AgentContextConfig": ("perdure.agent.AgentConfig",),
    "AgentContextFeatures": ("perdure.agent.Features",),
    "AgentInputEventQueueManager": (
        "perdure.agent.AgentContext.enqueue",
        "perdure.agent.Agent.post_user_message",
    ),
    "AgentRestoreService": ("perdure.agent.AgentFactory.restore_agent",),
    "AgentWorker": ("perdure.agent.AgentRuntime",),
    "BaseAgent": ("perdure.agent.Agent",),
    "BaseAgentConfig": ("perdure.agent.AgentConfig",),
    "BaseLLM": ("perdure.agent.Model",),
    "ExecutionContext": ("perdure.Session",),
    "FileAgentPersistence": ("perdure.formats.FolderStorage",),
    "FileMemoryStore": (
        "perdure.Session",
        "perdure.store_for",
    ),
    "FilePersistentInstructionsStorage": ("perdure.agent.PersistentInstructions",),
    "IAgentPersistence": ("perdure.formats.StateStorage",),
    "IAgentPersistenceStorage": ("perdure.formats.StateStorage",),
    "IMemoryStorage": ("perdure.agent.MemoryStorage",),
    "IdempotencyCache": (
        "perdure.agent.Effect",
        "agent.unknown_effects",
    ),
    "InContextMemoryPlugin": (
        "perdure.agent.InContextMemory",
        "agent.notes",
    ),
    "Kernel": ("perdure.Session",),
    "MemoryIngestInputProcessor": ("memory.ingest_user_message",),
    "MemoryIngestToolResultProcessor": ("memory.ingest_tool_result",),
    "MultimodalMessageBuilder": ("perdure.Message.user",),
    "OpenAIChatRenderer": ("perdure.agent.render_openai",),
    "PersistentInstructionsPlugin": ("perdure.agent.PersistentInstructions",),
    "S3AgentPersistence": ("perdure.stores.S3Store",),
    "SnapshotEngine": (
        "perdure.checkpoints.CheckpointEngine",
        "session.checkpoints",
    ),
    "SnapshotId": ("perdure.checkpoints.Checkpoint.id",),
    "SnapshotState": (
        "perdure.checkpoints.Checkpoint",
        "perdure.checkpoints.CheckpointState",
    ),
    "StreamingResponseHandler": ("perdure.agent.LLMUserMessageReadyEventHandler",),
    "ToolPermissionManager": (
        "perdure.agent.Permissions",
        "agent.permissions",
    ),
    "_create_runtime_with_id": ("perdure.agent.AgentFactory.create_agent(agent_id=)",),
    "append_message": ("session.append",),
    "async_run": ("perdure.agent.AgentRuntime.start",),
    "autoSaveIntervalMs": ("perdure.agent.PersistentSession.autosave_interval",),
    "base_dir": ("perdure.connect(url=)",),
    "compaction_required": (
        "perdure.agent.MemoryManager.request_compaction",
        "memory.is_due",
    ),
    "enqueue_internal_system_event": ("perdure.agent.AgentContext.enqueue",),
    "enqueue_tool_invocation_request": ("perdure.agent.ToolInvocationRequestEvent",),
    "enqueue_tool_result": ("perdure.agent.ToolResultEvent",),
    "enqueue_user_message": ("perdure.agent.Agent.post_user_message",),
    "getState": ("perdure.export_state",),
    "inContextMemory": ("perdure.agent.Features.in_context_memory",),
    "input_processor": ("perdure.agent.AgentConfig.input_processors",),
    "loadOnCreate": ("perdure.agent.PersistentSession.load_on_create",),
    "loadPersistedSession": ("agent.load_persisted_session",),
    "maxContextTokens": ("perdure.agent.CompactionPolicy.max_tokens",),
    "migrateFromV0": ("perdure.formats.Migrations.add",),
    "migratePersistedState": (
        "perdure.formats.Migrations.apply",
        "perdure.formats.read_state",
    ),
    "persistentInstructions": ("perdure.agent.Features.persistent_instructions",),
    "persistentSession": (
        "perdure.agent.Agent.create(persistent_session=)",
        "perdure.agent.AgentConfig.persistent_session",
        "perdure.agent.Features.persistent_session",
    ),
    "prune_raw_traces": ("sessions.prune",),
    "queue_size": ("perdure.agent.AgentConfig.inbox_size",),
    "runtime_state": ("perdure.agent.AgentContext.state",),
    "saveOnDestroy": ("perdure.agent.PersistentSession.save_on_close",),
    "savePersistedSession": ("agent.save_persisted_session",),
    "system_prompt_processor": ("perdure.agent.AgentConfig.system_prompt_processors",),
    "tool_execution_result_processor": ("perdure.agent.AgentConfig.tool_result_processors",),
}
"""Counterparts of the designs' names; ``session``, ``sessions``, ``agent`` and ``memory`` are the
objects."""

_PUBLIC: Final = (
    "perdure",
    "perdure.adapters",
    "perdure.agent",
    "perdure.checkpoints",
    "perdure.formats",
    "perdure.restore",
    "perdure.stores",
    "perdure.types",
)


def pointer(name: str) -> str:
    """Return where a name leads, as the end of an error's message; empty if nowhere.

    >>> pointer("SnapshotEngine")
    '; here it is perdure.checkpoints.CheckpointEngine or session.checkpoints, see docs/seeds.md'
    >>> pointer("AgentFactory")
    '; it is in perdure.agent'
    >>> pointer("no_such_name")
    ''
    """
    if name in HERE:
        return f"; here it is {' or '.join(HERE[name])}, see docs/seeds.md"
    if name[:1].isupper():  # no submodule: looking for those imports nothing else
        for module in _PUBLIC:
            if name in importlib.import_module(module).__all__:
                return f"; it is in {module}"
    return ""


def lookup(owner: object, name: str) -> Any:
    """Raise for an attribute that an object does not have: the ``__getattr__`` of its class."""
    if name in HERE:
        message = f"{type(owner).__name__!r} object has no attribute {name!r}{pointer(name)}"
        raise AttributeError(message, name=name, obj=owner)
    return object.__getattribute__(owner, name)  # raises as it would without this function
