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
    from perdure.formats.json_folder import (
        FolderStorage as FolderStorage,
        read_folder as read_folder,
        write_folder as write_folder,
    )
    from perdure.formats.memory_files import FileMemoryStorage as FileMemoryStorage
    from perdure.formats.migrations import (
        PERSISTENCE_FORMAT_VERSION as PERSISTENCE_FORMAT_VERSION,
        Finding as Finding,
        MigratedState as MigratedState,
        Migrations as Migrations,
        read_state as read_state,
    )
    from perdure.formats.state import (
        CoreState as CoreState,
        FullAgentState as FullAgentState,
        PermissionState as PermissionState,
        SerializedAgentContextState as SerializedAgentContextState,
        SerializedMemoryEntry as SerializedMemoryEntry,
        SerializedMemoryState as SerializedMemoryState,
        SessionMetadata as SessionMetadata,
        StateStorage as StateStorage,
        Stats as Stats,
        ToolState as ToolState,
        write_state as write_state,
    )


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

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # a list of strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
