"""Old history in another store: segments of the log that memory need not hold.

A segment is a run of whole entries as they stood in the stream, kept as a blob of the other
store under the hash of its bytes. The session's own stream of segments says which seqs lie in
which. A segment is durable there before its entries leave the server, so a kill in between
costs nothing but a blob that nobody names, until the next sweep.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any, final

import msgspec

from perdure.errors import StoreError, StoreUnavailableError
from perdure.model.keys import SessionKey
from perdure.model.manifest import Manifest
from perdure.store import Store, Swept
from perdure.stores.redis.entries import damaged, span_of
from perdure.stores.redis.link import Link
from perdure.stores.redis.names import Names
from perdure.stores.redis.scripts import Call, script

__all__ = ["Cold"]

log: logging.Logger = logging.getLogger("perdure")

_SEGMENT = 1024 * 1024
"""Bytes of entries that make a segment; what is less stays."""
_ENTRIES = 64
_AT_ONCE = 16
"""Segments that one fold moves, so that it keeps its session from saving for moments only."""

Entry = tuple[bytes, tuple[bytes, bytes]]
_segments: msgspec.msgpack.Decoder[list[Entry]] = msgspec.msgpack.Decoder(list[Entry])


@final
class Cold:
    """The old history of all sessions; without another store, nothing ever moves."""

    def __init__(self, link: Link, names: Names, place: Store | None) -> None:
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
            call = Call(b"XRANGE", places.log, start, upto, b"COUNT", _ENTRIES)
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
        call = Call(b"XRANGE", self._names.places(key).segments, seq, b"+", b"COUNT", 1)
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
        call = Call(b"XRANGE", self._names.places(key).segments, b"-", b"+")
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

    async def sweep(self, tenant: str, older_than: float) -> Swept:
        """Sweep the other store of segments that no session names, whatever was killed when.

        Walks over all keys: a directory may lack sessions, and their history is not to be lost.
        """
        if self._place is None:
            return Swept()
        named: set[str] = set()
        cursor: Any = b"0"
        while True:
            match = self._names.every_history(tenant)
            scan = Call(b"SCAN", cursor, b"MATCH", match, b"COUNT", 1000)
            ((cursor, found),) = await self._link.send([scan])
            calls = [Call(b"XRANGE", stream, b"-", b"+") for stream in found]
            for entries in await self._link.send(calls) if calls else ():
                named.update(entry[1][1].decode() for entry in entries)
            if int(cursor) == 0:
                return await self._place.sweep(tenant, named, older_than)


_RETIRE = script("retire")
_DROP = script("drop")
