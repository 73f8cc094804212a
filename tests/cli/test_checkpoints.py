"""The commands about checkpoints."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Shutdown
from perdure.records.checkpoints import ExplicitState
from tests.cli.conftest import Command
from tests.cli.test_lives import go_on, said


@pytest.fixture
def at(store: Path) -> tuple[str, str]:
    return ("--store", str(store))


def test_checkpoints_are_made_listed_compared_and_gone_back_to(
    command: Command, store: Path, at: tuple[str, str]
) -> None:
    assert command("checkpoints", "ada", *at).out == "no checkpoints\n"
    then = said(store, "ada")
    made = command("checkpoints", "ada", "--create", "before", *at)
    assert (made.status, "before" in made.out) == (0, True)
    go_on(store, "ada", "and now?")
    answer = command("checkpoints", "ada", "--create", "after", "--json", *at).json
    assert [one["label"] for one in answer["checkpoints"]] == ["before", "after"]
    assert 'and now?"' in command("diff", "ada", "1", "2", *at).out
    assert command("diff", "ada", "2", "2", *at).out == "no difference\n"
    assert len(command("diff", "ada", "2", "1", "--json", *at).json["removed"]) == 1

    back = command("rollback", "ada", "1", *at)
    assert back.status == 0, back.err
    assert "checkpoint 3 now" in back.out
    assert said(store, "ada") == then
    assert command("rollback", "ada", "2", "--json", *at).json["to"]["label"] == "after"
    assert said(store, "ada") == [*then, "and now?"]

    verified = command("checkpoints", "ada", "--verify", "--keep", "2", *at)
    assert verified.status == 0
    assert "2 checkpoints and 2 pruned ones: 0 problems" in verified.out
    checked = command("check", "--json", *at)
    assert checked.json["problems"] == 0, checked.out


def test_a_fork_begins_at_a_checkpoint(command: Command, store: Path, at: tuple[str, str]) -> None:
    then = said(store, "ada")
    command("checkpoints", "ada", "--create", "here", *at)
    go_on(store, "ada", "more")
    assert command("fork", "ada", "eve", "--at-checkpoint", "1", *at).status == 0
    assert said(store, "eve") == then
    both = command("fork", "ada", "joe", "--at", "5", "--at-checkpoint", "1", *at)
    assert (both.status, "one of them" in both.err) == (2, True)


def test_what_is_not_there_is_said(command: Command, at: tuple[str, str]) -> None:
    assert "no checkpoint 7" in command("rollback", "ada", "7", *at).err
    assert "no checkpoint 7" in command("fork", "ada", "eve", "--at-checkpoint", "7", *at).err
    assert "no session nobody" in command("checkpoints", "nobody", *at).err
    assert command("diff", "ada", "1", "2", *at).status == 1


def test_what_was_lost_is_named(command: Command, store: Path, at: tuple[str, str]) -> None:
    """S3-G3: payloads are verified, too; what does not fit is named, and the status says so."""

    async def give() -> str:
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("ada") as session:
                made = await session.checkpoints.create("given", {"text": "x" * 5000})
                assert isinstance(made.state, ExplicitState)
                return made.state.root

    root = anyio.run(give)
    assert command("checkpoints", "ada", "--verify", *at).status == 0
    (blob,) = (path for path in store.rglob(root) if path.is_file())
    blob.unlink()
    found = command("checkpoints", "ada", "--verify", *at)
    assert found.status == 1
    assert f"checkpoint 1: a part of the state is lost: blob {root}" in found.out
    assert root in command("rollback", "ada", "1", *at).err
