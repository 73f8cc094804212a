"""``perdure fork``, ``copy`` and ``rename``: sessions that begin with the history of others."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import anyio
from cyclopts import Parameter

from perdure.cli.access import existing, managed
from perdure.cli.checkpoints import checkpoint_of
from perdure.cli.output import SessionOption, print_json, say
from perdure.errors import ConfigError
from perdure.records.checkpoints import Checkpoint
from perdure.session.fork import Fork
from perdure.session.manager import SessionManager

Id = Annotated[str, Parameter(name="ID")]
NewId = Annotated[str, Parameter(name="NEW-ID")]


def fork(
    id: Id,
    new_id: NewId,
    /,
    *,
    at: str | None = None,
    at_checkpoint: int | None = None,
    new_session: str | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Fork a session: a new one begins with its history, and both go on.

    Writes one short record, however long the history is, and takes no lease on it.

    Args:
        id: The agent's id.
        new_id: The id of the fork.
        at: Where it goes on: the number of the last record that both have, or the id of a turn.
            Default: the end.
        at_checkpoint: Where it goes on: the number of a checkpoint.
        new_session: The fork's session; default: as --session.

    """
    if at is not None and at_checkpoint is not None:
        message = "fork: --at and --at-checkpoint are two places: give one of them"
        raise ConfigError(message, option="at")

    async def act(sessions: SessionManager) -> Fork:
        point: int | str | Checkpoint | None = at
        if at is not None and at.isdecimal():
            point = int(at)
        if at_checkpoint is not None:
            point = await checkpoint_of(sessions, id, at_checkpoint, where)
        return await sessions.fork(
            id,
            new_id,
            at=point,
            session=where.session,
            new_session=new_session,
            tenant=where.tenant,
        )

    return anyio.run(partial(_do, act, where, "goes on behind record {at} of {parent}"))


def copy(
    id: Id,
    new_id: NewId,
    /,
    *,
    new_session: str | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Copy a session, its history included: the copy does not need the other one.

    Args:
        id: The agent's id.
        new_id: The id of the copy.
        new_session: The copy's session; default: as --session.

    """

    async def act(sessions: SessionManager) -> Fork:
        return await sessions.copy(
            id, new_id, session=where.session, new_session=new_session, tenant=where.tenant
        )

    return anyio.run(partial(_do, act, where, "has all {at} records of {parent}"))


def rename(
    id: Id,
    new_id: NewId,
    /,
    *,
    new_session: str | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Give a session another id.

    Killed anywhere, one of the ids opens with everything: run it again, and it finishes.

    Args:
        id: The agent's id.
        new_id: The new id.
        new_session: The new session; default: as --session.

    """

    async def act(sessions: SessionManager) -> Fork:
        return await sessions.rename(
            id, new_id, session=where.session, new_session=new_session, tenant=where.tenant
        )

    return anyio.run(partial(_do, act, where, "was {parent}"))


async def _do(act: Any, where: SessionOption, text: str) -> int:
    async with managed(existing(where.store), write=True) as sessions:
        done: Fork = await act(sessions)
    if where.json:
        print_json({"agent": done.key.agent, "session": done.key.session, **_parts(done)})
    else:
        say(f"{done.key} {text.format(at=done.at, parent=done.parent)}")
    return 0


def _parts(done: Fork) -> dict[str, Any]:
    parent = {"agent": done.parent.agent, "session": done.parent.session}
    return {"tenant": done.key.tenant, "parent": parent, "at": done.at}
