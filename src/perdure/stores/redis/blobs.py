"""Blobs: one key each, on 17 shelves a tenant that know their ages and what is out of the way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import final

from perdure.records.blob_names import require_named, verified
from perdure.store import BlobSweep
from perdure.stores.redis.connection import RedisCall, RedisLink, Script, script
from perdure.stores.redis.layout import KeyNames

_DIGITS = "0123456789abcdefx"
"""What names begin with: a digit of a hash, or the mark of a wrapper's own."""
_AT_ONCE = 256
"""Blobs that one write looks after."""
_MUCH = 4 * 1024 * 1024
"""Bytes of blobs that one write takes."""
_MOVED, _REMOVED = 1, 2


@final
class Blobs:
    """The blobs of all tenants."""

    def __init__(self, link: RedisLink, names: KeyNames) -> None:
        self._link = link
        self._names = names

    async def put(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        """Keep blobs; bytes that are already there grow young again."""
        require_named(blobs)
        calls: list[RedisCall] = []
        size = 0
        for name, data in blobs.items():
            calls.append(self._call(_PUT, tenant, name, data))
            size += len(data)
            if size > _MUCH:
                await self._link.write(calls)
                calls, size = [], 0
        if blobs:
            await self._link.write([*calls, RedisCall(b"ZADD", self._names.tenants, 0, tenant)])

    async def get(self, tenant: str, name: str) -> bytes | None:
        (data,) = await self._link.send([RedisCall(b"GET", self._names.blob(tenant, name))])
        return None if data is None else verified(name, bytes(data))

    async def names(self, tenant: str) -> list[str]:
        """List a tenant's blobs."""
        away, here = await self._shelves(tenant)
        return sorted(away | here)

    async def sweep(self, tenant: str, reachable: Collection[str], older_than: float) -> BlobSweep:
        """Move away what nobody reaches, and remove what was moved long ago.

        Each blob is judged again, by the server's own clock, in the step that acts.
        """
        away, here = await self._shelves(tenant)
        kept = frozenset(reachable)
        back = [
            RedisCall(b"ZREM", self._names.shelf(tenant, name[:1])[1], name) for name in away & kept
        ]
        for part in _parts(back):
            await self._link.write(part)
        calls = [
            self._call(_SWEEP, tenant, name, b"%.6f" % older_than)
            for name in sorted((away | here) - kept)
        ]
        quarantined = removed = freed = 0
        for part in _parts(calls):
            for what, size in await self._link.write(part):
                quarantined += what == _MOVED
                removed += what == _REMOVED
                freed += size
        return BlobSweep(quarantined, removed, freed)

    async def remove(self, tenant: str, names: Collection[str]) -> int:
        """Remove blobs at once, and return how many bytes were freed."""
        freed = 0
        for part in _parts([self._call(_REMOVE, tenant, name) for name in dict.fromkeys(names)]):
            freed += sum(await self._link.write(part))
        return freed

    async def any(self, tenants: Collection[str]) -> set[str]:
        """Return which of these tenants have blobs."""
        asked = [(tenant, digit) for tenant in tenants for digit in _DIGITS]
        calls = [RedisCall(b"EXISTS", self._names.shelf(*one)[0]) for one in asked]
        there: list[int] = []
        for part in _parts(calls):
            there += await self._link.send(part)
        return {tenant for (tenant, _), found in zip(asked, there, strict=True) if found}

    async def _shelves(self, tenant: str) -> tuple[set[str], set[str]]:
        calls = [_AGED(self._names.shelf(tenant, digit)) for digit in _DIGITS]
        away: set[str] = set()
        here: set[str] = set()
        for moved, others in await self._link.send(calls):
            away.update(map(bytes.decode, moved))
            here.update(map(bytes.decode, others))
        return away, here

    def _call(self, act: Script, tenant: str, name: str, *arguments: bytes) -> RedisCall:
        keys = (self._names.blob(tenant, name), *self._names.shelf(tenant, name[:1]))
        return act(keys, name, *arguments)


def _parts(calls: list[RedisCall]) -> Iterable[list[RedisCall]]:
    return (calls[at : at + _AT_ONCE] for at in range(0, len(calls), _AT_ONCE))


_AGED = script("aged")
_PUT = script("put")
_REMOVE = script("remove")
_SWEEP = script("sweep")
