"""Logs on the server: appended by script, read as ranges of a stream; and their cold history.

A stream was chosen over a list (which cannot be searched by seq) and a sorted set (which takes
several times the memory and stores equal members once): the cost of an append does not depend on
the log's length, a range of seqs is a range of ids in both directions, and the oldest entries can
be removed without touching others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, final

import msgspec

from perdure._lib.logs import log_facts
from perdure.errors import (
    CorruptRecordError,
    PerdureError,
    StoreError,
    StoreUnavailableError,
)
from perdure.records import records as frames
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, lease_lost, misplaced, new_entries, refusal_of
from perdure.records.records import Entry, Record
from perdure.store import Batch, BlobSweep, LogChunk, Outcome, Status, Store, past_damage
from perdure.stores.redis.connection import RedisCall, RedisLink, script
from perdure.stores.redis.errors import error_meaning, outcome_of
from perdure.stores.redis.layout import (
    STEP,
    KeyNames,
    LogState,
    damage_error,
    listed_fields,
    log_state,
    member_of,
    owned_member,
    records_of,
    require_held,
    shown_of,
    span_of,
)

log: logging.Logger = logging.getLogger("perdure")

_SEGMENT = 1024 * 1024
"""Bytes of entries that make a segment; fewer are not moved."""
_ENTRIES = 64
_MAX_SEGMENTS = 16
"""Segments that one fold moves at most, since saving waits for it."""

ColdEntry = tuple[bytes, tuple[bytes, bytes]]
_segments: msgspec.msgpack.Decoder[list[ColdEntry]] = msgspec.msgpack.Decoder(list[ColdEntry])


# Cold history: segments of the log in another store
#
# A segment is a run of whole stream entries, stored as a blob of the other store under the hash of
# its bytes. The session's stream of segments says which seqs each segment has. A segment is durable
# in the other store before its entries are removed from the server, so a kill in between leaves
# only an unreferenced blob, until the next sweep.


@final
class ColdHistory:
    """The cold history of all sessions; without another store, nothing is moved."""

    def __init__(self, link: RedisLink, names: KeyNames, history: Store | None) -> None:
        self._link = link
        self._names = names
        self._history = history

    async def move(self, key: SessionKey, manifest: Manifest) -> None:
        """Move records that all documents include, as the holder; log a failure."""
        folded = [document.as_of_seq for document in manifest.documents.values()]
        # Minus one: the newest entry stays, since it marks the end of the log.
        up_to = max(min(folded, default=0) - 1, 0)
        try:
            for _ in range(_MAX_SEGMENTS):
                if self._history is None or not await self._move_segment(
                    key, manifest.epoch, up_to
                ):
                    break
        except StoreError as error:
            log_facts(log, logging.WARNING, "history was not moved", error, session=str(key))

    async def _move_segment(self, key: SessionKey, epoch: int, up_to: int) -> bool:
        """Move one segment; return whether there may be more to move."""
        assert self._history is not None
        session_keys = self._names.session_keys(key)
        entries: list[Any] = []
        size, start = 0, b"-"
        while size < _SEGMENT:
            call = RedisCall(b"XRANGE", session_keys.log, start, up_to, b"COUNT", _ENTRIES)
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
        name = name_of(data)
        await self._history.put_blobs(key.tenant, {name: data})
        first, last = span_of(entries[0][0])[0], span_of(entries[-1][0])[1]
        keys = (session_keys.session, session_keys.log, session_keys.segments)
        # Refused under a past epoch: the blob is then one that no session lists.
        (reply,) = await self._link.write([_RETIRE(keys, epoch, first, last, name)])
        return reply == 1  # type: ignore[no-any-return]  # a reply of the server

    async def entries(self, key: SessionKey, seq: int) -> list[Any]:
        """Return the entries of the segment that has a record.

        Raises:
            CorruptRecordError: The segment is lost or damaged.
            StoreUnavailableError: The other store is not configured, or cannot be reached.

        """
        if self._history is None:
            raise StoreUnavailableError(
                f"the history of {key} before its newest records was moved to another store: name "
                "it with history=… to read them",
                key=str(key),
                sent=False,
            )
        call = RedisCall(b"XRANGE", self._names.session_keys(key).segments, seq, b"+", b"COUNT", 1)
        (entries,) = await self._link.send([call])
        if not entries:
            raise damage_error(key, "the history", f"no segment has record {seq}")
        name = entries[0][1][1].decode()
        data = await self._history.get_blob(key.tenant, name)
        if data is None:
            part = f"segment {entries[0][0].decode()} of the history"
            raise damage_error(key, part, f"{self._history.location} does not have {name}")
        return list(_segments.decode(data))

    async def names_of(self, key: SessionKey) -> list[str]:
        """Return the names of a session's segments."""
        call = RedisCall(b"XRANGE", self._names.session_keys(key).segments, b"-", b"+")
        (entries,) = await self._link.send([call])
        return [entry[1][1].decode() for entry in entries]

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove the segments below a record, and return their bytes."""
        session_keys = self._names.session_keys(key)
        keys = (session_keys.session, session_keys.segments)
        (reply,) = await self._link.write([_DROP(keys, epoch, below)])
        require_held(key, epoch, reply)
        return await self.remove(key, [name.decode() for name in reply[1:]])

    async def remove(self, key: SessionKey, names: list[str]) -> int:
        """Remove segments that no session lists any more, and return their bytes."""
        if not names or self._history is None:
            return 0
        return await self._history.remove_blobs(key.tenant, names)

    async def tenants(self) -> list[str]:
        """List the tenants with data in the other store."""
        return [] if self._history is None else await self._history.tenants()

    async def sweep(self, tenant: str, older_than: float) -> BlobSweep:
        """Sweep the other store of segments that no session lists, left by kills at any point.

        Scans all keys: a directory may lack sessions, whose history must not be removed.
        """
        if self._history is None:
            return BlobSweep()
        streams = await self._link.scan(self._names.every_history(tenant))
        calls = [RedisCall(b"XRANGE", stream, b"-", b"+") for stream in streams]
        histories = await self._link.send_all(calls)
        named = {entry[1][1].decode() for entries in histories for entry in entries}
        return await self._history.sweep(tenant, named, older_than)


_RETIRE = script("retire")
_DROP = script("drop")


_ANSWER_BYTES = 256 * 1024
"""Target size of one reply of a long read, in bytes."""
_FIRST_ENTRIES, _MAX_ENTRIES = 16, 1024
"""Entries in the first reply, and in any."""
_TRIM_ENTRIES = 256
"""Entries that one step of a trim removes, so that it does not block the server for long."""


@final
class RedisLog:
    """The logs of all sessions."""

    def __init__(self, link: RedisLink, names: KeyNames, cold: ColdHistory, owner: str) -> None:
        self._owner = owner
        self._link = link
        self._names = names
        self._cold = cold
        self._step = 0.0
        self._listed: dict[SessionKey, float] = {}
        """The step that a session's place among the recent ones was last written for."""

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append each batch with its own script call, all in one write."""
        if not batches:
            return []
        outcomes: dict[int, Outcome] = {}
        calls: list[RedisCall] = []
        sent: list[tuple[int, Batch, int, int]] = []
        now = time.time()
        step = now // STEP
        if step != self._step:
            self._step, self._listed = step, {}
        # 1. What to send: each batch, between what its labels and its activity need.
        for place, batch in enumerate(batches):
            try:
                call, size = self._call(batch, b"%.6f" % now)
            except PerdureError as error:
                outcomes[place] = Outcome(Status.PERMANENT, error)
                continue
            if batch.about is not None:
                session = self._names.session_keys(batch.key).session
                calls.append(RedisCall(b"HGET", session, b"a"))
            calls.append(call)
            sent.append((place, batch, size, len(calls) - 1))
            if self._listed.get(batch.key) != step:
                recent = self._names.recent(batch.key.tenant)
                calls.append(RedisCall(b"ZADD", recent, step, member_of(batch.key)))
        # 2. One write.
        try:
            replies = await self._link.request(calls, write=True) if calls else []
        except PerdureError as error:
            failed = outcome_of(error)
            return [outcomes.get(place, failed) for place in range(len(batches))]
        # 3. What became of each.
        moves: dict[int, list[RedisCall]] = {}
        for place, batch, size, at in sent:
            reply = replies[at]
            if reply != 0:
                outcomes[place] = await self._outcome(batch, reply)
                continue
            outcomes[place] = Outcome(Status.OK, written=size)
            self._listed[batch.key] = step
            if batch.about is not None:
                shown, owner = replies[at - 1], batch.about.owner
                moves[place] = owner_moves(self._names, batch.key, shown, owner)
        # 4. The index of owners, for labels that changed: another slot, and so another step.
        outcomes |= await self._move_owners(moves)
        return [outcomes[place] for place in range(len(batches))]

    async def _move_owners(self, moves: dict[int, list[RedisCall]]) -> dict[int, Outcome]:
        """Write the index of owners; return outcomes of batches to send again for it."""
        calls = [call for part in moves.values() for call in part]
        try:
            if calls:
                await self._link.write(calls)
        except PerdureError as error:
            return dict.fromkeys(moves, Outcome(Status.IN_DOUBT, error))
        return {}

    def _call(self, batch: Batch, now: bytes) -> tuple[RedisCall, int]:
        refused = refusal_of(batch)
        if refused is not None:
            raise refused
        session_keys = self._names.session_keys(batch.key)
        first, count = batch.first, len(batch.records)
        data, _ = frames.encode(
            batch.records, first=first, epoch=batch.epoch, crc=session_keys.seed
        )
        call = _APPEND(
            session_keys[:2],
            batch.epoch,
            first,
            first + count - 1,
            data,
            now,
            self._owner,
            b"" if batch.turns is None else batch.turns,
            b"" if batch.about is None else shown_of(batch.about),
        )
        return call, len(data)

    async def _outcome(self, batch: Batch, reply: Any) -> Outcome:
        """Return the outcome of a batch that was not appended as it is."""
        if isinstance(reply, BaseException):
            return outcome_of(error_meaning(self._link.location, reply))
        word, number, *details = reply
        if word == b"lost":
            error = lease_lost(batch.key, batch.epoch, number, deleted=bool(details[0]))
            return Outcome(Status.CONFLICT, error)
        try:
            state = await self.state(batch.key)  # raises for damage
            if word == b"gap":
                return Outcome(Status.PERMANENT, misplaced(batch, number))
            return await self._append_overlap(batch, state)
        except PerdureError as error:
            return outcome_of(error)

    async def _append_overlap(self, batch: Batch, state: LogState) -> Outcome:
        """Compare a batch with stored records, and append its remaining ones."""
        before = batch.first + len(batch.records)
        stored: list[Record] = []
        after, stop = max(batch.first - 1, state.base), min(before, state.head + 1)
        while stop - after > 1:
            records, _ = await self._records(
                batch.key, state, after, stop, _FIRST_ENTRIES, reverse=False
            )
            stored += records
            after = records[-1].seq
        begun = max([record.seq for record in stored if record.epoch != batch.epoch], default=0)
        logged = [Entry(record.kind, record.payload, record.end) for record in stored]
        remaining = new_entries(batch, state.head, begun, logged)
        if isinstance(remaining, Exception):
            return Outcome(Status.PERMANENT, remaining)
        if not remaining:
            return Outcome(Status.OK)
        rest = msgspec.structs.replace(batch, first=before - len(remaining), records=remaining)
        (outcome,) = await self.append_many([rest])
        return outcome

    async def state(self, key: SessionKey) -> LogState:
        """Return the state of a session's log.

        Raises:
            CorruptRecordError: The session's hash and its log contradict each other.

        """
        (reply,) = await self._link.send([_LOOK(self._names.session_keys(key)[:2])])
        return log_state(key, reply)

    async def read(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        state = await self.state(key)
        if state.is_hidden:
            return
        after = max(after, state.base)
        stop = state.head + 1 if before is None else min(before, state.head + 1)
        remaining = state.head if limit is None else limit
        count = 1 if past_damage.get() else _FIRST_ENTRIES  # one damaged entry must not hide others
        while remaining > 0 and stop - after > 1:
            try:
                records, size = await self._records(key, state, after, stop, count, reverse=reverse)
            except CorruptRecordError:
                # No damage if it was deleted, trimmed, or moved to the cold history meanwhile.
                current = await self.state(key)
                if current.is_hidden or current.base != state.base or current.head < state.head:
                    return  # deleted or trimmed under the reader
                if current.moved == state.moved:
                    raise
                state = current
                continue
            yield LogChunk(tuple(records[:remaining]))
            remaining -= len(records)
            if reverse:
                stop = records[-1].seq
            else:
                after = records[-1].seq
            most = 1 if past_damage.get() else _MAX_ENTRIES
            # As many entries as fill an answer, and at most four times those of the last one.
            count = max(1, min(count * _ANSWER_BYTES // max(size, 1), count * 4, most))

    async def _records(
        self,
        key: SessionKey,
        state: LogState,
        after: int,
        stop: int,
        count: int,
        *,
        reverse: bool,
    ) -> tuple[list[Record], int]:
        """Return the next records, and the size of their entries in bytes.

        Raises:
            CorruptRecordError: They are damaged, or missing although the state has them.

        """
        seq = stop - 1 if reverse else after + 1
        if seq > state.moved:
            entries = await self._entries(key, after, stop, count, reverse=reverse)
        else:
            entries = (await self._cold.entries(key, seq))[:: -1 if reverse else 1]
        seed = self._names.session_keys(key).seed
        records: list[Record] = []
        for entry in entries:
            part = [record for record in records_of(key, seed, entry) if after < record.seq < stop]
            if reverse:
                part.reverse()
            if part and part[0].seq != seq:
                raise damage_error(key, "the log", f"record {seq} is missing")
            records += part
            seq += -len(part) if reverse else len(part)
        if not records:
            raise damage_error(key, "the log", f"record {seq} is missing")
        return records, sum(len(entry[1][1]) for entry in entries)

    async def _entries(
        self, key: SessionKey, after: int, stop: int, count: int, *, reverse: bool
    ) -> list[Any]:
        log = self._names.session_keys(key).log
        if not reverse:
            # From the first that ends after *after*; the last may begin before *stop*.
            call = RedisCall(b"XRANGE", log, after + 1, b"+", b"COUNT", count)
            (entries,) = await self._link.send([call])
            return [entry for entry in entries if span_of(entry[0])[0] < stop]
        # The entry with the record before *stop* may end after it.
        find = RedisCall(b"XRANGE", log, stop - 1, b"+", b"COUNT", 1)
        (holding,) = await self._link.send([find])
        if not holding:
            return []
        call = RedisCall(b"XREVRANGE", log, holding[0][0], after + 1, b"COUNT", count)
        (entries,) = await self._link.send([call])
        return list(entries)

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove whole entries before a record, and return their bytes."""
        freed = await self._cold.trim(key, epoch, below)
        if (await self.state(key)).moved >= below:
            return freed
        while True:
            call = _TRIM(self._names.session_keys(key)[:2], epoch, below, _TRIM_ENTRIES)
            (reply,) = await self._link.write([call])
            require_held(key, epoch, reply)
            freed += int(reply[1])
            if reply[0] < _TRIM_ENTRIES:
                return freed


def owner_moves(
    names: KeyNames, key: SessionKey, shown: object, owner: str | None
) -> list[RedisCall]:
    """Return the calls that move a session in the index of owners from what was shown."""
    before, owned, member = listed_fields(shown).owner, names.owned(key.tenant), member_of(key)
    calls: list[RedisCall] = []
    if before is not None and before != owner:
        calls.append(RedisCall(b"ZREM", owned, owned_member(before, member)))
    if owner is not None:
        calls.append(RedisCall(b"ZADD", owned, 0, owned_member(owner, member)))
    return calls


_APPEND = script("append")
_LOOK = script("look")
_TRIM = script("trim")
