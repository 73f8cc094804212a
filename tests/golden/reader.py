"""Everything that a store says about its sessions, as plain JSON: what a golden store is compared by."""

from __future__ import annotations

import hashlib
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

import perdure
from perdure import Shutdown
from perdure.cli.check import audit
from perdure.memory.documents import EPISODIC, SEMANTIC
from perdure.records.keys import SessionKey
from perdure.stores.file import FileStore

HERE = Path(__file__).parent
GOLDEN = HERE / "v1"


def copy_of(golden: Path, to: Path) -> Path:
    """Return a copy to work on, private as a store is: version control keeps no modes."""
    root = Path(shutil.copytree(golden / "store", to / "store"))
    for path in (root, *root.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return root


async def seen(root: Path, keys: list[SessionKey]) -> dict[str, Any]:
    """Return what the sessions of a store hold, without a lease."""
    files = FileStore(root, owner="reader")
    manager = perdure.connect(files, autosave=None, shutdown=Shutdown(signals=False))
    async with manager as sessions:
        return {str(key): await _session(sessions, files, key) for key in keys}


async def _session(
    sessions: perdure.SessionManager, files: FileStore, key: SessionKey
) -> dict[str, Any]:
    place = {"session": key.session, "tenant": key.tenant}
    records = [
        [record.seq, record.epoch, record.kind, record.end, _digest(record.payload)]
        async for chunk in files.read_log(key)
        for record in chunk.records
    ]
    audited = await audit(files, key)
    found: dict[str, Any] = {
        "records": records,
        "findings": [one.what for one in audited.findings],
        "blobs": await _blobs(files, key.tenant),
    }
    view = await sessions.load(key.agent, **place)
    if view is None:
        return {**found, "there": False}
    documents = await files.read_documents(key)
    found_json = {name: one.data.decode() for name, one in sorted(documents.found.items())}
    memory = await view.memory.entries()
    return {
        **found,
        "there": True,
        "info": _info(view.info),
        "source": view.restore_report.source,
        "context": _shortened(view.context("openai")),
        "history": [_item(item) for item in await view.history(limit=1000)],
        "memory": {one.key: await view.memory.get(one.key) for one in memory},
        "memory_entries": [_plain(one) for one in memory],
        "state": {name: repr(await view.state.get(name)) for name in await view.state.keys()},
        "plugins": {name: one for name, one in found_json.items() if name.startswith("plugins/")},
        "long_term": {name: found_json.get(name) for name in (EPISODIC, SEMANTIC)},
        "documents": sorted(found_json),
    }


def _shortened(value: Any) -> Any:
    """Return JSON values with the hashes of very long strings in their places."""
    if isinstance(value, dict):
        return {name: _shortened(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shortened(inner) for inner in value]
    is_long = isinstance(value, str) and len(value) > 10_000
    return f"sha256:{_digest(value.encode())}" if is_long else value


def _plain(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def _info(info: Any) -> Any:
    """Return what is said of a session; its times are the same, in whatever form they are."""
    plain = _plain(info)
    for name in ("createdAt", "lastActiveAt"):
        if plain[name]:
            plain[name] = datetime.fromisoformat(plain[name]).isoformat()
    return plain


def _item(item: Any) -> list[Any]:
    return [item.seq, item.kind, type(item.value).__name__, _digest(repr(item.value).encode())]


async def _blobs(files: FileStore, tenant: str) -> dict[str, str]:
    """Return the blobs that the golden stores have put there, verified by being read."""
    known = [hashlib.sha256(data).hexdigest() for data in BLOBS]
    found = {name: await files.get_blob(tenant, name) for name in known}
    return {name: data.decode() for name, data in found.items() if data is not None}


BLOBS = (b"a large result", b"another one")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
