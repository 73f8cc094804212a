"""The directory: a sorted set of each tenant's sessions, never a walk over all keys.

What it names is looked up before it is shown, so a name too many is left out. A name too few
comes back when the session is next opened, or with `Directory.rebuild`, the one walk there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import msgspec

from perdure.records.frames import open_sealed
from perdure.records.json import decoder_of
from perdure.records.keys import SessionKey
from perdure.store import SessionInfo
from perdure.stores.redis.blobs import Blobs
from perdure.stores.redis.connection import RedisCall, RedisLink, script
from perdure.stores.redis.documents import ListedFields
from perdure.stores.redis.layout import KeyNames, key_in, key_of, member_of, members_between
from perdure.stores.redis.log import ColdHistory, lost

_PAGE = 256
_FIELDS = (b"e", b"d", b"h", b"c", b"u", b"a", b"m")


@final
class Directory:
    """What sessions there are."""

    def __init__(self, link: RedisLink, names: KeyNames, blobs: Blobs, cold: ColdHistory) -> None:
        self._link = link
        self._names = names
        self._blobs = blobs
        self._cold = cold

    async def sessions(
        self, tenant: str, prefix: str, after: SessionKey | None, limit: int, fits: ListFilter
    ) -> list[SessionInfo]:
        found: list[SessionInfo] = []
        low, high = members_between(prefix, after)
        while len(found) < limit:
            members, infos = await self._page(tenant, low, high)
            if not members:
                break
            found += [info for info in infos if fits.match(info)]
            low = b"(" + members[-1]
        return found[: max(limit, 0)]

    async def _page(
        self, tenant: str, low: bytes, high: bytes
    ) -> tuple[list[bytes], list[SessionInfo]]:
        """Return some names from within these bounds, and the sessions that there are of them."""
        names = self._names.directory(tenant)
        page = RedisCall(b"ZRANGEBYLEX", names, low, high, b"LIMIT", 0, _PAGE)
        (members,) = await self._link.send([page])
        if not members:
            return [], []
        keys = [key_of(member, tenant) for member in members]
        calls = [RedisCall(b"HMGET", self._names.places(key).session, *_FIELDS) for key in keys]
        replies = zip(keys, await self._link.send(calls), strict=True)
        infos = (_info(key, fields) for key, fields in replies)
        return members, [info for info in infos if info is not None]

    async def tenants(self) -> list[str]:
        """List the tenants that have a session or a blob."""
        known = RedisCall(b"ZRANGE", self._names.tenants, 0, -1)
        tenants = [name.decode() for name in (await self._link.send([known]))[0]]
        found = await self._blobs.any(tenants)
        for tenant in tenants:
            if tenant not in found and await self.sessions(
                tenant, "", None, 1, ListFilter(None, None)
            ):
                found.add(tenant)
        return sorted(found)

    async def delete(self, key: SessionKey, epoch: int) -> None:
        places = self._names.places(key)
        keys = places[:7]
        segments = await self._cold.names_of(key)
        (reply,) = await self._link.write([_DELETE(keys, epoch)])
        if reply != 0:
            raise lost(key, epoch, reply[1], deleted=bool(reply[2]))
        await self._cold.remove(key, segments)
        names, place = self._names.directory(key.tenant), places.session
        remove = RedisCall(b"ZREM", names, member_of(key))
        look = RedisCall(b"HMGET", place, b"d")
        _, (deleted,) = await self._link.write([remove, look])
        if deleted is None:  # somebody has begun its next life before it was taken out
            await self._link.write([RedisCall(b"ZADD", names, 0, member_of(key))])

    async def rebuild(self) -> int:
        """Make the directory anew from the sessions themselves, and return how many there are."""
        cursor: Any = b"0"
        count = 0
        while True:
            scan = RedisCall(b"SCAN", cursor, b"MATCH", self._names.every_session, b"COUNT", 1000)
            ((cursor, found),) = await self._link.send([scan])
            count += await self._enter(found)
            if int(cursor) == 0:
                return count

    async def _enter(self, hashes: Sequence[bytes]) -> int:
        calls = [RedisCall(b"HMGET", name, b"e", b"d") for name in hashes]
        replies = await self._link.send(calls) if calls else []
        keys = {
            key_in(name)
            for name, (epoch, deleted) in zip(hashes, replies, strict=True)
            if epoch is not None and deleted is None
        }
        entries = [
            RedisCall(b"ZADD", self._names.directory(key.tenant), 0, member_of(key)) for key in keys
        ]
        tenants = [RedisCall(b"ZADD", self._names.tenants, 0, key.tenant) for key in keys]
        if keys:
            await self._link.write([*entries, *tenants])
        return len(keys)


class ListFilter(msgspec.Struct, frozen=True):
    """Which sessions to list."""

    owner: str | None
    tag: str | None

    def match(self, info: SessionInfo) -> bool:
        """Say whether a session is one of them."""
        return self.owner in {None, info.owner} and (self.tag is None or self.tag in info.tags)


def _info(key: SessionKey, fields: Sequence[Any]) -> SessionInfo | None:
    epoch, deleted, head, created, updated, shown, manifest = fields
    if epoch is None or deleted is not None:
        return None
    try:
        said = decoder_of(ListedFields).decode(shown) if shown else ListedFields()
    except msgspec.DecodeError:  # a cache of the manifest, which the next fold writes again
        said = ListedFields()
    return SessionInfo(
        key=key,
        epoch=_number(epoch),
        head=_number(head),
        created_at=_time(created),
        updated_at=_time(updated),
        owner=said.owner,
        title=said.title,
        tags=said.tags,
        turns=said.turns,
        damaged=manifest is not None and open_sealed(manifest) is None,
    )


def _number(text: bytes | None) -> int:
    """Return a number; 0 for one that is damaged, of which whoever opens the session is told."""
    return int(text) if text is not None and text.isdigit() else 0


def _time(text: bytes | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


_DELETE = script("delete")
