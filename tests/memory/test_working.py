"""The working memory of a session: lazy, never overwritten unread, bounded (S2-10, S2-24)."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure import Autosave, Limits, SessionError, SessionKey, Shutdown, connect, store_for
from perdure.errors import ConfigError, CorruptRecordError, StoreUnavailableError, TooLargeError
from perdure.events import MemoryEvicted
from perdure.memory.index import MEMORY, blob_names
from perdure.memory.working_memory import CACHE_BYTES, SessionValues
from perdure.session.internals import kill
from perdure.session.manager import SessionManager
from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore

pytestmark = pytest.mark.anyio

LARGE = "x" * 5000


class Watched:
    """A store that says what was read of it, and can be made to wait, or to fail."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.blobs: list[str] = []
        self.documents: list[str] = []
        self.gate: anyio.Event | None = None
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        self.blobs.append(name)
        if self.gate is not None:
            await self.gate.wait()
        if self.broken:
            raise StoreUnavailableError("the store is down", path="here")
        return await self._store.get_blob(tenant, name)

    async def read_documents(self, key: Any, names: Any = None) -> Any:
        self.documents += sorted(names or ())
        return await self._store.read_documents(key, names)


Place = Callable[[], Watched]


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Return a way to the same data, each time as another process would go."""
    backing = MemoryBacking()

    def make() -> Watched:
        if request.param == "memory":
            return Watched(MemoryStore(backing=backing))
        return Watched(store_for(tmp_path / "data"))

    return make


def manager(store: Watched, **options: Any) -> SessionManager:
    options.setdefault("shutdown", Shutdown(signals=False))
    given: Any = store
    return connect(given, **options)


async def filled(place: Place, **values: object) -> None:
    async with manager(place()) as sessions, sessions.open("a") as session:
        for key, value in values.items():
            session.memory.set(key, value, description=f"about {key}")


async def test_values_are_read_one_by_one_at_their_first_touch(place: Place) -> None:
    """S2-24: opening reads nothing of the memory, listing no value, a touch one."""
    await filled(place, one=LARGE, two=LARGE + "2", small=1)
    store = place()
    async with manager(store) as sessions, sessions.open("a") as session:
        assert MEMORY not in store.documents
        entries = await session.memory.entries()
        assert [(one.key, one.size_bytes, one.is_loaded) for one in entries] == [
            ("one", 5002, False),
            ("two", 5003, False),
            ("small", 1, True),
        ]
        assert await session.memory.get("small") == 1
        assert store.blobs == []
        assert await session.memory.get("two") == LARGE + "2"
        assert await session.memory.get("two") == LARGE + "2"
        assert store.blobs == [entries[1].sha256]
        assert store.documents.count(MEMORY) == 1


async def test_concurrent_first_touches_of_a_value_share_one_read(place: Place) -> None:
    """S2-24."""
    await filled(place, k=LARGE, other=LARGE + "!")
    store = place()
    seen: list[str] = []
    async with manager(store) as sessions, sessions.open("a") as session:

        async def touch(key: str) -> None:
            seen.append(await session.memory.get(key))

        store.gate = anyio.Event()
        async with anyio.create_task_group() as group:
            for key in ("k", "other", "k", "k"):
                group.start_soon(touch, key)
            await anyio.wait_all_tasks_blocked()
            store.gate.set()
    assert sorted(seen) == [LARGE, LARGE, LARGE, LARGE + "!"]
    assert len(store.blobs) == 2


async def test_a_cancelled_first_touch_leaves_the_read_to_the_next(place: Place) -> None:
    await filled(place, k=LARGE)
    store = place()
    async with manager(store) as sessions, sessions.open("a") as session:
        await session.memory.keys()
        store.gate = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(session.memory.get, "k")
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        store.gate = None
        assert await session.memory.get("k") == LARGE


async def test_a_failed_touch_changes_nothing_and_may_be_tried_again(place: Place) -> None:
    await filled(place, k=LARGE)
    store = place()
    async with manager(store) as sessions, sessions.open("a") as session:
        store.broken = True
        with pytest.raises(StoreUnavailableError):
            await session.memory.get("k")
        session.memory.set("more", 1)
        await session.save()
        store.broken = False
        assert await session.memory.get("k") == LARGE
    async with manager(place()) as sessions:
        view = await sessions.load("a")
        assert await view.memory.keys() == ["k", "more"]
        assert await view.memory.get("k") == LARGE


async def test_a_fold_carries_values_over_that_nobody_has_read(place: Place) -> None:
    await filled(place, **{f"k{number}": LARGE + str(number) for number in range(5)})
    for turn in range(3):
        store = place()
        async with manager(store) as sessions, sessions.open("a") as session:
            session.memory.set("k0", LARGE + f"turn {turn}")
            session.memory.drop(f"k{turn + 1}")
        assert store.blobs == []
    async with manager(place()) as sessions:
        view = await sessions.load("a")
        values = {key: await view.memory.get(key) for key in await view.memory.keys()}
    assert values == {"k0": LARGE + "turn 2", "k4": LARGE + "4"}


async def test_a_large_value_that_save_returned_for_survives_a_kill(place: Place) -> None:
    """No fold has come: the value is in the log, and in no blob yet."""
    sessions = await manager(place(), autosave=None)
    session = await sessions.open("a")
    session.memory.set("k", LARGE)
    await session.save()
    await kill(sessions)
    async with manager(place()) as others, others.open("a", on_held="steal") as session:
        assert await session.memory.get("k") == LARGE


FOLDED = """
import os, signal, sys
import anyio
from perdure import Limits, Shutdown, connect
from perdure._lib.files import Folder

