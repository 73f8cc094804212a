"""``perdure export`` and ``perdure import``: a round trip between two stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.formats.samples import MEMORY, SESSION, read, write


@pytest.mark.parametrize("layout", ["full", "files", "seed"])
def test_a_session_goes_into_another_store_and_is_the_same(
    command: Command, store: Path, tmp_path: Path, layout: str
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    done = command("export", "ada", "--layout", layout, "--out", out, "--store", store, "--json")
    assert done.status == 0, done.err
    assert done.json["files"]
    done = command("import", out, "--id", "eva", "--store", other, "--json")
    assert done.status == 0, done.err
    assert done.json["agent"] == "eva"
    assert done.json["findings"] == []
    shown = command("show", "eva", "--store", other, "--json").json
    before = command("show", "ada", "--store", store, "--json").json
    for name in ("title", "owner", "tags", "turns", "messages", "memory", "state", "created_at"):
        assert shown[name] == before[name], name
    assert command("check", "--store", other).status == 0


def test_without_a_place_it_is_printed_as_one_value(command: Command, store: Path) -> None:
    printed = command("export", "ada", "--store", store).json
    assert printed["agentId"] == "ada"
    assert len(printed["context"]["core"]["history"]) == 4
    assert "perdure" in printed
    assert "perdure" not in command("export", "ada", "--plain", "--store", store).json


def test_files_of_others_come_in_and_what_was_done_is_said(
    command: Command, tmp_path: Path
) -> None:
    wrong = {**MEMORY, "stats": {"totalEntries": 9, "totalSizeBytes": 9}}
    folder = write(tmp_path / "in", session=SESSION, memory=wrong, bad=b"{")
    done = command("import", folder, "--store", tmp_path / "store")
    assert done.status == 0, done.err
    assert "mended: memory.json: the stats said 9 entries of 9 bytes" in done.out
    assert "quarantined: " in done.out
    assert "imported as" in done.out
    out = tmp_path / "out"
    command(
        "export",
        "my-assistant",
        "--layout",
        "seed",
        "--plain",
        "--out",
        out,
        "--store",
        tmp_path / "store",
    )
    assert read(out)["memory.json"] == MEMORY


def test_nothing_is_overwritten(command: Command, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert command("export", "ada", "--out", out, "--store", store).status == 0
    before = out.read_bytes()
    done = command("export", "bob", "--out", out, "--store", store)
    assert done.status == 2
    assert "there already" in done.err
    assert out.read_bytes() == before
    done = command("import", out, "--store", store)
    assert done.status == 1
    assert "session ada exists" in done.err


def test_what_is_not_there_is_said(command: Command, store: Path, tmp_path: Path) -> None:
    assert "there is no session nobody" in command("export", "nobody", "--store", store).err
    done = command("import", tmp_path / "nothing", "--store", store)
    assert (done.status, "there is nothing to import" in done.err) == (1, True)
    done = command("export", "ada", "--layout", "seed", "--store", store)
    assert (done.status, "--out" in done.err) == (2, True)


def test_a_newer_file_is_refused(command: Command, store: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**SESSION, "version": 3}))
    done = command("import", path, "--store", store)
    assert done.status == 1
    assert "newer release" in done.err


FILES = ["full", "bundle", "events"]


def exported(command: Command, store: Path, folder: Path, layout: str) -> tuple[Path, Path]:
    """Return what to import, and the file in it."""
    if layout == "events":
        path = folder / "in" / "events.jsonl"
        path.parent.mkdir()
        event = {"token_id": 0, "timestamp": 4, "kind": "custom", "label": "plan", "detail": {}}
        path.write_text(json.dumps(event) + "\n", encoding="utf-8")
        return path.parent, path
    path = folder / "export"
    command("export", "ada", "--layout", layout, "--out", path, "--store", store)
    return path, path


@pytest.mark.parametrize("layout", FILES)
def test_a_file_that_an_editor_gave_a_byte_order_mark_is_imported(
    command: Command, store: Path, tmp_path: Path, layout: str
) -> None:
    given, path = exported(command, store, tmp_path, layout)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    done = command("import", given, "--id", "eva", "--store", tmp_path / "other", "--json")
    assert done.status == 0, done.err
    assert done.json.get("findings", []) == []


@pytest.mark.parametrize("layout", FILES)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_a_file_in_utf_16_is_named_with_its_cure(
    command: Command, store: Path, tmp_path: Path, layout: str, encoding: str
) -> None:
    given, path = exported(command, store, tmp_path, layout)
    path.write_bytes(path.read_text(encoding="utf-8").encode(encoding))
    done = command("import", given, "--id", "eva", "--store", tmp_path / "other")
    assert done.status == 1
    assert "it is UTF-16: save the file as UTF-8" in done.err


def test_session_json_of_a_folder_may_have_a_byte_order_mark(
    command: Command, tmp_path: Path
) -> None:
    folder = write(tmp_path / "in", session=SESSION, memory=MEMORY)
    for name in ("session.json", "memory.json"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    done = command("import", folder, "--store", tmp_path / "store")
    assert done.status == 0, done.err
    assert "quarantined" not in done.out
