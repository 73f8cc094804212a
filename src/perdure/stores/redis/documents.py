"""Documents, manifests, blobs, and the directory of sessions, each written and read by a script."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, final

import msgspec

from perdure.records.chunks import require_named, verified
from perdure.records.keys import SessionKey
from perdure.records.manifest import (
    Manifest,
    SessionQuery,
    decode_manifest,
    lease_lost,
    matching_documents,
    require_logged,
)
from perdure.records.records import open_sealed, seal
from perdure.store import BlobSweep, Documents, DraftInfo, SessionInfo
from perdure.stores.redis.connection import RedisCall, RedisLink, Script, script
from perdure.stores.redis.layout import (
    COMPLETE,
    DRAFT,
    STEP,
    KeyNames,
    damage_error,
    draft_of,
    key_of_member,
    key_of_name,
    listed_fields,
    member_of,
    members_between,
    owned_member,
    shown_of,
)
from perdure.stores.redis.log import ColdHistory, owner_moves

T = TypeVar("T")

log: logging.Logger = logging.getLogger("perdure")


@final
class RedisDocuments:
    """The documents of all sessions."""

    def __init__(self, link: RedisLink, names: KeyNames) -> None:
        self._link = link
        self._names = names

    async def read(self, key: SessionKey, names: Collection[str] | None) -> Documents:
        keys = self._names.session_keys(key)
        selected = () if names is None else tuple(names) or ("",)
        ((encoded, *parts),) = await self._link.send(
            [_READ((keys.session, keys.documents), *selected)]
        )
        return documents_of(key, names, encoded, parts)

    async def write(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Replace documents and manifest in one step."""
        keys = self._names.session_keys(key)
        about, turns = manifest.about, manifest.counters.get("turns", 0)
        pairs = [part for pair in documents.items() for part in pair]
        call = _FOLD(
            (keys.session, keys.documents),
            manifest.epoch,
            manifest.as_of_seq,
            seal(msgspec.json.encode(manifest)),
            shown_of(about, turns),
            len(documents),
            *pairs,
            *manifest.documents,
        )
        (reply,) = await self._link.write([call])
        if reply[0] == b"gone":
            require_logged(manifest, reply[1])
        elif reply[0] == b"lost":
            raise lease_lost(key, manifest.epoch, reply[1], deleted=bool(reply[2]))
        elif reply[1] and (moves := owner_moves(self._names, key, reply[2], about.owner)):
            await self._link.write(moves)


def documents_of(
    key: SessionKey,
    names: Collection[str] | None,
    encoded: bytes | None,
    parts: Sequence[bytes],
) -> Documents:
    """Return documents from a manifest, and a name and bytes of each."""
    documents = dict(zip(map(bytes.decode, parts[::2]), parts[1::2], strict=True))
    manifest = None if encoded is None else _manifest_of(key, encoded)
    if manifest is None:  # lost or damaged, so no document can be verified
        return Documents(damaged=tuple(sorted(documents)), remains=documents)
    return matching_documents(manifest, documents, names)


def _manifest_of(key: SessionKey, encoded: bytes) -> Manifest | None:
    """Return a manifest; None for a damaged one, which counts as lost."""
    manifest = decode_manifest(open_sealed(encoded), f"the manifest of {key}", key=str(key))
    if manifest is None:
        log.warning("the manifest of session %s is damaged", key, extra={"session": str(key)})
        return None
    if manifest.key != key:
        raise damage_error(key, "the manifest", f"it is the one of {manifest.key}")
    return manifest


_READ = script("read")
_FOLD = script("fold")


# Blobs on the server: one key each, and 17 shelves per tenant that index them


_DIGITS = "0123456789abcdefx"
"""First characters of names: the digits of a hash, or the mark of a wrapper's names."""
_MAX_CALLS = 256
"""Calls in one write."""
_MAX_BYTES = 4 * 1024 * 1024
"""Bytes of blobs in one write, at most one blob more."""
_MOVED, _REMOVED = 1, 2


