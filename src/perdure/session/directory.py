"""Listings: what the store answers, and over it what sessions here have not saved yet."""

from __future__ import annotations

import time
from collections.abc import Collection

from perdure.records.manifest import SessionInfo, SessionQuery
from perdure.session.base import SessionBase
from perdure.store import Store


async def list_sessions(
    store: Store, query: SessionQuery, unsaved: Collection[SessionBase] = ()
) -> list[SessionInfo]:
    """Return the page that a query asks for, with unsaved sessions as they are now."""
    own = [_info_of(session) for session in unsaved if session.key.tenant == query.tenant]
    if not own:
        return await store.sessions(query)
    known = {info.key for info in own}
    found: list[SessionInfo] = []
    page = query
    while listed := await store.sessions(page):
        found += [info for info in listed if info.key not in known]
        if len(found) >= query.limit or len(listed) < page.limit:
            break
        page = page.after_page(listed[-1])
    return query.page([*found, *own])


def _info_of(session: SessionBase) -> SessionInfo:
    about = session._contents.about()
    return SessionInfo(
        key=session.key,
        epoch=session.epoch,
        head=session.durable_version,
        created_at=about.created_at,
        updated_at=about.updated_at or time.time(),
        owner=about.owner,
        title=about.title,
        tags=about.tags,
        turns=session._contents.document.turns,
    )
