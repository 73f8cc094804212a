"""Older, newer, wrong and damaged files (S2-8, S2-19 to S2-23)."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from perdure import ConfigError, CorruptRecordError, StoreUnavailableError, UnsupportedVersionError
from perdure.formats import (
    FolderStorage,
    FullAgentState,
    Migrations,
    read_folder,
    read_state,
    write_folder,
    write_state,
)
from perdure.formats.migrations import MIGRATIONS, read_memory
from perdure.formats.records import unfold
from perdure.memory.documents import StateSet
from perdure.records.json import decode
from perdure.records.records import STATE
from tests.formats.samples import MEMORY, PLUGIN, SESSION, copy_of, read, write


def state_in(value: Any) -> FullAgentState:
    state = read_state(json.dumps(value).encode()).state
    assert state is not None
    return state


# versions


def test_a_file_without_a_version_is_migrated() -> None:
    """S2-19: version 0 or missing means the form before there were versions."""
    for version in ({}, {"version": 0}, {"version": None}):
        old = {
            **version,
            "agentId": "ada",
            "systemPrompt": "P",
            "conversation": [{"role": "user", "content": "hello"}],
            "permissions": {"blocklist": ["rm"]},
            "pluginStates": {"a": 1},
            "x_unknown": [1],
        }
        found = read_state(json.dumps(old).encode())
        assert [one.what for one in found.findings] == ["migrated"]
        assert found.state is not None
        written = json.loads(write_state(found.state))
        assert written["version"] == 1
        assert written["context"]["core"]["systemPrompt"] == "P"
        assert written["context"]["core"]["history"] == [{"role": "user", "content": "hello"}]
        assert written["context"]["permissions"]["blocklist"] == ["rm"]
        assert written["plugins"] == {"a": 1}
        assert written["x_unknown"] == [1]


def test_a_file_that_only_lacks_its_version_reads_as_it_is() -> None:
    """S2-19."""
    old = {key: value for key, value in SESSION.items() if key != "version"}
    assert write_state(state_in(old)) == write_state(state_in(SESSION))


def test_a_memory_without_a_version_is_migrated() -> None:
    """S2-19."""
    for old in (MEMORY["entries"], {"items": MEMORY["entries"]}):
        memory, findings = read_memory(json.dumps(old).encode())
        assert [one.key for one in memory.entries] == ["user_preferences"]
        assert memory.stats.total_size_bytes == 128
        assert [one.what for one in findings] == ["migrated"]


@pytest.mark.parametrize("version", [2, 99])
def test_a_newer_file_is_refused_and_says_so(version: int) -> None:
    """S2-19, S2-22."""
    with pytest.raises(UnsupportedVersionError, match=f"version {version}.*newer release"):
        read_state(json.dumps({**SESSION, "version": version}).encode())


@pytest.mark.parametrize("version", ["1", -1, 1.5, True, [1]])
def test_a_version_that_is_no_number_is_damage(version: Any) -> None:
    with pytest.raises(CorruptRecordError, match="version"):
        read_state(json.dumps({**SESSION, "version": version}).encode())


def test_steps_follow_one_another() -> None:
    """A registry: each step leads to the next version."""
    steps = Migrations(3)
    for at in range(3):
        steps.add("memory", at, lambda fields, at=at: {**fields, f"x{at}": fields["version"]})
    data = json.dumps({"version": 1, "entries": []}).encode()
    memory, _ = read_memory(data, migrations=steps)
    assert {name: bytes(raw) for name, raw in memory.extra.items()} == {"x1": b"1", "x2": b"2"}
    assert memory.version == 3
    with pytest.raises(ConfigError, match="there is one"):
        steps.add("memory", 0, lambda fields: fields)
    with pytest.raises(ConfigError, match="version 3"):
        steps.add("session", 3, lambda fields: fields)
    with pytest.raises(UnsupportedVersionError, match="no way on"):
        steps.apply("session", {})


# wrong, but certain


def test_wrong_stats_are_mended_and_reported() -> None:
    """S2-8: the stats equal the entries, whatever the file said."""
    wrong = copy_of(MEMORY)
    wrong["stats"] = {"totalEntries": 7, "totalSizeBytes": 1, "x_unknown": 1}
    memory, (finding,) = read_memory(json.dumps(wrong).encode())
    assert (memory.stats.total_entries, memory.stats.total_size_bytes) == (1, 128)
    assert memory.stats.extra
    assert finding.what == "mended"
    assert "7 entries of 1 bytes" in finding.detail


def test_of_two_entries_with_one_key_the_later_counts() -> None:
    twice = copy_of(MEMORY)
    twice["entries"].append({**twice["entries"][0], "value": "later", "sizeBytes": 0})
    memory, findings = read_memory(json.dumps(twice).encode())
    assert [bytes(one.value) for one in memory.entries] == [b'"later"']
    assert memory.stats.total_size_bytes == len(b'"later"')
    assert len(findings) == 2


async def test_a_plugins_file_counts_before_what_session_json_says(tmp_path: Path) -> None:
    """C5: state.plugins is the union; files, then the state's, then the context's."""
    session = {**copy_of(SESSION), "plugins": {"b": "state", "c": "state"}}
    session["context"]["plugins"] = {"a": "context", "b": "context", "c": "context"}
    found = await read_folder(write(tmp_path / "in", session=session, c="file"))
    assert found.state is not None
    told = {name: bytes(raw) for name, raw in found.state.plugins.items()}
    assert told == {"a": b'"context"', "b": b'"state"', "c": b'"file"'}
    assert [one.what for one in found.findings] == ["mended"] * 3


# damaged

DAMAGED = [b"", b"{", b"[]", b"null", b'{"version": 1, "context": 5}', b"\xff\xfe", b"[" * 100_000]


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
async def test_a_damaged_session_starts_fresh_and_its_evidence_is_kept(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """S2-21, S2-22: a warning and no crash; what is readable beside it is read."""
    folder = write(tmp_path / "in", session=data, memory=MEMORY, plug=PLUGIN)
    for _ in range(2):  # reading again piles up no copies
        with caplog.at_level(logging.WARNING, "perdure"):
            found = await read_folder(folder)
        assert found.state is not None
        assert found.state.context.core.history == []
        assert found.state.memory is not None
        assert set(found.state.plugins) == {"plug"}
        assert [one.what for one in found.findings] == ["quarantined"]
        (copy,) = (folder / "quarantine").iterdir()
        assert copy.read_bytes() == data
        assert (folder / "session.json").read_bytes() == data
    assert "damaged" in caplog.text
    # Going on does not destroy the evidence.
    await write_folder(folder, found.state)
    assert copy.read_bytes() == data


async def test_a_damaged_memory_or_plugin_is_put_aside_alone(tmp_path: Path) -> None:
    """S2-21."""
    folder = write(tmp_path / "in", session=SESSION, memory=b"{oops", good=PLUGIN, bad=b"oops")
    found = await read_folder(folder)
    assert found.state is not None
    assert found.state.memory is None
    assert set(found.state.plugins) == {"in_context_memory", "good"}
    assert len(found.state.context.core.history) == 2
    assert sorted(Path(one.where).name for one in found.findings) == ["bad.json", "memory.json"]
    assert len(list((folder / "quarantine").iterdir())) == 2


@pytest.mark.parametrize("name", ["session", "memory"])
async def test_files_of_a_newer_release_are_not_touched(tmp_path: Path, name: str) -> None:
    """S2-22: refused, nothing written, nothing moved."""
    files = {"session": SESSION, "memory": MEMORY}
    folder = write(tmp_path / "in", **{**files, name: {**files[name], "version": 2}})
    before = read(folder)
    with pytest.raises(UnsupportedVersionError, match=f"{name}.json"):
        await read_folder(folder)
    assert read(folder) == before
    assert not (folder / "quarantine").exists()


async def test_a_migration_that_fails_is_damage(tmp_path: Path) -> None:
    """S2-22: migrate, else fresh."""
    folder = write(tmp_path / "in", session={"agentId": "a", "context": "of version 0"})
    found = await read_folder(folder)
    assert found.state == FullAgentState()
    assert [one.what for one in found.findings] == ["quarantined"]


async def test_nothing_there_is_none(tmp_path: Path) -> None:
    """S2-20: a missing session is None, and nothing is made."""
    assert (await read_folder(tmp_path / "nothing")).state is None
    (tmp_path / "empty").mkdir()
    assert (await read_folder(tmp_path / "empty")).state is None
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


def test_a_document_of_a_store_is_not_taken_for_a_whole_state() -> None:
    """C4: its history is in the log; importing it would lose that."""
    session = copy_of(SESSION)
    session["context"]["core"] = {"history": [], "history_source": {"kind": "log", "as_of_seq": 9}}
    with pytest.raises(ConfigError, match="perdure export"):
        read_state(json.dumps(session).encode())


async def test_storage_errors_are_raised_with_the_place(tmp_path: Path) -> None:
    """S2-23."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnavailableError, match="file"):
        await read_folder(tmp_path / "file")
    with pytest.raises(StoreUnavailableError, match="file"):
        await write_folder(tmp_path / "file", FullAgentState())


