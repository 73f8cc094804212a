"""Inboxes: items that any process posts to a session, each with a checksum, in posting order."""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Sequence
from typing import Any, final

import msgspec

from perdure.records.json import decoder_of
from perdure.records.keys import SessionKey
from perdure.records.manifest import lease_lost
from perdure.records.posts import UNREADABLE, decode_dead_letter, encode_dead_letter, oldest_first
from perdure.store import (
    DeadLetter,
    InboxLimit,
    PendingItem,
)
from perdure.stores.redis.connection import RedisCall, RedisLink, script
from perdure.stores.redis.layout import KeyNames, encode_key, key_of_name
from perdure.stores.redis.leases import Leases

_CRC = 4
_PAGE = 1000
"""Inboxes that one call inspects."""
_items: msgspec.msgpack.Decoder[PendingItem] = msgspec.msgpack.Decoder(PendingItem)


@final
class RedisInbox:
    """The inboxes of all sessions."""

    def __init__(self, link: RedisLink, names: KeyNames, leases: Leases) -> None:
        self._link = link
        self._names = names
        self._leases = leases

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        """Add items to a session's inbox, and notify its holder."""
        session_keys = self._names.session_keys(key)
        parts = [
            part for item in items for part in (item.op_id, _encode_item(item, session_keys.seed))
        ]
        keys = (session_keys.session, session_keys.items, session_keys.order)
        bounds = (-1, -1) if limit is None else (limit.items, limit.bytes)
        tenant = RedisCall(b"ZADD", self._names.tenants, 0, key.tenant)
        before, after = self._listing(key)
        replies = await self._link.write([tenant, before, _POST(keys, *bounds, *parts), after])
        new, holder, waiting, size, added = replies[2]
        if limit is not None and waiting >= 0:
            await self.forget(key)  # otherwise a session without room stays listed
            limit.require_room(
                key, waiting=int(waiting), size=int(size), new=int(new), added=int(added)
            )
        if holder and items:
            # Also for items that were already there: the first post may have been cut off here.
            await self._leases.notify_of_items(key, holder.decode())
        return int(new)

    def _listing(self, key: SessionKey) -> list[RedisCall]:
        """Return what goes before and after items, each with a score of its own: see `forget`."""
        now = time.time_ns() // 1000
        known, member = self._names.posted, encode_key(key)
        return [RedisCall(b"ZADD", known, score, member) for score in (now, now + 1)]

    async def receive(self, key: SessionKey, epoch: int, limit: int) -> list[PendingItem]:
        if limit <= 0:
            return []
        session_keys = self._names.session_keys(key)
        keys = (session_keys.session, session_keys.items, session_keys.order)
        (reply,) = await self._link.send([_TAKE(keys, epoch, limit)])
        _require_lease(key, epoch, reply)
        pairs = zip(reply[1::2], reply[2::2], strict=True)
        return [_decode_item(session_keys.seed, name, data) for name, data in pairs]

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str],
        dead: Sequence[DeadLetter],
    ) -> None:
        session_keys = self._names.session_keys(key)
        if epoch is None:
            if op_ids:
                call = RedisCall(b"HDEL", session_keys.dead, *map(_hash_field, op_ids))
                await self._link.write([call])
                await self.forget(key)
            return
        keys = (session_keys.session, session_keys.items, session_keys.order, session_keys.dead)
        parts = [part for op_id in op_ids for part in (_hash_field(op_id), b"")]
        for letter in dead:
            parts += _hash_field(letter.item.op_id), encode_dead_letter(key, letter)
        settle = _SETTLE(keys, epoch, *parts)
        if dead:  # the target of a migration may never have had a post
            before, after = self._listing(key)
            _, reply, _ = await self._link.write([before, settle, after])
        else:
            (reply,) = await self._link.write([settle])
        if reply == 0 or isinstance(reply, list):
            await self.forget(key)
        if isinstance(reply, list):
            _require_lease(key, epoch, reply)

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        (reply,) = await self._link.send(
            [RedisCall(b"HGETALL", self._names.session_keys(key).dead)]
        )
        letters = (
            reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
        )
        return oldest_first([decode_dead_letter(key, _op_id(name), data) for name, data in letters])

    async def sessions_with_pending_items(self, *, dead_letters: bool) -> list[SessionKey]:
        (known,) = await self._link.send([RedisCall(b"ZRANGE", self._names.posted, 0, -1)])
        keys = [decoder_of(SessionKey).decode(written) for written in known]
        waiting: list[SessionKey] = []
        for at in range(0, len(keys), _PAGE):
            page = keys[at : at + _PAGE]
            calls = [
                RedisCall(b"HLEN", names.dead) if dead_letters else RedisCall(b"ZCARD", names.order)
                for names in map(self._names.session_keys, page)
            ]
            counts = await self._link.send(calls)
            waiting += [key for key, count in zip(page, counts, strict=True) if count]
        return sorted(waiting)

    async def rebuild(self) -> None:
        """Rebuild the set of inboxes by scanning all keys."""
        await self._rebuild(self._names.every_inbox)
        await self._rebuild(self._names.every_dead)

    async def _rebuild(self, pattern: str) -> None:
        cursor: Any = b"0"
        while True:
            scan = RedisCall(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", 1000)
            ((cursor, names),) = await self._link.send([scan])
            written = [encode_key(key_of_name(name)) for name in names]
            calls = [
                RedisCall(b"ZADD", self._names.posted, b"NX", 0, encoded) for encoded in written
            ]
            if calls:
                await self._link.write(calls)
            if int(cursor) == 0:
                return

    async def forget(self, key: SessionKey) -> None:
        """Remove a session from the set of inboxes, unless it has pending items or dead letters.

        A post gives the member a new score after adding its item. So either the item is counted
        here, or the score has changed since it was read, or the post adds the member again.
        """
        known, session_keys = self._names.posted, self._names.session_keys(key)
        score, count, dead = await self._link.send(
            [
                RedisCall(b"ZSCORE", known, encode_key(key)),
                RedisCall(b"ZCARD", session_keys.order),
                RedisCall(b"HLEN", session_keys.dead),
            ]
        )
        if score is not None and not count and not dead:
            await self._link.send([_UNLIST((known,), encode_key(key), b"%.0f" % score)])


def _require_lease(key: SessionKey, epoch: int, reply: Any) -> None:
    if reply[0] == b"lost":
        raise lease_lost(key, epoch, reply[1], deleted=bool(reply[2]))


def _encode_item(item: PendingItem, seed: int) -> bytes:
    data = msgspec.msgpack.encode(item)
    return zlib.crc32(data, seed).to_bytes(_CRC, "big") + data


def _decode_item(seed: int, op_id: bytes, data: bytes) -> PendingItem:
    body = data[_CRC:]
    damage = "it does not match its checksum"
    if zlib.crc32(body, seed).to_bytes(_CRC, "big") == data[:_CRC]:
        try:
            item = _items.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            damage = "it cannot be read"
        else:
            if item.op_id.encode() == op_id:
                return item
            damage = "it is stored under another id"
    return PendingItem(_op_id(op_id), "", data, 0.0, f"an item on the server is damaged: {damage}")


def _op_id(field: bytes) -> str:
    try:
        return field.decode()
    except UnicodeDecodeError:
        return f"{UNREADABLE}{field.hex()}"


def _hash_field(op_id: str) -> bytes:
    if op_id.startswith(UNREADABLE):
        try:
            return bytes.fromhex(op_id.removeprefix(UNREADABLE))
        except ValueError:
            pass  # an op id that a caller chose
    return op_id.encode()


_POST = script("post")
_TAKE = script("take")
_SETTLE = script("settle")
_UNLIST = script("unlist")
