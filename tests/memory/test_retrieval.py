"""Which memories go back into a context."""

from __future__ import annotations

import pytest

from perdure.codec.json import encode
from perdure.errors import CorruptRecordError
from perdure.memory.documents import EPISODIC, fold_items
from perdure.memory.items import EpisodicItem, MemoryBundle, SemanticItem, item_entry, items_of
from perdure.memory.retrieval import Retriever, select
from perdure.model.records import Record


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
