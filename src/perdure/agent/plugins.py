"""Plugins: state that an agent keeps besides its conversation, as contributors of its session.

They are the settings of its tools, its permissions, its notes, its own instructions, and what it
was configured with. They are restored in the bootstrap, and asked for their state before each save.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, final

import anyio
import msgspec

from perdure._lib.logs import log_facts
from perdure.agent.llm.model import ToolSpec
from perdure.agent.options import Features
from perdure.agent.tools import Tool
from perdure.errors import ConfigError, InvalidArgumentError
from perdure.memory.index import Priority, weight_of
from perdure.memory.working_memory import SessionMemoryStorage
from perdure.records.chunks import name_of
from perdure.records.values import redact
from perdure.session.contributors import Attachment, Contributor, RestoreContext
from perdure.session.internals import attach, folder_of

if TYPE_CHECKING:
    from perdure.memory.working_memory import MemoryStorage
    from perdure.session.session import Session


# In-context memory: notes that a model keeps for itself, and sees in each request


_HEADING: Final = "[Notes that you keep for yourself. Change them with note_set and note_drop.]"


@final
class InContextMemory:
    """Keep notes, the weightiest of them: ``agent.notes``.

    Args:
        max_entries: How many notes are kept; the least weighty goes first, then the oldest.

    Raises:
        InvalidArgumentError: The number is invalid.

    """

    name: Final = "in_context_memory"
    version: Final = 1

    def __init__(self, *, max_entries: int = 20) -> None:
        if max_entries < 1:
            raise InvalidArgumentError(
                f"in_context_memory: invalid max_entries={max_entries!r}: from 1 up",
                option="max_entries",
                value=max_entries,
            )
        self._max_entries = max_entries
        self._entries: dict[str, dict[str, Any]] = {}
        # What else is stored: kept, whether this release knows it or not.
        self._others: list[Any] = []
        self._beyond: dict[str, Any] = {"config": {}}

    def __repr__(self) -> str:
        return f"<InContextMemory {len(self._entries)} notes>"

    @property
    def keys(self) -> tuple[str, ...]:
        """The notes' keys, oldest first."""
        return tuple(self._entries)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a note's value, or ``default``."""
        entry = self._entries.get(key)
        return default if entry is None else entry.get("value")

    def set(
        self, key: str, value: Any, *, description: str = "", priority: Priority = "normal"
    ) -> None:
        """Keep a note; one of the same key is replaced."""
        old = self._entries.pop(key, {})
        self._entries[key] = {
            **old,
            "key": key,
            "description": description,
            "value": value,
            "priority": priority,
            "updatedAt": time.time_ns() // 1_000_000,
        }
        while len(self._entries) > self._max_entries:
            del self._entries[min(self._entries, key=self._weight)]

    def drop(self, key: str) -> bool:
        """Forget a note; False if there was none."""
        return self._entries.pop(key, None) is not None

    def _weight(self, key: str) -> int:
        return weight_of(self._entries[key].get("priority", "normal"))

    def text(self) -> str:
        """Return the notes as the model sees them; empty without any."""
        if not self._entries:
            return ""
        return "\n".join([_HEADING, *map(_line, self._entries.values())])

    def tools(self) -> tuple[Tool, ...]:
        """Return what the model changes its notes with."""

        async def note_set(
            key: str, value: Any, description: str = "", priority: Priority = "normal"
        ) -> str:
            """Keep a note that you will see in every later request.

            Args:
                key: A short name; a note of the same name is replaced.
                value: What to remember.
                description: What it is about.
                priority: The least important notes are dropped first when there are too many.

            """
            self.set(key, value, description=description, priority=priority)
            return f"kept {key!r}"

        async def note_drop(key: str) -> str:
            """Forget a note.

            Args:
                key: Its name.

            """
            return f"forgot {key!r}" if self.drop(key) else f"there was no note {key!r}"

        return Tool(note_set), Tool(note_drop)

    # as a contributor

    async def capture(self) -> dict[str, Any] | None:
        """Return the state; None while there is nothing."""
        entries = [*self._entries.values(), *self._others]
        if not entries and not any(self._beyond.values()):
            return None
        return {"entries": entries, **self._beyond}

    async def restore(self, state: dict[str, Any], context: RestoreContext) -> None:
        """Take over what was stored."""
        entries = list(state.get("entries") or ())
        notes = [
            entry
            for entry in entries
            if isinstance(entry, dict) and isinstance(entry.get("key"), str)
        ]
        self._entries = {entry["key"]: entry for entry in notes}
        self._others = [entry for entry in entries if entry not in notes]
        beyond = {key: value for key, value in state.items() if key != "entries"}
        self._beyond = {"config": {}, **beyond}


def _line(entry: dict[str, Any]) -> str:
    value = entry.get("value")
    shown = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    about = f" ({entry['description']})" if entry.get("description") else ""
    return f"- {entry['key']}{about}: {shown}"


log: logging.Logger = logging.getLogger("perdure.agent")

INSTRUCTIONS: Final = "custom_instructions.md"
MAX_INSTRUCTIONS: Final = 256 * 1024


