"""``perdure forget`` and ``perdure prune``: sessions and history that are to go."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any

import anyio
import msgspec
from cyclopts import Parameter

from perdure.cli.access import existing, managed, opened, require_key
from perdure.cli.output import StoreOption, print_json, say, size
from perdure.errors import ConfigError
from perdure.records.keys import SessionKey
from perdure.session.delete import ForgetReport
from perdure.session.prune import PruneReport
from perdure.session.retention import Retention
from perdure.store import Store
from perdure.transfer.backups import follow_deletions, require_backup

_AGE = re.compile(r"(\d+(?:\.\d+)?)(d|h|w)?")
_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0, None: 1.0}


def forget(
    id: Annotated[str | None, Parameter(name="ID")] = None,
    /,
    *,
    session: str | None = None,
    owner: str | None = None,
    tag: str | None = None,
    tenant: str = "",
    dry_run: bool = False,
    backup: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    where: StoreOption = StoreOption(),  # noqa: B008  # frozen
) -> int:
    """Forget sessions: logs, documents, quarantine, posts, and blobs that only they reach.

    What forks of them still reach stays, and is said. This cannot be undone. A backup forgets
    them with its next run; with --backup at once, so that no loss of the store brings them back.

    Args:
        id: Of this agent.
        session: Only this one of its sessions; default: all.
        owner: Of this owner.
        tag: With this tag.
        tenant: Whose they are, where customers share a store.
        dry_run: Only say what would go.
        backup: A backup of the store, which is to forget at once what the store has forgotten,
            also before; may be given more than once.

    """
    chosen = {"id": id, "session": session, "owner": owner, "tag": tag, "tenant": tenant}
    return anyio.run(partial(_forget, chosen, where, backup, dry_run=dry_run))


async def _forget(
    chosen: dict[str, Any], where: StoreOption, backups: Sequence[str], *, dry_run: bool
) -> int:
    async with AsyncExitStack() as stack:
        retained = [
            await _backup(stack, url) for url in backups
        ]  # a wrong one: before anything goes
        async with managed(existing(where.store), write=not dry_run) as sessions:
            report = await sessions.forget(**chosen, dry_run=dry_run)
        removed: dict[str, list[SessionKey]] = {}
        if not dry_run and retained:
            async with opened(where.store) as store:
                for target in retained:
                    removed[target.location] = await follow_deletions(store, target)
    if where.json:
        print_json({**msgspec.to_builtins(report), "backups": msgspec.to_builtins(removed)})
    else:
        _print_forgotten(report)
        for place, keys in removed.items():
            say(
                f"{len(keys)} sessions removed from the backup in {place}, which will not bring "
                "them back"
            )
    return 0


async def _backup(stack: AsyncExitStack, url: str) -> Store:
    target = existing(url)
    await target.open()
    stack.push_async_callback(target.aclose)
    await require_key(target)
    await require_backup(target)
    return target


def _print_forgotten(report: ForgetReport) -> None:
    for key in report.sessions:
        say(f"{key}: {'would be forgotten' if report.dry_run else 'forgotten'}")
    for retained in report.kept:
        say(f"{retained.of}: kept: {retained.what}: {retained.why}")
    parts = f"{report.records} records, {report.documents} documents, {report.blobs} blobs"
    what = f"{len(report.sessions)} sessions with {parts} ({size(report.bytes)})"
    say(f"{what} in {', '.join(report.places)}{'; nothing was removed' * report.dry_run}")


def prune(
    *,
    id: str | None = None,
    session: str | None = None,
    tenant: str = "",
    keep_turns: int | None = None,
    keep_days: float | None = None,
    older_than: str | None = None,
    dry_run: bool = False,
    where: StoreOption = StoreOption(),  # noqa: B008  # frozen
) -> int:
    """Prune history that is not to be kept, and forget sessions that nobody has used for long.

    What a session is stays as it was: context, memory, states. With both --keep options, a turn
    stays if either keeps it. Sessions that somebody holds are left alone.

    Args:
        id: Of this agent; default: all.
        session: Only this one of its sessions; default: all.
        tenant: Whose they are, where customers share a store.
        keep_turns: The newest turns of each session stay.
        keep_days: Turns that ended within these days stay.
        older_than: Forget sessions that were not used for so long, such as 90d, 12h or 8w.
        dry_run: Only say what would go.

    """
    if keep_turns is None and keep_days is None and older_than is None:
        raise ConfigError("say what may go: give --keep-turns, --keep-days or --older-than")
    expire = None if older_than is None else _days(older_than)
    retention = Retention(keep_turns=keep_turns, keep_days=keep_days, expire_days=expire)
    chosen = {"id": id, "session": session, "tenant": tenant}
    return anyio.run(partial(_prune, retention, chosen, where, dry_run=dry_run))


def _days(age: str) -> float:
    match = _AGE.fullmatch(age)
    if match is None:
        message = f"invalid --older-than {age!r}: give days, hours or weeks, as 90d, 12h, 8w"
        raise ConfigError(message, option="older-than", value=age)
    return float(match[1]) * _DAYS[match[2]]


async def _prune(
    retention: Retention, chosen: dict[str, Any], where: StoreOption, *, dry_run: bool
) -> int:
    async with managed(existing(where.store), write=not dry_run) as sessions:
        report = await sessions.prune(retention, **chosen, dry_run=dry_run)
    if where.json:
        print_json(msgspec.to_builtins(report))
    else:
        _print_pruned(report)
    return 0


def _print_pruned(report: PruneReport) -> None:
    say_pruned(report)
    say(
        f"{len(report.pruned)} sessions pruned, {len(report.expired)} forgotten"
        f"{'; nothing was removed' * report.dry_run}"
    )


def say_pruned(report: PruneReport) -> None:
    """Print what went, or would go, and what was left alone."""
    would = "would be " * report.dry_run
    for key in report.expired:
        say(f"{key}: {would}forgotten: long unused")
    for session in report.pruned:
        freed = f", {size(session.bytes)} freed" if session.bytes else ""
        say(
            f"{session.key}: {would}pruned: {session.turns} turns up to record {session.cut}{freed}"
        )
    for retained in report.kept_for:
        say(f"{retained.key}: keeps more for checkpoint {retained.checkpoint}: let that go first")
    for key in report.held:
        say(f"{key}: somebody holds it: left alone")
    for key in report.damaged:
        say(f"{key}: cannot be read: left alone; `perdure check` says why")
