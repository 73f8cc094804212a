"""Hash chain through an encrypted session's log: each record authenticates all before it.

The *link* after a record has a link hash: a keyed hash of the previous link hash and of the record
as the inner store keeps it. Epoch records, which the inner store writes itself, are included.
Each encrypted record contains, encrypted with its payload, the link before it, the number of
epoch records directly before it, and the newest fold that its writer knew. So any slice of the
log verifies its own links, and no record before an encrypted one can be changed, dropped or
inserted.

A reader returns records only once the chain proves them, also of a slice, in either direction. It
looks beyond a slice whose last records are epoch records, which only the next encrypted record
proves.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol, final

import msgspec

from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Batch
from perdure.records.records import EPOCH, Entry, Record
from perdure.store import Store
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
        self.remembers_all: bool = False
        """Whether it remembers the ends of all batches."""
        self.pending_end: int = -1
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
        while len(self._links) > _REMEMBERED_LINKS and not self.remembers_all:
            self._links.popitem(last=False)

    def forget_links(self, since: int) -> None:
        """Forget the links of records from one on: others may stand there, or none."""
        for seq in [seq for seq in self._links if seq >= since]:
            del self._links[seq]
        self.pending_end = -1

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


class _Part(NamedTuple):
    """Records in the order of the log, decrypted and linked to one another."""

    records: list[Record]
    leading: list[Record]
    """Epoch records at its beginning, whose link is not known."""
    expected: ChainLink | None
    """The link after them, as the first encrypted record has it."""
    end: ChainLink | None
    """The link after the last record, if it is known."""
    folded: int
    """The newest fold that a record names."""


class FactsReader(Protocol):
    """Give what a session's manifest proves."""

    async def __call__(self, *, fresh: bool = False) -> Facts:
        """Return it, read anew if it is to be fresh."""
        ...


