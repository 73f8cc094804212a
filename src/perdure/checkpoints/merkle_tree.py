"""A state as a Merkle tree of chunks: what two states have in common is there once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from perdure.records.chunks import ContentChunk, chunks_of
from perdure.records.json import decode_with, decoder_of

_MOST_BELOW: Final = 128


class TreeNode(msgspec.Struct, frozen=True):
    """What lies below a node."""

    level: int
    """1 above leaves, 2 above such nodes, and so on."""
    below: tuple[ContentChunk, ...]
    """Leaves or nodes, with the bytes of the state that each holds."""


class MerkleTree(msgspec.Struct, frozen=True):
    """A state, cut and named."""

    root: str
    size: int
    """Bytes of the state."""
    leaves: tuple[ContentChunk, ...]
    names: frozenset[str]
    """All of its leaves and nodes."""
    blobs: dict[str, bytes] = {}
    """Those that an earlier tree did not have."""


def tree_of(data: bytes, before: MerkleTree | None = None) -> MerkleTree:
    """Return the tree of a state; what *before*, an earlier one, has is left out of its blobs."""
    leaves = tuple(chunks_of(data, () if before is None else before.leaves))
    known = frozenset[str]() if before is None else before.names
    blobs = {name: leaf for name, leaf in _cut(data, leaves) if name not in known}
    names = {leaf.name for leaf in leaves}
    level = 0
    layer: Sequence[ContentChunk] = leaves
    while level == 0 or len(layer) > 1:
        level += 1
        nodes: list[ContentChunk] = []
        for below in _groups(layer):
            node = msgspec.json.encode(TreeNode(level, below))
            name = hashlib.sha256(node).hexdigest()
            if name not in known:
                blobs[name] = node
            nodes.append(ContentChunk(name, sum(chunk.size for chunk in below)))
        layer = nodes
        names |= {node.name for node in nodes}
    return MerkleTree(layer[0].name, len(data), leaves, frozenset(names), blobs)


def _cut(data: bytes, leaves: Sequence[ContentChunk]) -> Iterator[tuple[str, bytes]]:
    start = 0
    for leaf in leaves:
        yield leaf.name, data[start : start + leaf.size]
        start += leaf.size


def _groups(layer: Sequence[ContentChunk]) -> Iterator[tuple[ContentChunk, ...]]:
    """Give runs of two or more (the last may be one), about sixteen."""
    group: list[ContentChunk] = []
    for chunk in layer:
        group.append(chunk)
        ends = chunk.name[0] == "0" and len(group) > 1
        if ends or len(group) == _MOST_BELOW:
            yield tuple(group)
            group = []
    if group:
        yield tuple(group)


def node_of(data: bytes) -> TreeNode:
    """Return a node that was read.

    Raises:
        CorruptRecordError: It is none.

    """
    return decode_with(decoder_of(TreeNode), data)
