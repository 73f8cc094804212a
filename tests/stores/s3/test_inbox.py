"""The inbox on a bucket: many of them at once, and posts that were cut off on their way."""

from __future__ import annotations

import anyio
import pytest

from perdure.errors import StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.stores.objects import inbox
from perdure.testing.conformance._kit import KEY, take
from perdure.testing.conformance.inbox import posted
from tests.stores.s3.conftest import OpenS3
from tests.stores.s3.gateway import Gateway

pytestmark = pytest.mark.anyio


async def test_more_inboxes_than_requests_at_a_time_are_listed(open_store: OpenS3) -> None:
    """Each of them has more than one object to look into."""
    store = await open_store()
    keys = [SessionKey(f"agent {n:02}") for n in range(17)]
    for key in keys:
        for op_id in ("a", "b"):
            await store.enqueue(key, posted(op_id))
    with anyio.fail_after(15):
        assert await store.sessions_with_pending_items() == keys


async def test_a_post_that_was_made_and_not_told_is_told_when_it_is_tried_again(
    open_store: OpenS3, gateway: Gateway
) -> None:
    store = await open_store("one")
    await take(store)
    poster = await open_store("poster", endpoint=gateway.endpoint)
    gateway.fault = lambda m, path: (503, "SlowDown") if m == "PUT" and "/asks/" in path else None
    with pytest.raises(StoreUnavailableError):
        await poster.enqueue(KEY, posted("a"))
    gateway.fault = lambda method, path: None
    assert (await store.heartbeat()).mail == ()
    assert await poster.enqueue(KEY, posted("a")) == 0
    assert (await store.heartbeat()).mail == (KEY,)


async def test_a_few_items_are_taken_from_many_without_reading_all(
    open_store: OpenS3, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "_WINDOW", 2)
    store = await open_store("one", endpoint=gateway.endpoint)
    poster = await open_store("poster")
    grant = await take(store)
    op_ids = [f"op {n}" for n in range(5)]
    for op_id in op_ids:
        await poster.enqueue(KEY, posted(op_id))
    found = await store.receive(KEY, grant.epoch, limit=1)
    assert [item.op_id for item in found] == op_ids[:1]
    assert looks(gateway) == 2
    await store.ack(KEY, grant.epoch, op_ids[:1])
    assert looks(gateway) == 4
    rest = await store.receive(KEY, grant.epoch)
    assert [item.op_id for item in rest] == op_ids[1:]
    await store.ack(KEY, grant.epoch, op_ids)
    assert await store.sessions_with_pending_items() == []
    assert await store.enqueue(KEY, posted("op 0")) == 1


def looks(gateway: Gateway) -> int:
    """Return how many posts were read."""
    return sum(method == "GET" and "/inbox/" in path for method, path in gateway.seen)
