"""Directory of sessions: what the folders contain, by key, a page at a time.

Ids are decoded from the folders' names, or read from the files inside where a name was too
long. A session's labels are those of its last fold, or of the save that changed them since; its
last activity and its turns are what the end of its log says.
Blocking: each public function is one call into a thread.
"""

from __future__ import annotations

import contextlib
import heapq
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from perdure._lib.files import Folder, skip_unreadable
from perdure.errors import ConfigError, CorruptRecordError, FormatError
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
from perdure.stores.file.leases import NewestLease, newest_lease
from perdure.stores.file.log import LogWriter


def list_tenants(root: Folder) -> list[str]:
    """List the tenants that have sessions or blobs."""
    ids = set()
    with contextlib.suppress(FileNotFoundError):
        if _has_anything(root):
            ids.add("")
        with root.enter(TENANTS) as tenants:
            for name in tenants.names():
                with skip_unreadable(), tenants.enter(name) as folder:
                    tenant = _decoded_id(name)
                    if "~" in name:
                        key = _key_inside(_folders_in(folder))
                        tenant = key.tenant if key else None
                    if tenant and _has_anything(folder):
                        ids.add(tenant)
    return sorted(ids)


def _has_anything(folder: Folder) -> bool:
    with skip_unreadable(), folder.enter(BLOBS) as blobs:
        if blobs.names():
            return True
    return any(newest.epoch and not newest.deleted for newest in map(_newest, _folders_in(folder)))


def _newest(folder: Folder) -> NewestLease:
    """Return a session's newest lease, none for a damaged one of a draft."""
    with contextlib.suppress(CorruptRecordError):  # opening it reports that
        return newest_lease(folder)
    return NewestLease(0, None, [])


def _key_inside(folders: Iterator[Folder]) -> SessionKey | None:
    """Return the key in the first lease in folders whose names hold only their hash."""
    leases = (_newest(folder).lease for folder in folders)
    return next((lease.key for lease in leases if lease is not None), None)


def list_sessions(
    root: Folder, query: SessionQuery, held: Mapping[SessionKey, LogWriter]
) -> list[SessionInfo]:
    """List a page of a tenant's sessions; of the held ones, this process knows more."""
    listed: list[SessionInfo] = []
    with contextlib.suppress(FileNotFoundError), root.enter(*agents_of(query.tenant)) as agents:
        chosen = sorted(
            (agent, name)
            for agent, name in _agents(agents)
            if agent not in query.without and agent.startswith(query.prefix)
        )
        if query.newest_first:
            return _newest_page(agents, chosen, query, held)
        for agent, name in chosen:
            if query.after is not None and agent < query.after.agent:
                continue
            listed += _listed(agents, agent, name, query, held)
            if len(listed) >= query.limit:
                break
    return query.page(listed)


def _newest_page(
    agents: Folder,
    chosen: Iterable[tuple[str, str]],
    query: SessionQuery,
    held: Mapping[SessionKey, LogWriter],
) -> list[SessionInfo]:
    """List the newest sessions, and read little of the others.

    Whatever is written to a session changes its log, and so does an open, which is no activity. So
    no session was last used after the last change of a log of its agent: once a page is full of
    newer ones, the rest of the agents, in that order, have nothing for it.
    """
    saved: dict[str, float] = {}
    for key, writer in held.items():
        saved[key.agent] = max(saved.get(key.agent, 0.0), writer.saved_at or 0.0)
    changed: list[tuple[float, str, str]] = []
    for agent, name in chosen:
        with skip_unreadable(), agents.enter(name) as folder:
            logs = [at for one in _folders_of(folder) for at in _log_changes(one)]
            changed.append((max([saved.get(agent, 0.0), *logs]), agent, name))
    listed: list[SessionInfo] = []
    newest: list[float] = []
    """A heap of the page's times."""
    for at, agent, name in sorted(changed, reverse=True):
        is_full = len(newest) >= query.limit
        if (is_full and (not newest or at < newest[0])) or at < (query.since or 0.0):
            break
        for info in _listed(agents, agent, name, query, held):
            listed.append(info)
            heapq.heappush(newest, info.updated_at or 0.0)
            if len(newest) > query.limit:
                heapq.heappop(newest)
    return query.page(listed)


def _log_changes(folder: Folder) -> list[float]:
    """Return when the files of a session's log were last changed."""
    with contextlib.suppress(OSError), folder.enter(LOG) as log:
        return [status.st_mtime for status in map(log.stat, log.names()) if status is not None]
    return []


def _listed(
    agents: Folder,
    agent: str,
    name: str,
    query: SessionQuery,
    held: Mapping[SessionKey, LogWriter],
) -> list[SessionInfo]:
    """Return those of an agent's sessions that may be on the page."""
    with skip_unreadable(), agents.enter(name) as folder:
        infos = _sessions(folder, SessionKey(agent, tenant=query.tenant), held)
        return [info for info in infos if query.matches(info) and query.is_next(info)]
    return []


def list_waiting(root: Folder, *, dead_letters: bool) -> list[SessionKey]:
    """List all tenants' sessions that have inbox items, or dead letters, by key."""
    session_of = session_with_dead_letters if dead_letters else session_with_items
    return sorted(filter(None, map(session_of, _folders(root))))


