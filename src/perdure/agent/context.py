"""The agent's context: its state, and what handlers, bootstrap steps and tools work with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, final

from perdure.agent.declared import AgentDeclared
from perdure.agent.ledger import AgentLedger
from perdure.errors import ConfigError, SessionError
from perdure.records.messages import Message, ToolCall
from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions

if TYPE_CHECKING:
    from perdure.agent.config import AgentConfig
    from perdure.agent.events import AgentEvent
    from perdure.agent.llm.model import Model
    from perdure.agent.memory import MemoryManager
    from perdure.agent.plugins import AgentPlugins
    from perdure.agent.queues import InputQueues
    from perdure.agent.requests import LLMRequestAssembler
    from perdure.agent.tools import Toolbox
    from perdure.memory.working_memory import MemoryStorage, WorkingMemory
    from perdure.restore.report import RestoreReport
    from perdure.session.session import Session


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
    """What handlers, steps, processors and tools work with."""

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
        """What it keeps beside its conversation."""
        self.assembler = assembler
        self.ledger: AgentLedger = AgentLedger(
            memory.session, keeps_messages=config.features.history
        )
        """What it has begun and not ended."""
        self.emit = emit
        """Tell the agent's listeners."""
        self.inputs: InputQueues | None = None
        """The worker's; None before there is one."""
        self.model_calls = 0
        """How often the model was called in this turn."""
        self.last_message: Message | None = None
        """What the model said last in this turn."""
        self.sets_aside = False
        """Whether its first message begins a new conversation beside what is stored."""
        self.begun = False
        """Whether the working context has its beginning: restored, or new."""
        self.restore_report: RestoreReport | None = None
        """How the working context came back; None for an agent that began anew."""
        self.saved_custom_data: tuple[bytes, dict[str, str] | None] | None = (b"{}", None)
        """What the session has of the custom data; None for something that does not count."""
        self.declared: AgentDeclared = AgentDeclared()
        """What is declared beside its code."""
        self.at_stop: list[Callable[[], Awaitable[object]]] = []
        """Awaited when the agent has stopped, the last one first: what was opened for it."""

    def __repr__(self) -> str:
        return f"<AgentContext {self.agent_id}>"

    @property
    def agent_id(self) -> str:
        """The agent's id."""
        return self.state.agent_id

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
        """Where entries of its memory are kept: the configured place, or else the session.

        Raises:
            ConfigError: The agent has none.

        """
        self._require_memory()
        return self.plugins.memory

    def _require_memory(self) -> None:
        if not self.config.features.memory:
            message = f"agent {self.agent_id!r} has no working memory: give Features(memory=True)"
            raise ConfigError(message, agent=self.agent_id)

    @property
    def turn_id(self) -> str:
        """The turn that is running; empty between turns."""
        return self.memory.turn_tracker.turn_id

    def enqueue(self, event: Any) -> None:
        """Put an event for the worker before everything that users have posted."""
        if self.inputs is not None:
            self.inputs.put_internal(event)


# Which turn is running, and which of its tool calls have no result yet
#
# Turns are numbered by the session, whose counter goes on after a restore, so no id is ever used
# twice. A result is known by turn and call id, since providers number their calls anew in each
# answer.


@final
class TurnTracker:
    """Keep track of one agent's turn.

    Args:
        number: The newest turn's number, 0 before the first.

    """

    __slots__ = ("_calls", "_number", "turn_id")

    def __init__(self, number: int = 0) -> None:
        self.turn_id: str = ""
        """The turn that is running; empty between turns."""
        self._number = number
        self._calls: list[ToolCall] = []

    @property
    def number(self) -> int:
        """The newest turn's number; counting continues after a restore."""
        return self._number

    def begin(self, turn_id: str, number: int) -> None:
        """A turn has begun."""
        self.turn_id, self._number = turn_id, number
        self._calls = []

    def end(self) -> None:
        """It is over."""
        self.turn_id = ""
        self._calls = []

    def asked(self, turn_id: str, calls: Sequence[ToolCall]) -> None:
        """The model wants tools to be called."""
        self.check(turn_id)
        self._calls.extend(calls)

    def answered(self, turn_id: str, call_id: str) -> bool:
        """A result has come; False if no call of this turn waits for it."""
        self.check(turn_id)
        for at, call in enumerate(self._calls):
            if call.id == call_id:
                del self._calls[at]
                return True
        return False

    def open_calls(self) -> tuple[ToolCall, ...]:
        """Return the calls without a result, in their order."""
        return tuple(self._calls)

    def check(self, turn_id: str) -> None:
        """Refuse what belongs to a turn that is not the running one.

        Raises:
            SessionError: It is another turn's.

        """
        if turn_id != self.turn_id:
            running = repr(self.turn_id) if self.turn_id else "no turn"
            message = f"this belongs to turn {turn_id!r}, but {running} is running"
            raise SessionError(message, turn=turn_id, running=self.turn_id)
