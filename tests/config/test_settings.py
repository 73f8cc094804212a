"""What a persistence.yaml says to ``connect``, and what comes before it."""

from __future__ import annotations

from pathlib import Path

import pytest

import perdure
import perdure.sync
from perdure import Autosave, ConfigError, Message, Shutdown
from perdure.config.persistent_config import anchored
from perdure.session.manager import SessionManager
from perdure.stores.wrapped import EncryptedStore, MasterKeys
from tests.config.conftest import AgentFolder

QUIET = Shutdown(signals=False)


async def autosave_of(sessions: SessionManager) -> Autosave | None:
    async with sessions:
        return sessions.autosave.setting


def connected(
    folder: AgentFolder, text: str, url: str | None = None, **options: object
) -> SessionManager:
    file = folder.declare(f"version: 1\n{text}")
    return perdure.connect(url, config=file, shutdown=QUIET, **options)  # type: ignore[arg-type]


async def said_in(sessions: SessionManager) -> list[str]:
    async with sessions, sessions.open("gus") as session:
        session.append(Message.user("Hello"))
        return [message.text for message in session.context()]


async def test_the_file_says_where_the_store_is(folder: AgentFolder) -> None:
    assert await said_in(connected(folder, "store: file:./kept\n")) == ["Hello"]
    assert (folder.path / "kept" / "agents" / "gus").is_dir()
    assert len(await said_in(connected(folder, "store: kept\n"))) == 2


async def test_arguments_come_first_then_the_environment_then_the_file(
    folder: AgentFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "store: ./file\nautosave: {debounce: 1, max_delay: 3, max_records: 7}\n"
    meant = Autosave(debounce=1.0, max_delay=3.0, max_records=7)
    assert await autosave_of(connected(folder, text, "memory:")) == meant
    monkeypatch.setenv("PERDURE_URL", str(tmp_path / "environment"))
    monkeypatch.setenv("PERDURE_AUTOSAVE_MAX_DELAY", "5")
    meant = Autosave(debounce=1.0, max_delay=5.0, max_records=7)
    assert await autosave_of(connected(folder, text)) == meant
    await said_in(connected(folder, text))
    monkeypatch.setenv("PERDURE_AUTOSAVE", "server")
    assert await autosave_of(connected(folder, text)) == Autosave(debounce=2.0, max_delay=5.0)
    given = Autosave(debounce=0.5)
    place = str(tmp_path / "argument")
    assert await autosave_of(connected(folder, text, place, autosave=given)) == given
    await said_in(connected(folder, text, place, autosave=given))
    assert {path.name for path in tmp_path.iterdir()} == {"gus", "environment", "argument"}
    assert not (folder.path / "file").exists()


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("server", Autosave.server()),
        ("write_through", Autosave.write_through()),
        ("default", Autosave()),
        ("off", None),
        ("{preset: server, debounce: 1}", Autosave(debounce=1.0, max_delay=10.0)),
        ("{on_turn_end: false}", Autosave(on_turn_end=False)),
    ],
)
async def test_autosave_is_a_preset_or_settings(
    folder: AgentFolder, said: str, meant: Autosave | None
) -> None:
    sessions = connected(folder, f"autosave: {said}\n", "memory:")
    assert await autosave_of(sessions) == meant


async def test_off_in_the_file_stays_off(
    folder: AgentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_AUTOSAVE_DEBOUNCE", "1")
    assert await autosave_of(connected(folder, "autosave: off\n", "memory:")) is None
    monkeypatch.setenv("PERDURE_AUTOSAVE", "server")
    switched_on = await autosave_of(connected(folder, "autosave: off\n", "memory:"))
    assert switched_on == Autosave(debounce=1.0, max_delay=10.0)


async def test_a_url_may_stand_in_a_variable(
    folder: AgentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="AGENTS_URL is not set"):
        connected(folder, "store: {url_env: AGENTS_URL}\n")
    monkeypatch.setenv("AGENTS_URL", str(folder.path / "there"))
    await said_in(connected(folder, "store: {url_env: AGENTS_URL}\n"))
    assert (folder.path / "there").is_dir()


@pytest.mark.parametrize("place", ["./kept", "encrypted+file:./kept", "file:kept?compression=zstd"])
async def test_what_the_file_wants_encrypted_is(
    folder: AgentFolder, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The key comes from a variable or a file, and never stands in persistence.yaml."""
    text = f"store: {place}\nencryption: {{key_env: AGENTS_KEY}}\n"
    with pytest.raises(ConfigError, match="AGENTS_KEY is not set"):
        connected(folder, text)
    key = MasterKeys.new()
    monkeypatch.setenv("AGENTS_KEY", key)
    assert await said_in(connected(folder, text)) == ["Hello"]
    stored = [path for path in (folder.path / "kept").rglob("*") if path.is_file()]
    assert stored
    assert not any(b"Hello" in path.read_bytes() for path in stored)
    (folder.path / "key").write_text(key)
    (folder.path / "key").chmod(0o600)
    by_file = text.replace("key_env: AGENTS_KEY", "key_file: key")
    assert len(await said_in(connected(folder, by_file))) == 2
    monkeypatch.setenv("PERDURE_KEY", MasterKeys.new())
    with pytest.raises(perdure.PerdureError):
        await said_in(connected(folder, by_file))


async def test_a_store_that_is_given_is_encrypted_once(
    folder: AgentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.stores.memory import MemoryStore

    monkeypatch.setenv("AGENTS_KEY", MasterKeys.new())
    text = "encryption: {key_env: AGENTS_KEY}\n"
    own = EncryptedStore(MemoryStore(), MasterKeys(MasterKeys.new()))
    for place in (MemoryStore(), own):
        assert await said_in(connected(folder, text, place)) == ["Hello"]  # type: ignore[arg-type]


def test_blocking_code_connects_with_a_file_as_well(folder: AgentFolder) -> None:
    file = folder.declare("version: 1\nstore: ./kept\nautosave: off\n")
    with perdure.sync.connect(config=file, shutdown=QUIET) as sessions:
        with sessions.open("gus") as session:
            session.append(Message.user("Hello"))
    assert (folder.path / "kept").is_dir()


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        perdure.connect(config=tmp_path / "persistence.yaml")


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("data", "/f/data"),
        ("./data", "/f/data"),
        ("/data", "/data"),
        ("~/data", "~/data"),
        ("file:data", "file:/f/data"),
        ("file:/data", "file:/data"),
        ("file:///data", "file:///data"),
        ("file:~/data", "file:~/data"),
        ("sqlite:///x.db", "sqlite:////f/x.db"),
        ("sqlite:////x.db", "sqlite:////x.db"),
        ("encrypted+file:data", "encrypted+file:/f/data"),
        ("redis://h/0", "redis://h/0"),
        ("postgresql:///d", "postgresql:///d"),
        ("memory:", "memory:"),
    ],
)
def test_paths_are_relative_to_the_files_folder(url: str, meant: str) -> None:
    assert anchored(url, Path("/f")) == meant


async def test_a_folder_may_have_a_colon_in_its_name(tmp_path: Path) -> None:
    file = tmp_path / "a:b" / "persistence.yaml"
    file.parent.mkdir()
    file.write_text("version: 1\nstore: ./sessions\n")
    assert await said_in(perdure.connect(config=file, shutdown=QUIET)) == ["Hello"]
    assert (file.parent / "sessions").is_dir()
