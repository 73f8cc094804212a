"""The inbox: what anybody leaves for a session, each item sealed, in the order of its posts."""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Sequence
from typing import Any, final

import msgspec

from perdure.codec.decoders import decoder_of
from perdure.errors import CorruptRecordError
from perdure.model.keys import SessionKey
from perdure.store import Posted
from perdure.stores.redis.entries import damaged
from perdure.stores.redis.leases import Leases
from perdure.stores.redis.link import Link
from perdure.stores.redis.log import lost
from perdure.stores.redis.names import Names, key_in, written_key
from perdure.stores.redis.scripts import Call, script

__all__ = ["Inbox"]

_CRC = 4
_PAGE = 1000
"""Inboxes that one write looks into."""
_items: msgspec.msgpack.Decoder[Posted] = msgspec.msgpack.Decoder(Posted)


@final
class Inbox:
    """The inboxes of all sessions."""

    def __init__(self, link: Link, names: Names, leases: Leases) -> None:
        self._link = link
        self._names = names
        self._leases = leases

    async def post(self, key: SessionKey, items: Sequence[Posted]) -> int:
        """Leave items for a session, and tell its holder; see the port."""
        places = self._names.places(key)
        parts = [part for item in items for part in (item.op_id, _sealed(item, places.seed))]
        keys = (places.session, places.items, places.order)
        tenant = Call(b"ZADD", self._names.tenants, 0, key.tenant)
        # Before and behind, and each time with another score: see `forget`.
        now = time.time_ns() // 1000
        before, behind = (
            Call(b"ZADD", self._names.posted, score, written_key(key)) for score in (now, now + 1)
        )
        replies = await self._link.write([tenant, before, _POST(keys, *parts), behind])
        new, holder = replies[2]
        if holder and items:
            # Also for what was there already: whoever posts again may have been cut off here.
            await self._leases.tell_of_mail(key, holder.decode())
        return int(new)

    async def take(self, key: SessionKey, epoch: int, limit: int) -> list[Posted]:
        """Return what waits for a session; see the port."""
        if limit <= 0:
            return []
        places = self._names.places(key)
        keys = (places.session, places.items, places.order)
        (reply,) = await self._link.send([_TAKE(keys, epoch, limit)])
        _require(key, epoch, reply)
        pairs = zip(reply[1::2], reply[2::2], strict=True)
        return [_opened(key, places.seed, name, data) for name, data in pairs]

    async def settle(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        """Remove items that are in the log; see the port."""
        places = self._names.places(key)
        keys = (places.session, places.items, places.order)
        (reply,) = await self._link.write([_SETTLE(keys, epoch, *op_ids)])
        if reply == 0:
            await self.forget(key)
        elif isinstance(reply, list):
            _require(key, epoch, reply)

    async def waiting(self) -> list[SessionKey]:
        """List the sessions for which something waits; see the port."""
        (known,) = await self._link.send([Call(b"ZRANGE", self._names.posted, 0, -1)])
        keys = [decoder_of(SessionKey).decode(written) for written in known]
        found: list[SessionKey] = []
        for at in range(0, len(keys), _PAGE):
            page = keys[at : at + _PAGE]
            calls = [Call(b"ZCARD", self._names.places(key).order) for key in page]
            counts = await self._link.send(calls)
            found += [key for key, count in zip(page, counts, strict=True) if count]
        return sorted(found)

    async def rebuild(self) -> None:
        """Make the set of inboxes anew, by a walk over all keys."""
        cursor: Any = b"0"
        while True:
            scan = Call(b"SCAN", cursor, b"MATCH", self._names.every_inbox, b"COUNT", 1000)
            ((cursor, found),) = await self._link.send([scan])
            written = [written_key(key_in(name)) for name in found]
            calls = [Call(b"ZADD", self._names.posted, b"NX", 0, one) for one in written]
            if calls:
                await self._link.write(calls)
            if int(cursor) == 0:
                return

    async def forget(self, key: SessionKey) -> None:
        """Forget that something waited for a session, unless something does by now.

        A post gives the name another score behind its item: either the item is seen here, or the
        score is another one than was seen, or the post adds the name again.
        """
        known, order = self._names.posted, self._names.places(key).order
        score, count = await self._link.send(
            [Call(b"ZSCORE", known, written_key(key)), Call(b"ZCARD", order)]
        )
        if score is not None and not count:
            await self._link.send([_UNLIST((known,), written_key(key), b"%.0f" % score)])


def _require(key: SessionKey, epoch: int, reply: Any) -> None:
    if reply[0] == b"lost":
        raise lost(key, epoch, reply[1], deleted=bool(reply[2]))


def _sealed(item: Posted, seed: int) -> bytes:
    data = msgspec.msgpack.encode(item)
    return zlib.crc32(data, seed).to_bytes(_CRC, "big") + data


def _opened(key: SessionKey, seed: int, op_id: bytes, data: bytes) -> Posted:
    body = data[_CRC:]
    if zlib.crc32(body, seed).to_bytes(_CRC, "big") != data[:_CRC]:
        raise _damaged(key, "it does not fit its checksum")
    try:
        item = _items.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _damaged(key, "it cannot be read") from None
    if item.op_id.encode() != op_id:
        raise _damaged(key, "it stands under another id")
    return item


def _damaged(key: SessionKey, why: str) -> CorruptRecordError:
    return damaged(key, "an item in the inbox", why)


_POST = script("post")
_TAKE = script("take")
_SETTLE = script("settle")
_UNLIST = script("unlist")
