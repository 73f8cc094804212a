"""State that an agent keeps besides its conversation: plugins, declared config and files.

Plugins are contributors of its session: the settings of its tools, its permissions, its notes, its
own instructions, and what it was configured with. They are restored in the bootstrap, and asked
for their state before each save. Config are the few values that persistence.yaml declares; files
are in the home folder, which is archived with the session when the agent stops and restored when
it starts. Each is durable when the call that wrote it returns, files when they are archived.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, final, get_args

import anyio
import anyio.to_thread
import msgspec

from perdure.agent.llm.model import ToolSpec
from perdure.agent.tools import Permissions, Tool
from perdure.archive.archives import Archives
from perdure.config.locations import AgentPlace, SessionPlace
from perdure.config.persistent_config import (
    ConfigPart,
    PersistentConfig,
    declared_beside,
    initial_values,
    program_dir,
)
from perdure.config.schema import DOCUMENT, own, shared
from perdure.errors import ConfigError, InvalidArgumentError
from perdure.memory.working_memory import SessionMemoryStorage
from perdure.records.keys import DEFAULT_SESSION
from perdure.records.values import redact
from perdure.session.contributors import Attachment, Contributor, RestoreContext
from perdure.session.internals import attach, folder_of, in_background, is_branch

if TYPE_CHECKING:
    from perdure.agent.context import AgentConfig, AgentContext
    from perdure.config.schema import ConfigKey
    from perdure.memory.working_memory import MemoryStorage
    from perdure.session.session import Session


# In-context memory: notes that a model keeps for itself, and sees in each request


Priority = Literal["low", "normal", "high", "critical"]

_WEIGHT: Final = {name: weight for weight, name in enumerate(get_args(Priority))}
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
        self._others: list[Any] = []
        self._config: dict[str, Any] = {}
        self._beyond: dict[str, Any] = {}

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
        return _WEIGHT.get(self._entries[key].get("priority", "normal"), _WEIGHT["normal"])

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
        if not (self._entries or self._others or self._beyond or self._config):
            return None
        entries = [*self._entries.values(), *self._others]
        return {"entries": entries, "config": self._config, **self._beyond}

    async def restore(self, state: dict[str, Any], context: RestoreContext) -> None:
        """Take over what was stored; what this release does not know is kept."""
        entries = list(state.get("entries") or ())
        notes = [
            entry
            for entry in entries
            if isinstance(entry, dict) and isinstance(entry.get("key"), str)
        ]
        self._entries = {entry["key"]: entry for entry in notes}
        self._others = [entry for entry in entries if entry not in notes]
        self._config = dict(state.get("config") or {})
        known = ("entries", "config")
        self._beyond = {key: value for key, value in state.items() if key not in known}


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
    """Which tools are offered to the model, and in which order: ``agent.tool_settings``."""

    name: Final = "agent_tools"
    version: Final = 1

    def __init__(self) -> None:
        self._enabled: dict[str, Any] = {}
        self._namespaces: dict[str, Any] = {}
        self._priorities: dict[str, Any] = {}
        self._beyond: dict[str, Any] = {}

    def enable(self, *tools: str) -> None:
        """Offer tools again."""
        self._enabled.update(dict.fromkeys(tools, True))

    def disable(self, *tools: str) -> None:
        """Offer tools no more; a call of one is answered with an error."""
        self._enabled.update(dict.fromkeys(tools, False))

    def is_enabled(self, tool: str) -> bool:
        """Whether a tool is offered; it is, unless it was disabled."""
        return bool(self._enabled.get(tool, True))

    def place(
        self, tool: str, *, namespace: str | None = None, priority: int | None = None
    ) -> None:
        """Say what a tool belongs to, and how early it is offered: higher comes first."""
        if namespace is not None:
            self._namespaces[tool] = namespace
        if priority is not None:
            self._priorities[tool] = priority

    def namespace(self, tool: str) -> str | None:
        """Return the group of a tool, None if it has none."""
        return self._namespaces.get(tool)

    def offered(self, specs: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        """Return the tools that the model is offered, those of equal priority in their order."""
        offered = [spec for spec in specs if self.is_enabled(spec.name)]
        return tuple(sorted(offered, key=lambda spec: -self._priority(spec.name)))

    def _priority(self, tool: str) -> float:
        priority = self._priorities.get(tool, 0)
        return priority if isinstance(priority, int | float) else 0

    async def capture(self) -> dict[str, Any] | None:
        """Return the state; None while nothing was set."""
        if not (self._enabled or self._namespaces or self._priorities or self._beyond):
            return None
        return {
            "enabled": self._enabled,
            "namespaces": self._namespaces,
            "priorities": self._priorities,
            **self._beyond,
        }

    async def restore(self, state: dict[str, Any], context: RestoreContext) -> None:
        """Take over what was stored; what this release does not know is kept."""
        known = ("enabled", "namespaces", "priorities")
        self._enabled = dict(state.get("enabled") or {})
        self._namespaces = dict(state.get("namespaces") or {})
        self._priorities = dict(state.get("priorities") or {})
        self._beyond = {key: value for key, value in state.items() if key not in known}


@final
class PersistentInstructions:
    """A file of instructions that outlives the conversation: read, and never written.

    What is kept with the session is the file's hash: under which instructions it was held.
    """

    name: Final = "persistent_instructions"
    version: Final = 1

    def __init__(self, path: str) -> None:
        self.path: str = path
        """Where the file is, or would be."""
        self.text: str = ""
        """What it says; empty where there is no file."""

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
        return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}

    async def restore(self, state: dict[str, Any], context: RestoreContext) -> None:
        """Say so if the file has changed since: the file counts."""
        if await self.capture() != state:
            log.info(
                "custom instructions have changed since the session was saved",
                extra={"agent": context.key.agent, "path": self.path},
            )


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
    """The parts of one agent."""

    def __init__(self, config: AgentConfig, session: Session) -> None:
        features = config.features
        self.tools: ToolSettings = ToolSettings()
        self.permissions: Permissions = Permissions()
        self.notes: InContextMemory | None = None
        self.instructions: PersistentInstructions | None = None
        own = config.memory_storage
        self.memory: MemoryStorage = SessionMemoryStorage(session) if own is None else own
        if features.in_context_memory:
            self.notes = InContextMemory()
        if features.persistent_instructions:
            self.instructions = PersistentInstructions(_instructions_path(config, session))
        self._session = session
        parts: tuple[Contributor | None, ...] = (
            self.tools,
            StoredConfig(_settings_of(config)),
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


def _settings_of(config: AgentConfig) -> dict[str, Any]:
    settings = {
        "model": getattr(config.model, "name", None) or type(config.model).__name__,
        "maxContextTokens": config.compaction.max_tokens,
        "strategy": "compaction",
    }
    return {
        **{key: value for key, value in settings.items() if value is not None},
        **config.settings,
    }


def _instructions_path(config: AgentConfig, session: Session) -> str:
    if config.custom_instructions is not None:
        return os.fspath(config.custom_instructions)
    folder = folder_of(session)
    if folder is None:
        raise ConfigError(
            f"agent {session.id!r}: persistent_instructions needs a file, and this store has no "
            "folder for it: give custom_instructions=PATH",
            option="custom_instructions",
        )
    return os.path.join(folder, INSTRUCTIONS)  # noqa: PTH118  # as the store names it


# Named state of an agent: declared config values, states, and files of its home folder


def archives_of(context: AgentContext) -> Archives:
    """Return the archives of an agent's home, with the paths that persistence.yaml names."""
    paths = context.declared.persist_paths
    return Archives(context.session, context.config.home, paths=paths)


