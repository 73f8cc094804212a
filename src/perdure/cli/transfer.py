"""Sessions out of stores and into them: as backups, into other stores, and as files.

``perdure backup``, ``restore-backup``, ``migrate``, ``export`` and ``import``, which also takes the
sessions of another SDK's own database.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import anyio
import anyio.to_thread
import msgspec
from cyclopts import Parameter
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

import perdure
from perdure._lib.files import MAX_BYTES, Folder, open_regular
from perdure.adapters.imports import SDKS, SdkImport, import_sessions
from perdure.checkpoints.audit_files import check_pair, has_pair
from perdure.cli.access import existing, is_there, managed, no_session, opened, require_key
from perdure.cli.check import incomplete
from perdure.cli.output import (
    Answer,
    SessionOption,
    counted,
    note,
    progress_bar,
    require_free,
    say,
    size,
    write_json,
)
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    MissingExtraError,
    SessionNotFoundError,
    StoreUnavailableError,
)
from perdure.formats import MigratedState, read_folder, read_state, write_folder, write_state
from perdure.formats.migrations import Finding
from perdure.formats.records import StateMemories, log_in
from perdure.formats.state import FullAgentState
from perdure.records.keys import DEFAULT_SESSION, SessionKey, session_key
from perdure.session.export import (
    Imported,
    export_memories,
    export_pair,
    import_pair,
    import_with,
    memories_in,
    state_from,
)
from perdure.session.internals import parts_of
from perdure.store import Store, open_read_only
from perdure.transfer.backup_view import (
    RestoreSummary,
    VerifyReport,
    restore_backup as read_back,
    verify_backup,
)
from perdure.transfer.backups import Backup, backup as write_backup
from perdure.transfer.bundle_files import bundle_key, is_bundle, read_bundle, write_bundle
from perdure.transfer.damaged import Salvage, salvage as salvage_session
from perdure.transfer.migration import Migration, MigrationProgress, migrate as move
from perdure.transfer.second_look import look_again

T = TypeVar("T")


async def backup(
    source: Annotated[str, Parameter(name="STORE")],
    target: Annotated[str, Parameter(name="TARGET")],
    /,
    *,
    verify: bool = False,
    wait: float = 10.0,
    answer: Answer = Answer(),  # noqa: B008  # frozen
) -> int:
    """Back up all sessions of a store; each further run adds what is new.

    The store is only read, without a lease, also while a program writes to it. You can kill and
    repeat it. What the store has deleted or pruned is removed from the backup, too. Exits with 1
    if a session could not be backed up, and says why.

    Args:
        source: The store: a path or a URL.
        target: Where the backup is, or will be: a folder or a URL, such as s3://bucket/backup.
        verify: Read the whole backup afterwards, and compare it with its checksums.
        wait: Seconds to wait for another run that writes the same session.

    """
    async with _opened_pair(source, target) as (source_store, target_store):
        done = await _with_bar(
            "backing up", partial(write_backup, source_store, target_store, wait=wait)
        )
        report = (
            await _with_bar("verifying", partial(verify_backup, target_store)) if verify else None
        )
    answer.show(
        {
            "source": source_store.location,
            "target": target_store.location,
            "verified": report,
            **msgspec.to_builtins(done),
        },
        lambda: _print_backup(done, report, target_store.location),
    )
    return 1 if done.failed or (report is not None and report.problems) else 0


async def restore_backup(
    target: Annotated[str, Parameter(name="TARGET")],
    source: Annotated[str, Parameter(name="STORE")],
    /,
    *,
    wait: float = 10.0,
    answer: Answer = Answer(),  # noqa: B008  # frozen
) -> int:
    """Restore the sessions of a backup into a store that has lost them, and verify each.

    A session that is newer than the backup stays as it is; one that was forgotten stays
    forgotten. Both are listed. You can kill and repeat it. Exits with 1 if a session of the
    backup, other than a forgotten one, is not in the store afterwards.

    Args:
        target: Where the backup is: a folder or a URL.
        source: The store to restore into: a path or a URL.
        wait: Seconds to wait for a process that holds a session.

    """
    async with _opened_pair(target, source) as (backup_store, store):
        done = await _with_bar("restoring", partial(read_back, backup_store, store, wait=wait))
    answer.show(
        {
            "source": backup_store.location,
            "target": store.location,
            **msgspec.to_builtins(done),
        },
        lambda: _print_restored(done, store.location),
    )
    return 1 if done.failed else 0


restore_backup.__name__ = "restore-backup"  # what the command is called


@asynccontextmanager
async def _opened_pair(
    source: str, target: str, *, live: bool = False
) -> AsyncGenerator[tuple[Store, Store], None]:
    """Open the store to read from and the store to write to, and close both.

    A *live* source takes part in the locking of its writers where it can.
    """
    source_store, target_store = existing(source), perdure.store_for(target)
    async with AsyncExitStack() as stack:
        try:
            await (source_store.open() if live else open_read_only(source_store))
        except StoreUnavailableError:  # it may be on a disk that is mounted read-only
            if not live:
                raise
            await open_read_only(source_store)
        stack.push_async_callback(source_store.aclose)
        await require_key(source_store)
        await target_store.open()
        stack.push_async_callback(target_store.aclose)
        yield source_store, target_store


async def _with_bar(what: str, act: Callable[..., Awaitable[T]]) -> T:
    with progress_bar(what, MofNCompleteColumn(), TimeRemainingColumn()) as update:

        def show(progress: MigrationProgress) -> None:
            update(progress.done, progress.total)

        return await act(progress=show)


def _print_backup(done: Backup, report: VerifyReport | None, target: str) -> None:
    for key, reason in done.failed.items():
        say(f"{key}: NOT BACKED UP: {reason}")
    say(
        f"{done.written} of {done.sessions} sessions written to {target}, {done.there} had not "
        f"changed: {counted(done.records, 'record')}, {counted(done.blobs, 'blob')}, "
        f"{size(done.bytes)}"
    )
    if done.forgotten:
        say(f"{done.forgotten} removed from the backup, as they were from the store")
    if report is not None:
        for key, reason in report.problems.items():
            say(f"{key}: PROBLEM: {reason}")
        problems = len(report.problems) or "no"
        say(
            f"verified: {counted(report.sessions, 'session')}, "
            f"{counted(report.records, 'record')}, {problems} problems"
        )


def _print_restored(done: RestoreSummary, target: str) -> None:
    for key, reason in done.failed.items():
        say(f"{key}: NOT RESTORED: {reason}")
    for key in done.forgotten:
        say(f"{key}: was forgotten since the backup, and stays forgotten")
    say(
        f"{done.written} of {done.sessions} sessions restored into {target} and verified, "
        f"{done.there} were there already: {counted(done.records, 'record')}, "
        f"{counted(done.blobs, 'blob')}"
    )
    if done.written:  # else it would look as if records were missing
        say("(not counted: the first record of each restored log, which names its new holder)")
    if done.posted:
        say(f"{counted(done.posted, 'post')} back, waiting for their sessions")
    if done.dead_letters:
        say(f"{counted(done.dead_letters, 'dead letter')} back")


async def migrate(
    source: Annotated[str, Parameter(name="SOURCE")],
    target: Annotated[str, Parameter(name="TARGET")],
    /,
    *,
    tenant: str | None = None,
    wait: float = 10.0,
    answer: Answer = Answer(),  # noqa: B008  # frozen
) -> int:
    """Copy every session from one store into another, and verify each.

    The source stays as it is, and a program may continue to write to it. You can kill and repeat
    it: each run copies what is new. Before you start your program on the target, stop it and run
    this a last time. Exits with 1 if a session could not be copied, and says why.

    Args:
        source: The store to copy from: a path or a URL.
        target: The store to copy into.
        tenant: Only this tenant's sessions. Default: all.
        wait: Seconds to wait for a process that holds a session.

    """
    tenants = None if tenant is None else [tenant]
    async with _opened_pair(source, target, live=True) as (source_store, target_store):
        if source_store.location == target_store.location:
            raise ConfigError(f"{target} is the source, too: name another TARGET", option="target")
        await require_key(target_store)
        done = await _with_bar(
            "copying", partial(move, source_store, target_store, tenants=tenants, wait=wait)
        )
    answer.show(
        {
            "source": source_store.location,
            "target": target_store.location,
            **msgspec.to_builtins(done),
        },
        lambda: _print_migrated(done, target_store.location),
    )
    return 1 if done.failed else 0


def _print_migrated(done: Migration, target: str) -> None:
    for key, reason in done.failed.items():
        say(f"{key}: NOT COPIED: {reason}")
    say(
        f"{done.copied + done.continued} of {done.sessions} sessions copied to {target} and "
        f"verified, {done.continued} of them after what was there; {done.there} were there "
        f"already: {counted(done.records, 'record')}, {size(done.bytes)}"
    )
    for count, noun, where in (
        (done.deleted, "session", f"deleted in {target}, as in the source"),
        (done.posted, "post", f"waiting in {target}, too"),
        (done.dead_letters, "dead letter", f"in {target}, too"),
    ):
        if count:
            say(f"{counted(count, noun)} {where}")
    if done.open:
        say(
            f"{done.open} were not closed in the source: once the program that writes them has "
            "ended, run this again, before anything starts at the target"
        )


# ``perdure export`` and ``import``: a whole session out of a store, and into one


Layout = Literal["full", "files", "seed", "bundle"]


async def export(
    id: Annotated[str, Parameter(name="ID")],
    /,
    *,
    layout: Annotated[Layout, Parameter(show_choices=False)] = "full",
    out: Path | None = None,
    plain: bool = False,
    salvage: bool = False,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Export a whole session, its history included.

    Reads without a lease, also while the session is in use; it exports what is durable.

    Args:
        id: The agent's id.
        layout: ``full``: one JSON value; ``files``: the files that other runtimes know, from
            session.json to raw_traces.jsonl (``seed`` is the same); ``bundle``: the log, the
            documents and the blobs, as lines of JSON, which is the same out of every store.
        out: The file, or with --layout files the folder, to write; new, or an empty folder.
            Default: the standard output.
        plain: Only what the format has a place for, without the log that makes an import
            lossless.
        salvage: Of a damaged session, write what can still be read as a bundle, and say what is
            missing.

    """
    if layout == "seed":  # the layout of the designs that perdure began from
        layout = "files"
    if salvage and (plain or layout == "files"):
        raise ConfigError("--salvage writes a bundle: leave out --plain and --layout files")
    if out is None and (salvage or layout != "full"):
        what = "--salvage" if salvage else f"--layout {layout}"
        raise ConfigError(f"{what} does not go to the standard output: give --out")
    if out is not None:
        require_free(out)
    key = where.key(id)
    async with opened(where.store) as store:
        if not await is_there(store, key):
            raise no_session(key, store)
        if out is None:
            write_json(_pretty(await _state(store, key, plain=plain)))
            await _warn_of_cut(store, key)
        elif salvage:
            done = await salvage_session(store, key, out)
            facts = {"out": str(out), "whole": done.is_whole, **msgspec.to_builtins(done)}
            where.show(facts, lambda: _print_salvage(done, out))
        else:
            await _export(store, key, layout, out, where, plain=plain)
    return 0


