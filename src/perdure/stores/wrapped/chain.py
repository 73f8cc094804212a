"""Hash chain through an encrypted session's log: each record authenticates all before it.

The *link* after a record has a link hash: a keyed hash of the previous link hash and of the record
as the inner store keeps it. Epoch records, which the inner store writes itself, are included.
Each encrypted record contains, encrypted with its payload, the link before it, the number of
epoch records directly before it, and the newest fold that its writer knew. So any slice of the
log verifies its own links, and no record before an encrypted one can be changed, dropped or
inserted. Pure.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from typing import NamedTuple, final

import msgspec

from perdure.errors import CorruptRecordError
from perdure.records.manifest import Batch
from perdure.records.records import EPOCH, Entry, Record
from perdure.stores.wrapped.transform import Transform

_HEADER = struct.Struct(">16sIQ")
HEADER = _HEADER.size
"""By how many bytes the link makes a record's payload longer."""
_REMEMBERED_LINKS = 32
"""Links that a writer remembers: a batch sent again, or a fold, ends at one of the newest."""


class ChainLink(NamedTuple):
    """The state of a log up to a record."""

    seq: int
    digest: bytes
    """The link hash: 16 bytes."""
    run: int = 0
    """How many epoch records the log ends with."""


class Facts(msgspec.Struct, frozen=True):
    """What a session's manifest proves about its log."""

    as_of_seq: int = 0
    epoch: int = 0
    link: ChainLink | None = None
    """The link after ``as_of_seq``."""
    is_lost: bool = False
    """Whether the manifest was damaged (which is reported): it proves nothing until the next
    fold."""
    unproven_end: int = 0
    """The last record when a manifest was found to be lost or forged; 0 for never."""


class LinkedRecord(NamedTuple):
    """A decrypted record, with the link that it contains."""

    record: Record
    before: ChainLink
    folded: int
    """The record that the newest fold was as of when this one was encrypted."""


@final
class RecordChain:
    """Encrypt, decrypt and link the records of one session.

    Args:
        transform: The session's data key.
        secret: The key of the link hashes.
        begins: The first linked record; those before it have an earlier format.

    """

    def __init__(self, transform: Transform, secret: bytes, begins: int) -> None:
        self.transform: Transform = transform
        self.secret: bytes = secret
        self.begins: int = begins
        self._hash = hashlib.blake2b(key=secret, digest_size=16)
        self.start: ChainLink = ChainLink(begins - 1, self._hash.digest())
        """The link before the first linked record."""

    def next_link(self, link: ChainLink, record: Record) -> ChainLink:
        """Return the link after a record, as it is stored."""
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

    def encrypt(self, link: ChainLink, plain: Record, folded: int) -> Record:
        """Return a record encrypted together with the link before it."""
        place = ("linked", plain.seq, plain.epoch, plain.kind, plain.end)
        header = _HEADER.pack(link.digest, link.run, folded)
        payload = self.transform.transform_payload(place, header + plain.payload)
        return Record(plain.seq, plain.epoch, plain.kind, payload, plain.end)

    def decrypt(self, record: Record) -> LinkedRecord:
        """Return a decrypted record and the link that it contains.

        Raises:
            CorruptRecordError: It is damaged or belongs to another place.

        """
        place = ("linked", record.seq, record.epoch, record.kind, record.end)
        data = self.transform.restore_payload(place, record.payload)
        digest, run, folded = _HEADER.unpack_from(data)
        plain = Record(record.seq, record.epoch, record.kind, data[HEADER:], record.end)
        return LinkedRecord(plain, ChainLink(record.seq - 1, digest, run), folded)

    def link_after_epochs(self, link: ChainLink, records: list[Record]) -> ChainLink:
        """Return the link after epoch records, each of which begins an epoch.

        Raises:
            CorruptRecordError: They do not continue from ``link``.

        """
        epoch = 0
        for record in records:
            if record.seq != link.seq + 1 or record.kind != EPOCH or record.epoch <= epoch:
                raise chain_error(record.seq, "no epoch begins there")
            epoch = record.epoch
            link = self.next_link(link, record)
        return link


@final
class ChainWriter:
    """Encryption of one lease holder's batches; sending a batch again gives the same bytes."""

    def __init__(self, chain: RecordChain, epoch: int, encrypted_to: int, folded: int) -> None:
        self.chain = chain
        self.epoch = epoch
        self.pending_end: int = 0
        """The last record of a batch that is about to be encrypted."""
        self._encrypted_to = encrypted_to
        self._links: OrderedDict[int, ChainLink] = OrderedDict()
        self._folds: list[tuple[int, int]] = [(0, folded)]

    def link(self, seq: int) -> ChainLink | None:
        """Return the link after a record, if it is remembered."""
        return self._links.get(seq)

    def note_link(self, link: ChainLink) -> None:
        """Remember a link."""
        self._links[link.seq] = link
        self._links.move_to_end(link.seq)
        while len(self._links) > _REMEMBERED_LINKS:
            self._links.popitem(last=False)

    def note_fold(self, folded: int, since: int | None = None) -> None:
        """Remember a fold: records that are encrypted for the first time from now on name it."""
        first = self._encrypted_to + 1 if since is None else since
        self._folds = [*self._folds[-7:], (first, folded)]

    def encrypt(self, batch: Batch) -> Batch:
        """Return an encrypted batch; the link before it has to be remembered."""
        link = self._links[batch.first - 1]
        entries: list[Entry] = []
        for seq, (kind, payload, end) in enumerate(batch.records, batch.first):
            plain = Record(seq, batch.epoch, kind, payload, end)
            record = self.chain.encrypt(link, plain, self._fold_known_at(seq))
            link = self.chain.next_link(link, record)
            entries.append(Entry(kind, record.payload, end))
        self.note_link(link)
        self._encrypted_to = max(self._encrypted_to, link.seq)
        return Batch(batch.key, batch.epoch, batch.first, tuple(entries))

    def _fold_known_at(self, seq: int) -> int:
        return next(folded for since, folded in reversed(self._folds) if since <= seq or not since)


def chain_error(seq: int, reason: str) -> CorruptRecordError:
    """Return the error for a log that is not the one that was written."""
    return CorruptRecordError(
        f"the log is not what was written up to record {seq}: {reason}; records were changed, "
        "removed or inserted without the key: restore the session from a copy",
        seq=seq,
    )
