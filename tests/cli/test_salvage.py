"""A log that is damaged in the middle: the message's cure brings out all that is left of it."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import perdure
from perdure import Message, ToolCall
from perdure.cli import main
from tests.cli.conftest import Command

KEY = "00" * 32


async def _fill(url: str) -> None:
    async with perdure.connect(url, autosave=None) as sessions:
        async with sessions.open("ada") as ada:
            for number in range(3):
                async with ada.turn(id=f"turn-{number}"):
                    ada.append(Message.user(f"question {number}"))
                    ada.append(Message.assistant(f"answer {number}"))
                await ada.save()
            async with ada.turn(id="sum"):
                ada.append(Message.user("sum it up"))
                ada.append(Message.assistant(tool_calls=[ToolCall("c1", "add", {"a": 2})]))
                ada.append(Message.tool("c1", "five letters", name="add"))
                await ada.save()
                ada.append(Message.assistant("It is 5."))
            ada.state.set("mood", {"is": "good"})
            await ada.save()


def _damage_file(folder: Path, text: bytes) -> None:
    [log] = (folder / "agents" / "ada" / "log").glob("*.jsonl")
    data = log.read_bytes()
    assert data.count(text) == 1
    log.write_bytes(data.replace(text, text[::-1]))


def _damage_sqlite(path: Path, text: bytes) -> None:
    with sqlite3.connect(path) as con:
        rows = con.execute("SELECT rowid, data FROM log").fetchall()
        [(rowid, data)] = [row for row in rows if text in row[1]]
        con.execute(
            "UPDATE log SET data = ? WHERE rowid = ?", (data.replace(text, text[::-1]), rowid)
        )
    con.close()


Damaged = tuple[str, Callable[[bytes], None]]


@pytest.fixture(params=["file", "sqlite"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Damaged:
    if request.param == "file":
        folder = tmp_path / "store"
        anyio.run(_fill, str(folder))
        return str(folder), lambda text: _damage_file(folder, text)
    url = f"sqlite:///{tmp_path}/store.db"
    anyio.run(_fill, url)
    return url, lambda text: _damage_sqlite(tmp_path / "store.db", text)


async def _load(url: str) -> tuple[list[str], object, list[Message]]:
    """Open a session, go on with it, and return its history, a state and its context."""
    async with perdure.connect(url) as sessions, sessions.open("ada") as ada:
        async with ada.turn():
            ada.append(Message.user("still there?"))
        texts = [one.value.text for one in await ada.history() if isinstance(one.value, Message)]
        return texts, await ada.state.get("mood"), list(ada.context())


def test_the_cure_that_a_damaged_log_names_works(
    command: Command, damaged: Damaged, tmp_path: Path
) -> None:
    url, damage = damaged
    damage(b"question 1")
    store = ("--store", url)
    for tokens in (("show", "ada"), ("rebuild", "ada"), ("export", "ada")):
        refused = command(*tokens, *store)
        assert refused.status == 1
        assert re.search(r"`perdure export (ID|ada) --salvage --out FILE`", refused.err)
    out = tmp_path / "left.jsonl"
    ran = command("export", "ada", "--salvage", "--out", str(out), *store)
    assert (ran.status, ran.err) == (0, "")
    assert re.search(r"MISSING: records? \d+", ran.out)
    cure = re.search(r"`perdure (import .+) --store NEW`", ran.out)
    assert cure is not None
    new = str(tmp_path / "new")
    assert command(*cure[1].split(), "--store", new).status == 0
    texts, mood, context = anyio.run(_load, new)
    assert "question 1" not in texts
    for text in ("question 0", "answer 0", "question 2", "answer 2", "It is 5.", "still there?"):
        assert text in texts
    assert mood == {"is": "good"}  # what was folded is not lost with the record
    assert [one.text for one in context][-1] == "still there?"
    shown = command("show", "ada", "--store", new)
    assert "missing" in shown.out
    checked = command("check", "--store", new)
    assert (checked.status, "were lost to damage" in checked.out) == (0, True)


def test_what_is_missing_is_told_in_json(
    command: Command, damaged: Damaged, tmp_path: Path
) -> None:
    url, damage = damaged
    damage(b"question 1")
    tokens = ("export", "ada", "--salvage", "--out", str(tmp_path / "left"), "--store", url)
    told = command(*tokens, "--json").json
    [run] = told["missing"]
    assert run["first"] <= run["last"] < told["head"]
    assert (told["whole"], told["lost_documents"], told["lost_blobs"]) == (False, [], [])
    assert told["bytes"] == (tmp_path / "left").stat().st_size
    assert "session.json" in told["documents"]


def test_a_sound_session_is_salvaged_whole(
    command: Command, damaged: Damaged, tmp_path: Path
) -> None:
    url, _ = damaged
    store = ("--store", url)
    told = command("export", "ada", "--salvage", "--out", str(tmp_path / "a"), *store, "--json")
    assert (told.json["whole"], told.json["missing"]) == (True, [])
    command("export", "ada", "--layout", "bundle", "--out", str(tmp_path / "b"), *store)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_two_damaged_places_lose_only_themselves(
    command: Command, damaged: Damaged, tmp_path: Path
) -> None:
    url, damage = damaged
    damage(b"question 0")
    damage(b"question 2")
    out, new = str(tmp_path / "left"), str(tmp_path / "new")
    told = command("export", "ada", "--salvage", "--out", out, "--store", url, "--json").json
    assert len(told["missing"]) == 2
    assert command("import", out, "--store", new).status == 0
    texts, _, _ = anyio.run(_load, new)
    assert {"question 1", "answer 1", "sum it up"} <= set(texts)


def test_a_call_whose_result_is_lost_counts_as_interrupted(
    command: Command, damaged: Damaged, tmp_path: Path
) -> None:
    url, damage = damaged
    damage(b"five letters")
    out, new = str(tmp_path / "left"), str(tmp_path / "new")
    command("export", "ada", "--salvage", "--out", out, "--store", url)
    # Under another id the documents, which know the result, are made anew from the log.
    assert command("import", out, "--id", "eve", "--store", new).status == 0

    async def context() -> list[dict[str, Any]]:
        async with perdure.connect(new) as sessions, sessions.open("eve") as eve:
            return eve.context("openai")

    messages = anyio.run(context)
    called = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    answered = {message["tool_call_id"] for message in messages if message["role"] == "tool"}
    # A row of SQLite's is one save: the call is lost with its result.
    assert called == answered == (set() if url.startswith("sqlite") else {"c1"})
    assert "five letters" not in str(messages)


def test_an_encrypted_session_is_salvaged_with_its_key(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_KEY", KEY)
    folder = tmp_path / "store"
    url = f"encrypted+{folder.as_uri()}"
    anyio.run(_fill, url)
    [log] = (folder / "agents" / "ada" / "log").glob("*.jsonl")
    lines = log.read_bytes().split(b"\n")
    lines[5] = lines[5].replace(b'"r":"', b'"r":"x', 1)
    log.write_bytes(b"\n".join(lines))
    out = str(tmp_path / "left")
    told = command("export", "ada", "--salvage", "--out", out, "--store", url, "--json").json
    assert [(run["first"], run["last"]) for run in told["missing"]] == [(6, 6)]
    new = str(tmp_path / "new")
    assert main(["import", out, "--store", new]) == 0
    texts, mood, _ = anyio.run(_load, new)
    assert ("answer 0" in texts, "answer 2" in texts, mood) == (True, True, {"is": "good"})


def test_a_lost_beginning_and_a_lost_file_are_passed_over(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "store"

    async def open_thrice() -> None:
        for number in range(3):
            async with perdure.connect(folder) as sessions, sessions.open("ada") as ada:
                ada.append(Message.user(f"question {number}"))

    anyio.run(open_thrice)
    files = sorted((folder / "agents" / "ada" / "log").glob("*.jsonl"))
    assert len(files) == 3
    files[0].write_bytes(b"x" + files[0].read_bytes()[1:])  # its first line names the session
    files[1].unlink()
    store = ("--store", str(folder))
    out, new = str(tmp_path / "left"), str(tmp_path / "new")
    told = command("export", "ada", "--salvage", "--out", out, *store, "--json").json
    assert told["missing"]
    assert command("import", out, "--store", new).status == 0
    texts, _, _ = anyio.run(_load, new)
    assert "question 2" in texts
    assert "question 1" not in texts


def test_a_file_of_another_session_is_passed_over(command: Command, tmp_path: Path) -> None:
    """Its records would come out as this session's, and in the place of some of its own."""
    folder = tmp_path / "store"

    async def open_both() -> None:
        for number in range(3):
            async with perdure.connect(folder) as sessions:
                async with sessions.open("bob") as bob, sessions.open("ada") as ada:
                    bob.append(Message.user(f"a secret {number}"))
                    ada.append(Message.user(f"question {number}"))
                    ada.append(Message.assistant(f"answer {number}"))

    anyio.run(open_both)
    agents = folder / "agents"
    (agents / "ada/log/2-0.jsonl").write_bytes((agents / "bob/log/2-0.jsonl").read_bytes())
    store = ("--store", str(folder))
    assert "belongs to session bob, not to ada" in command("export", "ada", *store).err
    out, new = str(tmp_path / "left"), str(tmp_path / "new")
    told = command("export", "ada", "--salvage", "--out", out, *store, "--json").json
    assert [(run["first"], run["last"]) for run in told["missing"]] == [(4, 6)]
    assert command("import", out, "--store", new).status == 0
    texts, _, _ = anyio.run(_load, new)
    assert texts == ["question 0", "answer 0", "question 2", "answer 2", "still there?"]