async def _export(
    store: Store, key: SessionKey, layout: Layout, out: Path, where: SessionOption, *, plain: bool
) -> None:
    answer: dict[str, Any] = {"agent": key.agent, "session": key.session, "out": str(out)}
    if layout == "bundle":
        answer["bytes"] = await look_again(store, key, lambda: write_bundle(store, key, out))
        done = f"{size(answer['bytes'])} written to {out}"
    else:
        state = await _state(store, key, plain=plain)
        if layout == "files":
            answer["files"] = await write_folder(out, state)
            async with managed(existing(where.store)) as sessions:
                if (view := await parts_of(sessions).load(key)) is not None:
                    answer["files"] += await export_memories(view, out)
                    answer["files"] += await export_pair(view, out)
        else:
            await anyio.to_thread.run_sync(_publish, out, _pretty(state) + b"\n")
            answer["files"] = [out.name]
        done = f"{len(state.context.core.history)} messages written to {out}"
    answer["incomplete"] = await _warn_of_cut(store, key)
    where.show(answer, f"{key}: {done}")


async def _state(store: Store, key: SessionKey, *, plain: bool) -> FullAgentState:
    state = await look_again(store, key, lambda: state_from(store, key, log=not plain))
    if state is None:  # deleted meanwhile
        raise no_session(key, store)
    return state