@final
class ChainReader:
    """Verify the chain while a log is read.

    Args:
        store: The inner store.
        key: The session of the log.
        chain: The session's chain.
        facts: Returns what the manifest proves; reads it from the store if it is to be fresh.
        trimmed: Returns the record before which all were removed by a trim.
        request: The requested records.

    """

    def __init__(
        self,
        store: Store,
        key: SessionKey,
        chain: RecordChain,
        facts: FactsReader,
        trimmed: Callable[[], Awaitable[int]],
        request: ReadRequest,
    ) -> None:
        self._store = store
        self._key = key
        self._chain = chain
        self._facts = facts
        self._trimmed = trimmed
        self._request = request
        self._count = 0
        self._top: int | None = None
        self._edge: Record | None = None
        self._pending: list[Record] = []
        """Epoch records that are not proven yet, in the order of the request."""
        self._link: ChainLink | None = None
        self._expected: ChainLink | None = None
        self._beyond: list[Record] = []
        """Epoch records after the requested ones."""

    async def verify(self, records: Sequence[Record]) -> list[Record]:
        """Accept the next records of the inner log; return those proven by now, in its order."""
        if not records:
            return []
        self._count += len(records)
        self._top = max(self._top or 0, records[0].seq, records[-1].seq)
        verify = self._verify_backward if self._request.reverse else self._verify_forward
        return await verify(records)

    @property
    def link(self) -> ChainLink | None:
        """The link after the records of a forward read, if it is known."""
        return self._link

    async def finish(self) -> list[Record]:
        """Verify the end of the requested range; return the records that were pending."""
        request = self._request
        is_complete = request.limit is None or self._count < request.limit
        if is_complete and request.before is not None:
            await self._require_end(request.before)
        if request.reverse:
            if is_complete:
                await self._require_beginning()
            if self._pending:
                await self._look_below(self._pending[::-1])
        elif request.before is None and is_complete:
            await self._require_tail()
        elif self._pending:
            await self._look_ahead(self._pending, self._link)
        if not request.reverse and self._pending and self._link is None:
            await self._look_below(self._pending)
        pending, self._pending = self._pending, []
        return pending

    async def _require_end(self, before: int) -> None:
        """Check that nothing is missing where a slice ended earlier than requested."""
        last = self._request.after if self._top is None else self._top
        if last >= before - 1:
            return
        async with aclosing(self._store.read_log(self._key, after=last, limit=1)) as log:
            async for chunk in log:
                for record in chunk.records:  # it may have been appended since
                    if record.seq > last + 1:
                        await self._require_trimmed(record.seq)

    # Forward: epoch records stay pending until the next encrypted record proves them.

    async def _verify_forward(self, records: Sequence[Record]) -> list[Record]:
        if self._edge is None:
            await self._begin(records[0])
        before, self._edge = self._edge, records[-1]
        part = await self._part(records, before, self._link)
        self._link = part.end
        if part.expected is not None:
            self._require_run([*self._pending, *part.leading], part.expected)
        records = [*self._pending, *part.records]
        proven = len(records) - len(_epochs_at_end(records))
        self._pending = records[proven:]
        return records[:proven]

    async def _begin(self, first: Record) -> None:
        after = self._request.after
        if first.seq > after + 1:
            await self._require_trimmed(first.seq)
            return
        facts = await self._facts()
        if facts.link is None or facts.link.seq != after or first.seq < self._chain.begins:
            return
        self._link = facts.link
        if first.epoch > facts.epoch + 1:  # a new holder was killed, or records were removed
            await self._require_folded_record(facts)

    async def _require_folded_record(self, facts: Facts) -> None:
        """Check that the record that a fold was as of has no later epoch than the fold."""
        seq = facts.as_of_seq
        async with aclosing(self._store.read_log(self._key, after=seq - 1, before=seq + 1)) as log:
            async for chunk in log:
                if any(record.epoch > facts.epoch for record in chunk.records):
                    raise chain_error(seq, "the records that the manifest was made of are gone")

    async def _require_tail(self) -> None:
        """Check that a log is at least as long as the manifest says."""
        facts = await self._facts()
        if self._edge is not None and self._edge.seq >= facts.as_of_seq:
            return
        if await self._store.head(self._key) >= facts.as_of_seq:
            return
        # Read the manifest before the head, which only grows.
        facts = await self._facts(fresh=True)
        head = await self._store.head(self._key)
        if not facts.is_lost and head < facts.as_of_seq:
            raise chain_error(head, f"the manifest was made of records up to {facts.as_of_seq}")

    # Backward: epoch records stay pending until the encrypted record below them is linked.

    async def _verify_backward(self, records: Sequence[Record]) -> list[Record]:
        forward = [*reversed(records)]
        above, self._edge = self._edge, forward[0]
        if above is not None and above.seq != forward[-1].seq + 1:
            raise chain_error(above.seq, f"record {above.seq - 1} is missing")
        part = await self._part(forward, None, None)
        if above is None and self._request.before is not None and (run := _epochs_at_end(forward)):
            await self._look_ahead(run, part.end)
        if len(part.leading) == len(forward):  # still no record with a link
            self._pending += records
            if self._expected is not None:
                self._require_run(self._pending, self._expected)
            return []
        await self._join(part.end, self._pending[::-1])
        if part.expected is not None:
            self._require_run(part.leading, part.expected)
        proven, self._pending = self._pending, [*reversed(part.leading)]
        self._expected, self._beyond = part.expected, []
        return [*proven, *reversed(part.records[len(part.leading) :])]

    async def _join(self, end: ChainLink | None, pending: list[Record]) -> None:
        """Check that pending records lead from a link to the next encrypted record.

        The last epochs of a log have none: the manifest's link proves those that it was made of.
        """
        if end is None:
            return
        epochs = [*pending, *self._beyond]
        reached = self._chain.link_after_epochs(end, epochs)
        if self._expected is not None and reached != self._expected:
            raise chain_error(self._expected.seq + 1, _OTHER_RECORDS)
        proven = (await self._facts()).link
        if proven is None or not end.seq < proven.seq <= reached.seq:
            return
        if self._chain.link_after_epochs(end, epochs[: proven.seq - end.seq]) != proven:
            raise chain_error(proven.seq, "the manifest was made of other records")

    async def _require_beginning(self) -> None:
        lowest = self._edge
        if lowest is None:
            return
        if lowest.seq > self._request.after + 1:
            await self._require_trimmed(lowest.seq)
        facts = await self._facts()
        if facts.link is not None and facts.link.seq == lowest.seq - 1:
            await self._join(facts.link, self._pending[::-1])

    # Both directions.

    async def _look_ahead(self, run: list[Record], link: ChainLink | None) -> None:
        """Check epoch records at the end of a slice against the next encrypted record.

        Args:
            run: The epoch records.
            link: The link after them, if it is known.

        """
        more: list[Record] = []
        async with aclosing(self._store.read_log(self._key, after=run[-1].seq)) as log:
            async for chunk in log:
                for record in chunk.records:
                    if record.kind == EPOCH:
                        more.append(record)
                        continue
                    if record.seq < self._chain.begins:
                        return
                    expected = self._chain.decrypt(record).before
                    if link is None:
                        self._require_run([*run, *more], expected)
                        self._expected, self._beyond = expected, more
                    elif self._chain.link_after_epochs(link, more) != expected:
                        raise chain_error(record.seq, _OTHER_RECORDS)
                    return
        if link is None:
            self._beyond = more
        else:
            await self._join(link, more)

    async def _look_below(self, pending: list[Record]) -> None:
        """Check epoch records at the beginning of a slice against the encrypted record below."""
        epochs: list[Record] = []
        log = self._store.read_log(self._key, before=pending[0].seq, reverse=True)
        async with aclosing(log):
            async for chunk in log:
                for record in chunk.records:
                    if record.kind == EPOCH:
                        epochs.append(record)
                        continue
                    if record.seq >= self._chain.begins:
                        link = self._chain.next_link(self._chain.decrypt(record).before, record)
                        await self._join(link, [*reversed(epochs), *pending])
                    return

    async def _part(
        self, records: Sequence[Record], before: Record | None, link: ChainLink | None
    ) -> _Part:
        size = sum(len(record.payload) for record in records)
        facts = await self._facts()
        part = await in_thread_if_large(size, lambda: self._walk(records, before, link, facts))
        await self._require_folded(part.folded)
        return part

    def _walk(  # one pass over the records
        self, records: Sequence[Record], before: Record | None, link: ChainLink | None, facts: Facts
    ) -> _Part:
        chain = self._chain
        plain: list[Record] = []
        leading: list[Record] = []
        expected: ChainLink | None = None
        folded = 0
        for record in records:
            seq = record.seq
            if before is not None and seq != before.seq + 1:
                raise chain_error(seq, f"record {before.seq + 1} is missing")
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
                if link is None:
                    leading.append(record)
            else:
                linked = chain.decrypt(record)
                if link is None and expected is None:
                    expected = linked.before
                elif link is not None and linked.before != link:
                    raise chain_error(seq, _OTHER_RECORDS)
                link = linked.before
                folded = max(folded, linked.folded)
                plain.append(linked.record)
            if link is not None:
                link = chain.next_link(link, record)
                proven = facts.link
                if proven is not None and proven.seq == seq and proven != link:
                    raise chain_error(seq, "the manifest was made of other records")
            before = record
        return _Part(plain, leading, expected, link, folded)

    def _require_run(self, run: Sequence[Record], expected: ChainLink) -> None:
        if expected.run < len(run):
            raise chain_error(expected.seq, "an epoch record is in the place of another record")

    async def _require_folded(self, folded: int) -> None:
        if folded <= (await self._facts()).as_of_seq:
            return
        facts = await self._facts(fresh=True)  # another process may have folded since
        if facts.is_lost or folded <= facts.as_of_seq:
            return
        raise CorruptRecordError(
            f"the manifest of {self._key} is as of record {facts.as_of_seq}, but a later record "
            f"names a fold as of {folded}: the manifest was replaced by an older one; "
            "restore the session from one copy, its log and its documents together",
            key=str(self._key),
            as_of_seq=facts.as_of_seq,
        )

    async def _require_trimmed(self, first: int) -> None:
        begins = self._chain.begins
        if first > max(await self._trimmed(), begins if begins > 1 else 0):
            raise chain_error(first, "the records before it are missing")


_OTHER_RECORDS = "it was encrypted after other records"


def _epochs_at_end(records: Sequence[Record]) -> list[Record]:
    count = len(records)
    while count and records[count - 1].kind == EPOCH:
        count -= 1
    return [*records[count:]]
