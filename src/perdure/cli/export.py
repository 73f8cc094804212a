"""``perdure export`` and ``perdure import``: a whole session out of a store, and into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
import msgspec
from cyclopts import Parameter

import perdure
from perdure._lib.files import Folder
from perdure.checkpoints.audit_files import has_pair
from perdure.checkpoints.audit_io import check_pair
from perdure.cli.access import existing, is_there, managed, no_session, require_key
from perdure.cli.audit import incomplete
from perdure.cli.imports import import_sdk, sdk_of
from perdure.cli.output import SessionOption, note, print_json, say, size, write_json
from perdure.errors import ConfigError, CorruptRecordError, SessionNotFoundError
from perdure.formats import MigratedState, read_folder, read_state, write_folder, write_state
from perdure.formats.migrations import Finding
from perdure.formats.state import FullAgentState
from perdure.formats.to_records import StateMemories, log_in
from perdure.records.keys import SessionKey
from perdure.session.export import (
    Imported,
    export_memories,
    export_pair,
    import_pair,
    import_with,
    memories_in,
    state_from,
)
from perdure.session.options import require_no_backup
from perdure.store import Store, open_read_only
from perdure.transfer.bundle_files import bundle_key, is_bundle, read_bundle, write_bundle
from perdure.transfer.damaged import Salvage, salvage as salvage_session

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
    if salvage:
        if plain or layout == "files":
            raise ConfigError("--salvage writes a bundle: leave out --plain and --layout files")
        return await _salvage(id, out=out, where=where)
    return await _export(id, layout=layout, out=out, log=not plain, where=where)


async def _export(
    id: str, *, layout: Layout, out: Path | None, log: bool, where: SessionOption
) -> int:
    if layout != "full" and out is None:
        raise ConfigError(f"--layout {layout} does not go to the standard output: give --out")
    if out is not None:
        _check_free(out)
    store, key = existing(where.store), where.key(id)
    await open_read_only(store)
    try:
        await require_no_backup(store)
        if layout == "bundle":
            return await _export_bundle(store, key, out or Path(), where)
        await require_key(store)
        state = await state_from(store, key, log=log)
        warning = await _warn_of_cut(store, key)
    finally:
        await store.aclose()
    if state is None:
        raise no_session(key, store)
    if out is None:
        write_json(_pretty(state))
        return 0
    if layout == "files":
        names = [*await write_folder(out, state), *await _export_further_files(id, out, where)]
    else:
        await anyio.to_thread.run_sync(_publish, out, _pretty(state) + b"\n")
        names = [out.name]
    answer = {"agent": key.agent, "session": key.session, "out": str(out), "files": names}
    if where.json:
        answer["incomplete"] = warning
        print_json(answer)
    else:
        say(f"{key}: {len(state.context.core.history)} messages written to {out}")
    return 0


async def _warn_of_cut(store: Store, key: SessionKey) -> str:
    """Warn that records may be missing at the log's end: the copy does not show it."""
    if warning := await incomplete(store, key):
        note(warning)
    return warning


async def _export_further_files(id: str, out: Path, where: SessionOption) -> list[str]:
    """Write traces and memories, events and checkpoints; return the files' names."""
    async with managed(existing(where.store)) as sessions:
        view = await sessions.load(id, session=where.session, tenant=where.tenant)
        if view is None:
            return []
        return [*await export_memories(view, out), *await export_pair(view, out)]


async def _export_bundle(store: Store, key: SessionKey, out: Path, where: SessionOption) -> int:
    if not await is_there(store, key):
        raise no_session(key, store)
    written = await write_bundle(store, key, out)
    answer = {"agent": key.agent, "session": key.session, "out": str(out), "bytes": written}
    answer["incomplete"] = await _warn_of_cut(store, key)
    if where.json:
        print_json(answer)
    else:
        say(f"{key}: {size(written)} written to {out}")
    return 0


async def _salvage(id: str, *, out: Path | None, where: SessionOption) -> int:
    if out is None:
        raise ConfigError("--salvage does not go to the standard output: give --out")
    _check_free(out)
    key = where.key(id)
    store = existing(where.store)
    await open_read_only(store)
    try:
        await require_key(store)
        await require_no_backup(store)
        try:
            salvaged = await salvage_session(store, key, out)
        except SessionNotFoundError:
            raise no_session(key, store) from None
    finally:
        await store.aclose()
    if where.json:
        print_json({"out": str(out), "whole": salvaged.is_whole, **msgspec.to_builtins(salvaged)})
    else:
        _print_salvage(salvaged, out)
    return 0


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


