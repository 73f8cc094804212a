"""States in a folder, for an agent without a session."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from perdure import ConfigError, CorruptRecordError, NotStorableError, PersistentState

KEYS = ["tasks", "My Tasks", "../x", "a/b", "/etc/passwd", "CON", "ä", "x" * 900, ".", ".."]


async def test_a_state_is_a_file_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-13: $AGENT_STATE_DIR/{key}.json."""
    monkeypatch.setenv("AGENT_STATE_DIR", str(tmp_path / "state"))
    states = PersistentState()
    assert await states.load_state("tasks", default=[]) == []
    assert await states.list_state_keys() == []
    assert not await states.delete_state("tasks")
    await states.save_state("tasks", {"open": [1, 2.5, None, "ä"]})
    assert json.loads((tmp_path / "state" / "tasks.json").read_text()) == {
        "open": [1, 2.5, None, "ä"]
    }
    assert await PersistentState().load_state("tasks") == {"open": [1, 2.5, None, "ä"]}
    assert await states.delete_state("tasks")
    assert await states.load_state("tasks") is None


@pytest.mark.parametrize("key", KEYS)
async def test_no_key_leads_out_of_the_folder(tmp_path: Path, key: str) -> None:
    """S4-G6: keys are encoded."""
    states = PersistentState(tmp_path / "state")
    if key.startswith("/") or len(key) > 150:
        with pytest.raises(ConfigError, match="invalid key"):
            await states.save_state(key, 1)
        return
    await states.save_state(key, key)
    assert await states.load_state(key) == key
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "state"]


async def test_no_two_keys_are_one_file(tmp_path: Path) -> None:
    """S4-G6: nor on a disk that ignores case."""
    states = PersistentState(tmp_path)
    keys = ["a", "A", "a/b", "a_b", "a=2fb", "é", "e\u0301"]
    for key in keys:
        await states.save_state(key, key)
    assert [await states.load_state(key) for key in keys] == keys
    assert len({path.name.lower() for path in tmp_path.glob("*.json")}) == len(keys)
    assert await states.list_state_keys() == sorted(keys)


async def test_the_name_of_the_config_is_reserved(tmp_path: Path) -> None:
    """S4-G6: a state cannot overwrite the config."""
    (tmp_path / "_persistence.json").write_text("{}")
    states = PersistentState(tmp_path)
    with pytest.raises(ConfigError, match="reserved"):
        await states.save_state("_persistence", {})
    assert await states.list_state_keys() == []


async def test_a_damaged_state_is_said_and_left(tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_bytes(b"{")
    with pytest.raises(CorruptRecordError, match=r"tasks\.json is damaged"):
        await PersistentState(tmp_path).load_state("tasks")
    assert (tmp_path / "tasks.json").read_bytes() == b"{"


async def test_what_is_not_json_is_refused(tmp_path: Path) -> None:
    states = PersistentState(tmp_path)
    await states.save_state("tasks", 1)
    for value in (b"x", object(), float("inf"), threading.Lock()):
        with pytest.raises(NotStorableError):
            await states.save_state("tasks", value)
    assert await states.load_state("tasks") == 1


async def test_a_key_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """S4-G6: half of a pair, as a broken decoder leaves it."""
    with pytest.raises(ConfigError, match="surrogate"):
        await PersistentState(tmp_path).save_state("a\ud800", 1)
    assert list(tmp_path.iterdir()) == []


async def test_a_pipe_that_lies_there_keeps_nobody_waiting(tmp_path: Path) -> None:
    """S4-G6: what runs in the sandbox can make one."""
    os.mkfifo(tmp_path / "tasks.json")
    with pytest.raises(CorruptRecordError, match=r"tasks\.json"):
        await PersistentState(tmp_path).load_state("tasks")
