"""The chain: ids that only go up, and no link that can be changed unseen."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from perdure.checkpoints.chain import (
    CheckpointChain,
    canonical,
    digest,
    fold_chain,
    hash_of,
    problems_of,
    sealed,
)
from perdure.records.checkpoints import (
    CapturedState,
    Checkpoint,
    ExplicitState,
    Link,
    Pruning,
    Tombstone,
)
from perdure.records.json import decode, encode
from perdure.records.records import CHECKPOINT, CHECKPOINTS_PRUNED, Record

acts = st.lists(
    st.one_of(st.text(max_size=5), st.sets(st.integers(1, 12), min_size=1)), max_size=12
)
"""A label makes a checkpoint, a set of ids prunes those of them that there are."""


def made(steps: list[Any]) -> tuple[CheckpointChain, list[Record]]:
    """Act on a chain as an engine does; return it, and the records."""
    chain, records = CheckpointChain(), list[Record]()
    for seq, step in enumerate(steps, 1):
        common = {"timestamp": seq, "event_seq": seq * 10, "previous": chain.head, "hash": ""}
        link: Checkpoint | Pruning
        if isinstance(step, str):
            state = (
                CapturedState(chain.captured_upto, f"sha256:{seq}") if seq % 2 else given_state(seq)
            )
            link = Checkpoint(id=chain.newest_id + 1, label=step, state=state, **common)
            kind = CHECKPOINT
        else:
            gone = tuple(sorted(step & chain.by_id.keys()))
            if not gone:
                continue
            link = Pruning(ids=gone, **common)
            kind = CHECKPOINTS_PRUNED
        records.append(Record(seq, 1, kind, encode(sealed(link)), True))
        chain.apply(kind, records[-1].payload)
    return chain, records


def given_state(number: int) -> ExplicitState:
    return ExplicitState(value=msgspec.Raw(encode({"n": number})), size=7)


@given(acts)
def test_ids_go_up_and_are_never_used_again(steps: list[Any]) -> None:
    """S3-1, S3-G5: pruned or not, an id was given once; S3-2: they stand in its order."""
    chain, records = made(steps)
    ids = [decode(one.payload, Checkpoint).id for one in records if one.kind == CHECKPOINT]
    assert ids == list(range(1, len(ids) + 1))
    assert list(chain.by_id) == sorted(chain.by_id)
    assert chain.newest_id == len(ids)


@given(acts)
def test_a_chain_holds_whatever_was_pruned(steps: list[Any]) -> None:
    """S3-G5: after a prune the chain can still be verified."""
    assert problems_of(made(steps)[0].links) == []


@given(acts, st.data())
def test_its_document_is_a_fold_of_its_records(steps: list[Any], data: st.DataObject) -> None:
    chain, records = made(steps)
    at = data.draw(st.integers(0, len(records)))
    document = fold_chain(fold_chain(None, records[:at]), records[at:])
    assert CheckpointChain.of(document).links == chain.links
    assert CheckpointChain.of(fold_chain(None, records[:at]), records[at:]).links == chain.links


def test_an_id_that_comes_twice_is_found_though_the_chain_is_sound() -> None:
    """S3-2."""
    chain, _ = made(["one", "two"])
    first, second = chain.links
    assert isinstance(second, Checkpoint)
    again = sealed(msgspec.structs.replace(second, previous=second.hash))
    (problem,) = problems_of([first, second, again])
    assert (problem.id, problem.what) == (2, "its id comes after 2")


CHANGES: dict[str, Any] = {
    "id": 9,
    "label": "another",
    "timestamp": 99,
    "event_seq": 99,
    "previous": "sha256:0",
    "hash": "sha256:0",
    "state": ExplicitState(value=msgspec.Raw(b'{"n":0}'), size=7),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_is_found_at_its_checkpoint(field: str) -> None:
    """S3-G3, S3-6: label and timestamp are sealed as id and state are; the link is named."""
    links: list[Link] = list(made(["one", "two", "three"])[0].links)
    links[1] = msgspec.structs.replace(links[1], **{field: CHANGES[field]})
    found = {problem.id for problem in problems_of(links)}
    assert found & {2, 9}


def test_a_link_that_was_changed_and_sealed_anew_is_found_behind_it() -> None:
    """S3-G3: whoever forges a link has to forge all that follow."""
    links: list[Link] = list(made(["one", "two", "three"])[0].links)
    second = links[1]
    assert isinstance(second, Checkpoint)
    links[1] = sealed(msgspec.structs.replace(second, label="forged"))
    assert [problem.id for problem in problems_of(links)] == [3]


@pytest.mark.parametrize("at", [0, 1])
def test_a_link_that_was_taken_out_is_found(at: int) -> None:
    links: list[Link] = list(made(["one", "two", "three"])[0].links)
    del links[at]
    assert [problem.id for problem in problems_of(links)] == [at + 2]


def test_a_tombstone_keeps_its_place() -> None:
    chain, _ = made(["one", "two", {1}, "three"])
    first = chain.links[0]
    assert isinstance(first, Tombstone)
    assert (first.id, first.previous) == (1, "")
    forged = [msgspec.structs.replace(first, hash="sha256:0"), *chain.links[1:]]
    assert [problem.id for problem in problems_of(forged)] == [2]


@given(st.dictionaries(st.text(), st.integers()))
def test_canonical_json_knows_no_order(value: dict[str, int]) -> None:
    turned = dict(reversed(value.items()))
    assert canonical(value) == canonical(turned)


def test_a_hash_is_of_the_state_s_hash_so_a_state_may_be_kept_elsewhere() -> None:
    """S3-G5: whoever has a checkpoint without its state can still verify the chain."""
    link = Checkpoint(
        id=1,
        label="a",
        state=given_state(1),
        timestamp=1,
        event_seq=10,
        previous="",
        hash="",
    )
    fields = {name: getattr(link, name) for name in link.__struct_fields__}
    del fields["hash"], fields["state"]
    fields["state_hash"] = digest(canonical(link.state))
    assert hash_of(link) == digest(canonical(fields))
