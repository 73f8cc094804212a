"""``perdure checkpoints``, ``diff``, ``rollback`` and ``replay``: a session's past, in points."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter

from perdure._lib.files import NewFile
from perdure.checkpoints.engine import Difference
from perdure.checkpoints.events import replay_files
from perdure.checkpoints.replay import ReplayReport, TimelineRow, page, shown
from perdure.checkpoints.verify import Verification
from perdure.cli.access import existing, load_view, managed
from perdure.cli.output import SessionOption, clip, print_table, require_free, say
from perdure.errors import CheckpointNotFoundError, ConfigError
from perdure.records.checkpoints import CapturedState, Checkpoint
from perdure.session.manager import SessionManager
from perdure.transfer.second_look import look_again

Id = Annotated[str, Parameter(name="ID")]
PREVIEW = 60


async def checkpoints(
    id: Id,
    /,
    *,
    verify: bool = False,
    create: str | None = None,
    keep: int | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """List a session's checkpoints; create one, prune old ones, or verify all of them.

    Without --create and --keep it only reads, and takes no lease.

    Args:
        id: The agent's id.
        verify: Check chain, log and states for changes and losses; exit with 1 if there are any.
        create: First create a checkpoint of the session, with this label.
        keep: First prune all but so many of the newest.

    """
    store = existing(where.store)
    is_changed = create is not None or keep is not None
    async with managed(store, write=is_changed) as sessions:
        if is_changed:
            opened = sessions.open(id, session=where.session, tenant=where.tenant, create=False)
            async with opened as session:
                if create is not None:
                    await session.checkpoints.create(create)
                if keep is not None:
                    await session.checkpoints.prune(keep=keep)

        async def look() -> tuple[list[Checkpoint], Verification | None]:
            view = await load_view(sessions, id, where)
            states = await view.checkpoints.states()
            return states, await view.checkpoints.verify() if verify else None

        states, verified = await look_again(
            store,
            where.key(id),
            look,
            is_wrong=lambda seen: seen[1] is not None and not seen[1].ok,
        )
    fields = [_fields(checkpoint) for checkpoint in states]
    where.show(
        {"checkpoints": fields, "verified": verified}, lambda: _print_checkpoints(states, verified)
    )
    return 0 if verified is None or verified.ok else 1


async def checkpoint_of(
    sessions: SessionManager, id: str, number: int, where: SessionOption
) -> Checkpoint:
    """Return a session's checkpoint.

    Raises:
        CheckpointNotFoundError: The session has no checkpoint with this number.

    """
    view = await load_view(sessions, id, where)
    checkpoint = await view.checkpoints.get(number)
    if checkpoint is None:
        raise CheckpointNotFoundError(
            f"session {view.key} has no checkpoint {number}: `perdure checkpoints {id}`",
            checkpoint=number,
        )
    return checkpoint


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(checkpoint))
    fields.pop("link")
    return fields


def _print_checkpoints(checkpoints: list[Checkpoint], verified: Verification | None) -> None:
    if checkpoints:
        rows = []
        for checkpoint in checkpoints:
            state = checkpoint.state
            of = "the session" if isinstance(state, CapturedState) else f"{state.size} bytes"
            rows.append(
                (
                    str(checkpoint.id),
                    str(checkpoint.timestamp),
                    str(checkpoint.event_seq),
                    of,
                    clip(checkpoint.label, PREVIEW),
                )
            )
        print_table(("id", "clock", "record", "of", "label"), rows, right="id clock record")
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


async def diff(
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
        a: The number of the first checkpoint.
        b: The number of the second checkpoint.

    """
    async with managed(existing(where.store)) as sessions:
        view = await load_view(sessions, id, where)
        differences: Difference = await view.checkpoints.diff(a, b)
    lines = [f"- {path}  {_shown(value)}" for path, value in differences.removed.items()]
    lines += [
        f"~ {path}  {_shown(change.before)} → {_shown(change.after)}"
        for path, change in differences.changed.items()
    ]
    lines += [f"+ {path}  {_shown(value)}" for path, value in differences.added.items()]
    where.show(differences, "\n".join(lines) or "no difference")
    return 0


def _shown(value: Any) -> str:
    return clip(msgspec.json.encode(value).decode(), PREVIEW)


