"""Opening a session whose log is damaged: raise, or begin anew beside the evidence (S2-21)."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import perdure
from perdure import ConfigError, CorruptRecordError, Message, Shutdown
from perdure.agent import Agent, AgentConfig, AgentFactory, EchoModel
from perdure.cli import main
from perdure.records.keys import SessionKey
from perdure.store import Held, Taken, Terms
from perdure.stores import EncryptedStore, MasterKeys
from perdure.stores.delegate import DelegatingStore
from perdure.stores.file import FileStore

QUIET = Shutdown(signals=False)


def connected(store: Any) -> perdure.SessionManager:
    return perdure.connect(store, shutdown=QUIET, autosave=None)


def flipped(path: Path, said: bytes = b"before") -> bytes:
    """Flip a bit in the first record that says something, and return the file's bytes."""
    data = bytearray(path.read_bytes())
    data[data.index(said)] ^= 1
    path.write_bytes(data)
    return bytes(data)


def texts(session: perdure.Session) -> list[str]:
    return [message.text for message in session.context()]


async def killed(tmp_path: Path, place: Any, store: Any) -> None:
    """Leave in a place what a process that was killed leaves of a session in a store."""
    async with connected(store) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("before"), Message.assistant("what was said"))
            await session.save()
            session.append(Message.user("second"))
            await session.save()
            shutil.copytree(tmp_path / "first", place)


async def damaged(tmp_path: Path) -> bytes:
    """Make a store of files with a session whose log is damaged, and return the log's bytes."""
    await killed(tmp_path, tmp_path / "store", tmp_path / "first")
    (log,) = (tmp_path / "store" / "agents" / "ada" / "log").glob("*.jsonl")
    return flipped(log)


async def ran(*arguments: object) -> int:
    """Run a command of perdure's, in a thread."""
    return await anyio.to_thread.run_sync(main, [str(argument) for argument in arguments])


async def test_a_damaged_log_is_set_aside_and_a_new_one_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """S2-21: a warning and a fresh start, and the evidence stays, to the byte."""
    data = await damaged(tmp_path)
    store = tmp_path / "store"
    quarantine = store / "agents" / "ada" / "quarantine"
    async with connected(store) as sessions:
        for _ in range(2):
            with pytest.raises(CorruptRecordError, match="open it with on_damage='fresh'"):
                await sessions.open("ada")
        with caplog.at_level(logging.WARNING, "perdure"):
            async with sessions.open("ada", on_damage="fresh") as session:
                assert session.context() == []
                assert "a damaged log of" in str(session.restore_report)
                assert str(quarantine) in str(session.restore_report)
                session.append(Message.user("anew"))
        health = sessions.health()
        assert health.status == "ok"
        assert str(quarantine) in health.set_aside["ada"]
    assert "damaged, and was set aside" in caplog.text
    assert data in [path.read_bytes() for path in quarantine.glob("*.damaged")]
    # Later opens continue the new one, with the option and without, and name the evidence.
    for options in ({}, {"on_damage": "fresh"}):
        async with connected(store) as sessions, sessions.open("ada", **options) as session:
            assert texts(session) == ["anew"]
            assert "a damaged log of" in str(session.restore_report)
            assert "a damaged log of" in sessions.health().set_aside["ada"]
    assert await ran("check", "--store", store) == 1
    assert "a damaged log of" in capsys.readouterr().out
    assert await ran("check", "--store", store, "--repair") == 0
    assert await ran("check", "--store", store) == 0
    async with connected(store) as sessions, sessions.open("ada"):
        assert sessions.health().set_aside == {}
    assert data in [path.read_bytes() for path in quarantine.iterdir()]


async def test_what_was_set_aside_can_still_be_salvaged(tmp_path: Path) -> None:
    await damaged(tmp_path)
    async with connected(tmp_path / "store") as sessions:
        await sessions.open("ada", on_damage="fresh")
    copy = tmp_path / "copy" / "agents" / "ada" / "log"
    copy.mkdir(parents=True)
    for path in (tmp_path / "store" / "agents" / "ada" / "quarantine").glob("*.damaged"):
        (copy / f"{path.stem}.jsonl").write_bytes(path.read_bytes())
    bundle = tmp_path / "left.jsonl"
    await ran("export", "ada", "--salvage", "--store", tmp_path / "copy", "--out", bundle)
    assert "what was said" in bundle.read_text()


