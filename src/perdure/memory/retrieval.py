"""Retrieval: which memories a working context is rebuilt with, and which match a query.

A context gets the newest episodes and the most salient facts; the same memory always gives the same
bundle, so that rebuilding a context twice gives the same context. A query weighs how well the words
match, how salient a memory is, and how new.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import sqrt
from operator import mul
from typing import Literal, final

import anyio.to_thread
import msgspec

from perdure.errors import InvalidArgumentError
from perdure.memory.compaction import EpisodicItem, MemoryBundle, SemanticItem, items_of, key_of
from perdure.memory.documents import EPISODIC, SEMANTIC
from perdure.memory.index import bm25
from perdure.memory.working_memory import OnSearched, reported

ReadLines = Callable[[str], Awaitable[Sequence[bytes]]]
"""Return the lines of a memory document, by the document's name."""
Rank = Callable[[str, Sequence[str]], Sequence[float]]
"""Return how well each text matches a query, from 0 to 1; runs in a thread."""
Embed = Callable[[Sequence[str]], Awaitable[Sequence[Sequence[float]]]]
"""Return a vector for each text; called with some texts at a time."""
Item = EpisodicItem | SemanticItem

_HEAVIEST = 500.0
EMBEDDED = 256
"""Number of texts that are embedded at a time."""


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of a query's score."""

    text: float = 1.0
    """The match: by words; with vectors, the better of both."""
    salience: float = 0.3
    recency: float = 0.2
    """The newest memory counts 1, the oldest almost 0."""


class RetrievedMemory(msgspec.Struct, frozen=True):
    """A memory that matches a query."""

    item: Item
    score: float
    match: float
    """Quality of the match, from 0 to 1."""

    @property
    def text(self) -> str:
        """The text of the memory."""
        return text_of(self.item)


def text_of(item: Item) -> str:
    """Return the text of an item."""
    return item.fact if isinstance(item, SemanticItem) else item.summary


def select(
    episodic: Sequence[EpisodicItem],
    semantic: Sequence[SemanticItem],
    *,
    max_episodic: int,
    max_semantic: int,
) -> MemoryBundle:
    """Return the newest episodes in order, and facts by salience, then by age.

    Of facts with the same words, the most salient counts.

    >>> select([], [], max_episodic=3, max_semantic=20)
    MemoryBundle(episodic=(), semantic=())
    """
    newest = tuple(episodic[-max_episodic:]) if max_episodic > 0 else ()
    # The newest of equally salient facts first; the sort is stable.
    newest_first = list(reversed(semantic))
    newest_first.sort(key=lambda item: -item.salience)
    once = {key_of(item.fact): item for item in reversed(newest_first)}
    facts = [item for item in newest_first if once[key_of(item.fact)] is item]
    return MemoryBundle(newest, tuple(facts[: max(max_semantic, 0)]))