async def rollback(
    id: Id,
    checkpoint: Annotated[int, Parameter(name="CHECKPOINT")],
    /,
    *,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Roll a session back to a checkpoint, as a new entry: nothing is erased.

    Context, memory and states become what they were. If it is killed, all of it is done, or
    nothing.

    Args:
        id: The agent's id.
        checkpoint: The number of the checkpoint; `perdure checkpoints` lists them.

    """
    async with managed(existing(where.store), write=True) as sessions:
        opened = sessions.open(id, session=where.session, tenant=where.tenant, create=False)
        async with opened as session:
            done = await session.checkpoints.rollback(checkpoint)
    lines = [
        f"{id} is what it was at checkpoint {checkpoint} ({done.to.label})",
        f"that is checkpoint {done.checkpoint.id} now; roll back to an earlier one to undo it",
    ]
    if done.state is not None:
        lines.append(
            "the checkpoint's explicit state is for your program to apply: --json shows it"
        )
    facts = {
        "checkpoint": _fields(done.checkpoint),
        "to": _fields(done.to),
        "state": done.state,
    }
    where.show(facts, "\n".join(lines))
    return 0


SHOWN: Final = 1000
"""Rows of the page for people."""
PART: Final = 1024 * 1024


async def replay(
    id: Annotated[str | None, Parameter(name="ID")] = None,
    /,
    *,
    since: int | None = None,
    files: Path | None = None,
    report: Path | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Replay a session's events in a dry run: is anything missing, what was decided and used.

    No action is repeated and nothing is changed. Exits with 0 if all was compared and fits; with
    1 if an event is missing, moved or changed, or a checkpoint differs from what was recorded;
    with 3 if nothing is wrong, but something could not be compared.

    Args:
        id: The agent's id.
        since: A checkpoint's id, to begin after it.
        files: A folder with events.jsonl and checkpoints.jsonl, instead of a session.
        report: A new file for the whole report: .html for people, .json for programs.

    """
    if (id is None) == (files is None):
        raise ConfigError("name a session, or a folder with --files: one of the two")
    if files is not None and since is not None:
        raise ConfigError("--since counts checkpoints of a session: it does not go with --files")
    file = None if report is None else _ReportFile(report)
    on_row = None if file is None else file.row
    try:
        if files is not None:
            done = await replay_files(files, on_row=on_row)
        else:
            async with managed(existing(where.store)) as sessions:
                view = await load_view(sessions, id or "", where)
                done = await view.events.replay(since=since, on_row=on_row)
        if file is not None:
            file.publish(done)
    finally:
        if file is not None:
            file.close()
    where.show(_facts(done), lambda: _print_replay(done, report))
    return _STATUS[done.verdict]


_STATUS: Final = {"compared": 0, "wrong": 1, "not compared": 3}


def _facts(report: ReplayReport) -> dict[str, Any]:
    return {**msgspec.to_builtins(report), "verdict": report.verdict, "ok": report.ok}


def _print_replay(report: ReplayReport, written: Path | None) -> None:
    say(
        f"{report.source}: {report.events:,} events of {report.turns:,} turns, "
        f"{report.decisions:,} decisions, {report.snapshots:,} checkpoints compared, "
        f"{report.unverified:,} not compared"
    )
    if report.capabilities:
        rows = (
            (name, *(str(getattr(use, problem)) for problem in use.__struct_fields__))
            for name, use in report.capabilities.items()
        )
        columns = ("capability", "requested", "granted", "denied", "used", "failed")
        print_table(columns, rows, right=" ".join(columns[1:]))
    for problem in report.problems:
        say(f"problem: {problem}")
    if report.problem_count > len(report.problems):
        say(f"and {report.problem_count - len(report.problems):,} more problems")
    for what in report.unproven:
        say(f"not compared: {what}")
    say(
        {
            "compared": "compared: nothing is missing, moved or changed",
            "not compared": "not compared as a whole: what was compared fits",
            "wrong": "wrong: something is missing, moved or changed",
        }[report.verdict]
    )
    if written is not None:
        say(f"report written to {written}")


class _ReportFile:
    """A new file with a report, as its name ends.

    ``.json``: every row, written one by one, since there may be more than memory holds.
    ``.html``: the first rows, and the number of the others.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in {".json", ".html", ".htm"}:
            raise ConfigError(f"--report {path}: the name ends in .html or .json", report=str(path))
        require_free(path)
        self._is_json = path.suffix == ".json"
        self._file = NewFile(path)
        self._count = 0
        self._shown: list[TimelineRow] = []

    def row(self, row: TimelineRow) -> None:
        """Take in the next row."""
        self._count += 1
        if self._is_json:
            before = b",\n" if self._count > 1 else _JSON_BEGIN
            if self._file.add(before + msgspec.json.encode(row)) >= PART:
                self._file.write()
        elif self._count <= SHOWN:
            self._shown.append(shown(row))

    def publish(self, report: ReplayReport) -> None:
        """Make it complete."""
        if self._is_json:
            begun = b"" if self._count else _JSON_BEGIN
            end = b'\n],"summary":' + msgspec.json.encode(_facts(report)) + b"}\n"
            self._file.add(begun + end)
        else:
            left_out = self._count - len(self._shown)
            self._file.add(page(report, self._shown, left_out).encode())
        self._file.publish()

    def close(self) -> None:
        """Remove what was not published."""
        self._file.close()


_JSON_BEGIN: Final = b'{"rows":[\n'
