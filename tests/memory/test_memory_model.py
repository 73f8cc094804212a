"""The working memory against a dict, over folds, restarts and crashes (S2-24).

Nothing that was not loaded is overwritten or lost, whatever happens in between; evictions are
those that the model foresees; and the stored index is always a fresh fold of the log.
"""

from __future__ import annotations

import contextlib
from itertools import count
from typing import Any

import anyio
import pytest
from hypothesis import given, settings, strategies as st

from perdure import Limits, Shutdown, connect
from perdure.errors import TooLargeError
from perdure.memory import working_memory
from perdure.memory.index import MEMORY, blob_names, split_memory
from perdure.session.internals import fold_soon, kill
from perdure.session.manager import SessionManager
from perdure.session.session import Session
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests._virtual import run as virtually

LIMIT = 5500
PRIORITIES = ["low", "normal", "high", "critical"]

keys = st.sampled_from("abcde")
sets = st.tuples(
    st.just("set"),
    keys,
    st.sampled_from([5, 1500, 1600, 2500, 2600]),
    st.sampled_from(PRIORITIES),
    st.sampled_from([False, False, False, False, True]),
)
touches = st.tuples(st.just("touch"), keys)
drops = st.tuples(st.just("drop"), keys)
others = st.tuples(st.sampled_from(["save", "fold", "reopen", "crash", "search", "all"]))
steps = st.lists(
    st.one_of(sets, sets, sets, touches, touches, drops, others), min_size=25, max_size=60
)


class Model:
    """What ought to be there: values, and what an eviction goes by."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.values: dict[str, str] = {}
        self.facts: dict[str, tuple[int, bool, int]] = {}
        """Priority, whether it is pinned, and when it was used last."""

    def set(self, key: str, value: str, priority: str, pinned: bool, at: int) -> bool:
        if not self._make_room(key, len(value) + 2):
            return False
        self.values[key] = value
        self.facts[key] = (PRIORITIES.index(priority), pinned, at)
        return True

    def _make_room(self, key: str, size: int) -> bool:
        if self.limit is None:
            return True
        others = {name: len(value) + 2 for name, value in self.values.items() if name != key}
        going = sorted(
            (name for name in others if not self.facts[name][1]),
            key=lambda name: (self.facts[name][0], self.facts[name][2]),
        )
        gone = []
        while sum(others.values()) + size > self.limit:
            if not going:
                return False
            gone.append(going.pop(0))
            del others[gone[-1]]
        for name in gone:
            self.drop(name)
        return True

    def drop(self, key: str) -> None:
        self.values.pop(key, None)
        self.facts.pop(key, None)

    def touch(self, key: str, at: int) -> None:
        if key in self.facts:
            self.facts[key] = (*self.facts[key][:2], at)


class Story:
    """One run: a session and its model, side by side."""

    def __init__(self, limit: int | None, ticks: Any) -> None:
        self.backing = MemoryBacking()
        self.limits = Limits(memory_bytes=limit)
        self.model, self.saved = Model(limit), Model(limit)
        self.ticks = ticks
        self.sessions: SessionManager
        self.session: Session

    async def open(self) -> None:
        self.sessions = await connect(
            MemoryStore(backing=self.backing),
            autosave=None,
            limits=self.limits,
            shutdown=Shutdown(signals=False),
        )
        self.session = await self.sessions.open("a", on_held="steal")

    async def step(self, number: int, step: Any) -> None:
        name, *rest = step
        memory = self.session.memory
        if name == "set":
            key, size, priority, pinned = rest
            value = f"{number} " + "x" * size
            done = True
            try:
                memory.set(key, value, priority=priority, pinned=pinned)
            except TooLargeError:
                done = False
            assert done == self.model.set(key, value, priority, pinned, self.ticks.last)
        elif name == "drop":
            memory.drop(rest[0])
            self.model.drop(rest[0])
        elif name == "touch":
            assert await memory.get(rest[0], None) == self.model.values.get(rest[0])
            self.model.touch(rest[0], self.ticks.last)
        else:
            await getattr(self, f"_{name}")()

    async def _save(self) -> None:
        await self.session.save()
        self._note()

    def _note(self) -> None:
        self.saved = Model(self.model.limit)
        self.saved.values, self.saved.facts = dict(self.model.values), dict(self.model.facts)

    async def _fold(self) -> None:
        await self._save()
        fold_soon(self.session)
        await anyio.sleep(1)  # of virtual time: until it is at rest
        await self._check_stored()

    async def _reopen(self) -> None:
        # What was only read since the last change is not noted: so note it with one.
        self.session.memory.drop("never there")
        await self.sessions.aclose()
        self._note()
        await self.open()
        await self._check_stored()

    async def _crash(self) -> None:
        self.session.memory.drop("never there")
        await self._save()
        self.session.memory.set("lost", "x")
        await kill(self.sessions)
        self.model = self.saved
        self._note()
        await self.open()

    async def _search(self) -> None:
        found = await self.session.memory.search("x", values=True, limit=100)
        assert {one.key for one in found} <= self.model.values.keys()

    async def _all(self) -> None:
        memory = self.session.memory
        assert sorted(await memory.keys()) == sorted(self.model.values)
        for key in await memory.keys():
            assert await memory.get(key) == self.model.values[key]
            self.model.touch(key, self.ticks.last)

    async def _check_stored(self) -> None:
        store = MemoryStore(backing=self.backing)
        records = []
        async with contextlib.aclosing(store.read_log(self.session.key)) as log:
            async for chunk in log:
                records += chunk.records
        found = (await store.read_documents(self.session.key)).found.get(MEMORY)
        if found is None:
            return
        assert found.data == split_memory(None, [r for r in records if r.seq <= found.as_of_seq])[0]
        there = set(await store.blob_names(""))
        assert blob_names({MEMORY: found.data}) <= there


class Ticks:
    """A time that goes on with each look at it."""

    def __init__(self) -> None:
        self._count = count(1)
        self.last = 0

    def __call__(self) -> int:
        self.last = next(self._count)
        return self.last


@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_memory_is_what_a_dict_would_be(
    backend: str, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    @settings(max_examples=60)
    @given(steps)
    def holds(told: list[Any]) -> None:
        ticks = Ticks()
        monkeypatch.setattr(working_memory, "_now", ticks)

        async def run() -> None:
            story = Story(limit, ticks)
            await story.open()
            for number, step in enumerate(told):
                await story.step(number, step)
            await story.step(len(told), ("reopen",))
            await story.step(len(told), ("all",))
            await story.sessions.aclose()

        virtually(backend, run)

    holds()
