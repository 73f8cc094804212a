"""States that callers give: into a checkpoint's record, or into blobs, and out of them again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Final

import anyio.to_thread
import msgspec
from msgspec import UNSET

from perdure._lib.tasks import each
from perdure.checkpoints.merkle_tree import MerkleTree, TreeNode, node_of, tree_of
from perdure.errors import CorruptRecordError
from perdure.records.checkpoints import ExplicitState
from perdure.records.chunks import ContentChunk
from perdure.records.json import encode
from perdure.records.values import Types, decode_value, lower
from perdure.store import Store

# A state as a Merkle tree of chunks: what two states have in common is there once
#
# The leaves are the chunks of the state's JSON. A node names the leaves or nodes below it by their
# hashes; where one node ends and the next begins is decided by the names, as chunks are cut by
# their bytes. So a change writes the chunks around it and the nodes above them. Leaves and nodes
# are blobs under their hashes, and the root's hash is the hash of the state. Pure.


INLINE: Final = 1024
"""A state of up to so many bytes of JSON lies in the record."""
OFFLOAD: Final = 64 * 1024
"""A larger one is cut in a thread."""
AT_A_TIME: Final = 256
"""Blobs in one call of the store: a megabyte."""

_sorted = msgspec.json.Encoder(order="sorted").encode


def encoded(state: Any, types: Types) -> tuple[bytes, dict[str, str] | None]:
    """Return a state's canonical JSON, of which nothing changes with the caller's object.

    Raises:
        NotStorableError: Some part of it cannot be stored; the error names path and type.

    """
    lowered, tags = lower(state, types, at="state")
    try:
        return _sorted(lowered), tags
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        encode(lowered)  # names the place
        raise


class CheckpointStates:
    """Where given states go: it knows the newest one's tree, so that the next writes little."""

    def __init__(self, store: Store, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._newest: MerkleTree | None = None

    async def keep(
        self, data: bytes, types: dict[str, str] | None, before: ExplicitState | None
    ) -> ExplicitState:
        """Make a state durable, *before* being a state that is known to be kept."""
        if len(data) <= INLINE or not self._store.capabilities.blobs:
            return ExplicitState(value=msgspec.Raw(data), size=len(data), types=types)
        known = await self._known(before)
        if len(data) > OFFLOAD:
            tree = await anyio.to_thread.run_sync(tree_of, data, known)
        else:
            tree = tree_of(data, known)
        await self._put(tree.blobs)
        self._newest = msgspec.structs.replace(tree, blobs={})
        return ExplicitState(root=tree.root, size=len(data), types=types)

    async def _known(self, before: ExplicitState | None) -> MerkleTree | None:
        if before is None or not before.root:
            return None
        if self._newest is None or self._newest.root != before.root:
            self._newest = await _tree(self._store, self._tenant, before.root)
        return self._newest

    async def _put(self, blobs: Mapping[str, bytes]) -> None:
        async def put(some: dict[str, bytes]) -> None:
            await self._store.put_blobs(self._tenant, some)

        await each(list(_portions(blobs)), put)


def _portions(blobs: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    """Give blobs by name, so that those that a store keeps together come together."""
    some: dict[str, bytes] = {}
    for name in sorted(blobs):
        some[name] = blobs[name]
        if len(some) == AT_A_TIME:
            yield some
            some = {}
    if some:
        yield some


async def read_state(store: Store, tenant: str, given: ExplicitState, types: Types) -> Any:
    """Return a state as it was given.

    Raises:
        CorruptRecordError: A part of it is lost or damaged.

    """
    return decode_value(await read_bytes(store, tenant, given), given.types, types)


async def read_bytes(store: Store, tenant: str, given: ExplicitState) -> bytes:
    """Return a state's canonical JSON; errors as `read_state`."""
    if given.value is not UNSET:
        return bytes(given.value)
    leaves: list[str] = []
    async with aclosing(_nodes(store, tenant, given.root)) as nodes:
        async for _, node in nodes:
            if node.level == 1:
                leaves += [leaf.name for leaf in node.below]
    chunks: dict[str, bytes] = {}

    async def read(name: str) -> None:
        chunks[name] = await _blob(store, tenant, name)

    await each(sorted(set(leaves)), read)
    return b"".join(chunks[name] for name in leaves)


async def _tree(store: Store, tenant: str, root: str) -> MerkleTree | None:
    """Return a tree whose leaves are not read; None if it is damaged: then all is put anew."""
    leaves: list[ContentChunk] = []
    names: set[str] = set()
    try:
        async with aclosing(_nodes(store, tenant, root)) as nodes:
            async for name, node in nodes:
                names.add(name)
                if node.level == 1:
                    leaves += node.below
    except CorruptRecordError:
        return None
    names |= {leaf.name for leaf in leaves}
    size = sum(leaf.size for leaf in leaves)
    return MerkleTree(root, size, tuple(leaves), frozenset(names))


async def _nodes(
    store: Store, tenant: str, root: str
) -> AsyncGenerator[tuple[str, TreeNode], None]:
    """Give a tree's nodes, those above leaves in the order of the state."""
    remaining = [root]
    while remaining:
        name = remaining.pop()
        node = node_of(await _blob(store, tenant, name))
        yield name, node
        if node.level > 1:
            remaining += [below.name for below in reversed(node.below)]


async def _blob(store: Store, tenant: str, name: str) -> bytes:
    data = await store.get_blob(tenant, name)
    if data is None:
        message = f"a part of the state is lost: blob {name} is not there; put it back from a copy"
        raise CorruptRecordError(message, blob=name)
    return data
