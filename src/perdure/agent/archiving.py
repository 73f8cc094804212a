"""An agent's home folder, archived with its session when it stops, brought back when it starts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from perdure.declare.archive.archives import Archives

if TYPE_CHECKING:
    from perdure.agent.context import AgentContext

__all__ = ["archives_of", "bring_home", "keep_home"]

log: logging.Logger = logging.getLogger("perdure.agent")


def archives_of(context: AgentContext) -> Archives:
    """Return the archives of an agent's home, with the paths that persistence.yaml names."""
    found = context.declared.found
    paths = () if found is None else found.declaration.persist_paths
    return Archives(context.session, context.config.home, paths=paths)


def _wanted(context: AgentContext) -> Archives | None:
    """Return the archives of an agent whose home is kept, None for one whose home is not."""
    wanted, found = context.config.archive, context.declared.found
    if found is None or wanted is False:
        return None  # not started, or told not to
    archives = archives_of(context)
    declared = bool(found.declaration.persist_paths) and archives.home is not None
    return archives if wanted or declared else None


async def bring_home(context: AgentContext) -> None:
    """Bring back the newest archive at a start, unless the home is it already, or newer."""
    archives, found = _wanted(context), context.declared.found
    facts = {"agent": context.agent_id}
    if archives is not None:
        done = await archives.resume()
        log.info("home resumed", extra={**facts, "changed": done.changed, "kept": done.kept})
    elif context.config.archive is None and found is not None and found.declaration.persist_paths:
        log.warning("persist_paths not kept: give AgentConfig(home=...)", extra=facts)


async def keep_home(context: AgentContext) -> None:
    """Archive the home of an agent that has stopped; errors as `Archives.save`."""
    archives = _wanted(context)
    if archives is not None:
        await archives.save()
