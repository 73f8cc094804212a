"""What an agent is (config), what it has become (runtime state), and both for handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import msgspec

from perdure.agent.llm.model import Model
from perdure.agent.persistent import Persistence
from perdure.autosave.options import INHERIT, Autosave, Inherit
from perdure.errors import ConfigError
from perdure.lease.terms import OnHeld
from perdure.memory.compaction import CompactionPolicy, Summarizer
from perdure.model.keys import DEFAULT_SESSION
from perdure.model.messages import Message, ToolResult
from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions

if TYPE_CHECKING:
    from perdure.agent.events import AgentEvent
    from perdure.agent.inputs import InputQueues
    from perdure.agent.memory import MemoryManager
    from perdure.agent.requests import LLMRequestAssembler
    from perdure.agent.tools import Tool, Toolbox
    from perdure.restore.report import RestoreReport
    from perdure.session.session import Session

__all__ = ["AgentConfig", "AgentContext", "AgentRuntimeState"]

PromptProcessor = Callable[[str, "AgentContext"], str | Awaitable[str]]
InputProcessor = Callable[[Message, "AgentContext"], Message | Awaitable[Message]]
ResultProcessor = Callable[[ToolResult, "AgentContext"], ToolResult | Awaitable[ToolResult]]
Setup = Callable[["AgentContext"], Awaitable[object] | object]
Renderer = Callable[[Sequence[Message]], Sequence[Any]]


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent is made of.

    Args:
        name: What it is called; its id begins with it where none is given.
        model: Answers.
        tools: Functions that the model may call.
        instructions: The system prompt, before its processors.
        workspace: A place to work in; its ``initialize(context)`` is called first of all, if
            it has one.
        system_prompt_processors: Functions of (prompt, context), in order.
        input_processors: Functions of (message, context), before a message is kept.
        tool_result_processors: Functions of (result, context), before a result is kept.
        setup: Called with the context when everything is ready.
        renderer: What makes of messages what the model takes; None for `Message` objects.
        summarizer: What sums up old turns; None for quotes of them.
        compaction: When old turns leave the working context.
        restore: How the working context is brought back.
        inbox_size: How many messages may wait; posting more waits.
        tool_timeout: Seconds that a tool may take; None for as long as it wants.
        max_model_calls: How often the model may be called in one turn.
        session: Which of the agent's conversations.
        tenant: Whose it is, where customers share a store.
        on_held: What to do if another process holds the session.
        wait: Seconds to wait for another process.
        autosave: The session's own timers.
        persistent_session: As for `Agent.create`.

    Raises:
        ConfigError: A value does not fit.

    """

    name: str
    model: Model
    tools: Sequence[Tool | Callable[..., Any]] = ()
    instructions: str = ""
    workspace: Any = None
    system_prompt_processors: Sequence[PromptProcessor] = ()
    input_processors: Sequence[InputProcessor] = ()
    tool_result_processors: Sequence[ResultProcessor] = ()
    setup: Setup | None = None
    renderer: Renderer | None = None
    summarizer: Summarizer | None = None
    compaction: CompactionPolicy = CompactionPolicy()
    restore: WorkingContextSnapshotBootstrapOptions = WorkingContextSnapshotBootstrapOptions()
    inbox_size: int = 64
    tool_timeout: float | None = None
    max_model_calls: int = 64
    session: str = DEFAULT_SESSION
    tenant: str = ""
    on_held: OnHeld = "handover"
    wait: float = 10.0
    autosave: Autosave | Inherit | None = INHERIT
    persistent_session: Persistence = None

    def __post_init__(self) -> None:
        for name in ("inbox_size", "max_model_calls"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                message = f"agent: {name}={value!r} does not fit: it must be a whole number from 1"
                raise ConfigError(message, option=name, value=value)
        if self.tool_timeout is not None and not self.tool_timeout > 0:
            message = (
                f"agent: tool_timeout={self.tool_timeout!r} does not fit: give seconds above 0"
            )
            raise ConfigError(message, option="tool_timeout", value=self.tool_timeout)
        if not callable(getattr(self.model, "stream", None)):
            message = (
                f"agent: a {type(self.model).__name__} is no model: it needs a method "
                "stream(messages, tools) that yields chunks"
            )
            raise ConfigError(message, option="model")


@final
class AgentRuntimeState:
    """What an agent has become, beside its conversation."""

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
    """What handlers, steps, processors and tools work with."""

    def __init__(
        self,
        config: AgentConfig,
        state: AgentRuntimeState,
        memory: MemoryManager,
        *,
        toolbox: Toolbox,
        assembler: LLMRequestAssembler,
        emit: Callable[[AgentEvent], None],
    ) -> None:
        self.config = config
        self.state = state
        self.memory = memory
        self.toolbox = toolbox
        self.assembler = assembler
        self.emit = emit
        """Tell the agent's listeners."""
        self.inputs: InputQueues | None = None
        """Made by the worker when it runs."""
        self.model_calls = 0
        """How often the model was called in this turn."""
        self.last_message: Message | None = None
        """What the model said last in this turn."""
        self.begun = False
        """Whether the working context has its beginning: restored, or new."""
        self.restore_report: RestoreReport | None = None
        """How the working context came back; None for an agent that began anew."""
        self.saved_custom_data: tuple[bytes, dict[str, str] | None] = (b"{}", None)
        """What the session has of the custom data."""

    def __repr__(self) -> str:
        return f"<AgentContext {self.agent_id}>"

    @property
    def agent_id(self) -> str:
        """The agent's id."""
        return self.state.agent_id

    @property
    def session(self) -> Session:
        """The agent's session."""
        return self.memory.session

    @property
    def turn_id(self) -> str:
        """The turn that is running; empty between turns."""
        return self.memory.turn_tracker.turn_id

    def enqueue(self, event: Any) -> None:
        """Put an event for the worker before everything that users have posted."""
        if self.inputs is not None:
            self.inputs.put_internal(event)
