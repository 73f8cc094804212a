"""What `ls` lists and chooses by: damaged or gone, and made anew from the sessions."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command


def ada(store: Path) -> Path:
    return store / "agents" / "ada"


def gone(store: Path) -> None:
    for path in (ada(store), store / "agents" / "bob"):
        for name in ("manifest-1.json", "session.json", "labels-1.json"):
            (path / name).unlink(missing_ok=True)


def damaged(store: Path) -> None:
    for name in ("manifest-1.json", "session.json", "labels-1.json"):
        (ada(store) / name).write_bytes(b"\xff{")


@pytest.mark.parametrize("spoil", [gone, damaged])
def test_the_listing_of_a_folder_is_made_anew(
    command: Command, store: Path, spoil: Callable[[Path], None]
) -> None:
    """S2-3: a damaged index hides no session, and one command mends it."""

    def listed(*tokens: str) -> list[tuple[Any, ...]]:
        found = command("ls", "--by-id", *tokens, "--store", store, "--json").json["sessions"]
        return [(one["agent"], one["turns"], one["title"], one["tags"]) for one in found]

    before = listed()
    assert before[0] == ("ada", 1, "Sums", ["x"])
    spoil(store)
    assert [agent for agent, *_ in listed()] == ["ada", "bob", "bob"]
    assert listed("--owner", "lovelace") == listed("--tag", "x") == []
    mended = command("check", "--repair", "--store", store, "--json").json
    assert mended["problems"] == 0
    # What is damaged is a finding, and mended as one; what is gone only the listing misses.
    assert sum(one["repaired"] for one in mended["sessions"]) == (1 if spoil is damaged else 0)
    assert mended["index"] == {"folded": 0 if spoil is damaged else 2, "entries": None}
    assert listed() == before
    assert listed("--owner", "lovelace") == listed("--tag", "x") == before[:1]
    again = command("check", "--repair", "--store", store)
    assert "index" not in again.out


def spoiled_rows(url: str) -> None:
    con = sqlite3.connect(url.removeprefix("sqlite:///"))
    con.execute("UPDATE manifest SET data = x'7b7d'")
    con.commit()
    con.close()


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_a_session_whose_manifest_is_damaged_is_listed_as_that_and_told_once(
    command: Command,
    store: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    url = str(store) if kind == "file" else f"sqlite:///{tmp_path}/kept/a.db"
    if kind == "sqlite":
        assert command("migrate", str(store), url).status == 0
        spoiled_rows(url)
    else:
        damaged(store)
    shown = command("show", "ada", "--store", url)
    assert shown.status == 0
    said = [one for one in caplog.records if "manifest of session ada is damaged" in one.message]
    assert len(said) == 1
    assert ("manifest-1.json" if kind == "file" else "a.db") in said[0].message
    listed = command("ls", "--store", url)
    assert listed.status == 0
    row = next(line for line in listed.out.splitlines() if line.startswith("ada"))
    assert row.split()[2] == "?"
    assert "`perdure check --repair` rebuilds it" in listed.out
    found = command("ls", "--store", url, "--json").json["sessions"]
    assert next(one["damaged"] for one in found if one["agent"] == "ada") is True
    assert command("check", "--repair", "--store", url).status == 0
    again = command("ls", "--store", url, "--json").json["sessions"]
    assert [one["damaged"] for one in again] == [False] * len(again)
