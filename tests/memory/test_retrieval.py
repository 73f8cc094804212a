"""Which memories go back into a context."""

from __future__ import annotations

import anyio
import pytest

from perdure.errors import ConfigError, CorruptRecordError
from perdure.memory.compaction import EpisodicItem, MemoryBundle, SemanticItem, item_entry, items_of
from perdure.memory.documents import EPISODIC, fold_items
from perdure.memory.retrieval import RetrievedMemory, Retriever, Weights, select, smaller
from perdure.records.json import encode
from perdure.records.records import Record


def episode(number: int) -> EpisodicItem:
    return EpisodicItem(
        id=f"ep_{number}", ts=float(number), summary=f"part {number}", as_of_seq=number
    )


def fact(number: int, salience: float = 0.0) -> SemanticItem:
    return SemanticItem(
        id=f"sem_{number}", ts=float(number), fact=f"fact {number}", salience=salience
    )


def test_the_newest_episodes_come_in_their_order() -> None:
    bundle = select([episode(n) for n in range(5)], [], max_episodic=3, max_semantic=20)
    assert [item.id for item in bundle.episodic] == ["ep_2", "ep_3", "ep_4"]


def test_weighty_facts_come_first_then_new_ones() -> None:
    facts = [fact(1), fact(2, 5.0), fact(3), fact(4, 5.0)]
    bundle = select([], facts, max_episodic=3, max_semantic=3)
    assert [item.id for item in bundle.semantic] == ["sem_4", "sem_2", "sem_3"]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_nothing_gives_nothing(limit: int) -> None:
    found = select([episode(1)], [fact(1)], max_episodic=limit, max_semantic=limit)
    assert found == MemoryBundle()


def test_an_item_that_is_there_twice_counts_once() -> None:
    """Ids are those of what was summed up, so a repeated compaction does not double memories."""
    lines = [encode(episode(1)), encode(episode(1)), encode(episode(2))]
    assert items_of(lines, EpisodicItem) == [episode(1), episode(2)]


def test_a_damaged_line_is_an_error_and_not_a_gap() -> None:
    with pytest.raises(CorruptRecordError):
        items_of([encode(episode(1)), b'{"id": "ep_2"'], EpisodicItem)


async def test_what_is_recorded_is_retrieved() -> None:
    entries = [item_entry(item) for item in (episode(1), fact(1), episode(2))]
    records = [Record(seq, 1, one.kind, one.payload, True) for seq, one in enumerate(entries, 1)]

    async def read(name: str) -> list[bytes]:
        mine = [one for one in records if (b'"episodic"' in one.payload) == (name == EPISODIC)]
        return fold_items(None, mine).splitlines()

    bundle = await Retriever(read).retrieve(3, 20)
    assert bundle == MemoryBundle((episode(1), episode(2)), (fact(1),))


# answers to queries


def memory_of(*items: EpisodicItem | SemanticItem, **options: object) -> Retriever:
    async def read(name: str) -> list[bytes]:
        kind = EpisodicItem if name == EPISODIC else SemanticItem
        return [encode(one) for one in items if isinstance(one, kind)]

    return Retriever(read, **options)  # type: ignore[arg-type]


def says(number: int, text: str, salience: float = 200.0) -> SemanticItem:
    return SemanticItem(id=f"sem_{number}", ts=float(number), fact=text, salience=salience)


BOAT = says(1, "The boat is called Sula.")
BERTH = says(2, "Her berth is number 12.")
PUMP = says(3, "The bilge pump of the boat leaks.", 500.0)
TRIP = EpisodicItem(id="ep_4", ts=4.0, summary="User: We sailed the boat to the islands.")


async def test_a_query_finds_by_words_in_facts_and_episodes() -> None:
    """S0-15: what a rebuild would leave out can still be asked for."""
    retriever = memory_of(BOAT, BERTH, PUMP, TRIP)
    assert [one.item for one in await retriever.search("berth")] == [BERTH]
    assert {one.item.id for one in await retriever.search("boat")} == {"sem_1", "sem_3", "ep_4"}
    assert [one.item for one in await retriever.search("islands boat", kind="episodic")] == [TRIP]
    assert await retriever.search("anchor") == []


