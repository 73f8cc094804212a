from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.config.conftest import SEED
from tests.examples.test_examples import ROOT, Shell


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "home")


def test_gus_keeps_its_user_and_begins_its_sessions_anew(shell: Shell, tmp_path: Path) -> None:
    """S4-18: the user's id is preserved, the session's regenerated, and a service is keyed by both."""
    assert (ROOT / "examples" / "gus" / "persistence.yaml").read_text() == SEED
    memory = str(tmp_path / "memory.json")

    def run(*arguments: str) -> list[str]:
        return shell.run("gus/gus.py", "--memory", memory, *arguments)

    first, hello = run("My name is Captain")
    ids = first.partition(", run ")[0]
    assert hello.endswith(
        "This is turn 1 of our talk. Hello, Captain: you have told me 0 things before."
    )
    assert run("Who am I?") == [
        f"{ids}, run 2",
        "This is turn 2 of our talk. Hello, Captain: you have told me 1 things before.",
    ]
    other, hello = run("--session", "work", "Who am I?")
    assert hello == "This is turn 1 of our talk. Hello, Captain: you have told me 2 things before."
    user, _, session = ids.partition(" in ")
    assert user.startswith("gus::")
    assert other.startswith(f"{user} in gus-")
    assert session not in other
    facts = json.loads(Path(memory).read_text())
    assert {fact["user"] for fact in facts} == {user}
    assert len({fact["session"] for fact in facts}) == 2