async def test_deleting_the_session_removes_what_was_set_aside(tmp_path: Path) -> None:
    await damaged(tmp_path)
    async with connected(tmp_path / "store") as sessions:
        await sessions.open("ada", on_damage="fresh")
        assert list(sessions.health().set_aside) == ["ada"]
        await sessions.delete("ada")
        assert sessions.health().set_aside == {}
    left = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert not [path for path in left if b"what was said" in path.read_bytes()]


async def test_a_renamed_session_has_nothing_set_aside_under_its_old_name(tmp_path: Path) -> None:
    await damaged(tmp_path)
    async with connected(tmp_path / "store") as sessions:
        async with sessions.open("ada", on_damage="fresh") as session:
            session.append(Message.user("anew"))
        await sessions.rename("ada", "eve")
        assert sessions.health().set_aside == {}


async def test_what_is_sound_is_never_set_aside(tmp_path: Path) -> None:
    async with connected(tmp_path) as sessions:
        async with sessions.open("ada", on_damage="fresh") as session:
            session.append(Message.user("one"))
    async with connected(tmp_path) as sessions:
        async with sessions.open("ada", on_damage="fresh") as session:
            assert texts(session) == ["one"]
    assert not (tmp_path / "agents" / "ada" / "quarantine").exists()


async def test_posts_wait_for_the_new_one(tmp_path: Path) -> None:
    await damaged(tmp_path)
    async with connected(tmp_path / "store") as sessions:
        await sessions.post("ada", Message.user("posted"))
        async with sessions.open("ada", on_damage="fresh") as session:
            while not session.context():
                await anyio.sleep(0)
            assert texts(session) == ["posted"]


async def test_an_encrypted_session_begins_anew_with_a_key_of_its_own(tmp_path: Path) -> None:
    keys = MasterKeys(MasterKeys.new())

    def store(name: str) -> EncryptedStore:
        return EncryptedStore(FileStore(tmp_path / name), keys)

    await killed(tmp_path, tmp_path / "store", store("first"))
    (log,) = (tmp_path / "store" / "agents" / "ada" / "log").glob("*.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"A", b"B")
    log.write_bytes(b"".join(lines))
    for expected in ([], ["anew"]):
        async with connected(store("store")) as sessions:
            async with sessions.open("ada", on_damage="fresh") as session:
                assert texts(session) == expected
                session.append(*([] if expected else [Message.user("anew")]))


async def test_an_agent_starts_beside_the_damaged_log(tmp_path: Path) -> None:
    """S2-21: no crash."""
    await damaged(tmp_path)
    async with connected(tmp_path / "store") as sessions:
        with pytest.raises(CorruptRecordError):
            await Agent.create("ada", model=EchoModel(), sessions=sessions)
        config = AgentConfig(name="ada", model=EchoModel(), on_damage="fresh")
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            assert await agent.ask("hello") == "You said: hello"
            assert "a damaged log of" in str(agent.restore_report)
        async with Agent.create("ada", config=config, sessions=sessions) as agent:
            assert texts(agent.session) == ["hello", "You said: hello"]


class Deaf(DelegatingStore):
    """A store that cannot set a log aside."""

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        return await super().acquire(key, msgspec.structs.replace(terms, set_aside=False))


async def test_another_store_raises_as_before(tmp_path: Path) -> None:
    await damaged(tmp_path)
    async with connected(Deaf(FileStore(tmp_path / "store"))) as sessions:
        for _ in range(2):
            with pytest.raises(CorruptRecordError, match="cannot set the log aside.*on_damage"):
                await sessions.open("ada", on_damage="fresh")


@pytest.mark.parametrize(
    "options", [{"on_damage": "ignore"}, {"on_damage": "fresh", "strict": True}]
)
async def test_an_option_that_does_not_fit_is_refused(options: Any) -> None:
    async with connected("memory:") as sessions:
        with pytest.raises(ConfigError, match="on_damage"):
            await sessions.open("ada", **options)
