"""The chain of a session's checkpoints: each link is sealed to the one before it.

A link's hash is the SHA-256 of the canonical JSON of all that it says: id, label, timestamp,
event_seq, the hash of its state, and the hash of the link before. So nothing in the chain can be
changed, left out or put in without a link that no longer fits, and that link has a name.

The chain is a fold of the log's records, like every document. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias, final

import msgspec

from perdure.errors import ConfigError
from perdure.records.checkpoints import (
    FIRST,
    CapturedState,
    Checkpoint,
    ExplicitState,
    Link,
    Pruning,
    Tombstone,
)
from perdure.records.json import decode
from perdure.records.records import (
    BASE,
    CHECKPOINT,
    CHECKPOINTS_PRUNED,
    ENDING,
    EPOCH,
    FORK,
    Record,
)

CHAIN_KINDS = frozenset({CHECKPOINT, CHECKPOINTS_PRUNED})
"""Kinds of the records that are links."""

_sorted = msgspec.json.Encoder(order="sorted").encode


def canonical(value: Any) -> bytes:
    """Return a value's JSON in the one form that is hashed: keys in order, no spaces.

    >>> canonical({"b": 1, "a": [msgspec.Raw(b'{"d": 0, "c": 0}')]})
    b'{"a":[{"c":0,"d":0}],"b":1}'
    """
    return _sorted(decode(_sorted(value)))


def digest(data: bytes) -> str:
    """Return the digest of bytes, by a name that says how it was made."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def state_hash(state: CapturedState | ExplicitState) -> str:
    """Return the digest of what a checkpoint is of: of a state's content, however large."""
    return digest(canonical(state))


def hash_of(link: Checkpoint | Pruning) -> str:
    """Return the hash that a link has to have."""
    hashed = {name: getattr(link, name) for name in link.__struct_fields__ if name != "hash"}
    if isinstance(link, Checkpoint):
        hashed["state_hash"] = state_hash(hashed.pop("state"))
    return digest(canonical(hashed))


_Sealable: TypeAlias = Checkpoint | Pruning


def sealed(link: _Sealable) -> Any:
    """Return a link with its hash."""
    return msgspec.structs.replace(link, hash=hash_of(link))


class ChainProblem(msgspec.Struct, frozen=True):
    """Something that does not fit."""

    id: int | None
    """The checkpoint that it was found at; None for a pruning."""
    what: str


