"""``perdure chat``: a durable conversation, on a terminal or over lines of JSON.

Each line is a turn; Ctrl-C interrupts a turn first, and then leaves. A call that needs approval
waits durably: a user who leaves without answering is asked again next time.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterable, Iterator, Sequence
from math import inf
from typing import Any, Final, Literal, final

import anyio
import anyio.from_thread
import anyio.lowlevel
import msgspec
from anyio.lowlevel import EventLoopToken

import perdure
from perdure._lib.logs import visible
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
from perdure.cli.output import StoreOption, clip, note, print_line, say, write
from perdure.errors import ConfigError, SessionError
from perdure.memory.ledger import Approval, Effect
from perdure.records.messages import Message, ToolCall

CHUNK = 4096


class InputLines:
    """Lines of standard input, for the event loop that made it.

    A daemon thread reads them past Python's buffer: neither a thread that waits for a terminal nor
    a lock that it holds can keep the process from ending.
    """

    def __init__(self) -> None:
        self._send, self._lines = anyio.create_memory_object_stream[str](inf)
        token = anyio.lowlevel.current_token()
        threading.Thread(
            target=self._read, args=(token,), name="perdure:input", daemon=True
        ).start()

    async def next(self) -> str | None:
        """Return the next line, without its end; None at the end of the input."""
        try:
            return await self._lines.receive()
        except anyio.EndOfStream:
            return None

    def close(self) -> None:
        """Stop waiting for lines."""
        self._lines.close()
        self._send.close()

    def _read(self, token: EventLoopToken) -> None:
        descriptor, partial = sys.stdin.fileno(), b""
        # The loop, or the receiver, may have ended before a line comes.
        with contextlib.suppress(RuntimeError, anyio.BrokenResourceError, OSError):
            while data := os.read(descriptor, CHUNK):
                *lines, partial = (partial + data).split(b"\n")
                for line in lines:
                    self._pass_on(line, token)
            if partial:
                self._pass_on(partial, token)
            anyio.from_thread.run_sync(self._send.close, token=token)

    def _pass_on(self, line: bytes, token: EventLoopToken) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        anyio.from_thread.run_sync(self._send.send_nowait, text, token=token)


# Open work of an agent: unanswered messages, calls with an unknown effect, pending approvals


WIDTH: Final = 100
LEAVE: Final = frozenset({"/quit", "/exit", "/q"})
HINT: Final = "/resume continues, /dismiss gives up on it; or say something else"


def as_text(agent: Agent) -> Iterator[str]:
    """Yield a line for each open item."""
    for unfinished in agent.unfinished:
        begun = f", begun in {unfinished.turn_id}" if unfinished.attempts else ""
        reason = f", failed with {unfinished.error}" if unfinished.error else ""
        yield f"not answered{begun}{reason}: {clip(unfinished.message.text, WIDTH)}"
    for effect in agent.unknown_effects:
        yield f"unknown whether it has done its work: {_call_of(agent, effect)}"
    for approval in agent.pending_approvals:
        yield f"waits for your approval: {_call_of(agent, approval)}"


def as_json(agent: Agent) -> Iterator[dict[str, Any]]:
    """Yield a JSON value for each open item."""
    for unfinished in agent.unfinished:
        yield {
            "unfinished": unfinished.id,
            "turn": unfinished.turn_id,
            "attempts": unfinished.attempts,
            "error": unfinished.error,
            "message": unfinished.message.text,
        }
    for effect in agent.unknown_effects:
        yield {
            "unknown_effect": effect.id,
            "policy": effect.policy,
            "turn": effect.turn,
            "call": effect.call,
            "tool": effect.tool,
        }
    for approval in agent.pending_approvals:
        yield {"waits_for_approval": approval.call, "turn": approval.turn, "tool": approval.tool}


def shown_arguments(call: ToolCall) -> str:
    """Return a call's arguments as text, clipped."""
    given = call.arguments
    text = given if isinstance(given, str) else msgspec.json.encode(given, enc_hook=str).decode()
    return clip(text, WIDTH)


def _call_of(agent: Agent, effect: Effect | Approval) -> str:
    for message in reversed(agent.session.context()):
        for requested in message.tool_calls:
            if requested.id == effect.call:
                return f"{effect.tool} {shown_arguments(requested)}"
    return effect.tool