@final
class Blobs:
    """The blobs of all tenants."""

    def __init__(self, link: RedisLink, names: KeyNames) -> None:
        self._link = link
        self._names = names

    async def put(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        """Store blobs; an existing blob gets the age of a new one."""
        require_named(blobs)
        calls: list[RedisCall] = []
        size = 0
        for name, data in blobs.items():
            calls.append(self._call(_PUT, tenant, name, data))
            size += len(data)
            if size > _MAX_BYTES:
                await self._link.write(calls)
                calls, size = [], 0
        if blobs:
            await self._link.write([*calls, RedisCall(b"ZADD", self._names.tenants, 0, tenant)])

    async def get(self, tenant: str, name: str) -> bytes | None:
        (data,) = await self._link.send([RedisCall(b"GET", self._names.blob(tenant, name))])
        return None if data is None else verified(name, bytes(data))

    async def names(self, tenant: str) -> list[str]:
        """List a tenant's blobs."""
        away, current = await self._shelves(tenant)
        return sorted(away | current)

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        """Move unreachable blobs to quarantine, and remove those that are there long enough.

        The script checks each blob again, by the server's clock.
        """
        away, current = await self._shelves(tenant)
        if among is not None:
            away, current = away.intersection(among), current.intersection(among)
        reachable_names = frozenset(reachable)
        returning = [
            RedisCall(b"ZREM", self._names.shelf(tenant, name[:1])[1], name)
            for name in away & reachable_names
        ]
        for part in _parts(returning):
            await self._link.write(part)
        calls = [
            self._call(_SWEEP, tenant, name, b"%.6f" % older_than)
            for name in sorted((away | current) - reachable_names)
        ]
        quarantined = removed = freed = 0
        for part in _parts(calls):
            for what, size in await self._link.write(part):
                quarantined += what == _MOVED
                removed += what == _REMOVED
                freed += size
        return BlobSweep(quarantined, removed, freed)

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        """Make blobs young, also those in quarantine; return those that do not exist."""
        asked = list(dict.fromkeys(names))
        known: list[Any] = []
        for part in _parts([self._call(_RENEW, tenant, name) for name in asked]):
            known += await self._link.write(part)
        return {name for name, is_there in zip(asked, known, strict=True) if not is_there}

    async def remove(self, tenant: str, names: Collection[str]) -> int:
        """Remove blobs without quarantine, and return how many bytes were freed."""
        freed = 0
        for part in _parts([self._call(_REMOVE, tenant, name) for name in dict.fromkeys(names)]):
            freed += sum(await self._link.write(part))
        return freed

    async def any(self, tenants: Collection[str]) -> set[str]:
        """Return which of these tenants have blobs."""
        shelves = [(tenant, digit) for tenant in tenants for digit in _DIGITS]
        calls = [RedisCall(b"EXISTS", self._names.shelf(*shelf)[0]) for shelf in shelves]
        counts: list[int] = []
        for part in _parts(calls):
            counts += await self._link.send(part)
        return {tenant for (tenant, _), count in zip(shelves, counts, strict=True) if count}

    async def _shelves(self, tenant: str) -> tuple[set[str], set[str]]:
        calls = [_AGED(self._names.shelf(tenant, digit)) for digit in _DIGITS]
        away: set[str] = set()
        current: set[str] = set()
        for moved, others in await self._link.send(calls):
            away.update(map(bytes.decode, moved))
            current.update(map(bytes.decode, others))
        return away, current

    def _call(self, act: Script, tenant: str, name: str, *arguments: bytes) -> RedisCall:
        keys = (self._names.blob(tenant, name), *self._names.shelf(tenant, name[:1]))
        return act(keys, name, *arguments)


def _parts(calls: Sequence[T]) -> Iterable[Sequence[T]]:
    return (calls[at : at + _MAX_CALLS] for at in range(0, len(calls), _MAX_CALLS))


_AGED = script("aged")
_PUT = script("put")
_REMOVE = script("remove")
_RENEW = script("renew")
_SWEEP = script("sweep")


# Directory of the sessions: a sorted set per tenant, so that listings never scan all keys


_PAGE = 256
_FIELDS = (b"e", b"d", b"h", b"c", b"u", b"a", b"m", b"t")


@final
class Directory:
    """Listings of sessions and tenants, and deletion."""

    def __init__(self, link: RedisLink, names: KeyNames, blobs: Blobs, cold: ColdHistory) -> None:
        self._link = link
        self._names = names
        self._blobs = blobs
        self._cold = cold

    async def sessions(self, query: SessionQuery) -> list[SessionInfo]:
        if query.newest_first or query.owner is not None:
            await self._complete(query.tenant)
        if query.owner is not None:
            members = await self._owned(query.tenant, query.owner)
            keys = [key_of_member(member, query.tenant) for member in members]
            return query.page([info for part in _parts(keys) for info in await self._infos(part)])
        if query.newest_first:
            return await self._newest(query)
        sessions: list[SessionInfo] = []
        low, high = members_between(query.prefix, query.after)
        while len(sessions) < query.limit and (keys := await self._keys(query.tenant, low, high)):
            sessions += [info for info in await self._infos(keys) if query.matches(info)]
            low = b"(" + member_of(keys[-1])
        return sessions[: max(query.limit, 0)]

    async def _owned(self, tenant: str, owner: str) -> list[bytes]:
        """Return the members of an owner's sessions."""
        begin = owned_member(owner, b"")
        low, high = b"[" + begin, b"(" + begin[:-1] + b"\1"
        call = RedisCall(b"ZRANGEBYLEX", self._names.owned(tenant), low, high)
        (found,) = await self._link.send([call])
        return [member.removeprefix(begin) for member in found]

    async def _newest(self, query: SessionQuery) -> list[SessionInfo]:
        """Return a page by last activity: step by step, as the sessions' own times are finer.

        Each read begins with the step that the one before ended in, since sessions may come and go
        in between.
        """
        found: dict[SessionKey, SessionInfo] = {}
        last = b"+inf" if query.after is None else (query.after_at or 0.0) // STEP
        recent, offset = self._names.recent(query.tenant), 0
        while True:
            (part,) = await self._link.send(
                [
                    RedisCall(
                        b"ZREVRANGEBYSCORE", recent, last, 0, b"WITHSCORES", b"LIMIT", offset, _PAGE
                    )
                ]
            )
            keys = [key_of_member(member, query.tenant) for member, _ in part]
            infos = await self._infos(keys)
            found |= {
                info.key: info for info in infos if query.matches(info) and query.is_next(info)
            }
            if len(keys) < _PAGE:
                return query.page(found.values())
            last, newest = part[-1][1], part[0][1]
            offset = offset + _PAGE if newest == last else 0
            # Of this step there may be more; those of later ones are all known.
            known = [info for info in found.values() if (info.updated_at or 0.0) // STEP > last]
            if len(known) >= query.limit:
                return query.page(known)

    async def _complete(self, tenant: str) -> None:
        """Index sessions that a release without the indexes has saved last; once a tenant."""
        owned, recent = self._names.owned(tenant), self._names.recent(tenant)
        (is_complete,) = await self._link.send([RedisCall(b"ZSCORE", owned, COMPLETE)])
        if is_complete is not None:
            return
        low, high = members_between("", None)
        while keys := await self._keys(tenant, low, high):
            low = b"(" + member_of(keys[-1])
            calls: list[RedisCall] = []
            for info in await self._infos(keys):
                member, step = member_of(info.key), (info.updated_at or 0.0) // STEP
                calls.append(RedisCall(b"ZADD", recent, b"NX", step, member))
                if info.owner is not None:
                    calls.append(RedisCall(b"ZADD", owned, 0, owned_member(info.owner, member)))
            for part in _parts(calls):
                await self._link.write(part)
        await self._link.write([RedisCall(b"ZADD", owned, 0, COMPLETE)])

    async def _keys(self, tenant: str, low: bytes, high: bytes) -> list[SessionKey]:
        page = RedisCall(
            b"ZRANGEBYLEX", self._names.directory(tenant), low, high, b"LIMIT", 0, _PAGE
        )
        (members,) = await self._link.send([page])
        return [key_of_member(member, tenant) for member in members]

    async def _infos(self, keys: Sequence[SessionKey]) -> list[SessionInfo]:
        """Return those of some sessions that exist."""
        calls = [
            RedisCall(b"HMGET", self._names.session_keys(key).session, *_FIELDS) for key in keys
        ]
        replies = zip(keys, await self._link.send(calls) if calls else (), strict=True)
        infos = (_info(key, fields) for key, fields in replies)
        return [info for info in infos if info is not None]

    async def tenants(self) -> list[str]:
        """List the tenants that have a session or a blob."""
        known = RedisCall(b"ZRANGE", self._names.tenants, 0, -1)
        tenants = [name.decode() for name in (await self._link.send([known]))[0]]
        nonempty = await self._blobs.any(tenants)
        for tenant in tenants:
            if tenant not in nonempty and await self.sessions(SessionQuery(tenant=tenant, limit=1)):
                nonempty.add(tenant)
        return sorted(nonempty)

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool) -> None:
        session_keys = self._names.session_keys(key)
        keys = session_keys[:7]
        segments = await self._cold.names_of(key)
        shown = RedisCall(b"HGET", session_keys.session, b"a")
        listed, reply = await self._link.write([shown, _DELETE(keys, epoch, int(keep_posts))])
        if reply != 0:
            raise lease_lost(key, epoch, reply[1], deleted=bool(reply[2]))
        await self._cold.remove(key, segments)
        names, place = self._names.directory(key.tenant), session_keys.session
        recent = self._names.recent(key.tenant)
        calls = [
            *owner_moves(self._names, key, listed, None),
            RedisCall(b"ZREM", recent, member_of(key)),
            RedisCall(b"ZREM", names, member_of(key)),
            RedisCall(b"HMGET", place, b"d", b"u", b"a"),
        ]
        deleted, at, listed = (await self._link.write(calls))[-1]
        if deleted is None:  # another process has begun the session's next generation meanwhile
            step = (_float_or_none(at) or 0.0) // STEP
            again = [
                RedisCall(b"ZADD", names, 0, member_of(key)),
                RedisCall(b"ZADD", recent, step, member_of(key)),
                *owner_moves(self._names, key, None, listed_fields(listed).owner),
            ]
            await self._link.write(again)

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        """List a tenant's drafts by key."""
        drafts: list[DraftInfo] = []
        low, high = members_between("", None)
        while True:
            keys = await self._keys(tenant, low, high)
            calls = [
                RedisCall(b"HMGET", self._names.session_keys(key).session, b"d", b"e", b"o", b"p")
                for key in keys
            ]
            replies = await self._link.send(calls) if calls else []
            for key, (state, epoch, owner, copied) in zip(keys, replies, strict=True):
                if state == DRAFT:
                    draft = draft_of(copied)
                    if draft is None:
                        raise damage_error(key, "the hash", "what it is a copy of is not readable")
                    drafts.append(DraftInfo(key, int(epoch), draft, owner.decode()))
            if not keys:
                return drafts
            low = b"(" + member_of(keys[-1])

    async def rebuild(self) -> int:
        """Rebuild the directory from the sessions themselves, and return how many there are."""
        cursor: Any = b"0"
        count = 0
        while True:
            scan = RedisCall(b"SCAN", cursor, b"MATCH", self._names.every_session, b"COUNT", 1000)
            ((cursor, hashes),) = await self._link.send([scan])
            count += await self._add(hashes)
            if int(cursor) == 0:
                return count

    async def _add(self, hashes: Sequence[bytes]) -> int:
        calls = [RedisCall(b"HMGET", name, b"e", b"d") for name in hashes]
        replies = await self._link.send(calls) if calls else []
        keys = {
            key_of_name(name)
            for name, (epoch, deleted) in zip(hashes, replies, strict=True)
            if epoch is not None and deleted in (None, DRAFT)
        }
        entries = [
            RedisCall(b"ZADD", self._names.directory(key.tenant), 0, member_of(key)) for key in keys
        ]
        # What the other indexes lack is added before they are used next.
        entries += [
            RedisCall(b"ZREM", self._names.owned(tenant), COMPLETE)
            for tenant in {key.tenant for key in keys}
        ]
        tenants = [RedisCall(b"ZADD", self._names.tenants, 0, key.tenant) for key in keys]
        if keys:
            await self._link.write([*entries, *tenants])
        return len(keys)


def _info(key: SessionKey, fields: Sequence[Any]) -> SessionInfo | None:
    epoch, deleted, head, created, updated, shown, manifest, turns = fields
    if epoch is None or deleted is not None:
        return None
    listed = listed_fields(shown)
    return SessionInfo(
        key=key,
        epoch=_int_or_zero(epoch),
        head=_int_or_zero(head),
        created_at=_float_or_none(created),
        updated_at=_float_or_none(updated),
        owner=listed.owner,
        title=listed.title,
        tags=listed.tags,
        turns=listed.turns if turns is None else _int_or_zero(turns),
        damaged=manifest is not None and open_sealed(manifest) is None,
    )


def _int_or_zero(text: bytes | None) -> int:
    """Return a number; 0 for a damaged one, which is reported when the session is opened."""
    return int(text) if text is not None and text.isdigit() else 0


def _float_or_none(text: bytes | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


_DELETE = script("delete")
