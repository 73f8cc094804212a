"""Reading a log along its chain: what is given out has been verified, a slice of it as well."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple, final

from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Record
from perdure.store import Store
from perdure.stores.wrapped.batches import done, opened_record
from perdure.stores.wrapped.chain import ChainLink, Facts, RecordChain, broken


class ReadRequest(NamedTuple):
    """Which records a caller asked for."""

    after: int
    before: int | None
    limit: int | None
    reverse: bool


class _Part(NamedTuple):
    """Records in the order of the log, opened and linked to one another."""

    records: list[Record]
    leading: list[Record]
    """Epoch records at its beginning, whose link is not known."""
    wanted: ChainLink | None
    """The link behind them, as the first sealed record has it."""
    end: ChainLink | None
    """The link behind the last record, if it is known."""
    folded: int
    """The newest fold that a record names."""


@final
class ChainReader:
    """Follow the chain while a log is read.

    Args:
        store: The inner store.
        key: Whose log.
        chain: The session's.
        facts: Tells what the manifest proves; read anew if asked to.
        trimmed: Tells before which record they were removed.
        asked: Which records.

    """

    def __init__(
        self,
        store: Store,
        key: SessionKey,
        chain: RecordChain,
        facts: Callable[[bool], Awaitable[Facts]],
        trimmed: Callable[[], Awaitable[int]],
        asked: ReadRequest,
    ) -> None:
        self._store = store
        self._key = key
        self._chain = chain
        self._told = facts
        self._trimmed = trimmed
        self._asked = asked
        self._count = 0
        self._top: int | None = None
        self._edge: Record | None = None
        self._held: list[Record] = []
        self._link: ChainLink | None = None
        self._wanted: ChainLink | None = None
        self._beyond: list[Record] = []
        """Epoch records behind what was asked for."""

    async def take(self, records: Sequence[Record]) -> list[Record]:
        """Return what is verified by now, in the order that was asked for."""
        if not records:
            return []
        self._count += len(records)
        self._top = max(self._top or 0, records[0].seq, records[-1].seq)
        return await (self._down(records) if self._asked.reverse else self._up(records))

    @property
    def link(self) -> ChainLink | None:
        """The link behind what was read upwards, if it is known."""
        return self._link

    async def rest(self) -> list[Record]:
        """Return what was held back, at the end of what was asked for."""
        asked = self._asked
        is_all = asked.limit is None or self._count < asked.limit
        if is_all and asked.before is not None:
            await self._require_end(asked.before)
        if asked.reverse:
            if is_all:
                await self._require_beginning()
        elif asked.before is None and is_all:
            await self._require_tail()
        elif self._held:
            await self._look_ahead(self._held, self._link)
        held, self._held = self._held, []
        return held

    async def _require_end(self, before: int) -> None:
        """See that nothing is left out where a slice ended before it had to."""
        last = self._asked.after if self._top is None else self._top
        if last >= before - 1:
            return
        async with aclosing(self._store.read_log(self._key, after=last, limit=1)) as log:
            async for chunk in log:
                for record in chunk.records:  # it may have been appended since
                    if record.seq > last + 1:
                        await self._require_trimmed(record.seq)

    # upwards: epoch records are held back until the next sealed one has told of them

    async def _up(self, records: Sequence[Record]) -> list[Record]:
        if self._edge is None:
            await self._begin(records[0])
        before, self._edge = self._edge, records[-1]
        part = await self._part(records, before, self._link)
        self._link = part.end
        if part.wanted is not None:
            self._require_run([*self._held, *part.leading], part.wanted)
        out = [*self._held, *part.records]
        kept = len(_epochs_at_end(out))
        self._held = out[len(out) - kept :]
        return out[: len(out) - kept]

    async def _begin(self, first: Record) -> None:
        after = self._asked.after
        if first.seq > after + 1:
            await self._require_trimmed(first.seq)
            return
        facts = await self._facts()
        if facts.link is None or facts.link.seq != after or first.seq < self._chain.begins:
            return
        self._link = facts.link
        if first.epoch > facts.epoch + 1:  # maybe a taker was killed; maybe records are gone
            await self._require_there(facts)

    async def _require_there(self, facts: Facts) -> None:
        """See that the record that a fold was as of is not of a later epoch."""
        seq = facts.as_of_seq
        async with aclosing(self._store.read_log(self._key, after=seq - 1, before=seq + 1)) as log:
            async for chunk in log:
                if any(record.epoch > facts.epoch for record in chunk.records):
                    raise broken(seq, "the records that the manifest was made of are gone")

    async def _require_tail(self) -> None:
        """See that a log goes as far as the manifest says."""
        facts = await self._facts()
        if self._edge is not None and self._edge.seq >= facts.as_of_seq:
            return
        if await self._store.head(self._key) >= facts.as_of_seq:
            return
        facts = await self._facts(fresh=True)  # before the head, which only grows
        head = await self._store.head(self._key)
        if not facts.is_lost and head < facts.as_of_seq:
            raise broken(head, f"the manifest was made of records up to {facts.as_of_seq}")

    # downwards: epoch records are held back until the sealed one below them is linked

    async def _down(self, records: Sequence[Record]) -> list[Record]:
        upwards = [*reversed(records)]
        above, self._edge = self._edge, upwards[0]
        if above is not None and above.seq != upwards[-1].seq + 1:
            raise broken(above.seq, f"record {above.seq - 1} is missing")
        part = await self._part(upwards, None, None)
        if above is None and self._asked.before is not None and (run := _epochs_at_end(upwards)):
            await self._look_ahead(run, part.end)
        if len(part.leading) == len(upwards):  # still nothing that is linked
            self._held += records
            if self._wanted is not None:
                self._require_run(self._held, self._wanted)
            return []
        self._join(part.end)
        if part.wanted is not None:
            self._require_run(part.leading, part.wanted)
        released, self._held = self._held, [*reversed(part.leading)]
        self._wanted, self._beyond = part.wanted, []
        return [*released, *reversed(part.records[len(part.leading) :])]

    def _join(self, end: ChainLink | None) -> None:
        """See that what was held back goes on behind a link, and leads to the next sealed one."""
        if end is None or self._wanted is None:
            return
        if self._chain.reached(end, [*self._held[::-1], *self._beyond]) != self._wanted:
            raise broken(self._wanted.seq + 1, "it was sealed behind other records")

    async def _require_beginning(self) -> None:
        lowest = self._edge
        if lowest is None:
            return
        if lowest.seq > self._asked.after + 1:
            await self._require_trimmed(lowest.seq)
        facts = await self._facts()
        if facts.link is not None and facts.link.seq == lowest.seq - 1:
            self._join(facts.link)

    # both

    async def _look_ahead(self, run: list[Record], link: ChainLink | None) -> None:
        """See that epoch records at the end of a slice are what the next sealed one says.

        Args:
            run: They.
            link: Behind them, if it is known.

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
                    wanted = self._chain.opened(record).before
                    if link is None:
                        self._require_run([*run, *more], wanted)
                        self._wanted, self._beyond = wanted, more
                    elif self._chain.reached(link, more) != wanted:
                        raise broken(record.seq, "it was sealed behind other records")
                    return

    async def _facts(self, *, fresh: bool = False) -> Facts:
        return await self._told(fresh)

    async def _part(
        self, records: Sequence[Record], before: Record | None, link: ChainLink | None
    ) -> _Part:
        size = sum(len(one.payload) for one in records)
        facts = await self._facts()
        part = await done(size, lambda: self._walk(records, before, link, facts))
        await self._require_folded(part.folded)
        return part

    def _walk(  # noqa: C901, PLR0915  # one pass, with each record looked at once
        self, records: Sequence[Record], before: Record | None, link: ChainLink | None, facts: Facts
    ) -> _Part:
        chain = self._chain
        out: list[Record] = []
        leading: list[Record] = []
        wanted: ChainLink | None = None
        folded = 0
        for one in records:
            if before is not None and one.seq != before.seq + 1:
                raise broken(one.seq, f"record {before.seq + 1} is missing")
            if one.seq < chain.begins:
                out.append(opened_record(chain.seal, one))
                before = one
                continue
            if one.seq == chain.begins:
                link = chain.start
            elif before is not None and (one.epoch > before.epoch) != (one.kind == EPOCH):
                raise broken(one.seq, "an epoch begins with an epoch record, and only there")
            if one.kind == EPOCH:
                out.append(one)
                if link is None:
                    leading.append(one)
            else:
                opened = chain.opened(one)
                if link is None and wanted is None:
                    wanted = opened.before
                elif link is not None and opened.before != link:
                    raise broken(one.seq, "it was sealed behind other records")
                link = opened.before
                folded = max(folded, opened.folded)
                out.append(opened.record)
            if link is not None:
                link = chain.follow(link, one)
                known = facts.link
                if known is not None and known.seq == one.seq and known != link:
                    raise broken(one.seq, "the manifest was made of other records")
            before = one
        return _Part(out, leading, wanted, link, folded)

    def _require_run(self, run: Sequence[Record], wanted: ChainLink) -> None:
        if wanted.run < len(run):
            raise broken(wanted.seq, "an epoch record stands where another one belongs")

    async def _require_folded(self, folded: int) -> None:
        if folded <= (await self._facts()).as_of_seq:
            return
        facts = await self._facts(fresh=True)  # somebody may have folded since
        if facts.is_lost or folded <= facts.as_of_seq:
            return
        message = (
            f"the manifest of {self._key} is as of record {facts.as_of_seq}, and a later record "
            f"was written when there was one as of {folded}: somebody put an older one back; "
            "restore the session from one copy, its log and its documents together"
        )
        raise CorruptRecordError(message, key=str(self._key), as_of_seq=facts.as_of_seq)

    async def _require_trimmed(self, first: int) -> None:
        begins = self._chain.begins
        if first > max(await self._trimmed(), begins if begins > 1 else 0):
            raise broken(first, "the records before it are missing")


def _epochs_at_end(records: Sequence[Record]) -> list[Record]:
    count = next((n for n, one in enumerate(reversed(records)) if one.kind != EPOCH), len(records))
    return [*records[len(records) - count :]]
