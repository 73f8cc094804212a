"""Context and configuration of an agent: what it consists of, and what its parts work with."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast, final

import msgspec

from perdure._lib.options import Options
from perdure.agent.events import AgentEvent, InputQueues
from perdure.agent.ledger import AgentLedger
from perdure.agent.llm import named_model
from perdure.agent.llm.model import Model
from perdure.agent.mcp import McpServer
from perdure.agent.memory import MemoryManager
from perdure.agent.options import Features, Persistence, kept_as
from perdure.agent.plugins import AgentPlugins
from perdure.agent.requests import LLMRequestAssembler
from perdure.agent.tools import Tool, Toolbox
from perdure.autosave.options import KEEP, Autosave, Inherit
from perdure.config.persistent_config import Declared, PersistentConfig
from perdure.errors import ConfigError, InvalidArgumentError
from perdure.lease import OnDamage, OnHeld
from perdure.memory.compaction import CompactionPolicy, Summarizer
from perdure.memory.working_memory import MemoryStorage
from perdure.records.keys import DEFAULT_SESSION
from perdure.records.messages import Message, ToolCall, ToolResult
from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions

if TYPE_CHECKING:
    from perdure.memory.working_memory import WorkingMemory
    from perdure.restore.report import RestoreReport
    from perdure.session.manager import SessionManager
    from perdure.session.session import Session


# Declarations next to the code of an agent


@dataclass(eq=False)
class AgentDeclared:
    """Declarations next to an agent's code, and their values; filled by the bootstrap."""

    sessions: SessionManager | None = None
    """The manager that keeps the agent's session."""
    code_dir: Path | None = None
    """Folder of persistence.yaml, unless `AgentConfig.agent_dir` names one."""
    setup: Callable[[], object] | None = None
    """The agent's own."""
    found: Declared | None = None
    """Contents of persistence.yaml; None before the bootstrap."""
    config: PersistentConfig | None = None
    """The values that it declares; None before the bootstrap."""

    @property
    def persist_paths(self) -> tuple[str, ...]:
        """The folders in its home that persistence.yaml names; none before the bootstrap."""
        return () if self.found is None else self.found.declaration.persist_paths


@final
class AgentRuntimeState:
    """Runtime state of an agent, besides its conversation."""

    def __init__(
        self,
        agent_id: str,
        workspace: Any = None,
        custom_data: Mapping[str, Any] | None = None,
        restore_options: WorkingContextSnapshotBootstrapOptions | None = None,
    ) -> None:
        self.agent_id = agent_id
        self.workspace = workspace
        self.custom_data: dict[str, Any] = dict(custom_data or {})
        """The application's own: saved with each turn that changes it, and restored."""
        self.restore_options = restore_options
        """Set where a stored conversation is to be restored; the restore step reads it."""
        self.system_prompt = ""
        """As the processors have made it."""


@final
class AgentContext:
    """Context of handlers, steps, processors and tools."""

    is_for_tools: Final = True
    """A tool's parameter that is annotated with this class gets the agent's context."""

    def __init__(
        self,
        config: AgentConfig,
        state: AgentRuntimeState,
        memory: MemoryManager,
        *,
        toolbox: Toolbox,
        plugins: AgentPlugins,
        assembler: LLMRequestAssembler,
        emit: Callable[[AgentEvent], None],
    ) -> None:
        self.config = config
        self.state = state
        self.memory = memory
        self.toolbox = toolbox
        self.plugins = plugins
        """State that it keeps besides its conversation."""
        self.assembler = assembler
        self.ledger: AgentLedger = AgentLedger(
            memory.session, keeps_messages=config.features.history
        )
        """Its work in progress."""
        self.emit = emit
        """Emit an event to the agent's listeners."""
        self.inputs: InputQueues | None = None
        """The worker's; None before there is one."""
        self.model_calls = 0
        """Number of calls of the model in this turn."""
        self.tokens: tuple[int, int] = (0, 0)
        """Tokens that these calls read and wrote, as far as the model says so."""
        self.last_message: Message | None = None
        """The model's last message in this turn."""
        self.sets_aside = False
        """True if its first message begins a new conversation next to the stored one."""
        self.begun = False
        """True once the working context has its beginning: restored, or new."""
        self.restore_report: RestoreReport | None = None
        """Report of the restored working context; None for an agent that began without one."""
        self.saved_custom_data: tuple[bytes, dict[str, str] | None] | None = (b"{}", None)
        """The custom data as the session has it; None for data that does not count."""
        self.declared: AgentDeclared = AgentDeclared()
        """Declarations outside its code."""
        self.at_stop: list[Callable[[], Awaitable[object]]] = []
        """Awaited when the agent has stopped, the last one first: what was opened for it."""

    def __repr__(self) -> str:
        return f"<AgentContext {self.agent_id}>"

    @property
    def agent_id(self) -> str:
        """The agent's id."""
        return self.state.agent_id

    @property
    def ids(self) -> dict[str, str]:
        """Ids of the agent and of the running turn, as events have them."""
        return {"agent_id": self.agent_id, "turn_id": self.turn_id}

    @property
    def model(self) -> Model:
        """The agent's model."""
        return cast("Model", self.config.model)  # a name became a model in the config

    @property
    def session(self) -> Session:
        """The agent's session."""
        return self.memory.session

    @property
    def working_memory(self) -> WorkingMemory:
        """The session's working memory.

        Raises:
            ConfigError: The agent has none.

        """
        self._require_memory()
        return self.session.memory

    @property
    def memory_storage(self) -> MemoryStorage:
        """Storage of its memory's entries: the configured one, or else the session.

        Raises:
            ConfigError: The agent has none.

        """
        self._require_memory()
        return self.plugins.memory

    def _require_memory(self) -> None:
        if not self.config.features.memory:
            raise ConfigError(
                f"agent {self.agent_id!r} has no working memory: give Features(memory=True)",
                agent=self.agent_id,
            )

    @property
    def turn_id(self) -> str:
        """The turn that is running; empty between turns."""
        return self.memory.turn_tracker.turn_id

    def enqueue(self, event: Any) -> None:
        """Put an event for the worker before everything that users have posted."""
        if self.inputs is not None:
            self.inputs.internal.append(event)


