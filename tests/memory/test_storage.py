"""Storages of working memory, of a session's and of a folder's (S2-10, S2-18, S2-24, S2-32)."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure import (
    ConfigError,
    NotStorableError,
    Shutdown,
    StoreUnavailableError,
    UnsupportedVersionError,
    connect,
)
from perdure.agent import (
    Agent,
    AgentConfig,
    EchoModel,
    Features,
    FileMemoryStorage,
    MemoryItem,
    MemoryStorage,
    PersistentSession,
    SessionMemoryStorage,
)
from perdure.formats import memory_files

pytestmark = pytest.mark.anyio

QUIET = Shutdown(signals=False)
LARGE = "x" * 5000
Opened = Callable[[], Any]


@pytest.fixture(params=["file", "session"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """Return a way to the same entries, each time as another process would go."""

    @asynccontextmanager
    async def file() -> AsyncIterator[MemoryStorage]:
        async with FileMemoryStorage(tmp_path / "own") as storage:
            yield storage

    @asynccontextmanager
    async def session() -> AsyncIterator[MemoryStorage]:
        sessions = connect(tmp_path / "data", autosave=None, shutdown=QUIET)
        async with sessions, sessions.open("a") as opened:
            storage = SessionMemoryStorage(opened)
            yield storage
            await storage.aclose()

    return file if request.param == "file" else session


# the port


async def test_entries_come_back_as_they_were_set(opened: Opened) -> None:
    """S2-10: two implementations, one behavior."""
    item = MemoryItem(
        key="city",
        value={"name": "Rome", "n": [1, None, 2.5]},
        description="where",
        scope="task",
        priority="high",
        pinned=True,
        created_at=1_700_000_000_000,
    )
    async with opened() as storage:
        assert await storage.get("city") is None
        assert not await storage.has("city")
        await storage.set(item)
        await storage.set(MemoryItem(key="large", value=LARGE))
        assert await storage.has("city")
    async with opened() as storage:
        got = await storage.get("city")
        assert got is not None
        assert (got.value, got.description, got.scope) == (item.value, "where", "task")
        assert (got.priority, got.pinned, got.created_at) == ("high", True, item.created_at)
        assert got.last_accessed_at >= got.created_at
        assert (await storage.get("large")).value == LARGE
        entries = await storage.entries()
        assert [(one.key, one.size_bytes) for one in entries] == [("city", 32), ("large", 5002)]
        assert [one.key for one in await storage.entries(scope="task")] == ["city"]
        assert await storage.size() == 5034


async def test_entries_are_forgotten_one_by_one_by_scope_and_all(opened: Opened) -> None:
    async with opened() as storage:
        for key, scope in (("a", "task"), ("b", "task"), ("c", "session"), ("d", "session")):
            await storage.set(MemoryItem(key=key, value=1, scope=scope))
        await storage.delete("d")
        await storage.delete("never there")
    async with opened() as storage:
        assert [one.key for one in await storage.entries()] == ["a", "b", "c"]
        await storage.clear(scope="task")
        assert [one.key for one in await storage.entries()] == ["c"]
    async with opened() as storage:
        assert [one.key for one in await storage.entries()] == ["c"]
        await storage.clear()
        assert await storage.size() == 0


async def test_what_cannot_be_kept_is_refused_and_changes_nothing(opened: Opened) -> None:
    async with opened() as storage:
        await storage.set(MemoryItem(key="k", value=1))
        with pytest.raises(NotStorableError):
            await storage.set(MemoryItem(key="k", value=object()))
        with pytest.raises(ConfigError, match="priority='urgent'"):
            await storage.set(MemoryItem(key="k", value=2, priority="urgent"))
        assert (await storage.get("k")).value == 1


async def test_what_flush_returned_for_is_there_for_others(opened: Opened, tmp_path: Path) -> None:
    async with opened() as storage:
        await storage.set(MemoryItem(key="k", value=LARGE))
        await storage.flush()
        if isinstance(storage, FileMemoryStorage):
            other = FileMemoryStorage(tmp_path / "own")
            assert (await other.get("k")).value == LARGE  # type: ignore[union-attr]
        else:
            async with connect(tmp_path / "data", shutdown=QUIET) as sessions:
                view = await sessions.load("a")
                assert await view.memory.get("k") == LARGE


# the folder


def entry(key: str, value: Any, **fields: Any) -> dict[str, Any]:
    return {
        "key": key,
        "description": "",
        "value": value,
        "scope": "persistent",
        "sizeBytes": len(json.dumps(value, separators=(",", ":"))),
        "basePriority": "normal",
        "pinned": False,
        "createdAt": 1706699400000,
        "lastAccessedAt": 1706699500000,
        **fields,
    }


def written(folder: Path, *entries: dict[str, Any], **fields: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    stats = {
        "totalEntries": len(entries),
        "totalSizeBytes": sum(one["sizeBytes"] for one in entries),
    }
    document = {"version": 1, "entries": list(entries), "stats": stats, **fields}
    (folder / "memory.json").write_text(json.dumps(document))
    return document


async def test_the_file_is_the_seeds_own_and_what_is_unknown_stays(tmp_path: Path) -> None:
    """S2-8, S2-18: every field by its very name; the stats are those of the entries."""
    before = written(
        tmp_path, entry("old", {"a": 1}, x_own=[1]), entry("other", "x" * 3000), x_more={"y": 2}
    )
    async with FileMemoryStorage(tmp_path) as storage:
        await storage.set(
            MemoryItem(key="new", value="v", created_at=5, last_accessed_at=6, scope="persistent")
        )
    after = json.loads((tmp_path / "memory.json").read_text())
    assert after["entries"][:2] == before["entries"]
    assert after["entries"][2] == entry("new", "v", createdAt=5, lastAccessedAt=6)
    assert after["x_more"] == {"y": 2}
    assert after["stats"] == {
        "totalEntries": 3,
        "totalSizeBytes": sum(one["sizeBytes"] for one in after["entries"]),
    }


async def test_the_file_is_read_at_the_first_touch_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2-24: concurrent first touches share one read; S2-26: in a thread."""
    written(tmp_path, entry("k", 1))
    reads: list[str] = []
    read = memory_files._read

    def counted(path: str, migrations: Any) -> Any:
        reads.append(path)
        return read(path, migrations)

    monkeypatch.setattr(memory_files, "_read", counted)
    async with FileMemoryStorage(tmp_path) as storage:
        assert reads == []
        seen: list[Any] = []

        async def touch() -> None:
            seen.append((await storage.get("k")).value)  # type: ignore[union-attr]

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(touch)
        assert seen == [1] * 5
    assert len(reads) == 1


