"""Files and declared values of an agent: its home folder, its archives, and persistence.yaml.

Config are the few values that persistence.yaml declares; files are in the home folder, which is
archived with the session when the agent stops, and restored when it starts. Each is durable when
the call that wrote it returns, files when they are archived.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio.to_thread

from perdure._lib.logs import log_facts
from perdure.agent.context import AgentContext
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
from perdure.errors import ConfigError
from perdure.records.keys import DEFAULT_SESSION
from perdure.session.internals import in_background, is_branch

if TYPE_CHECKING:
    from perdure.config.schema import ConfigKey

log: logging.Logger = logging.getLogger("perdure.agent")


def archives_of(context: AgentContext) -> Archives:
    """Return the archives of an agent's home, with the paths that persistence.yaml names."""
    home, paths = context.config.home, context.declared.persist_paths
    expanded = None if home is None else Path(home).expanduser()
    return Archives(context.session, expanded, paths=paths)


def _wanted(context: AgentContext) -> Archives | None:
    """Return the archives of an agent whose home is kept, None for one whose home is not."""
    wanted, declared = context.config.archive, context.declared
    if declared.found is None or wanted is False:
        return None  # not started, or not wanted
    archives = archives_of(context)
    names_paths = bool(declared.persist_paths) and archives.home is not None
    return archives if wanted or names_paths else None


async def bring_home(context: AgentContext) -> None:
    """Bring back the newest archive at a start, unless the home is it already, or newer."""
    archives, agent = _wanted(context), context.agent_id
    if archives is not None:
        done = await archives.resume()
        log_facts(
            log, logging.INFO, "home resumed", agent=agent, changed=done.changed, kept=done.kept
        )
    elif context.config.archive is None and context.declared.persist_paths:
        message = "persist_paths not kept: give AgentConfig(home=...)"
        log_facts(log, logging.WARNING, message, agent=agent)


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
    home = archives_of(context).home
    if home is None:
        raise ConfigError(
            f"agent {context.agent_id!r} has no home, since its store has no folders: "
            "give AgentConfig(home=…)",
            option="home",
            agent=context.agent_id,
        )
    return Path(home)


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
