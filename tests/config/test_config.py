"""PersistentConfig on a folder, as the seed uses it."""

from __future__ import annotations

import datetime
import gc
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from perdure import (
    ConfigError,
    CorruptRecordError,
    LeaseHeldError,
    NotStorableError,
    StoreUnavailableError,
    TemplateError,
    TooLargeError,
    UnknownConfigKeyError,
    UnsupportedVersionError,
)
from perdure.config.locations import FolderPlace
from perdure.config.persistent_config import PersistentConfig, initial_values
from perdure.config.schema import ConfigKey
from tests.config.conftest import AgentFolder

ISO = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


async def test_the_seeds_example_works_word_for_word(folder: AgentFolder) -> None:
    """S4-1, S4-3, S4-4, S4-5, S4-9, S4-16: one file; a first run begins with what it says."""
    config = await PersistentConfig(folder.state, folder.yaml)
    assert re.fullmatch("gus::[0-9a-f]{8}", config.get("zep_user_id"))
    assert re.fullmatch(f"gus-{ISO}", config.get("zep_session_id"))
    assert config.get("user_name") is None
    assert config.get("theme") == "default"
    await config.set("user_name", "Captain")
    assert list(config.all()) == ["zep_user_id", "zep_session_id", "user_name", "theme"]
    assert config.all()["user_name"] == "Captain"


async def test_a_second_run_preserves_and_a_new_session_regenerates(folder: AgentFolder) -> None:
    """S4-6, S4-7, S4-G3: the session's id tells; a resumed one keeps what it has."""
    first = await PersistentConfig(folder.state, folder.yaml, session="1")
    await first.set("theme", "dark")
    again = await PersistentConfig(folder.state, folder.yaml, session="1")
    assert again.all() == first.all()
    new = await PersistentConfig(folder.state, folder.yaml, session="2")
    assert new.get("zep_session_id") != first.get("zep_session_id")
    assert {**new.all(), "zep_session_id": ""} == {**first.all(), "zep_session_id": ""}


async def test_each_load_is_a_new_session_where_nobody_names_it(folder: AgentFolder) -> None:
    """S4-6, S4-G3: and what was set by hand is regenerated, too."""
    config = await PersistentConfig(folder.state, folder.yaml)
    await config.set("zep_session_id", "mine")
    again = await PersistentConfig(folder.state, folder.yaml)
    assert re.fullmatch(f"gus-{ISO}", again.get("zep_session_id"))
    assert again.get("zep_user_id") == config.get("zep_user_id")


async def test_an_added_key_is_begun_and_a_removed_one_is_kept_aside(folder: AgentFolder) -> None:
    """S4-12, S4-G2: an orphan is hidden, stays in the file, and comes back when declared again."""
    before = folder.yaml.read_text()
    first = await PersistentConfig(folder.state, folder.yaml)
    await first.set("theme", "dark")
    folder.declare("version: 1\nconfig:\n  color: {init: blue}\n")
    changed = await PersistentConfig(folder.state, folder.yaml)
    assert changed.all() == {"color": "blue"}
    assert changed.get("theme", "none") == "none"
    stored = json.loads((folder.state / "_persistence.json").read_text())
    assert stored["orphans"]["theme"] == "dark"
    folder.declare(before)
    back = await PersistentConfig(folder.state, folder.yaml)
    assert back.get("theme") == "dark"
    assert back.get("zep_user_id") == first.get("zep_user_id")
    assert "color" not in back.all()


async def test_a_null_that_was_preserved_is_no_missing_value(folder: AgentFolder) -> None:
    """S4-7: what was begun with, or set to, null stays so, whatever the file says later."""
    await PersistentConfig(folder.state, folder.yaml)
    folder.declare("version: 1\nconfig:\n  user_name: {init: somebody}\n")
    config = await PersistentConfig(folder.state, folder.yaml)
    assert config.get("user_name") is None


async def test_a_key_has_a_value_or_is_only_declared(folder: AgentFolder) -> None:
    """S4-G5: null counts as not set."""
    config = await PersistentConfig(folder.state, folder.yaml)
    assert (config.has("user_name"), config.declared("user_name")) == (False, True)
    assert (config.has("nickname"), config.declared("nickname")) == (False, False)
    assert config.get("user_name", "you") == "you"
    await config.set("user_name", "Captain")
    assert config.has("user_name")
    await config.set("user_name", None)
    assert not config.has("user_name")


