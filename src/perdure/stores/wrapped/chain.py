"""Hash chain through an encrypted session's log: each record authenticates all before it.

The *link* after a record has a link hash: a keyed hash of the previous link hash and of the record
as the inner store keeps it. Epoch records, which the inner store writes itself, are included.
Each encrypted record contains, encrypted with its payload, the link before it, the number of
epoch records directly before it, and the newest fold that its writer knew. So any slice of the
log verifies its own links, and no record before an encrypted one can be changed, dropped or
inserted.

A reader returns records only once the chain proves them, also of a slice, in either direction. It
looks beyond a slice whose last records are epoch records, which only the next encrypted record
proves, and below one whose first record is one.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import NamedTuple, final

import msgspec

from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Batch
from perdure.records.records import EPOCH, Entry, Record
from perdure.store import Store, first_record, record_at
from perdure.stores.wrapped.transform import Transform, in_thread_if_large, restore_record

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
    """Number of epoch records at the end of the log."""


class ManifestProof(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields that a manifest must have, and the state of its log when it was written."""

    epoch: int
    as_of_seq: int
    rest: str
    """A hash of the manifest's format, counters and base."""
    digest: str = ""
    """The link hash after ``as_of_seq``, in hex; empty if nothing was folded."""
    run: int = 0
    lost: str = ""
    """The fault of the previous manifest, or of this one, so that there is no fold; empty
    if nothing."""
    unproven_end: int = 0
    """The last record when a manifest was found to be lost or forged: records after it may have
    been cut off. Later folds keep it until the log is accepted."""

    @property
    def link(self) -> ChainLink | None:
        """The link after ``as_of_seq``."""
        digest = bytes.fromhex(self.digest)
        return ChainLink(self.as_of_seq, digest, self.run) if digest else None

    @property
    def doubtful_from(self) -> int:
        """The record after which others may have been cut off; 0 without a sign of it."""
        return self.unproven_end or (self.as_of_seq if self.lost else 0)


NOTHING_PROVEN = ManifestProof(0, 0, "")


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

    def link_after_epochs(
        self, link: ChainLink, records: list[Record], proven: ChainLink | None
    ) -> ChainLink:
        """Return the link after epoch records, each of which begins an epoch.

        Raises:
            CorruptRecordError: They do not continue from ``link``, or lead to another one than the
                one that a manifest proves.

        """
        epoch = 0
        for record in records:
            if record.seq != link.seq + 1 or record.kind != EPOCH or record.epoch <= epoch:
                raise chain_error(record.seq, "no epoch begins there")
            epoch = record.epoch
            link = self.next_link(link, record)
            require_proven_link(link, proven)
        return link


@final
class ChainWriter:
    """Encryption of one lease holder's batches; sending a batch again gives the same bytes."""

    def __init__(self, chain: RecordChain, epoch: int, encrypted_to: int, folded: int) -> None:
        self.chain = chain
        self.epoch = epoch
        self.remembers_all: bool = False
        """True if it remembers the ends of all batches."""
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
        while len(self._links) > _REMEMBERED_LINKS and not self.remembers_all:
            self._links.popitem(last=False)

    def forget_links(self, since: int) -> None:
        """Forget the links of records from one on: others may stand there, or none."""
        for seq in [seq for seq in self._links if seq >= since]:
            del self._links[seq]

    def note_fold(self, folded: int) -> None:
        """Remember a fold: records that are encrypted for the first time from now on name it."""
        self._folds = [*self._folds[-7:], (self._encrypted_to + 1, folded)]

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
        return msgspec.structs.replace(batch, records=tuple(entries))

    def _fold_known_at(self, seq: int) -> int:
        return next(folded for since, folded in reversed(self._folds) if since <= seq or not since)


