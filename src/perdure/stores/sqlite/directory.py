"""Directory of sessions by key, as of their last fold. Blocking; called within a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.records.keys import SessionKey
from perdure.records.manifest import About
from perdure.store import SessionInfo
from perdure.stores.sqlite.documents import comparable_tag, manifest_in
from perdure.stores.sqlite.sql import Q

if TYPE_CHECKING:
    import sqlite3


def sessions(  # noqa: PLR0917  # passed through a thread, by position
    con: sqlite3.Connection,
    tenant: str,
    owner: str | None,
    tag: str | None,
    prefix: str,
    after: SessionKey | None,
    limit: int,
) -> list[SessionInfo]:
    """List a tenant's sessions by key."""
    agent, session = (after.agent, after.session) if after else ("", "")
    values = {
        "tenant": tenant,
        "owner": owner,
        "tag": tag if tag is None else comparable_tag(tag),
        "prefix": prefix,
        "after_agent": agent,
        "after_session": session,
        "limit": max(limit, 0),
    }
    return [_info(tenant, row) for row in con.execute(Q["sessions"], values)]


def _info(tenant: str, row: tuple[object, ...]) -> SessionInfo:
    agent, session, epoch, head, created_at, updated_at, stored = row
    manifest = manifest_in(stored)
    about = manifest.about if manifest else About()
    return SessionInfo(
        key=SessionKey(str(agent), str(session), tenant),
        epoch=epoch,  # type: ignore[arg-type]  # as the table has it
        head=head,  # type: ignore[arg-type]
        created_at=created_at,  # type: ignore[arg-type]
        updated_at=updated_at,  # type: ignore[arg-type]
        owner=about.owner,
        title=about.title,
        tags=about.tags,
        turns=manifest.counters.get("turns", 0) if manifest else 0,
        damaged=manifest is None and stored is not None,
    )


def tenants(con: sqlite3.Connection) -> list[str]:
    """List the tenants that have sessions or blobs."""
    return [tenant for (tenant,) in con.execute(Q["tenants"])]
