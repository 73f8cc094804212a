"""What ``health()`` tells of a manager beyond saving."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import anyio
import pytest

from perdure import LeaseOptions, Message, Shutdown, connect
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests import _virtual


class Mute(MemoryStore):
    """Its heartbeats fail while it is mute; everything else works."""

    mute = False

    async def heartbeat(self) -> Any:
        if self.mute:
            raise OSError("no way to the lease table")
        return await super().heartbeat()


async def beats_that_fail() -> None:
    store = Mute(backing=MemoryBacking())
    async with connect(store, shutdown=Shutdown(signals=False)) as sessions:
        session = await sessions.open("a")
        session.append(Message.user("hello"))
        await session.save()
        await anyio.sleep(30)
        assert (sessions.health().status, sessions.health().reasons) == ("ok", ())
        store.mute = True
        await anyio.sleep(30)
        health = sessions.health()
        assert health.status == "degraded"
        assert "other processes may take over" in health.reasons[0]
        store.mute = False
        await anyio.sleep(5)
        assert (sessions.health().status, sessions.health().reasons) == ("ok", ())


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
def test_heartbeats_that_fail_are_told(backend: str) -> None:
    _virtual.run(backend, partial(beats_that_fail))


def test_a_heartbeat_whose_call_a_driver_has_cancelled_goes_on() -> None:
    class Odd(MemoryStore):
        beats = 0

        async def heartbeat(self) -> Any:
            self.beats += 1
            if self.beats == 2:
                future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                future.cancel()
                await future
            return await super().heartbeat()

    async def main() -> None:
        store = Odd()
        lease = LeaseOptions(heartbeat=0.01, ttl=30)
        async with connect(store, lease=lease, shutdown=Shutdown(signals=False)) as sessions:
            async with asyncio.timeout(60):
                while store.beats < 4:
                    await asyncio.sleep(0.01)
            assert sessions.health().status == "ok"

    asyncio.run(main())