async def test_values_are_stored_in_the_folder_of_the_environment(
    folder: AgentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-11: $AGENT_STATE_DIR/_persistence.json."""
    monkeypatch.setenv("AGENT_STATE_DIR", str(folder.path / "elsewhere" / "deep"))
    config = await PersistentConfig(schema_path=folder.yaml)
    stored = json.loads((folder.path / "elsewhere" / "deep" / "_persistence.json").read_text())
    assert stored["values"] == config.all()
    monkeypatch.delenv("AGENT_STATE_DIR")
    with pytest.raises(ConfigError, match="AGENT_STATE_DIR"):
        await PersistentConfig(schema_path=folder.yaml)


async def test_a_key_that_is_not_declared_cannot_be_set(folder: AgentFolder) -> None:
    """S4-10: and it is a KeyError, too."""
    config = await PersistentConfig(folder.state, folder.yaml)
    with pytest.raises(UnknownConfigKeyError, match="'nickname' is not declared") as caught:
        await config.set("nickname", "A")
    assert isinstance(caught.value, KeyError)
    assert "nickname" not in (folder.state / "_persistence.json").read_text()


async def test_without_a_file_nothing_is_declared_and_nothing_written(folder: AgentFolder) -> None:
    """S4-1, S4-G1: zero configuration; strict unless somebody says otherwise."""
    config = await PersistentConfig(folder.state)
    assert config.all() == {}
    with pytest.raises(UnknownConfigKeyError, match="declares nothing"):
        await config.set("theme", "dark")
    assert not folder.state.exists()
    loose = await PersistentConfig(folder.state, strict=False)
    await loose.set("theme", "dark")
    again = await PersistentConfig(folder.state, strict=False)
    assert again.get("theme") == "dark"


async def test_the_file_beside_the_program_is_found(
    folder: AgentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-15: alongside the running code."""
    program = str(folder.path / "main.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", program, raising=False)
    config = await PersistentConfig(folder.state)
    assert config.declared("zep_user_id")


async def test_what_a_template_makes_is_made_once_each(folder: AgentFolder) -> None:
    """S4-5, S4-G9: each occurrence of a variable is made by itself, once."""
    folder.declare(
        "version: 1\nconfig:\n"
        "  a: {init: '{{random_id}} {{ random_id }}'}\n  b: {init: '{{ uuid }}'}\n"
    )
    config = await PersistentConfig(folder.state, folder.yaml)
    one, two = config.get("a").split()
    assert one != two
    assert re.fullmatch("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab]...-.{12}", config.get("b"))
    assert (await PersistentConfig(folder.state, folder.yaml)).all() == config.all()


def test_a_clock_and_chance_of_ones_own_make_the_values() -> None:
    """S4-G9: injectable."""
    noon = datetime.datetime(2026, 5, 4, 14, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    make = initial_values("gus", now=noon.timestamp, random=lambda size: bytes(range(size)))
    text = "{{agent_name}} {{ timestamp }} {{ random_id }} {{ uuid }}"
    made = "gus 2026-05-04T12:00:00.000Z 00010203 00010203-0405-4607-8809-0a0b0c0d0e0f"
    assert make(ConfigKey(name="k", init=text)) == made
    assert make(ConfigKey(name="k", init=7)) == 7


async def test_a_name_that_nobody_said_is_an_error_and_nothing_is_written(
    folder: AgentFolder,
) -> None:
    """S4-5: agent_name comes from agent.yaml."""
    (folder.path / "agent.yaml").unlink()
    with pytest.raises(TemplateError, match=r"agent\.yaml"):
        await PersistentConfig(folder.state, folder.yaml)
    assert not (folder.state / "_persistence.json").exists()
    config = await PersistentConfig(folder.state, folder.yaml, agent_name="ann")
    assert config.get("zep_user_id").startswith("ann::")


@pytest.mark.parametrize("about", ["name: [gus]\n", "name:\n", "- gus\n", "name: 7\n"])
async def test_a_name_that_is_none_is_refused(folder: AgentFolder, about: str) -> None:
    folder.name(about)
    with pytest.raises(ConfigError, match=r"agent\.yaml, line 1, column \d"):
        await PersistentConfig(folder.state, folder.yaml)


OTHERS = """\
base: &base {mode: 0755, size: 0x1f, at: !!timestamp 2026-05-04, deep: [[[[[[[[[[[[]]]]]]]]]]]]}
<<: *base
name: %s
model: {<<: *base, limit: .inf}
---
name: another
"""


@pytest.mark.parametrize("name", ["gus", "'gus'", "&me gus", "!!str gus"])
async def test_an_agent_yaml_may_say_the_rest_as_it_likes(folder: AgentFolder, name: str) -> None:
    """S4-5: only its name is ours to read; anchors, tags and numbers are others' to use."""
    folder.name(OTHERS % name)
    config = await PersistentConfig(folder.state, folder.yaml)
    assert config.get("zep_user_id").startswith("gus::")


async def test_values_cannot_be_changed_behind_its_back(folder: AgentFolder) -> None:
    config = await PersistentConfig(folder.state, folder.yaml)
    value = {"list": [1]}
    await config.set("theme", value)
    value["list"].append(2)
    config.get("theme")["list"].append(3)
    config.all()["theme"]["list"].append(4)
    assert config.get("theme") == {"list": [1]}
    assert (await PersistentConfig(folder.state, folder.yaml)).get("theme") == {"list": [1]}


@pytest.mark.parametrize("value", [{1, 2}, b"x", float("nan"), object(), "\ud800", (1, 2)])
async def test_what_is_not_json_is_refused_and_the_old_value_stays(
    folder: AgentFolder, value: object
) -> None:
    config = await PersistentConfig(folder.state, folder.yaml)
    with pytest.raises(NotStorableError, match="theme"):
        await config.set("theme", value)
    assert (await PersistentConfig(folder.state, folder.yaml)).get("theme") == "default"


async def test_a_large_value_is_refused(folder: AgentFolder) -> None:
    config = await PersistentConfig(folder.state, folder.yaml)
    with pytest.raises(TooLargeError, match="save_state"):
        await config.set("theme", "x" * 70_000)


async def test_a_config_is_of_no_use_before_it_is_loaded(folder: AgentFolder) -> None:
    config = PersistentConfig(folder.state, folder.yaml)
    with pytest.raises(ConfigError, match="not loaded"):
        config.get("theme")
    async with config as loaded:
        assert loaded.get("theme") == "default"


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"values": 3}', b"\xff", b'{"version": "1"}']
)
async def test_damaged_values_are_left_as_they_are(folder: AgentFolder, damage: bytes) -> None:
    await PersistentConfig(folder.state, folder.yaml)
    file = folder.state / "_persistence.json"
    file.write_bytes(damage)
    with pytest.raises(CorruptRecordError, match=r"_persistence\.json is damaged"):
        await PersistentConfig(folder.state, folder.yaml)
    assert file.read_bytes() == damage


