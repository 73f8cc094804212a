"""Blobs on the server: one key each, and 17 shelves per tenant that index them.

A shelf has two sorted sets: the age of each blob, and the blobs in quarantine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import final

from perdure.records.chunks import require_named, verified
from perdure.store import BlobSweep
from perdure.stores.redis.connection import RedisCall, RedisLink, Script, script
from perdure.stores.redis.layout import KeyNames

_DIGITS = "0123456789abcdefx"
"""First characters of names: the digits of a hash, or the mark of a wrapper's names."""
_MAX_CALLS = 256
"""Calls in one write."""
_MAX_BYTES = 4 * 1024 * 1024
"""Bytes of blobs in one write, at most one blob more."""
_MOVED, _REMOVED = 1, 2


@final
class Blobs:
    """The blobs of all tenants."""

    def __init__(self, link: RedisLink, names: KeyNames) -> None:
        self._link = link
        self._names = names

    async def put(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        """Store blobs; an existing blob gets the age of a new one."""
        require_named(blobs)
        calls: list[RedisCall] = []
        size = 0
        for name, data in blobs.items():
            calls.append(self._call(_PUT, tenant, name, data))
            size += len(data)
            if size > _MAX_BYTES:
                await self._link.write(calls)
                calls, size = [], 0
        if blobs:
            await self._link.write([*calls, RedisCall(b"ZADD", self._names.tenants, 0, tenant)])

    async def get(self, tenant: str, name: str) -> bytes | None:
        (data,) = await self._link.send([RedisCall(b"GET", self._names.blob(tenant, name))])
        return None if data is None else verified(name, bytes(data))

    async def names(self, tenant: str) -> list[str]:
        """List a tenant's blobs."""
        away, current = await self._shelves(tenant)
        return sorted(away | current)

    async def sweep(self, tenant: str, reachable: Collection[str], older_than: float) -> BlobSweep:
        """Move unreachable blobs to quarantine, and remove those that are there long enough.

        The script checks each blob again, by the server's clock.
        """
        away, current = await self._shelves(tenant)
        reachable_names = frozenset(reachable)
        returning = [
            RedisCall(b"ZREM", self._names.shelf(tenant, name[:1])[1], name)
            for name in away & reachable_names
        ]
        for part in _parts(returning):
            await self._link.write(part)
        calls = [
            self._call(_SWEEP, tenant, name, b"%.6f" % older_than)
            for name in sorted((away | current) - reachable_names)
        ]
        quarantined = removed = freed = 0
        for part in _parts(calls):
            for what, size in await self._link.write(part):
                quarantined += what == _MOVED
                removed += what == _REMOVED
                freed += size
        return BlobSweep(quarantined, removed, freed)

    async def remove(self, tenant: str, names: Collection[str]) -> int:
        """Remove blobs without quarantine, and return how many bytes were freed."""
        freed = 0
        for part in _parts([self._call(_REMOVE, tenant, name) for name in dict.fromkeys(names)]):
            freed += sum(await self._link.write(part))
        return freed

    async def any(self, tenants: Collection[str]) -> set[str]:
        """Return which of these tenants have blobs."""
        shelves = [(tenant, digit) for tenant in tenants for digit in _DIGITS]
        calls = [RedisCall(b"EXISTS", self._names.shelf(*shelf)[0]) for shelf in shelves]
        counts: list[int] = []
        for part in _parts(calls):
            counts += await self._link.send(part)
        return {tenant for (tenant, _), count in zip(shelves, counts, strict=True) if count}

    async def _shelves(self, tenant: str) -> tuple[set[str], set[str]]:
        calls = [_AGED(self._names.shelf(tenant, digit)) for digit in _DIGITS]
        away: set[str] = set()
        current: set[str] = set()
        for moved, others in await self._link.send(calls):
            away.update(map(bytes.decode, moved))
            current.update(map(bytes.decode, others))
        return away, current

    def _call(self, act: Script, tenant: str, name: str, *arguments: bytes) -> RedisCall:
        keys = (self._names.blob(tenant, name), *self._names.shelf(tenant, name[:1]))
        return act(keys, name, *arguments)


def _parts(calls: list[RedisCall]) -> Iterable[list[RedisCall]]:
    return (calls[at : at + _MAX_CALLS] for at in range(0, len(calls), _MAX_CALLS))


_AGED = script("aged")
_PUT = script("put")
_REMOVE = script("remove")
_SWEEP = script("sweep")
