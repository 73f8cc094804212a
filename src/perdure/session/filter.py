"""Which sessions are meant: by agent, owner or tag, as they are now and not as of their fold."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from perdure.errors import FormatError
from perdure.lineage.store import Lineage
from perdure.memory.documents import SESSION, MetadataPayload, SessionDocument
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.records import META
from perdure.store import SessionInfo

if TYPE_CHECKING:
    from perdure.session.base import SessionBase


_PAGE = 500


class SessionFilter(msgspec.Struct, frozen=True):
    """What was asked for; None for any."""

    id: str | None
    session: str | None
    tenant: str
    owner: str | None
    tag: str | None

    def fits(self, owner: str | None, tags: tuple[str, ...]) -> bool:
        """Say whether a session with this owner and these tags is meant."""
        return self.owner in (None, owner) and (self.tag is None or self.tag in tags)


async def chosen(
    store: Lineage, wanted: SessionFilter, open_sessions: Mapping[SessionKey, SessionBase]
) -> list[SessionKey]:
    """Return the sessions that are meant.

    A listing reports the last fold; where the log is longer by now, it is read, and a session
    that is open *here* knows what is not durable yet.
    """
    keys: list[SessionKey] = []
    after: SessionKey | None = None
    prefix = wanted.id or ""
    while page := await store.sessions(
        tenant=wanted.tenant, prefix=prefix, after=after, limit=_PAGE
    ):
        after = page[-1].key
        for info in page:
            key = info.key
            if wanted.id not in (None, key.agent) or wanted.session not in (None, key.session):
                continue
            if await _fits(store, info, wanted, open_sessions):
                keys.append(key)
    return keys


async def only_posted_to(store: Lineage, wanted: SessionFilter) -> list[SessionKey]:
    """Return the sessions of an id that were never opened but have pending items."""
    if wanted.id is None or wanted.owner is not None or wanted.tag is not None:
        return []
    return [
        key
        for key in await store.waiting()
        if (key.tenant, key.agent) == (wanted.tenant, wanted.id)
        and wanted.session in (None, key.session)
        and await store.head(key) == 0
    ]


async def _fits(
    store: Lineage,
    info: SessionInfo,
    wanted: SessionFilter,
    open_sessions: Mapping[SessionKey, SessionBase],
) -> bool:
    if wanted.owner is None and wanted.tag is None:
        return True
    session = open_sessions.get(info.key)
    if session is not None:
        metadata = session.info.metadata
        return wanted.fits(metadata.owner, tuple(metadata.tags))
    try:
        owner, tags = await _described(store, info.key)
    except FormatError:  # damaged: what its last fold says is all that there is
        owner, tags = info.owner, info.tags
    return wanted.fits(owner, tags)


async def _described(store: Lineage, key: SessionKey) -> tuple[str | None, tuple[str, ...]]:
    """Return a session's owner and tags as of its newest durable record."""
    document = (await store.read_documents(key, {SESSION})).found.get(SESSION)
    owner, tags, since = None, tuple[str, ...](), 0
    if document is not None:
        metadata = decode(document.data, SessionDocument).metadata
        owner, tags, since = metadata.owner, tuple(metadata.tags), document.as_of_seq
    async with aclosing(store.read_log(key, after=since)) as log:
        async for chunk in log:
            for record in chunk.records:
                if record.kind == META:
                    meta = decode(record.payload, MetadataPayload)
                    owner = owner if meta.owner is None else meta.owner
                    tags = tags if meta.tags is None else tuple(meta.tags)
    return owner, tags