async def _warn_of_cut(store: Store, key: SessionKey) -> str:
    """Warn that records may be missing at the log's end: the copy does not show it."""
    if warning := await incomplete(store, key):
        note(warning)
    return warning


def _print_salvage(salvage: Salvage, out: Path) -> None:
    if salvage.unproven_tail:
        note(salvage.unproven_tail)
    for run in salvage.missing:
        which = (
            f"records {run.first} to {run.last}" if run.last > run.first else f"record {run.first}"
        )
        say(f"{salvage.key}: MISSING: {which}: {run.why}")
    for name in salvage.lost_documents:
        say(f"{salvage.key}: MISSING: document {name}: rebuilt from the readable part of the log")
    for name in salvage.lost_blobs:
        say(f"{salvage.key}: MISSING: blob {name}")
    if salvage.lost_dead_letters:
        say(f"{salvage.key}: MISSING: {salvage.lost_dead_letters} dead letters, which are damaged")
    say(
        f"{salvage.key}: {salvage.records} records, {len(salvage.documents)} documents and "
        f"{salvage.blobs} blobs written to {out} ({size(salvage.bytes)}): "
        f"`perdure import {out} --store NEW` takes them into a store without this session"
    )


def _publish(out: Path, data: bytes) -> None:
    with Folder.root(str(out.absolute().parent)) as folder:
        if not folder.publish(out.name, data):
            require_free(out)


