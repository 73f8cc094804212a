"""Transcripts in a folder of projects, as the SDK's program writes them, imported."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import perdure
from perdure import SessionManager
from perdure.adapters.imports import SdkImport, import_sessions
from perdure.cli import main
from perdure.errors import ConfigError
from tests.adapters.import_kills import killed_imports
from tests.servers.anthropic_script import AnthropicScript
from tests.users import as_nobody

sdk: Any = pytest.importorskip("claude_agent_sdk")

from perdure.adapters import PerdureSessionStore  # noqa: E402  # behind the skip
from perdure.adapters.claude_agent_import import source_of  # noqa: E402

ROOT = Path(__file__).parents[2]
ADA: Any = {"project_key": "-home-ada", "session_id": "s1"}
SUB: Any = {**ADA, "subpath": "subagents/agent-1"}


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[SessionManager]:
    async with perdure.connect(tmp_path / "store") as manager:
        yield manager


def lines(*entries: dict[str, Any]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def entry(uuid: object, **fields: Any) -> dict[str, Any]:
    return {"type": "user", "uuid": f"{uuid}", **fields}


MODE = {"type": "mode", "mode": "plan"}
MAIN = [entry(1), MODE, entry(2, text="é\U0001f916"), MODE, {"type": "tag", "tag": "tides"}]


@pytest.fixture
def projects(tmp_path: Path) -> Path:
    folder = tmp_path / "projects"
    below = folder / "-home-ada" / "s1" / "subagents"
    (below / "workflows" / "run-1").mkdir(parents=True)
    (folder / "-home-ada" / "s1.jsonl").write_text(lines(*MAIN) + "\n" + '{"type": "us')
    (folder / "-home-ada" / "notes.txt").write_text("none")
    (below / "agent-1.jsonl").write_text(lines(entry("a")))
    (below / "agent-1.meta.json").write_text('{"agentType": "Explore", "type": "x"}')
    (below / "workflows" / "run-1" / "agent-2.jsonl").write_text(lines(entry("b")))
    (folder / "-home-bob").mkdir()
    (folder / "-home-bob" / "s1.jsonl").write_text(json.dumps(entry(1)))  # no end of its line
    return folder


async def imported(folder: Path, sessions: SessionManager, **options: Any) -> SdkImport:
    async with source_of(str(folder)) as source:
        return await import_sessions(source, sessions, **options)


def state_of(folder: Path) -> dict[Path, tuple[str, int]]:
    return {
        path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


async def test_a_folder_of_projects_is_imported(projects: Path, sessions: SessionManager) -> None:
    before = state_of(projects)
    done = await imported(projects, sessions)
    assert (done.sessions, done.imported, done.added, done.failed) == (4, 4, 9, {})
    assert state_of(projects) == before
    store = PerdureSessionStore(sessions)
    assert await store.load(ADA) == MAIN
    described = {"agentType": "Explore", "type": "agent_metadata"}
    assert await store.load(SUB) == [entry("a"), described]
    assert sorted(await store.list_subkeys(ADA)) == [
        "subagents/agent-1",
        "subagents/workflows/run-1/agent-2",
    ]
    assert await store.load({**ADA, "project_key": "-home-bob"}) == [entry(1)]
    (summary,) = await store.list_session_summaries("-home-ada")
    assert summary["data"]["tag"] == "tides"


async def test_an_import_is_repeated_and_adds_what_is_new(
    projects: Path, sessions: SessionManager
) -> None:
    await imported(projects, sessions)
    again = await imported(projects, sessions)
    assert (again.imported, again.there, again.added) == (0, 4, 0)
    with (projects / "-home-bob" / "s1.jsonl").open("a") as file:
        file.write("\n" + lines(entry(2), MODE))
    more = await imported(projects, sessions)
    assert (more.continued, more.there, more.added) == (1, 3, 2)


async def test_an_import_fills_the_gaps_of_a_mirror(
    projects: Path, sessions: SessionManager
) -> None:
    store = PerdureSessionStore(sessions)
    await store.append(ADA, [MODE, MAIN[2], entry("only here")])
    done = await imported(projects, sessions)
    assert (done.continued, done.failed) == (1, {})
    assert await store.load(ADA) == [
        MODE,
        MAIN[2],
        entry("only here"),
        MAIN[0],
        MODE,
        {"type": "tag", "tag": "tides"},
    ]


@pytest.mark.parametrize(
    ("line", "reason"), [("{", "line 2 is no JSON"), ("[1]", "line 2 is no entry")]
)
async def test_a_damaged_line_is_reported(
    projects: Path, sessions: SessionManager, line: str, reason: str
) -> None:
    (projects / "-home-bob" / "s1.jsonl").write_text(f"{lines(entry(1))}{line}\n{lines(entry(2))}")
    done = await imported(projects, sessions)
    assert list(done.failed) == ["-home-bob/s1"]
    assert reason in done.failed["-home-bob/s1"]
    assert await PerdureSessionStore(sessions).load({**ADA, "project_key": "-home-bob"}) is None


@pytest.mark.skipif(sys.platform == "win32", reason="on Windows a mode holds no rights")
async def test_what_may_not_be_read_is_reported(short_tmp: Path) -> None:
    file = short_tmp / "projects" / "-home-bob" / "s1.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(lines(entry(1)))
    async with perdure.connect("memory:") as sessions:
        # All modules are imported here: another user may not read root's Python.
        assert (await imported(file.parents[1], sessions)).failed == {}
        for path, mode in ((file.parents[1], 0o755), (file.parent, 0o755), (file, 0)):
            path.chmod(mode)
        with as_nobody(short_tmp):
            done = await imported(file.parents[1], sessions)
    assert "cannot be read" in done.failed["-home-bob/s1"]


@pytest.mark.parametrize(("name", "reason"), [("gone", "is no folder"), (".", "has no PROJECT")])
async def test_a_folder_without_transcripts_is_refused(
    tmp_path: Path, name: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        async with source_of(str(tmp_path / name)):
            pass


def test_the_command_imports(
    projects: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "agents"
    words = ["import", "claude-agent-sdk", str(projects), "--store", str(store)]
    assert main(words) == 0
    assert "4 of 4 sessions imported" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["there"] == 4


@pytest.mark.deep
def test_an_import_that_is_killed_is_repeated(projects: Path, tmp_path: Path) -> None:
    store = tmp_path / "agents"
    assert killed_imports("claude-agent-sdk", projects, store, step=12)

    async def check() -> None:
        async with PerdureSessionStore.from_url(store) as stored:
            assert await stored.load(ADA) == MAIN

    anyio.run(check)


@pytest.mark.deep
def test_what_the_sdk_s_program_wrote_is_imported_and_resumed(tmp_path: Path) -> None:
    cwd, url = tmp_path / "work", str(tmp_path / "agents")
    cwd.mkdir()
    program = [sys.executable, "-m", "tests.adapters.claude_program"]
    with AnthropicScript() as server:
        environment = {**os.environ, **server.environment}

        def run(config: str, *words: str) -> str:
            environment["CLAUDE_CONFIG_DIR"] = str(tmp_path / config)
            ran = subprocess.run(
                [*program, *words], cwd=ROOT, env=environment, capture_output=True, timeout=120
            )
            assert ran.returncode == 0, ran.stderr
            return ran.stdout.decode().split()[0]

        name = run("first", "memory:", str(cwd), "When is low tide?")
        projects = str(tmp_path / "first" / "projects")
        assert main(["import", "claude-agent-sdk", projects, "--store", url]) == 0
        assert run("second", url, str(cwd), "Sure?", "--resume", name) == name
        assert "When is low tide?" in json.dumps(server.requests[-1]["messages"])
