"""What a save and a restore look at and note in a home folder; it blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from perdure._lib.files import Folder
from perdure.declare.archive.checking import CONTROL
from perdure.declare.archive.entries import Archive
from perdure.declare.archive.restoring import ArchiveRestored, Plan
from perdure.declare.archive.selecting import Selection
from perdure.declare.archive.swapping import (
    OLD,
    REPLACED,
    Marker,
    drop_replaced,
    mark,
    marker_of,
    occupied_by,
)
from perdure.errors import ConfigError, SessionError
from perdure.model.keys import SessionKey
from perdure.session.inside import store_of
from perdure.session.session import Session
from perdure.session.view import SessionView

__all__ = [
    "files_of",
    "note_saved",
    "note_saving",
    "require_known",
    "require_named",
    "restored",
    "why_kept",
]

FILES: Final = "files"
"""The agent's home, in its folder of the file store."""


def files_of(session: Session | SessionView) -> str | None:
    """Return the folder of an agent for its files, None where the store has none for it."""
    find = getattr(store_of(session), "folder_of", None)
    return None if find is None else str(Path(find(session.key)) / FILES)


def note_saved(control: Folder, marker: Marker) -> None:
    """Note which archive the home is; what the last restore replaced is not needed any more."""
    mark(control, marker)
    drop_replaced(control)


def why_kept(
    home: Folder, control: Folder, key: SessionKey, latest: Archive, selection: Selection
) -> str:
    """Say why a home goes on as it is at a start; empty if the newest archive is to come back."""
    marker = marker_of(control)
    if marker is not None and marker.is_of(key):
        if marker.key != key:
            return "another session of the agent has used it since"
        return "it goes on from this archive" if marker.goes_on_from(latest.id) else ""
    return "it has files that were never archived" if occupied_by(home, selection) else ""


def note_saving(control: Folder, key: SessionKey, archive: str) -> None:
    """Note which archive is being made of a home: after a kill it goes on, listed or not."""
    marker = marker_of(control)
    if marker is not None and marker.is_of(key):
        also = (*marker.newer_than, archive)
        mark(control, msgspec.structs.replace(marker, newer_than=also))


def require_known(home: Folder, control: Folder, key: SessionKey, force: bool, plan: Plan) -> None:  # noqa: FBT001  # from a thread
    """Refuse to replace files that nobody has saved.

    Raises:
        SessionError: The home has some, and ``force`` is False.

    """
    marker = marker_of(control)
    if force or (marker is not None and marker.is_of(key)):
        return
    occupied = occupied_by(home, plan.selection)
    if occupied:
        message = (
            f"{home.path} has files that are in no archive of {key.agent}, {occupied[0]!r} among "
            "them: save them first, choose an empty folder, or say force=True (--force)"
        )
        raise SessionError(message, path=home.path, entries=len(occupied))


def require_named(path: Path, plan: Plan, selection: Selection) -> None:
    """Refuse hidden folders of a file from elsewhere that nobody here has asked for.

    Raises:
        ConfigError: It brings some.

    """
    beyond = plan.selection.hidden_beyond(selection)
    if beyond:
        message = (
            f"{path} brings {', '.join(map(ascii, beyond[:5]))}, hidden and not named here: such "
            "files may change how a shell or a tool behaves; to take them, name them in "
            "persist_paths (paths=, --path); nothing was changed"
        )
        raise ConfigError(message, path=str(path), hidden=beyond)


def restored(
    archive: Archive | None, home: Folder, control: Folder, replaced: list[str] | None
) -> ArchiveRestored:
    """Return what a restore says that it did; None: nothing, since all was as it is."""
    if replaced is None:
        return ArchiveRestored(archive=archive, changed=False)
    with control.enter(REPLACED, OLD) as old:
        kept = str(Path(home.path, CONTROL, REPLACED, OLD)) if old.names() else ""
    return ArchiveRestored(archive=archive, changed=True, replaced=tuple(replaced), kept=kept)
