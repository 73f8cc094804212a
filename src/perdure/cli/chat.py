"""``perdure chat``: a conversation that goes on after a restart, with a model or without one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

import perdure
from perdure.agent import AgentConfig, AgentFactory
from perdure.agent.llm import ScriptedModel, call, named_model
from perdure.agent.llm.scripted import ScriptedReply
from perdure.cli.lines import InputLines
from perdure.cli.options import Stored
from perdure.cli.output import say
from perdure.cli.talking import Talk
from perdure.errors import ConfigError
from perdure.model.messages import Message

__all__ = ["chat"]


def chat(
    *,
    id: str = "chat",
    model: str | None = None,
    base_url: str | None = None,
    mcp: Sequence[str] = (),
    instructions: str = "",
    ask: bool = False,
    where: Stored = Stored(),  # noqa: B008  # frozen
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
    made = config(model, base_url, mcp, instructions)
    made = msgspec.structs.replace(made, approve="ask" if ask else None)
    is_answered = anyio.run(_chat, id, made, where)
    return 0 if is_answered else 1


async def _chat(id: str, config: AgentConfig, where: Stored) -> bool:
    async with perdure.connect(where.store) as sessions:
        agent = await AgentFactory(sessions).create_agent(config, agent_id=id)
        turns, report = agent.session.info.turns, str(agent.session.restore_report)
        async with agent:
            if not where.json:
                _greet(id, turns, report)
            talk = Talk(agent, json=where.json)
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
        ConfigError: An option does not fit, or there is no key.
        MissingExtraError: What an option needs is not installed.

    """
    if model is not None:
        options: dict[str, Any] = {} if base_url is None else {"base_url": base_url}
        made = named_model(model, **options)
        return AgentConfig(name="chat", model=made, mcp=mcp, instructions=instructions)
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
    said = [message.text for message in messages if message.role == "user"]
    last = messages[-1]
    if last.tool_result is not None:
        return f"Those were {last.tool_result.result} words."
    if said[-1].lower().startswith("count "):
        return call("count_words", text=said[-1][len("count ") :])
    if len(said) == 1:
        return f"You said {said[-1]!r}. I will remember it. (Try: count these four words)"
    return f"You said {said[-1]!r}; before that, {said[-2]!r}. I know {len(said)} things you said."
