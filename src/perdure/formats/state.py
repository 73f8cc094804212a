"""An agent's whole state as values: the shape of ``session.json`` and ``memory.json``.

The written names are in camel case, as the format has them. ``Raw`` is JSON as it was written:
``msgspec.json.decode(raw)`` reads it. Unknown fields lie in ``extra``, at each level.
Values only, and pure.
"""

from __future__ import annotations

import datetime
from typing import Protocol

import msgspec

from perdure.formats.lossless import write_open

Raws = dict[str, msgspec.Raw]


class SessionMetadata(msgspec.Struct, rename="camel", kw_only=True):
    """What people say about a session."""

    title: str | None = None
    tags: list[str] = []
    extra: Raws = {}


class CoreState(msgspec.Struct, rename="camel", kw_only=True):
    """The conversation."""

    system_prompt: str = ""
    instructions: str = ""
    history: list[msgspec.Raw] = []
    """Messages, oldest first."""
    tool_calls: list[msgspec.Raw] = []
    extra: Raws = {}


class ToolState(msgspec.Struct, rename="camel", kw_only=True):
    """Which tools are offered, where they belong, and how early they come."""

    enabled: Raws = {}
    namespaces: Raws = {}
    priorities: Raws = {}
    extra: Raws = {}


class PermissionState(msgspec.Struct, rename="camel", kw_only=True):
    """Which tools may run."""

    version: int = 1
    approvals: Raws = {}
    blocklist: list[str] = []
    allowlist: list[str] = []
    extra: Raws = {}


class SerializedAgentContextState(msgspec.Struct, rename="camel", kw_only=True):
    """The context: conversation, tools, permissions, configuration."""

    version: int = 1
    core: CoreState = msgspec.field(default_factory=CoreState)
    tools: ToolState = msgspec.field(default_factory=ToolState)
    permissions: PermissionState = msgspec.field(default_factory=PermissionState)
    plugins: Raws = {}
    """Read, and put beside those of the state itself; not written."""
    config: Raws = {}
    """model, maxContextTokens, strategy, and whatever else was configured."""
    extra: Raws = {}


class SerializedMemoryEntry(msgspec.Struct, rename="camel", kw_only=True):
    """One entry of the working memory."""

    key: str
    description: str = ""
    value: msgspec.Raw = msgspec.Raw(b"null")
    scope: str = "session"
    size_bytes: int = 0
    base_priority: str = "normal"
    pinned: bool = False
    created_at: int = 0
    """Milliseconds since 1970."""
    last_accessed_at: int = 0
    extra: Raws = {}


class Stats(msgspec.Struct, rename="camel", kw_only=True):
    """What the entries add up to."""

    total_entries: int = 0
    total_size_bytes: int = 0
    extra: Raws = {}


class SerializedMemoryState(msgspec.Struct, rename="camel", kw_only=True):
    """The working memory."""

    version: int = 1
    entries: list[SerializedMemoryEntry] = []
    stats: Stats = msgspec.field(default_factory=Stats)
    extra: Raws = {}


class FullAgentState(msgspec.Struct, rename="camel", kw_only=True):
    """Everything that an agent's session needs to go on."""

    version: int = 1
    agent_id: str = ""
    agent_type: str = "agent"
    created_at: str = ""
    """ISO 8601."""
    last_active_at: str = ""
    context: SerializedAgentContextState = msgspec.field(
        default_factory=SerializedAgentContextState
    )
    memory: SerializedMemoryState | None = None
    """None where it was not loaded, or there is none."""
    plugins: Raws = {}
    """The states of plugins by name."""
    metadata: SessionMetadata = msgspec.field(default_factory=SessionMetadata)
    extra: Raws = {}


def write_state(state: FullAgentState) -> bytes:
    """Return a state as JSON, in one line; `perdure.formats.read_state` reads it."""
    return write_open(state)


# A person's own place for whole states: six methods, and no word about files
#
# `perdure.stores.StateStore` makes a store of it.


class StateStorage(Protocol):
    """Keep one agent's state: in a database, a bucket, a file."""

    async def save(self, state: FullAgentState) -> None:
        """Replace the stored state, in one step; return when it is durable.

        ``perdure.formats.write_state`` makes bytes of it.
        """
        ...

    async def load(self) -> FullAgentState | None:
        """Return the stored state, None if there is none.

        ``perdure.formats.read_state`` makes it of bytes.
        """
        ...

    async def exists(self) -> bool:
        """Say whether there is one."""
        ...

    async def delete(self) -> None:
        """Remove it; no error if there is none."""
        ...

    def get_path(self) -> str:
        """Say where it is kept, for people: a path, a URL, a name; never a password."""
        ...

    async def get_last_modified(self) -> datetime.datetime | None:
        """Return when it was last saved; None if there is none, or if that is not known.

        It has to differ after each save, for another writer to be noticed.
        """
        ...