async def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(json.dumps(SESSION))
    (tmp_path / "in").mkdir()
    os.symlink(tmp_path / "secret", tmp_path / "in" / "session.json")
    with pytest.raises(StoreUnavailableError):
        await read_folder(tmp_path / "in")


# writing


async def test_only_our_own_files_are_written_and_removed(tmp_path: Path) -> None:
    """S2-6: custom_instructions.md is never touched, by saving or deleting."""
    folder = write(tmp_path / "in", session=SESSION, memory=MEMORY, plug=PLUGIN)
    (folder / "custom_instructions.md").write_text("Rhyme.")
    (folder / "plugins" / "readme.txt").write_text("mine")
    storage = FolderStorage(folder)
    state = await storage.load()
    assert state is not None
    await storage.save(state)
    await storage.delete()
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert left == ["custom_instructions.md", "plugins/readme.txt"]
    await storage.delete()


async def test_a_storage_in_a_folder_does_what_a_storage_does(tmp_path: Path) -> None:
    """S2-9, S2-11: save, load, exists, delete, where, when."""
    storage = FolderStorage(tmp_path / "a")
    assert await storage.load() is None
    assert not await storage.exists()
    assert await storage.get_last_modified() is None
    await storage.save(state_in(SESSION))
    assert await storage.exists()
    assert await storage.get_last_modified() is not None
    assert storage.get_path() == str(tmp_path / "a")
    loaded = await storage.load()
    assert loaded is not None
    assert write_state(loaded) == write_state(state_in(SESSION))
    await storage.delete()
    assert await storage.load() is None


