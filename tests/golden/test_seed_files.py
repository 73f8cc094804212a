"""Files of whole states, as others have written them: read, made a session of, and written again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import perdure
from perdure.autosave.options import Shutdown
from perdure.formats import read_folder, write_folder
from perdure.stores.memory import MemoryStore
from tests.golden.reader import HERE

SEED = HERE / "seed"


def files(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): json.loads(path.read_text("utf-8"))
        for path in folder.rglob("*.json")
    }


async def through(case: str, tmp_path: Path) -> tuple[dict[str, Any], list[str]]:
    """Take a case through a session; return the files that come out, and the findings."""
    folder = Path(shutil.copytree(SEED / case, tmp_path / case))
    found = await read_folder(folder)
    assert found.state is not None
    async with perdure.connect(MemoryStore(), shutdown=Shutdown(signals=False)) as sessions:
        done = await perdure.import_state(sessions, found.state, id="ada")
        state = await perdure.export_state(sessions, done.key.agent, log=False)
    assert state is not None
    await write_folder(tmp_path / "out", state)
    return files(tmp_path / "out"), [one.what for one in (*found.findings, *done.findings)]


async def test_nothing_of_a_state_is_lost_and_unknown_fields_are_kept(tmp_path: Path) -> None:
    out, findings = await through("v1", tmp_path)
    given = files(SEED / "v1")
    given["session.json"] |= {"plugins": {}, "agentId": "ada"}
    assert out == given
    assert findings == []
    assert sum(json.dumps(one).count("x_") for one in out.values()) >= 12


async def test_a_state_from_before_there_were_versions_is_migrated(tmp_path: Path) -> None:
    out, findings = await through("v0", tmp_path)
    session, old = out["session.json"], files(SEED / "v0")
    assert findings == ["migrated", "migrated"]
    assert session["version"] == out["memory.json"]["version"] == 1
    assert session["x_unknown"] == [1]
    core = session["context"]["core"]
    assert core["systemPrompt"] == "You are kind."
    assert core["history"] == old["session.json"]["conversation"]
    assert session["context"]["permissions"]["blocklist"] == ["rm"]
    assert out["plugins/in_context_memory.json"] == {"entries": []}
    assert out["memory.json"]["entries"] == old["memory.json"]


async def test_wrong_stats_are_mended_and_the_rest_is_untouched(tmp_path: Path) -> None:
    out, findings = await through("wrong_stats", tmp_path)
    assert findings == ["mended"]
    given = files(SEED / "wrong_stats")["memory.json"]
    assert given["stats"]["totalEntries"] == 7
    assert out["memory.json"]["stats"] == {
        **given["stats"],
        "totalEntries": 1,
        "totalSizeBytes": 128,
    }
    assert out["memory.json"]["entries"] == given["entries"]


async def test_a_damaged_file_is_put_aside_and_the_others_are_read(tmp_path: Path) -> None:
    out, findings = await through("damaged", tmp_path)
    assert findings == ["quarantined"]
    (copy,) = (tmp_path / "damaged" / "quarantine").iterdir()
    assert copy.read_bytes() == (SEED / "damaged" / "session.json").read_bytes()
    assert out["memory.json"] == json.loads((SEED / "damaged" / "memory.json").read_text("utf-8"))
    assert "plugins/in_context_memory.json" in out
    assert out["session.json"]["context"]["core"]["history"] == []
