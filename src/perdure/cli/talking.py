"""A conversation on a terminal: a turn a line, told as it comes; Ctrl-C interrupts a turn first."""

from __future__ import annotations

import signal
import sys
from typing import Any, final

import anyio
import msgspec

from perdure.agent import Agent, AgentEvent
from perdure.agent.events import (
    Segment,
    ToolFinished,
    ToolStarted,
    TurnEnded,
    TurnFailed,
    TurnInterrupted,
)
from perdure.cli.lines import InputLines
from perdure.cli.output import clip, print_line, printable, say, write

__all__ = ["Talk"]

LEAVE = frozenset({"/quit", "/exit", "/q"})
WIDTH = 100


@final
class Talk:
    """A conversation with one agent, until somebody leaves.

    Args:
        agent: Runs already.
        json: Whether each turn is a line of JSON, and nothing else is said.

    """

    def __init__(self, agent: Agent, *, json: bool) -> None:
        self._agent = agent
        self._json = json
        self._pressed = False
        self.was_ended: bool = False
        """Whether Ctrl-C has ended it."""

    async def run(self, lines: InputLines) -> None:
        """Answer lines until their end, ``/quit``, or Ctrl-C outside of a turn."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, group.cancel_scope)
            while (text := await self._next(lines)) is not None:
                self._pressed = False
                await self._turn(text)
            group.cancel_scope.cancel()

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """Let the first Ctrl-C interrupt the turn, and the next one end it all."""
        try:
            receiver = anyio.open_signal_receiver(signal.SIGINT)
            with receiver as pressed:
                async for _ in pressed:
                    if self._pressed or not self._agent.interrupt():
                        self.was_ended = True
                        scope.cancel()
                        return
                    self._pressed = True
        except NotImplementedError:  # Windows' loop: Ctrl-C ends at once, and the turn is kept
            return

    async def _next(self, lines: InputLines) -> str | None:
        """Return the next line that says something; None at the end."""
        while True:
            if not self._json and sys.stdin.isatty():
                write("> ")
            line = await lines.next()
            if line is None or line.strip() in LEAVE:
                return None
            if line.strip():
                return line.strip()

    async def _turn(self, text: str) -> None:
        tell = self._as_line if self._json else self._as_text
        async for event in self._agent.stream(text):
            tell(event)

    def _as_line(self, event: AgentEvent) -> None:
        if isinstance(event, TurnEnded):
            print_line({"turn": event.turn_id, "version": event.version, "answer": event.text})
        elif isinstance(event, TurnInterrupted):
            print_line({"turn": event.turn_id, "interrupted": True, "answer": event.text})
        elif isinstance(event, TurnFailed):
            print_line({"turn": event.turn_id, "error": str(event.error)})

    def _as_text(self, event: AgentEvent) -> None:
        match event:
            case Segment(text=text):
                write(printable(text))
            case ToolStarted(call=call):
                say(f"[{call.name}] {clip(_json(call.arguments), WIDTH)}")
            case ToolFinished(call=call, result=result) if result.error is not None:
                say(f"[{call.name}] failed: {clip(result.error, WIDTH)}")
            case TurnEnded():
                write("\n")
            case TurnInterrupted():
                say("\n(interrupted; what came is kept. Ctrl-C again leaves)")
            case TurnFailed(error=error):
                say(f"\n(no answer: {error})")
            case _:
                pass


def _json(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
