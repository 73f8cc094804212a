"""Compaction: turning old turns into long-term memory, which is facts and the items of a log.

The policy decides, the summarizer turns messages into text, and the compactor turns the text into
items. None of them writes: the caller appends the items and the new working context as one group.
So the same turns and the same summary always give the same items, and an interrupted compaction can
be repeated.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal, Protocol, TypeVar, final, get_args

import msgspec

from perdure._lib.options import Options
from perdure.errors import CompactionError, InvalidArgumentError
from perdure.memory.context import CountTokens, estimated_tokens
from perdure.records.json import decode, encode
from perdure.records.messages import MADE_UP, Message
from perdure.records.records import ITEM, Entry

# Facts, and the items of a log that hold them


Category = Literal[
    "critical_issue", "unresolved_work", "user_preference", "durable_fact", "important_artifact"
]
"""The kind of a fact: a problem, open work, a preference of the user, a durable fact, or an
important file or address."""


_SALIENCE: Final[dict[str, int]] = dict(
    zip(get_args(Category), (500, 400, 300, 200, 100), strict=True)
)


_NOISE: Final = frozenset(
    {
        *("ok", "okay", "yes", "no", "none", "nothing", "null", "n", "a", "sure", "done", "fine"),
        *("thanks", "thank", "you", "hello", "hi", "hey", "bye", "goodbye", "great", "sorry"),
        "please",
    }
)


_EMPTY: Final = frozenset({"no facts", "not available", "not specified", "not applicable"})


_QUESTION_MARKS: Final = ("?", "？", "؟")  # noqa: RUF001  # those of other scripts


# The fewest letters and digits of a fact.
_LEAST: Final = 3


class Fact(msgspec.Struct, frozen=True):
    """A sentence that is worth remembering."""

    text: str
    category: str = "durable_fact"
    """One of `Category`; an unknown one counts as a durable fact."""


class FactLimits(Options, frozen=True, kw_only=True):
    """Limits on the facts that one summary may add.

    Args:
        per_category: How many facts of each category.
        chars: The most characters of a fact; longer ones are cut.

    Raises:
        InvalidArgumentError: A value is invalid.

    """

    per_category: int = 8
    chars: int = 400

    def __post_init__(self) -> None:
        _require_least("facts", self, per_category=0, chars=16)


def _require_least(what: str, options: object, **least: int) -> None:
    for name, minimum in least.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise InvalidArgumentError(
                f"{what}: invalid {name}={value!r}: it must be from {minimum} up",
                option=name,
                value=value,
            )


def salience_of(category: str) -> int:
    """Return the salience of a category: 500 down to 100.

    >>> salience_of("critical_issue"), salience_of("important_artifact"), salience_of("other")
    (500, 100, 200)
    """
    return _SALIENCE.get(category, _SALIENCE["durable_fact"])


def key_of(text: str) -> str:
    """Return the key of a fact: equal for facts with the same words.

    >>> key_of("Likes  Herring.") == key_of("likes herring")
    True
    """
    return " ".join(re.findall(r"\w+", text.casefold()))


def distilled(
    facts: Iterable[Fact], known: Mapping[str, float], limits: FactLimits
) -> tuple[Fact, ...]:
    """Return the facts that are worth storing, the most salient first.

    Without noise, questions, duplicates, facts beyond the limits, and facts that are known with
    the same salience or more.

    Args:
        facts: In the order in which they were found.
        known: The salience of facts in memory, by ``key_of``.
        limits: How many, and how long.

    """
    best: dict[str, Fact] = {}
    for fact in facts:
        category = fact.category if fact.category in _SALIENCE else "durable_fact"
        distilled_fact = Fact(_shortened(fact.text, limits.chars), category)
        key, weight = key_of(distilled_fact.text), salience_of(category)
        if _is_noise(distilled_fact.text, key) or known.get(key, -1.0) >= weight:
            continue
        if key not in best or salience_of(best[key].category) < weight:
            best[key] = distilled_fact
    return tuple(
        fact
        for category in _SALIENCE
        for fact in [
            distilled_fact
            for distilled_fact in best.values()
            if distilled_fact.category == category
        ][: limits.per_category]
    )


def _shortened(text: str, chars: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= chars else line[: chars - 1] + "…"


def _is_noise(text: str, key: str) -> bool:
    """Return whether a text has no content: a greeting, a question, punctuation."""
    if text.endswith(_QUESTION_MARKS) or key in _EMPTY:
        return True
    return len(key.replace(" ", "")) < _LEAST or all(word in _NOISE for word in key.split())


T = TypeVar("T")


class EpisodicItem(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of some turns."""

    id: str
    ts: float
    """Seconds since 1970."""
    turn_ids: tuple[str, ...] = ()
    summary: str
    salience: float = 0.0
    as_of_seq: int = 0
    """The last record of the summary: all turns up to it are in long-term memory."""


