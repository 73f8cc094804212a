"""Merkle tree of a state's chunks: common parts of two states are stored once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from perdure.records.chunks import ContentChunk, chunks_of
from perdure.records.json import decode_with, decoder_of

_MOST_BELOW: Final = 128


class TreeNode(msgspec.Struct, frozen=True):
    """The children of a node."""

    level: int
    """1 above leaves, 2 above such nodes, and so on."""
    below: tuple[ContentChunk, ...]
    """Leaves or nodes, each with the number of state bytes that it covers."""


class MerkleTree(msgspec.Struct, frozen=True):
    """A state's chunks and nodes, by hash."""

    root: str
    size: int
    """Bytes of the state."""
    leaves: tuple[ContentChunk, ...]
    names: frozenset[str]
    """Names of all leaves and nodes."""
    blobs: dict[str, bytes] = {}
    """Leaves and nodes that the earlier tree did not have, by name."""


def tree_of(data: bytes, before: MerkleTree | None = None) -> MerkleTree:
    """Return the tree of a state; its blobs omit what *before*, an earlier tree, has."""
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
    """Yield groups of about sixteen, at least two (the last may be one)."""
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
    """Decode a node.

    Raises:
        CorruptRecordError: The data is not a node.

    """
    return decode_with(decoder_of(TreeNode), data)
