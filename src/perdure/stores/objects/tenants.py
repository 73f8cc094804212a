"""List of tenants, and registration of sessions in the directory."""

from __future__ import annotations

import msgspec

from perdure.records.keys import SessionKey
from perdure.stores.objects import layout
from perdure.stores.objects.bucket import Bucket

_PREFIXES = ("dir/", "blobs/", "quarantine/")


class _Tenant(msgspec.Struct):
    name: str


def add_to_directory(bucket: Bucket, key: SessionKey, generation: int) -> None:
    """Add a generation of a session to the directory."""
    record_tenant(bucket, key.tenant)
    bucket.put(layout.directory_name(key, generation), layout.with_checksum(key))


def record_tenant(bucket: Bucket, tenant: str) -> None:
    """Store a tenant's name if the names of objects do not contain it."""
    name = layout.tenant_name(tenant)
    if layout.tenant_of(name) is None:
        bucket.put(f"tenants/{name}", layout.with_checksum(_Tenant(tenant)))


def tenants(bucket: Bucket) -> list[str]:
    """List the tenants that have sessions or blobs."""
    names = {name for folders in bucket.many(bucket.folders, _PREFIXES) for name in folders}
    found_tenants = bucket.many(lambda name: _tenant(bucket, name), names)
    return sorted(tenant for tenant in found_tenants if tenant is not None)


def _tenant(bucket: Bucket, name: str) -> str | None:
    tenant = layout.tenant_of(name)
    if tenant is not None:
        return tenant
    place = f"tenants/{name}"
    stored = bucket.get(place)
    return None if stored is None else layout.decode_object(place, stored.data, _Tenant).name
