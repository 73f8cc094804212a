"""The directory of sessions: what lies in the folders, by key, a page at a time.

Ids come back out of the folders' names, and of the files inside where a name was too long.
What is said about a session is from its last fold, so it may lag behind the log.
Blocking: one hop into a thread.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

import msgspec

from perdure._lib.files import Folder
from perdure.errors import ConfigError, CorruptRecordError, FormatError
from perdure.records.json import decode
from perdure.records.keys import DEFAULT_SESSION, SessionKey
from perdure.records.manifest import About, Manifest
from perdure.store import SessionInfo
from perdure.stores.file import documents
from perdure.stores.file import segments as chain
from perdure.stores.file.inbox import has_dead_letters, waits_in
from perdure.stores.file.layout import (
    AGENTS,
    BLOBS,
    LOG,
    SESSIONS,
    TENANTS,
    agents_of,
    decode_name,
    lease_epoch,
    segment_name,
    segment_of,
)
from perdure.stores.file.leases import LeaseFile, newest_epoch, read_lease

_SESSION = "session.json"
_MAX_SESSION_BYTES = 1024 * 1024


class _Metadata(msgspec.Struct):
    title: str | None = None
    tags: list[str] = []
    owner: str | None = None


class _SessionMetadata(msgspec.Struct, rename="camel"):
    """What a listing takes from session.json."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    created_at: str | None = None


class FileListQuery(msgspec.Struct, frozen=True):
    """Which sessions are listed."""

    tenant: str
    owner: str | None
    tag: str | None
    prefix: str

    def fits(self, info: SessionInfo) -> bool:
        """Say whether a session of this tenant and prefix is one of them."""
        owned = self.owner in (None, info.owner)
        return owned and (self.tag is None or self.tag in info.tags)


def list_tenants(root: Folder) -> list[str]:
    """List the tenants that have a folder here."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        if _has_anything(root):
            found.add("")
        with root.enter(TENANTS) as tenants:
            for name in tenants.names():
                with contextlib.suppress(OSError), tenants.enter(name) as folder:
                    tenant = _id_of(name) or ("~" in name and _tenant_inside(folder))
                    if tenant and _has_anything(folder):
                        found.add(tenant)
    return sorted(found)


def _has_anything(folder: Folder) -> bool:
    for step in (AGENTS, BLOBS):
        with contextlib.suppress(OSError), folder.enter(step) as inner:
            if inner.names():
                return True
    return False


def _tenant_inside(tenant: Folder) -> str | None:
    """Return the id of a tenant whose folder's name has only its hash."""
    with contextlib.suppress(OSError), tenant.enter(AGENTS) as agents:
        for name in agents.names():
            with agents.enter(name) as folder:
                lease = _lease_inside(folder)
            if lease is not None:
                return lease.key.tenant
    return None


def list_sessions(
    root: Folder, wanted: FileListQuery, after: SessionKey | None, limit: int
) -> list[SessionInfo]:
    """List sessions by key, after *after*."""
    found: list[SessionInfo] = []
    tenant, prefix = wanted.tenant, wanted.prefix
    try:
        agents = root.enter(*agents_of(tenant))
    except FileNotFoundError:
        return []
    with agents:
        for agent, name in sorted(_agents(agents)):
            if not agent.startswith(prefix) or (after is not None and agent < after.agent):
                continue
            with contextlib.suppress(OSError), agents.enter(name) as folder:
                infos = _sessions(folder, SessionKey(agent, tenant=tenant))
                fresh = (info for info in infos if after is None or info.key > after)
                found += filter(wanted.fits, fresh)
            if len(found) >= limit:
                break
    return found[: max(limit, 0)]


def list_waiting(root: Folder, *, dead_letters: bool) -> list[SessionKey]:
    """List the sessions for which something waits, of all tenants, by key."""
    look = has_dead_letters if dead_letters else waits_in
    return sorted(filter(None, map(look, _folders(root))))


def end_deletions(root: Folder) -> None:
    """Remove what deletions that were cut short have left, of all tenants."""
    for folder in _folders(root):
        lease = _newest_lease(folder)
        if lease is not None and lease.deleted:
            documents.remove_owned(folder, lease.key, below=lease.epoch, evidence=True)


