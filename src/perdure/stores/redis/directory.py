"""Directory of the sessions: a sorted set per tenant, so that listings never scan all keys.

Each member is looked up before it is listed, so one too many is left out. A missing member is
added again when the session is next opened, or by `Directory.rebuild`, which scans all keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import msgspec

from perdure.records.json import decoder_of
from perdure.records.keys import SessionKey
from perdure.records.records import open_sealed
from perdure.store import SessionInfo
from perdure.stores.redis.blobs import Blobs
from perdure.stores.redis.connection import RedisCall, RedisLink, script
from perdure.stores.redis.documents import ListedFields
from perdure.stores.redis.layout import (
    KeyNames,
    key_of_member,
    key_of_name,
    member_of,
    members_between,
)
from perdure.stores.redis.log import ColdHistory, lease_lost

_PAGE = 256
_FIELDS = (b"e", b"d", b"h", b"c", b"u", b"a", b"m")


@final
class Directory:
    """Listings of sessions and tenants, and deletion."""

    def __init__(self, link: RedisLink, names: KeyNames, blobs: Blobs, cold: ColdHistory) -> None:
        self._link = link
        self._names = names
        self._blobs = blobs
        self._cold = cold

    async def sessions(
        self, tenant: str, prefix: str, after: SessionKey | None, limit: int, fits: ListFilter
    ) -> list[SessionInfo]:
        sessions: list[SessionInfo] = []
        low, high = members_between(prefix, after)
        while len(sessions) < limit:
            members, infos = await self._page(tenant, low, high)
            if not members:
                break
            sessions += [info for info in infos if fits.match(info)]
            low = b"(" + members[-1]
        return sessions[: max(limit, 0)]

    async def _page(
        self, tenant: str, low: bytes, high: bytes
    ) -> tuple[list[bytes], list[SessionInfo]]:
        """Return a page of members within the bounds, and those of their sessions that exist."""
        names = self._names.directory(tenant)
        page = RedisCall(b"ZRANGEBYLEX", names, low, high, b"LIMIT", 0, _PAGE)
        (members,) = await self._link.send([page])
        if not members:
            return [], []
        keys = [key_of_member(member, tenant) for member in members]
        calls = [
            RedisCall(b"HMGET", self._names.session_keys(key).session, *_FIELDS) for key in keys
        ]
        replies = zip(keys, await self._link.send(calls), strict=True)
        infos = (_info(key, fields) for key, fields in replies)
        return members, [info for info in infos if info is not None]

    async def tenants(self) -> list[str]:
        """List the tenants that have a session or a blob."""
        known = RedisCall(b"ZRANGE", self._names.tenants, 0, -1)
        tenants = [name.decode() for name in (await self._link.send([known]))[0]]
        nonempty = await self._blobs.any(tenants)
        for tenant in tenants:
            if tenant not in nonempty and await self.sessions(
                tenant, "", None, 1, ListFilter(None, None)
            ):
                nonempty.add(tenant)
        return sorted(nonempty)

    async def delete(self, key: SessionKey, epoch: int) -> None:
        session_keys = self._names.session_keys(key)
        keys = session_keys[:7]
        segments = await self._cold.names_of(key)
        (reply,) = await self._link.write([_DELETE(keys, epoch)])
        if reply != 0:
            raise lease_lost(key, epoch, reply[1], deleted=bool(reply[2]))
        await self._cold.remove(key, segments)
        names, place = self._names.directory(key.tenant), session_keys.session
        remove = RedisCall(b"ZREM", names, member_of(key))
        look = RedisCall(b"HMGET", place, b"d")
        _, (deleted,) = await self._link.write([remove, look])
        if deleted is None:  # another process has begun the session's next generation meanwhile
            await self._link.write([RedisCall(b"ZADD", names, 0, member_of(key))])

    async def rebuild(self) -> int:
        """Rebuild the directory from the sessions themselves, and return how many there are."""
        cursor: Any = b"0"
        count = 0
        while True:
            scan = RedisCall(b"SCAN", cursor, b"MATCH", self._names.every_session, b"COUNT", 1000)
            ((cursor, hashes),) = await self._link.send([scan])
            count += await self._add(hashes)
            if int(cursor) == 0:
                return count

    async def _add(self, hashes: Sequence[bytes]) -> int:
        calls = [RedisCall(b"HMGET", name, b"e", b"d") for name in hashes]
        replies = await self._link.send(calls) if calls else []
        keys = {
            key_of_name(name)
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
    """Filter of a listing."""

    owner: str | None
    tag: str | None

    def match(self, info: SessionInfo) -> bool:
        """Return whether a session matches."""
        return self.owner in {None, info.owner} and (self.tag is None or self.tag in info.tags)


def _info(key: SessionKey, fields: Sequence[Any]) -> SessionInfo | None:
    epoch, deleted, head, created, updated, shown, manifest = fields
    if epoch is None or deleted is not None:
        return None
    try:
        listed = decoder_of(ListedFields).decode(shown) if shown else ListedFields()
    except msgspec.DecodeError:  # only a cache of the manifest, which the next fold rewrites
        listed = ListedFields()
    return SessionInfo(
        key=key,
        epoch=_int_or_zero(epoch),
        head=_int_or_zero(head),
        created_at=_float_or_none(created),
        updated_at=_float_or_none(updated),
        owner=listed.owner,
        title=listed.title,
        tags=listed.tags,
        turns=listed.turns,
        damaged=manifest is not None and open_sealed(manifest) is None,
    )


def _int_or_zero(text: bytes | None) -> int:
    """Return a number; 0 for a damaged one, which is reported when the session is opened."""
    return int(text) if text is not None and text.isdigit() else 0


def _float_or_none(text: bytes | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


_DELETE = script("delete")
