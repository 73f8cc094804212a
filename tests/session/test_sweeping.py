"""A retention that a manager is connected with: applied in the background, for every tenant."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest

import perdure
from perdure import ConfigError, Message, Retention, Shutdown
from perdure.observe import Metrics
from perdure.session.connected import FIRST_SWEEP, SWEEP_EVERY
from perdure.session.manager import SessionManager
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing import FaultyStore
from perdure.types import PruneReport
from tests import _virtual

QUIET = Shutdown(signals=False, spill=False)
AT_ONCE = Retention(expire_days=1e-12)


@pytest.fixture(params=_virtual.BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return _virtual.virtual(request.param)


async def converse(sessions: SessionManager, id: str, *texts: str, tenant: str = "") -> None:
    async with sessions.open(id, tenant=tenant) as session:
        for text in texts:
            async with session.turn():
                session.append(Message.user(text))
        await session.aclose()


async def stored(backing: MemoryBacking, *tenants: str) -> list[str]:
    async with perdure.connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        found = [info for tenant in tenants or ("",) for info in await sessions.list(tenant=tenant)]
        return [info.key.agent for info in found]


async def test_what_was_not_used_for_long_goes_by_itself_and_what_is_open_stays() -> None:
    backing, reports = MemoryBacking(), list[PruneReport]()
    store = MemoryStore(backing=backing)
    async with perdure.connect(store, shutdown=QUIET, retention=AT_ONCE) as sessions:
        sessions.on("pruned", reports.append)
        metrics = Metrics(sessions)
        await converse(sessions, "old", "Hello")
        await converse(sessions, "theirs", "Hello", tenant="acme")
        async with sessions.open("used") as used, used.turn():
            used.append(Message.user("Hello"))
        async with sessions.open("used"):
            await anyio.sleep(2 * FIRST_SWEEP + 1)
            assert [str(key) for report in reports for key in report.expired] == [
                "old",
                "acme:theirs",
            ]
            assert await stored(backing, "", "acme") == ["used"]
            await converse(sessions, "late", "Hello")
            await anyio.sleep(2 * SWEEP_EVERY + 1)
            assert await stored(backing) == ["used"]
        assert 'perdure_retention_sessions_total{outcome="expired"} 3' in metrics.render()


async def test_a_scope_stays() -> None:
    backing, reports = MemoryBacking(), list[PruneReport]()
    async with perdure.connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        await sessions.scope("user:ada").set("tide", "low")
        await converse(sessions, "old", "Hello")
    store = MemoryStore(backing=backing)
    async with perdure.connect(store, shutdown=QUIET, retention=AT_ONCE) as sessions:
        sessions.on("pruned", reports.append)
        await anyio.sleep(2 * FIRST_SWEEP + 1)
        assert [str(key) for report in reports for key in report.expired] == ["old"]
        assert await sessions.scope("user:ada").get("tide") == "low"


async def test_history_is_cut_by_itself() -> None:
    backing, reports = MemoryBacking(), list[PruneReport]()
    retention = Retention(keep_turns=1)
    async with perdure.connect(
        MemoryStore(backing=backing), shutdown=QUIET, retention=retention
    ) as sessions:
        sessions.on("pruned", reports.append)
        await converse(sessions, "ada", "one", "two", "three")
        await anyio.sleep(2 * FIRST_SWEEP + 1)
        assert [cut.turns for report in reports for cut in report.pruned] == [2]
        view = await sessions.load("ada")
        assert view is not None
        assert [message.text for message in view.context()] == ["one", "two", "three"]


async def test_a_store_that_is_down_is_logged_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backing, reports = MemoryBacking(), list[PruneReport]()
    store = FaultyStore(MemoryStore(backing=backing), fail_on="tenants", times=1)
    async with perdure.connect(store, shutdown=QUIET, retention=AT_ONCE) as sessions:
        sessions.on("pruned", reports.append)
        await converse(sessions, "old", "Hello")
        await anyio.sleep(2 * FIRST_SWEEP + 1)
        assert reports == []
        (line,) = [one for one in caplog.records if "retention failed" in one.getMessage()]
        assert line.levelno == logging.WARNING
        await anyio.sleep(2 * SWEEP_EVERY + 1)
        assert [str(key) for report in reports for key in report.expired] == ["old"]


async def test_a_call_tells_the_same_event_and_a_dry_run_none() -> None:
    reports = list[PruneReport]()
    async with perdure.connect("memory:", shutdown=QUIET) as sessions:
        sessions.on("pruned", reports.append)
        await converse(sessions, "old", "Hello")
        await sessions.prune(AT_ONCE, dry_run=True)
        assert reports == []
        report = await sessions.prune(AT_ONCE)
        assert reports == [report]
        assert [str(key) for key in report.expired] == ["old"]


def test_what_would_remove_everything_or_cannot_remove_is_refused() -> None:
    with pytest.raises(ConfigError, match="would forget every session"):
        perdure.connect("memory:", retention=Retention(expire_days=0))
    with pytest.raises(ConfigError, match="read_only"):
        perdure.connect("memory:", retention=AT_ONCE, read_only=True)
    with pytest.raises(ConfigError, match="give Retention"):
        perdure.connect("memory:", retention=90)  # type: ignore[arg-type]
