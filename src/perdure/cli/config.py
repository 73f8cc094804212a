"""``perdure config``: check a persistence.yaml, and apply it to stored sessions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

import perdure
from perdure.autosave.options import Shutdown
from perdure.cli.access import existing
from perdure.cli.output import StoreOption, print_json, say
from perdure.cli.sessions import say_pruned
from perdure.config.apply import ConfigReport, apply_to_folder, apply_to_store
from perdure.config.discover import FILE, Declared, declared_at, url_of
from perdure.config.locations import FolderPlace, state_folder
from perdure.config.schema import Declaration
from perdure.config.variables import initial_values
from perdure.errors import ConfigError
from perdure.session.manager import SessionManager

SCHEMA = Path(__file__).parents[1] / "config" / "persistence.schema.json"


async def config(
    action: Literal["check", "plan", "apply", "schema"],
    file: Annotated[Path, Parameter(name="FILE")] = Path(FILE),
    /,
    *,
    id: str | None = None,
    tenant: str = "",
    folder: Path | None = None,
    where: StoreOption = StoreOption(),  # noqa: B008  # frozen
) -> int:
    """Check a persistence.yaml, or apply what it declares to stored sessions.

    check: report every mistake, with line and column. plan: show what apply would change: keys
    added, set aside, brought back; history that the retention removes. apply: do it. schema: print
    the JSON Schema for editors.

    Args:
        id: Only this agent; default: all that have values.
        tenant: The tenant, in a store that several tenants share.
        folder: A folder of state, as AGENT_STATE_DIR names one, instead of a store.

    """
    if action == "schema":
        print_json(msgspec.json.decode(SCHEMA.read_bytes()))
        return 0
    if action == "check":
        return _check(file, as_json=where.json)
    return await _apply(file, id, tenant, folder, where, dry_run=action == "plan")


def _check(file: Path, *, as_json: bool) -> int:
    problems: Any = ()
    declaration = Declaration()
    try:
        declaration = declared_at(file).declaration
    except ConfigError as error:
        problems = error.facts.get("problems")
        if problems is None:
            raise
    if as_json:
        print_json(
            {
                "file": str(file),
                "problems": problems,
                "warnings": declaration.warnings,
                "keys": list(declaration.config),
                "persist_paths": declaration.persist_paths,
            }
        )
        return 1 if problems else 0
    for level, found_problems in (("problem", problems), ("warning", declaration.warnings)):
        for problem in found_problems:
            say(f"{file}:{problem.line}:{problem.column}: {level}: {problem.message}")
    if not problems:
        say(f"{file}: {len(declaration.config)} keys, {len(declaration.persist_paths)} paths: fits")
    return 1 if problems else 0


async def _apply(
    file: Path,
    id: str | None,
    tenant: str,
    folder: Path | None,
    where: StoreOption,
    *,
    dry_run: bool,
) -> int:
    declared = declared_at(file)
    make, declaration = initial_values(declared.agent_name), declared.declaration
    if folder is not None:
        place = FolderPlace(state_folder(folder))
        report = await apply_to_folder(place, declaration, make, dry_run=dry_run)
    else:
        async with _manager(where.store, file, declared) as sessions:
            report = await apply_to_store(
                sessions, declaration, make, id=id, tenant=tenant, dry_run=dry_run
            )
    if where.json:
        print_json(report)
    else:
        _print(report)
    return 1 if report.held or report.damaged else 0


def _manager(store: str | None, file: Path, declared: Declared) -> SessionManager:
    """Return a manager of the store that the file configures; refuse one that does not exist."""
    url = store or os.environ.get("PERDURE_URL") or url_of(declared, os.environ)
    existing(None if url is None else url.removeprefix("encrypted+"))
    return perdure.connect(url, config=file, autosave=None, shutdown=Shutdown(signals=False))


def _print(report: ConfigReport) -> None:
    would = "would be " * report.dry_run
    for change in report.changes:
        plan = change.plan
        for keys, what in (
            (plan.added, "initialized"),
            (plan.orphaned, "put aside"),
            (plan.returned, "brought back"),
        ):
            if keys:
                say(f"{change.place}: {would}{what}: {', '.join(keys)}")
    for key in report.held:
        say(f"{key}: another process holds it: left alone")
    for key in report.damaged:
        say(f"{key}: cannot be read: left alone; `perdure check` says why")
    if report.pruned is not None:
        say_pruned(report.pruned)
    counted = f"{len(report.changes)} of {report.looked_at} places"
    done = "differ; nothing was changed" if report.dry_run else "changed"
    say(f"{counted} {done}")
