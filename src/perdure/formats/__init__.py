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
    from perdure.formats.json_folder import FolderStorage as FolderStorage
    from perdure.formats.json_folder import read_folder as read_folder
    from perdure.formats.json_folder import write_folder as write_folder
    from perdure.formats.memory_files import FileMemoryStorage as FileMemoryStorage
    from perdure.formats.migrations import PERSISTENCE_FORMAT_VERSION as PERSISTENCE_FORMAT_VERSION
    from perdure.formats.migrations import Finding as Finding
    from perdure.formats.migrations import MigratedState as MigratedState
    from perdure.formats.migrations import Migrations as Migrations
    from perdure.formats.migrations import read_state as read_state
    from perdure.formats.state import CoreState as CoreState
    from perdure.formats.state import FullAgentState as FullAgentState
    from perdure.formats.state import PermissionState as PermissionState
    from perdure.formats.state import SerializedAgentContextState as SerializedAgentContextState
    from perdure.formats.state import SerializedMemoryEntry as SerializedMemoryEntry
    from perdure.formats.state import SerializedMemoryState as SerializedMemoryState
    from perdure.formats.state import SessionMetadata as SessionMetadata
    from perdure.formats.state import StateStorage as StateStorage
    from perdure.formats.state import Stats as Stats
    from perdure.formats.state import ToolState as ToolState
    from perdure.formats.state import write_state as write_state


_HOMES = {
    "perdure.formats.json_folder": ("FolderStorage", "read_folder", "write_folder"),
    "perdure.formats.memory_files": ("FileMemoryStorage",),
    "perdure.formats.migrations": (
        "Finding",
        "Migrations",
        "PERSISTENCE_FORMAT_VERSION",
        "MigratedState",
        "read_state",
    ),
    "perdure.formats.state": (
        "CoreState",
        "FullAgentState",
        "PermissionState",
        "SerializedAgentContextState",
        "SerializedMemoryEntry",
        "SerializedMemoryState",
        "SessionMetadata",
        "StateStorage",
        "Stats",
        "ToolState",
        "write_state",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

# a list of strings


__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # a list of strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