async def test_of_two_that_fit_alike_the_salient_then_the_newer_comes_first() -> None:
    salient = memory_of(says(1, "The pump leaks.", 500.0), says(2, "The pump leaks.", 100.0))
    assert [one.item.id for one in await salient.search("pump")] == ["sem_1", "sem_2"]
    newer = memory_of(says(1, "The pump leaks."), says(2, "The pump leaks."))
    assert [one.item.id for one in await newer.search("pump")] == ["sem_2", "sem_1"]


async def test_without_a_query_what_is_salient_and_new_comes_first() -> None:
    found = await memory_of(BOAT, BERTH, PUMP).search("", limit=2)
    assert [one.item for one in found] == [PUMP, BERTH]
    assert all(one.match == 0.0 for one in found)


@pytest.mark.parametrize(
    ("query", "fits"),
    [
        ("boats", True),  # by the stem
        ("SULA", True),
        ("súla", True),  # without accents
        ('"sula" OR x NEAR(y)', True),  # no syntax, only words
        ("* -", False),
        ("\x00\ud800", False),
        ("oat", False),
        ("call", True),
        ("sul", True),  # a word's beginning, since nothing has the word itself
        ("x" * 100_000, False),
        ("a b c d e f " * 10_000, False),
    ],
    ids=range(11),
)
async def test_a_query_is_words_and_no_syntax(query: str, fits: bool) -> None:
    assert [one.item for one in await memory_of(BOAT).search(query)] == [BOAT] * fits


async def test_a_words_beginning_counts_only_where_nothing_has_the_word() -> None:
    retriever = memory_of(says(1, "The car is red."), says(2, "She is careful."))
    assert [one.item.id for one in await retriever.search("car")] == ["sem_1"]
    assert [one.item.id for one in await retriever.search("caref")] == ["sem_2"]


@pytest.mark.parametrize(
    ("query", "fits"),
    [
        ("船叫什么", "我的船叫苏拉。"),
        ("苏", "我的船叫苏拉。"),
        ("ボートの名前", "ボートはスーラです。"),
        ("배", "제 배는 술라입니다."),
        ("เรือ", "เรือของฉันชื่อซูลา"),
        ("Sula是什么", "船名是Sula"),
    ],
    ids=["sentence", "character", "kana", "hangul", "thai", "mixed"],
)
async def test_scripts_without_spaces_are_searched(query: str, fits: str) -> None:
    others = [says(2, "Her berth is number 12."), says(3, "天气很好")]
    found = await memory_of(says(1, fits), *others).search(query)
    assert found[0].text == fits


async def test_vectors_find_what_words_do_not() -> None:
    axes = {"yacht": (1.0, 0.0), "boat": (0.9, 0.1), "berth": (0.0, 1.0)}
    asked: list[list[str]] = []

    async def embed(texts: list[str]) -> list[tuple[float, float]]:
        asked.append(list(texts))
        return [next(axes[word] for word in axes if word in text.casefold()) for text in texts]

    retriever = memory_of(BOAT, BERTH, embed=embed)
    found = await retriever.search("yacht")
    assert found[0].item == BOAT
    assert found[0].match > 0.9
    await retriever.search("yacht")
    assert asked == [["yacht", "The boat is called Sula.", "Her berth is number 12."], ["yacht"]]


async def test_a_ranking_and_weights_can_be_replaced() -> None:
    """S1-4c."""

    def by_length(query: str, texts: list[str]) -> list[float]:
        return [len(text) / 100 for text in texts]

    only_text = Weights(salience=0.0, recency=0.0)
    found = await memory_of(BOAT, BERTH, PUMP, rank=by_length, weights=only_text).search("x")
    assert [one.item for one in found] == [PUMP, BOAT, BERTH]
    assert found[0].score == found[0].match == len(PUMP.fact) / 100


