"""``perdure chat``: a conversation that goes on after a restart, without a model to pay for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import anyio

import perdure
from perdure.agent import Agent, AgentConfig, AgentFactory
from perdure.agent.events import Segment, ToolStarted, TurnEnded
from perdure.agent.llm import ScriptedModel, call
from perdure.agent.llm.scripted import ScriptedReply
from perdure.cli.lines import InputLines
from perdure.cli.options import Stored
from perdure.cli.output import print_line, printable, say, write
from perdure.model.messages import Message

__all__ = ["chat"]

LEAVE = frozenset({"/quit", "/exit", "/q"})


def chat(
    *,
    id: str = "chat",
    where: Stored = Stored(),  # noqa: B008  # frozen
) -> int:
    """Talk to a scripted agent that remembers: quit, kill it, come back, and it goes on.

    Reads a line a turn from standard input; /quit or the end of the input leaves. An answer is
    durable when the next prompt appears. With --json each turn is one line of JSON.

    Args:
        id: Which conversation.

    """
    anyio.run(_chat, id, where)
    return 0


async def _chat(id: str, where: Stored) -> None:
    async with perdure.connect(where.store) as sessions:
        agent = await AgentFactory(sessions).create_agent(config(), agent_id=id)
        async with agent:
            if not where.json:
                session = agent.session
                _greet(id, session.info.turns, str(session.restore_report))
            with contextlib.closing(InputLines()) as lines:
                while (text := await _next(lines, prompt=not where.json)) is not None:
                    await _turn(agent, text, json=where.json)


def _greet(id: str, turns: int, report: str) -> None:
    if turns:
        say(f"{id} goes on after turn {turns} ({report})")
    else:
        say(f"{id} is new; say something, /quit leaves. Run it again to go on")


async def _next(lines: InputLines, *, prompt: bool) -> str | None:
    """Return the next line that says something; None at the end."""
    while True:
        if prompt and sys.stdin.isatty():
            write("> ")
        line = await lines.next()
        if line is None or line.strip() in LEAVE:
            return None
        if line.strip():
            return line.strip()


async def _turn(agent: Agent, text: str, *, json: bool) -> None:
    async for event in agent.stream(text):
        if isinstance(event, TurnEnded) and json:
            print_line({"turn": event.turn_id, "version": event.version, "answer": event.text})
        elif isinstance(event, Segment) and not json:
            write(printable(event.text))
        elif isinstance(event, ToolStarted) and not json:
            say(f"[{event.call.name}]")
    if not json:
        write("\n")


async def count_words(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


def answer(messages: Sequence[Message]) -> ScriptedReply:
    """Return what the scripted model says: it repeats, counts and remembers."""
    said = [message.text for message in messages if message.role == "user"]
    last = messages[-1]
    if last.tool_result is not None:
        return f"Those were {last.tool_result.result} words."
    if said[-1].lower().startswith("count "):
        return call("count_words", text=said[-1][len("count ") :])
    if len(said) == 1:
        return f"You said {said[-1]!r}. I will remember it. (Try: count these four words)"
    return f"You said {said[-1]!r}; before that, {said[-2]!r}. I know {len(said)} things you said."


def config() -> AgentConfig:
    """Return the agent that one talks to."""
    return AgentConfig(
        name="chat",
        model=ScriptedModel(answer, chunk_chars=8, delay=0.01),
        tools=[count_words],
        instructions="You repeat what you are told.",
    )
