"""Storage of the states that callers pass to checkpoints: inline in the record, or as blobs.

A large state is a Merkle tree of chunks. The leaves are the chunks of the state's JSON; a node
names the leaves or nodes below it by their hashes. Node boundaries depend on these names, as chunk
boundaries depend on the bytes. A change therefore writes only the chunks around it and the nodes
above them. Leaves and nodes are blobs under their hashes; the root's hash identifies the state.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

import anyio.to_thread
import msgspec
from msgspec import UNSET

from perdure._lib.tasks import each
from perdure.checkpoints.chain import MerkleTree, TreeNode, node_of, tree_of
from perdure.errors import CorruptRecordError
from perdure.records.checkpoints import ExplicitState
from perdure.records.chunks import ContentChunk
from perdure.records.json import encode
from perdure.records.values import Types, decode_value, lower
from perdure.store import Store

INLINE: Final = 1024
"""Maximum bytes of JSON of a state that is stored in the record itself."""
OFFLOAD: Final = 64 * 1024
"""States above this many bytes are cut into chunks in a thread."""
AT_A_TIME: Final = 256
"""Blobs per call of the store, about a megabyte."""

_sorted = msgspec.json.Encoder(order="sorted").encode


def encoded(state: Any, types: Types) -> tuple[bytes, dict[str, str] | None]:
    """Return a state's canonical JSON, independent of the caller's object, and its type tags.

    Raises:
        NotStorableError: A part of it cannot be stored; the error names its path and type.

    """
    lowered, tags = lower(state, types, at="state")
    try:
        return _sorted(lowered), tags
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        encode(lowered)  # raises an error that names the path
        raise


class CheckpointStates:
    """Writer of states; caches the newest tree, so the next write stores only what changed."""

    def __init__(self, store: Store, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._newest: MerkleTree | None = None

    async def keep(
        self, data: bytes, types: dict[str, str] | None, before: ExplicitState | None
    ) -> ExplicitState:
        """Make a state durable; *before* is an earlier state that is durable already, or None."""
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
        async def put(names: list[str]) -> None:
            await self._store.put_blobs(self._tenant, {name: blobs[name] for name in names})

        names = sorted(blobs)  # so that a store finds neighbors in one batch
        await each([names[at : at + AT_A_TIME] for at in range(0, len(names), AT_A_TIME)], put)


async def read_state(store: Store, tenant: str, given: ExplicitState, types: Types) -> Any:
    """Return a state as the caller passed it.

    Raises:
        CorruptRecordError: A part of it is missing or damaged.

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
    blobs: dict[str, bytes] = {}

    async def read(name: str) -> None:
        blobs[name] = await _blob(store, tenant, name)

    await each(sorted(set(leaves)), read)
    return b"".join(blobs[name] for name in leaves)


async def _tree(store: Store, tenant: str, root: str) -> MerkleTree | None:
    """Return a tree without reading its leaves; None if damaged: all is then written again."""
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
    return MerkleTree(root, tuple(leaves), frozenset(names))


async def _nodes(
    store: Store, tenant: str, root: str
) -> AsyncGenerator[tuple[str, TreeNode], None]:
    """Yield a tree's nodes; those directly above leaves are in the state's order."""
    pending = [root]
    while pending:
        name = pending.pop()
        node = node_of(await _blob(store, tenant, name))
        yield name, node
        if node.level > 1:
            pending += [below.name for below in reversed(node.below)]


async def _blob(store: Store, tenant: str, name: str) -> bytes:
    data = await store.get_blob(tenant, name)
    if data is None:
        raise CorruptRecordError(
            f"a part of the state is lost: blob {name} is missing; restore it from a backup",
            blob=name,
        )
    return data
