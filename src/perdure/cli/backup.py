"""``perdure backup``, ``restore-backup`` and ``migrate``: copies of all sessions of a store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Annotated, TypeVar

import msgspec
from cyclopts import Parameter
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

import perdure
from perdure.cli.access import existing, require_key
from perdure.cli.output import Answer, print_json, progress_bar, say, size
from perdure.errors import StoreUnavailableError
from perdure.store import Store, open_read_only
from perdure.transfer.backup_view import (
    RestoreSummary,
    VerifyReport,
    restore_backup as read_back,
    verify_backup,
)
from perdure.transfer.backups import Backup, backup as write_backup
from perdure.transfer.migration import Migration, MigrationProgress, migrate as move

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
    if answer.json:
        facts = {"verified": report, **msgspec.to_builtins(done)}
        print_json({"source": source_store.location, "target": target_store.location, **facts})
    else:
        _print_backup(done, report, target_store.location)
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
    if answer.json:
        facts = msgspec.to_builtins(done)
        print_json({"source": backup_store.location, "target": store.location, **facts})
    else:
        _print_restored(done, store.location)
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
        f"changed: {done.records} records, {done.blobs} blobs, {size(done.bytes)}"
    )
    if done.forgotten:
        say(f"{done.forgotten} removed from the backup, as they were from the store")
    if report is not None:
        for key, reason in report.problems.items():
            say(f"{key}: PROBLEM: {reason}")
        problems = len(report.problems) or "no"
        say(f"verified: {report.sessions} sessions, {report.records} records, {problems} problems")


def _print_restored(done: RestoreSummary, target: str) -> None:
    for key, reason in done.failed.items():
        say(f"{key}: NOT RESTORED: {reason}")
    for key in done.forgotten:
        say(f"{key}: was forgotten since the backup, and stays forgotten")
    say(
        f"{done.written} of {done.sessions} sessions restored into {target} and verified, "
        f"{done.there} were there already: {done.records} records, {done.blobs} blobs"
    )
    if done.posted:
        say(f"{done.posted} posts wait for their sessions again")
    if done.dead_letters:
        say(f"{done.dead_letters} dead letters came back")


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
        await require_key(target_store)
        done = await _with_bar(
            "copying", partial(move, source_store, target_store, tenants=tenants, wait=wait)
        )
    if answer.json:
        facts = msgspec.to_builtins(done)
        print_json({"source": source_store.location, "target": target_store.location, **facts})
    else:
        _print_migrated(done, target_store.location)
    return 1 if done.failed else 0


def _print_migrated(done: Migration, target: str) -> None:
    for key, reason in done.failed.items():
        say(f"{key}: NOT COPIED: {reason}")
    say(
        f"{done.copied + done.continued} of {done.sessions} sessions copied to {target} and "
        f"verified, {done.continued} of them after what was there; {done.there} were there "
        f"already: {done.records} records, {size(done.bytes)}"
    )
    if done.deleted:
        say(f"{done.deleted} deleted in {target}, as they were in the source")
    if done.posted:
        say(f"{done.posted} posts wait in {target}, too")
    if done.dead_letters:
        say(f"{done.dead_letters} dead letters are in {target}, too")
    if done.open:
        say(
            f"{done.open} were not closed in the source: once the program that writes them has "
            "ended, run this again, before anything starts at the target"
        )
