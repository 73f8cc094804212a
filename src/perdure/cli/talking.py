"""A conversation on a terminal: a turn a line, told as it comes; Ctrl-C interrupts a turn first."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import AsyncIterable
from typing import final

import anyio

from perdure._lib.display import visible
from perdure.agent import Agent, AgentEvent
from perdure.agent.events import (
    ApprovalRequested,
    EffectUnknown,
    Segment,
    ToolFinished,
    ToolStarted,
    TurnEnded,
    TurnFailed,
    TurnInterrupted,
    TurnStarted,
)
from perdure.cli.lines import InputLines
from perdure.cli.matters import HINT, LEAVE, Questions, as_json, as_text, shown_arguments
from perdure.cli.output import clip, note, print_line, say, write

__all__ = ["Talk"]

RESUME, DISMISS = "/resume", "/dismiss"
HELP = "/resume goes on with what is open, /dismiss gives up on it, /quit leaves"
COMMAND = re.compile(r"/\w+")
WIDTH = 100
SILENCE = 3.0
"""Seconds without a word from the model until that is said."""


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
        self._heard = False
        self._pressed = False
        self._questions: Questions | None = None
        self.was_ended: bool = False
        """Whether Ctrl-C has ended it."""
        self.answered: int = 0
        self.failed: int = 0

    async def run(self, lines: InputLines) -> None:
        """Answer lines until their end, ``/quit``, or Ctrl-C outside of a turn."""
        questions = self._questions = Questions(self._agent, lines, json=self._json)
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, group.cancel_scope)
            self._tell_what_is_open()
            while not questions.is_over and (text := await self._next(lines)) is not None:
                self._pressed = False
                await self._said(text, questions)
            group.cancel_scope.cancel()
        if questions.is_over:  # the turn waits for an answer that does not come now
            await self._agent.stop(finish=False)

    def _tell_what_is_open(self) -> None:
        if self._json:
            for value in as_json(self._agent):
                print_line(value)
            return
        lines = list(as_text(self._agent))
        for line in lines:
            say(line)
        if lines:
            say(f"({HINT})")

    async def _said(self, text: str, questions: Questions) -> None:
        """Do what a line says: a command, or else a message."""
        agent = self._agent
        if text == DISMISS:
            self._note(f"given up: {await agent.dismiss()}")
        elif text == RESUME:
            if not (agent.unfinished or agent.unknown_effects):
                self._note("nothing is open")
            for stream in await agent.runtime.resume(agent.unfinished):
                await self._turn(stream, questions)
            for effect in agent.unknown_effects:
                await questions.effect(effect)
        elif COMMAND.fullmatch(text) and not self._json:
            say(f"(there is no {text}: {HELP})")
        else:
            await self._turn(self._agent.stream(text), questions)

    def _note(self, text: str) -> None:
        if not self._json:
            say(f"({text})")

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
                    if self._questions is not None:
                        self._questions.withdraw()
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

    async def _turn(self, events: AsyncIterable[AgentEvent], questions: Questions) -> None:
        async with anyio.create_task_group() as group:
            self._heard = False
            group.start_soon(self._tell_silence)
            try:
                await self._follow(events, questions)
            finally:
                group.cancel_scope.cancel()

    async def _tell_silence(self) -> None:
        """Say that a model has not answered yet: its client asks again by itself after an error."""
        await anyio.sleep(SILENCE)
        if not self._heard:
            note(f"no answer for {SILENCE:.0f} s: waiting for the model; Ctrl-C gives up")

    async def _follow(self, events: AsyncIterable[AgentEvent], questions: Questions) -> None:
        tell = self._as_line if self._json else self._as_text
        async for event in events:
            self._heard = self._heard or not isinstance(event, TurnStarted)
            self.answered += isinstance(event, TurnEnded)
            self.failed += isinstance(event, TurnFailed)
            tell(event)
            if self._pressed:  # the turn is being interrupted: nothing of it is asked any more
                continue
            if isinstance(event, ApprovalRequested):
                await questions.approval(event.call)
            elif isinstance(event, EffectUnknown):
                await questions.effect(event.effect)
            if questions.is_over:
                return

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
                write(visible(text))
            case ToolStarted(call=call):
                say(f"[{call.name}] {shown_arguments(call)}")
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
