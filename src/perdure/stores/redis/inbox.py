"""The inbox: what anybody leaves for a session, each item sealed, in the order of its posts."""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Sequence
from typing import Any, final

import msgspec

from perdure.records.json import decoder_of
from perdure.records.keys import SessionKey
from perdure.records.posts import UNREADABLE, decode_dead_letter, encode_dead_letter, oldest_first
from perdure.store import (
    DeadLetter,
    InboxLimit,
    PendingItem,
)
from perdure.stores.redis.connection import RedisCall, RedisLink, script
from perdure.stores.redis.layout import KeyNames, key_in, written_key
from perdure.stores.redis.leases import Leases
from perdure.stores.redis.log import lost

_CRC = 4
_PAGE = 1000
"""Inboxes that one write looks into."""
_items: msgspec.msgpack.Decoder[PendingItem] = msgspec.msgpack.Decoder(PendingItem)


@final
class RedisInbox:
    """The inboxes of all sessions."""

    def __init__(self, link: RedisLink, names: KeyNames, leases: Leases) -> None:
        self._link = link
        self._names = names
        self._leases = leases

    async def post(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        """Leave items for a session, and tell its holder."""
        places = self._names.places(key)
        parts = [part for item in items for part in (item.op_id, _sealed(item, places.seed))]
        keys = (places.session, places.items, places.order)
        bounds = (-1, -1) if limit is None else (limit.items, limit.bytes)
        tenant = RedisCall(b"ZADD", self._names.tenants, 0, key.tenant)
        # Before and behind, and each time with another score: see `forget`.
        now = time.time_ns() // 1000
        before, behind = (
            RedisCall(b"ZADD", self._names.posted, score, written_key(key))
            for score in (now, now + 1)
        )
        replies = await self._link.write([tenant, before, _POST(keys, *bounds, *parts), behind])
        new, holder, waiting, size, added = replies[2]
        if limit is not None and waiting >= 0:
            await self.forget(key)  # or else a session that never had room would be listed
            limit.require_room(
                key, waiting=int(waiting), size=int(size), new=int(new), added=int(added)
            )
        if holder and items:
            # Also for what was there already: whoever posts again may have been cut off here.
            await self._leases.tell_of_mail(key, holder.decode())
        return int(new)

    async def take(self, key: SessionKey, epoch: int, limit: int) -> list[PendingItem]:
        if limit <= 0:
            return []
        places = self._names.places(key)
        keys = (places.session, places.items, places.order)
        (reply,) = await self._link.send([_TAKE(keys, epoch, limit)])
        _require(key, epoch, reply)
        pairs = zip(reply[1::2], reply[2::2], strict=True)
        return [_opened(places.seed, name, data) for name, data in pairs]

    async def settle(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        places = self._names.places(key)
        keys = (places.session, places.items, places.order)
        (reply,) = await self._link.write([_SETTLE(keys, epoch, *map(_field, op_ids))])
        if reply == 0:
            await self.forget(key)
        elif isinstance(reply, list):
            _require(key, epoch, reply)

    async def reject(self, key: SessionKey, epoch: int, letters: Sequence[DeadLetter]) -> None:
        if not letters:
            return
        places = self._names.places(key)
        keys = (places.session, places.items, places.order, places.dead)
        parts = [
            part
            for one in letters
            for part in (_field(one.item.op_id), encode_dead_letter(key, one))
        ]
        now = time.time_ns() // 1000
        before, behind = (  # as for a post: a target of a migration has heard of none
            RedisCall(b"ZADD", self._names.posted, score, written_key(key))
            for score in (now, now + 1)
        )
        replies = await self._link.write([before, _REJECT(keys, epoch, *parts), behind])
        if isinstance(replies[1], list):
            await self.forget(key)
            _require(key, epoch, replies[1])

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        (reply,) = await self._link.send([RedisCall(b"HGETALL", self._names.places(key).dead)])
        found = (
            reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
        )
        return oldest_first([decode_dead_letter(key, _op_id(name), data) for name, data in found])

    async def drop_dead_letters(self, key: SessionKey, op_ids: Collection[str]) -> int:
        if not op_ids:
            return 0
        call = RedisCall(b"HDEL", self._names.places(key).dead, *map(_field, op_ids))
        (gone,) = await self._link.write([call])
        await self.forget(key)
        return int(gone)

    async def waiting(self, *, dead_letters: bool) -> list[SessionKey]:
        (known,) = await self._link.send([RedisCall(b"ZRANGE", self._names.posted, 0, -1)])
        keys = [decoder_of(SessionKey).decode(written) for written in known]
        found: list[SessionKey] = []
        for at in range(0, len(keys), _PAGE):
            page = keys[at : at + _PAGE]
            places = map(self._names.places, page)
            calls = [
                RedisCall(b"HLEN", one.dead) if dead_letters else RedisCall(b"ZCARD", one.order)
                for one in places
            ]
            counts = await self._link.send(calls)
            found += [key for key, count in zip(page, counts, strict=True) if count]
        return sorted(found)

    async def rebuild(self) -> None:
        """Make the set of inboxes anew, by walks over all keys."""
        await self._rebuild(self._names.every_inbox)
        await self._rebuild(self._names.every_dead)

    async def _rebuild(self, pattern: str) -> None:
        cursor: Any = b"0"
        while True:
            scan = RedisCall(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", 1000)
            ((cursor, found),) = await self._link.send([scan])
            written = [written_key(key_in(name)) for name in found]
            calls = [RedisCall(b"ZADD", self._names.posted, b"NX", 0, one) for one in written]
            if calls:
                await self._link.write(calls)
            if int(cursor) == 0:
                return

    async def forget(self, key: SessionKey) -> None:
        """Forget that something waited for a session, unless something does by now, or is dead.

        A post gives the name another score behind its item: either the item is seen here, or the
        score is another one than was seen, or the post adds the name again.
        """
        known, places = self._names.posted, self._names.places(key)
        score, count, dead = await self._link.send(
            [
                RedisCall(b"ZSCORE", known, written_key(key)),
                RedisCall(b"ZCARD", places.order),
                RedisCall(b"HLEN", places.dead),
            ]
        )
        if score is not None and not count and not dead:
            await self._link.send([_UNLIST((known,), written_key(key), b"%.0f" % score)])


def _require(key: SessionKey, epoch: int, reply: Any) -> None:
    if reply[0] == b"lost":
        raise lost(key, epoch, reply[1], deleted=bool(reply[2]))


def _sealed(item: PendingItem, seed: int) -> bytes:
    data = msgspec.msgpack.encode(item)
    return zlib.crc32(data, seed).to_bytes(_CRC, "big") + data


def _opened(seed: int, op_id: bytes, data: bytes) -> PendingItem:
    body = data[_CRC:]
    damage = "it does not fit its checksum"
    if zlib.crc32(body, seed).to_bytes(_CRC, "big") == data[:_CRC]:
        try:
            item = _items.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            damage = "it cannot be read"
        else:
            if item.op_id.encode() == op_id:
                return item
            damage = "it stands under another id"
    return PendingItem(_op_id(op_id), "", data, 0.0, f"an item on the server is damaged: {damage}")


def _op_id(field: bytes) -> str:
    try:
        return field.decode()
    except UnicodeDecodeError:
        return f"{UNREADABLE}{field.hex()}"


def _field(op_id: str) -> bytes:
    if op_id.startswith(UNREADABLE):
        try:
            return bytes.fromhex(op_id.removeprefix(UNREADABLE))
        except ValueError:
            pass  # somebody's own op id
    return op_id.encode()


_POST = script("post")
_REJECT = script("reject")
_TAKE = script("take")
_SETTLE = script("settle")
_UNLIST = script("unlist")
