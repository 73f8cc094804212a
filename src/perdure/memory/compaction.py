"""Compaction: turning old turns into long-term memory.

The policy decides, the summarizer makes words of turns, and the compactor makes items
of the words. None of them writes: the caller makes one group of the items and the new
working context. So the same turns and the same summary always give the same items, and a
compaction that was cut short can be done again.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, Protocol, final

import msgspec

from perdure.errors import CompactionError, InvalidArgumentError
from perdure.memory.context import CountTokens, estimated_tokens, share_of
from perdure.memory.facts import (
    EpisodicItem,
    Fact,
    FactLimits,
    SemanticItem,
    distilled,
    salience_of,
)
from perdure.records.messages import MADE_UP, Message

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
        InvalidArgumentError: A value is invalid.

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
                message = f"compaction: invalid {name}={value!r}: it must be from {minimum} up"
                raise InvalidArgumentError(message, option=name, value=value)
        if not callable(self.count_tokens):
            message = (
                f"compaction: invalid count_tokens={self.count_tokens!r}: give a function "
                "that takes a message and returns its tokens"
            )
            raise InvalidArgumentError(message, option="count_tokens")

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
        self._summarizer = summarizer or ExtractiveSummarizer()
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


# Interaction blocks: the pieces that a compaction takes, and never splits
#
# A block is opened by what a user said, or by the model's next message after tools have answered
# (the continuation); what comes before either, because its beginning was not read, is a recovery
# block. It is complete if something came of what opened it, each of its calls has its result, and
# each of its results its call.
# Pure.


Opener = Literal["user", "tool_continuation", "recovery"]


class TurnBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a turn that stays whole."""

    turn_id: str
    opener: Opener
    messages: tuple[Message, ...]
    last: int = 0
    """The seq of its last record; that of the turn, in the turn's last block."""
    share: float = 0.0
    """How much of the context's budget it takes: 1.0 is all of it."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing in it."""
        # The results that a continuation answers to are traces of the block before.
        traces = len(self.messages) + (self.opener == "tool_continuation")
        waiting, made_up, orphans = self._paired()
        return traces > 1 and waiting <= made_up and not orphans

    def open_calls(self) -> frozenset[str]:
        """Return the ids of the calls without a result in this block, but for one made up.

        The real one may stand in a later block: the turn was killed, and went on.
        """
        return self._paired()[0]

    def orphans(self) -> frozenset[str]:
        """Return the call ids of the results without a call in this block."""
        return self._paired()[2]

    def _paired(self) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """Return the ids of calls that wait, of results made up, and of results without a call."""
        waiting: list[str] = []
        made_up: set[str] = set()
        orphans: set[str] = set()
        for message in self.messages:
            waiting.extend(call.id for call in message.tool_calls)
            if message.tool_result is None:
                continue
            call_id = message.tool_result.call_id
            if MADE_UP in message.extra:
                made_up.add(call_id)
            elif call_id in waiting:
                waiting.remove(call_id)
            else:
                orphans.add(call_id)
        return frozenset(waiting), frozenset(made_up), frozenset(orphans)


def blocks_of(
    turn_id: str, messages: Iterable[tuple[int, Message, float]], *, last: int = 0
) -> list[TurnBlock]:
    """Return a turn's messages as blocks.

    Args:
        turn_id: The turn.
        messages: For each message the seq of its record, and its share of the budget.
        last: The seq of the turn's last record.

    """
    blocks: list[TurnBlock] = []
    part: list[tuple[int, Message, float]] = []
    for message in messages:
        if part and _opens(message[1], part[-1][1]):
            blocks.append(_block(turn_id, part, first=not blocks))
            part = []
        part.append(message)
    if part:
        block = _block(turn_id, part, first=not blocks)
        blocks.append(msgspec.structs.replace(block, last=max(last, block.last)))
    return blocks


def _opens(message: Message, before: Message) -> bool:
    return message.role == "user" or (message.role == "assistant" and before.role == "tool")


def _block(turn_id: str, part: Sequence[tuple[int, Message, float]], *, first: bool) -> TurnBlock:
    opener: Opener = "tool_continuation"
    if part[0][1].role == "user":
        opener = "user"
    elif first:
        opener = "recovery"
    return TurnBlock(
        turn_id=turn_id,
        opener=opener,
        messages=tuple(message for _, message, _ in part),
        last=part[-1][0],
        share=sum(share for _, _, share in part),
    )


