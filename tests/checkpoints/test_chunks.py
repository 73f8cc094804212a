"""Chunks and trees: the same content is always the same, a change is a small one."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, strategies as st

from perdure.checkpoints.chain import MerkleTree, _groups, node_of, tree_of
from perdure.checkpoints.states import INLINE, CheckpointStates, read_bytes
from perdure.records.chunks import LARGEST, SMALLEST, ContentChunk, chunks_of, may_name
from perdure.store import Store
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryStore


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


sizes = st.integers(0, 25_000)
texts = st.builds(noise, st.integers(0, 1000), sizes) | st.builds(
    lambda part, times: part * times, st.binary(min_size=1, max_size=40), st.integers(0, 900)
)


@given(texts)
def test_chunks_are_the_bytes_and_keep_their_bounds(data: bytes) -> None:
    chunks = list(chunks_of(data))
    start = 0
    for chunk in chunks:
        assert hashlib.sha256(data[start : start + chunk.size]).hexdigest() == chunk.name
        start += chunk.size
    assert start == len(data)
    assert all(SMALLEST <= chunk.size <= LARGEST for chunk in chunks[:-1])


@given(texts, st.integers(0, 25_000), st.binary(max_size=300), st.integers(0, 300))
def test_an_earlier_version_never_changes_where_is_cut(
    data: bytes, at: int, inserted: bytes, dropped: int
) -> None:
    """The same content has the same chunks, however it came about."""
    before = list(chunks_of(data))
    changed = data[:at] + inserted + data[at + dropped :]
    assert list(chunks_of(changed, before)) == list(chunks_of(changed))


@given(st.integers(0, 1000), st.integers(0, 60_000), st.binary(min_size=1, max_size=100))
def test_one_insertion_changes_few_chunks(seed: int, at: int, inserted: bytes) -> None:
    """O(1): how many does not depend on how large the state is."""
    data = noise(seed, 60_000)
    before = {chunk.name for chunk in chunks_of(data)}
    changed = data[:at] + inserted + data[at:]
    new = [chunk for chunk in chunks_of(changed) if chunk.name not in before]
    assert len(new) <= 8


def joined(tree: MerkleTree, blobs: dict[str, bytes], name: str | None = None) -> bytes:
    node = node_of(blobs[name or tree.root])
    if node.level == 1:
        return b"".join(blobs[leaf.name] for leaf in node.below)
    return b"".join(joined(tree, blobs, below.name) for below in node.below)


@given(texts.filter(bool), st.integers(0, 25_000), st.binary(max_size=300))
def test_a_tree_with_an_earlier_one_is_whole(data: bytes, at: int, inserted: bytes) -> None:
    """S3-G3: the root names all of the content; what is shared is there once."""
    first = tree_of(data)
    changed = data[:at] + inserted + data[at:]
    second = tree_of(changed, first)
    assert second.root == tree_of(changed).root
    assert (second.root == first.root) == (changed == data)
    assert not second.blobs.keys() & first.blobs.keys()
    assert joined(second, {**first.blobs, **second.blobs}) == changed
    assert second.names <= first.blobs.keys() | second.blobs.keys()


def test_a_change_in_a_large_state_is_a_small_one() -> None:
    data = noise(1, 1_000_000)
    first = tree_of(data)
    second = tree_of(data[:500_000] + b"x" + data[500_000:], first)
    assert len(first.blobs) > 200
    assert sum(map(len, second.blobs.values())) < 40_000


def test_nodes_of_a_tree_end_where_their_content_says() -> None:
    """Otherwise a chunk that is inserted would change all nodes after it."""
    leaves = [ContentChunk(f"{number % 16:x}{number:063x}", 1) for number in range(200)]
    moved = [ContentChunk("f" * 64, 1), *leaves]
    before, after = set(_groups(leaves)), set(_groups(moved))
    assert len(after - before) <= 2
    assert {len(group) for group in list(_groups(leaves))[1:-1]} == {16}


@pytest.mark.parametrize(("first", "sizes"), [("0", [2] * 150), ("f", [128, 128, 44])])
def test_a_node_has_two_children_at_least_and_128_at_most(first: str, sizes: list[int]) -> None:
    """Whatever they are called: each level has half the nodes of the one below, or fewer."""
    below = [ContentChunk(f"{first}{number:063x}", 1) for number in range(300)]
    assert [len(group) for group in _groups(below)] == sizes
    assert [len(group) for group in _groups(below[:129])][-1] == 1


class Counted(DelegatingStore):
    """A store that notes which blobs it is given."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.put: list[str] = []

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        self.put += blobs
        await self.inner.put_blobs(tenant, blobs)


@pytest.mark.parametrize("lost", ["", "the root", "a node"])
async def test_a_process_that_goes_on_with_a_state_writes_what_changed(lost: str) -> None:
    """Where a part of the tree is lost, it writes all that it needs again."""
    store, data = Counted(MemoryStore()), noise(1, 1_000_000)
    before = await CheckpointStates(store, "").keep(data, None, None)
    first, store.put = store.put, []
    if lost:
        root = node_of(await store.get_blob("", before.root) or b"")
        await store.remove_blobs("", [before.root if lost == "the root" else root.below[0].name])
    changed = data[:500_000] + b"x" + data[500_000:]
    after = await CheckpointStates(store, "").keep(changed, None, before)
    assert (len(store.put) < len(first) / 20) == (not lost)
    assert await read_bytes(store, "", after) == changed


async def test_a_state_of_the_size_that_is_inline_is_not_stored_apart() -> None:
    store = MemoryStore()
    await store.open()
    states = CheckpointStates(store, "")
    for size, is_inline in ((INLINE, True), (INLINE + 1, False)):
        state = await states.keep(b'"' + b"x" * (size - 2) + b'"', None, None)
        assert (state.root == "") == is_inline
    await store.aclose()


@given(st.integers(0, 300_000), st.booleans(), st.lists(st.binary(max_size=20), max_size=3))
def test_a_name_is_seen_wherever_it_stands(at: int, is_medium: bool, others: list[bytes]) -> None:
    before = b'"\\u0070erdure:media:data:image/png:12:1x1:' if is_medium else b'"'
    value = b"x" * at + before + b"a" * 64 + b'"' + b"x" * (300_000 - at)
    assert may_name([*others, value])
    assert may_name([value, *others])
    assert not may_name([*others, value.replace(b'a"', b"a")])