# Configuration: what an agent consists of, and which of its parts are saved


PromptProcessor = Callable[[str, AgentContext], str | Awaitable[str]]
InputProcessor = Callable[[Message, AgentContext], Message | Awaitable[Message]]
ResultProcessor = Callable[[ToolResult, AgentContext], ToolResult | Awaitable[ToolResult]]
Answer = bool | Literal["always", "ask"]
Approve = Callable[[ToolCall, AgentContext], Answer | Awaitable[Answer]]
OnUnfinished = Literal["report", "resume"]
LifecycleHook = Callable[[AgentEvent, AgentContext], Awaitable[object] | object]
Setup = Callable[[AgentContext], Awaitable[object] | object]
Renderer = Callable[[Sequence[Message]], Sequence[Any]]


_LISTS: Final = (
    "tools",
    "mcp",
    "system_prompt_processors",
    "input_processors",
    "tool_result_processors",
    "lifecycle_hooks",
    "redact_arguments",
)
_GROUPS: Final[dict[str, type]] = {
    "compaction": CompactionPolicy,
    "restore": WorkingContextSnapshotBootstrapOptions,
    "features": Features,
}
_PARTS: Final = {"summarizer": "summarize", "memory_storage": "flush"}


class AgentConfig(Options, frozen=True, kw_only=True):
    """Configuration of an agent.

    Args:
        name: What it is called; its id begins with it where none is given.
        model: Answers: a `Model`, or a name such as "openai:NAME" or "anthropic:NAME".
        tools: Functions that the model may call.
        mcp: Servers of more tools: `McpServer`, a command line, or a URL. They are started with
            the agent, and stopped with it.
        instructions: The system prompt, before its processors; without any, a restored agent
            keeps the one that is stored with it.
        workspace: A place to work in; its ``initialize(context)`` is called first of all, if
            it has one.
        system_prompt_processors: Functions of (prompt, context), in order.
        input_processors: Functions of (message, context), before a message is kept.
        tool_result_processors: Functions of (result, context), before a result is kept.
        setup: Called with the context when everything is ready; the agent's own ``setup`` follows.
        lifecycle_hooks: Functions of (event, context), awaited in order when the agent is ready,
            when a turn begins and when it has ended, and when the agent stops.
        agent_dir: The folder of its persistence.yaml and agent.yaml; None for that of its
            code: of its class's module, or of the program that runs.
        home: The folder of its files; None for one in the store, where that has folders.
        archive: Whether the home is archived when the agent stops, and brought back when it
            starts; None: if persistence.yaml names ``persist_paths``.
        renderer: What makes of messages what the model takes; None for `Message` objects.
        summarizer: What sums up old turns; None for quotes of them.
        compaction: When old turns leave the working context.
        restore: How the working context is brought back.
        inbox_size: How many messages may wait; posting more waits.
        tool_timeout: Seconds that a tool may take; None for as long as it wants.
        approve: Called with (call, context) before a tool runs that has no decision yet:
            True for this call, "always" to remember it, "ask" to wait for `Agent.approve`. "ask"
            instead of a function waits for each such call. None lets such tools run.
        redact_arguments: Keys whose values are left out of stored tool arguments; the tool
            itself gets them.
        max_model_calls: How often the model may be called in one turn.
        max_inline_bytes: A tool's result that is larger, as JSON, is stored in its own blob;
            the conversation has a preview and where the rest is. The model is shown all of it
            as long as that fits the budget of ``compaction``.
        on_unfinished: What to do when the agent starts about messages that were not answered
            before it stopped: "report" lists them, for `Agent.resume` to continue; "resume" goes
            on at once.
        agent_type: What kind of agent it is; one that was stored as another kind is refused.
        features: Which of its parts are kept.
        custom_instructions: The file of its persistent instructions; None for the one in the
            agent's own folder.
        settings: What else is noted of its configuration, without credentials.
        session: Which of the agent's conversations.
        tenant: Whose it is, where customers share a store.
        on_held: What to do if another process holds the session.
        wait: Seconds to wait for another process.
        on_damage: What to do if the session's log is damaged: "raise", or begin "fresh", with the
            damaged one set aside, as `perdure.SessionManager.open` does.
        autosave: The session's own timers.
        persistent_session: As for `Agent.create`.
        memory_storage: Where ``agent.memory_storage`` keeps its entries; None for the session.
            It is flushed with each save, and not closed.

    Raises:
        InvalidArgumentError: A value is invalid.

    """

    name: str
    model: Model | str
    tools: Sequence[Tool | Callable[..., Any]] = ()
    mcp: Sequence[McpServer | str] = ()
    instructions: str = ""
    workspace: Any = None
    system_prompt_processors: Sequence[PromptProcessor] = ()
    input_processors: Sequence[InputProcessor] = ()
    tool_result_processors: Sequence[ResultProcessor] = ()
    setup: Setup | None = None
    lifecycle_hooks: Sequence[LifecycleHook] = ()
    agent_dir: str | os.PathLike[str] | None = None
    home: str | os.PathLike[str] | None = None
    archive: bool | None = None
    renderer: Renderer | None = None
    summarizer: Summarizer | None = None
    compaction: CompactionPolicy = CompactionPolicy()
    restore: WorkingContextSnapshotBootstrapOptions = WorkingContextSnapshotBootstrapOptions()
    inbox_size: int = 64
    tool_timeout: float | None = None
    approve: Approve | Literal["ask"] | None = None
    redact_arguments: Sequence[str] = ()
    max_model_calls: int = 64
    max_inline_bytes: int = 256 * 1024
    on_unfinished: OnUnfinished = "report"
    agent_type: str = "agent"
    features: Features = Features()
    custom_instructions: str | os.PathLike[str] | None = None
    settings: Mapping[str, Any] = {}
    session: str = DEFAULT_SESSION
    tenant: str = ""
    on_held: OnHeld = "handover"
    wait: float = 10.0
    on_damage: OnDamage = "raise"
    autosave: Autosave | Inherit | None = KEEP
    persistent_session: Persistence = None
    memory_storage: MemoryStorage | None = None

    def __post_init__(self) -> None:
        kept_as(self.persistent_session)
        _require_kinds(self)
        for name in ("inbox_size", "max_model_calls", "max_inline_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidArgumentError(
                    f"agent: invalid {name}={value!r}: it must be a whole number from 1",
                    option=name,
                    value=value,
                )
        if self.on_unfinished not in {"report", "resume"}:
            raise InvalidArgumentError(
                f"agent: on_unfinished={self.on_unfinished!r}: choose report or resume",
                option="on_unfinished",
                value=self.on_unfinished,
            )
        if not (self.approve is None or self.approve == "ask" or callable(self.approve)):
            raise InvalidArgumentError(
                f"agent: invalid approve={self.approve!r}: give a function, 'ask' or None",
                option="approve",
                value=self.approve,
            )
        timeout: object = self.tool_timeout
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
            raise InvalidArgumentError(
                f"agent: invalid tool_timeout={self.tool_timeout!r}: give seconds above 0",
                option="tool_timeout",
                value=self.tool_timeout,
            )
        if isinstance(self.model, str):
            msgspec.structs.force_setattr(self, "model", named_model(self.model))
        servers = tuple(McpServer.of(server) for server in self.mcp)
        msgspec.structs.force_setattr(self, "mcp", servers)
        if not callable(getattr(self.model, "stream", None)):
            raise InvalidArgumentError(
                f"agent: a {type(self.model).__name__} is no model: it needs a method "
                "stream(messages, tools) that yields chunks; or give a name, as 'openai:NAME'",
                option="model",
            )


def _require_kinds(config: AgentConfig) -> None:
    for name in _LISTS:
        value = getattr(config, name)
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise _of_another_kind(name, value, f"give a list, such as [{value!r}]")
    for name, kind in _GROUPS.items():
        value = getattr(config, name)
        if not isinstance(value, kind):
            raise _of_another_kind(name, value, f"give {kind.__name__}(…)")
    for name, method in _PARTS.items():
        value = getattr(config, name)
        if value is not None and not callable(getattr(value, method, None)):
            raise _of_another_kind(name, value, f"it needs a method {method}")


def _of_another_kind(name: str, value: object, cure: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"agent: invalid {name}={value!r}: {cure}", option=name, value=value
    )
