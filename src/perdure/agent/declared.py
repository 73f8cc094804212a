"""Named state of an agent: declared config values, states, and files of its home folder.

Config are the few values that persistence.yaml declares; states are JSON under any key; files are
in the home folder, which is archived with the session when the agent stops and restored when it
starts. Each is durable when the call that wrote it returns, files when they are archived.
"""

from __future__ import annotations

import inspect
import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import anyio.to_thread

from perdure.archive.archives import Archives
from perdure.config.discover import Declared, declared_beside, program_dir
from perdure.config.locations import AgentPlace, SessionPlace, check_state_key
from perdure.config.persistent_config import ConfigPart, PersistentConfig
from perdure.config.values import DOCUMENT, own, shared
from perdure.config.variables import initial_values
from perdure.errors import ConfigError, SessionError
from perdure.records.keys import DEFAULT_SESSION
from perdure.session.internals import folder_of, in_background, is_branch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perdure.agent.context import AgentContext
    from perdure.config.schema import ConfigKey
    from perdure.session.manager import SessionManager


log: logging.Logger = logging.getLogger("perdure.agent")


def archives_of(context: AgentContext) -> Archives:
    """Return the archives of an agent's home, with the paths that persistence.yaml names."""
    declarations = context.declared.found
    paths = () if declarations is None else declarations.declaration.persist_paths
    return Archives(context.session, context.config.home, paths=paths)


def _wanted(context: AgentContext) -> Archives | None:
    """Return the archives of an agent whose home is kept, None for one whose home is not."""
    wanted, declarations = context.config.archive, context.declared.found
    if declarations is None or wanted is False:
        return None  # not started, or told not to
    archives = archives_of(context)
    declared = bool(declarations.declaration.persist_paths) and archives.home is not None
    return archives if wanted or declared else None


async def bring_home(context: AgentContext) -> None:
    """Bring back the newest archive at a start, unless the home is it already, or newer."""
    archives, declarations = _wanted(context), context.declared.found
    facts = {"agent": context.agent_id}
    if archives is not None:
        done = await archives.resume()
        log.info("home resumed", extra={**facts, "changed": done.changed, "kept": done.kept})
    elif (
        context.config.archive is None
        and declarations is not None
        and declarations.declaration.persist_paths
    ):
        log.warning("persist_paths not kept: give AgentConfig(home=...)", extra=facts)


async def keep_home(context: AgentContext) -> None:
    """Archive the home of an agent that has stopped; errors as `Archives.save`."""
    archives = _wanted(context)
    if archives is not None:
        await archives.save()


# What an agent keeps by name: its config, its states, its files
#
# Three levels. The config are the few values that persistence.yaml declares; states are JSON under
# any key; files lie in the agent's home. All of it is durable when the call that wrote it returns,
# files when they are archived.


RESERVED: Final = frozenset({DOCUMENT, "custom_data"})
"""States that are the agent's own."""


@final
class AgentDeclared:
    """Declarations next to an agent's code, and their values; filled by the bootstrap."""

    def __init__(self) -> None:
        self.sessions: SessionManager | None = None
        """The manager that keeps the agent's session."""
        self.found: Declared | None = None
        """What persistence.yaml says; None before the bootstrap."""
        self.code_dir: Path | None = None
        """Where persistence.yaml is looked for, unless `AgentConfig.agent_dir` says where."""
        self._agent: Keeping | None = None
        self._config: PersistentConfig | None = None

    @property
    def config(self) -> PersistentConfig:
        """The values that it declares.

        Raises:
            SessionError: The agent was not started.

        """
        if self._config is None:
            message = "this agent has no config before it is started: use `async with agent`"
            raise SessionError(message)
        return self._config

    @config.setter
    def config(self, config: PersistentConfig) -> None:
        self._config = config

    def belongs_to(self, agent: Keeping, base: type) -> None:
        """Take note of the agent: of its code's folder, and of its ``setup``."""
        self.code_dir, self._agent = _code_dir(type(agent), base), agent

    async def flush(self) -> None:
        """Keep what was set in the config and not awaited."""
        if self._config is not None:
            await self._config.flush()

    async def set_up(self) -> None:
        """Call the agent's own ``setup``."""
        if self._agent is not None:
            done: object = self._agent.setup()
            if inspect.isawaitable(done):  # one that only reads may be a plain method
                await done


class Keeping:
    """What an agent keeps by name; `perdure.agent.Agent` has these methods."""

    context: AgentContext

    async def setup(self) -> None:
        """Get ready: override it. Called when the agent has been restored, before any message."""

    @property
    def config(self) -> PersistentConfig:
        """The values that persistence.yaml declares, from the agent's start on.

        Raises:
            SessionError: The agent was not started.

        """
        return self.context.declared.config

    @property
    def home(self) -> Path:
        """The folder of its files: what `AgentConfig.home` says, else one in the store.

        Raises:
            ConfigError: The store has no folders, and none was given.

        """
        return home_of(self.context)

    @property
    def persist_paths(self) -> tuple[str, ...]:
        """The folders in its home that persistence.yaml names, from the agent's start on."""
        declarations = self.context.declared.found
        return () if declarations is None else declarations.declaration.persist_paths

    @property
    def archives(self) -> Archives:
        """Its home, saved with its session and brought back: ``await agent.archives.save()``."""
        return archives_of(self.context)

    async def save_state(self, key: str, data: Any) -> None:
        """Keep a value under a key, and return when it is durable.

        Raises:
            ConfigError: The key is empty, or reserved.
            NotStorableError: The value cannot be stored.

        """
        session = self.context.session
        session.state.set(check_state_key(key, RESERVED), data)
        await session.save()

    async def load_state(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``.

        Raises:
            ConfigError: The key is empty, or reserved.

        """
        return await self.context.session.state.get(check_state_key(key, RESERVED), default)

    async def list_state_keys(self) -> list[str]:
        """Return the keys that have a value, in order."""
        keys = await self.context.session.state.keys()
        return [key for key in keys if key not in RESERVED]

    async def delete_state(self, key: str) -> bool:
        """Forget a key durably; say whether it was there.

        Raises:
            ConfigError: The key is empty, or reserved.

        """
        session = self.context.session
        if check_state_key(key, RESERVED) not in await session.state.keys():
            return False
        session.state.drop(key)
        await session.save()
        return True


def home_of(context: AgentContext) -> Path:
    """Return the folder of an agent's files.

    Raises:
        ConfigError: The store has no folders, and none was given.

    """
    if context.config.home is not None:
        return Path(context.config.home).expanduser().absolute()
    folder = folder_of(context.session)
    if folder is None:
        message = (
            f"agent {context.agent_id!r} has no home, since its store has no folders: "
            "give AgentConfig(home=…)"
        )
        raise ConfigError(message, option="home", agent=context.agent_id)
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


def _code_dir(cls: type, base: type) -> Path | None:
    """Return the folder of an agent's code: its class's, or the program's for the plain one."""
    if cls is base:
        return program_dir()
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return None if file is None else Path(file).absolute().parent
