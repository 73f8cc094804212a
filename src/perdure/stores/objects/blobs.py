"""Blobs named by their content, and a quarantine for unreachable ones.

A sweep moves a blob by copying it first, and removes only objects in quarantine: bytes that are put
again meanwhile stay. Ages are by the server's clock only.

Functions block; each is part of one call in a thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from perdure._lib.ids import random_id
from perdure.records.chunks import is_name, require_named, verified
from perdure.store import BlobSweep
from perdure.stores.objects import tenants
from perdure.stores.objects.bucket import Bucket, ListedObject
from perdure.stores.objects.layout import tenant_name


def _prefix(tenant: str) -> str:
    return f"blobs/{tenant_name(tenant)}/"


def _quarantine(tenant: str) -> str:
    return f"quarantine/{tenant_name(tenant)}/"


def put(bucket: Bucket, tenant: str, blobs: Mapping[str, bytes]) -> None:
    """Store blobs; an existing blob gets the age of a new one."""
    prefix = _prefix(tenant)
    require_named(blobs)
    if blobs:
        tenants.record_tenant(bucket, tenant)
    bucket.many(lambda blob: bucket.put(prefix + blob[0], blob[1]), blobs.items())


def get(bucket: Bucket, tenant: str, name: str) -> bytes | None:
    """Return a blob, verified; None when there is none."""
    if not is_name(name):
        return None
    stored = bucket.get(_prefix(tenant) + name) or bucket.get(_quarantine(tenant) + name)
    # A sweep may have moved it back between the two reads.
    stored = stored or bucket.get(_prefix(tenant) + name)
    return None if stored is None else verified(name, stored.data)


def names(bucket: Bucket, tenant: str) -> list[str]:
    """List the blobs that can be read."""
    return sorted(
        _listed(bucket, _prefix(tenant)).keys() | _listed(bucket, _quarantine(tenant)).keys()
    )


def _listed(bucket: Bucket, prefix: str) -> dict[str, ListedObject]:
    return {entry.name.removeprefix(prefix): entry for entry in bucket.listed(prefix)}


def remove(bucket: Bucket, tenant: str, requested: Collection[str]) -> int:
    """Remove blobs without quarantine; return how many bytes were freed."""
    known = [name for name in requested if is_name(name)]
    places = [prefix + name for name in known for prefix in (_prefix(tenant), _quarantine(tenant))]
    existing = [entry for entry in bucket.many(bucket.stat, places) if entry is not None]
    bucket.remove([entry.name for entry in existing])
    return sum(entry.size for entry in existing)


def sweep(bucket: Bucket, tenant: str, reachable: Collection[str], older_than: float) -> BlobSweep:
    """Move unreachable blobs to quarantine, and remove those that are there long enough."""
    prefix, quarantine = _prefix(tenant), _quarantine(tenant)
    now = _server_time(bucket)
    quarantined = _listed(bucket, quarantine)
    current = _listed(bucket, prefix)
    returning = [name for name in quarantined if name in reachable and name not in current]
    bucket.many(lambda name: bucket.copy(quarantine + name, prefix + name), returning)
    known = [name for name in quarantined if name in reachable or name in current]
    old = [
        name
        for name, entry in quarantined.items()
        if name not in reachable and name not in current and now - entry.modified >= older_than
    ]
    bucket.remove([quarantine + name for name in (*known, *old)])
    idle = [
        name
        for name, entry in current.items()
        if name not in reachable and now - entry.modified >= older_than
    ]
    bucket.many(lambda name: bucket.copy(prefix + name, quarantine + name), idle)
    bucket.remove([prefix + name for name in idle])
    return BlobSweep(len(idle), len(old), sum(quarantined[name].size for name in old))


def _server_time(bucket: Bucket) -> float:
    """Return the time of the clock that the ages of objects refer to."""
    name = f"probe/{random_id()}"
    bucket.put(name, b"now")
    probe = bucket.stat(name)
    bucket.remove([name])
    return 0.0 if probe is None else probe.modified