def end_deletions(root: Folder) -> None:
    """Finish interrupted deletions, for all tenants."""
    for folder in _folders(root):
        lease = _newest(folder).lease
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
        yield from _folders_of(agent)


def _folders_of(agent: Folder) -> Iterator[Folder]:
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
        agent = _decoded_id(name)
        if "~" in name:
            with skip_unreadable(), agents.enter(name) as folder:
                key = _key_inside(_folders_of(folder))
                agent = key.agent if key else None
        if agent:
            yield agent, name


def _decoded_id(name: str) -> str | None:
    """Return the id that a folder's name encodes, None if it is not an id or only a hash."""
    text = decode_name(name)
    with contextlib.suppress(ConfigError):  # a foreign folder: that id is not valid
        return text if text == name or not text else SessionKey(text).agent
    return None


def _sessions(
    folder: Folder, default: SessionKey, held: Mapping[SessionKey, LogWriter]
) -> list[SessionInfo]:
    infos = [_info(folder, default, held.get(default))]
    with contextlib.suppress(FileNotFoundError), folder.enter(SESSIONS) as sessions:
        for name in sessions.names():
            with skip_unreadable(), sessions.enter(name) as inner:
                session = _decoded_id(name)
                if "~" in name:
                    lease = _newest(inner).lease
                    session = lease.key.session if lease else None
                if session and session != DEFAULT_SESSION:
                    key = SessionKey(default.agent, session, default.tenant)
                    infos.append(_info(inner, key, held.get(key)))
    return list(filter(None, infos))


def _info(folder: Folder, key: SessionKey, writer: LogWriter | None) -> SessionInfo | None:
    newest = _newest(folder)
    epoch, _, names = newest
    if not epoch or newest.deleted:
        return None
    manifest, is_damaged = None, False
    with contextlib.suppress(FormatError):  # one bad session hides no other: opening it reports it
        manifests = documents.read_manifests(folder, key, since=newest.since, names=names)
        is_damaged = bool(manifests.damaged)
        if manifests.files and not manifests.files[0].is_pending:
            manifest = manifests.files[0].manifest
    about, as_of = (manifest.about, manifest.as_of_seq) if manifest else (About(), 0)
    turns = manifest.counters.get("turns", 0) if manifest else 0
    end = _log_end(folder, key, manifest)
    labels = about
    saved = documents.read_labels(folder, names, newest.since)
    if saved is not None and saved.seq > as_of:
        labels = saved.about
    turns = turns if end.turns is None else end.turns
    updated = end.written_at
    if writer is not None and writer.epoch == epoch:
        updated = writer.saved_at or updated
        if writer.turns is not None and writer.listed_at > as_of:
            turns = writer.turns
    return SessionInfo(
        key=key,
        epoch=epoch,
        head=max(as_of, end.head),
        created_at=about.created_at or end.began_at,
        updated_at=updated,
        turns=turns,
        damaged=manifest is None and is_damaged,
        owner=labels.owner,
        title=labels.title,
        tags=labels.tags,
    )


# The end of a log, which is newer than the fold


_TAIL_BYTES = 64 * 1024
_LAST = re.compile(rb'^\{"n":([0-9]+),.*\n\Z', re.MULTILINE)
_TURN = re.compile(rb'^\{"n":[0-9]+,"e":[0-9]+,"k":"turn",.*$', re.MULTILINE)


class _TurnLine(msgspec.Struct):
    class _Payload(msgspec.Struct):
        number: int

    r: _Payload


class _LogEnd(msgspec.Struct):
    began_at: float | None = None
    written_at: float | None = None
    """The time of the last write of records; opening a session is not one."""
    head: int = 0
    """The last record; 0 where there is none after the fold."""
    turns: int | None = None
    """The number of the last turn, if one began in what was read."""


def _log_end(folder: Folder, key: SessionKey, manifest: Manifest | None) -> _LogEnd:
    """Return what the end of a log says, not verified: opening the session does that."""
    end = _LogEnd()
    mark = None if manifest is None else documents.position_of(manifest)
    with contextlib.suppress(OSError, CorruptRecordError), folder.enter(LOG) as log:
        places = sorted(filter(None, map(segment_of, log.names())))
        first = segments.read_first(log, *places[0], key) if places else None
        end.began_at = first.first.at if first else None
        for epoch, number in reversed(places):
            name = segment_name(epoch, number)
            status = log.stat(name)
            if status is None:
                continue
            end.written_at = status.st_mtime
            is_marked = mark is not None and (epoch, number) == (mark.epoch, mark.number)
            if mark is not None and is_marked and status.st_size <= mark.at.offset:
                break
            with open(log.open(name), "rb") as file:
                file.seek(max(status.st_size - _TAIL_BYTES, 0))
                tail = file.read(_TAIL_BYTES)
            end.head = end.head or max([int(n) for n in _LAST.findall(tail)], default=0)
            if number == 0 and tail.count(b"\n") <= 1 and status.st_size == len(tail):
                continue  # it was only opened
            for line in _TURN.findall(tail)[-1:]:
                with contextlib.suppress(msgspec.DecodeError):  # encrypted
                    end.turns = msgspec.json.decode(line, type=_TurnLine).r.number
            break
    return end