def _wanted(context: AgentContext) -> Archives | None:
    """Return the archives of an agent whose home is kept, None for one whose home is not."""
    wanted, declared = context.config.archive, context.declared
    if declared.found is None or wanted is False:
        return None  # not started, or told not to
    archives = archives_of(context)
    names_paths = bool(declared.persist_paths) and archives.home is not None
    return archives if wanted or names_paths else None


async def bring_home(context: AgentContext) -> None:
    """Bring back the newest archive at a start, unless the home is it already, or newer."""
    archives, facts = _wanted(context), {"agent": context.agent_id}
    if archives is not None:
        done = await archives.resume()
        log.info("home resumed", extra={**facts, "changed": done.changed, "kept": done.kept})
    elif context.config.archive is None and context.declared.persist_paths:
        log.warning("persist_paths not kept: give AgentConfig(home=...)", extra=facts)


async def keep_home(context: AgentContext) -> None:
    """Archive the home of an agent that has stopped; errors as `Archives.save`."""
    archives = _wanted(context)
    if archives is not None:
        await archives.save()


RESERVED: Final = frozenset({DOCUMENT, "custom_data"})
"""States that are the agent's own."""


def home_of(context: AgentContext) -> Path:
    """Return the folder of an agent's files.

    Raises:
        ConfigError: The store has no folders, and none was given.

    """
    if context.config.home is not None:
        return Path(context.config.home).expanduser().absolute()
    folder = folder_of(context.session)
    if folder is None:
        raise ConfigError(
            f"agent {context.agent_id!r} has no home, since its store has no folders: "
            "give AgentConfig(home=…)",
            option="home",
            agent=context.agent_id,
        )
    return Path(folder) / "files"


async def declare(context: AgentContext) -> None:
    """Read the declarations next to the agent's code, and prepare its config.

    Raises:
        ConfigError: persistence.yaml is invalid; nothing was written.
        LeaseHeldError: Another process keeps holding what the agent's sessions share.

    """
    declared = context.declared
    folder = context.config.agent_dir or declared.code_dir
    declarations = await anyio.to_thread.run_sync(partial(declared_beside, folder))
    declared.found, keys = declarations, declarations.declaration.config
    make = initial_values(declarations.agent_name or context.config.name)
    parts = _parts(context, keys, is_branch=await is_branch(context.session))
    start = partial(in_background, context.session)
    declared.config = await PersistentConfig.of(keys, parts, make, start)


def _parts(
    context: AgentContext, keys: Mapping[str, ConfigKey], *, is_branch: bool
) -> list[ConfigPart]:
    """Return where the values lie: what is regenerated in the session, the rest in the default."""
    session, is_new = context.session, context.sets_aside
    session_place = SessionPlace(session)
    sessions, key = context.declared.sessions, session.key
    owner = f"{key.agent}/{key.session}"
    if session.key.session == DEFAULT_SESSION or sessions is None:
        return [ConfigPart(session_place, keys, is_new, session=owner, is_branch=is_branch)]
    agent_place = AgentPlace(sessions, key.agent, tenant=key.tenant, wait=context.config.wait)
    parts = [
        ConfigPart(agent_place, shared(keys), is_new=False, keeps=keys),
        ConfigPart(session_place, own(keys), is_new, session=owner, is_branch=is_branch),
    ]
    return [part for part in parts if part.keys]


def code_dir(cls: type, base: type) -> Path | None:
    """Return the folder of an agent's code: its class's, or the program's for the plain one."""
    if cls is base:
        return program_dir()
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return None if file is None else Path(file).absolute().parent
