"""``perdure config`` and ``archive``: values and files that an agent keeps next to its sessions."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import msgspec
from cyclopts import Parameter
from rich.progress import DownloadColumn, TimeRemainingColumn

import perdure
from perdure.archive import ArchiveProgress, ArchiveRestored, Archives, ArchiveSaved
from perdure.autosave.options import Shutdown
from perdure.cli.access import existing, load_view, managed
from perdure.cli.output import (
    SessionOption,
    StoreOption,
    ago,
    print_json,
    print_table,
    progress_bar,
    say,
    size,
)
from perdure.cli.sessions import say_pruned
from perdure.config.locations import (
    ConfigReport,
    FolderPlace,
    apply_to_folder,
    apply_to_store,
    state_folder,
)
from perdure.config.persistent_config import FILE, declared_at, initial_values, url_of
from perdure.config.schema import Declaration
from perdure.errors import ConfigError
from perdure.records.archives import Archive

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
        return _check(file, where)
    return await _apply(file, id, tenant, folder, where, dry_run=action == "plan")


def _check(file: Path, where: StoreOption) -> int:
    problems: Any = ()
    declaration = Declaration()
    try:
        declaration = declared_at(file).declaration
    except ConfigError as error:
        problems = error.facts.get("problems")
        if problems is None:
            raise
    if where.json:
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
    for level, found in (("problem", problems), ("warning", declaration.warnings)):
        for each in found:
            say(f"{file}:{each.line}:{each.column}: {level}: {each.message}")
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
        url = where.store or os.environ.get("PERDURE_URL") or url_of(declared, os.environ)
        existing(None if url is None else url.removeprefix("encrypted+"))  # refused if it is not
        manager = perdure.connect(url, config=file, autosave=None, shutdown=Shutdown(signals=False))
        async with manager as sessions:
            report = await apply_to_store(
                sessions, declaration, make, id=id, tenant=tenant, dry_run=dry_run
            )
    where.show(report, lambda: _print(report))
    return 1 if report.held or report.damaged else 0


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


# ``perdure archive``: archives of an agent's home, saved with its session, restored, exported


Action = Literal["list", "save", "restore"]


async def archive(
    action: Action,
    id: Annotated[str, Parameter(name="ID")],
    /,
    *,
    home: Path | None = None,
    path: tuple[str, ...] = (),
    config: Path | None = None,
    only: bool = False,
    label: str = "",
    archive: str | None = None,
    to: Path | None = None,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    force: bool = False,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Save the files of an agent's home with its session, list its archives, or restore one.

    save: archive the home durably and verify it by reading it back; unchanged files are not stored
    again. restore: bring the home back, completely or not at all; what it replaces is kept next to
    the home.

    Args:
        action: What to do.
        id: The agent's id.
        home: The home folder. Default: the agent's own, in a file store.
        path: A folder in it to keep even if it is hidden; may be repeated.
        config: A persistence.yaml, for its persist_paths.
        only: Save only these paths, not everything that is visible.
        label: A label for the archive, to restore it by.
        archive: Which archive to restore: its id or its label. Default: the newest.
        to: With save, also write it into this new file: .tar.zst, .tar.gz or .tar.
        from_: With restore, read it from such a file, which need not be trusted.
        force: Restore over files that were never saved.

    """
    for name, value, wanted in (
        ("--to", to, "save"),
        ("--from", from_, "restore"),
        ("--archive", archive, "restore"),
    ):
        if value is not None and action != wanted:
            raise ConfigError(f"{name} goes with archive {wanted}, not with archive {action}")
    paths = (*path, *(() if config is None else declared_at(config).declaration.persist_paths))
    opened_archives = partial(_archives, id, home, paths, where, whole=not only)
    if action == "list":
        async with opened_archives(write=False) as archives:
            _show_archives(archives.home, await archives.all(), where)
    elif action == "save":
        if home is not None and not await anyio.Path(home).is_dir():  # misspelled, and not empty
            raise ConfigError(f"--home {home}: there is no such folder", home=str(home))
        async with opened_archives(write=True) as archives:
            with _bar("saving") as progress:
                saved = await archives.save(label=label, progress=progress)
            written = None if to is None else await archives.write(to, saved.archive.id)
        facts = {**msgspec.to_builtins(saved), "file_bytes": written}
        where.show(facts, lambda: _say_saved(saved, to, written))
    else:
        if archive is not None and from_ is not None:
            raise ConfigError("give --archive or --from, not both")
        async with opened_archives(write=True) as archives:
            with _bar("restoring") as progress:
                if from_ is not None:
                    done = await archives.read(from_, force=force, progress=progress)
                else:
                    done = await archives.restore(archive, force=force, progress=progress)
        where.show(done, lambda: _say_restored(done, archives.home, from_))
    return 0


@asynccontextmanager
async def _archives(
    id: str,
    home: Path | None,
    paths: tuple[str, ...],
    where: SessionOption,
    *,
    whole: bool,
    write: bool,
) -> AsyncGenerator[Archives, None]:
    key = where.key(id)
    async with managed(existing(where.store), write=write) as sessions:
        if not write:
            view = await load_view(sessions, id, where)
            yield Archives(view, home, paths=paths, whole=whole)
            return
        opening = sessions.open(
            id, session=key.session, tenant=key.tenant, create=False, on_held="raise"
        )
        async with opening as session:
            yield Archives(session, home, paths=paths, whole=whole)


def _show_archives(home: str | None, stored: list[Archive], where: SessionOption) -> None:
    now = time.time()
    rows = (
        (
            archive.id,
            archive.label,
            ago(archive.at, now),
            str(archive.files),
            size(archive.bytes),
            " ".join(archive.paths),
        )
        for archive in stored
    )
    columns = ("archive", "label", "saved", "files", "bytes", "paths")
    where.show(
        {"home": home, "archives": stored},
        lambda: print_table(columns, rows, right="files bytes"),
    )


def _say_saved(saved: ArchiveSaved, to: Path | None, written: int | None) -> None:
    for path in saved.skipped:
        say(f"skipped: {path.path}: {path.why}")
    for name in saved.changing:
        say(f"changed while it was read: {name}")
    content = f"{saved.archive.files} files, {size(saved.archive.bytes)}"
    new = "saved" if saved.new else "is the newest, and nothing has changed"
    say(f"{saved.archive.id} {new}: {content}, {size(saved.stored_bytes)} of them stored now")
    if written is not None:
        say(f"{to}: {size(written)}")


def _say_restored(done: ArchiveRestored, home: str | None, source: Path | None) -> None:
    what = source if done.archive is None else done.archive.id
    if not done.changed:
        say(f"{home} is as {what} has it: nothing was changed")
        return
    say(f"{home} is now as {what} has it: {', '.join(done.replaced) or 'nothing'} replaced")
    if done.kept:
        say(f"the replaced files are in {done.kept}, until the next save or restore")


@contextmanager
def _bar(what: str) -> Iterator[Callable[[ArchiveProgress], None]]:
    """Show the progress in bytes, on a terminal."""
    with progress_bar(what, DownloadColumn(), TimeRemainingColumn()) as update:
        yield lambda progress: update(progress.bytes, progress.total_bytes)
