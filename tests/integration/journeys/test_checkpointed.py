"""Checkpoints, events and archives on every backend: they outlive a process, and go with a session."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import perdure
from perdure import Message
from perdure.archive import Archives
from tests.integration.journeys.backends import EACH, store_of

pytestmark = pytest.mark.deep

STATE = {"items": [{"n": n, "text": random.Random(n).randbytes(40).hex()} for n in range(1500)]}
"""Some 150 KB: a tree of chunks."""


@pytest.mark.parametrize("kind", EACH)
async def test_a_session_goes_back_on_any_store(kind: str, tmp_path: Path) -> None:
    """S3-1 S3-4 S3-7 S3-10: a process makes checkpoints, the next one verifies and goes back."""
    more = {"items": [*STATE["items"], {"n": -1, "text": "one more"}]}
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("before"))
            session.memory.set("large", "x" * 20_000)
            await session.checkpoints.create("the session")
            await session.checkpoints.create("a state", STATE)
            await session.checkpoints.create("one more item", more)
            session.events.emit("custom", "plan", {"goal": "on"})
            session.append(Message.user("after"))
            session.memory.drop("large")
            await session.save()
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        view = await sessions.load("ada")
        assert view is not None
        assert (await view.checkpoints.verify()).problems == ()
        assert (await view.events.replay(strict=True)).snapshots == 3
        restored = await view.checkpoints.restore(3)
        assert restored is not None
        assert restored.state == more
        assert list((await view.checkpoints.diff(2, 3)).added) == ["/items/1500"]
        await sessions.fork("ada", "eve", at=await view.checkpoints.get(1))
        async with sessions.open("ada") as session:
            await session.checkpoints.rollback(1)
            assert [one.text for one in session.context()] == ["before"]
            assert await session.memory.get("large") == "x" * 20_000
        fork = await sessions.load("eve")
        assert fork is not None
        assert [one.text for one in fork.context()] == ["before"]


@pytest.mark.parametrize("kind", EACH)
async def test_an_archive_comes_back_on_any_store(kind: str, tmp_path: Path) -> None:
    """S4-8 S4-17: the files of a home, on a machine that has the store and no files."""
    home, other = tmp_path / "home", tmp_path / "other"
    (home / "data").mkdir(parents=True)
    (home / "data" / "notes.txt").write_text("berth 7")
    (home / "data" / "large.bin").write_bytes(random.Random(1).randbytes(300_000))
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        async with sessions.open("ada") as session:
            await Archives(session, home, paths=("data",)).save()
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        async with sessions.open("ada") as session:
            await Archives(session, other, paths=("data",)).restore()
    for name in ("notes.txt", "large.bin"):
        assert (other / "data" / name).read_bytes() == (home / "data" / name).read_bytes()


@pytest.mark.parametrize("kind", EACH)
async def test_what_a_forgotten_session_had_goes_with_it(kind: str, tmp_path: Path) -> None:
    """The chunks of states and archives are blobs: forgetting the session removes them."""
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    (home / "data" / "large.bin").write_bytes(random.Random(2).randbytes(300_000))
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        async with sessions.open("ada") as session:
            await session.checkpoints.create("a state", STATE)
            await Archives(session, home, paths=("data",)).save()
        report = await sessions.forget(id="ada")
    assert report.blobs > 10
    store = store_of(kind, tmp_path)
    await store.open()
    assert await store.blob_names("") == []
    await store.aclose()
