"""Redis store: the port of `perdure.store` on a Redis or Valkey server.

Use it from the event loop that opened it. Each call is one write to the server and one reply
(a few take two). Each change is one script: atomic, fenced by the epoch, and one entry in the
server's append-only file. A cancelled call may have its whole effect or none, never a part.

What an acknowledged write survives depends on the server's settings: see
``capabilities.durability``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import final

import anyio
import msgspec

from perdure._lib.ids import random_id
from perdure.errors import ConfigError, StoreError
from perdure.records.chunks import require_named, verified
from perdure.records.json import decoder_of
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, SessionQuery, require_logged
from perdure.records.posts import decode_dead_letter, encode_dead_letter, oldest_first
from perdure.records.records import seal
from perdure.store import (
    ALL,
    Batch,
    BlobSweep,
    Capabilities,
    ConnectionHook,
    ConnectionPool,
    DeadLetter,
    Documents,
    DraftInfo,
    HeartbeatRequests,
    Held,
    InboxLimit,
    LeaseState,
    LogChunk,
    Outcome,
    PendingItem,
    SessionInfo,
    Store,
    Taken,
    Terms,
)
from perdure.stores.redis import connection
from perdure.stores.redis.connection import RedisCall, RedisLink, Script, script, settings_from
from perdure.stores.redis.layout import (
    DRAFT,
    LISTED,
    STEP,
    KeyNames,
    damage_error,
    decode_item,
    documents_of,
    draft_of,
    encode_item,
    encode_key,
    field_of,
    float_or_none,
    key_of_member,
    key_of_name,
    listed_fields,
    listed_session,
    member_of,
    members_between,
    op_id_of,
    owned_member,
    require_held,
    shown_of,
)
from perdure.stores.redis.leases import HANDOVER, MAIL, Leases
from perdure.stores.redis.log import ColdHistory, RedisLog, owner_moves

_DIGITS = "0123456789abcdefx"
"""First characters of blobs' names: the digits of a hash, or the mark of a wrapper's names."""
_MAX_BYTES = 4 * 1024 * 1024
"""Bytes of blobs in one write, at most one blob more."""
_MOVED, _REMOVED = 1, 2
_PAGE = 256
"""Sessions that a listing reads at a time."""
_INSPECT_EVERY = 5
"""Heartbeats between two checks of the server's settings."""
_SLOW_SYNC = {"batch_max": 1024, "parallelism": 8}
"""For servers where a save waits up to a second for a sync, so that more saves share it."""
_CAPABILITIES = Capabilities(
    durability=connection.UNKNOWN,
    batch_max=64,
    parallelism=4,
    shared=True,
    memory_bound=True,
)


