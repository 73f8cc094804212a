"""The log on the server: appended by script, read in ranges of the stream.

A stream of batches was chosen over a list (which cannot be searched by seq) and a sorted set
(which takes several times the memory and keeps equal members once): an append costs the same
however long the log is, a range of seqs is a range of ids in both directions, and the oldest
entries go without touching the rest.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, final

import msgspec

from perdure.errors import (
    CorruptRecordError,
    LeaseLostError,
    PerdureError,
    StoreError,
    StoreUnavailableError,
)
from perdure.records import frames
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.records.records import Record
from perdure.store import Batch, BlobSweep, LogChunk, Outcome, Status, Store, past_damage
from perdure.stores.redis.connection import RedisCall, RedisLink, script
from perdure.stores.redis.entries import (
    SessionEntry,
    damaged,
    gap,
    look_of,
    records_of,
    refusal,
    same,
    span_of,
)
from perdure.stores.redis.errors import meaning_of, outcome_of
from perdure.stores.redis.layout import KeyNames

# The log's entries: one batch of records each, under an id that says where it stands
#
# An entry's id is ``<last seq>-<first seq>``, so that a range of the stream is a range of the log.
# Its one field is named by the epoch, its value holds the records' sealed lines. Each batch is
# sealed by itself, seeded with the session's own number: a flipped bit, a cut value, and an entry
# that belongs elsewhere all fail the same way, by name. Pure.


# Old history in another store: segments of the log that memory need not hold
#
# A segment is a run of whole entries as they stood in the stream, kept as a blob of the other
# store under the hash of its bytes. The session's own stream of segments says which seqs lie in
# which. A segment is durable there before its entries leave the server, so a kill in between costs
# nothing but a blob that nobody names, until the next sweep.


log: logging.Logger = logging.getLogger("perdure")

_SEGMENT = 1024 * 1024
"""Bytes of entries that make a segment; what is less stays."""
_ENTRIES = 64
_AT_ONCE = 16
"""Segments that one fold moves, so that it keeps its session from saving for moments only."""

ColdEntry = tuple[bytes, tuple[bytes, bytes]]
_segments: msgspec.msgpack.Decoder[list[ColdEntry]] = msgspec.msgpack.Decoder(list[ColdEntry])


@final
class ColdHistory:
    """The old history of all sessions; without another store, nothing ever moves."""

    def __init__(self, link: RedisLink, names: KeyNames, place: Store | None) -> None:
        self._link = link
        self._names = names
        self._place = place

    async def move(self, key: SessionKey, manifest: Manifest) -> None:
        """Move what is folded, as its holder; what cannot be moved now stays where it is."""
        folded = [one.as_of_seq for one in manifest.documents.values()]
        # One less: the newest entry stays, since it tells where the log ends.
        upto = max(min(folded, default=0) - 1, 0)
        try:
            for _ in range(_AT_ONCE):
                if self._place is None or not await self._step(key, manifest.epoch, upto):
                    break
        except StoreError:
            log.warning("history was not moved", extra={"session": str(key)}, exc_info=True)

    async def _step(self, key: SessionKey, epoch: int, upto: int) -> bool:
        """Move one segment; return whether there may be more to move."""
        assert self._place is not None
        places = self._names.places(key)
        entries: list[Any] = []
        size, start = 0, b"-"
        while size < _SEGMENT:
            call = RedisCall(b"XRANGE", places.log, start, upto, b"COUNT", _ENTRIES)
            (part,) = await self._link.send([call])
            if not part:
                return False
            for entry in part:
                entries.append(entry)
                size += len(entry[1][1])
                if size >= _SEGMENT:
                    break
            start = b"(" + part[-1][0]
        data = msgspec.msgpack.encode(entries)
        name = hashlib.sha256(data).hexdigest()
        await self._place.put_blobs(key.tenant, {name: data})
        first, last = span_of(entries[0][0])[0], span_of(entries[-1][0])[1]
        keys = (places.session, places.log, places.segments)
        (reply,) = await self._link.write([_RETIRE(keys, epoch, first, last, name)])
        return reply == 1  # type: ignore[no-any-return]  # an answer of the server

    async def entries(self, key: SessionKey, seq: int) -> list[Any]:
        """Return the entries of the segment in which a record lies.

        Raises:
            CorruptRecordError: The segment is lost or damaged.
            StoreUnavailableError: The other store is not named, or cannot be reached.

        """
        if self._place is None:
            message = (
                f"the history of {key} before its newest records was moved to another store: name "
                "that with history=… to read it"
            )
            raise StoreUnavailableError(message, key=str(key), sent=False)
        call = RedisCall(b"XRANGE", self._names.places(key).segments, seq, b"+", b"COUNT", 1)
        (found,) = await self._link.send([call])
        if not found:
            raise damaged(key, "the history", f"no segment has record {seq}")
        name = found[0][1][1].decode()
        data = await self._place.get_blob(key.tenant, name)
        if data is None:
            where = f"segment {found[0][0].decode()} of the history"
            raise damaged(key, where, f"{self._place.location} does not have {name}")
        return list(_segments.decode(data))

    async def names_of(self, key: SessionKey) -> list[str]:
        """Return the names of a session's segments."""
        call = RedisCall(b"XRANGE", self._names.places(key).segments, b"-", b"+")
        (found,) = await self._link.send([call])
        return [entry[1][1].decode() for entry in found]

    async def drop(self, key: SessionKey, epoch: int, below: int) -> list[Any]:
        """Forget the segments below a record; return the server's answer."""
        places = self._names.places(key)
        keys = (places.session, places.segments)
        (reply,) = await self._link.write([_DROP(keys, epoch, below)])
        return list(reply)

    async def remove(self, key: SessionKey, names: list[str]) -> int:
        """Remove segments that nobody names any more, and return their bytes."""
        if not names or self._place is None:
            return 0
        return await self._place.remove_blobs(key.tenant, names)

    async def tenants(self) -> list[str]:
        """List the tenants of whom the other store has anything."""
        return [] if self._place is None else await self._place.tenants()

    async def sweep(self, tenant: str, older_than: float) -> BlobSweep:
        """Sweep the other store of segments that no session names, whatever was killed when.

        Walks over all keys: a directory may lack sessions, and their history is not to be lost.
        """
        if self._place is None:
            return BlobSweep()
        named: set[str] = set()
        cursor: Any = b"0"
        while True:
            match = self._names.every_history(tenant)
            scan = RedisCall(b"SCAN", cursor, b"MATCH", match, b"COUNT", 1000)
            ((cursor, found),) = await self._link.send([scan])
            calls = [RedisCall(b"XRANGE", stream, b"-", b"+") for stream in found]
            for entries in await self._link.send(calls) if calls else ():
                named.update(entry[1][1].decode() for entry in entries)
            if int(cursor) == 0:
                return await self._place.sweep(tenant, named, older_than)