def _folders(root: Folder) -> Iterator[Folder]:
    """Give the folders of all sessions, each to be used before the next one is asked for."""
    yield from _folders_in(root)
    for tenant in _inside(root, TENANTS):
        yield from _folders_in(tenant)


def _folders_in(tenant: Folder) -> Iterator[Folder]:
    for agent in _inside(tenant, AGENTS):
        yield agent
        yield from _inside(agent, SESSIONS)


def _inside(folder: Folder, step: str) -> Iterator[Folder]:
    """Give the folders in a folder below one; what is no folder is passed over."""
    with contextlib.suppress(FileNotFoundError), folder.enter(step) as place:
        for name in place.names():
            try:
                inner = place.enter(name)
            except OSError:
                continue
            with inner:
                yield inner


def _agents(agents: Folder) -> Iterator[tuple[str, str]]:
    """Give the agents' ids and folders; what is no agent's folder is passed over."""
    for name in agents.names():
        agent = _id_of(name) or ("~" in name and _agent_inside(agents, name))
        if agent:
            yield agent, name


def _id_of(name: str) -> str | None:
    """Return the id that a folder's name stands for, None if it is no id, or told only inside."""
    text = decode_name(name)
    with contextlib.suppress(ConfigError):  # somebody else's: nobody could have given that id
        return text if text == name or not text else SessionKey(text).agent
    return None


def _agent_inside(agents: Folder, name: str) -> str | None:
    """Return the id of an agent whose folder's name has only its hash."""
    with contextlib.suppress(OSError), agents.enter(name) as folder:
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
    epoch = max(map(lease_epoch, folder.names()), default=0)
    return read_lease(folder, epoch) if epoch else None


def _sessions(folder: Folder, default: SessionKey) -> list[SessionInfo]:
    found = [_info(folder, default)]
    with contextlib.suppress(FileNotFoundError), folder.enter(SESSIONS) as sessions:
        for name in sessions.names():
            with contextlib.suppress(OSError), sessions.enter(name) as inner:
                session = _id_of(name)
                if "~" in name:
                    lease = _newest_lease(inner)
                    session = lease.key.session if lease else None
                if session and session != DEFAULT_SESSION:
                    found.append(_info(inner, SessionKey(default.agent, session, default.tenant)))
    return sorted(filter(None, found), key=lambda info: info.key)


def _info(folder: Folder, key: SessionKey) -> SessionInfo | None:
    epoch = newest_epoch(folder)
    lease = read_lease(folder, epoch) if epoch else None
    if not epoch or (lease is not None and lease.deleted):
        return None
    since = 1 if lease is None else lease.since
    manifest = _manifest(folder, key, since)
    folded = manifest.about if manifest else About()
    about = _about(folder)  # of releases that folded nothing about it into the manifest
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
    # One bad session must not hide the others: opening it says what is wrong.
    with contextlib.suppress(FormatError):
        seen = documents.read_manifests(folder, key, since=since)
        if seen and not seen[0].coming:
            return seen[0].manifest
    return None


def _about(folder: Folder) -> _SessionMetadata:
    """Read session.json as a hint: it may be of any shape, or half of another fold."""
    with contextlib.suppress(OSError, FormatError):
        found = folder.stat(_SESSION)
        if found is not None and found.st_size <= _MAX_SESSION_BYTES:
            return decode(folder.read(_SESSION) or b"{}", _SessionMetadata)
    return _SessionMetadata()


def _seconds(iso: str | None) -> float | None:
    with contextlib.suppress(ValueError):
        return datetime.datetime.fromisoformat(iso).timestamp() if iso else None
    return None


def _times(folder: Folder, key: SessionKey) -> tuple[float | None, float | None]:
    """Return when the log begins, and when its newest file was last written to."""
    with contextlib.suppress(OSError, CorruptRecordError), folder.enter(LOG) as log:
        segments = sorted(filter(None, map(segment_of, log.names())))
        if segments:
            first = chain.read_first(log, *segments[0], key)
            last = log.stat(segment_name(*segments[-1]))
            return (first.first.at if first else None), (last.st_mtime if last else None)
    return None, None
