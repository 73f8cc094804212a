"""``perdure config``: check, plan and apply."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Message, Shutdown
from perdure.agent import Agent, EchoModel
from tests.cli.conftest import Command
from tests.config.conftest import SEED

ADDED = SEED + "retention: {keep_turns: 1}\n"
CHANGED = ADDED.replace("  theme:", "  color:")


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """An agent that has run: two turns by default, and one in a second session."""
    folder = tmp_path / "gus"
    folder.mkdir()
    (folder / "persistence.yaml").write_text(SEED + "store: ./store\n")
    (folder / "agent.yaml").write_text("name: gus\n")
    anyio.run(_run, folder)
    return folder


async def _run(folder: Path) -> None:
    shutdown = Shutdown(signals=False)
    async with perdure.connect(config=folder / "persistence.yaml", shutdown=shutdown) as sessions:
        for session in ("default", "second"):
            async with Agent.create(
                "gus-1", model=EchoModel(), sessions=sessions, agent_dir=folder, session=session
            ) as agent:
                await agent.ask("Hello")
                await agent.ask("Hello again")
        async with sessions.open("stranger") as other:
            other.append(Message.user("I have no config"))


def declare(agent: Path, text: str) -> Path:
    file = agent / "persistence.yaml"
    file.write_text(text + "store: ./store\n")
    return file


def test_a_file_that_fits_is_said_to(agent: Path, command: Command) -> None:
    ran = command("config", "check", str(agent / "persistence.yaml"))
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == f"{agent / 'persistence.yaml'}: 4 keys, 2 paths: fits\n"
    shown = command("config", "check", str(agent / "persistence.yaml"), "--json").json
    assert shown["problems"] == []
    assert shown["keys"] == ["zep_user_id", "zep_session_id", "user_name", "theme"]


def test_every_problem_is_a_line_for_an_editor(agent: Path, command: Command) -> None:
    file = declare(agent, "version: 2\nconfg: {}\nconfig: {api_key: {init: [1]}}\n")
    ran = command("config", "check", str(file))
    assert ran.status == 1
    assert [line.removeprefix(f"{file}:").split(": ")[0] for line in ran.out.splitlines()] == [
        "1:10",
        "2:1",
        "3:26",
    ]
    assert [
        one["line"] for one in command("config", "check", str(file), "--json").json["problems"]
    ] == [1, 2, 3]


def test_what_is_not_wise_is_a_warning(agent: Path, command: Command) -> None:
    """S4-G10: a config is no place for credentials."""
    file = declare(agent, "version: 1\nconfig:\n  zep_api_key: {init: null}\n")
    ran = command("config", "check", str(file))
    assert ran.status == 0
    assert f"{file}:3:3: warning: 'zep_api_key' looks like a credential" in ran.out


def test_a_plan_says_what_an_apply_does(agent: Path, command: Command) -> None:
    """S4-12, S4-G2: keys added, put aside and brought back; history that goes."""
    file = str(declare(agent, CHANGED))
    plan = command("config", "plan", file)
    assert plan.status == 0
    assert plan.out.splitlines() == [
        "gus-1: would be initialized: color",
        "gus-1: would be put aside: theme",
        *[line for line in plan.out.splitlines() if "pruned" in line],
        "1 of 2 places differ; nothing was changed",
    ]
    assert (
        len(re.findall(r"^gus-1(?:/second)?: would be pruned: 1 turn ", plan.out, re.MULTILINE))
        == 2
    )
    assert command("config", "plan", file).out == plan.out
    done = command("config", "apply", file)
    assert done.out.replace("would be ", "") == done.out
    assert "gus-1: initialized: color" in done.out
    assert done.out.splitlines()[-1] == "1 of 2 places changed"
    again = command("config", "plan", file)
    assert again.out == "0 of 2 places differ; nothing was changed\n"
    back = command("config", "apply", str(declare(agent, SEED)))
    assert "gus-1: brought back: theme" in back.out
    state = agent / "store" / "agents" / "gus-1" / "state" / "_persistence.json"
    stored = json.loads(state.read_text())
    assert stored["values"]["theme"] == "default"
    assert stored["orphans"] == {"color": "default"}


def test_an_agent_without_values_gets_them_when_it_is_named(agent: Path, command: Command) -> None:
    """S4-16: a first run may be prepared."""
    file = str(agent / "persistence.yaml")
    plan = command("config", "plan", file, "--id", "stranger", "--json").json
    assert plan["changes"][0]["plan"]["added"] == ["zep_user_id", "user_name", "theme"]
    assert command("config", "apply", file, "--id", "stranger").status == 0
    assert command("config", "plan", file, "--id", "stranger", "--json").json["changes"] == []


def test_what_somebody_holds_is_left_alone(agent: Path, command: Command) -> None:
    """S4-G4: and named; the exit status says that not all was done."""
    code = (
        "import asyncio, perdure, sys\n"
        "async def main():\n"
        "    async with perdure.connect(sys.argv[1]) as s, s.open('gus-1') as session:\n"
        "        print('held', flush=True); await asyncio.to_thread(sys.stdin.read)\n"
        "asyncio.run(main())\n"
    )
    file = str(declare(agent, CHANGED.replace("retention: {keep_turns: 1}\n", "")))
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(agent / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        ran = command("config", "apply", file)
    finally:
        holder.communicate(b"")
    assert ran.status == 1
    assert "gus-1: another process holds it: left alone" in ran.out
    assert command("config", "apply", file).status == 0


def test_what_cannot_be_read_keeps_nobody_else_from_being_brought_up_to_date(
    agent: Path, command: Command
) -> None:
    async def newer() -> None:
        async with perdure.connect(agent / "store") as sessions, sessions.open("a-1") as session:
            session.state.set("_persistence", {"version": 99})

    anyio.run(newer)
    ran = command("config", "apply", str(declare(agent, CHANGED)))
    assert ran.status == 1
    assert "a-1: cannot be read: left alone" in ran.out
    assert "gus-1: initialized: color" in ran.out


def test_a_folder_of_state_is_brought_up_to_date_as_well(
    agent: Path, command: Command, tmp_path: Path
) -> None:
    """S4-9, S4-12: without a store."""
    file, folder = agent / "persistence.yaml", str(tmp_path / "state")
    plan = command("config", "plan", str(file), "--folder", folder)
    assert "would be initialized: zep_user_id, zep_session_id, user_name, theme" in plan.out
    assert not (tmp_path / "state").exists()
    command("config", "apply", str(file), "--folder", folder)
    first = json.loads((tmp_path / "state" / "_persistence.json").read_text())
    declare(agent, CHANGED)
    command("config", "apply", str(file), "--folder", folder)
    after = json.loads((tmp_path / "state" / "_persistence.json").read_text())
    assert after["values"] == {
        **{key: value for key, value in first["values"].items() if key != "theme"},
        "color": "default",
    }


def test_the_schema_is_printed(command: Command) -> None:
    assert command("config", "schema").json["title"] == "persistence.yaml"


def test_what_is_not_there_is_said(command: Command, tmp_path: Path) -> None:
    ran = command("config", "check", str(tmp_path / "persistence.yaml"))
    assert ran.status == 2
    assert "there is no" in ran.err
    (tmp_path / "persistence.yaml").write_text("version: 1\nstore: nowhere\n")
    ran = command("config", "plan", str(tmp_path / "persistence.yaml"))
    assert ran.status == 1
    assert "there is no store at" in ran.err
    assert not (tmp_path / "nowhere").exists()