async def test_what_was_only_read_is_not_written(tmp_path: Path) -> None:
    written(tmp_path, entry("k", 1))
    path = tmp_path / "memory.json"
    before = (path.stat().st_ino, path.read_bytes())
    async with FileMemoryStorage(tmp_path) as storage:
        await storage.get("k")
        await storage.delete("never there")
        await storage.flush()
    async with FileMemoryStorage(tmp_path):
        pass
    assert (path.stat().st_ino, path.read_bytes()) == before


async def test_a_flush_happens_at_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2-10: periodic flush; two changes within an interval are one write."""
    done, writes = anyio.Event(), []
    write = memory_files._write
    loop_thread_done = anyio.from_thread.run_sync

    def noted(path: str, data: bytes) -> None:
        write(path, data)
        writes.append(len(json.loads(data)["entries"]))
        loop_thread_done(done.set)

    interval, is_over, sleep = 1234.5, anyio.Event(), anyio.sleep

    async def elapse(seconds: float) -> None:
        await (is_over.wait() if seconds == interval else sleep(seconds))

    monkeypatch.setattr(memory_files, "_write", noted)
    monkeypatch.setattr(anyio, "sleep", elapse)
    async with FileMemoryStorage(tmp_path / "own", flush_interval=interval) as storage:
        await storage.set(MemoryItem(key="a", value=1))
        await storage.set(MemoryItem(key="b", value=1))
        is_over.set()
        await done.wait()
        assert writes == [2]
        assert len(json.loads((tmp_path / "own" / "memory.json").read_text())["entries"]) == 2
    assert writes == [2]


async def test_a_damaged_file_is_put_aside_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S2-21: warn and begin anew; the evidence stays."""
    (tmp_path / "memory.json").write_bytes(b'{"version":1,"entries":[{"key"')
    with caplog.at_level(logging.WARNING, "perdure"):
        async with FileMemoryStorage(tmp_path) as storage:
            assert storage.findings == ()
            assert await storage.get("k") is None
            assert [one.what for one in storage.findings] == ["quarantined"]
            await storage.set(MemoryItem(key="new", value=1))
    (copy,) = (tmp_path / "quarantine").iterdir()
    assert copy.read_bytes() == b'{"version":1,"entries":[{"key"'
    assert "damaged" in caplog.text