async def test_values_of_a_newer_release_are_left_as_they_are(folder: AgentFolder) -> None:
    folder.state.mkdir()
    file = folder.state / "_persistence.json"
    file.write_text('{"version": 2, "values": "other"}')
    with pytest.raises(UnsupportedVersionError, match="use a newer perdure"):
        await PersistentConfig(folder.state, folder.yaml)
    assert file.read_text() == '{"version": 2, "values": "other"}'


async def test_a_folder_that_cannot_be_written_is_said(folder: AgentFolder) -> None:
    folder.state.write_text("a file")
    with pytest.raises(StoreUnavailableError, match="state"):
        await PersistentConfig(folder.state, folder.yaml)


async def test_two_that_set_different_keys_lose_neither(folder: AgentFolder) -> None:
    """S4-G4: read, changed and replaced under a lock."""
    config = await PersistentConfig(folder.state, folder.yaml)
    other = await PersistentConfig(folder.state, folder.yaml, session="2")
    async with anyio.create_task_group() as group:
        for one, key in ((config, "theme"), (other, "user_name")):
            for number in range(10):
                group.start_soon(one.set, key, number)
    both = await PersistentConfig(folder.state, folder.yaml, session="2")
    assert isinstance(both.get("theme"), int)
    assert isinstance(both.get("user_name"), int)


