"""Blobs: bytes under the name of their content, and a quarantine for what nobody reaches.

A sweep moves by copying first, and what it removes at last lies in the quarantine only: bytes
that are put again meanwhile stay where they were put. Ages are by the server's clock alone.

Blocking; each function is part of one hop into a thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from perdure._lib.ids import random_id
from perdure.records.blob_names import is_name, require_named, verified
from perdure.store import BlobSweep
from perdure.stores.objects import tenants
from perdure.stores.objects.bucket import Bucket, ListedObject
from perdure.stores.objects.layout import tenant_name


def _here(tenant: str) -> str:
    return f"blobs/{tenant_name(tenant)}/"


def _quarantine(tenant: str) -> str:
    return f"quarantine/{tenant_name(tenant)}/"


def put(bucket: Bucket, tenant: str, blobs: Mapping[str, bytes]) -> None:
    """Make blobs durable; what is there already grows young."""
    here = _here(tenant)
    require_named(blobs)
    if blobs:
        tenants.remember(bucket, tenant)
    bucket.many(lambda blob: bucket.put(here + blob[0], blob[1]), blobs.items())


def get(bucket: Bucket, tenant: str, name: str) -> bytes | None:
    """Return a blob, verified; None when there is none."""
    if not is_name(name):
        return None
    found = bucket.get(_here(tenant) + name) or bucket.get(_quarantine(tenant) + name)
    # A sweep may have brought it back between the two looks.
    found = found or bucket.get(_here(tenant) + name)
    return None if found is None else verified(name, found.data)


def names(bucket: Bucket, tenant: str) -> list[str]:
    """List the blobs that can be read."""
    return sorted(
        _listed(bucket, _here(tenant)).keys() | _listed(bucket, _quarantine(tenant)).keys()
    )


def _listed(bucket: Bucket, prefix: str) -> dict[str, ListedObject]:
    return {one.name.removeprefix(prefix): one for one in bucket.listed(prefix)}


def remove(bucket: Bucket, tenant: str, wanted: Collection[str]) -> int:
    """Remove blobs at once; return how many bytes were freed."""
    known = [name for name in wanted if is_name(name)]
    places = [prefix + name for name in known for prefix in (_here(tenant), _quarantine(tenant))]
    there = [one for one in bucket.many(bucket.stat, places) if one is not None]
    bucket.remove([one.name for one in there])
    return sum(one.size for one in there)


def sweep(bucket: Bucket, tenant: str, reachable: Collection[str], older_than: float) -> BlobSweep:
    """Move away what nobody reaches, and remove what was moved long ago."""
    here, quarantine = _here(tenant), _quarantine(tenant)
    now = _server_time(bucket)
    away = _listed(bucket, quarantine)
    there = _listed(bucket, here)
    back = [name for name in away if name in reachable and name not in there]
    bucket.many(lambda name: bucket.copy(quarantine + name, here + name), back)
    known = [name for name in away if name in reachable or name in there]
    old = [
        name
        for name, one in away.items()
        if name not in reachable and name not in there and now - one.modified >= older_than
    ]
    bucket.remove([quarantine + name for name in (*known, *old)])
    idle = [
        name
        for name, one in there.items()
        if name not in reachable and now - one.modified >= older_than
    ]
    bucket.many(lambda name: bucket.copy(here + name, quarantine + name), idle)
    bucket.remove([here + name for name in idle])
    return BlobSweep(len(idle), len(old), sum(away[name].size for name in old))


def _server_time(bucket: Bucket) -> float:
    """Return the time by the clock that the ages of objects are of."""
    name = f"probe/{random_id()}"
    bucket.put(name, b"now")
    there = bucket.stat(name)
    bucket.remove([name])
    return 0.0 if there is None else there.modified
