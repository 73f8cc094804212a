"""The chain through an encrypted session's log: each record is sealed to all that were before it.

The *link* behind a record is a keyed hash of the link before it and of the record as the inner
store keeps it, its epoch records included, which that store writes by itself. Each sealed
record holds the link before it within its seal, with how many epoch records stand right before
it, and the newest fold that its writer knew of. So a slice read from anywhere verifies its own
links, and nothing before a sealed record can be changed, dropped or put in between. Pure.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from typing import NamedTuple, final

import msgspec

from perdure.errors import CorruptRecordError
from perdure.records.records import EPOCH, Entry, Record
from perdure.records.stored import Batch
from perdure.stores.wrapped.transform import Transform

# The chain through an encrypted session's log: each record is sealed to all that were before it


_HEADER = struct.Struct(">16sIQ")
HEADER = _HEADER.size
"""By how many bytes a linked record is longer."""
_KEPT = 32
"""Links that a writer remembers: what is sent again, or folded, ends at one of the newest."""


class ChainLink(NamedTuple):
    """What a log is, up to a record."""

    seq: int
    digest: bytes
    run: int = 0
    """How many epoch records stand at its end."""


class Facts(msgspec.Struct, frozen=True):
    """What a session's manifest proves of its log."""

    as_of_seq: int = 0
    epoch: int = 0
    link: ChainLink | None = None
    """Behind ``as_of_seq``."""
    is_lost: bool = False
    """The manifest was damaged, which is told: it proves nothing until the next fold."""
    unproven_end: int = 0
    """The last record when a manifest was found lost or forged; 0 for never."""


class LinkedRecord(NamedTuple):
    """A linked record, with what it says of those before it."""

    record: Record
    before: ChainLink
    folded: int
    """The record that the newest fold was as of, when this one was sealed."""


@final
class RecordChain:
    """Link and open one session's records.

    Args:
        seal: The session's.
        secret: What the links are keyed by.
        begins: The first record that is linked; those before it are of an earlier format.

    """

    def __init__(self, seal: Transform, secret: bytes, begins: int) -> None:
        self.seal: Transform = seal
        self.secret: bytes = secret
        self.begins: int = begins
        self._hash = hashlib.blake2b(key=secret, digest_size=16)
        self.start: ChainLink = ChainLink(begins - 1, self._hash.digest())
        """The link before the first one."""

    def follow(self, link: ChainLink, record: Record) -> ChainLink:
        """Return the link behind a record."""
        digest = self._hash.copy()
        seq, epoch, kind, payload, end = (
            record.seq,
            record.epoch,
            record.kind.encode(),
            record.payload,
            record.end,
        )
        digest.update(b"%b%d %d %d %d " % (link.digest, seq, epoch, end, len(kind)))
        digest.update(kind)
        digest.update(payload)
        return ChainLink(seq, digest.digest(), link.run + 1 if record.kind == EPOCH else 0)

    def sealed(self, link: ChainLink, plain: Record, folded: int) -> Record:
        """Return a record sealed to its place behind a link."""
        place = ("linked", plain.seq, plain.epoch, plain.kind, plain.end)
        header = _HEADER.pack(link.digest, link.run, folded)
        payload = self.seal.seal_payload(place, header + plain.payload)
        return Record(plain.seq, plain.epoch, plain.kind, payload, plain.end)

    def opened(self, one: Record) -> LinkedRecord:
        """Return a record opened.

        Raises:
            CorruptRecordError: It is damaged, or belongs elsewhere.

        """
        place = ("linked", one.seq, one.epoch, one.kind, one.end)
        data = self.seal.open_payload(place, one.payload)
        digest, run, folded = _HEADER.unpack_from(data)
        plain = Record(one.seq, one.epoch, one.kind, data[HEADER:], one.end)
        return LinkedRecord(plain, ChainLink(one.seq - 1, digest, run), folded)

    def reached(self, link: ChainLink, records: list[Record]) -> ChainLink:
        """Return the link behind epoch records, each of which begins an epoch.

        Raises:
            CorruptRecordError: They do not go on there.

        """
        epoch = 0
        for record in records:
            if record.seq != link.seq + 1 or record.kind != EPOCH or record.epoch <= epoch:
                raise broken(record.seq, "no epoch begins there")
            epoch = record.epoch
            link = self.follow(link, record)
        return link


@final
class ChainWriter:
    """What a holder seals its records with; the same batch again gives the same bytes."""

    def __init__(self, chain: RecordChain, epoch: int, sealed_to: int, folded: int) -> None:
        self.chain = chain
        self.epoch = epoch
        self.coming: int = 0
        """The end of a batch that is about to be sealed."""
        self._sealed_to = sealed_to
        self._links: OrderedDict[int, ChainLink] = OrderedDict()
        self._folds: list[tuple[int, int]] = [(0, folded)]

    def link(self, seq: int) -> ChainLink | None:
        """Return the link behind a record, if it is remembered."""
        return self._links.get(seq)

    def note(self, link: ChainLink) -> None:
        """Remember a link."""
        self._links[link.seq] = link
        self._links.move_to_end(link.seq)
        while len(self._links) > _KEPT:
            self._links.popitem(last=False)

    def fold(self, folded: int, since: int | None = None) -> None:
        """Take note of a fold: what is sealed for the first time from here on names it."""
        first = self._sealed_to + 1 if since is None else since
        self._folds = [*self._folds[-7:], (first, folded)]

    def sealed(self, batch: Batch) -> Batch:
        """Return a batch, sealed; the link before it has to be remembered."""
        link = self._links[batch.first - 1]
        entries: list[Entry] = []
        for seq, (kind, payload, end) in enumerate(batch.records, batch.first):
            plain = Record(seq, batch.epoch, kind, payload, end)
            record = self.chain.sealed(link, plain, self._folded(seq))
            link = self.chain.follow(link, record)
            entries.append(Entry(kind, record.payload, end))
        self.note(link)
        self._sealed_to = max(self._sealed_to, link.seq)
        return Batch(batch.key, batch.epoch, batch.first, tuple(entries))

    def _folded(self, seq: int) -> int:
        return next(folded for since, folded in reversed(self._folds) if since <= seq or not since)


def broken(seq: int, why: str) -> CorruptRecordError:
    """Return the error for a log that is not the one that was written."""
    message = (
        f"the log is not what was written up to record {seq}: {why}; records were changed, left "
        "out or put in without the key: restore the session from a copy"
    )
    return CorruptRecordError(message, seq=seq)


# A log read along its chain: what is given out has been verified, a slice of it as well
