"""Which tenants there are, and how a session enters the directory.

Blocking; each function is part of one hop into a thread.
"""

from __future__ import annotations

import msgspec

from perdure.model.keys import SessionKey
from perdure.stores.objects import heads, layout
from perdure.stores.objects.bucket import Bucket

__all__ = ["enter", "remember", "tenants"]

_PLACES = ("dir/", "blobs/", "quarantine/")


class _Tenant(msgspec.Struct):
    name: str


def enter(bucket: Bucket, key: SessionKey, life: int) -> None:
    """Make a session's life known to listings."""
    remember(bucket, key.tenant)
    bucket.put(layout.directory_name(key, life), heads.sealed(key))


def remember(bucket: Bucket, tenant: str) -> None:
    """Keep a tenant's name where names of objects do not hold it."""
    name = layout.tenant_name(tenant)
    if layout.tenant_of(name) is None:
        bucket.put(f"tenants/{name}", heads.sealed(_Tenant(tenant)))


def tenants(bucket: Bucket) -> list[str]:
    """List the tenants that have sessions or blobs."""
    names = {name for found in bucket.many(bucket.folders, _PLACES) for name in found}
    found = bucket.many(lambda name: _tenant(bucket, name), names)
    return sorted(tenant for tenant in found if tenant is not None)


def _tenant(bucket: Bucket, name: str) -> str | None:
    tenant = layout.tenant_of(name)
    if tenant is not None:
        return tenant
    place = f"tenants/{name}"
    found = bucket.get(place)
    return None if found is None else heads.opened(place, found.data, _Tenant).name