class Frontier:
    """Which blocks stay raw, as they come in oldest first; the others leave, oldest first.

    Args:
        keep_turns: How many of the newest turns stay, at most.
        room: How much of the budget they may take together, the running turn aside.

    """

    def __init__(self, keep_turns: int, room: float) -> None:
        self.keep_turns: int = keep_turns
        self.room: float = room
        self._raw: deque[TurnBlock] = deque()
        self._share = 0.0

    @property
    def raw(self) -> tuple[TurnBlock, ...]:
        """The blocks that stay."""
        return tuple(self._raw)

    @property
    def share(self) -> float:
        """How much of the budget they take."""
        return self._share

    def add(self, blocks: Iterable[TurnBlock]) -> Iterator[TurnBlock]:
        """Take in the next turn's blocks; return those that leave for them."""
        for block in blocks:
            self._raw.append(block)
            self._share += block.share
        while self._is_over():
            leaving = self._leading()
            if not leaving:
                return
            yield from self._leave(leaving)

    def squeeze(self, room: float) -> Iterator[TurnBlock]:
        """Keep as much as fits a smaller room; return what leaves."""
        self.room = min(self.room, room)
        return self.add(())

    def _is_over(self) -> bool:
        if not self._raw:
            return False
        return self._turns() > self.keep_turns or self._share > self.room

    def _turns(self) -> int:
        return 1 + sum(self._begins(at) for at in range(1, len(self._raw))) if self._raw else 0

    def _begins(self, at: int) -> bool:
        """Say whether another turn begins with a block; without an id, a user begins one."""
        block, before = self._raw[at], self._raw[at - 1]
        return block.turn_id != before.turn_id or (not block.turn_id and block.opener == "user")

    def _leading(self) -> int:
        """Return how many blocks can leave at once, 0 if none can.

        Not between a call and its result, and nothing of the newest that is still incomplete.
        """
        blocks = list(self._raw)
        limit = next((at for at in range(len(blocks), 0, -1) if blocks[at - 1].is_complete), 0)
        waiting: set[str] = set()
        for count in range(1, limit + 1):
            waiting |= blocks[count - 1].open_calls()
            remaining = blocks[count:]
            if not waiting or not any(waiting & block.orphans() for block in remaining):
                return count
        return 0

    def _leave(self, count: int) -> Iterator[TurnBlock]:
        for _ in range(count):
            block = self._raw.popleft()
            self._share = self._share - block.share if self._raw else 0.0
            yield block


# Summaries without a model: quotes, and users' sentences that tell something
#
# The same turns always give the same summary. It does not invent anything, and it understands no
# language: facts are known by English turns of phrase. Use a model's summaries for others.
# Pure.


_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+|\n+")


def _words(*patterns: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w)(?:{'|'.join(patterns)})(?!\w)", re.IGNORECASE)


_CATEGORIES: Final = {
    "critical_issue": _words(
        "urgent", "critical", "outage", r"broken?", r"crash\w*", "data loss", "corrupt(?:ed)?"
    ),
    "unresolved_work": _words(
        "to-?do",
        r"still (?:need|have|must)\w*",
        "not (?:done|finished) yet",
        "unfinished",
        "remind me",
        "do(?: not|n't) forget",
        "deadline",
        "follow up",
    ),
    "user_preference": _words(
        r"i (?:really )?(?:like|love|prefer|hate|dislike)",
        "i (?:do not|don't) like",
        r"my favou?rite \w+",
        "call me",
        "always",
        "never",
    ),
    "durable_fact": _words(r"my \w+", "i am", "i'm", "i live", "i work", "i need", "remember"),
    "important_artifact": re.compile(
        r"https?://\S+|(?<![\w/])(?:~|\.{1,2})?/[\w.-]+/[\w./-]+|(?<![\w-])\w[\w-]*\.(?:py|md|json|ya?ml|toml|csv|pdf|txt|sql|ipynb)\b"
    ),
}
"""How a sentence of each category is known, the weightiest first."""


@final
class ExtractiveSummarizer:
    """Quote the beginning of each question and of its last answer; facts are users' sentences
    about themselves, their wishes and their work.

    Args:
        quote_chars: How long a quote is.
        max_facts: How many facts one summary has.

    """

    def __init__(self, *, quote_chars: int = 160, max_facts: int = 16) -> None:
        self._quote_chars = quote_chars
        self._max_facts = max_facts

    async def summarize(self, turns: Sequence[TurnTrace]) -> Summary:
        """Return quotes of the turns; deterministic."""
        lines = [line for turn in turns for line in self._lines(turn)]
        facts = dict.fromkeys(fact for turn in turns for fact in _facts(turn))
        return Summary("\n".join(lines), tuple(facts)[: self._max_facts])

    def _lines(self, turn: TurnTrace) -> Iterable[str]:
        questions = [
            spoken.text for spoken in turn.messages if spoken.role == "user" and spoken.text
        ]
        tools = [call.name for message in turn.messages for call in message.tool_calls]
        failed = [
            spoken.tool_result.name or spoken.tool_result.call_id
            for spoken in turn.messages
            if spoken.tool_result is not None and spoken.tool_result.error is not None
        ]
        answers = [
            spoken.text for spoken in turn.messages if spoken.role == "assistant" and spoken.text
        ]
        yield from (f"User: {self._quote(text)}" for text in questions)
        if tools:
            yield f"Tools used: {', '.join(dict.fromkeys(tools))}"
        if failed:
            yield f"Tools that failed: {', '.join(dict.fromkeys(failed))}"
        if answers:
            yield f"Assistant: {self._quote(answers[-1])}"

    def _quote(self, text: str) -> str:
        line = " ".join(text.split())
        return line if len(line) <= self._quote_chars else line[: self._quote_chars - 1] + "…"


def _facts(turn: TurnTrace) -> Iterable[Fact]:
    for message in turn.messages:
        if message.role != "user":
            continue
        for sentence in _SENTENCE.split(message.text):
            line = " ".join(sentence.split())
            category = _category_of(line)
            if category is not None and not line.endswith("?"):
                yield Fact(line, category)


def _category_of(sentence: str) -> str | None:
    return next((name for name, words in _CATEGORIES.items() if words.search(sentence)), None)