def chain_error(seq: int, reason: str) -> CorruptRecordError:
    """Return the error for a log that is not the one that was written."""
    return CorruptRecordError(
        f"the log is not what was written up to record {seq}: {reason}; records were changed, "
        "removed or inserted without the key: restore the session from a copy",
        seq=seq,
    )


# Verified reading


class ReadRequest(NamedTuple):
    """The records that a caller requested."""

    after: int
    before: int | None
    limit: int | None
    reverse: bool


async def link_at(
    store: Store, key: SessionKey, chain: RecordChain, seq: int, proven: ChainLink | None
) -> tuple[ChainLink | None, int]:
    """Return the link after a record, from the nearest one below it that is known.

    That is the one in an encrypted record, the chain's first, or the one that a manifest proves. In
    a log that was trimmed there may be none: then None, and how many epoch records there are.

    Raises:
        CorruptRecordError: A record is missing in between, or is another one.

    """
    fixed = {link.seq: link for link in (proven, chain.start) if link is not None}
    if seq in fixed:
        return fixed[seq], 0
    epochs: list[Record] = []
    async with aclosing(store.read_log(key, before=seq + 1, reverse=True)) as log:
        async for chunk in log:
            for record in chunk.records:
                if record.kind == EPOCH:
                    epochs.append(record)
                    known = fixed.get(record.seq - 1)
                elif record.seq < chain.begins:
                    return None, len(epochs)
                else:
                    known = chain.next_link(chain.decrypt(record).before, record)
                if known is not None:
                    link = chain.link_after_epochs(known, epochs[::-1], proven)
                    if link.seq != seq:
                        raise chain_error(seq, "it is missing")
                    return link, 0
    return None, len(epochs)


class _Part(NamedTuple):
    """Records in the order of the log, decrypted and linked to one another."""

    records: list[Record]
    begin: ChainLink | None
    """The link before the first one, if it is known."""
    end: ChainLink | None
    """The link after the last record; None if there are only epoch records below."""
    unlinked: int
    """Number of those."""
    folded: int
    """The newest fold that a record names."""


