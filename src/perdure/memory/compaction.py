"""Compaction: turning old turns into long-term memory.

The policy decides, the summarizer makes words of turns, and the compactor makes items
of the words. None of them writes: the caller makes one group of the items and the new
working context. So the same turns and the same summary always give the same items, and a
compaction that was cut short can be done again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, final

import msgspec

from perdure.errors import CompactionError, ConfigError
from perdure.memory.budget import CountTokens, estimated_tokens, share_of
from perdure.memory.facts import Fact, FactLimits, distilled, salience_of
from perdure.memory.items import EpisodicItem, SemanticItem
from perdure.model.messages import Message

__all__ = [
    "MEMORY_SHARE",
    "TARGET_SHARE",
    "Compaction",
    "CompactionPolicy",
    "Compactor",
    "Summarizer",
    "Summary",
    "TurnTrace",
]

KIB = 1024
MEMORY_SHARE: Final = 0.3
"""How much of the budget the memories in a context take, at most."""
TARGET_SHARE: Final = 0.6
"""How much of it prompt, memories and raw turns take after a compaction, at most."""


class CompactionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When to compact, and what stays raw.

    Args:
        max_bytes: Compact once the working context's JSON is larger than this, or than three
            quarters of what the session keeps of it (`Limits.context_bytes`).
        max_tokens: The same, for tokens, as counted and as the model reports them; None for
            no such limit.
        count_tokens: Returns how many tokens a message takes.
        keep_turns: How many of the newest turns stay as they are, as far as they fit.
        episode_turns: How many turns one summary covers.
        max_summaries: How many summaries one compaction makes at most. Where that is not enough,
            as for a long session that was imported, each covers more turns.

    Raises:
        ConfigError: A value does not fit.

    """

    max_bytes: int = 256 * KIB
    max_tokens: int | None = None
    count_tokens: CountTokens = estimated_tokens
    keep_turns: int = 4
    episode_turns: int = 8
    max_summaries: int = 16

    def __post_init__(self) -> None:
        least = {"max_bytes": 1, "max_tokens": 1, "keep_turns": 0}
        least |= {"episode_turns": 1, "max_summaries": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                message = f"compaction: {name}={value!r} does not fit: it must be from {minimum} up"
                raise ConfigError(message, option=name, value=value)
        if not callable(self.count_tokens):
            message = (
                f"compaction: count_tokens={self.count_tokens!r} does not fit: give a function "
                "that takes a message and returns its tokens"
            )
            raise ConfigError(message, option="count_tokens")

    def is_due(self, size: int, tokens: int | None) -> bool:
        """Say whether a context of this size is over the budget.

        >>> CompactionPolicy(max_bytes=100).is_due(101, None)
        True
        """
        if size > self.max_bytes:
            return True
        return self.max_tokens is not None and tokens is not None and tokens > self.max_tokens

    def within(self, context_bytes: int) -> CompactionPolicy:
        """Return the policy for a session that cuts its context at so many bytes.

        It leaves a quarter of them for what an answer may add before the next compaction.
        """
        most = max(context_bytes * 3 // 4, 1)
        return self if self.max_bytes <= most else msgspec.structs.replace(self, max_bytes=most)

    def share_of(self, message: Message, size: int) -> float:
        """Return how much of the budget a message of so many bytes takes: 1.0 is all of it."""
        return share_of(
            message,
            size,
            max_bytes=self.max_bytes,
            max_tokens=self.max_tokens,
            count=self.count_tokens,
        )


class TurnTrace(msgspec.Struct, frozen=True):
    """A turn, or the part of it that is to be summed up."""

    id: str
    messages: tuple[Message, ...]
    last: int = 0
    """The seq of its last record."""


class Summary(msgspec.Struct, frozen=True):
    """What is worth keeping of some turns."""

    text: str
    facts: tuple[Fact, ...] = ()


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
    """Make long-term memory of turns.

    Args:
        summarizer: Puts them into words; None for quotes.
        limits: How many facts a summary may add.

    """

    def __init__(
        self, summarizer: Summarizer | None = None, *, limits: FactLimits | None = None
    ) -> None:
        self._summarizer = summarizer or _quotes()
        self._limits = limits or FactLimits()

    async def compact(
        self, turns: Sequence[TurnTrace], *, now: float, known: Mapping[str, float] | None = None
    ) -> Compaction:
        """Return the items that stand for some turns from now on.

        Args:
            turns: Oldest first.
            now: Seconds since 1970.
            known: The salience of facts that are in memory, by `facts.key_of`: they are
                not added again.

        Raises:
            CompactionError: The summarizer has failed; its own error is the cause.

        """
        if not turns:
            return Compaction()
        summary = await self._summary(turns)
        ids = tuple(dict.fromkeys(turn.id for turn in turns if turn.id))
        last = turns[-1].last
        episode = EpisodicItem(
            id=f"ep_{last}", ts=now, turn_ids=ids, summary=summary.text, as_of_seq=last
        )
        facts = tuple(
            SemanticItem(
                id=f"sem_{last}_{number}",
                ts=now,
                category=fact.category,
                fact=fact.text,
                salience=salience_of(fact.category),
            )
            for number, fact in enumerate(distilled(summary.facts, known or {}, self._limits), 1)
        )
        return Compaction((episode,), facts, ids)

    async def _summary(self, turns: Sequence[TurnTrace]) -> Summary:
        try:
            return await self._summarizer.summarize(turns)
        except Exception as error:
            first, last = turns[0].id or "the first", turns[-1].id or "the last"
            message = (
                f"the turns from {first} to {last} could not be summed up, since "
                f"{type(self._summarizer).__name__} raised {type(error).__name__}: nothing has "
                "changed, and the model is not called before it succeeds; mend the summarizer, "
                "and the next message tries again"
            )
            raise CompactionError(message, turns=len(turns)) from error


def _quotes() -> Summarizer:
    from perdure.memory.extractive import ExtractiveSummarizer

    return ExtractiveSummarizer()
