"""``perdure migrate``: every session of a store into another one."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import anyio
import msgspec
from cyclopts import Parameter
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

import perdure
from perdure.cli.access import existing, require_key
from perdure.cli.output import Answer, print_json, progress_console, say, size
from perdure.errors import StoreUnavailableError
from perdure.store import Store, open_read_only
from perdure.transfer.migration import Migration, MigrationProgress
from perdure.transfer.migration import migrate as move


def migrate(
    source: Annotated[str, Parameter(name="SOURCE")],
    target: Annotated[str, Parameter(name="TARGET")],
    /,
    *,
    tenant: str | None = None,
    wait: float = 10.0,
    answer: Answer = Answer(),  # noqa: B008  # frozen
) -> int:
    """Copy every session from one store into another, and verify each.

    The source stays as it is, and a program may go on writing to it. May be killed and repeated:
    each run brings what has come since. Before you start at the target, stop the program and
    run it a last time. Exits with 1 if a session could not be copied, and says why.

    Args:
        source: The store to copy from: a path or a URL.
        target: The store to copy into.
        tenant: Whose sessions. Default: everybody's.
        wait: Seconds to wait for a process that holds a session.

    """
    return anyio.run(partial(_migrate, source, target, tenant, wait, answer))


async def _migrate(
    source: str, target: str, tenant: str | None, wait: float, answer: Answer
) -> int:
    source_store, target_store = existing(source), perdure.store_for(target)
    try:
        await source_store.open()
    except StoreUnavailableError:  # it may lie on a disk that is mounted read-only
        await open_read_only(source_store)
    try:
        await require_key(source_store)
        await target_store.open()
        try:
            await require_key(target_store)
            done = await _with_bar(source_store, target_store, tenant, wait)
        finally:
            await target_store.aclose()
    finally:
        await source_store.aclose()
    if answer.json:
        facts = msgspec.to_builtins(done)
        print_json({"source": source_store.location, "target": target_store.location, **facts})
    else:
        _print(done, target_store.location)
    return 1 if done.failed else 0


async def _with_bar(store: Store, target: Store, tenant: str | None, wait: float) -> Migration:
    columns = (TextColumn("copying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = progress_console()
    with Bar(*columns, console=console, transient=True, disable=console.quiet) as bar:
        task = bar.add_task("copying", total=None)

        def show(progress: MigrationProgress) -> None:
            bar.update(task, completed=progress.done, total=progress.total)

        tenants = None if tenant is None else [tenant]
        return await move(store, target, tenants=tenants, wait=wait, progress=show)


def _print(done: Migration, target: str) -> None:
    for key, reason in done.failed.items():
        say(f"{key}: NOT COPIED: {reason}")
    say(
        f"{done.copied + done.continued} of {done.sessions} sessions copied to {target} and "
        f"verified, {done.continued} of them behind what was there; {done.there} were there "
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