@final
class ChainReader:
    """Verify the chain while a log is read, in either direction.

    A run of records is linked from the link before its first one: that is in the first one if it
    is encrypted, else it is looked for below. A run that is read backwards has to end with the link
    that the run above it begins with. Epoch records at an upper edge are proven by the next
    encrypted record.

    Args:
        store: The inner store.
        key: The session of the log.
        chain: The session's chain.
        request: The requested records.
        proof: The proof in the manifest.
        fresh: Reads it from the store again.
        trimmed: Returns the record before which all were removed by a trim.

    """

    def __init__(
        self,
        store: Store,
        key: SessionKey,
        chain: RecordChain,
        request: ReadRequest,
        *,
        proof: ManifestProof,
        fresh: Callable[[], Awaitable[ManifestProof]],
        trimmed: Callable[[], Awaitable[int]],
    ) -> None:
        self._store = store
        self._key = key
        self._chain = chain
        self._proof = proof
        self._fresh = fresh
        self._trimmed = trimmed
        self._request = request
        self._count = 0
        self._top: int | None = None
        self._edge: Record | None = None
        """The last record of the inner log so far."""
        self._pending: list[Record] = []
        """Epoch records at the end of a forward read, which are not proven yet."""
        self.link: ChainLink | None = None
        """The link after the records of a forward read, or before those of a reverse one."""
        self._unlinked = 0

    async def verify(self, records: Sequence[Record]) -> list[Record]:
        """Accept the next records of the inner log; return those proven by now, in its order."""
        if not records:
            return []
        self._count += len(records)
        self._top = max(self._top or 0, records[0].seq, records[-1].seq)
        neighbor, self._edge = self._edge, records[-1]
        verify = self._verify_backward if self._request.reverse else self._verify_forward
        return await verify(records, neighbor)

    async def _verify_forward(
        self, records: Sequence[Record], before: Record | None
    ) -> list[Record]:
        if before is None:
            await self._begin(records[0])
        part = await self._part(records, before, self.link, self._unlinked)
        self.link, self._unlinked = part.end, part.unlinked
        known = [*self._pending, *part.records]
        proven = len(known) - len(_epochs_at_end(known))
        self._pending = known[proven:]
        return known[:proven]

    async def _begin(self, first: Record) -> None:
        after = self._request.after
        if first.seq > after + 1:
            await self._require_trimmed(first.seq)
        self.link, self._unlinked = await self._start(first)
        proof = self._proof
        if self.link is None or self.link != proof.link or first.epoch <= proof.epoch + 1:
            return
        # A new holder was killed, or records were removed: that which the fold was as of has no
        # later epoch than the fold.
        record = await record_at(self._store, self._key, proof.as_of_seq)
        if record is not None and record.epoch > proof.epoch:
            raise chain_error(record.seq, "the records that the manifest was made of are gone")

    async def _verify_backward(
        self, records: Sequence[Record], above: Record | None
    ) -> list[Record]:
        forward = [*reversed(records)]
        if above is not None and above.seq != forward[-1].seq + 1:
            raise chain_error(above.seq, f"record {above.seq - 1} is missing")
        start, unlinked = await self._start(forward[0])
        part = await self._part(forward, None, start, unlinked)
        if above is None:
            if self._request.before is not None and (run := _epochs_at_end(forward)):
                await self._look_ahead(run[-1].seq, part)
        elif self.link is not None:
            if part.end is None:
                self._require_run(part.unlinked, self.link)
            elif part.end != self.link:
                raise chain_error(above.seq, _OTHER_RECORDS)
        self.link = part.begin
        return [*reversed(part.records)]

    async def finish(self) -> list[Record]:
        """Verify the end of the requested range; return the records that were pending."""
        request, last = self._request, self._edge
        if request.limit is None or self._count < request.limit:
            if request.before is not None:
                await self._require_end(request.before)
            if request.reverse and last is not None and last.seq > request.after + 1:
                await self._require_trimmed(last.seq)
            if not request.reverse and request.before is None:
                await self._require_tail()
                return self._pending
        if self._pending and last is not None:
            await self._look_ahead(last.seq, _Part([], None, self.link, self._unlinked, 0))
        return self._pending

    # The edges of what is read.

    async def _start(self, first: Record) -> tuple[ChainLink | None, int]:
        """Return the link before a record, where it is not in it."""
        proven = self._proof.link
        is_fixed = first.seq - 1 in {self._chain.begins - 1, -1 if proven is None else proven.seq}
        if first.seq < self._chain.begins or not (is_fixed or first.kind == EPOCH):
            return None, 0
        return await link_at(self._store, self._key, self._chain, first.seq - 1, proven)

    async def _look_ahead(self, seq: int, part: _Part) -> None:
        """Check the epoch records up to one against the next encrypted record, if there is any."""
        more: list[Record] = []

        def is_encrypted(record: Record) -> bool:
            if record.kind == EPOCH:
                more.append(record)
            return record.kind != EPOCH

        record = await first_record(self._store.read_log(self._key, after=seq), is_encrypted)
        if record is not None and record.seq < self._chain.begins:
            return
        expected = None if record is None else self._chain.decrypt(record).before
        if part.end is not None:
            link = self._chain.link_after_epochs(part.end, more, self._proof.link)
            if expected is not None and link != expected:
                raise chain_error(expected.seq + 1, _OTHER_RECORDS)
        elif expected is not None:
            self._require_run(part.unlinked + len(more), expected)

    async def _require_end(self, before: int) -> None:
        """Check that nothing is missing where a slice ended earlier than requested."""
        last = self._request.after if self._top is None else self._top
        if last >= before - 1:
            return
        record = await first_record(self._store.read_log(self._key, after=last, limit=1))
        if record is not None and record.seq > last + 1:  # else it was appended since
            await self._require_trimmed(record.seq)

    async def _require_tail(self) -> None:
        """Check that a log is at least as long as the manifest says."""
        proof = self._proof
        if self._edge is not None and self._edge.seq >= proof.as_of_seq:
            return
        if await self._store.head(self._key) >= proof.as_of_seq:
            return
        # Read the manifest before the head, which only grows.
        proof = await self._fresh()
        head = await self._store.head(self._key)
        if not proof.lost and head < proof.as_of_seq:
            raise chain_error(head, f"the manifest was made of records up to {proof.as_of_seq}")

    async def _require_trimmed(self, first: int) -> None:
        if first > max(await self._trimmed(), self._chain.begins):
            raise chain_error(first, "the records before it are missing")

    # The records.

    async def _part(
        self,
        records: Sequence[Record],
        before: Record | None,
        link: ChainLink | None,
        unlinked: int,
    ) -> _Part:
        size = sum(len(record.payload) for record in records)
        proven = self._proof.link
        walk = partial(self._walk, records, before, link, unlinked, proven)
        part = await in_thread_if_large(size, walk)
        if part.folded > self._proof.as_of_seq:
            await self._require_fold(part.folded)
        return part

    def _walk(  # one pass over the records
        self,
        records: Sequence[Record],
        before: Record | None,
        link: ChainLink | None,
        unlinked: int,
        proven: ChainLink | None,
    ) -> _Part:
        chain, plain, folded, begin = self._chain, list[Record](), 0, link
        for record in records:
            seq = record.seq
            if before is not None and seq != before.seq + 1:
                raise chain_error(seq, f"record {before.seq + 1} is missing")
            # Records of the earlier format have no links: each proves only itself.
            if seq < chain.begins:
                plain.append(restore_record(chain.transform, record))
                before = record
                continue
            if seq == chain.begins:
                link = chain.start
            elif before is not None and (record.epoch > before.epoch) != (record.kind == EPOCH):
                raise chain_error(seq, "an epoch begins with an epoch record, and only there")
            if record.kind == EPOCH:
                plain.append(record)
                unlinked += 1
            else:
                linked = chain.decrypt(record)
                # Nothing below is known: the count of epoch records is all that can be compared.
                if link is None:
                    self._require_run(unlinked, linked.before)
                elif linked.before != link:
                    raise chain_error(seq, _OTHER_RECORDS)
                link, unlinked = linked.before, 0
                begin = begin if plain else link
                folded = max(folded, linked.folded)
                plain.append(linked.record)
            if link is not None:
                link = chain.next_link(link, record)
                require_proven_link(link, proven)
            before = record
        return _Part(plain, begin, link, unlinked, folded)

    def _require_run(self, run: int, expected: ChainLink) -> None:
        if expected.run < run:
            raise chain_error(expected.seq, "an epoch record is in the place of another record")

    async def _require_fold(self, folded: int) -> None:
        proof = self._proof = await self._fresh()  # another process may have folded since
        if proof.lost or folded <= proof.as_of_seq:
            return
        raise CorruptRecordError(
            f"the manifest of {self._key} is as of record {proof.as_of_seq}, but a later record "
            f"names a fold as of {folded}: the manifest was replaced by an older one; "
            "restore the session from one copy, its log and its documents together",
            key=str(self._key),
            as_of_seq=proof.as_of_seq,
        )


_OTHER_RECORDS = "it was encrypted after other records"


def require_proven_link(link: ChainLink, proven: ChainLink | None) -> None:
    """Raise CorruptRecordError for another link than the one that a manifest proves."""
    if proven is not None and proven.seq == link.seq and proven != link:
        raise chain_error(link.seq, "the manifest was made of other records")


def _epochs_at_end(records: Sequence[Record]) -> list[Record]:
    count = len(records)
    while count and records[count - 1].kind == EPOCH:
        count -= 1
    return [*records[count:]]
