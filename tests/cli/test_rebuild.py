from __future__ import annotations

from pathlib import Path

import anyio

import perdure
from perdure import Message, Shutdown
from tests.cli.conftest import Command


def test_rebuild_makes_every_document_anew(command: Command, store: Path) -> None:
    folder = store / "agents" / "ada"
    kept = {name: (folder / name).read_bytes() for name in ("memory.json", "state/mood.json")}
    for name in (*kept, "session.json", "working_context_snapshot.json"):
        (folder / name).write_text("damaged")
    ran = command("rebuild", "ada", "--store", str(store))
    assert ran.status == 0, ran.err
    assert ran.out.startswith("ada: ")
    assert "rebuilt memory.json, session.json, state/mood.json, working_context_snapshot" in ran.out
    assert {name: (folder / name).read_bytes() for name in kept} == kept
    assert command("check", "--store", str(store)).status == 0


def test_a_dry_run_says_what_is_wrong_and_changes_nothing(command: Command, store: Path) -> None:
    document = store / "agents" / "ada" / "memory.json"
    document.write_text("damaged")
    answer = command("rebuild", "ada", "--dry-run", "--store", str(store), "--json").json
    assert answer["wrong"] == ["memory.json is lost, or not what its manifest says"]
    assert answer["rebuilt"] == []
    assert document.read_text() == "damaged"
    out = command("rebuild", "ada", "--dry-run", "--store", str(store)).out
    assert out.endswith("1 of its documents would be rebuilt; nothing was changed\n")


def test_a_rebuilt_session_opens_and_goes_on(command: Command, store: Path) -> None:
    (store / "agents" / "ada" / "working_context_snapshot.json").unlink()
    assert command("rebuild", "ada", "--store", str(store)).status == 0

    async def go_on() -> None:
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("ada") as ada:
                assert ada.restore_report.source in {"snapshot", "catch_up"}
                assert ada.context()[-1].text == "It is 5."
                ada.append(Message.user("And 3 + 4?"))
            view = await sessions.load("ada")
            assert view is not None
            assert await view.memory.get("favorite") == 5

    anyio.run(go_on)
    assert command("check", "--store", str(store)).status == 0


def test_rebuild_refuses_a_session_in_use(command: Command, store: Path) -> None:
    async def held() -> None:
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("ada"):
                ran = await anyio.to_thread.run_sync(
                    lambda: command("rebuild", "ada", "--store", str(store))
                )
                assert ran.status == 1
                assert "is held by process" in ran.err

    anyio.run(held)


def test_rebuild_of_an_unknown_id_says_so(command: Command, store: Path) -> None:
    assert "there is no session nobody" in command("rebuild", "nobody", "--store", str(store)).err


def test_a_fork_is_rebuilt_with_the_history_that_it_shares(command: Command, store: Path) -> None:
    async def fork() -> None:
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            await sessions.fork("ada", "fork")
            async with sessions.open("fork") as session:
                session.append(Message.user("by itself"))

    anyio.run(fork)
    assert command("check", "fork", "--store", str(store)).status == 0
    before = command("show", "fork", "--store", str(store)).out
    (store / "agents" / "fork" / "working_context_snapshot.json").write_text("damaged")
    assert command("rebuild", "fork", "--store", str(store)).status == 0
    assert command("check", "fork", "--store", str(store)).status == 0
    after = command("show", "fork", "--store", str(store)).out
    assert "by itself" in after
    assert after.splitlines()[-3:] == before.splitlines()[-3:]
