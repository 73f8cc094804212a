"""What `ls` lists and chooses by: damaged or gone, and made anew from the sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command


def ada(store: Path) -> Path:
    return store / "agents" / "ada"


def gone(store: Path) -> None:
    for path in (ada(store), store / "agents" / "bob"):
        for name in ("manifest-1.json", "session.json"):
            (path / name).unlink()


def damaged(store: Path) -> None:
    for name in ("manifest-1.json", "session.json"):
        (ada(store) / name).write_bytes(b"\xff{")


@pytest.mark.parametrize("spoil", [gone, damaged])
def test_the_listing_of_a_folder_is_made_anew(
    command: Command, store: Path, spoil: Callable[[Path], None]
) -> None:
    """S2-3: a damaged index hides no session, and one command mends it."""

    def listed(*tokens: str) -> list[tuple[Any, ...]]:
        found = command("ls", *tokens, "--store", store, "--json").json["sessions"]
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