class CheckpointChain:
    """All links of a session, oldest first; made of its document, or of its records."""

    __slots__ = ("_places", "by_id", "captured_upto", "links", "newest_id")

    def __init__(self, links: Iterable[Link] = ()) -> None:
        self.links: list[Link] = []
        self.by_id: dict[int, Checkpoint] = {}
        """Those that were not pruned, by id, in its order."""
        self.newest_id: int = 0
        """The last id that was given, to a checkpoint that was pruned too."""
        self.captured_upto: int = 0
        """The last record that a checkpoint of the session itself covers."""
        self._places: dict[int, int] = {}
        for link in links:
            self._add(link)

    @classmethod
    def of(cls, document: bytes | None, records: Iterable[Record] = ()) -> CheckpointChain:
        """Return the chain of a document and the records behind it."""
        chain = cls(decode(line, Link) for line in (document or b"").splitlines())
        for record in records:
            chain.apply(record.kind, record.payload)
        return chain

    def apply(self, kind: str, payload: bytes) -> None:
        """Take in the next record; of another kind it changes nothing."""
        if kind not in CHAIN_KINDS:
            return
        link: Link = decode(payload, Link)
        if isinstance(link, Pruning):
            for checkpoint in link.ids:
                self._bury(checkpoint)
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
        pruned = self.by_id.pop(id, None)
        if pruned is not None:
            self.links[self._places[id]] = Tombstone(
                id=id,
                event_seq=pruned.event_seq,
                captured=_is_captured(pruned),
                previous=pruned.previous,
                hash=pruned.hash,
            )

    def had(self, id: int) -> bool:
        """Say whether an id was given once, to a checkpoint that was pruned too."""
        return id in self._places

    @property
    def head(self) -> str:
        """The hash of the newest link, which the next one names."""
        return self.links[-1].hash if self.links else FIRST

    @property
    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that was not pruned."""
        return next(reversed(self.by_id.values()), None)

    @property
    def needed(self) -> Checkpoint | None:
        """The oldest checkpoint of the session itself: from there on, it has to stay known."""
        return next(
            (checkpoint for checkpoint in self.by_id.values() if _is_captured(checkpoint)), None
        )

    def document(self) -> bytes:
        """Return the chain as lines."""
        return b"".join(msgspec.json.encode(link) + b"\n" for link in self.links)


def _is_captured(link: Checkpoint | Tombstone) -> bool:
    return link.captured if isinstance(link, Tombstone) else isinstance(link.state, CapturedState)


def fold_chain(old: bytes | None, records: Sequence[Record]) -> bytes:
    """Return checkpoints.jsonl after ``records``: a line more for each, unless some are pruned."""
    if any(record.kind == CHECKPOINTS_PRUNED for record in records):
        return CheckpointChain.of(old, records).document()
    links = (record.payload + b"\n" for record in records if record.kind == CHECKPOINT)
    return (old or b"") + b"".join(links)


def problems_of(links: Iterable[Link]) -> list[ChainProblem]:
    """Return what does not fit in a chain: a changed link, a missing one, an id out of order."""
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


# The digest of a run of the log's records: what a checkpoint of a session is sealed with
#
# What the store and its housekeeping write on their own account (epochs, bases, notes of forks)
# does not count, since a copy of a session that has moved has others. Pure.


_UNCOUNTED = frozenset({EPOCH, BASE, FORK, ENDING, "gap"})


@final
class LogDigest:
    """A digest that grows with the log; records may come twice, and count once."""

    __slots__ = ("_hash", "seq", "since")

    def __init__(self, since: int) -> None:
        self.since: int = since
        """The record behind which it begins."""
        self.seq: int = since
        """The last record that is in it."""
        self._hash = hashlib.sha256()

    def feed(self, seq: int, kind: str, payload: bytes) -> None:
        """Take in a record, if it is the next one."""
        if seq != self.seq + 1:
            return
        self.seq = seq
        if kind not in _UNCOUNTED:
            self._hash.update(b"%d %b %d\n" % (seq, kind.encode(), len(payload)))
            self._hash.update(payload)

    def copy(self) -> LogDigest:
        """Return one that goes on by itself."""
        other = LogDigest(self.since)
        other.seq, other._hash = self.seq, self._hash.copy()
        return other

    @property
    def value(self) -> str:
        """The digest as of now."""
        return f"sha256:{self._hash.hexdigest()}"


# Which checkpoints are let go when some are kept. Pure


def let_go(ids: Sequence[int], keep: int | Collection[int]) -> tuple[int, ...]:
    """Return the ids that go; *ids* are in their order, *keep* is how many or which.

    >>> let_go([1, 2, 5], keep=1)
    (1, 2)
    >>> let_go([1, 2, 5], keep=[2])
    (1, 5)

    Raises:
        ConfigError: A number is below 0, or an id is not among them.

    """
    if isinstance(keep, int):
        if keep < 0:
            message = f"prune: keep={keep} does not fit: give a number from 0, or ids to keep"
            raise ConfigError(message, option="keep", value=keep)
        return tuple(ids[: max(len(ids) - keep, 0)])
    unknown = sorted(set(keep) - set(ids))
    if unknown:
        message = (
            f"prune: keep names {unknown}, which are no checkpoints: nothing was pruned; "
            "checkpoints.states() lists them"
        )
        raise ConfigError(message, option="keep", unknown=unknown)
    return tuple(checkpoint for checkpoint in ids if checkpoint not in keep)
