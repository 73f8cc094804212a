"""``perdure replay``: of a session, of files; with a report for people, and one for programs."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from html import unescape
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Shutdown, ToolCall
from perdure.agent import Agent, ScriptedModel
from tests.cli.conftest import Command
from tests.cli.test_lives import said


@pytest.fixture
def at(store: Path) -> tuple[str, str]:
    said(store, "ada")
    anyio.run(decide, store)
    return ("--store", str(store))


async def decide(store: Path) -> None:
    async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("ada") as session:
            session.events.emit("custom", "plan", {"goal": "<b>draft</b>"})
            session.events.emit("capability_used", "mail")
            await session.checkpoints.create("before")
            session.events.emit("custom", "send")
            await session.save()


def test_a_session_is_replayed_and_told(command: Command, at: tuple[str, str]) -> None:
    """S3-10 S3-11."""
    told = command("replay", "ada", *at)
    assert told.status == 0, told.err
    assert "4 events of 0 turns, 2 decisions, 1 checkpoints compared" in told.out
    assert "mail" in told.out
    assert "nothing is missing, moved or changed" in told.out
    answer = command("replay", "ada", "--since", "1", "--json", *at).json
    assert (answer["ok"], answer["since"], answer["decisions"]) == (True, 1, 1)


def test_reports_are_for_people_and_for_programs(
    command: Command, at: tuple[str, str], tmp_path: Path
) -> None:
    """S3-11."""
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    assert command("replay", "ada", "--report", str(page), *at).status == 0
    assert command("replay", "ada", "--report", str(data), *at).status == 0
    text = page.read_text()
    assert "Compared: nothing is missing" in text
    assert "&lt;b&gt;draft" in text
    report = json.loads(data.read_text())
    assert [(one["what"], one["name"]) for one in report["rows"]] == [
        ("decision", "plan"),
        ("used", "mail"),
        ("decision", "send"),
    ]
    assert report["summary"]["capabilities"]["mail"]["used"] == 1
    again = command("replay", "ada", "--report", str(data), *at)
    assert (again.status, "is there already" in again.err) == (2, True)
    wrong = command("replay", "ada", "--report", str(tmp_path / "x.txt"), *at)
    assert (wrong.status, "ends in .html or .json" in wrong.err) == (2, True)


def test_exported_files_are_replayed_and_a_change_is_named(
    command: Command, at: tuple[str, str], tmp_path: Path
) -> None:
    """S3-8 S3-9: the pair travels with an export, and suffices."""
    out = tmp_path / "out"
    exported = command("export", "ada", "--layout", "seed", "--out", str(out), "--json", *at)
    assert {"events.jsonl", "checkpoints.jsonl"} <= set(exported.json["files"])
    assert command("replay", "--files", str(out)).status == 0
    path = out / "events.jsonl"
    path.write_text(path.read_text().replace("send", "sent"))
    told = command("replay", "--files", str(out))
    assert told.status == 1
    assert "problem: line 4: the event was changed" in told.out


def stripped(out: Path) -> None:
    """Take away all that proves the events, and forge a state."""
    path = out / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["hash"]
        line.get("detail", {}).pop("state_sha256", None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    forged(out)


def forged(out: Path) -> None:
    path = out / "checkpoints.jsonl"
    checkpoint = json.loads(path.read_text())
    path.write_text(json.dumps({**checkpoint, "state": {"forged": True}}) + "\n")


def cut_off(out: Path) -> None:
    path = out / "events.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])


@pytest.mark.parametrize(
    ("harm", "why"), [(stripped, "4 events have no hash"), (cut_off, "none is missing at the end")]
)
def test_what_was_not_compared_is_not_called_complete(
    command: Command,
    at: tuple[str, str],
    tmp_path: Path,
    harm: Callable[[Path], None],
    why: str,
) -> None:
    """S3-10."""
    out, page = tmp_path / "out", tmp_path / "page.html"
    command("export", "ada", "--layout", "files", "--out", str(out), *at)
    assert command("replay", "--files", str(out), "--json").json["verdict"] == "compared"
    (out / "replay.json").unlink()
    harm(out)
    told = command("replay", "--files", str(out), "--report", str(page))
    assert told.status == 3
    assert "0 checkpoints compared, 1 not compared" in told.out
    assert why in told.out
    assert "nothing is missing" not in told.out
    assert "nothing is missing" not in page.read_text()
    assert "Not compared" in page.read_text()
    assert command("replay", "--files", str(out), "--json").json["verdict"] == "not compared"


def test_what_is_wrong_is_not_counted_as_compared(
    command: Command, at: tuple[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command("export", "ada", "--layout", "files", "--out", str(out), *at)
    forged(out)
    answer = command("replay", "--files", str(out), "--json")
    assert (answer.status, answer.json["verdict"], answer.json["snapshots"]) == (1, "wrong", 0)


def test_what_does_not_fit_is_said(command: Command, at: tuple[str, str], tmp_path: Path) -> None:
    for wrong in (("replay",), ("replay", "ada", "--files", str(tmp_path))):
        told = command(*wrong, *at)
        assert (told.status, "one of the two" in told.err) == (2, True)
    told = command("replay", "--files", str(tmp_path))
    assert (told.status, "no events.jsonl" in told.err) == (1, True)
    told = command("replay", "--files", str(tmp_path), "--since", "1")
    assert (told.status, "does not go with --files" in told.err) == (2, True)
    assert "there is no session" in command("replay", "nobody", *at).err


def test_files_of_another_kernel_are_imported(
    command: Command, store: Path, tmp_path: Path
) -> None:
    """S3-8: their events and checkpoints become a session's."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "session.json").write_text(json.dumps({"version": 1, "agentId": "os"}))
    event = {"token_id": 0, "timestamp": 5, "kind": "snapshot_created", "detail": {"snapshot": 1}}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n{")
    state = {"snapshot_id": 1, "label": "one", "timestamp": 5, "state": {"a": 1}}
    (folder / "checkpoints.jsonl").write_text(json.dumps(state) + "\n")
    done = command("import", str(folder), "--json", "--store", str(store))
    assert done.status == 0, done.err
    assert "torn here" in done.json["findings"][-1]["detail"]
    listed = command("checkpoints", "os", "--json", "--store", str(store)).json
    assert [one["label"] for one in listed["checkpoints"]] == ["one"]
    assert command("replay", "os", "--store", str(store)).status == 0


def test_events_without_a_session_beside_them_are_imported_under_an_id(
    command: Command, store: Path, tmp_path: Path
) -> None:
    """S3-8 S3-9: the pair of files suffices."""
    folder = tmp_path / "pair"
    folder.mkdir()
    event = {"token_id": 0, "timestamp": 5, "kind": "snapshot_created", "detail": {"snapshot": 0}}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    state = {"snapshot_id": 0, "label": "one", "timestamp": 5, "state": {"a": 1}}
    (folder / "checkpoints.jsonl").write_text(json.dumps(state) + "\n")
    told = command("import", str(folder), "--store", str(store))
    assert (told.status, "give --id" in told.err) == (2, True)
    assert command("import", str(folder), "--id", "os", "--store", str(store)).status == 0
    assert command("replay", "os", "--json", "--store", str(store)).json["snapshots"] == 1


def test_checkpoints_out_of_order_are_refused_before_anything_is_written(
    command: Command, store: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "pair"
    folder.mkdir()
    (folder / "session.json").write_text(json.dumps({"version": 1, "agentId": "os"}))
    event = {"token_id": 0, "timestamp": 5, "kind": "custom"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    state = {"snapshot_id": 4, "label": "one", "timestamp": 5, "state": {"a": 1}}
    (folder / "checkpoints.jsonl").write_text(2 * (json.dumps(state) + "\n"))
    told = command("import", str(folder), "--store", str(store))
    assert (told.status, "line 2: checkpoint 4 comes after 4" in told.err) == (2, True)
    (folder / "checkpoints.jsonl").unlink()
    assert command("import", str(folder), "--store", str(store)).status == 0


def test_a_page_has_what_a_tool_was_called_with_and_what_it_returned(
    command: Command, tmp_path: Path
) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    calls = [ToolCall("c1", "add", {"a": 20, "b": 3}), ToolCall("c1", "add", {"a": 4, "b": 5})]

    async def work() -> None:
        async with perdure.connect(tmp_path / "s", shutdown=Shutdown(signals=False)) as sessions:
            model = ScriptedModel(calls, [ToolCall("c1", "add", {"a": "x"})], "done")
            agent = Agent.create("ada", model=model, tools=[add], sessions=sessions)
            async with agent as ada:
                await ada.ask("add")

    anyio.run(work)
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    for report in (page, data):
        told = command("replay", "ada", "--report", str(report), "--store", str(tmp_path / "s"))
        assert told.status == 0, told.err
    rows = json.loads(data.read_text())["rows"]
    requested = [row["arguments"] for row in rows if row["what"] == "requested"]
    assert requested[:2] == [{"a": 20, "b": 3}, {"a": 4, "b": 5}]
    used = [row["result"] for row in rows if row["what"] == "used"]
    assert sorted(used) == [9, 23]  # whichever was done first
    assert all(row["at"] > 1.7e9 for row in rows)
    shown = unescape(page.read_text())
    assert '"arguments":{"a":20,"b":3}' in shown
    assert '"result":23' in shown
    year = datetime.datetime.fromtimestamp(rows[0]["at"], datetime.UTC).year
    assert f"<td>{year}-" in shown
