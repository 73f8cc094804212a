from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Message, Shutdown
from tests.cli.conftest import Command
from tests.golden.reader import GOLDEN, copy_of


def said(store: Path, id: str, session: str = "default") -> list[str]:
    async def look() -> list[str]:
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            view = await sessions.load(id, session=session)
            return [] if view is None else [message.text for message in view.context()]

    return anyio.run(look)


def go_on(store: Path, id: str, *texts: str) -> None:
    async def act() -> None:
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open(id) as session:
                for text in texts:
                    async with session.turn(id=text):
                        session.append(Message.user(text))

    anyio.run(act)


def test_fork_copy_and_rename(command: Command, store: Path) -> None:
    at = ("--store", str(store))
    ran = command("fork", "ada", "fork", *at)
    assert ran.status == 0, ran.err
    assert ran.out.startswith("fork continues after record ")
    assert said(store, "fork") == said(store, "ada")
    go_on(store, "ada", "more")
    answer = command("copy", "ada", "copy", "--json", *at).json
    assert (answer["agent"], answer["parent"]["agent"]) == ("copy", "ada")
    assert command("rename", "ada", "lovelace", *at).out == "lovelace was ada\n"
    assert said(store, "lovelace") == said(store, "copy")
    listed = command("ls", "--json", *at).json["sessions"]
    copied = {session["agent"]: session["copied_from"] for session in listed}
    assert copied == {"bob": None, "copy": "ada", "fork": "ada", "lovelace": "ada"}
    assert command("show", "copy", "--json", *at).json["copied_from"] == "ada"
    assert "  copy of   ada\n" in command("show", "copy", *at).out
    assert "copy of" not in command("show", "bob", *at).out
    assert said(store, "ada") == []
    assert command("fork", "lovelace", "x", "--at", "more", *at).status == 0
    assert command("fork", "lovelace", "y", "--at", "5", *at).status in (0, 2)
    assert command("fork", "lovelace", "light", "--history", "context", *at).status == 0
    assert said(store, "light") == said(store, "lovelace")
    assert "What is 2 + 3?" not in command("show", "light", "--log", *at).out
    for id in ("fork", "copy", "lovelace", "x"):
        shown = command("show", id, *at)
        assert shown.status == 0, shown.err
        assert "What is 2 + 3?" in shown.out
        assert "What is 2 + 3?" in command("show", id, "--log", *at).out
        assert command("export", id, *at).out.count("What is 2 + 3?") >= 1
    checked = command("check", "--json", *at)
    assert checked.json["problems"] == 0, checked.out
    assert command("rebuild", "fork", *at).status == 0
    go_on(store, "fork", "after the rebuild")
    assert said(store, "fork")[-1] == "after the rebuild"
    assert command("check", *at).status == 0


def test_what_cannot_be_forked_is_said(command: Command, store: Path) -> None:
    at = ("--store", str(store))
    ran = command("fork", "nobody", "new", *at)
    assert ran.status == 1
    assert ran.err.startswith(f"perdure: there is no session nobody in {store}: `perdure ls`")
    assert command("fork", "ada", "bob", *at).status == 1
    assert command("fork", "ada", "new", "--at", "no turn", *at).status == 2


def test_forget_says_what_goes_and_what_stays(command: Command, store: Path) -> None:
    at = ("--store", str(store))
    assert command("fork", "ada", "fork", *at).status == 0
    out = command("forget", "--owner", "lovelace", "--tag", "x", "--dry-run", *at).out
    assert "ada: would be forgotten\n" in out
    assert out.endswith("; nothing was removed\n")
    assert said(store, "ada")
    before = said(store, "fork")
    out = command("forget", "ada", *at).out
    assert "ada: forgotten\n" in out
    assert "fork: has a copy of what was forgotten: forget it, too" in out
    assert said(store, "ada") == []
    assert said(store, "fork") == before
    answer = command("forget", "bob", "--json", *at).json
    assert [key["session"] for key in answer["sessions"]] == ["default", "second"]
    assert command("forget", *at).status == 2


@pytest.mark.parametrize(
    ("typed", "more", "status", "goes"),
    [("n\n", (), 1, False), ("\n", (), 1, False), ("y\n", (), 0, True), ("", ("--yes",), 0, True)],
)
def test_forget_asks_a_person_first(
    store: Path, typed: str, more: tuple[str, ...], status: int, goes: bool
) -> None:
    words = [sys.executable, "-m", "perdure", "forget", "bob", "--json", "--store", str(store)]
    terminal, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*words, *more], stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, text=True
        )
        os.close(theirs)
        os.write(terminal, typed.encode())
        out, _ = process.communicate(timeout=60)
        shown = os.read(terminal, 10_000).decode() if typed else ""
    finally:
        os.close(terminal)
    assert process.returncode == status
    question = "forget 2 sessions (bob, bob/second)? This cannot be undone. [y/N]"
    assert (question in shown) == bool(typed)
    assert bool(out) == goes
    assert bool(said(store, "bob")) == (not goes)


def test_prune_lets_old_turns_and_unused_sessions_go(command: Command, store: Path) -> None:
    at = ("--store", str(store))
    go_on(store, "bob", "one", "two", "three")
    out = command("prune", "--keep-turns", "1", "--id", "bob", "--dry-run", *at).out
    assert out.startswith("bob: would be pruned: 2 turns up to record ")
    assert out.endswith("1 session pruned, 0 forgotten; nothing was removed\n")
    out = command("prune", "--keep-turns", "1", "--id", "bob", *at).out
    assert out.startswith("bob: pruned: 2 turns up to record ")
    assert said(store, "bob")[-3:] == ["one", "two", "three"]
    assert "two" not in command("show", "bob", "--log", *at).out
    assert command("check", *at).status == 0, command("check", *at).out
    assert command("rebuild", "bob", *at).status == 0
    assert said(store, "bob")[-3:] == ["one", "two", "three"]
    assert command("check", *at).status == 0
    assert command("prune", "--older-than", "90d", *at).out == "0 sessions pruned, 0 forgotten\n"
    assert command("prune", "--older-than", "0h", "--json", *at).json["expired"]
    assert said(store, "bob") == []


def test_prune_prunes_all_that_may_be_and_says_what_may_not(
    command: Command, tmp_path: Path
) -> None:
    at = ("--store", str(copy_of(GOLDEN, tmp_path)))
    ran = command("prune", "--keep-turns", "0", *at)
    assert ran.status == 1
    assert re.search(r"^\S+: pruned: ", ran.out, re.MULTILINE)
    assert re.search(r"^\S+: not pruned: .*perdure migrate", ran.out, re.MULTILINE)
    again = command("prune", "--keep-turns", "0", "--json", *at)
    assert again.status == 1
    assert [refusal for refusal in again.json["refused"] if "perdure migrate" in refusal["why"]]


@pytest.mark.parametrize("tokens", [(), ("--older-than", "soon"), ("--keep-turns", "-1")])
def test_a_retention_that_does_not_fit_is_said(
    command: Command, store: Path, tokens: tuple[str, ...]
) -> None:
    assert command("prune", *tokens, "--store", str(store)).status == 2
