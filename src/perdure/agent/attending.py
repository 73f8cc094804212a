"""What people do about an agent's open matters: go on with a message, approve, settle an effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.agent.effects import is_intact, is_unknown
from perdure.agent.events import TurnEnded, TurnFailed, TurnInterrupted, Unfinished
from perdure.agent.resuming import unfinished, unknown
from perdure.codec.values import encode_value
from perdure.errors import ConfigError, SessionError
from perdure.model.keys import require_text

if TYPE_CHECKING:
    from perdure.agent.context import AgentContext
    from perdure.agent.ledger import Decision
    from perdure.agent.runtime import AgentRuntime
    from perdure.memory.ledger import Approval, Effect

__all__ = ["Attending", "Ending"]

Ending = TurnEnded | TurnInterrupted | TurnFailed
"""How a turn came to its end."""


class Attending:
    """The part of an agent that deals with what is under way, and with what was left."""

    context: AgentContext
    runtime: AgentRuntime

    # messages

    @property
    def unfinished(self) -> tuple[Unfinished, ...]:
        """The messages that were posted and not answered, oldest first.

        Those of a turn that failed are among them until the next message is answered. What waits
        or is answered just now is not.
        """
        return unfinished(self.context)

    async def resume(self) -> tuple[Ending, ...]:
        """Go on with everything that is unfinished, ahead of what was posted since.

        A turn that had begun goes on where it stopped: results of tools that are there are
        kept. Returns how each of them ended, as far as the agent came to it.

        Raises:
            SessionClosedError: The agent does not run.

        """
        endings: list[Ending] = []
        for stream in await self.runtime.resume(self.unfinished):
            endings += [event async for event in stream if isinstance(event, Ending)]
        return tuple(endings)

    async def dismiss(self, *ids: str) -> int:
        """Give up on unfinished messages, all of them or those of these ids; return how many.

        What was kept of them stays in the history.
        """
        found = [one for one in self.unfinished if not ids or one.id in ids]
        for one in found:
            self.context.ledger.drop(one.id)
        await self.context.session.save()
        return len(found)

    # approvals

    @property
    def pending_approvals(self) -> tuple[Approval, ...]:
        """The tool calls that wait for `approve` or `deny`; they do so over a restart, too."""
        return tuple(one for one in self.context.ledger.approvals if one.answer is None)

    async def approve(self, call_id: str, *, always: bool = False) -> None:
        """Let a tool call that waits run; the answer is durable.

        For a turn that is unfinished after a restart, `resume` goes on with it.

        Args:
            call_id: The tool call's id.
            always: Whether the tool may run from now on without asking.

        Raises:
            SessionError: No such call waits.

        """
        approval = self.context.ledger.answer(call_id, "approved")
        if always:
            self.context.plugins.permissions.approve(approval.tool)
        await self.context.session.save()

    async def deny(self, call_id: str, why: str | None = None) -> None:
        """Refuse a tool call that waits; the model is told, with the reason.

        Raises:
            ConfigError: The reason is no text.
            SessionError: No such call waits.

        """
        if why is not None:
            require_text("why", why)
        self.context.ledger.answer(call_id, "denied", why)
        await self.context.session.save()

    # effects

    @property
    def unknown_effects(self) -> tuple[Effect, ...]:
        """The calls of tools with side effects of which nobody knows whether they did it."""
        return unknown(self.context)

    async def resolve_effect(self, id: str, decision: Decision, *, result: Any = None) -> None:
        """Decide on an unknown effect; the decision is durable.

        Args:
            id: The effect's id, or that of its tool call.
            decision: "done": the tool has done its work, ``result`` is what came of it.
                "skip": it has not, or nobody knows, and it shall not. "replay": call it
                again, with the same idempotency key, when its unfinished turn goes on.
            result: With "done", what the model is told.

        Raises:
            SessionError: There is no such effect; or it cannot be replayed, since its turn is
                over, or the model was told already that nobody knows.
            NotStorableError: The result cannot be stored.

        """
        context, ledger = self.context, self.context.ledger
        effect = ledger.effect(id)
        if decision not in {"done", "skip", "replay"}:
            message = f"resolve_effect: {decision!r} does not fit: choose done, skip or replay"
            raise ConfigError(message, option="decision")
        going_on = {context.turn_id, *(one.turn for one in ledger.messages)}
        goes_on = not effect.told and effect.turn in going_on
        if decision == "replay" and not (goes_on and self._can_run(effect)):
            message = (
                f"the effect {effect.id} of tool {effect.tool!r} cannot be replayed: its turn is "
                "over, or does not wait for it, or its tool or arguments are gone; settle it as "
                "done or skip, and ask anew"
            )
            raise SessionError(message, agent=context.agent_id, effect=effect.id)
        if goes_on or not is_unknown(effect):
            ledger.decide(effect, decision, encode_value(result)[0])
        else:
            ledger.settled(effect, decision)
        await context.session.save()

    def _can_run(self, effect: Effect) -> bool:
        if self.context.toolbox.find(effect.tool) is None:
            return False
        calls = [call for one in self.context.session.context() for call in one.tool_calls]
        return all(is_intact(call) for call in calls if call.id == effect.call)
