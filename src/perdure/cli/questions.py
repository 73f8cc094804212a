"""What an agent has begun and not ended, on a terminal: told when it comes back, and asked about.

A call that waits for an answer waits durably: whoever leaves instead of answering is asked again
next time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, final

import anyio
import msgspec

from perdure._lib.display import visible
from perdure.agent import Agent
from perdure.cli.input_lines import InputLines
from perdure.cli.output import clip, print_line, say, write
from perdure.memory.ledger import Approval, Effect
from perdure.records.messages import ToolCall

WIDTH: Final = 100
LEAVE: Final = frozenset({"/quit", "/exit", "/q"})
HINT: Final = "/resume goes on with that, /dismiss gives up on it; or say something else"


def as_text(agent: Agent) -> Iterator[str]:
    """Give a line for each thing that is open."""
    for call in agent.unfinished:
        begun = f", begun in {call.turn_id}" if call.attempts else ""
        reason = f", failed with {call.error}" if call.error else ""
        yield f"not answered{begun}{reason}: {clip(call.message.text, WIDTH)}"
    for effect in agent.unknown_effects:
        yield f"unknown whether it has done its work: {_call_of(agent, effect)}"
    for approval in agent.pending_approvals:
        yield f"waits for your approval: {_call_of(agent, approval)}"


def as_json(agent: Agent) -> Iterator[dict[str, Any]]:
    """Give a value for each thing that is open."""
    for call in agent.unfinished:
        yield {
            "unfinished": call.id,
            "turn": call.turn_id,
            "attempts": call.attempts,
            "error": call.error,
            "message": call.message.text,
        }
    for effect in agent.unknown_effects:
        fields = {"turn": effect.turn, "call": effect.call, "tool": effect.tool}
        yield {"unknown_effect": effect.id, "policy": effect.policy, **fields}
    for approval in agent.pending_approvals:
        yield {"waits_for_approval": approval.call, "turn": approval.turn, "tool": approval.tool}


def shown_arguments(call: ToolCall) -> str:
    """Return a call's arguments, not too long."""
    given = call.arguments
    text = given if isinstance(given, str) else msgspec.json.encode(given, enc_hook=str).decode()
    return clip(text, WIDTH)


def _call_of(agent: Agent, effect: Effect | Approval) -> str:
    for message in reversed(agent.session.context()):
        for call in message.tool_calls:
            if call.id == effect.call:
                return f"{effect.tool} {shown_arguments(call)}"
    return effect.tool


@final
class Questions:
    """Ask about calls, and hand the answers to the agent.

    Args:
        agent: Runs already.
        lines: Where answers come from.
        json: Whether a question is a line of JSON.

    """

    def __init__(self, agent: Agent, lines: InputLines, *, json: bool) -> None:
        self._agent = agent
        self._lines = lines
        self._json = json
        self._scope: anyio.CancelScope | None = None
        self.is_over: bool = False
        """Whether the input has ended instead of an answer: what was asked stays open."""

    def withdraw(self) -> None:
        """Wait for no answer any more: the turn was interrupted."""
        if self._scope is not None:
            self._scope.cancel()

    async def approval(self, call: ToolCall) -> None:
        """Ask whether a tool may run."""
        answer = await self._asked(
            f"[{call.name}] {shown_arguments(call)}: may it run? [y]es, [n]o, [a]lways: ",
            {"approve": call.id, "tool": call.name, "arguments": call.arguments},
            ("y", "n", "a"),
        )
        if answer == "n":
            await self._agent.deny(call.id)
        elif answer is not None:
            await self._agent.approve(call.id, always=answer == "a")

    async def effect(self, effect: Effect) -> None:
        """Ask what became of a call of which nobody knows."""
        goes_on = effect.turn == self._agent.context.turn_id and not effect.told
        again = ", call it [a]gain" if goes_on else ""
        answer = await self._asked(
            f"[{effect.tool}] may have done its work, nobody knows: it [d]id, [s]kip it{again}: ",
            {"resolve": effect.id, "tool": effect.tool, "call": effect.call},
            ("d", "s", "a") if goes_on else ("d", "s"),
        )
        if answer is not None:
            await self._agent.resolve_effect(effect.id, _DECISIONS[answer], result=_DONE)

    async def _asked(self, text: str, value: dict[str, Any], choices: Sequence[str]) -> str | None:
        """Return the letter of a choice; None if no answer comes."""
        with anyio.CancelScope() as self._scope:
            while not self.is_over:
                if self._json:
                    print_line({**value, "choices": list(choices)})
                else:
                    write(f"\n{visible(text)}")
                line = await self._lines.next()
                answer = None if line is None else line.strip().lower()
                if answer is None or answer in LEAVE:
                    self.is_over = True
                elif answer[:1] in choices and answer in {answer[:1], *_WORDS}:
                    return answer[:1]
                elif not self._json:  # it may be a message that was typed ahead
                    say(f"(answer {', '.join(choices)}; /quit leaves it open)")
        return None


_DECISIONS: Final[dict[str, Literal["done", "skip", "replay"]]] = {
    "d": "done",
    "s": "skip",
    "a": "replay",
}
_WORDS: Final = frozenset({"yes", "no", "always", "again", "did", "done", "skip"})
_DONE: Final = "somebody has looked: it was done"
