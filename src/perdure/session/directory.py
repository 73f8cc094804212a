"""Listings of sessions: what the store lists, and over it what this process knows better.

A store lists a session as of its last fold. One that is open here has newer labels, counts and
times, so it is found by them at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from perdure.records.keys import SCOPES, SessionKey
from perdure.records.manifest import SessionInfo, SessionQuery
from perdure.session.base import SessionBase
from perdure.session.scope import list_sessions
from perdure.store import Store

_PAGE: Final = 500


async def by_id(
    store: Store, open_sessions: Mapping[SessionKey, SessionBase], query: SessionQuery
) -> list[SessionInfo]:
    """Return sessions in the order of their ids, up to ``query.limit``."""
    listed: list[SessionInfo] = []
    after = query.after
    while len(listed) < query.limit:
        wanted = query.limit - len(listed)
        page = await list_sessions(
            store,
            query.tenant,
            owner=query.owner,
            tag=query.tag,
            prefix=query.prefix,
            after=after,
            limit=wanted,
        )
        last = page[-1].key if len(page) == wanted else None
        listed += _with_open(page, _between(open_sessions, query, after, last), query)
        if last is None:
            break
        after = last
    return listed[: query.limit]


async def newest_first(
    store: Store,
    open_sessions: Mapping[SessionKey, SessionBase],
    query: SessionQuery,
    after: SessionInfo | None,
) -> list[SessionInfo]:
    """Return the sessions that were used last, of them the last first; reads the whole listing."""
    newest: list[SessionInfo] = []
    listed = msgspec.structs.replace(query, limit=_PAGE, after=None)
    while page := await by_id(store, open_sessions, listed):
        listed = msgspec.structs.replace(listed, after=page[-1].key)
        older = (info for info in page if after is None or last_used(info) < last_used(after))
        newest = heapq.nlargest(query.limit, (*newest, *older), key=last_used)
    return newest


def last_used(info: SessionInfo) -> tuple[float, SessionKey]:
    """Return what a listing by last use is ordered by."""
    return info.updated_at or 0.0, info.key


def _between(
    open_sessions: Mapping[SessionKey, SessionBase],
    query: SessionQuery,
    after: SessionKey | None,
    last: SessionKey | None,
) -> Iterable[SessionBase]:
    """Return the sessions of this process whose keys come after one, up to another."""
    return [
        session
        for key, session in open_sessions.items()
        if key.tenant == query.tenant
        and key.agent != SCOPES
        and key.agent.startswith(query.prefix)
        and (after is None or key > after)
        and (last is None or key <= last)
        and session.is_writable  # else another process may know more
    ]


def _with_open(
    page: list[SessionInfo], sessions: Iterable[SessionBase], query: SessionQuery
) -> list[SessionInfo]:
    merged = {info.key: info for info in page}
    for session in sessions:
        info = _info_of(session, merged.pop(session.key, None))
        if query.matches(info):
            merged[info.key] = info
    return sorted(merged.values(), key=lambda info: info.key)


def _info_of(session: SessionBase, stored: SessionInfo | None) -> SessionInfo:
    about = session._contents.about()
    times = (about.updated_at, None if stored is None else stored.updated_at)
    return SessionInfo(
        key=session.key,
        epoch=session.epoch,
        head=session.durable_version,
        created_at=about.created_at,
        updated_at=max((at for at in times if at is not None), default=None),
        owner=about.owner,
        title=about.title,
        tags=about.tags,
        turns=session._contents.turns,
    )