_DECISIONS: Final[dict[str, Literal["done", "skip", "replay"]]] = {
    "d": "done",
    "s": "skip",
    "a": "replay",
}
_WORDS: Final = frozenset({"yes", "no", "always", "again", "did", "done", "skip"})
_DONE: Final = "checked by the user: it was done"


HELP = "/resume continues what is open, /dismiss gives up on it, /quit leaves"
COMMAND = re.compile(r"/\w+")
SILENCE = 3.0
"""Seconds without any event from the model before a note is printed."""


@final
class Conversation:
    """A conversation with one agent, until the user leaves.

    Args:
        agent: A running agent.
        json: Whether to print a line of JSON for each turn, and nothing else.

    """

    def __init__(self, agent: Agent, *, json: bool) -> None:
        self._agent = agent
        self._json = json
        self._heard = False
        self._pressed = False
        self._question: anyio.CancelScope | None = None
        """The scope of waiting for an answer to a question about a call."""
        self._is_over = False
        """True if the input has ended instead of an answer: the question stays open."""
        self.was_ended: bool = False
        """True if Ctrl-C has ended it."""
        self.answered: int = 0
        self.failed: int = 0

    async def run(self, lines: InputLines) -> None:
        """Answer lines until their end, ``/quit``, or Ctrl-C outside of a turn."""
        self._lines = lines
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, group.cancel_scope, name="perdure:watch")
            if self._json:
                for value in as_json(self._agent):
                    print_line(value)
            elif lines_of_open := list(as_text(self._agent)):
                for line in (*lines_of_open, f"({HINT})"):
                    say(line)
            while not self._is_over and (text := await self._next()) is not None:
                self._pressed = False
                await self._handle_line(text)
            group.cancel_scope.cancel()
        if self._is_over:  # the turn waits for an answer that does not come now
            await self._agent.stop(finish=False)

    async def _handle_line(self, text: str) -> None:
        """Act on a line: a command, or else a message."""
        agent = self._agent
        if text == "/dismiss":
            count = await agent.dismiss()
            if not self._json:
                say(f"(given up: {count})")
        elif text == "/resume":
            if not (agent.unfinished or agent.unknown_effects or self._json):
                say("(nothing is open)")
            for stream in await agent.runtime.resume(agent.unfinished):
                await self._turn(stream)
            for effect in agent.unknown_effects:
                await self._ask_effect(effect)
        elif COMMAND.fullmatch(text) and not self._json:
            say(f"(there is no {text}: {HELP})")
        else:
            await self._turn(agent.stream(text))

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """Interrupt the turn on the first Ctrl-C, and end the conversation on the next."""
        try:
            with anyio.open_signal_receiver(signal.SIGINT) as pressed:
                async for _ in pressed:
                    if self._pressed or not self._agent.interrupt():
                        self.was_ended = True
                        scope.cancel()
                        return
                    self._pressed = True
                    if self._question is not None:
                        self._question.cancel()
        except NotImplementedError:  # Windows' loop: Ctrl-C ends at once, and the turn is kept
            return

    async def _next(self) -> str | None:
        """Return the next line that is not empty; None at the end."""
        while True:
            if not self._json and sys.stdin.isatty():
                write("> ")
            line = await self._lines.next()
            if line is None or line.strip() in LEAVE:
                return None
            if line.strip():
                return line.strip()

    async def _turn(self, events: AsyncIterable[AgentEvent]) -> None:
        async with anyio.create_task_group() as group:
            self._heard = False
            group.start_soon(self._note_silence, name="perdure:silence")
            try:
                await self._follow(events)
            finally:
                group.cancel_scope.cancel()

    async def _note_silence(self) -> None:
        """Note that the model has not answered yet: its client retries by itself after an error."""
        await anyio.sleep(SILENCE)
        if not self._heard:
            note(f"no answer for {SILENCE:.0f} s: waiting for the model; Ctrl-C gives up")

    async def _follow(self, events: AsyncIterable[AgentEvent]) -> None:
        async for event in events:
            self._heard = self._heard or not isinstance(event, TurnStarted)
            self.answered += isinstance(event, TurnEnded)
            self.failed += isinstance(event, TurnFailed)
            if self._json:
                self._print_json(event)
            else:
                self._print_text(event)
            if self._pressed:  # the turn is being interrupted: ask nothing about it any more
                continue
            if isinstance(event, ApprovalRequested):
                await self._ask_approval(event.call)
            elif isinstance(event, EffectUnknown):
                await self._ask_effect(event.effect)
            if self._is_over:
                return

    async def _ask_approval(self, call: ToolCall) -> None:
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

    async def _ask_effect(self, effect: Effect) -> None:
        """Ask whether a call with an unknown effect was done."""
        is_current = effect.turn == self._agent.context.turn_id and not effect.told
        again = ", call it [a]gain" if is_current else ""
        answer = await self._asked(
            f"[{effect.tool}] may have done its work, or not: it [d]id, [s]kip it{again}: ",
            {"resolve": effect.id, "tool": effect.tool, "call": effect.call},
            ("d", "s", "a") if is_current else ("d", "s"),
        )
        if answer is None:
            return
        try:
            await self._agent.resolve_effect(effect.id, _DECISIONS[answer], result=_DONE)
        except SessionError:  # its call has left the context
            await self._agent.resolve_effect(effect.id, _DECISIONS[answer])

    async def _asked(self, text: str, value: dict[str, Any], choices: Sequence[str]) -> str | None:
        """Return the letter of a choice; None if no answer comes."""
        with anyio.CancelScope() as self._question:
            while not self._is_over:
                if self._json:
                    print_line({**value, "choices": list(choices)})
                else:
                    write(f"\n{visible(text)}")
                line = await self._lines.next()
                answer = None if line is None else line.strip().lower()
                if answer is None or answer in LEAVE:
                    self._is_over = True
                elif answer[:1] in choices and answer in {answer[:1], *_WORDS}:
                    return answer[:1]
                elif not self._json:  # it may be a message that was typed ahead
                    say(f"(answer {', '.join(choices)}; /quit leaves it open)")
        return None

    def _print_json(self, event: AgentEvent) -> None:
        match event:
            case TurnEnded():
                print_line({"turn": event.turn_id, "version": event.version, "answer": event.text})
            case TurnInterrupted():
                print_line({"turn": event.turn_id, "interrupted": True, "answer": event.text})
            case TurnFailed():
                print_line({"turn": event.turn_id, "error": str(event.error)})

    def _print_text(self, event: AgentEvent) -> None:
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