def _pretty(state: FullAgentState) -> bytes:
    return msgspec.json.format(write_state(state), indent=2)


async def import_(
    path: Annotated[Path, Parameter(name="PATH")],
    url: Annotated[str | None, Parameter(name="URL")] = None,
    /,
    *,
    id: str | None = None,
    tables: str | None = None,
    parent: str | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Import a session from a file or a folder, or all sessions of another SDK's own database.

    All of it is imported, or nothing; only events.jsonl is imported in parts, so after a kill,
    remove the session and import again. Every correction is reported: older formats are migrated,
    wrong counts fixed, damaged files left out and kept in quarantine/.

    Of an SDK's database, each session is read back and compared. The database is only read, and
    stored code is never run. You can kill and repeat it: each run adds what is new. Exits with 1
    if a session could not be imported, and says why. What LangGraph's stores remember (BaseStore)
    is not imported.

    Args:
        path: A file with one JSON value, a bundle, or a folder with session.json, memory.json,
            plugins/*.json, raw_traces.jsonl and its other files, or with events.jsonl; or which
            SDK: langgraph, openai-agents, adk or claude-agent-sdk.
        url: The SDK's database: a SQLite file, or a URL such as postgresql://db.example.org/agents;
            or its folder, ~/.claude/projects.
        id: The agent's id. Default: the exported one; events alone have none.
        tables: The sessions_table and messages_table of openai-agents, as SESSIONS,MESSAGES, where
            they are not the SDK's own. The other SDKs have no such setting.
        parent: The agent's id of the session that a bundle of a fork continues, if a release
            before 0.1.0 wrote it.

    """
    sdk = sdk_of(path, url, id=id, where=where)
    if tables is not None and sdk != "openai-agents":
        raise ConfigError("--tables is for the database of openai-agents", option="--tables")
    if sdk is not None and url is not None:
        return await import_sdk(sdk, url, where, tables)
    if await is_bundle(path):
        return await _import_bundle(path, id=id, parent=parent, where=where)
    if parent is not None:
        raise ConfigError(f"--parent is for a bundle, and {path} is none", option="--parent")
    return await _import(path, id=id, where=where)


import_.__name__ = "import"  # what the command is called, and no name for a function


async def _import(path: Path, *, id: str | None, where: SessionOption) -> int:
    store, left_out = perdure.store_for(where.store), list[Finding]()
    read, memories = await _read(path)
    pair = await anyio.to_thread.run_sync(has_pair, path)
    state = read.state or _empty_state(path, id, pair=pair and read == MigratedState(None))
    pair = pair and log_in(state) is None
    if pair:  # refused before anything is written
        await anyio.to_thread.run_sync(check_pair, path)
    async with managed(store, write=True) as sessions:
        done = await import_with(
            sessions, state, memories, id=id, session=where.session, tenant=where.tenant
        )
        if pair:
            async with sessions.open(
                done.key.agent, session=where.session, tenant=where.tenant
            ) as own_files:
                pair_read = await import_pair(own_files, path)
            done = msgspec.structs.replace(done, version=own_files.durable_version)
            left_out = [Finding("left out", str(path), file) for file in pair_read.findings]
    findings = [*read.findings, *done.findings, *left_out]
    where.show(
        {
            "location": store.location,
            "agent": done.key.agent,
            "session": done.key.session,
            "tenant": done.key.tenant,
            "records": done.version,
            "findings": findings,
        },
        lambda: _print_imported(done, findings, store.location),
    )
    return 0


def _print_imported(done: Imported, findings: list[Finding], target: str) -> None:
    for finding in findings:
        say(f"{finding.what}: {finding.where}: {finding.detail}")
    say(f"{done.key}: imported as {done.version} records into {target}")


def _empty_state(path: Path, id: str | None, *, pair: bool) -> FullAgentState:
    """Return what events alone are imported into."""
    if not pair:
        raise SessionNotFoundError(
            f"there is nothing to import in {path}: name a file, or a folder with session.json, "
            "raw_traces.jsonl or events.jsonl",
            path=str(path),
        )
    if id is None:
        raise ConfigError(f"{path} has events and no agent's id: give --id", path=str(path))
    return FullAgentState(agent_id=id)


async def _import_bundle(
    path: Path, *, id: str | None, parent: str | None, where: SessionOption
) -> int:
    was = await bundle_key(path)
    named = was if id is None else session_key(id, was.session, was.tenant)
    continued = None if parent is None else session_key(parent, where.session, was.tenant)
    async with opened(where.store, write=True, make=True) as store:
        imported = await read_bundle(store, path, key=named, parent=continued)
    where.show(
        {"location": store.location, **msgspec.to_builtins(imported)},
        f"{imported.key}: {imported.records} records written into {store.location}",
    )
    return 0


async def _read(path: Path) -> tuple[MigratedState, StateMemories | None]:
    """Read a state, and from a folder its traces and memories."""
    place = anyio.Path(path)
    if not await place.exists():
        return MigratedState(None), None
    if not await place.is_dir():
        return await anyio.to_thread.run_sync(_read_file, path), None
    read = await read_folder(path)
    memories = await memories_in(path, read.state)
    if read.state is None and memories is not None:
        read = MigratedState(FullAgentState(agent_id=memories.agent_id))
    return read, memories


def _read_file(path: Path) -> MigratedState:
    with open_regular(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found > MAX_BYTES or len(data := file.read(MAX_BYTES + 1)) > MAX_BYTES:
            raise CorruptRecordError(
                f"{path} has {found} bytes, which is no export that can be read: the limit is "
                f"{MAX_BYTES}; export the session with --layout bundle",
                path=str(path),
            )
    try:
        return read_state(data, where=str(path))
    except CorruptRecordError as error:
        raise CorruptRecordError(
            f"{path} is no export that can be read: {error}; name what `perdure export` wrote",
            path=str(path),
        ) from error


# ``perdure import SDK URL``: all sessions of another SDK's own database


def sdk_of(path: Path, url: str | None, *, id: str | None, where: SessionOption) -> str | None:
    """Return which SDK's database is to be imported; None for a file or a folder.

    Raises:
        ConfigError: What was given does not go together.

    """
    name = str(path)
    if url is None:
        if name in SDKS and not path.exists():
            raise ConfigError(f"which database? perdure import {name} URL", option="URL")
        return None
    if name not in SDKS:
        raise ConfigError(
            f"{name} is no SDK that can be imported: choose {', '.join(SDKS)}", option="SDK"
        )
    if id is not None or where.session != DEFAULT_SESSION:
        raise ConfigError(f"import {name} keeps the ids: leave out --id and --session")
    return name


async def import_sdk(sdk: str, url: str, where: SessionOption, tables: str | None = None) -> int:
    """Import the sessions of an SDK's database."""
    try:
        module: Any = importlib.import_module(SDKS[sdk])
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"import {sdk} needs the SDK: pip install 'perdure[{_extra(sdk)}]'", extra=_extra(sdk)
        ) from error
    store = perdure.store_for(where.store)
    columns = MofNCompleteColumn(), TimeRemainingColumn()
    options = {} if tables is None else {"tables": tables.split(",")}
    async with module.source_of(url, **options) as source, managed(store, write=True) as sessions:
        with progress_bar("importing", *columns) as update:
            done = await import_sessions(source, sessions, tenant=where.tenant, progress=update)
    facts = {"sdk": sdk, "target": store.location, **msgspec.to_builtins(done)}
    where.show(facts, lambda: _print(done, store.location))
    return 1 if done.failed else 0


def _extra(sdk: str) -> str:
    return "google-adk" if sdk == "adk" else sdk


def _print(done: SdkImport, target: str) -> None:
    for name, reason in done.failed.items():
        say(f"{name}: NOT IMPORTED: {reason}")
    for name in done.left_alone:
        say(f"{name}: was changed in {target}, and was left as it is there")
    say(
        f"{done.imported + done.continued} of {done.sessions} sessions imported into {target} and "
        f"verified: {done.added} items; {done.continued} continued, {done.there} already complete "
        f"or empty, {len(done.failed)} not imported"
    )