async def test_a_change_can_be_a_task_that_is_cancelled(folder: AgentFolder) -> None:
    """anyio takes what `inspect` calls a coroutine, and asks for its state."""
    config = await PersistentConfig(folder.state, folder.yaml)
    change = config.set("theme", "dark")
    assert inspect.iscoroutine(change)
    assert inspect.getcoroutinestate(change) == inspect.CORO_CREATED
    await change
    assert inspect.getcoroutinestate(change) == inspect.CORO_CLOSED
    async with anyio.create_task_group() as group:
        group.start_soon(config.set, "user_name", "Gus")
        group.start_soon(config.set, "theme", "light")
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    await config.flush()
    again = await PersistentConfig(folder.state, folder.yaml)
    assert (again.get("theme"), again.get("user_name")) == ("light", "Gus")


async def test_a_change_that_nobody_awaits_warns_of_nothing(folder: AgentFolder) -> None:
    config = await PersistentConfig(folder.state, folder.yaml)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        config.set("theme", "dark")
        gc.collect()
    assert [str(one.message) for one in warned] == []
    await config.flush()


async def test_whoever_holds_the_lock_for_long_is_named(folder: AgentFolder) -> None:
    """S4-G4: another process has it."""
    await PersistentConfig(folder.state, folder.yaml)
    code = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    lock = folder.state / "_persistence.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert await anyio.to_thread.run_sync(holder.stdout.readline) == b"locked\n"
        place = FolderPlace(folder.state, wait=0)
        with pytest.raises(LeaseHeldError, match=r"_persistence\.lock"):
            await place.change(lambda saved: saved)
    finally:
        holder.kill()
        holder.communicate()
    assert await place.change(lambda saved: saved) == await place.read()


SETTER = """
import asyncio, itertools, sys
from perdure import PersistentConfig

async def main(state, schema):
    config = await PersistentConfig(state, schema, session="1")
    for number in itertools.count(config.get("theme") + 1):
        await config.set("theme", number)
        print(number, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def test_what_was_set_survives_a_kill(folder: AgentFolder) -> None:
    """S4-10, S4-G8: awaited, atomic, durable when it returns; a real kill -9, four of them."""
    folder.declare("version: 1\nconfig:\n  theme: {init: 0}\n  id: {init: '{{ uuid }}'}\n")
    first = anyio.run(lambda: _loaded(folder))
    for _ in range(4):
        running = subprocess.Popen(
            [sys.executable, "-c", SETTER, str(folder.state), str(folder.yaml)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert running.stdout is not None
        first_line = running.stdout.readline()  # it is in the middle of setting
        os.kill(running.pid, signal.SIGKILL)
        acknowledged = [int(line) for line in (first_line + running.communicate()[0]).split()]
        after = anyio.run(lambda: _loaded(folder))
        assert after["theme"] >= max(acknowledged)
        assert after["id"] == first["id"]


FIRST = """
import asyncio, sys
from perdure import PersistentConfig

async def main(state, schema):
    print("ready", flush=True)
    sys.stdin.read()
    config = await PersistentConfig(state, schema, session="1")
    print(config.get("zep_user_id"), config.get("zep_session_id"))

asyncio.run(main(*sys.argv[1:]))
"""


def test_processes_that_begin_at_once_make_each_value_once(folder: AgentFolder) -> None:
    """S4-G4: let go at the same moment, they all see the same ids."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST, str(folder.state), str(folder.yaml)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for one in running:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in running:
        assert one.stdin is not None
        one.stdin.close()
    for one in running:
        one.stdin = None
    seen = {one.communicate()[0] for one in running}
    assert len(seen) == 1
    assert "gus::" in seen.pop()


async def _loaded(folder: AgentFolder) -> dict[str, int]:
    return (await PersistentConfig(folder.state, folder.yaml, session="1")).all()


def test_the_files_are_private(folder: AgentFolder) -> None:
    anyio.run(lambda: _loaded(folder))
    modes = {path.name: path.stat().st_mode & 0o777 for path in Path(folder.state).iterdir()}
    assert modes == {"_persistence.json": 0o600, "_persistence.lock": 0o600}


async def test_a_key_that_looks_like_a_credential_is_warned_of(
    folder: AgentFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """S4-G10: config must not hold credentials; the value is never logged."""
    folder.declare("version: 1\nconfig:\n  zep_api_key: {init: null}\n")
    config = await PersistentConfig(folder.state, folder.yaml)
    await config.set("zep_api_key", "hush")
    assert [record.key for record in caplog.records if record.name == "perdure.config"] == [
        "zep_api_key"
    ]
    assert "hush" not in caplog.text
