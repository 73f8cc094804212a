"""An encrypted store that is looked at without its key is refused, and not taken for damaged."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Message
from perdure.stores import MasterKeys
from tests.cli.conftest import Command

COMMANDS = [
    ["ls"],
    ["show", "ada"],
    ["export", "ada"],
    ["check"],
    ["check", "--gc", "--grace", "0"],
    ["check", "--repair"],
    ["rebuild", "ada"],
    ["prune", "--keep-turns", "0"],
    ["forget", "ada"],
    ["fork", "ada", "eve"],
    ["copy", "ada", "eve"],
    ["rename", "ada", "eve"],
]


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_an_encrypted_store_is_not_changed_without_its_key(
    tenant: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_KEY", MasterKeys.new())
    place = tmp_path / "store"
    url = f"encrypted+file:{place}"

    async def used(*texts: str) -> list[str]:
        async with perdure.connect(url) as sessions:
            async with sessions.open("ada", tenant=tenant) as ada:
                for text in texts:
                    ada.append(Message.user(text))
                    ada.memory.set("large", text * 1000)
                await ada.save()
                return [message.text for message in ada.context()]

    assert anyio.run(used, "Hello") == ["Hello"]
    before = {path: path.read_bytes() for path in place.rglob("*.json*")}
    for tokens in COMMANDS:
        ran = command(*tokens, "--tenant", tenant, "--store", f"file:{place}")
        assert ran.status == 2, tokens
        assert "is encrypted: put encrypted+ before its URL" in ran.err
    assert {path: path.read_bytes() for path in place.rglob("*.json*")} == before
    checked = command("check", "--tenant", tenant, "--store", url)
    assert checked.status == 0, checked.out
    assert anyio.run(used, "Again") == ["Hello", "Again"]


def test_a_session_whose_key_is_gone_does_not_end_the_check_of_the_others(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_KEY", MasterKeys.new())
    url = f"encrypted+file:{tmp_path / 'store'}"

    async def write() -> None:
        async with perdure.connect(url) as sessions:
            for agent in ("ada", "bob"):
                async with sessions.open(agent) as session:
                    session.append(Message.user("Hello"))

    anyio.run(write)
    folder = tmp_path / "store" / "agents" / "ada"
    for path in (*folder.glob("manifest-*.json"), *folder.glob("keys/*")):
        path.unlink()
    checked = command("check", "--store", url)
    assert checked.status == 1, checked
    assert "ada: PROBLEM: key: session ada has records and no key" in checked.out
    assert "2 sessions with" in checked.out
    assert command("check", "bob", "--store", url).status == 0
    monkeypatch.setenv("PERDURE_KEY", MasterKeys.new())
    assert command("check", "--store", url).status == 2  # another key: nothing is said of any
