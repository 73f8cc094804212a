"""What the log says of damage: by session and by file, for a person who has to act."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from perdure import Message, Shutdown, connect
from perdure.checkpoints import replay_files
from perdure.formats import FolderStorage, FullAgentState
from perdure.store import LogChunk
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.transfer import export_pair

QUIET = Shutdown(signals=False)


async def said(data: Path) -> None:
    async with connect(data, shutdown=QUIET) as sessions, sessions.open("ada") as session:
        session.append(Message.user("hello"))


async def test_a_damaged_file_is_told_with_its_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    await said(data)
    damaged = data / "agents" / "ada" / "session.json"
    damaged.write_text("{broken")
    caplog.set_level(logging.WARNING)
    await said(data)
    (message,) = (one.getMessage() for one in caplog.records if "damaged" in one.getMessage())
    assert "session ada" in message
    assert str(damaged) in message


async def test_a_document_that_says_nothing_to_us_is_told_with_its_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that is no folder: its bytes are not those of the manifest."""
    backing = MemoryBacking()
    for _ in range(2):
        caplog.clear()
        caplog.set_level(logging.WARNING)
        store = MemoryStore(backing=backing)
        async with connect(store, shutdown=QUIET) as sessions, sessions.open("ada") as session:
            session.append(Message.user("hello"))
        documents = backing.sessions[session.key].documents
        documents["session.json"] = documents["session.json"][:-9]
    (message,) = (one.getMessage() for one in caplog.records if "session.json" in one.getMessage())
    assert "session ada" in message


async def test_a_damaged_state_is_told_with_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = FolderStorage(tmp_path / "ada")
    await storage.save(FullAgentState(agent_id="ada"))
    (tmp_path / "ada" / "session.json").write_text("{broken")
    caplog.set_level(logging.WARNING)
    await storage.load()
    (message,) = (one.getMessage() for one in caplog.records if "damaged" in one.getMessage())
    assert str(tmp_path / "ada" / "session.json") in message
    assert str(tmp_path / "ada" / "quarantine") in message


async def test_a_pair_is_exported_into_a_folder_that_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "far" / "away"
    async with connect("memory:", shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session:
            session.events.emit("custom", "begin", {"goal": 1})
            await session.checkpoints.create("one")
            await session.save()
            view = await sessions.load("ada")
            assert view is not None
            names = await export_pair(view, folder)
    assert sorted(names) == sorted(path.name for path in folder.iterdir())
    assert (await replay_files(folder)).ok
    assert json.loads((folder / "replay.json").read_text())["events"] == 2


class TakenOver(MemoryStore):  # type: ignore[misc]  # final for users
    """Gives one record at a time; a takeover was under way when one of them was read."""

    unsettled = -1

    async def read_log(self, key: Any, **options: Any) -> AsyncGenerator[LogChunk, None]:
        at = 0
        async for chunk in super().read_log(key, **options):
            for record in chunk.records:
                yield LogChunk((record,), settled=at != self.unsettled)
                at += 1


@pytest.mark.parametrize("part", [0, 1, 3])
async def test_a_takeover_under_way_is_told_whichever_part_of_the_log_met_it(part: int) -> None:
    store = TakenOver()
    async with connect(store, shutdown=QUIET, autosave=None) as sessions:
        async with sessions.open("ada") as session:
            session.append(*(Message.user(f"{number}") for number in range(3)))
            await session.save()
            view = await sessions.load("ada")
            assert view is not None
            assert view.settled
            store.unsettled = part
            view = await sessions.load("ada")
            store.unsettled = -1
    assert view is not None
    assert not view.settled
    assert [one.what for one in view.restore_report.steps].count("unsettled") == 1
