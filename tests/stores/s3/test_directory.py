"""The directory on a bucket: names beside the sessions, made anew from them."""

from __future__ import annotations

from typing import Any

import msgspec
import obstore
import pytest

from perdure.cli.check import rebuilt_directory
from perdure.records.keys import SessionKey
from perdure.store import SessionInfo, SessionQuery, Store
from perdure.stores import CompressedStore
from perdure.testing.conformance._kit import take
from tests.stores.s3.conftest import OpenS3


async def listed(store: Store, tenant: str) -> list[SessionInfo]:
    """What is listed of a tenant, but for the last activity: it is the age of the name."""
    infos = await store.sessions(SessionQuery(tenant=tenant))
    return [msgspec.structs.replace(info, updated_at=None) for info in infos]


@pytest.mark.anyio
async def test_the_listing_is_made_anew_from_the_sessions(open_store: OpenS3, raw: Any) -> None:
    store = await open_store()
    tenants = ["", "t" * 150]
    keys = [SessionKey(f"agent {n}", tenant=tenant) for n in range(3) for tenant in tenants]
    for key in keys:
        await take(store, key)
    grant = await take(store, SessionKey("gone"))
    await store.delete(grant.key, grant.epoch)
    before = [await listed(store, tenant) for tenant in tenants]
    assert [len(found) for found in before] == [3, 3]
    for found in obstore.list(raw):
        for name in [one["path"] for one in found]:
            if "/dir/" in f"/{name}" or "/tenants/" in f"/{name}":
                obstore.delete(raw, name)
    assert await store.sessions() == []
    assert await rebuilt_directory(CompressedStore(store)) == len(keys)
    assert [await listed(store, tenant) for tenant in tenants] == before
    assert await store.tenants() == sorted(tenants)