_RETIRE = script("retire")
_DROP = script("drop")


MAX_RECORD_BYTES = 16 * 1024 * 1024

_PART = 256 * 1024
"""Bytes that one answer of a long read is to have."""
_FIRST, _MOST = 16, 1024
"""Entries in the first answer, and in any."""
_TRIMMED = 256
"""Entries that one step of a trim removes, so that the server is free again soon."""


def lost(key: SessionKey, epoch: int, newest: int, *, deleted: bool) -> LeaseLostError:
    """Return the error for a holder that is none any more."""
    message = (
        f"epoch {epoch} of {key} may not write: the newest is {newest}"
        f"{', and it was deleted' if deleted else ''}; open the session again"
    )
    return LeaseLostError(message, key=key, epoch=epoch, newest=newest)


@final
class RedisLog:
    """The logs of all sessions."""

    def __init__(self, link: RedisLink, names: KeyNames, cold: ColdHistory, owner: str) -> None:
        self._owner = owner
        self._link = link
        self._names = names
        self._cold = cold

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append each batch with a script of its own, all in one write."""
        if not batches:
            return []
        outcomes: dict[int, Outcome] = {}
        calls: list[RedisCall] = []
        sent: list[tuple[int, Batch, int]] = []
        now = b"%.3f" % time.time()
        for place, batch in enumerate(batches):
            try:
                call, size = self._call(batch, now)
            except PerdureError as error:
                outcomes[place] = Outcome(Status.PERMANENT, error)
                continue
            calls.append(call)
            sent.append((place, batch, size))
        try:
            replies = await self._link.ask(calls, write=True) if calls else []
        except PerdureError as error:
            failed = outcome_of(error)
            return [outcomes.get(place, failed) for place in range(len(batches))]
        for (place, batch, size), reply in zip(sent, replies, strict=True):
            done = reply == 0
            outcomes[place] = (
                Outcome(Status.OK, written=size) if done else await self._judged(batch, reply)
            )
        return [outcomes[place] for place in range(len(batches))]

    def _call(self, batch: Batch, now: bytes) -> tuple[RedisCall, int]:
        refused = refusal(batch, MAX_RECORD_BYTES)
        if refused is not None:
            raise refused
        places = self._names.places(batch.key)
        first, count = batch.first, len(batch.records)
        data, _ = frames.encode(batch.records, first=first, epoch=batch.epoch, crc=places.seed)
        call = _APPEND(places[:2], batch.epoch, first, first + count - 1, data, now, self._owner)
        return call, len(data)

    async def _judged(self, batch: Batch, reply: Any) -> Outcome:
        """Return the outcome of a batch that was not simply appended."""
        if isinstance(reply, BaseException):
            return outcome_of(meaning_of(self._link.location, reply))
        word, number, *rest = reply
        if word == b"lost":
            error = lost(batch.key, batch.epoch, number, deleted=bool(rest[0]))
            return Outcome(Status.CONFLICT, error)
        try:
            look = await self.look(batch.key)  # damage is told as such
            if word == b"gap":
                return Outcome(Status.PERMANENT, gap(batch, number))
            return await self._overlapped(batch, look)
        except PerdureError as error:
            return outcome_of(error)

    async def _overlapped(self, batch: Batch, look: SessionEntry) -> Outcome:
        """Compare with what the log holds, and append what it does not hold yet."""
        before = batch.first + len(batch.records)
        held: list[Record] = []
        async for chunk in self.read(batch.key, after=batch.first - 1, before=before):
            held += chunk.records
        if (not held and batch.records) or not same(batch, held):
            return Outcome(Status.PERMANENT, gap(batch, look.head))
        rest = batch.records[len(held) :]
        if not rest:
            return Outcome(Status.OK)
        (outcome,) = await self.append_many(
            [Batch(batch.key, batch.epoch, batch.first + len(held), rest)]
        )
        return outcome

    async def look(self, key: SessionKey) -> SessionEntry:
        """Return what a session is.

        Raises:
            CorruptRecordError: The session and its log do not fit each other.

        """
        (reply,) = await self._link.send([_LOOK(self._names.places(key)[:2])])
        return look_of(key, reply)

    async def read(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        look = await self.look(key)
        after = max(after, look.base)
        stop = look.head + 1 if before is None else min(before, look.head + 1)
        left = look.head if limit is None else limit
        count = 1 if past_damage.get() else _FIRST  # one damaged entry hides no others then
        while left > 0 and stop - after > 1:
            try:
                records, size = await self._records(key, look, after, stop, count, reverse=reverse)
            except CorruptRecordError:
                now = await self.look(key)
                if now.deleted or now.base != look.base or now.head < look.head:
                    return  # deleted or trimmed under the reader
                if now.moved == look.moved:
                    raise
                look = now
                continue
            yield LogChunk(tuple(records[:left]))
            left -= len(records)
            if reverse:
                stop = records[-1].seq
            else:
                after = records[-1].seq
            most = 1 if past_damage.get() else _MOST
            count = max(1, min(count * _PART // max(size, 1), count * 4, most))

    async def _records(
        self,
        key: SessionKey,
        look: SessionEntry,
        after: int,
        stop: int,
        count: int,
        *,
        reverse: bool,
    ) -> tuple[list[Record], int]:
        """Return the next records, and how many bytes lie there of them.

        Raises:
            CorruptRecordError: They are damaged, or not where the session was seen to have them.

        """
        wanted = stop - 1 if reverse else after + 1
        if wanted > look.moved:
            entries = await self._entries(key, after, stop, count, reverse=reverse)
        else:
            entries = (await self._cold.entries(key, wanted))[:: -1 if reverse else 1]
        decoded = self._decoded(key, entries, reverse=reverse)
        records = [record for record in decoded if after < record.seq < stop]
        if not records or records[0].seq != wanted:
            raise damaged(key, "the log", f"record {wanted} is missing")
        return records, sum(len(entry[1][1]) for entry in entries)

    async def _entries(
        self, key: SessionKey, after: int, stop: int, count: int, *, reverse: bool
    ) -> list[Any]:
        log = self._names.places(key).log
        if not reverse:
            # The first that ends behind *after*; the last may begin before *stop*.
            call = RedisCall(b"XRANGE", log, after + 1, b"+", b"COUNT", count)
            (entries,) = await self._link.send([call])
            return [entry for entry in entries if span_of(entry[0])[0] < stop]
        # The one that holds the record before *stop* may end behind it.
        find = RedisCall(b"XRANGE", log, stop - 1, b"+", b"COUNT", 1)
        (found,) = await self._link.send([find])
        if not found:
            return []
        call = RedisCall(b"XREVRANGE", log, found[0][0], after + 1, b"COUNT", count)
        (entries,) = await self._link.send([call])
        return list(entries)

    def _decoded(self, key: SessionKey, entries: list[Any], *, reverse: bool) -> list[Record]:
        """Return the records of neighboring entries; each begins where the other ends."""
        seed = self._names.places(key).seed
        records: list[Record] = []
        for entry in entries:
            part = records_of(key, seed, entry)
            if reverse:
                part.reverse()
            if records and part[0].seq != records[-1].seq + (-1 if reverse else 1):
                where = f"entry {entry[0].decode()} of the log"
                raise damaged(key, where, "its neighbor is missing")
            records += part
        return records

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove whole entries from before a record, and return their bytes."""
        reply = await self._cold.drop(key, epoch, below)
        if reply[0] == b"lost":
            raise lost(key, epoch, reply[1], deleted=bool(reply[2]))
        freed = await self._cold.remove(key, [name.decode() for name in reply[1:]])
        if (await self.look(key)).moved >= below:
            return freed
        while True:
            call = _TRIM(self._names.places(key)[:2], epoch, below, _TRIMMED)
            (reply,) = await self._link.write([call])
            if reply[0] == b"lost":
                raise lost(key, epoch, reply[1], deleted=bool(reply[2]))
            freed += int(reply[1])
            if reply[0] < _TRIMMED:
                return freed


_APPEND = script("append")
_LOOK = script("look")
_TRIM = script("trim")