@final
class RedisStore:
    """Store on a Redis or Valkey server.

    Args:
        url: ``redis://``, ``rediss://`` or ``valkey://`` with host, port and database, or
            ``unix://`` with a socket's path. Options: ``prefix`` of all keys, ``timeout`` and
            ``connect_timeout`` in seconds, ``wait=no`` to let a save return before a server
            that syncs once a second has done so, ``ssl_ca_certs``, ``ssl_certfile`` and
            ``ssl_keyfile``.
        owner: This store's id as a lease holder; by default a random one.
        history: Another store for cold history: a fold moves records there that every document
                includes, a megabyte at a time. It is opened and closed together with this one.

    Raises:
        ConfigError: The URL is invalid.

    """

    def __init__(self, url: str, *, owner: str | None = None, history: Store | None = None) -> None:
        settings = settings_from(url)
        if settings.history and history is None:
            raise ConfigError(
                "history=… in a URL is for connect() and store_for(): pass a RedisStore the store "
                "itself, RedisStore(url, history=store)",
                option="history",
            )
        self._owner = owner or random_id()
        self._heartbeats = 0
        """Heartbeats since the settings were checked; a failed one resets it."""
        self._warnings: tuple[str, ...] = ()
        self._capabilities = _CAPABILITIES
        self._opened = False
        self._link = link = RedisLink(settings)
        self._names = names = KeyNames(settings.prefix)
        self._history = history
        self._cold = ColdHistory(link, names, history)
        self._log = RedisLog(link, names, self._cold, self._owner)
        self._leases = Leases(link, names, self._owner)

    def __repr__(self) -> str:
        return f"RedisStore({self.location!r})"

    def connection_pool(self) -> ConnectionPool:
        return self._link.pool()

    def watch_connections(self, hook: ConnectionHook) -> None:
        self._link.hook = hook

    @property
    def capabilities(self) -> Capabilities:
        """The store's capabilities; durability is known once it is open."""
        return self._capabilities

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def location(self) -> str:
        """The server's address, without user and password."""
        return self._link.location

    async def open(self) -> None:
        """Connect to the server, check its settings, and register as an owner.

        Raises:
            ConfigError: The server may evict data when its memory is full, is a Sentinel, or one of
                several primaries of a cluster.
            MissingExtraError: The driver is not installed.
            StoreUnavailableError: The server does not answer, or refuses us.

        """
        if self._opened:
            return
        await self._link.open()
        try:
            durability = await connection.inspect_durability(self._link)
            await self._leases.register()
            if self._history is not None:
                await self._history.open()
        except BaseException:
            await self._link.aclose()
            raise
        batching = _SLOW_SYNC if self._link.waits else {}
        self._capabilities = msgspec.structs.replace(
            _CAPABILITIES,
            durability=durability,
            memory_bound=self._history is None,
            **batching,
        )
        self._opened = True

    async def aclose(self) -> None:
        """Close all connections; leases that were not released look like those of a dead owner."""
        if not self._opened:
            return
        self._opened = False
        try:
            # If this fails, other owners see that the heartbeat has stopped.
            with contextlib.suppress(StoreError):
                await self._leases.unregister()
        finally:
            with anyio.CancelScope(shield=True):
                await self._link.aclose()
            if self._history is not None:
                await self._history.aclose()

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append all batches in one write."""
        return await self._log.append_many(batches)

    def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records, some hundred kilobytes at a time."""
        return self._log.read(key, after=after, before=before, limit=limit, reverse=reverse)

    async def head(self, key: SessionKey) -> int:
        state = await self._log.state(key)
        return 0 if state.is_hidden else state.head

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove whole batches before a record."""
        return await self._log.trim(key, epoch, below)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        keys = self._names.session_keys(key)
        selected = () if names is None else tuple(names) or ("",)
        call = _READ((keys.session, keys.documents), *selected)
        ((manifest, *parts),) = await self._link.send([call])
        return documents_of(key, names, manifest, parts)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Replace documents and manifest in one step; then move old records to cold history."""
        keys = self._names.session_keys(key)
        about, turns = manifest.about, manifest.counters.get("turns", 0)
        call = _FOLD(
            (keys.session, keys.documents),
            manifest.epoch,
            manifest.as_of_seq,
            seal(msgspec.json.encode(manifest)),
            shown_of(about, turns),
            len(documents),
            *[part for pair in documents.items() for part in pair],
            *manifest.documents,
        )
        (reply,) = await self._link.write([call])
        require_held(key, manifest.epoch, reply)
        if reply[0] == b"gone":
            require_logged(manifest, reply[1])
        elif reply[1] and (moves := owner_moves(self._names, key, reply[2], about.owner)):
            await self._link.write(moves)
        await self._cold.move(key, manifest)

    # blobs: one key each, and 17 shelves per tenant that index them

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        """Store blobs; an existing blob gets the age of a new one."""
        require_named(blobs)
        calls: list[RedisCall] = []
        size = 0
        for name, data in blobs.items():
            calls.append(self._blob_call(_PUT, tenant, name, data))
            size += len(data)
            if size > _MAX_BYTES:
                await self._link.write(calls)
                calls = []
                size = 0
        if blobs:
            await self._link.write([*calls, RedisCall(b"ZADD", self._names.tenants, 0, tenant)])

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        (data,) = await self._link.send([RedisCall(b"GET", self._names.blob(tenant, name))])
        return None if data is None else verified(name, bytes(data))

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        """Move unreachable blobs to quarantine, and remove those that are there long enough.

        The script checks each blob again, by the server's clock. Segments of cold history that no
        session lists are removed from their store, too.
        """
        away, current = await self._shelves(tenant)
        if among is not None:
            away, current = away.intersection(among), current.intersection(among)
        reachable_names = frozenset(reachable)
        # First: what is reachable again leaves quarantine before the script looks at the others.
        returning = [
            RedisCall(b"ZREM", self._names.shelf(tenant, name[:1])[1], name)
            for name in away & reachable_names
        ]
        await self._link.send_all(returning, write=True)
        calls = [
            self._blob_call(_SWEEP, tenant, name, b"%.6f" % older_than)
            for name in sorted((away | current) - reachable_names)
        ]
        history = BlobSweep() if among is not None else await self._cold.sweep(tenant, older_than)
        quarantined, removed, freed = history.quarantined, history.removed, history.bytes
        for what, size in await self._link.send_all(calls, write=True):
            quarantined += what == _MOVED
            removed += what == _REMOVED
            freed += size
        return BlobSweep(quarantined, removed, freed)

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        """Make blobs young, also those in quarantine; return those that do not exist."""
        asked = list(dict.fromkeys(names))
        calls = [self._blob_call(_RENEW, tenant, name) for name in asked]
        known = await self._link.send_all(calls, write=True)
        return {name for name, is_there in zip(asked, known, strict=True) if not is_there}

    async def blob_names(self, tenant: str) -> list[str]:
        away, current = await self._shelves(tenant)
        return sorted(away | current)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        """Remove blobs without quarantine, and return how many bytes were freed."""
        calls = [self._blob_call(_REMOVE, tenant, name) for name in dict.fromkeys(names)]
        return sum(await self._link.send_all(calls, write=True))

    async def _shelves(self, tenant: str) -> tuple[set[str], set[str]]:
        """Return the names of the blobs in quarantine, and of the others."""
        calls = [_AGED(self._names.shelf(tenant, digit)) for digit in _DIGITS]
        away: set[str] = set()
        current: set[str] = set()
        for moved, others in await self._link.send(calls):
            away.update(map(bytes.decode, moved))
            current.update(map(bytes.decode, others))
        return away, current

    def _blob_call(self, act: Script, tenant: str, name: str, *arguments: bytes) -> RedisCall:
        keys = (self._names.blob(tenant, name), *self._names.shelf(tenant, name[:1]))
        return act(keys, name, *arguments)

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        return await self._leases.holder(key)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        return await self._leases.acquire(key, terms)

    async def publish(self, key: SessionKey, epoch: int) -> None:
        await self._leases.publish(key, epoch)

    async def release(self, key: SessionKey, epoch: int) -> None:
        await self._leases.release(key, epoch)

    async def heartbeat(self) -> HeartbeatRequests:
        """Renew the heartbeat; return requests received since the previous call.

        The server's settings may change, so they are checked now and then, and after each failed
        heartbeat.
        """
        heartbeats, self._heartbeats = self._heartbeats, 0
        if heartbeats % _INSPECT_EVERY == 0:
            self._warnings = await connection.warnings(self._link)
        requests = await self._leases.heartbeat()
        self._heartbeats = heartbeats + 1
        return msgspec.structs.replace(requests, warnings=self._warnings)

    async def wait_for_notification(self, timeout: float) -> None:
        await self._leases.wait_for_notification(timeout)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        await self._leases.ask(holder.owner, HANDOVER, key)

    # inbox: items that any process posts to a session, in posting order

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        """Add items to a session's inbox, and notify its holder."""
        keys = self._names.session_keys(key)
        parts = [part for item in items for part in (item.op_id, encode_item(item, keys.seed))]
        bounds = (-1, -1) if limit is None else (limit.items, limit.bytes)
        post = _POST((keys.session, keys.items, keys.order), *bounds, *parts)
        tenant = RedisCall(b"ZADD", self._names.tenants, 0, key.tenant)
        before, after = self._inbox_entries(key)
        replies = await self._link.write([tenant, before, post, after])
        new, holder, waiting, size, added = replies[2]
        if limit is not None and waiting >= 0:
            await self._forget_inbox(key)  # otherwise a session without room stays listed
            limit.require_room(
                key, waiting=int(waiting), size=int(size), new=int(new), added=int(added)
            )
        if holder and items:
            # Also for items that were already there: the first post may have been cut off here.
            await self._leases.ask(holder.decode(), MAIL, key)
        return int(new)

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        if limit <= 0:
            return []
        keys = self._names.session_keys(key)
        call = _TAKE((keys.session, keys.items, keys.order), epoch, limit)
        (reply,) = await self._link.send([call])
        require_held(key, epoch, reply)
        pairs = zip(reply[1::2], reply[2::2], strict=True)
        return [decode_item(keys.seed, name, data) for name, data in pairs]

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[DeadLetter] = (),
    ) -> None:
        keys = self._names.session_keys(key)
        if epoch is None:
            if op_ids:
                await self._link.write([RedisCall(b"HDEL", keys.dead, *map(field_of, op_ids))])
                await self._forget_inbox(key)
            return
        parts = [part for op_id in op_ids for part in (field_of(op_id), b"")]
        for letter in dead:
            parts += field_of(letter.item.op_id), encode_dead_letter(key, letter)
        calls = [_SETTLE((keys.session, keys.items, keys.order, keys.dead), epoch, *parts)]
        if dead:  # the target of a migration may never have had a post
            before, after = self._inbox_entries(key)
            calls = [before, *calls, after]
        reply = (await self._link.write(calls))[1 if dead else 0]
        if reply == 0 or isinstance(reply, list):
            await self._forget_inbox(key)
        require_held(key, epoch, reply)

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        (known,) = await self._link.send([RedisCall(b"ZRANGE", self._names.posted, 0, -1)])
        keys = [decoder_of(SessionKey).decode(written) for written in known]
        calls = [
            RedisCall(b"HLEN", names.dead) if dead_letters else RedisCall(b"ZCARD", names.order)
            for names in map(self._names.session_keys, keys)
        ]
        counts = await self._link.send_all(calls)
        return sorted(key for key, count in zip(keys, counts, strict=True) if count)

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        call = RedisCall(b"HGETALL", self._names.session_keys(key).dead)
        (letters,) = await self._link.send([call])
        return oldest_first(
            [decode_dead_letter(key, op_id_of(name), data) for name, data in letters.items()]
        )

    def _inbox_entries(self, key: SessionKey) -> list[RedisCall]:
        """Return what goes before and after items, each with its own score: see `_forget_inbox`."""
        now = time.time_ns() // 1000
        known, member = self._names.posted, encode_key(key)
        return [RedisCall(b"ZADD", known, score, member) for score in (now, now + 1)]

    async def _forget_inbox(self, key: SessionKey) -> None:
        """Remove a session from the set of inboxes, unless it has pending items or dead letters.

        A post gives the member a new score after adding its item. So either the item is counted
        here, or the score has changed since it was read, or the post adds the member again.
        """
        known, keys = self._names.posted, self._names.session_keys(key)
        score, count, dead = await self._link.send(
            [
                RedisCall(b"ZSCORE", known, encode_key(key)),
                RedisCall(b"ZCARD", keys.order),
                RedisCall(b"HLEN", keys.dead),
            ]
        )
        if score is not None and not count and not dead:
            await self._link.send([_UNLIST((known,), encode_key(key), b"%.0f" % score)])

    # directory: sorted sets per tenant, so that listings never scan all keys

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        if query.owner is not None:
            return query.page(await self._infos(await self._owned(query.tenant, query.owner)))
        if query.newest_first:
            return await self._newest(query)
        sessions: list[SessionInfo] = []
        low, high = members_between(query.prefix, query.after)
        while len(sessions) < query.limit and (keys := await self._keys(query.tenant, low, high)):
            sessions += [info for info in await self._infos(keys) if query.matches(info)]
            low = b"(" + member_of(keys[-1])
        return sessions[: max(query.limit, 0)]

    async def _owned(self, tenant: str, owner: str) -> list[SessionKey]:
        """Return an owner's sessions."""
        begin = owned_member(owner, b"")
        low, high = b"[" + begin, b"(" + begin[:-1] + b"\1"
        call = RedisCall(b"ZRANGEBYLEX", self._names.owned(tenant), low, high)
        (members,) = await self._link.send([call])
        return [key_of_member(member.removeprefix(begin), tenant) for member in members]

    async def _newest(self, query: SessionQuery) -> list[SessionInfo]:
        """Return a page by last activity: step by step, as the sessions' own times are finer.

        Each read begins with the step that the one before ended in, since sessions may come and go
        in between.
        """
        found: dict[SessionKey, SessionInfo] = {}
        last = b"+inf" if query.after is None else (query.after_at or 0.0) // STEP
        recent, offset = self._names.recent(query.tenant), 0
        while True:
            limits = (b"WITHSCORES", b"LIMIT", offset, _PAGE)
            call = RedisCall(b"ZREVRANGEBYSCORE", recent, last, 0, *limits)
            (part,) = await self._link.send([call])
            infos = await self._infos([key_of_member(member, query.tenant) for member, _ in part])
            found |= {
                info.key: info for info in infos if query.matches(info) and query.is_next(info)
            }
            if len(part) < _PAGE:
                return query.page(found.values())
            last, newest = part[-1][1], part[0][1]
            offset = offset + _PAGE if newest == last else 0
            # Of this step there may be more; those of later ones are all known.
            known = [info for info in found.values() if (info.updated_at or 0.0) // STEP > last]
            if len(known) >= query.limit:
                return query.page(known)

    async def _keys(self, tenant: str, low: bytes, high: bytes) -> list[SessionKey]:
        """Return the next page of a tenant's directory."""
        place = self._names.directory(tenant)
        page = RedisCall(b"ZRANGEBYLEX", place, low, high, b"LIMIT", 0, _PAGE)
        (members,) = await self._link.send([page])
        return [key_of_member(member, tenant) for member in members]

    async def _infos(self, keys: Sequence[SessionKey]) -> list[SessionInfo]:
        """Return those of some sessions that exist."""
        calls = [
            RedisCall(b"HMGET", self._names.session_keys(key).session, *LISTED) for key in keys
        ]
        replies = await self._link.send_all(calls)
        infos = (listed_session(key, fields) for key, fields in zip(keys, replies, strict=True))
        return [info for info in infos if info is not None]

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        """List a tenant's drafts by key."""
        drafts: list[DraftInfo] = []
        low, high = members_between("", None)
        while keys := await self._keys(tenant, low, high):
            low = b"(" + member_of(keys[-1])
            places = [self._names.session_keys(key).session for key in keys]
            calls = [RedisCall(b"HMGET", place, b"d", b"e", b"o", b"p") for place in places]
            replies = zip(keys, await self._link.send(calls), strict=True)
            for key, (state, epoch, owner, copied) in replies:
                if state == DRAFT:
                    draft = draft_of(copied)
                    if draft is None:
                        raise damage_error(key, "the hash", "what it is a copy of is not readable")
                    drafts.append(DraftInfo(key, int(epoch), draft, owner.decode()))
        return drafts

    async def tenants(self) -> list[str]:
        """List the tenants that have a session, a blob or cold history, by name."""
        nonempty = set(await self._cold.tenants())
        (known,) = await self._link.send([RedisCall(b"ZRANGE", self._names.tenants, 0, -1)])
        tenants = [name.decode() for name in known]
        shelves = [(tenant, digit) for tenant in tenants for digit in _DIGITS]
        calls = [RedisCall(b"EXISTS", self._names.shelf(*shelf)[0]) for shelf in shelves]
        counts = await self._link.send_all(calls)
        nonempty.update(tenant for (tenant, _), n in zip(shelves, counts, strict=True) if n)
        for tenant in tenants:
            if tenant not in nonempty and await self.sessions(SessionQuery(tenant=tenant, limit=1)):
                nonempty.add(tenant)
        return sorted(nonempty)

    async def rebuild_directory(self) -> int:
        """Rebuild the listing from the sessions themselves, and return how many there are.

        Scans all keys of the database: only for a listing that lacks sessions.
        """
        inboxes = await self._link.scan(self._names.every_inbox)
        inboxes += await self._link.scan(self._names.every_dead)
        posted = [encode_key(key_of_name(name)) for name in inboxes]
        calls = [RedisCall(b"ZADD", self._names.posted, b"NX", 0, member) for member in posted]
        hashes = await self._link.scan(self._names.every_session)
        reads = [RedisCall(b"HMGET", name, b"e", b"d", b"u", b"a") for name in hashes]
        count = 0
        replies = zip(hashes, await self._link.send_all(reads), strict=True)
        for name, (epoch, deleted, at, shown) in replies:
            if epoch is not None and deleted in (None, DRAFT):
                calls += self._entries(key_of_name(name), at, shown)
                count += 1
        await self._link.send_all(calls, write=True)
        return count

    def _entries(self, key: SessionKey, at: bytes | None, shown: object) -> list[RedisCall]:
        """Return the calls that enter a session into all sets that list it."""
        member, step = member_of(key), (float_or_none(at) or 0.0) // STEP
        return [
            RedisCall(b"ZADD", self._names.tenants, 0, key.tenant),
            RedisCall(b"ZADD", self._names.directory(key.tenant), 0, member),
            RedisCall(b"ZADD", self._names.recent(key.tenant), b"NX", step, member),
            *owner_moves(self._names, key, None, listed_fields(shown).owner),
        ]

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        keys = self._names.session_keys(key)
        # Before the deletion: after it nothing lists them.
        segments = await self._cold.names_of(key)
        shown = RedisCall(b"HGET", keys.session, b"a")
        remove = _DELETE(keys[:7], epoch, int(keep_posts))
        listed, reply = await self._link.write([shown, remove])
        require_held(key, epoch, reply)
        await self._cold.remove(key, segments)
        calls = [
            *owner_moves(self._names, key, listed, None),
            RedisCall(b"ZREM", self._names.recent(key.tenant), member_of(key)),
            RedisCall(b"ZREM", self._names.directory(key.tenant), member_of(key)),
            RedisCall(b"HMGET", keys.session, b"d", b"u", b"a"),
        ]
        deleted, at, listed = (await self._link.write(calls))[-1]
        if deleted in (None, DRAFT):  # another process has begun its next generation meanwhile
            await self._link.write(self._entries(key, at, listed))
        await self._forget_inbox(key)

    async def scrub(self) -> None:
        """Have the server rewrite its files without the removed data."""
        await connection.scrub(self._link)


_READ = script("read")
_FOLD = script("fold")
_AGED = script("aged")
_PUT = script("put")
_REMOVE = script("remove")
_RENEW = script("renew")
_SWEEP = script("sweep")
_POST = script("post")
_TAKE = script("take")
_SETTLE = script("settle")
_UNLIST = script("unlist")
_DELETE = script("delete")
