"""Compaction: turning old turns into long-term memory.

The policy decides, the summarizer makes words of turns, and the compactor makes items
of the words. None of them writes: the caller makes one group of the items and the new
working context. The default summarizer quotes, it does not invent: the same turns
always give the same summary, without a model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, final

import msgspec

from perdure.errors import ConfigError
from perdure.memory.items import EpisodicItem, SemanticItem
from perdure.model.messages import Message

__all__ = [
    "Compaction",
    "CompactionPolicy",
    "Compactor",
    "ExtractiveSummarizer",
    "Summarizer",
    "Summary",
    "TurnTrace",
]

KIB = 1024


class CompactionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When to compact, and what stays raw.

    Args:
        max_bytes: Compact once the working context's JSON is larger than this.
        max_tokens: The same, for what the model reports as read; None for no such limit.
        keep_turns: How many of the newest turns stay as they are.
        episode_turns: How many turns one summary covers at most.

    Raises:
        ConfigError: A value does not fit.

    """

    max_bytes: int = 256 * KIB
    max_tokens: int | None = None
    keep_turns: int = 4
    episode_turns: int = 8

    def __post_init__(self) -> None:
        least = {"max_bytes": 1, "max_tokens": 1, "keep_turns": 0, "episode_turns": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                message = f"compaction: {name}={value!r} does not fit: it must be from {minimum} up"
                raise ConfigError(message, option=name, value=value)

    def is_due(self, size: int, tokens: int | None) -> bool:
        """Say whether a context of this size is over the budget.

        >>> CompactionPolicy(max_bytes=100).is_due(101, None)
        True
        """
        if size > self.max_bytes:
            return True
        return self.max_tokens is not None and tokens is not None and tokens > self.max_tokens


class TurnTrace(msgspec.Struct, frozen=True):
    """A turn, as a summarizer gets it."""

    id: str
    messages: tuple[Message, ...]
    last: int = 0
    """The seq of its last record."""


class Summary(msgspec.Struct, frozen=True):
    """What is worth keeping of some turns."""

    text: str
    facts: tuple[str, ...] = ()


class Summarizer(Protocol):
    """Put turns into few words."""

    async def summarize(self, turns: Sequence[TurnTrace]) -> Summary:
        """Return what is worth keeping; may ask a model. An exception stops the compaction."""
        ...


class Compaction(msgspec.Struct, frozen=True):
    """What became of the turns that were compacted."""

    episodic: tuple[EpisodicItem, ...] = ()
    semantic: tuple[SemanticItem, ...] = ()
    turn_ids: tuple[str, ...] = ()


@final
class Compactor:
    """Make long-term memory of turns."""

    def __init__(self, summarizer: Summarizer | None = None) -> None:
        self._summarizer = summarizer or ExtractiveSummarizer()

    async def compact(self, turns: Sequence[TurnTrace], *, now: float) -> Compaction:
        """Return the items that stand for some turns from now on."""
        if not turns:
            return Compaction()
        summary = await self._summarizer.summarize(turns)
        ids, last = tuple(turn.id for turn in turns if turn.id), turns[-1].last
        episode = EpisodicItem(
            id=f"ep_{last}", ts=now, turn_ids=ids, summary=summary.text, as_of_seq=last
        )
        facts = tuple(
            SemanticItem(id=f"sem_{last}_{number}", ts=now, fact=fact)
            for number, fact in enumerate(summary.facts, 1)
        )
        return Compaction((episode,), facts, ids)


_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_FACT = re.compile(
    r"\b(?:my \w+|i am|i'm|i live|i work|i like|i prefer|i need|remember|call me|always|never)\b",
    re.IGNORECASE,
)


@final
class ExtractiveSummarizer:
    """Quote the beginning of each question and of its last answer; facts are users' sentences
    about themselves."""

    def __init__(self, *, quote_chars: int = 160, max_facts: int = 8) -> None:
        self._quote_chars = quote_chars
        self._max_facts = max_facts

    async def summarize(self, turns: Sequence[TurnTrace]) -> Summary:
        """Return quotes of the turns; deterministic."""
        lines = [line for turn in turns for line in self._lines(turn)]
        facts = [fact for turn in turns for fact in self._facts(turn)]
        return Summary("\n".join(lines), tuple(dict.fromkeys(facts))[: self._max_facts])

    def _lines(self, turn: TurnTrace) -> list[str]:
        asked = [message.text for message in turn.messages if message.role == "user"]
        tools = [call.name for message in turn.messages for call in message.tool_calls]
        answers = [
            message.text
            for message in turn.messages
            if message.role == "assistant" and message.text
        ]
        lines = [f"User: {self._quote(text)}" for text in asked if text]
        if tools:
            lines.append(f"Tools used: {', '.join(dict.fromkeys(tools))}")
        if answers:
            lines.append(f"Assistant: {self._quote(answers[-1])}")
        return lines

    def _facts(self, turn: TurnTrace) -> list[str]:
        texts = [message.text for message in turn.messages if message.role == "user"]
        sentences = (sentence.strip() for text in texts for sentence in _SENTENCE.split(text))
        return [
            self._quote(one) for one in sentences if _FACT.search(one) and not one.endswith("?")
        ]

    def _quote(self, text: str) -> str:
        line = " ".join(text.split())
        return line if len(line) <= self._quote_chars else line[: self._quote_chars - 1] + "…"
