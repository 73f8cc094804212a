"""Bundles that a release before 0.1.0 wrote, when forks referred to their parents, are imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Shutdown
from perdure.cli.check import audit
from perdure.errors import ConfigError, InvalidArgumentError
from perdure.records.keys import SCOPES, SessionKey
from perdure.session.stored import followed
from perdure.stores.memory import MemoryStore
from perdure.transfer import read_bundle, write_bundle
from perdure.transfer.bundle_files import bundle_key
from tests.golden.reader import HERE

BUNDLES = HERE / "bundles"
PARENTS = {
    "fork-unwritten": "plain",
    "fork": "plain",
    "fork-at": "plain",
    "fork-of-fork": "fork",
    "fork-media": "media",
    "fork-docs": "docs",
    "fork-pruned": "pruned",
    "fork-orphan": "orphan",
}
"""Agents of the sessions that forks continue; all others have their own history."""


def parents_first(folder: Path) -> list[Path]:
    def depth(path: Path) -> int:
        name, count = path.stem.removeprefix("acme-"), 0
        while name in PARENTS:
            name, count = PARENTS[name], count + 1
        return count

    return sorted(folder.glob("*.jsonl"), key=lambda path: (depth(path), path.name))


async def seen(sessions: perdure.SessionManager, key: SessionKey) -> dict[str, Any]:
    view = await sessions.load(key.agent, session=key.session, tenant=key.tenant)
    assert view is not None
    return {
        "context": view.context("openai"),
        "history": [[item.seq, item.kind] for item in await view.history(limit=1000)],
        "memory": {
            entry.key: await view.memory.get(entry.key) for entry in await view.memory.entries()
        },
        "state": {name: await view.state.get(name) for name in await view.state.keys()},
    }


@pytest.mark.parametrize("prefix", ["", "new-"], ids=["its id", "another id"])
@pytest.mark.parametrize("source", ["files", "sqlite", "encrypted"])
async def test_bundles_of_before_are_imported_and_become_plain(
    source: str, prefix: str, tmp_path: Path
) -> None:
    folder, store = BUNDLES / source, MemoryStore()
    expected = json.loads((folder / "expected.json").read_text("utf-8"))
    await store.open()
    keys: dict[str, SessionKey] = {}
    for path in parents_first(folder):
        was = await bundle_key(path)
        keys[path.name] = key = SessionKey(prefix + was.agent, was.session, was.tenant)
        parent = PARENTS.get(was.agent)
        continued = None if parent is None else SessionKey(prefix + parent, tenant=was.tenant)
        await read_bundle(store, path, key=key, parent=continued)
    assert keys.keys() == expected.keys()
    for key in keys.values():
        assert (
            (await followed(store).beginning_of(key)).at,
            (await audit(store, key)).problems,
        ) == (0, [])
        await write_bundle(store, key, tmp_path / f"{key.tenant}{key.agent}")
    async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
        found = {name: await seen(sessions, key) for name, key in keys.items()}
        assert json.loads(json.dumps(found)) == expected
        for name, key in keys.items():  # a deletion changes no other session
            await sessions.delete(key.agent, session=key.session, tenant=key.tenant)
            del expected[name], found[name]
            left = {other: await seen(sessions, keys[other]) for other in found}
            assert json.loads(json.dumps(left)) == expected


async def test_a_bundle_continues_only_the_session_that_the_importer_names() -> None:
    """Else whoever writes one could read what every other session of the store says."""
    folder, store = BUNDLES / "files", MemoryStore()
    await store.open()
    fork, new = folder / "fork.jsonl", SessionKey("new")
    with pytest.raises(ConfigError, match="import that session into"):
        await read_bundle(store, fork, key=new, parent=SessionKey("plain"))
    await read_bundle(store, folder / "plain.jsonl")
    await read_bundle(store, folder / "acme-plain.jsonl")
    for parent in (None, new, SessionKey("plain", tenant="acme")):
        with pytest.raises(ConfigError, match="--parent"):
            await read_bundle(store, fork, key=new, parent=parent)
    with pytest.raises(InvalidArgumentError, match="perdure's own"):
        await read_bundle(store, fork, key=new, parent=SessionKey(SCOPES, "user:bob"))
    assert await store.holder(new) is None
    assert (await read_bundle(store, fork, key=new, parent=SessionKey("plain"))).key == new
