"""``perdure checkpoints``, ``diff`` and ``rollback``: labelled points of a session."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import anyio
import msgspec
from cyclopts import Parameter

from perdure.checkpoints.diff import Difference
from perdure.checkpoints.verify import Verification
from perdure.cli.access import existing, managed, no_session
from perdure.cli.output import SessionOption, clip, print_json, print_table, say
from perdure.errors import CheckpointNotFoundError
from perdure.records.checkpoints import CapturedState, Checkpoint
from perdure.session.manager import SessionManager
from perdure.session.session import SessionView

Id = Annotated[str, Parameter(name="ID")]
PREVIEW = 60


def checkpoints(
    id: Id,
    /,
    *,
    verify: bool = False,
    create: str | None = None,
    keep: int | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """List a session's checkpoints; make one, let old ones go, or verify all of them.

    Without --create and --keep it only reads, and is in nobody's way.

    Args:
        id: The agent's id.
        verify: Look through chain, log and states for what was changed or lost; exit with 1 if
            anything was.
        create: Make a checkpoint of the session, with this label, first.
        keep: Let all but so many of the newest go, first.

    """
    return anyio.run(partial(_checkpoints, id, create, keep, verify=verify, where=where))


async def _checkpoints(
    id: str, create: str | None, keep: int | None, *, verify: bool, where: SessionOption
) -> int:
    store = existing(where.store)
    async with managed(store, write=create is not None or keep is not None) as sessions:
        if create is not None or keep is not None:
            await _change(sessions, id, create, keep, where)
        view = await _view(sessions, id, where)
        checkpoints = await view.checkpoints.states()
        verified = await view.checkpoints.verify() if verify else None
    if where.json:
        print_json(
            {
                "checkpoints": [_fields(checkpoint) for checkpoint in checkpoints],
                "verified": verified,
            }
        )
    else:
        _print(checkpoints, verified)
    return 0 if verified is None or verified.ok else 1


async def _change(
    sessions: SessionManager, id: str, create: str | None, keep: int | None, where: SessionOption
) -> None:
    opened = sessions.open(id, session=where.session, tenant=where.tenant, create=False)
    async with opened as session:
        if create is not None:
            await session.checkpoints.create(create)
        if keep is not None:
            await session.checkpoints.prune(keep=keep)


async def _view(sessions: SessionManager, id: str, where: SessionOption) -> SessionView:
    view = await sessions.load(id, session=where.session, tenant=where.tenant)
    if view is None:
        raise no_session(where.key(id), existing(where.store))
    return view


async def checkpoint_of(
    sessions: SessionManager, id: str, number: int, where: SessionOption
) -> Checkpoint:
    """Return a session's checkpoint.

    Raises:
        CheckpointNotFoundError: There is none of this id.

    """
    view = await _view(sessions, id, where)
    checkpoint = await view.checkpoints.get(number)
    if checkpoint is None:
        message = f"session {view.key} has no checkpoint {number}: `perdure checkpoints {id}`"
        raise CheckpointNotFoundError(message, checkpoint=number)
    return checkpoint


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(checkpoint))
    fields.pop("link")
    return fields


def _print(checkpoints: list[Checkpoint], verified: Verification | None) -> None:
    if checkpoints:
        rows = (
            (
                str(checkpoint.id),
                str(checkpoint.timestamp),
                str(checkpoint.event_seq),
                _of(checkpoint),
                clip(checkpoint.label, PREVIEW),
            )
            for checkpoint in checkpoints
        )
        print_table(("id", "time", "record", "of", "label"), rows, right="id time record")
    else:
        say("no checkpoints")
    if verified is None:
        return
    for problem in verified.problems:
        name = "a pruning" if problem.id is None else f"checkpoint {problem.id}"
        say(f"{name}: {problem.what}")
    unchecked = f", {len(verified.unchecked)} of them on history that was pruned"
    say(
        f"{verified.checkpoints} checkpoints and {verified.pruned} pruned ones"
        f"{unchecked if verified.unchecked else ''}: {len(verified.problems)} problems"
    )


def _of(checkpoint: Checkpoint) -> str:
    state = checkpoint.state
    return "the session" if isinstance(state, CapturedState) else f"{state.size} bytes"


def diff(
    id: Id,
    a: Annotated[int, Parameter(name="A")],
    b: Annotated[int, Parameter(name="B")],
    /,
    *,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Show what changed from one checkpoint of a session to another.

    Reads without a lease.

    Args:
        id: The agent's id.
        a: The number of the checkpoint to begin with.
        b: The number of the other one.

    """
    anyio.run(_diff, id, a, b, where)
    return 0


async def _diff(id: str, a: int, b: int, where: SessionOption) -> None:
    async with managed(existing(where.store)) as sessions:
        view = await _view(sessions, id, where)
        differences: Difference = await view.checkpoints.diff(a, b)
    if where.json:
        print_json(differences)
        return
    for path, value in differences.removed.items():
        say(f"- {path}  {_shown(value)}")
    for path, change in differences.changed.items():
        say(f"~ {path}  {_shown(change.before)} → {_shown(change.after)}")
    for path, value in differences.added.items():
        say(f"+ {path}  {_shown(value)}")
    if not differences:
        say("no difference")


def _shown(value: Any) -> str:
    return clip(msgspec.json.encode(value).decode(), PREVIEW)


def rollback(
    id: Id,
    checkpoint: Annotated[int, Parameter(name="CHECKPOINT")],
    /,
    *,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Take a session back to a checkpoint, as a new entry: nothing is erased.

    Context, memory and states become what they were. Killed anywhere, all of it is done, or
    nothing.

    Args:
        id: The agent's id.
        checkpoint: The number of the checkpoint; `perdure checkpoints` lists them.

    """
    anyio.run(_rollback, id, checkpoint, where)
    return 0


async def _rollback(id: str, number: int, where: SessionOption) -> None:
    async with managed(existing(where.store), write=True) as sessions:
        opened = sessions.open(id, session=where.session, tenant=where.tenant, create=False)
        async with opened as session:
            done = await session.checkpoints.rollback(number)
    if where.json:
        print_json(
            {"checkpoint": _fields(done.checkpoint), "to": _fields(done.to), "state": done.state}
        )
        return
    say(f"{id} is what it was at checkpoint {number} ({done.to.label})")
    say(f"that is checkpoint {done.checkpoint.id} now; go back to an earlier one to undo it")
    if done.state is not None:
        say("the state that was given then is for its owner to apply: --json shows it")
