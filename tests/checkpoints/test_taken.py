"""Pairs of files that are taken in: what a replay of the session says then is what was true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import perdure
from perdure.checkpoints import replay_files
from perdure.errors import ReplayError
from perdure.transfer import export_pair, import_pair


async def exported(sessions: perdure.SessionManager, id: str, folder: Path) -> None:
    view = await sessions.load(id)
    assert view is not None
    folder.mkdir()
    await export_pair(view, folder)


async def test_checkpoints_that_were_pruned_are_no_problem_elsewhere(tmp_path: Path) -> None:
    """S3-G5, S3-10: a tombstone is not taken for a loss, however often it is moved."""
    async with perdure.connect("memory:") as sessions:
        async with sessions.open("v0") as session:
            for number in range(4):
                session.events.emit("custom", f"{number}")
                await session.checkpoints.create(f"{number}", {"n": number})
            await session.checkpoints.prune(keep=[1, 4])
        for number in range(2):
            folder = tmp_path / f"{number}"
            await exported(sessions, f"v{number}", folder)
            assert (await replay_files(folder)).ok
            async with sessions.open(f"v{number + 1}") as session:
                assert (await import_pair(session, folder)).findings == ()
                report = await session.events.replay()
                assert (report.problems, report.unverified, report.snapshots) == ((), 2, 2)
                assert [one.id for one in await session.checkpoints.states()] == [1, 4]


async def test_a_checkpoint_that_is_missing_is_said_when_it_is_taken_in(tmp_path: Path) -> None:
    async with perdure.connect("memory:") as sessions:
        async with sessions.open("a") as session:
            await session.checkpoints.create("one", {"n": 1})
            await session.checkpoints.create("two", {"n": 2})
        await exported(sessions, "a", tmp_path / "pair")
        file = tmp_path / "pair/checkpoints.jsonl"
        file.write_bytes(file.read_bytes().splitlines(keepends=True)[1])
        async with sessions.open("b") as session:
            taken = await import_pair(session, tmp_path / "pair")
            assert taken.findings == (
                "checkpoint 1 is not in checkpoints.jsonl: its event came alone",
            )
            (problem,) = (await session.events.replay()).problems
            assert "checkpoint 1 does not stand before its event" in problem


@pytest.mark.parametrize("summary", [b"\xff", b'{"events":1,"last_hash":"\xff"}', b"[]", b""])
async def test_a_summary_that_cannot_be_read_is_named(tmp_path: Path, summary: bytes) -> None:
    event = {"token_id": 0, "timestamp": 1, "kind": "custom", "detail": {}}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    (tmp_path / "replay.json").write_bytes(summary)
    with pytest.raises(ReplayError, match=r"replay\.json cannot be read.*remove it"):
        await replay_files(tmp_path)
