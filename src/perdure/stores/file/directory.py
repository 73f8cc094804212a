"""Directory of sessions: what the folders contain, by key, a page at a time.

Ids are decoded from the folders' names, or read from the files inside where a name was too
long. A session's facts are as of its last fold, so they may lag the log.
Blocking: each public function is one call into a thread.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

import msgspec

from perdure._lib.files import Folder, skip_unreadable
from perdure.errors import ConfigError, CorruptRecordError, FormatError
from perdure.records.json import decode
from perdure.records.keys import DEFAULT_SESSION, SessionKey
from perdure.records.manifest import About, Manifest, SessionQuery
from perdure.store import DraftInfo, SessionInfo
from perdure.stores.file import documents, segments
from perdure.stores.file.inbox import session_with_dead_letters, session_with_items
from perdure.stores.file.layout import (
    AGENTS,
    BLOBS,
    LOG,
    SESSIONS,
    TENANTS,
    agents_of,
    decode_name,
    segment_name,
    segment_of,
    tenant_path,
)
from perdure.stores.file.leases import LeaseFile, NewestLease, newest_lease

_SESSION = "session.json"
_MAX_SESSION_BYTES = 1024 * 1024


class _Metadata(msgspec.Struct):
    title: str | None = None
    tags: list[str] = []
    owner: str | None = None


class _SessionMetadata(msgspec.Struct, rename="camel"):
    """The part of session.json that a listing shows."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    created_at: str | None = None


def list_tenants(root: Folder) -> list[str]:
    """List the tenants that have sessions or blobs."""
    ids = set()
    with contextlib.suppress(FileNotFoundError):
        if _has_anything(root):
            ids.add("")
        with root.enter(TENANTS) as tenants:
            for name in tenants.names():
                with skip_unreadable(), tenants.enter(name) as folder:
                    tenant = _decoded_id(name) or ("~" in name and _tenant_inside(folder))
                    if tenant and _has_anything(folder):
                        ids.add(tenant)
    return sorted(ids)


def _has_anything(folder: Folder) -> bool:
    with skip_unreadable(), folder.enter(BLOBS) as blobs:
        if blobs.names():
            return True
    return any(map(_shown, _folders_in(folder)))


def _shown(folder: Folder) -> NewestLease | None:
    """Return a session's newest lease, None if there is no session for readers."""
    with contextlib.suppress(CorruptRecordError):
        newest = newest_lease(folder)
        is_there = newest.epoch > 0 and not (newest.lease and newest.lease.deleted)
        return newest if is_there else None
    return None


def _tenant_inside(tenant: Folder) -> str | None:
    """Return the id of a tenant whose folder name holds only its hash."""
    with skip_unreadable(), tenant.enter(AGENTS) as agents:
        for name in agents.names():
            with agents.enter(name) as folder:
                lease = _lease_inside(folder)
            if lease is not None:
                return lease.key.tenant
    return None


def list_sessions(root: Folder, query: SessionQuery) -> list[SessionInfo]:
    """List sessions by key."""
    listed: list[SessionInfo] = []
    tenant, prefix, after = query.tenant, query.prefix, query.after
    try:
        agents = root.enter(*agents_of(tenant))
    except FileNotFoundError:
        return []
    with agents:
        for agent, name in sorted(_agents(agents)):
            if not agent.startswith(prefix) or (after is not None and agent < after.agent):
                continue
            with skip_unreadable(), agents.enter(name) as folder:
                infos = _sessions(folder, SessionKey(agent, tenant=tenant))
                fresh = (info for info in infos if after is None or info.key > after)
                listed += filter(query.matches, fresh)
            if len(listed) >= query.limit:
                break
    return listed[: max(query.limit, 0)]


def list_waiting(root: Folder, *, dead_letters: bool) -> list[SessionKey]:
    """List all tenants' sessions that have inbox items, or dead letters, by key."""
    session_of = session_with_dead_letters if dead_letters else session_with_items
    return sorted(filter(None, map(session_of, _folders(root))))


def end_deletions(root: Folder) -> None:
    """Finish interrupted deletions, for all tenants."""
    for folder in _folders(root):
        lease = _newest_lease(folder)
        if lease is not None and lease.deleted and not lease.is_draft:
            key, below = lease.key, lease.epoch
            documents.remove_owned(folder, key, below=below, evidence=True, inbox=lease.inbox)


def list_drafts(root: Folder, tenant: str) -> list[DraftInfo]:
    """List a tenant's drafts that are not published, by key."""
    drafts: list[DraftInfo] = []
    with contextlib.suppress(FileNotFoundError), root.enter(*tenant_path(tenant)) as folder:
        for inner in _folders_in(folder):
            lease = newest_lease(inner).lease
            if lease is not None and lease.is_draft and lease.draft is not None:
                drafts.append(DraftInfo(lease.key, lease.epoch, lease.draft, lease.owner))
    return sorted(drafts, key=lambda info: info.key)


def _folders(root: Folder) -> Iterator[Folder]:
    """Yield the folders of all sessions; each is closed when the next one is requested."""
    yield from _folders_in(root)
    for tenant in _subfolders(root, TENANTS):
        yield from _folders_in(tenant)


