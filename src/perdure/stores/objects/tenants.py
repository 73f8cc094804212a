"""Which tenants there are, and how a session enters the directory."""

from __future__ import annotations

import msgspec

from perdure.records.keys import SessionKey
from perdure.stores.objects import head, layout
from perdure.stores.objects.bucket import Bucket

_PLACES = ("dir/", "blobs/", "quarantine/")


class _Tenant(msgspec.Struct):
    name: str


def enter_directory(bucket: Bucket, key: SessionKey, life: int) -> None:
    """Make a session's life known to listings."""
    remember(bucket, key.tenant)
    bucket.put(layout.directory_name(key, life), head.sealed(key))


def remember(bucket: Bucket, tenant: str) -> None:
    """Keep a tenant's name where names of objects do not hold it."""
    name = layout.tenant_name(tenant)
    if layout.tenant_of(name) is None:
        bucket.put(f"tenants/{name}", head.sealed(_Tenant(tenant)))


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
    return None if found is None else head.opened(place, found.data, _Tenant).name
