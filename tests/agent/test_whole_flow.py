"""A persistent agent from end to end, on the files of its own folder (S2-32)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import Autosave, Message, Shutdown
from perdure.agent import Agent, EchoModel, Features, PersistentSession, ScriptedModel, call
from perdure.formats import FolderStorage
from perdure.lease import LeaseOptions
from perdure.session.manager import SessionManager
from perdure.session.options import Limits
from perdure.stores.memory import MemoryStore
from perdure.testing import ManualClock
from tests.session.test_contributors import Counter


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


async def test_a_second_run_has_the_whole_context_of_the_first(home: Path) -> None:
    """S2-2, S2-4, S2-31, S2-32: one folder an agent; the context is there once it is made."""
    features = Features(in_context_memory=True)
    script = ScriptedModel(call("note_set", key="color", value="blue"), "Noted.")
    async with Agent.create(
        "my-assistant", model=script, persistent_session=True, features=features
    ) as agent:
        await agent.ask("Hello!")
        agent.working_memory.set("likes", ["tea"])
        agent.session.describe(title="Mine")
    folder = home / "agents" / "my-assistant"
    for name in ("session.json", "memory.json", "plugins/in_context_memory.json"):
        assert (folder / name).is_file(), name
    async with Agent.create(
        "my-assistant", model=EchoModel(), persistent_session=True, features=features
    ) as agent:
        texts = [one.text for one in agent.session.context()]
        assert (texts[0], texts[-1]) == ("Hello!", "Noted.")
        assert await agent.working_memory.get("likes") == ["tea"]
        assert agent.notes is not None
        assert agent.notes.get("color") == "blue"
        assert agent.session.info.metadata.title == "Mine"


async def test_no_id_leads_out_of_its_folder_or_into_anothers(home: Path) -> None:
    """S2-27: ids are kept apart, whatever they are made of."""
    ids = ["A/b", "a/b", "a_b", "A_b", "../up", "CON", "a b"]
    for id in ids:
        async with Agent.create(id, model=EchoModel(), persistent_session=True) as agent:
            await agent.ask(f"I am {id}")
    for id in ids:
        async with Agent.create(id, model=EchoModel(), persistent_session=True) as agent:
            assert agent.session.context()[0].text == f"I am {id}"
    assert len(list((home / "agents").iterdir())) == len(ids)
    assert {path.name for path in home.parent.iterdir()} == {"home"}


async def test_a_cache_is_kept_only_by_a_contributor_that_keeps_it(home: Path) -> None:
    """S2-12b: no cache of calls is stored by itself."""

    async def add(a: int, b: int) -> int:
        return a + b

    script = ScriptedModel(call("add", a=1, b=2), "Three.", "Yes.")
    async with Agent.create("ada", model=script, tools=[add], persistent_session=True) as agent:
        await agent.ask("hello")
    folder = home / "agents" / "ada"
    kept = {str(path.relative_to(folder)) for path in folder.rglob("*.json")}
    documents = {name for name in kept if not name.startswith(("manifest-", "lease-", "log/"))}
    assert documents == {
        *("session.json", "working_context_snapshot.json", "plugins/agent_config.json"),
    }
    async with Agent.create("ada", model=EchoModel(), persistent_session=True) as agent:
        await agent.session.attach(Counter("idempotency_cache", count=1))
    assert (folder / "plugins" / "idempotency_cache.json").is_file()


async def test_many_changes_are_one_save() -> None:
    """S2-25: a save comes when it has been quiet, not with every change."""
    clock = ManualClock()
    sessions = SessionManager(
        MemoryStore(),
        autosave=Autosave(debounce=2, max_delay=30),
        lease=LeaseOptions(),
        shutdown=Shutdown(signals=False),
        limits=Limits(),
        clock=clock,
    )
    async with sessions, sessions.open("a") as session:
        saves: list[Any] = []
        sessions.on("saved", saves.append)
        for n in range(10):
            session.append(Message.user(str(n)))
            await clock.advance(0.01)
        assert saves == []
        await clock.advance(3)
        assert [one.records for one in saves] == [10]


CALLS = ("open", "fsync", "fdatasync", "replace", "rename", "unlink", "listdir")


async def test_the_loops_own_thread_touches_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2-26: whatever blocks is done in threads, in a store and in a folder of states."""
    mine = threading.get_ident()
    here: list[tuple[str, Any]] = []
    elsewhere: list[str] = []

    def recorded(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call_it(*args: Any, **options: Any) -> Any:
            if threading.get_ident() == mine:
                here.append((name, args[:1]))
            else:
                elsewhere.append(name)
            return act(*args, **options)

        return call_it

    for name in CALLS:
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    for storage in (tmp_path / "store", FolderStorage(tmp_path / "folder")):
        kept = PersistentSession(storage=storage)
        for _ in range(2):
            async with Agent.create("ada", model=EchoModel(), persistent_session=kept) as agent:
                await agent.ask("hello")
    assert {"open", "replace"} <= set(elsewhere)
    assert here == []
