"""The Redis store, as users would make and use it."""

from __future__ import annotations

from typing import assert_type

import perdure
from perdure.stores import RedisStore

store = RedisStore("redis://localhost:6379/0?prefix=app", owner="worker-1")
assert_type(store.location, str)
assert_type(store.capabilities.durability, str)
sessions: perdure.SessionManager = perdure.connect(store)


async def mend() -> None:
    """Make a listing anew that lacks sessions."""
    assert_type(await store.rebuild_directory(), int)
