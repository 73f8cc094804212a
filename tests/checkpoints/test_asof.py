"""What a session was at an earlier record: folded from what there is, and from no more than that."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Message, Session, Shutdown
from perdure._lib.files import Folder
from perdure.session import point_in_time
from perdure.store import LogChunk
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.transfer import export_pair
from tests.checkpoints.test_engine import talk, whole

QUIET = Shutdown(signals=False)


async def state_at(session: Any, id: int) -> Any:
    restored = await session.checkpoints.restore(id)
    assert restored is not None
    return restored.state


def manifests_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have folds end as a kill ends them: documents are written, the manifest is not."""
    real = Folder.rename

    def rename(self: Folder, name: str, new: str, to: Folder | None = None) -> None:
        if new.startswith("manifest-") and new.endswith(".json"):
            raise OSError(5, "Input/output error")
        real(self, name, new, to)

    monkeypatch.setattr(Folder, "rename", rename)


async def test_behind_a_killed_fold_a_checkpoint_is_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3-4, S3-7: documents that are further than their manifest are not taken for earlier ones."""
    async with perdure.connect(tmp_path, shutdown=QUIET) as sessions, sessions.open("a") as session:
        await talk(session, "one")
    async with perdure.connect(tmp_path, shutdown=QUIET) as sessions, sessions.open("a") as session:
        await talk(session, "two")
        made = await session.checkpoints.create("here")
        state, was = await state_at(session, made.id), await whole(session)
        await talk(session, "three")
        manifests_refused(monkeypatch)
    monkeypatch.undo()
    async with perdure.connect(tmp_path, shutdown=QUIET) as sessions:
        view = await sessions.load("a")
        assert await state_at(view, made.id) == state
        await sessions.fork("a", "b", at=made)
        for id in "ab":
            async with sessions.open(id) as session:
                if id == "a":
                    await session.checkpoints.rollback(made.id)
                assert await whole(session) == was


async def looked_at(session: Session) -> list[Any]:
    states = [await state_at(session, id) for id in (4, 2, 1, 3)]
    return [*states, *[await session.checkpoints.diff(a, b) for a, b in ((1, 4), (4, 1), (2, 2))]]


async def test_a_long_log_is_folded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is, a part of it is in memory at a time; what comes of it is the same."""
    async with perdure.connect("memory:") as sessions, sessions.open("a") as session:
        shown = []
        for text in ("one", "two", "three"):
            await talk(session, text)
            await session.checkpoints.create(text)
            shown.append(await whole(session))
        session.memory.drop("large one")
        session.state.drop("plan")
        await session.checkpoints.create("less")
        in_one = await looked_at(session)
        monkeypatch.setattr(point_in_time, "PART", 1)
        assert await looked_at(session) == in_one
        await session.checkpoints.rollback(2)
        assert await whole(session) == shown[1]


class Counting(MemoryStore):  # type: ignore[misc]  # final for users
    """Counts the records that are read."""

    count = 0

    async def read_log(self, key: Any, **options: Any) -> AsyncGenerator[LogChunk, None]:
        async for chunk in super().read_log(key, **options):
            self.count += len(chunk.records)
            yield chunk


async def test_a_state_that_is_given_needs_no_look_at_the_log() -> None:
    backing = MemoryBacking()
    async with perdure.connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        async with sessions.open("a") as session:
            session.append(*(Message.user(f"{number}") for number in range(300)))
            await session.checkpoints.create("first", {"n": 1})
    store = Counting(backing=backing)
    async with perdure.connect(store, shutdown=QUIET) as sessions, sessions.open("a") as session:
        store.count = 0
        second = await session.checkpoints.create("second", {"n": 2})
        assert store.count == 0
        session.append(Message.user("more"))
        await session.checkpoints.create("all of it")
        assert store.count > 300
        assert (await session.checkpoints.verify()).ok
        assert await state_at(session, second.id) == {"n": 2}


async def test_an_export_of_many_checkpoints_reads_the_log_once(tmp_path: Path) -> None:
    backing = MemoryBacking()
    async with perdure.connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        async with sessions.open("a") as session:
            for number in range(20):
                session.append(*(Message.user(f"{number} {one}") for one in range(20)))
                await session.checkpoints.create(f"{number}")
            records = session.version
    store = Counting(backing=backing)
    async with perdure.connect(store, shutdown=QUIET) as sessions:
        view = await sessions.load("a")
        assert view is not None
        store.count = 0
        await export_pair(view, tmp_path)
    assert store.count < 3 * records  # once for the events, once for all of the states
    assert len((tmp_path / "checkpoints.jsonl").read_bytes().splitlines()) == 20