class SemanticItem(msgspec.Struct, frozen=True, kw_only=True):
    """A fact."""

    id: str
    ts: float
    category: str = "durable_fact"
    fact: str
    salience: float = 0.0


class MemoryBundle(msgspec.Struct, frozen=True):
    """The memories for a working context: oldest episode first, most salient fact first."""

    episodic: tuple[EpisodicItem, ...] = ()
    semantic: tuple[SemanticItem, ...] = ()


def item_entry(item: EpisodicItem | SemanticItem) -> Entry:
    """Return the record of an item."""
    memory: Literal["episodic", "semantic"] = (
        "episodic" if isinstance(item, EpisodicItem) else "semantic"
    )
    return Entry(ITEM, encode({"memory": memory, "item": item}))


def items_of(lines: Iterable[bytes], kind: type[T]) -> list[T]:
    """Return the items of a document's lines, each id once: the newest line counts.

    Raises:
        CorruptRecordError: A line is damaged.

    """
    items = [decode(line, kind) for line in lines if line.strip()]
    return list({getattr(item, "id", at): item for at, item in enumerate(items)}.values())


# The policy, and what it compacts


KIB = 1024
MEMORY_SHARE: Final = 0.3
"""The share of the budget that the memories in a context may take."""
TARGET_SHARE: Final = 0.6
"""The share that prompt, memories and raw turns may take after a compaction."""


class CompactionPolicy(Options, frozen=True, kw_only=True):
    """Policy of compactions: when they are due, and what stays raw.

    Args:
        max_bytes: Compact once the working context's JSON is larger than this, or than three
            quarters of `Limits.context_bytes`.
        max_tokens: The same, for tokens, as counted and as the model reports them; None for
            no such limit.
        count_tokens: Returns how many tokens a message takes.
        keep_turns: How many of the newest turns stay as they are, as far as they fit.
        episode_turns: How many turns one summary covers.
        max_summaries: How many summaries one compaction makes at most. If that is not enough, as
            for a long imported session, each covers more turns.

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
        _require_least("compaction", self, **least, episode_turns=1, max_summaries=1)
        if not callable(self.count_tokens):
            raise InvalidArgumentError(
                f"compaction: invalid count_tokens={self.count_tokens!r}: give a function "
                "that takes a message and returns its tokens",
                option="count_tokens",
            )

    def is_due(self, size: int, tokens: int | None) -> bool:
        """Return whether a context of this size is over the budget.

        >>> CompactionPolicy(max_bytes=100).is_due(101, None)
        True
        """
        if size > self.max_bytes:
            return True
        return self.max_tokens is not None and tokens is not None and tokens > self.max_tokens

    def within(self, context_bytes: int) -> CompactionPolicy:
        """Return the policy for a session that cuts its context at so many bytes.

        A quarter of them is reserved for answers before the next compaction.
        """
        most = max(context_bytes * 3 // 4, 1)
        return self if self.max_bytes <= most else msgspec.structs.replace(self, max_bytes=most)

    def share_of(self, message: Message, size: int) -> float:
        """Return the share of the budget that a message of so many bytes takes.

        It is the larger one of bytes and tokens: messages whose shares sum up to at most 1.0 are
        within both limits.
        """
        share = size / self.max_bytes
        if self.max_tokens is None:
            return share
        return max(share, self.count_tokens(message) / self.max_tokens)


class TurnTrace(msgspec.Struct, frozen=True):
    """A turn, or the part of it that is to be summarized."""

    id: str
    messages: tuple[Message, ...]
    last: int = 0
    """The seq of its last record."""


class Summary(msgspec.Struct, frozen=True):
    """The summary of some turns."""

    text: str
    facts: tuple[Fact, ...] = ()


class Summarizer(Protocol):
    """Summarizes turns."""

    async def summarize(self, turns: Sequence[TurnTrace]) -> Summary:
        """Return the summary; may call a model. An exception stops the compaction."""


class Compaction(msgspec.Struct, frozen=True):
    """The items that replace compacted turns."""

    episodic: tuple[EpisodicItem, ...] = ()
    semantic: tuple[SemanticItem, ...] = ()
    turn_ids: tuple[str, ...] = ()


@final
class Compactor:
    """Turns messages into long-term memory.

    Args:
        summarizer: Summarizes turns; None for quotes.
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
        """Return the items that replace some turns.

        Args:
            turns: Oldest first.
            now: Seconds since 1970.
            known: The salience of facts in memory, by `facts.key_of`: they are not added
                again.

        Raises:
            CompactionError: The summarizer failed; its own error is the cause.

        """
        if not turns:
            return Compaction()
        try:
            summary = await self._summarizer.summarize(turns)
        except Exception as error:
            first, last_id = turns[0].id or "the first", turns[-1].id or "the last"
            raise CompactionError(
                f"the turns from {first} to {last_id} could not be summarized, since "
                f"{type(self._summarizer).__name__} raised {type(error).__name__}: nothing has "
                "changed, and the model is not called before it succeeds; fix the summarizer, "
                "and the next message tries again",
                turns=len(turns),
            ) from error
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


