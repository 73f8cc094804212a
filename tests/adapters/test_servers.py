"""Every adapter on PostgreSQL, Redis and S3: connections cut while idle, two workers, a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import perdure
from tests.adapters.acts import ADAPTERS

Open = Callable[[], Any]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The SDKs run on asyncio."""
    return "asyncio"


def postgres(place: Path) -> tuple[Open, Open]:
    from tests.servers.postgres import schema_of, shared

    server = shared()
    query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
    url = f"{server.url}?schema={schema_of(place)}"
    return lambda: url, lambda: server.run(f"{query} AND backend_type = 'client backend'")


def redis(place: Path) -> tuple[Open, Open]:
    from tests.servers.valkey import shared

    return lambda: shared().url, lambda: shared().ask("CLIENT", "KILL", "TYPE", "normal")


def s3(place: Path) -> tuple[Open, Open]:
    from tests.servers.s3 import shared, store_on

    return lambda: store_on(shared(), place), lambda: None  # each request may have a new one


@pytest.mark.deep
@pytest.mark.parametrize("store", [postgres, redis, s3], ids=lambda store: store.__name__)
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
async def test_a_session_survives_cut_connections_other_workers_and_a_restart(
    tmp_path: Path, store: Any, adapter: Any
) -> None:
    place, cut = store(tmp_path)
    name = tmp_path.name
    async with perdure.connect(place()) as mine, perdure.connect(place()) as theirs:
        acts = adapter(mine, name)
        for text in ("one", "two"):
            await acts.write(text)
        await anyio.to_thread.run_sync(cut)
        for text in ("three", "four"):
            await acts.write(text)
        await anyio.to_thread.run_sync(cut)
        assert await acts.read() == ["one", "two", "three", "four"]
        assert await adapter(theirs, name).read() == ["one", "two", "three", "four"]
    async with perdure.connect(place()) as again:
        acts = adapter(again, name)
        await acts.write("five")
        assert await acts.read() == ["one", "two", "three", "four", "five"]