left = int(sys.argv[2])
replace, publish = Folder.replace, Folder.publish

def counted(act):
    def act_or_die(self, name, *args, **options):
        global left
        if len(name) == 64 or name.startswith(("memory", "manifest")):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return act(self, name, *args, **options)
    return act_or_die

async def main():
    sessions = connect(sys.argv[1], shutdown=Shutdown(signals=False), autosave=None)
    async with sessions, sessions.open("a") as session:
        for number in range(4):
            session.memory.set(f"k{number}", "x" * 5000 + str(number))
        session.memory.set("small", 1)
        await session.save()
        Folder.replace, Folder.publish = counted(replace), counted(publish)

anyio.run(main)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.parametrize("steps", range(6))
async def test_a_kill_within_a_fold_loses_no_value(tmp_path: Path, steps: int) -> None:
    """Killed before the first blob, between two, before the documents, before the manifest."""
    command = [sys.executable, "-c", FOLDED, str(tmp_path / "data"), str(steps)]
    ended = await anyio.run_process(command, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    for _ in range(2):  # the second time after a fold
        store = Watched(store_for(tmp_path / "data"))
        async with manager(store) as sessions, sessions.open("a") as session:
            memory = session.memory
            values = {key: await memory.get(key) for key in await memory.keys()}
            memory.set("small", 1)
        assert values == {**{f"k{n}": LARGE + str(n) for n in range(4)}, "small": 1}
    await store.open()
    found = (await store.read_documents(session.key)).found
    names = blob_names({name: document.data for name, document in found.items()})
    assert names <= set(await store.blob_names(""))
    assert len(names) == 4
    await store.aclose()


async def test_a_lost_or_damaged_blob_is_read_from_the_log(tmp_path: Path) -> None:
    def place() -> Watched:
        return Watched(store_for(tmp_path / "data"))

    await filled(place, one=LARGE, two=LARGE + "2")
    one, two = sorted(path for path in (tmp_path / "data" / "blobs").rglob("*") if path.is_file())
    one.unlink()
    two.write_bytes(b"damaged")
    async with manager(place()) as sessions, sessions.open("a") as session:
        assert await session.memory.get("one") == LARGE
        assert await session.memory.get("two") == LARGE + "2"
        entry = (await session.memory.entries())[0]
        assert entry.is_loaded
    values = SessionValues(MemoryStore(), session.key)
    async with manager(place()) as sessions, sessions.open("a") as session:
        lost = (await session.memory._index.get()).entries["one"]
        with pytest.raises(CorruptRecordError, match=r"memory key 'one' is lost.*put the blob"):
            await values.of(lost)


async def test_what_was_read_stays_at_hand_within_bounds() -> None:
    values = SessionValues(MemoryStore(), SessionKey("a"))
    size = CACHE_BYTES // 4
    for number in range(6):
        values.cache(f"{number:064}", b"x" * size)
    kept = [number for number in range(6) if f"{number:064}" in values._cache]
    assert kept == [2, 3, 4, 5]
    values.cache("large", b"x" * (CACHE_BYTES * 2))
    assert list(values._cache) == ["large"]


async def test_after_a_fold_values_are_read_again_from_their_blobs(tmp_path: Path) -> None:
    """A memory that was filled does not stay in the process for ever."""
    store = Watched(store_for(tmp_path / "data"))
    limits = Limits(fold_records=1)
    async with manager(store, limits=limits, autosave=Autosave.write_through()) as sessions:
        folded = anyio.Event()
        sessions.on("folded", lambda _: folded.set())
        session = await sessions.open("a")
        await session.memory.keys()
        session.memory.set("k", "y" * (CACHE_BYTES + 1))
        session.memory.set("l", "z" * (CACHE_BYTES + 1))
        await session.save()
        await folded.wait()
        assert [entry.is_loaded for entry in await session.memory.entries()] in (
            [False, True],
            [True, True],  # the fold has seen the first only
            [False, False],
        )
        assert await session.memory.get("k") == "y" * (CACHE_BYTES + 1)
        assert await session.memory.get("l") == "z" * (CACHE_BYTES + 1)


async def test_reading_never_makes_a_session_dirty_and_is_noted_with_the_next_change(
    place: Place,
) -> None:
    await filled(place, k=LARGE, s=1)

    async def accessed(sessions: SessionManager) -> dict[str, int]:
        view = await sessions.load("a")
        return {entry.key: entry.last_accessed_at for entry in await view.memory.entries()}

    async with manager(place()) as sessions:
        before = await accessed(sessions)
        async with sessions.open("a") as session:
            version = session.version
            await anyio.sleep(0.002)  # the times are milliseconds
            await session.memory.get("k")
            await session.memory.search("k", values=True)
            assert (session.version, session.unsaved_age) == (version, 0)
            session.memory.set("new", 1)
            await session.save()
            after = await accessed(sessions)
    assert after["k"] > before["k"]
    assert after["s"] == before["s"]
    async with manager(place()) as sessions:
        assert await accessed(sessions) == after


async def test_the_blobs_that_a_session_refers_to_are_told(tmp_path: Path) -> None:
    """What a sweep has to leave: the blobs of memory.json, and of the log behind it."""
    store = Watched(store_for(tmp_path / "data"))
    async with manager(store) as sessions:
        async with sessions.open("a") as session:
            session.memory.set("k", LARGE)
            session.memory.set("gone", LARGE + "gone")
            session.memory.drop("gone")
        await session.aclose()
        found = (await store.read_documents(session.key)).found
        names = blob_names({name: document.data for name, document in found.items()})
        assert names == set(await store.blob_names(""))
        assert len(names) == 1


# room


async def test_what_does_not_fit_evicts_and_an_event_says_what_went(place: Place) -> None:
    events: list[MemoryEvicted] = []
    limits = Limits(memory_bytes=16_000)
    async with manager(place(), limits=limits) as sessions:
        sessions.on("memory_evicted", events.append)
        async with sessions.open("a") as session:
            session.memory.set("pinned", LARGE, pinned=True, priority="low")
            session.memory.set("old", LARGE)
            session.memory.set("high", LARGE, priority="high")
            await session.save()
            session.memory.set("new", LARGE)
            assert await session.memory.keys() == ["pinned", "high", "new"]
            assert events == [MemoryEvicted(key=SessionKey("a"), entries=("old",), bytes=5002)]
    # With a limit the index is known from the first `set` on.
    async with manager(place(), limits=limits) as sessions, sessions.open("a") as session:
        session.memory.set("newer", LARGE)
        assert await session.memory.keys() == ["pinned", "high", "newer"]
    async with manager(place()) as sessions:
        view = await sessions.load("a")
        assert await view.memory.keys() == ["pinned", "high", "newer"]


async def test_a_value_larger_than_the_limit_is_refused_and_nothing_changes(place: Place) -> None:
    async with manager(place(), limits=Limits(memory_bytes=6000)) as sessions:
        async with sessions.open("a") as session:
            session.memory.set("k", LARGE)
            version = session.version
            with pytest.raises(TooLargeError, match="'big' has 6002 bytes"):
                session.memory.set("big", "x" * 6000)
            with pytest.raises(ConfigError, match="priority='urgent'"):
                session.memory.set("k", 1, priority="urgent")
            assert session.version == version
            assert await session.memory.get("k") == LARGE


async def test_an_eviction_and_what_it_made_room_for_are_one_group(place: Place) -> None:
    async with manager(place(), limits=Limits(memory_bytes=6000), autosave=None) as sessions:
        async with sessions.open("a") as session:
            session.memory.set("old", LARGE)
            await session.save()
            session.memory.set("new", LARGE)
            assert [(one.kind, one.end) for one in session.unsaved()] == [
                ("memory_drop", False),
                ("memory_set", True),
            ]


async def test_the_least_recently_used_is_so_over_a_restart(place: Place) -> None:
    limits = Limits(memory_bytes=16_000)
    async with manager(place(), limits=limits) as sessions, sessions.open("a") as session:
        for key in ("first", "second", "third"):
            session.memory.set(key, LARGE)
            await anyio.sleep(0.002)
        await session.memory.get("first")
        session.memory.set("note", 1)
    async with manager(place(), limits=limits) as sessions, sessions.open("a") as session:
        session.memory.set("fourth", LARGE)
        assert await session.memory.keys() == ["first", "third", "note", "fourth"]


# search


async def test_a_search_goes_by_key_and_description_and_reads_no_value(place: Place) -> None:
    await filled(place, city="Rome", capital=LARGE + " city", other=1)
    store = place()
    async with manager(store) as sessions, sessions.open("a") as session:
        session.memory.set("home_city", "Oslo", scope="task")
        search = session.memory.search
        assert [one.key for one in await search("City")] == ["city", "home_city"]
        assert [one.key for one in await search("city", scope="task")] == ["home_city"]
        assert [one.key for one in await search("city", limit=1)] == ["city"]
        assert [one.key for one in await search("about")] != []
        assert await search("nowhere") == []
        assert await search("") == []
        assert store.blobs == []
        found = await search("city", values=True)
        assert [one.key for one in found] == ["city", "home_city", "capital"]
        assert len(store.blobs) == 1
        assert not found[-1].is_loaded  # a search keeps nothing of what it reads


async def test_a_view_reads_and_does_not_write(place: Place) -> None:
    await filled(place, k=LARGE)
    async with manager(place()) as sessions:
        view = await sessions.load("a")
        assert await view.memory.get("k") == LARGE
        with pytest.raises(SessionError, match="read-only"):
            view.memory.set("k", 1)
        with pytest.raises(SessionError, match="read-only"):
            view.memory.drop("k")


def test_the_limit_is_checked_at_the_door() -> None:
    with pytest.raises(ConfigError, match="invalid memory_bytes=0"):
        Limits(memory_bytes=0)
