"""Whole agents as plain JSON: `FullAgentState`, its files, and the way to a log and back.

For taking an agent elsewhere, for looking at one with other tools, and for storages that
keep a whole state at a time. The field names are the format. What a file holds beyond
the fields that are known here is kept, and written again as it was.

Nothing in here knows sessions: `perdure.export_state` and `perdure.import_state` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.interchange.folder import FolderStorage as FolderStorage
    from perdure.interchange.folder import read_folder as read_folder
    from perdure.interchange.folder import write_folder as write_folder
    from perdure.interchange.memory_file import FileMemoryStorage as FileMemoryStorage
    from perdure.interchange.migrations import (
        PERSISTENCE_FORMAT_VERSION as PERSISTENCE_FORMAT_VERSION,
    )
    from perdure.interchange.migrations import Migrations as Migrations
    from perdure.interchange.reading import Finding as Finding
    from perdure.interchange.reading import Read as Read
    from perdure.interchange.reading import read_state as read_state
    from perdure.interchange.state import Core as Core
    from perdure.interchange.state import FullAgentState as FullAgentState
    from perdure.interchange.state import PermissionState as PermissionState
    from perdure.interchange.state import SerializedAgentContextState as SerializedAgentContextState
    from perdure.interchange.state import SerializedMemoryEntry as SerializedMemoryEntry
    from perdure.interchange.state import SerializedMemoryState as SerializedMemoryState
    from perdure.interchange.state import SessionMetadata as SessionMetadata
    from perdure.interchange.state import Stats as Stats
    from perdure.interchange.state import ToolState as ToolState
    from perdure.interchange.state import write_state as write_state
    from perdure.interchange.storage import StateStorage as StateStorage

_HOMES = {
    "perdure.interchange.folder": ("FolderStorage", "read_folder", "write_folder"),
    "perdure.interchange.memory_file": ("FileMemoryStorage",),
    "perdure.interchange.migrations": ("Migrations", "PERSISTENCE_FORMAT_VERSION"),
    "perdure.interchange.reading": ("Finding", "Read", "read_state"),
    "perdure.interchange.state": (
        "Core",
        "FullAgentState",
        "PermissionState",
        "SerializedAgentContextState",
        "SerializedMemoryEntry",
        "SerializedMemoryState",
        "SessionMetadata",
        "Stats",
        "ToolState",
        "write_state",
    ),
    "perdure.interchange.storage": ("StateStorage",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # a list of strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
