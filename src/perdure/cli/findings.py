"""What a look at a session finds, and what kills and damage have left in a file store. Reads only.

None of it counts for anything: the store passes it over, or replaces it in time. What lies in
quarantine is evidence, kept until somebody removes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from perdure.cli.output import size
from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey
from perdure.store import Store
from perdure.stores.file import FileStore
from perdure.stores.file.layout import QUARANTINE, lease_epoch, manifest_epoch, session_path


class CheckFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a session, or worth knowing."""

    what: str
    """log, document, key, lease, leftover, or dead letters."""
    detail: str
    cure: str = ""
    problem: bool = True
    """False for what is worth knowing and in order."""
    repairable: bool = False
    """Whether rebuilding the documents mends it."""


# What kills and damage have left in a file store. Reads only


def readable_to(error: CorruptRecordError) -> int:
    """Return the last record before the damage that a file store reports, 0 if it is unknown."""
    path, offset = error.facts.get("path"), error.facts.get("offset")
    if not isinstance(path, str) or not isinstance(offset, int) or not Path(path).is_file():
        return 0
    with Path(path).open("rb") as file:
        lines = file.read(offset).splitlines()
    try:
        return msgspec.json.decode(lines[-1], type=_Numbered).n if lines else 0
    except msgspec.MsgspecError:
        return 0


class _Numbered(msgspec.Struct):
    n: int


def leftovers(store: Store, key: SessionKey) -> list[CheckFinding]:
    """Return what lies in a session's folder and no longer counts; a file store's only."""
    if not isinstance(store, FileStore):
        return []
    folder = Path(store.location).joinpath(*session_path(key))
    return [*_interrupted(folder), *_quarantined(folder / QUARANTINE)]


def _interrupted(folder: Path) -> Iterator[CheckFinding]:
    names = _names(folder)
    coming = [name for name in names if (manifest_epoch(name) or (0, False))[1]]
    leases = sorted(epoch for epoch in map(lease_epoch, names) if epoch)
    if coming:
        cure = "nothing to do: the next fold replaces it"
        detail = f"a fold that did not end left {', '.join(coming)}"
        yield CheckFinding(what="leftover", detail=detail, cure=cure, problem=False)
    if len(leases) > 1:
        older = ", ".join(f"lease-{epoch}.json" for epoch in leases[:-1])
        cure = "nothing to do: the next holder removes it"
        yield CheckFinding(what="leftover", detail=f"older {older}", cure=cure, problem=False)


def _quarantined(folder: Path) -> Iterator[CheckFinding]:
    names = _names(folder)
    if not names:
        return
    total = sum((folder / name).lstat().st_size for name in names)
    detail = f"{len(names)} files ({size(total)}) in {folder}, kept as evidence of damage"
    cure = "look at them, and remove the folder when you need it no more"
    yield CheckFinding(what="leftover", detail=detail, cure=cure, problem=False)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # names, not paths
    except FileNotFoundError:
        return []