def _folders_in(tenant: Folder) -> Iterator[Folder]:
    for agent in _subfolders(tenant, AGENTS):
        yield agent
        yield from _subfolders(agent, SESSIONS)


def _subfolders(folder: Folder, step: str) -> Iterator[Folder]:
    """Yield the subfolders of a folder's child; anything else is skipped."""
    with contextlib.suppress(FileNotFoundError), folder.enter(step) as parent:
        for name in parent.names():
            child = None
            with skip_unreadable():
                child = parent.enter(name)
            if child is not None:
                with child:
                    yield child


def _agents(agents: Folder) -> Iterator[tuple[str, str]]:
    """Yield the agents' ids and folder names; other folders are skipped."""
    for name in agents.names():
        agent = _decoded_id(name) or ("~" in name and _agent_inside(agents, name))
        if agent:
            yield agent, name


def _decoded_id(name: str) -> str | None:
    """Return the id that a folder's name encodes, None if it is not an id or only a hash."""
    text = decode_name(name)
    with contextlib.suppress(ConfigError):  # a foreign folder: that id is not valid
        return text if text == name or not text else SessionKey(text).agent
    return None


def _agent_inside(agents: Folder, name: str) -> str | None:
    """Return the id of an agent whose folder name holds only its hash."""
    with skip_unreadable(), agents.enter(name) as folder:
        lease = _lease_inside(folder)
        return lease.key.agent if lease else None
    return None


def _lease_inside(agent: Folder) -> LeaseFile | None:
    """Return a lease of any of an agent's sessions."""
    lease = _newest_lease(agent)
    if lease is None:
        with contextlib.suppress(FileNotFoundError), agent.enter(SESSIONS) as sessions:
            for name in sessions.names():
                with sessions.enter(name) as inner:
                    lease = lease or _newest_lease(inner)
    return lease


def _newest_lease(folder: Folder) -> LeaseFile | None:
    with contextlib.suppress(CorruptRecordError):  # of a draft: whoever opens it is told
        return newest_lease(folder).lease
    return None


def _sessions(folder: Folder, default: SessionKey) -> list[SessionInfo]:
    infos = [_info(folder, default)]
    with contextlib.suppress(FileNotFoundError), folder.enter(SESSIONS) as sessions:
        for name in sessions.names():
            with skip_unreadable(), sessions.enter(name) as inner:
                session = _decoded_id(name)
                if "~" in name:
                    lease = _newest_lease(inner)
                    session = lease.key.session if lease else None
                if session and session != DEFAULT_SESSION:
                    infos.append(_info(inner, SessionKey(default.agent, session, default.tenant)))
    return sorted(filter(None, infos), key=lambda info: info.key)


def _info(folder: Folder, key: SessionKey) -> SessionInfo | None:
    newest = _shown(folder)
    if newest is None:
        return None
    epoch, lease, _ = newest
    since = 1 if lease is None else lease.since
    manifest = _manifest(folder, key, since)
    folded = manifest.about if manifest else About()
    about = _metadata(folder)  # older releases folded no metadata into the manifest
    began, updated = _times(folder, key)
    return SessionInfo(
        key=key,
        epoch=epoch,
        head=manifest.as_of_seq if manifest else 0,
        created_at=_seconds(about.created_at) or began,
        updated_at=updated,
        owner=folded.owner or about.metadata.owner,
        title=folded.title or about.metadata.title,
        tags=folded.tags or tuple(about.metadata.tags),
        turns=manifest.counters.get("turns", 0) if manifest else 0,
        damaged=manifest is None and documents.has_damaged_manifest(folder, since),
    )


def _manifest(folder: Folder, key: SessionKey, since: int) -> Manifest | None:
    # One bad session must not hide the others: opening it reports what is wrong.
    with contextlib.suppress(FormatError):
        manifests = documents.read_manifests(folder, key, since=since)
        if manifests and not manifests[0].is_pending:
            return manifests[0].manifest
    return None


def _metadata(folder: Folder) -> _SessionMetadata:
    """Read session.json as a hint: it may have any shape, or be part of another fold."""
    with contextlib.suppress(OSError, FormatError):
        status = folder.stat(_SESSION)
        if status is not None and status.st_size <= _MAX_SESSION_BYTES:
            return decode(folder.read(_SESSION) or b"{}", _SessionMetadata)
    return _SessionMetadata()


def _seconds(iso: str | None) -> float | None:
    with contextlib.suppress(ValueError):
        return datetime.datetime.fromisoformat(iso).timestamp() if iso else None
    return None


def _times(folder: Folder, key: SessionKey) -> tuple[float | None, float | None]:
    """Return the time of the log's first record, and of the last write to its newest file."""
    with contextlib.suppress(OSError, CorruptRecordError), folder.enter(LOG) as log:
        names = sorted(filter(None, map(segment_of, log.names())))
        if names:
            first = segments.read_first(log, *names[0], key)
            last = log.stat(segment_name(*names[-1]))
            return (first.first.at if first else None), (last.st_mtime if last else None)
    return None, None
