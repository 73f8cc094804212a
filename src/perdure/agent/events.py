"""What happens in an agent: events for people, and events for the worker itself.

The first kind tells of what has happened, to whoever listens (`Agent.events`, `Agent.stream`).
`TurnEnded` comes only after everything in the turn is durable. The second kind, named
``…Event``, is what the worker dispatches to its handlers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.memory.ledger import Effect
from perdure.model.messages import Message, ToolCall, ToolResult
from perdure.restore.report import RestoreReport

__all__ = [
    "AgentEvent",
    "AgentReady",
    "AgentStopped",
    "ApprovalRequested",
    "BootstrapStarted",
    "BootstrapStepDone",
    "CompactionCompleted",
    "CompactionFailed",
    "CompactionStarted",
    "ContextRestored",
    "EffectUnknown",
    "Segment",
    "ToolFinished",
    "ToolStarted",
    "TurnEnded",
    "TurnFailed",
    "TurnInterrupted",
    "TurnStarted",
    "TurnUnfinished",
    "Unfinished",
]


class Unfinished(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was admitted, and whose turn has not ended."""

    id: str
    message: Message
    at: float
    """When it was posted, in seconds since 1970."""
    turn_id: str | None = None
    """The turn that was begun for it; None if none was."""
    attempts: int = 0
    """How often its turn was begun."""
    error: str | None = None
    """The type of the error that made the turn fail, if that is how it ended."""


class AgentEvent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that happened in an agent."""

    agent_id: str


class BootstrapStarted(AgentEvent, frozen=True, kw_only=True):
    """The worker's loop runs; the first step comes next."""


class BootstrapStepDone(AgentEvent, frozen=True, kw_only=True):
    """One bootstrap step is done."""

    step: str


class ContextRestored(AgentEvent, frozen=True, kw_only=True):
    """The working context is back."""

    report: RestoreReport


class AgentReady(AgentEvent, frozen=True, kw_only=True):
    """The agent takes messages."""


class TurnEvent(AgentEvent, frozen=True, kw_only=True):
    """Something that happened in a turn."""

    turn_id: str


class TurnStarted(TurnEvent, frozen=True, kw_only=True):
    """A message is being answered."""


class Segment(TurnEvent, frozen=True, kw_only=True):
    """A piece of an answer, as it comes from the model; not durable yet."""

    text: str = ""
    reasoning: str = ""


class ToolStarted(TurnEvent, frozen=True, kw_only=True):
    """A tool is being called; that it is, is durable."""

    call: ToolCall


class ToolFinished(TurnEvent, frozen=True, kw_only=True):
    """What came of a tool call."""

    call: ToolCall
    result: ToolResult


class ApprovalRequested(TurnEvent, frozen=True, kw_only=True):
    """A tool call waits for `Agent.approve` or `Agent.deny`; that it does is durable."""

    call: ToolCall


class EffectUnknown(AgentEvent, frozen=True, kw_only=True):
    """Nobody knows whether a tool has done its work: see `Agent.resolve_effect`."""

    effect: Effect


class TurnUnfinished(TurnEvent, frozen=True, kw_only=True):
    """A message was not answered before the agent stopped: see `Agent.resume`."""

    unfinished: Unfinished


class TurnEnded(TurnEvent, frozen=True, kw_only=True):
    """A message has been answered, and everything about it is durable."""

    message: Message
    """The model's last message."""
    version: int
    """The session's version that is durable."""
    replayed: bool = False
    """Whether a turn of this id had ended before: this is what was answered then."""

    @property
    def text(self) -> str:
        """The answer."""
        return self.message.text


class TurnInterrupted(TurnEvent, frozen=True, kw_only=True):
    """The turn was stopped; what had come of the answer is kept, and marked."""

    text: str = ""
    """What had come."""


class TurnFailed(TurnEvent, frozen=True, kw_only=True):
    """The turn could not be ended."""

    error: Exception


class CompactionStarted(TurnEvent, frozen=True, kw_only=True):
    """Old turns are being turned into long-term memory."""


class CompactionCompleted(TurnEvent, frozen=True, kw_only=True):
    """The working context is smaller now."""

    turns: int
    """How many turns left it."""
    bytes_before: int
    bytes_after: int


class CompactionFailed(TurnEvent, frozen=True, kw_only=True):
    """Nothing has changed; the model is not called before a compaction succeeds."""

    error: Exception


class AgentStopped(AgentEvent, frozen=True, kw_only=True):
    """The worker has ended; this is the last event."""

    error: Exception | None = None


# for the worker's handlers


class BootstrapStartedEvent(msgspec.Struct, frozen=True):
    """Make the agent ready."""


class UserMessageReceivedEvent(msgspec.Struct, frozen=True):
    """Input has come: from a user, or as the continuation after tools."""

    message: Message | None
    sender: Literal["user", "tool"] = "user"
    turn_id: str | None = None
    """The turn's id, where whoever posted it chose one."""


class LLMUserMessageReadyEvent(msgspec.Struct, frozen=True):
    """The working context is ready for the model."""


class ToolInvocationRequestEvent(msgspec.Struct, frozen=True):
    """The model wants tools to be called: those of one message, at the same time."""

    calls: tuple[ToolCall, ...]
    resumed: bool = False
    """Whether they were asked for before the agent stopped, and may have run."""


class ResumeEvent(msgspec.Struct, frozen=True):
    """Go on with a message that was not answered."""

    unfinished: Unfinished


class ToolResultEvent(msgspec.Struct, frozen=True):
    """All tools of one message have answered, in this order."""

    results: tuple[ToolResult, ...]