async def test_a_retriever_can_rank_otherwise_and_keeps_what_is_not_said() -> None:
    """S1-4c: vectors are an option of the retriever that an agent has."""

    async def embed(texts: list[str]) -> list[tuple[float, float]]:
        return [(float("berth" in text), float("boat" in text)) for text in texts]

    plain = memory_of(BOAT, BERTH, weights=Weights(salience=0.0, recency=0.0))
    (found, *_) = await plain.using(embed=embed).search("my berth boat")
    assert found.score == found.match == 1.0
    assert await plain.using(rank=lambda _, texts: [0.0] * len(texts)).search("boat") == []
    assert [one.item for one in await plain.search("boat")] == [BOAT]


async def test_a_python_without_full_text_search_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sqlite3

    connect = sqlite3.connect

    class Bare(sqlite3.Connection):
        def execute(self, sql: str, *args: object) -> sqlite3.Cursor:
            if "fts5" in sql:
                raise sqlite3.OperationalError("no such module: fts5")
            return super().execute(sql, *args)

    monkeypatch.setattr(sqlite3, "connect", lambda path: connect(path, factory=Bare))
    with pytest.raises(ConfigError, match="rank="):
        await memory_of(BOAT).search("boat")


def test_facts_that_say_the_same_count_once_in_a_context() -> None:
    facts = [says(1, "Likes herring."), says(2, "likes herring", 300.0), says(3, "It rained.")]
    bundle = select([], facts, max_episodic=3, max_semantic=20)
    assert [one.id for one in bundle.semantic] == ["sem_2", "sem_3"]


def test_a_bundle_becomes_smaller_until_nothing_is_left() -> None:
    bundle = MemoryBundle((episode(1), episode(2)), (says(1, "a b c"), says(2, "d e f")))
    sizes = [bundle]
    while sizes[-1] != MemoryBundle():
        sizes.append(smaller(sizes[-1]))
    assert [len(one.episodic) for one in sizes[:4]] == [2, 1, 1, 1]
    assert [len(one.semantic) for one in sizes[:4]] == [2, 2, 1, 0]
    assert sizes[4].episodic[0].summary.endswith("…")


async def test_many_texts_are_put_into_vectors_some_at_a_time() -> None:
    """Providers take so many in a request; and what was there when one failed is kept."""
    sizes: list[int] = []
    fails = {2}

    async def embed(texts: list[str]) -> list[tuple[float, float]]:
        sizes.append(len(texts))
        if len(sizes) in fails:
            raise TimeoutError
        return [(1.0, float(len(text))) for text in texts]

    retriever = memory_of(*(says(at, f"fact {at}") for at in range(300)), embed=embed)
    with pytest.raises(TimeoutError):
        await retriever.search("x")
    assert len(await retriever.search("x", limit=500)) == 300
    assert sizes == [256, 45, 46]


async def test_two_searches_at_a_time_do_not_take_vectors_from_one_another() -> None:
    waits, done = anyio.Event(), anyio.Event()

    async def embed(texts: list[str]) -> list[tuple[float, float]]:
        if texts == ["slowly"]:
            waits.set()
            await done.wait()
        return [(float(len(text)), 1.0) for text in texts]

    retriever = memory_of(BOAT, TRIP, embed=embed)
    await retriever.search("everything")
    found: list[RetrievedMemory] = []

    async def slowly() -> None:
        found.extend(await retriever.search("slowly"))

    async with anyio.create_task_group() as group:
        group.start_soon(slowly)
        await waits.wait()
        assert [one.item for one in await retriever.search("facts", kind="semantic")] == [BOAT]
        done.set()
    assert {one.item.id for one in found} == {"sem_1", "ep_4"}


@pytest.mark.parametrize(
    "vectors",
    [
        [],
        [(1.0, 0.0)],
        [(1.0, 0.0), (1.0, 0.0), (1.0,)],
    ],
)
async def test_vectors_that_do_not_fit_are_an_error_that_says_so(
    vectors: list[tuple[float, ...]],
) -> None:
    async def embed(texts: list[str]) -> list[tuple[float, ...]]:
        return vectors

    with pytest.raises(ConfigError, match="embed: .* one vector for each text"):
        await memory_of(BOAT, BERTH, embed=embed).search("boat")