async def chat(
    *,
    id: str = "chat",
    model: str | None = None,
    base_url: str | None = None,
    mcp: Sequence[str] = (),
    instructions: str = "",
    ask: bool = False,
    where: StoreOption = StoreOption(),  # noqa: B008  # frozen
) -> int:
    """Talk to an agent that remembers: quit, kill it, come back, and it continues.

    Without --model it follows a script, and needs no key. Each line of standard input is a turn;
    /quit or the end of the input leaves. Ctrl-C interrupts an answer, and leaves when there is
    none. An answer is durable when the next prompt appears. With --json each turn is one line.
    Exits with 1 if turns failed, and none was answered.

    Work that was open when it stopped is shown first: /resume continues it, /dismiss gives up on
    it. Answer a question, such as whether a tool may run, with a letter.

    Args:
        id: The conversation's id.
        model: openai:NAME, openai-responses:NAME, anthropic:NAME or gemini:NAME. The key comes
            from OPENAI_API_KEY, ANTHROPIC_API_KEY or GEMINI_API_KEY.
        base_url: The URL of another server with the same API, instead of the provider's.
        mcp: The command or URL of an MCP server whose tools it may call; may be repeated.
        instructions: The system prompt.
        ask: Ask before each tool runs: y, n, or a for always.

    """
    chosen = msgspec.structs.replace(
        config(model, base_url, mcp, instructions), approve="ask" if ask else None
    )
    async with perdure.connect(where.store) as sessions:
        agent = await AgentFactory(sessions).create_agent(chosen, agent_id=id)
        turns, report = agent.session.info.turns, str(agent.session.restore_report)
        async with agent:
            if turns and not where.json:
                say(f"{id} continues after turn {turns} ({report})")
            elif not where.json:
                say(f"{id} is new; say something, /quit leaves. Run it again to continue")
            talk = Conversation(agent, json=where.json)
            with contextlib.closing(InputLines()) as lines:
                await talk.run(lines)
            if talk.was_ended:
                raise KeyboardInterrupt
    return 1 if talk.failed and not talk.answered else 0


def config(
    model: str | None = None,
    base_url: str | None = None,
    mcp: Sequence[str] = (),
    instructions: str = "",
) -> AgentConfig:
    """Return the configuration of the agent: with a model, or with a script.

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
