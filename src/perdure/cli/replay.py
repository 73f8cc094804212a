"""``perdure replay``: what an agent decided and used, and whether its record is whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Final, Protocol

import anyio
import msgspec
from cyclopts import Parameter

from perdure._lib.files import NewFile
from perdure.checkpoints.replay import ReplayReport, TimelineRow
from perdure.checkpoints.replay_session import replay_files
from perdure.checkpoints.report_html import page, shown
from perdure.cli.access import existing, managed, no_session
from perdure.cli.output import SessionOption, print_json, print_table, say
from perdure.errors import ConfigError

SHOWN: Final = 1000
"""Rows of the page for people."""
PART: Final = 1024 * 1024


def replay(
    id: Annotated[str | None, Parameter(name="ID")] = None,
    /,
    *,
    since: int | None = None,
    files: Path | None = None,
    report: Path | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Replay a session's events in a dry run: is anything missing, what was decided and used.

    Nothing is done again, and nothing changed. Exits with 1 if an event is missing, moved or
    changed, or a checkpoint is not what was recorded.

    Args:
        id: The agent's id.
        since: A checkpoint's id, to begin behind it.
        files: A folder with events.jsonl and checkpoints.jsonl, instead of a session.
        report: A new file for the whole report: .html for people, .json for programs.

    """
    if (id is None) == (files is None):
        raise ConfigError("name a session, or a folder with --files: one of the two")
    if files is not None and since is not None:
        raise ConfigError("--since counts checkpoints of a session: it does not go with --files")
    return anyio.run(partial(_replay, id, since, files, report, where))


async def _replay(
    id: str | None, since: int | None, files: Path | None, report: Path | None, where: SessionOption
) -> int:
    sink = _sink_for(report)
    try:
        if files is not None:
            replay_report = await replay_files(files, on_row=sink.row)
        else:
            replay_report = await _of_session(id or "", since, sink, where)
        sink.publish(replay_report)
    finally:
        sink.close()
    if where.json:
        print_json({**msgspec.to_builtins(replay_report), "ok": replay_report.ok})
    else:
        _print(replay_report, report)
    return 0 if replay_report.ok else 1


async def _of_session(
    id: str, since: int | None, sink: _Sink, where: SessionOption
) -> ReplayReport:
    store = existing(where.store)
    async with managed(store) as sessions:
        view = await sessions.load(id, session=where.session, tenant=where.tenant)
        if view is None:
            raise no_session(where.key(id), store)
        return await view.events.replay(since=since, on_row=sink.row)


def _print(report: ReplayReport, written: Path | None) -> None:
    say(
        f"{report.source}: {report.events:,} events of {report.turns:,} turns, "
        f"{report.decisions:,} decisions, {report.snapshots:,} checkpoints compared"
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
    if report.ok:
        say("nothing is missing, moved or changed")
    if written is not None:
        say(f"report written to {written}")


class _Sink(Protocol):
    """Where the rows of a report go."""

    def row(self, row: TimelineRow) -> None: ...

    def publish(self, report: ReplayReport) -> None: ...

    def close(self) -> None: ...


def _sink_for(report: Path | None) -> _Sink:
    if report is None:
        return _Nowhere()
    if report.suffix == ".json":
        return _Json(report)
    if report.suffix in {".html", ".htm"}:
        return _Page(report)
    raise ConfigError(f"--report {report}: the name ends in .html or .json", report=str(report))


class _Nowhere:
    def row(self, row: TimelineRow) -> None:
        """Only the counts are asked for."""

    def publish(self, report: ReplayReport) -> None:
        """There is no report."""

    def close(self) -> None:
        """Nothing is open."""


class _Json:
    """Every row as it comes: the report may be larger than the memory."""

    def __init__(self, path: Path) -> None:
        self._file = NewFile(path)
        self._before = b'{"rows":[\n'

    def row(self, row: TimelineRow) -> None:
        if self._file.add(self._before + msgspec.json.encode(row)) >= PART:
            self._file.write()
        self._before = b",\n"

    def publish(self, report: ReplayReport) -> None:
        begun = self._before if self._before != b",\n" else b""
        summary = {**msgspec.to_builtins(report), "ok": report.ok}
        end = b'\n],"summary":' + msgspec.json.encode(summary) + b"}\n"
        self._file.add(begun + end)
        self._file.publish()

    def close(self) -> None:
        self._file.close()


class _Page:
    """The first rows, and how many there are more."""

    def __init__(self, path: Path) -> None:
        self._file = NewFile(path)
        self._rows: list[TimelineRow] = []
        self._more = 0

    def row(self, row: TimelineRow) -> None:
        if len(self._rows) < SHOWN:
            self._rows.append(shown(row))
        else:
            self._more += 1

    def publish(self, report: ReplayReport) -> None:
        self._file.add(page(report, self._rows, self._more).encode())
        self._file.publish()

    def close(self) -> None:
        self._file.close()
