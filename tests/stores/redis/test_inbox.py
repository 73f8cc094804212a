"""The inbox on a server: what it remembers is what waits, and nothing that waits is forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from perdure.records.keys import SessionKey
from perdure.stores.redis.connection import RedisCall
from perdure.testing.conformance._kit import KEY, take
from perdure.testing.conformance.inbox import posted
from tests.servers.valkey import Valkey
from tests.stores.redis.conftest import OpenStore


async def test_a_session_whose_post_was_taken_is_not_looked_at_any_more(
    open_store: OpenStore, server: Valkey, url: str
) -> None:
    """A listing of what waits costs what waits, not what was ever posted to."""
    store = await open_store()
    prefix = url.partition("prefix=")[2]
    for key in (KEY, SessionKey("other")):
        await store.enqueue(key, posted("a", "b"))
    grant = await take(store)
    await store.ack(KEY, grant.epoch, ["a"])
    assert server.say("ZCARD", f"{prefix}:posted") == b":2"
    await store.ack(KEY, grant.epoch, ["b"])
    assert server.say("ZCARD", f"{prefix}:posted") == b":1"
    assert await store.sessions_with_pending_items() == [SessionKey("other")]


@pytest.mark.parametrize("between", [0, 1, 2])
async def test_a_post_beside_the_last_settling_is_not_lost_sight_of(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, between: int
) -> None:
    """Posted before, between or behind the steps by which its holder finds nothing waiting."""
    store, poster = await open_store("one"), await open_store("poster")
    grant = await take(store)
    await poster.enqueue(KEY, posted("a"))
    send, write, steps = store._link.send, store._link.write, [0]

    async def then_post(call: Any, calls: Sequence[RedisCall]) -> list[Any]:
        replies = await call(calls)
        if steps[0] == between:
            await poster.enqueue(KEY, posted("b"))
        steps[0] += 1
        return list(replies)

    monkeypatch.setattr(store._link, "write", lambda calls: then_post(write, calls))
    monkeypatch.setattr(store._link, "send", lambda calls: then_post(send, calls))
    await store.ack(KEY, grant.epoch, ["a"])
    assert steps[0] >= between + 1
    assert await poster.sessions_with_pending_items() == [KEY]