@final
class ToolSettings:
    """Tools that the model is offered, and their order: ``agent.tool_settings``."""

    name: Final = "agent_tools"
    version: Final = 1

    def __init__(self) -> None:
        # As it is stored; what this release does not know is kept.
        self._state: dict[str, Any] = {"enabled": {}, "namespaces": {}, "priorities": {}}

    def enable(self, *tools: str) -> None:
        """Offer tools again."""
        self._state["enabled"].update(dict.fromkeys(tools, True))

    def disable(self, *tools: str) -> None:
        """Offer tools no more; a call of one is answered with an error."""
        self._state["enabled"].update(dict.fromkeys(tools, False))

    def is_enabled(self, tool: str) -> bool:
        """Return True if a tool is offered; it is, unless it was disabled."""
        return bool(self._state["enabled"].get(tool, True))

    def place(
        self, tool: str, *, namespace: str | None = None, priority: int | None = None
    ) -> None:
        """Say what a tool belongs to, and how early it is offered: higher comes first."""
        if namespace is not None:
            self._state["namespaces"][tool] = namespace
        if priority is not None:
            self._state["priorities"][tool] = priority

    def namespace(self, tool: str) -> str | None:
        """Return the group of a tool, None if it has none."""
        namespace: str | None = self._state["namespaces"].get(tool)
        return namespace

    def offered(self, specs: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        """Return the tools that the model is offered, those of equal priority in their order."""
        offered = [spec for spec in specs if self.is_enabled(spec.name)]
        priorities = self._state["priorities"].items()
        order = {name: -at for name, at in priorities if isinstance(at, int | float)}
        return tuple(sorted(offered, key=lambda spec: order.get(spec.name, 0)))

    async def capture(self) -> dict[str, Any] | None:
        """Return the state; None while nothing was set."""
        return self._state if any(self._state.values()) else None

    async def restore(self, state: dict[str, Any], context: RestoreContext) -> None:
        """Take over what was stored."""
        given = {name: value for name, value in state.items() if value is not None}
        self._state = {"enabled": {}, "namespaces": {}, "priorities": {}, **given}


Verdict = Literal["allowed", "blocked", "open"]
"""Standing of a tool; ``open`` means that it is not decided."""


@final
class Permissions:
    """An agent's permissions, kept with its session: ``agent.permissions``."""

    name: Final = "agent_permissions"
    version: Final = 1

    def __init__(self) -> None:
        self._approvals: dict[str, Any] = {}
        self._blocked: dict[str, None] = {}
        self._allowed: dict[str, None] = {}
        self._beyond: dict[str, Any] = {}

    def __repr__(self) -> str:
        return (
            f"<Permissions allowed={len(self._allowed)} blocked={len(self._blocked)} "
            f"approved={len(self._approvals)}>"
        )

    @property
    def allowlist(self) -> tuple[str, ...]:
        """Tools that always may run."""
        return tuple(self._allowed)

    @property
    def blocklist(self) -> tuple[str, ...]:
        """Tools that never may run."""
        return tuple(self._blocked)

    @property
    def approvals(self) -> dict[str, Any]:
        """Tools that were approved, with who approved them and why."""
        return dict(self._approvals)

    def verdict(self, tool: str) -> Verdict:
        """Say what is known of a tool; a block counts before everything else."""
        if tool in self._blocked:
            return "blocked"
        return "allowed" if tool in self._allowed or tool in self._approvals else "open"

    def allow(self, *tools: str) -> None:
        """Let tools always run, blocked before or not."""
        self._allowed.update(dict.fromkeys(tools))
        _forget(self._blocked, tools)

    def block(self, *tools: str) -> None:
        """Let tools never run, allowed or approved before or not."""
        self._blocked.update(dict.fromkeys(tools))
        _forget(self._allowed, tools)
        _forget(self._approvals, tools)

    def approve(
        self, tool: str, *, by: str | None = None, at: datetime.datetime | None = None
    ) -> None:
        """Remember that a tool was approved.

        Args:
            tool: Its name.
            by: Who did.
            at: When; None for now.

        """
        when = at or datetime.datetime.now(datetime.UTC)
        approval = {"scope": "always", "approvedAt": when.isoformat()}
        self._approvals[tool] = {**approval, **({} if by is None else {"approvedBy": by})}

    def revoke(self, *tools: str) -> None:
        """Forget all decisions on tools."""
        for known in (self._blocked, self._allowed, self._approvals):
            _forget(known, tools)

    # as a contributor

    async def capture(self) -> dict[str, Any] | None:
        """Return the state; None while nothing was decided."""
        if not (self._approvals or self._blocked or self._allowed or self._beyond):
            return None
        return {
            "version": 1,
            "approvals": self._approvals,
            "blocklist": list(self._blocked),
            "allowlist": list(self._allowed),
            **self._beyond,
        }

    async def restore(self, state: dict[str, Any], context: RestoreContext) -> None:
        """Take over what was stored; what this release does not know is kept."""
        known = ("version", "approvals", "blocklist", "allowlist")
        self._approvals = dict(state.get("approvals") or {})
        self._blocked = dict.fromkeys(state.get("blocklist") or ())
        self._allowed = dict.fromkeys(state.get("allowlist") or ())
        self._beyond = {key: value for key, value in state.items() if key not in known}


def _forget(known: dict[str, Any], tools: Iterable[str]) -> None:
    for tool in tools:
        known.pop(tool, None)


@final
class PersistentInstructions:
    """A file of instructions that outlives the conversation: read, and never written.

    What is kept with the session is the file's hash: under which instructions it was held.
    """

    name: Final = "persistent_instructions"
    version: Final = 1

    def __init__(self, path: str) -> None:
        self.path: str = path
        """Path of the file, there or not."""
        self.text: str = ""
        """Its text; empty where there is no file."""

    async def read(self) -> str:
        """Read the file, and return its text.

        Raises:
            ConfigError: It is too large, or no text.

        """
        try:
            data = await anyio.Path(self.path).read_bytes()
        except FileNotFoundError:
            data = b""
        if len(data) > MAX_INSTRUCTIONS:
            raise ConfigError(
                f"{self.path} has {len(data)} bytes, the limit is {MAX_INSTRUCTIONS}: shorten it",
                path=self.path,
                size=len(data),
            )
        try:
            self.text = data.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self.path} is not UTF-8: save it as UTF-8", path=self.path
            ) from error
        return self.text

    async def capture(self) -> dict[str, Any] | None:
        """Return which instructions there are; None without any."""
        if not self.text:
            return None
        data = self.text.encode()
        return {"sha256": name_of(data), "bytes": len(data)}

    async def restore(self, state: dict[str, Any], context: RestoreContext) -> None:
        """Say so if the file has changed since: the file counts."""
        if await self.capture() != state:
            message = "custom instructions have changed since the session was saved"
            log_facts(log, logging.INFO, message, agent=context.key.agent, path=self.path)


