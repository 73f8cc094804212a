"""Hashes of checkpoints: a chain of links, and the Merkle tree of a large state's chunks. Pure.

A link's hash is the SHA-256 of the canonical JSON of its fields: id, label, timestamp, event_seq,
the hash of its state, and the hash of the previous link. A link that was changed, removed or
inserted therefore breaks the chain, and `problems_of` names the link.

The chain is folded from the log's records, like every document. A tree has the names of its
chunks, so common parts of two states are stored once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias, final

import msgspec

from perdure.errors import CheckpointNotFoundError, InvalidArgumentError
from perdure.records.checkpoints import (
    FIRST,
    CapturedState,
    Checkpoint,
    Link,
    Pruning,
    Tombstone,
)
from perdure.records.chunks import ContentChunk, chunks_of, name_of
from perdure.records.json import decode, decode_with, decoder_of
from perdure.records.media import LIFTED_KINDS, lifted
from perdure.records.records import (
    BASE,
    CHECKPOINT,
    CHECKPOINTS_PRUNED,
    ENDING,
    FORK,
    HOLDER_KINDS,
    Record,
)

CHAIN_KINDS = frozenset({CHECKPOINT, CHECKPOINTS_PRUNED})
"""Kinds of the records that are links."""

_sorted = msgspec.json.Encoder(order="sorted").encode


def canonical(value: Any) -> bytes:
    """Return a value's JSON in canonical form, as it is hashed: sorted keys, no spaces.

    >>> canonical({"b": 1, "a": [msgspec.Raw(b'{"d": 0, "c": 0}')]})
    b'{"a":[{"c":0,"d":0}],"b":1}'
    """
    return _sorted(decode(_sorted(value)))


def digest(data: bytes) -> str:
    """Return the digest of bytes, prefixed with the name of the algorithm."""
    return f"sha256:{name_of(data)}"


def hash_of(link: Checkpoint | Pruning) -> str:
    """Return the hash that a link must have."""
    fields = {name: getattr(link, name) for name in link.__struct_fields__ if name != "hash"}
    if isinstance(link, Checkpoint):
        fields["state_hash"] = digest(canonical(fields.pop("state")))
    return digest(canonical(fields))


_Sealable: TypeAlias = Checkpoint | Pruning


def sealed(link: _Sealable) -> Any:
    """Return a link with its hash."""
    return msgspec.structs.replace(link, hash=hash_of(link))


class ChainProblem(msgspec.Struct, frozen=True):
    """A defect of the chain or of a checkpoint's state."""

    id: int | None
    """The checkpoint that has it; None for a pruning."""
    what: str