async def test_a_memory_that_was_not_loaded_is_not_overwritten(tmp_path: Path) -> None:
    """C6: None is not empty."""
    folder = write(tmp_path / "a", session=SESSION, memory=MEMORY)
    await write_folder(folder, state_in(SESSION))
    assert read(folder)["memory.json"] == MEMORY


async def test_a_plugin_that_is_gone_leaves_no_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", session=SESSION, old=PLUGIN)
    await write_folder(folder, state_in(SESSION))
    assert set(read(folder)) == {"session.json", "plugins/in_context_memory.json"}


async def test_a_plugins_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    """S2-27: what is no plain file name stays in session.json."""
    state = state_in(SESSION)
    raw = state.plugins["in_context_memory"]
    for name in ("../../evil", "a/b", "..", "", "x" * 200, "é"):
        state.plugins[name] = raw
    await write_folder(tmp_path / "a" / "b", state)
    assert set(read(tmp_path)) == {"a/b/session.json", "a/b/plugins/in_context_memory.json"}
    found = await read_folder(tmp_path / "a" / "b")
    assert found.state is not None
    assert found.state.plugins == state.plugins


def test_the_usual_steps_are_complete() -> None:
    assert MIGRATIONS.apply("session", {})["version"] is not None
    assert MIGRATIONS.apply("memory", {})["version"] is not None


def test_a_plugin_that_nothing_can_be_stored_for_is_left_out() -> None:
    """Its record would be in the log, and no fold could ever end."""
    names = {"good": 1, "a/b": 2, "../up": 3, "": 4, "/abs": 5, "a//b": 6}
    unfolded = unfold(state_in({**SESSION, "memory": None, "plugins": names}), now=0.0)
    kept = [decode(one.payload, StateSet).name for one in unfolded.entries if one.kind == STATE]
    assert {name for name in kept if name.startswith("plugins/")} >= {
        *("plugins/good.json", "plugins/a/b.json", "plugins/../up.json"),
    }
    assert [one.where for one in unfolded.findings if one.what == "left out"] == [
        *("plugins.", "plugins./abs", "plugins.a//b"),
    ]