@final
class StoredConfig:
    """The config of an agent, without credentials, for later readers.

    What is configured now counts; what is stored and not configured any more is kept.
    """

    name: Final = "agent_config"
    version: Final = 1

    def __init__(self, config: Mapping[str, Any]) -> None:
        clean, redacted = redact(dict(config))
        self._config: dict[str, Any] = {**clean, **({"redacted": redacted} if redacted else {})}
        self._stored: dict[str, Any] = {}

    async def capture(self) -> dict[str, Any]:
        """Return the state."""
        return {**self._stored, **self._config}

    async def restore(self, state: dict[str, Any], context: RestoreContext) -> None:
        """Keep what was stored."""
        self._stored = dict(state)


@final
class FlushedMemory:
    """Have a memory of the user's own flushed before each save of the session."""

    name: Final = "memory_storage"
    version: Final = 1

    def __init__(self, storage: MemoryStorage) -> None:
        self._storage = storage

    async def capture(self) -> None:
        """Flush; the session itself keeps nothing of it."""
        await self._storage.flush()

    async def restore(self, state: Any, context: RestoreContext) -> None:
        """Do nothing: the storage has it."""


@final
class AgentPlugins:
    """The parts of one agent.

    Args:
        session: Its session.
        features: Which of them it keeps.
        settings: What is noted of its configuration.
        memory: Where entries of its memory are kept; None for the session.
        instructions: The file of its persistent instructions; None for the one in its folder.

    """

    def __init__(
        self,
        session: Session,
        features: Features,
        *,
        settings: Mapping[str, Any],
        memory: MemoryStorage | None,
        instructions: str | os.PathLike[str] | None,
    ) -> None:
        self.tools: ToolSettings = ToolSettings()
        self.permissions: Permissions = Permissions()
        self.notes: InContextMemory | None = None
        self.instructions: PersistentInstructions | None = None
        self.memory: MemoryStorage = SessionMemoryStorage(session) if memory is None else memory
        if features.in_context_memory:
            self.notes = InContextMemory()
        if features.persistent_instructions:
            folder = folder_of(session)
            if instructions is None and folder is None:
                raise ConfigError(
                    f"agent {session.id!r}: persistent_instructions needs a file, and this store "
                    "has no folder for it: give custom_instructions=PATH",
                    option="custom_instructions",
                )
            # In the agent's folder, as the store names it.
            path = instructions or os.path.join(folder or "", INSTRUCTIONS)  # noqa: PTH118
            self.instructions = PersistentInstructions(os.fspath(path))
        self._session = session
        parts: tuple[Contributor | None, ...] = (
            self.tools,
            StoredConfig(settings),
            self.permissions if features.permissions else None,
            None if isinstance(self.memory, SessionMemoryStorage) else FlushedMemory(self.memory),
            self.notes,
            self.instructions,
        )
        self._parts = [part for part in parts if part is not None]
        self._attached: list[Attachment] = []

    async def attach(self, *, restore: bool = True) -> None:
        """Restore the parts, and have them saved from now on; once.

        Args:
            restore: Whether what is stored is taken over, or replaced.

        """
        if self._attached:
            return
        for part in self._parts:
            self._attached.append(await attach(self._session, part, restore=restore))

    def detach(self) -> None:
        """Detach from the session, so that the next worker can attach."""
        while self._attached:
            self._attached.pop().detach()