Opener = Literal["user", "tool_continuation", "recovery"]


class TurnBlock(msgspec.Struct, frozen=True, kw_only=True):
    """An interaction block: a part of a turn that a compaction never splits.

    A block is opened by a user message, or by the model's next message after tool results (the
    continuation); messages before either, whose beginning was not read, form a recovery block. It
    is complete if a message follows the opener, each call has its result, and each result its
    call.
    """

    turn_id: str
    opener: Opener
    messages: tuple[Message, ...]
    last: int = 0
    """The seq of its last record; in a turn's last block, the turn's last record."""
    share: float = 0.0
    """Its share of the context's budget."""

    @property
    def is_complete(self) -> bool:
        """True if nothing is missing in it."""
        # The results that a continuation answers belong to the previous block.
        traces = len(self.messages) + (self.opener == "tool_continuation")
        waiting, made_up, orphans = self._paired()
        return traces > 1 and waiting <= made_up and not orphans

    def open_calls(self) -> frozenset[str]:
        """Return the ids of the calls without a real result in this block.

        The real one may be in a later block: the turn was killed, and continued.
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
    """Frontier of the blocks that stay raw. Blocks are added, and removed, oldest first.

    Args:
        keep_turns: How many of the newest turns stay, at most.
        room: The share of the budget that they may take, without the running turn.

    """

    def __init__(self, keep_turns: int, room: float) -> None:
        self.keep_turns: int = keep_turns
        self.room: float = room
        self.raw: deque[TurnBlock] = deque()
        """The blocks that stay."""
        self.share: float = 0.0
        """The share of the budget that they take."""

    def add(self, blocks: Iterable[TurnBlock]) -> Iterator[TurnBlock]:
        """Add the next turn's blocks; return those that no longer stay."""
        for block in blocks:
            self.raw.append(block)
            self.share += block.share
        while self.raw and (self._turns() > self.keep_turns or self.share > self.room):
            leaving = self._leading()
            # An unfinished call stays, even where that passes the limits.
            if not leaving:
                return
            for _ in range(leaving):
                block = self.raw.popleft()
                self.share = self.share - block.share if self.raw else 0.0
                yield block

    def shrink(self, room: float) -> Iterator[TurnBlock]:
        """Reduce the room; return the blocks that no longer stay."""
        self.room = min(self.room, room)
        return self.add(())

    def _turns(self) -> int:
        """Return how many turns stay; without an id, a user message begins one."""
        return 1 + sum(
            block.turn_id != before.turn_id or (not block.turn_id and block.opener == "user")
            for before, block in pairwise(self.raw)
        )

    def _leading(self) -> int:
        """Return how many blocks can be removed at once, 0 if none can.

        Never between a call and its result, and none of the newest that are still incomplete.
        """
        blocks = list(self.raw)
        limit = next((at for at in range(len(blocks), 0, -1) if blocks[at - 1].is_complete), 0)
        waiting: set[str] = set()
        for count in range(1, limit + 1):
            waiting |= blocks[count - 1].open_calls()
            remaining = blocks[count:]
            if not waiting or not any(waiting & block.orphans() for block in remaining):
                return count
        return 0


_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+|\n+")


def _words(*patterns: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w)(?:{'|'.join(patterns)})(?!\w)", re.IGNORECASE)


# The pattern of a sentence of each category, the most salient first.
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


@final
class ExtractiveSummarizer:
    """A summarizer without a model: quotes of questions and last answers, and users' statements.

    The same turns always give the same summary. It invents nothing and understands no language:
    it recognizes facts, preferences and work by English phrases. Use a model's summaries for other
    languages.

    Args:
        quote_chars: The most characters of a quote.
        max_facts: The most facts of a summary.

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
        yield from (f"User: {_shortened(text, self._quote_chars)}" for text in questions)
        if tools:
            yield f"Tools used: {', '.join(dict.fromkeys(tools))}"
        if failed:
            yield f"Tools that failed: {', '.join(dict.fromkeys(failed))}"
        if answers:
            yield f"Assistant: {_shortened(answers[-1], self._quote_chars)}"


def _facts(turn: TurnTrace) -> Iterable[Fact]:
    for message in turn.messages:
        if message.role != "user":
            continue
        for sentence in _SENTENCE.split(message.text):
            line = " ".join(sentence.split())
            category = next(
                (name for name, words in _CATEGORIES.items() if words.search(line)), None
            )
            if category is not None and not line.endswith("?"):
                yield Fact(line, category)