def _check_free(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} is there already: choose a new one, or remove it", out=str(out))
    if not out.absolute().parent.is_dir():
        raise ConfigError(
            f"{out}: there is no folder {out.absolute().parent}: make it first", out=str(out)
        )


def _publish(out: Path, data: bytes) -> None:
    with Folder.root(str(out.absolute().parent)) as folder:
        if not folder.publish(out.name, data):
            _check_free(out)


def _pretty(state: FullAgentState) -> bytes:
    return msgspec.json.format(write_state(state), indent=2)


async def import_(
    path: Annotated[Path, Parameter(name="PATH")],
    url: Annotated[str | None, Parameter(name="URL")] = None,
    /,
    *,
    id: str | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Import a session from a file or a folder, or all sessions of another SDK's own database.

    All of it is imported, or nothing; only events.jsonl is imported in parts, so after a kill,
    remove the session and import again. Every correction is reported: older formats are migrated,
    wrong counts fixed, damaged files left out and kept in quarantine/.

    Of an SDK's database, each session is read back and compared. The database is only read, and
    stored code is never run. You can kill and repeat it: each run adds what is new. Exits with 1
    if a session could not be imported, and says why.

    Args:
        path: A file with one JSON value, a bundle, or a folder with session.json, memory.json,
            plugins/*.json, raw_traces.jsonl and its other files, or with events.jsonl; or which
            SDK: langgraph, openai-agents or adk.
        url: The SDK's database: a SQLite file, or a URL such as postgresql://db.example.org/agents.
        id: The agent's id. Default: the exported one; events alone have none.

    """
    sdk = sdk_of(path, url, id=id, where=where)
    if sdk is not None and url is not None:
        return await import_sdk(sdk, url, where)
    if await is_bundle(path):
        return await _import_bundle(path, id=id, where=where)
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
                target_key = await import_pair(own_files, path)
            done = msgspec.structs.replace(done, version=own_files.durable_version)
            left_out = [Finding("left out", str(path), file) for file in target_key.findings]
    findings = [*read.findings, *done.findings, *left_out]
    if where.json:
        print_json(_answer(done, store.location, findings))
    else:
        for finding in findings:
            say(f"{finding.what}: {finding.where}: {finding.detail}")
        say(f"{done.key}: imported as {done.version} records into {store.location}")
    return 0


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


async def _import_bundle(path: Path, *, id: str | None, where: SessionOption) -> int:
    was = await bundle_key(path)
    named = SessionKey(id or was.agent, was.session, was.tenant)
    store = perdure.store_for(where.store)
    await store.open()
    try:
        await require_key(store)
        imported = await read_bundle(store, path, key=named)
    finally:
        await store.aclose()
    if where.json:
        print_json({"location": store.location, **msgspec.to_builtins(imported)})
    else:
        say(f"{imported.key}: {imported.records} records written into {store.location}")
    return 0


async def _read(path: Path) -> tuple[MigratedState, StateMemories | None]:
    """Read a state, and from a folder its traces and memories."""
    place = anyio.Path(path)
    if not await place.is_dir():
        return await _read_file(place) if await place.exists() else MigratedState(None), None
    read = await read_folder(path)
    memories = await memories_in(path, read.state)
    if read.state is None and memories is not None:
        read = MigratedState(FullAgentState(agent_id=memories.agent_id))
    return read, memories


async def _read_file(path: anyio.Path) -> MigratedState:
    try:
        return read_state(await path.read_bytes(), where=str(path))
    except CorruptRecordError as error:
        raise CorruptRecordError(
            f"{path} is no export that can be read: {error}", path=str(path)
        ) from error


def _answer(done: Imported, location: str, findings: list[Any]) -> dict[str, Any]:
    return {
        "location": location,
        "agent": done.key.agent,
        "session": done.key.session,
        "tenant": done.key.tenant,
        "records": done.version,
        "findings": findings,
    }