async def test_a_file_of_a_newer_release_is_refused_and_left(tmp_path: Path) -> None:
    """S2-19, S2-22."""
    written(tmp_path, version=99)
    before = (tmp_path / "memory.json").read_bytes()
    async with FileMemoryStorage(tmp_path) as storage:
        with pytest.raises(UnsupportedVersionError, match=r"memory\.json"):
            await storage.get("k")
        with pytest.raises(UnsupportedVersionError):
            await storage.set(MemoryItem(key="k", value=1))
    assert (tmp_path / "memory.json").read_bytes() == before


async def test_a_flush_that_failed_is_tried_again_with_all_of_it(tmp_path: Path) -> None:
    """S2-23: it raises, and what has changed is kept."""
    storage = FileMemoryStorage(tmp_path / "other")
    await storage.set(MemoryItem(key="k", value=1))
    (tmp_path / "other").write_text("in the way")
    with pytest.raises(StoreUnavailableError, match="cannot be reached"):
        await storage.flush()
    (tmp_path / "other").unlink()
    await storage.aclose()
    assert await FileMemoryStorage(tmp_path / "other").has("k")


async def test_what_the_form_has_no_place_for_is_named(tmp_path: Path) -> None:
    storage = FileMemoryStorage(tmp_path)
    value = {"at": [datetime.date(2026, 1, 2)]}
    with pytest.raises(NotStorableError, match="holds a date at /at/0.*plain JSON"):
        await storage.set(MemoryItem(key="k", value=value))
    with pytest.raises(ConfigError, match="flush_interval=-1"):
        FileMemoryStorage(tmp_path, flush_interval=-1)


# an agent's


async def test_an_agent_keeps_its_memory_where_it_is_told(tmp_path: Path) -> None:
    """S2-10, S2-12b: a storage of one's own, flushed with the agent's saves."""
    own = FileMemoryStorage(tmp_path / "own", flush_interval=0)
    kept = PersistentSession(storage=tmp_path / "data", memory=own)
    async with Agent.create("ada", model=EchoModel(), persistent_session=kept) as agent:
        assert agent.memory_storage is own
        await agent.memory_storage.set(MemoryItem(key="k", value=LARGE))
        await agent.save_persisted_session()
        assert await FileMemoryStorage(tmp_path / "own").has("k")
        await agent.memory_storage.set(MemoryItem(key="l", value=1))
        await agent.ask("hello")  # a turn's end saves, and flushes before
        assert await FileMemoryStorage(tmp_path / "own").has("l")
        await agent.memory_storage.set(MemoryItem(key="m", value=1))
    assert await FileMemoryStorage(tmp_path / "own").has("m")


async def test_an_agents_memory_is_its_sessions_unless_it_is_told(tmp_path: Path) -> None:
    """S2-10: the session-backed one is lazy, and saved with the session."""
    async with connect(tmp_path / "data", shutdown=QUIET) as sessions:
        async with Agent.create("ada", model=EchoModel(), sessions=sessions) as agent:
            await agent.memory_storage.set(MemoryItem(key="k", value=LARGE))
            assert await agent.working_memory.get("k") == LARGE
    async with connect(tmp_path / "data", shutdown=QUIET) as sessions:
        view = await sessions.load("ada")
        assert await view.memory.get("k") == LARGE


async def test_a_memory_that_is_given_twice_or_switched_off_is_refused(tmp_path: Path) -> None:
    one, two = FileMemoryStorage(tmp_path / "1"), FileMemoryStorage(tmp_path / "2")
    config = AgentConfig(name="ada", model=EchoModel(), memory_storage=one)
    kept = PersistentSession(storage="memory:", memory=two)
    with pytest.raises(ConfigError, match="given twice"):
        await Agent.create(config=config, persistent_session=kept)
    off = AgentConfig(name="ada", model=EchoModel(), features=Features(memory=False))
    async with Agent.create(config=off) as agent:
        with pytest.raises(ConfigError, match="no working memory"):
            _ = agent.memory_storage
