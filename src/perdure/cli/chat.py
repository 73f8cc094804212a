"""Lines of standard input, for a command that must be able to end while it waits for one.

A thread of its own reads them, as a daemon and past Python's buffer: neither a thread that
waits for a terminal nor a lock that it holds can keep the process from ending.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterable, Sequence
from typing import Any, final

import anyio
import anyio.from_thread
import anyio.lowlevel
import msgspec

import perdure
from perdure._lib.display import visible
from perdure.agent import Agent, AgentConfig, AgentEvent, AgentFactory
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
from perdure.agent.llm import ScriptedModel, call, named_model
from perdure.agent.llm.scripted import ScriptedReply
from perdure.cli.input_lines import InputLines
from perdure.cli.output import StoreOption, clip, note, print_line, say, write
from perdure.cli.questions import HINT, LEAVE, Questions, as_json, as_text, shown_arguments
from perdure.errors import ConfigError
from perdure.records.messages import Message

# A conversation on a terminal: a turn a line, told as it comes; Ctrl-C interrupts a turn first


RESUME, DISMISS = "/resume", "/dismiss"
HELP = "/resume goes on with what is open, /dismiss gives up on it, /quit leaves"
COMMAND = re.compile(r"/\w+")
WIDTH = 100
SILENCE = 3.0
"""Seconds without a word from the model until that is said."""


@final
class Conversation:
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


# ``perdure chat``: a conversation that goes on after a restart, with a model or without one


def chat(
    *,
    id: str = "chat",
    model: str | None = None,
    base_url: str | None = None,
    mcp: Sequence[str] = (),
    instructions: str = "",
    ask: bool = False,
    where: StoreOption = StoreOption(),  # noqa: B008  # frozen
) -> int:
    """Talk to an agent that remembers: quit, kill it, come back, and it goes on.

    Without --model it follows a script, and needs no key. Reads a line a turn from standard input;
    /quit or the end of the input leaves. Ctrl-C interrupts an answer, and leaves when there is
    none. An answer is durable when the next prompt appears. With --json each turn is one line.
    Exits with 1 if turns failed, and none was answered.

    What was not answered before it stopped is told first: /resume goes on with it, /dismiss gives
    up on it. Whoever is asked something, such as whether a tool may run, answers with a letter.

    Args:
        id: Which conversation.
        model: openai:NAME, openai-responses:NAME, anthropic:NAME or gemini:NAME. The key comes
            from OPENAI_API_KEY, ANTHROPIC_API_KEY or GEMINI_API_KEY.
        base_url: Where the model is, if not at its provider: any server that speaks the same API.
        mcp: The command or URL of an MCP server whose tools it may call; may be given again.
        instructions: What the model is told first.
        ask: Ask before each tool runs: y, n, or a for always.

    """
    agent_made = config(model, base_url, mcp, instructions)
    agent_made = msgspec.structs.replace(agent_made, approve="ask" if ask else None)
    is_answered = anyio.run(_chat, id, agent_made, where)
    return 0 if is_answered else 1


async def _chat(id: str, config: AgentConfig, where: StoreOption) -> bool:
    async with perdure.connect(where.store) as sessions:
        agent = await AgentFactory(sessions).create_agent(config, agent_id=id)
        turns, report = agent.session.info.turns, str(agent.session.restore_report)
        async with agent:
            if not where.json:
                _greet(id, turns, report)
            talk = Conversation(agent, json=where.json)
            with contextlib.closing(InputLines()) as lines:
                await talk.run(lines)
            if talk.was_ended:
                raise KeyboardInterrupt
    return talk.answered > 0 or not talk.failed


def _greet(id: str, turns: int, report: str) -> None:
    if turns:
        say(f"{id} goes on after turn {turns} ({report})")
    else:
        say(f"{id} is new; say something, /quit leaves. Run it again to go on")


def config(
    model: str | None = None,
    base_url: str | None = None,
    mcp: Sequence[str] = (),
    instructions: str = "",
) -> AgentConfig:
    """Return the agent that one talks to: with a model, or the one that follows a script.

    Raises:
        ConfigError: An option is invalid, or there is no key.
        MissingExtraError: What an option needs is not installed.

    """
    if model is not None:
        options: dict[str, Any] = {} if base_url is None else {"base_url": base_url}
        settings = named_model(model, **options)
        return AgentConfig(name="chat", model=settings, mcp=mcp, instructions=instructions)
    if base_url is not None or mcp or instructions:
        raise ConfigError("the scripted agent takes no options: give --model openai:NAME, too")
    return AgentConfig(
        name="chat",
        model=ScriptedModel(answer, chunk_chars=8, delay=0.01),
        tools=[count_words],
        instructions="You repeat what you are told.",
    )


async def count_words(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


def answer(messages: Sequence[Message]) -> ScriptedReply:
    """Return what the scripted model says: it repeats, counts and remembers."""
    text = [message.text for message in messages if message.role == "user"]
    last = messages[-1]
    if last.tool_result is not None:
        return f"Those were {last.tool_result.result} words."
    if text[-1].lower().startswith("count "):
        return call("count_words", text=text[-1][len("count ") :])
    if len(text) == 1:
        return f"You said {text[-1]!r}. I will remember it. (Try: count these four words)"
    return f"You said {text[-1]!r}; before that, {text[-2]!r}. I know {len(text)} things you said."
