from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Message, Shutdown
from perdure.cli.demo.run import (
    STORE,
    Ack,
    DemoPlan,
    DemoRun,
    LoggedAgent,
    Report,
    digest,
    lost,
    read_logs,
    turns_in,
)
from tests.cli.conftest import Command

pytestmark = pytest.mark.deep

TURNS = [
    [Message.user("one"), Message.assistant("1")],
    [Message.user("two"), Message.tool("c", 2), Message.assistant("2")],
]
ACKS = [
    Ack("a", number, turn[0].text, digest(turn), turn[-1].text)
    for number, turn in enumerate(TURNS, 1)
]


def logs(*turns: list[Message]) -> dict[str, LoggedAgent]:
    return {"a": LoggedAgent(turns_in([message for turn in turns for message in turn]))}


def test_what_was_acknowledged_and_is_there_is_not_lost() -> None:
    assert lost(ACKS, logs(*TURNS)) == []


def test_a_turn_that_was_never_acknowledged_may_be_there() -> None:
    assert lost(ACKS[:1], logs(*TURNS, [Message.user("three")])) == []


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ([TURNS[0]], "it is not in the log"),
        ([TURNS[0], TURNS[1][:-1]], "the log holds other messages for it"),
        ([TURNS[0], TURNS[1], TURNS[1]], "the log holds other messages for it"),
        (
            [TURNS[0], [*TURNS[1][:-1], Message.assistant("3")]],
            "the log holds other messages for it",
        ),
    ],
)
def test_a_turn_that_is_missing_cut_doubled_or_changed_is_lost(kept, why: str) -> None:
    (one,) = lost(ACKS, logs(*kept))
    assert (one.agent, one.turn, one.why) == ("a", 2, why)


def test_an_agent_without_a_log_has_lost_everything() -> None:
    assert len(lost(ACKS, {})) == 2


def test_the_logs_are_read_from_the_store_alone(tmp_path: Path) -> None:
    async def write_and_read() -> dict[str, LoggedAgent]:
        folder = tmp_path / "store"
        async with perdure.connect(folder, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("a") as session:
                for turn in TURNS:
                    session.append(*turn)
        return await read_logs(str(folder), ["a", "b"])

    found = anyio.run(write_and_read)
    assert list(found) == ["a"]
    assert found["a"].count == 2
    assert set(found["a"].turns) == {"one", "two"}
    assert found["a"].payload > 100


def demo(*tokens: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perdure.cli", "demo", *tokens]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_demo_loses_nothing_and_says_so_as_one_object(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    ran = demo("--dir", str(folder), "--agents", "6", "--before", "3", "--after", "2", "--json")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["lost"] == 0
    assert report["ok"] is True
    assert report["acknowledged"] >= 30
    assert report["acknowledged_before_kill"] >= 18
    assert report["turns"] >= report["acknowledged"]
    assert report["kill_status"] == -9
    assert report["term_status"] == -15
    assert report["restored"] == 6
    assert report["restore_ms_max"] >= report["restore_ms_p50"] > 0
    assert report["write_amplification"] > 1
    assert report["shutdown"]["clean"] is True
    assert report["folder"] == str(folder)
    assert (folder / STORE / "agents" / "agent-01" / "log").is_dir()


def test_a_demo_on_a_store_of_ones_own_meets_no_session_there(
    command: Command, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'own.db'}"

    async def fill() -> None:
        async with perdure.connect(url, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("agent-01") as session:
                session.append(Message.user("mine"))

    anyio.run(fill)
    before = command("export", "agent-01", "--store", url).out
    size = ("--agents", "2", "--before", "1", "--after", "1")
    ran = demo("--dir", str(tmp_path / "demo"), *size, "--store", url, "--json")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert (report["ok"], report["restored"], report["store"]) == (True, 2, url)
    theirs = command("ls", "--tenant", report["tenant"], "--store", url, "--json").json["sessions"]
    assert {one["agent"] for one in theirs} == {"agent-01", "agent-02"}
    assert command("export", "agent-01", "--store", url).out == before


def test_a_demo_on_a_store_in_memory_is_refused(command: Command, tmp_path: Path) -> None:
    ran = command("demo", "--dir", str(tmp_path / "demo"), "--store", "memory:")
    assert (ran.status, "what is in memory goes with it" in ran.err) == (2, True)
    assert not (tmp_path / "demo").exists()


def test_a_demo_ends_with_a_table_and_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    ran = demo("--dir", str(folder), "--agents", "2", "--before", "1", "--after", "1")
    assert ran.returncode == 0, ran.stderr
    lines = dict(line.split("  ", 1) for line in ran.stdout.splitlines() if "  " in line.strip())
    assert lines["lost"].strip() == "0"
    assert f"perdure ls --store {folder / STORE}" in ran.stdout


class Forgetful(DemoRun):
    """A course whose store loses a record between the kill and the restore."""

    async def _killed(self) -> None:
        await super()._killed()
        log = self.plan.folder / STORE / "agents" / "agent-01" / "log" / "1-0.jsonl"
        lines = log.read_bytes().splitlines(keepends=True)
        log.write_bytes(b"".join(lines[: len(lines) // 2]))
        await self._prove()


async def test_a_demo_notices_a_store_that_loses_something(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    plan = DemoPlan(
        folder=tmp_path, store=str(tmp_path / STORE), agents=2, before=4, after=1, deadline=60
    )
    course = Forgetful(plan, lambda step: None)
    report = await course.run()
    assert report.lost > 0
    assert report.ok is False
    assert {one.agent for one in report.lost_turns} == {"agent-01"}


def test_a_demo_that_lost_something_exits_with_1(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(course: DemoRun) -> Report:
        course.report.lost = 1
        return course.report

    monkeypatch.setattr(DemoRun, "run", run)
    ran = command("demo", "--dir", str(tmp_path / "demo"), "--json")
    assert (ran.status, ran.json["lost"]) == (1, 1)


def test_a_server_that_cannot_start_is_an_error_with_its_own_words(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    ran = command("demo", "--dir", str(tmp_path / "demo"))
    assert ran.status == 1
    assert "the demo's server ended with status 1" in ran.err


def test_the_demo_refuses_a_folder_that_holds_something(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    ran = command("demo", "--dir", str(tmp_path))
    assert ran.status == 2
    assert "is not empty" in ran.err


def test_an_earlier_demo_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    async def run(course: DemoRun) -> Report:
        return course.report

    monkeypatch.setattr(DemoRun, "run", run)
    monkeypatch.chdir(tmp_path)
    folders = [command("demo", "--json").json["folder"] for _ in range(3)]
    names = [Path(folder).name for folder in folders]
    assert names == ["perdure-demo", "perdure-demo-2", "perdure-demo-3"]