def smaller(bundle: MemoryBundle) -> MemoryBundle:
    """Return a smaller bundle: without the oldest episode, then without the least salient fact;
    the last summary is cut."""
    episodic, semantic = bundle.episodic, bundle.semantic
    if len(episodic) > 1:
        return MemoryBundle(episodic[1:], semantic)
    if semantic:
        return MemoryBundle(episodic, semantic[:-1])
    if not episodic or len(episodic[0].summary) < 2:
        return MemoryBundle()
    summary = episodic[0].summary
    cut = msgspec.structs.replace(episodic[0], summary=summary[: len(summary) // 2 - 1] + "…")
    return MemoryBundle((cut,), semantic)


@final
class Retriever:
    """Fetch memories from a session's long-term memory.

    Args:
        read: Returns the lines of a memory document.
        rank: Rates how well texts match a query; None for BM25.
        embed: Returns vectors of texts, for matches by meaning; None for words alone.
        weights: The weights of the score.
        trim: Reduces a bundle to the size of the context.
        on_searched: Called with each search.

    """

    def __init__(
        self,
        read: ReadLines,
        *,
        rank: Rank | None = None,
        embed: Embed | None = None,
        weights: Weights | None = None,
        trim: Callable[[MemoryBundle], MemoryBundle] | None = None,
        on_searched: OnSearched | None = None,
    ) -> None:
        self._read = read
        self._on_searched = on_searched
        self._trim = trim
        self._rank = rank or bm25
        self._embed = embed
        self._weights = weights or Weights()
        self._vectors: dict[str, Sequence[float]] = {}

    def using(
        self,
        *,
        rank: Rank | None = None,
        embed: Embed | None = None,
        weights: Weights | None = None,
    ) -> Retriever:
        """Return a retriever of the same memories with other ranking; None keeps a setting."""
        return Retriever(
            self._read,
            rank=rank or self._rank,
            embed=embed or self._embed,
            weights=weights or self._weights,
            trim=self._trim,
            on_searched=self._on_searched,
        )

    async def retrieve(self, max_episodic: int, max_semantic: int) -> MemoryBundle:
        """Return the memories that a working context is rebuilt with.

        Raises:
            CorruptRecordError: A memory is damaged.
            StoreUnavailableError: The store cannot be reached.

        """
        bundle = select(
            await self.episodic(),
            await self.semantic(),
            max_episodic=max_episodic,
            max_semantic=max_semantic,
        )
        return bundle if self._trim is None else self._trim(bundle)

    async def search(
        self,
        query: str,
        *,
        limit: int = 10,
        kind: Literal["episodic", "semantic"] | None = None,
    ) -> list[RetrievedMemory]:
        """Return the memories that match a query, the best first; errors as ``retrieve``.

        An empty query matches all: salient and new memories come first.

        Args:
            query: Words; with vectors, a sentence is better.
            limit: How many at most.
            kind: Only episodes, or only facts.

        Raises:
            InvalidArgumentError: ``embed`` returns too few vectors, or of different lengths; this
                Python's SQLite has no full-text search, and no ``rank`` is given.

        """
        with reported(self._on_searched) as found:
            items: list[Item] = []
            if kind != "semantic":
                items += await self.episodic()
            if kind != "episodic":
                items += await self.semantic()
            matches = await self._matches(query, [text_of(item) for item in items])
            memories = scored(items, matches, self._weights)
            if query.strip():
                memories = [memory for memory in memories if memory.match > 0]
            found.extend(memories[: max(limit, 0)])
        return found

    async def episodic(self) -> list[EpisodicItem]:
        """Return all episodes, oldest first."""
        return items_of(await self._read(EPISODIC), EpisodicItem)

    async def semantic(self) -> list[SemanticItem]:
        """Return all facts, oldest first."""
        return items_of(await self._read(SEMANTIC), SemanticItem)

    async def _matches(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        if not query.strip() or not texts:
            return [0.0] * len(texts)
        by_words = await anyio.to_thread.run_sync(self._rank, query, texts)
        if self._embed is None:
            return by_words
        wanted, vectors = await self._vectors_of(query, texts, self._embed)

        def better() -> list[float]:
            return [
                max(words, cosine(wanted, vectors[text]))
                for words, text in zip(by_words, texts, strict=True)
            ]

        return await anyio.to_thread.run_sync(better)

    async def _vectors_of(
        self, query: str, texts: Sequence[str], embed: Embed
    ) -> tuple[Sequence[float], Mapping[str, Sequence[float]]]:
        """Return the vectors of a query and of texts; unknown ones are embedded."""
        known = {text: self._vectors[text] for text in texts if text in self._vectors}
        missing = [text for text in dict.fromkeys(texts) if text not in known]
        embedded: list[Sequence[float]] = []
        for at in range(0, len(missing) + 1, EMBEDDED):
            part = [query, *missing][at : at + EMBEDDED]
            embedded += _checked(await embed(part), part, [*known.values(), *embedded])
            # Stored at once: the next part may fail, and another search may have added some.
            self._vectors.update(zip(missing, embedded[1:], strict=False))
        wanted, *vectors = embedded
        return wanted, {**known, **dict(zip(missing, vectors, strict=True))}


def _checked(
    vectors: Sequence[Sequence[float]], texts: Sequence[str], known: Sequence[Sequence[float]]
) -> Sequence[Sequence[float]]:
    """Return vectors that match their texts, and earlier vectors, in number and length."""
    sizes = {len(vector) for vector in (*vectors, *known)}
    if len(vectors) != len(texts) or len(sizes) > 1:
        raise InvalidArgumentError(
            f"embed: {len(vectors)} vectors of {sorted(sizes)} numbers for {len(texts)} texts do "
            "not fit: return one vector for each text, all of the same length, and make a new "
            "Retriever for another model",
            option="embed",
        )
    return vectors


def scored(
    items: Sequence[Item], matches: Sequence[float], weights: Weights
) -> list[RetrievedMemory]:
    """Return items with their scores, the best first; of equal ones the newest."""
    by_age = sorted(range(len(items)), key=lambda at: (items[at].ts, at))
    recency = {at: (place + 1) / len(items) for place, at in enumerate(by_age)}
    memories = [
        RetrievedMemory(
            item,
            weights.text * match
            + weights.salience * min(item.salience / _HEAVIEST, 1.0)
            + weights.recency * recency[at],
            match,
        )
        for at, (item, match) in enumerate(zip(items, matches, strict=True))
    ]
    order = sorted(range(len(memories)), key=lambda at: (-memories[at].score, -recency[at]))
    return [memories[at] for at in order]


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the similarity of two vectors, from 0 to 1.

    >>> cosine([1.0, 0.0], [2.0, 0.0])
    1.0
    """
    length = sqrt(sum(map(mul, left, left)) * sum(map(mul, right, right)))
    return max(sum(map(mul, left, right)) / length, 0.0) if length else 0.0
