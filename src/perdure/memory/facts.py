"""Long-term memory as values: facts distilled from turns, and the items that a log keeps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal, TypeVar, get_args

import msgspec

from perdure.errors import InvalidArgumentError
from perdure.records.json import decode, encode
from perdure.records.records import ITEM, Entry

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


class FactLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many facts one summary may add.

    Args:
        per_category: How many facts of each category.
        chars: The most characters of a fact; longer ones are cut.

    Raises:
        InvalidArgumentError: A value is invalid.

    """

    per_category: int = 8
    chars: int = 400

    def __post_init__(self) -> None:
        for name, least in {"per_category": 0, "chars": 16}.items():
            value = getattr(self, name)
            if value < least:
                raise InvalidArgumentError(
                    f"facts: invalid {name}={value!r}: it must be from {least} up",
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
