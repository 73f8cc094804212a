"""The live page measures what its manager does, only while somebody asks."""

from __future__ import annotations

import time
from typing import Any

import anyio
import httpx
import pytest

import perdure
from perdure import Message, Shutdown
from perdure.inspector import live
from perdure.stores.memory import MemoryStore
from perdure.testing import FaultyStore
from tests.inspector.conftest import client, connected


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "APART", 0.01)


async def ask(http: httpx.AsyncClient, **params: Any) -> Any:
    return (await http.get("/live", params={**params, "format": "json"})).json()


async def test_saves_and_what_is_unsaved_are_measured() -> None:
    async with connected(autosave=None) as sessions, client(sessions) as http:
        await ask(http)
        async with sessions.open("ada") as ada:
            for number in range(3):
                ada.append(Message.user(str(number)))
                await ada.save()
            ada.append(Message.user("unsaved"))
            await anyio.sleep(0.02)
            page = await ask(http)
        newest = page["samples"][-1]
        assert newest["saves"] > 0
        assert newest["records"] >= newest["saves"]
        assert newest["unsaved_bytes"] > 0
        assert newest["unsaved_age"] > 0
        assert newest["sessions"] == 1
        assert newest["slowest"] > 0
        assert page["status"] == "ok"


async def test_samples_are_shared_and_asked_for_by_time() -> None:
    async with connected() as sessions, client(sessions) as http:
        first = await ask(http)
        await anyio.sleep(0.02)
        second = await ask(http)
        assert second["samples"][: len(first["samples"])] == first["samples"]
        after = second["samples"][-1]["at"]
        await anyio.sleep(0.02)
        assert all(sample["at"] > after for sample in (await ask(http, after=after))["samples"])


async def test_a_blocked_loop_shows_as_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "NAP", 0.05)
    async with connected() as sessions, client(sessions) as http:
        await ask(http)
        await anyio.sleep(0.02)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(block)
            page = await ask(http)
        assert page["samples"][-1]["loop_lag"] > 0.05


async def block() -> None:
    await anyio.sleep(0.01)
    time.sleep(0.2)


async def test_failures_are_listed_as_events() -> None:
    store = FaultyStore(MemoryStore(), fail_on="append_many", nth=2)
    manager = perdure.connect(store, shutdown=Shutdown(signals=False))
    async with manager as sessions, client(sessions) as http:
        await ask(http)
        async with sessions.open("ada") as ada:
            ada.append(Message.user("one"))
            await ada.save()
            ada.append(Message.user("two"))
            await ada.save()
        names = [event["name"] for event in (await ask(http))["events"]]
        assert "save_failed" in names


async def test_the_page_says_which_charts_there_are() -> None:
    async with connected() as sessions, client(sessions) as http:
        page = (await http.get("/live")).text
        for name in ("saves", "unsaved_bytes", "unsaved_age", "loop_lag", "sessions"):
            assert f'data-series="{name}"' in page
        assert (await http.get("/static/vendor/uPlot.iife.min.js")).status_code == 200
        assert "MIT" in (await http.get("/static/vendor/uPlot.LICENSE")).text
