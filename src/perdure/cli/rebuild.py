"""``perdure rebuild``: a session's documents made anew from its log."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import anyio
from cyclopts import Parameter

from perdure.cli.access import existing, is_there, managed, no_session, opened
from perdure.cli.audit import audit
from perdure.cli.output import SessionOption, print_json, say
from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey


def rebuild(
    id: Annotated[str, Parameter(name="ID")],
    /,
    *,
    dry_run: bool = False,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Rebuild a session's documents from its log.

    The documents are caches: this loses nothing, and mends whatever became of them. It takes the
    session's lease, so it waits for nobody and fails while the session is in use.

    Args:
        id: The agent's id.
        dry_run: Only say what is wrong with the documents.

    """
    return anyio.run(partial(_rebuild, id, dry_run=dry_run, where=where))


async def _rebuild(id: str, *, dry_run: bool, where: SessionOption) -> int:
    key = where.key(id)
    async with opened(where.store) as store:
        if not await is_there(store, key):
            raise no_session(key, store)
        audited = await audit(store, key)
    for finding in audited.problems:
        if not finding.repairable:
            raise CorruptRecordError(f"session {key}: {finding.detail}", key=str(key))
    answer: dict[str, Any] = {
        "agent": key.agent,
        "session": key.session,
        "tenant": key.tenant,
        "records": audited.records,
        "wrong": [finding.detail for finding in audited.problems],
        "rebuilt": [],
    }
    if not dry_run:
        store = existing(where.store)
        async with managed(store, write=True) as sessions:
            report = await sessions.rebuild_working_context(
                key.agent, session=key.session, tenant=key.tenant
            )
        answer["rebuilt"] = list(report.rebuilt)
    if where.json:
        print_json(answer)
    else:
        _print(key, answer, dry_run=dry_run)
    return 0


def _print(key: SessionKey, answer: dict[str, Any], *, dry_run: bool) -> None:
    for detail in answer["wrong"]:
        say(f"{key}: {detail}")
    if dry_run:
        say(f"{key}: {len(answer['wrong'])} of its documents would be mended; nothing was changed")
    else:
        names = ", ".join(answer["rebuilt"])
        say(f"{key}: rebuilt {names} from {answer['records']} records")