class CheckpointChain:
    """All links of a session, oldest first, from its document or its records."""

    __slots__ = ("_places", "by_id", "captured_upto", "links", "newest_id")

    def __init__(self, links: Iterable[Link] = ()) -> None:
        self.links: list[Link] = []
        self.by_id: dict[int, Checkpoint] = {}
        """Checkpoints that were not pruned, in the order of their ids."""
        self.newest_id: int = 0
        """The newest id that was assigned, pruned checkpoints included."""
        self.captured_upto: int = 0
        """The last record that a checkpoint of the session itself covers."""
        self._places: dict[int, int] = {}
        for link in links:
            self._add(link)

    @classmethod
    def of(cls, document: bytes | None, records: Iterable[Record] = ()) -> CheckpointChain:
        """Return the chain of a document and the records after it."""
        chain = cls(decode(line, Link) for line in (document or b"").splitlines())
        for record in records:
            chain.apply(record.kind, record.payload)
        return chain

    def apply(self, kind: str, payload: bytes) -> None:
        """Apply the next record; records of other kinds are ignored."""
        if kind not in CHAIN_KINDS:
            return
        link: Link = decode(payload, Link)
        if isinstance(link, Pruning):
            for pruned_id in link.ids:
                # A tombstone keeps the hash, so that the links after it still verify.
                self._bury(pruned_id)
        self._add(link)

    def _add(self, link: Link) -> None:
        if isinstance(link, Checkpoint):
            self.by_id[link.id] = link
        if not isinstance(link, Pruning):
            self._places[link.id] = len(self.links)
            self.newest_id = link.id
            if _is_captured(link):
                self.captured_upto = link.event_seq
        self.links.append(link)

    def _bury(self, id: int) -> None:
        removed = self.by_id.pop(id, None)
        if removed is not None:
            self.links[self._places[id]] = Tombstone(
                id=id,
                event_seq=removed.event_seq,
                captured=_is_captured(removed),
                previous=removed.previous,
                hash=removed.hash,
            )

    def bury_captured(self) -> None:
        """Leave a tombstone of each checkpoint of the session itself: its history is not there."""
        for checkpoint in [one for one in self.by_id.values() if _is_captured(one)]:
            self._bury(checkpoint.id)

    def had(self, id: int) -> bool:
        """Say whether an id was ever assigned, even to a checkpoint that was pruned."""
        return id in self._places

    @property
    def head(self) -> str:
        """Hash of the newest link, which the next one must contain."""
        return self.links[-1].hash if self.links else FIRST

    @property
    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that was not pruned."""
        return next(reversed(self.by_id.values()), None)

    @property
    def needed(self) -> Checkpoint | None:
        """Oldest checkpoint of the session itself: history from it on must not be pruned."""
        return next(
            (checkpoint for checkpoint in self.by_id.values() if _is_captured(checkpoint)), None
        )

    def document(self) -> bytes:
        """Return the chain as lines."""
        return b"".join(msgspec.json.encode(link) + b"\n" for link in self.links)


def _is_captured(link: Checkpoint | Tombstone) -> bool:
    return link.captured if isinstance(link, Tombstone) else isinstance(link.state, CapturedState)


def fold_chain(old: bytes | None, records: Sequence[Record]) -> bytes:
    """Return checkpoints.jsonl with *records* applied; appends lines unless some were pruned."""
    if any(record.kind == CHECKPOINTS_PRUNED for record in records):
        return CheckpointChain.of(old, records).document()
    links = (record.payload + b"\n" for record in records if record.kind == CHECKPOINT)
    return (old or b"") + b"".join(links)


def problems_of(links: Iterable[Link]) -> list[ChainProblem]:
    """Return the defects of a chain: changed or missing links, ids out of order."""
    problems: list[ChainProblem] = []
    previous, newest = FIRST, -1
    for link in links:
        number = None if isinstance(link, Pruning) else link.id
        if not isinstance(link, Tombstone) and link.hash != hash_of(link):
            problems.append(
                ChainProblem(number, "it was changed: its hash is not that of what it says")
            )
        if link.previous != previous:
            problems.append(ChainProblem(number, "the link before it was changed or is missing"))
        if number is not None:
            if number <= newest:
                problems.append(ChainProblem(number, f"its id comes after {newest}"))
            newest = max(newest, number)
        previous = link.hash
    return problems


# Digest of a range of log records, which a checkpoint of the session itself contains. Records that
# the store writes for itself (epochs, bases, fork notes) do not count: a copy of the session in
# another store has different ones.


_UNCOUNTED = HOLDER_KINDS | {BASE, FORK, ENDING}


@final
class LogDigest:
    """Running digest of the log, as it is stored; a record that is fed twice counts once."""

    __slots__ = ("_hash", "lifts", "seq", "since")

    def __init__(self, since: int, *, lifts: bool = False) -> None:
        self.since: int = since
        """The record after which the digest begins."""
        self.lifts: bool = lifts
        """True if the store has the media of what is appended in blobs."""
        self.seq: int = since
        """The last record in the digest."""
        self._hash = hashlib.sha256()

    def feed(self, seq: int, kind: str, payload: bytes) -> None:
        """Add a record as it is stored, if it is the next one."""
        if seq != self.seq + 1:
            return
        self.seq = seq
        if kind not in _UNCOUNTED:
            self._hash.update(b"%d %b %d\n" % (seq, kind.encode(), len(payload)))
            self._hash.update(payload)

    def accept(self, seq: int, kind: str, payload: bytes) -> None:
        """Add a record that is not stored yet, as it will be."""
        if self.lifts and seq == self.seq + 1 and kind in LIFTED_KINDS:
            payload, _ = lifted(payload)
        self.feed(seq, kind, payload)

    def copy(self) -> LogDigest:
        """Return an independent copy."""
        other = LogDigest(self.since, lifts=self.lifts)
        other.seq, other._hash = self.seq, self._hash.copy()
        return other

    @property
    def value(self) -> str:
        """The digest so far."""
        return f"sha256:{self._hash.hexdigest()}"


def let_go(ids: Sequence[int], keep: int | Collection[int]) -> tuple[int, ...]:
    """Return the ids that go; *ids* are in their order, *keep* is how many or which.

    >>> let_go([1, 2, 5], keep=1)
    (1, 2)
    >>> let_go([1, 2, 5], keep=[2])
    (1, 5)

    Raises:
        CheckpointNotFoundError: An id is not among them.
        InvalidArgumentError: A number is below 0.

    """
    if isinstance(keep, int):
        if keep < 0:
            raise InvalidArgumentError(
                f"prune: invalid keep={keep}: give a number from 0, or ids to keep",
                option="keep",
                value=keep,
            )
        return tuple(ids[: max(len(ids) - keep, 0)])
    unknown = sorted(set(keep) - set(ids))
    if unknown:
        raise CheckpointNotFoundError(
            f"prune: keep names {unknown}, which are no checkpoints: nothing was pruned; "
            "checkpoints.states() lists them",
            option="keep",
            unknown=unknown,
        )
    return tuple(number for number in ids if number not in keep)


# The Merkle tree of a state's chunks: common parts of two states are stored once


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
    leaves: tuple[ContentChunk, ...]
    names: frozenset[str]
    """Names of all leaves and nodes."""
    blobs: dict[str, bytes] = {}
    """Leaves and nodes that the earlier tree did not have, by name."""


def tree_of(data: bytes, before: MerkleTree | None = None) -> MerkleTree:
    """Return the tree of a state; its blobs omit what *before*, an earlier tree, has."""
    # Leaves first, then level on level, until one node holds all.
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
            name = name_of(node)
            if name not in known:
                blobs[name] = node
            nodes.append(ContentChunk(name, sum(chunk.size for chunk in below)))
        layer = nodes
        names |= {node.name for node in nodes}
    return MerkleTree(layer[0].name, leaves, frozenset(names), blobs)


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
        # Groups end by content, not by count: an insertion changes the nodes near it only.
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
