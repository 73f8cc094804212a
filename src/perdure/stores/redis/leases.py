"""Leases: epochs assigned by script, a heartbeat per owner, and requests to owners.

A session's hash names its holder's epoch and owner. The owner's own hash has its heartbeat and its
process id, so a process of this host that has ended is known to be dead at once. A request to an
owner is deleted only after the owner has acknowledged it with its next heartbeat: if the reply of
a heartbeat is lost, the next one returns the same requests.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Collection, Sequence
from typing import Any, final

import anyio
import msgspec
from msgspec.structs import replace

from perdure._lib.backoff import backoff
from perdure._lib.ids import first_beat
from perdure._lib.locks import has_ended, this_process
from perdure._lib.logs import log_facts
from perdure._lib.platform import host_name
from perdure._lib.tasks import HostClosedError
from perdure.errors import PerdureError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.manifest import epoch_payload
from perdure.store import HeartbeatRequests, Held, LeaseState, RestoreData, Taken, Terms
from perdure.stores.redis.connection import RedisCall, RedisLink, script
from perdure.stores.redis.layout import (
    STEP,
    KeyNames,
    damage_error,
    documents_of,
    draft_of,
    encode_key,
    listed_fields,
    member_of,
    owned_member,
    records_after,
    require_held,
    shown_of,
)
from perdure.stores.redis.log import owner_moves

_OWNER_TTL = 7 * 24 * 3600
"""Seconds that an owner is remembered after its last heartbeat."""
_TAIL_BYTES = 1024 * 1024
"""Bytes of the log that an open reads; a longer one is read in parts."""
HANDOVER, MAIL = b"h", b"m"
_MIN_PAUSE, _MAX_PAUSE = 0.25, 15.0
"""Shortest and longest back-off between two attempts to subscribe, in seconds."""

log: logging.Logger = logging.getLogger("perdure")

_keys: msgspec.json.Decoder[SessionKey] = msgspec.json.Decoder(SessionKey)


@final
class Leases:
    """The leases of all sessions, and this store's registration as an owner."""

    def __init__(self, link: RedisLink, names: KeyNames, owner: str) -> None:
        self._link = link
        self._names = names
        self._owner = owner
        self._me = owner.encode()
        self._acknowledged: list[bytes] = []
        self._listening = False
        self._notified = anyio.Event()

    async def register(self) -> None:
        """Register this store as an owner."""
        self._acknowledged, self._listening, self._notified = [], False, anyio.Event()
        name = self._names.owner(self._owner)[0]
        fields = ("host", host_name(), "pid", os.getpid(), "process", this_process())
        calls = [RedisCall(b"HSET", name, *fields), RedisCall(b"HDEL", name, b"closed")]
        counter = RedisCall(b"HINCRBY", self._names.beats, self._owner, first_beat())
        *_, known = await self._link.send(
            [
                *calls,
                RedisCall(b"EXPIRE", name, _OWNER_TTL),
                counter,
                RedisCall(b"HKEYS", self._names.beats),
            ]
        )
        # The heartbeat counters of owners whose hash has expired are no one's.
        names = [self._names.owner(owner.decode())[0] for owner in known]
        exists = await self._link.send([RedisCall(b"EXISTS", name) for name in names])
        forgotten = [owner for owner, is_known in zip(known, exists, strict=True) if not is_known]
        if forgotten:
            await self._link.send([RedisCall(b"HDEL", self._names.beats, *forgotten)])

    async def unregister(self) -> None:
        """Mark this owner as closed."""
        name = self._names.owner(self._owner)[0]
        drop_counter = RedisCall(b"HDEL", self._names.beats, self._owner)
        await self._link.send([RedisCall(b"HSET", name, b"closed", 1), drop_counter])

    async def holder(self, key: SessionKey) -> LeaseState | None:
        session = self._names.session_keys(key).session
        (fields,) = await self._link.send(
            [RedisCall(b"HMGET", session, b"e", b"o", b"r", b"d", b"p")]
        )
        return await self._state(key, fields)

    async def _state(self, key: SessionKey, fields: Sequence[Any]) -> LeaseState | None:
        """Return the state of a lease, with what its owner's hash says."""
        epoch, owner, released, deleted, draft = fields
        if epoch is None:
            return None
        if not epoch.isdigit() or owner is None:
            raise damage_error(
                key, "the hash", "its epoch is not a number, or its owner is missing"
            )
        name = owner.decode()
        (old, host, pid, process, closed), beat = await self._link.send(
            [
                RedisCall(b"HMGET", self._names.owner(name)[0], *_OWNER_FIELDS),
                RedisCall(b"HGET", self._names.beats, name),
            ]
        )
        alive: bool | None = None
        if name == self._owner:
            alive = True
        elif closed is not None or has_ended((process or b"").decode()):
            alive = False
        return LeaseState(
            epoch=int(epoch),
            owner=name,
            released=released is not None,
            alive=alive,
            beat=int(beat or old or 0),
            deleted=deleted is not None,
            host=(host or b"").decode(),
            pid=int(pid or 0),
            draft=draft_of(draft),
        )

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        """Take a session in one call, or after a look at its holder, which is in another slot."""
        word, *details = await self._take(key, terms)
        if word != b"ok":
            holder = await self._state(key, details)
            if not terms.allows(holder) or holder is None:
                return Held(holder)
            # It is dead, or silent.
            word, *details = await self._take(key, replace(terms, after=holder.epoch))
            if word != b"ok":
                return Held(await self._state(key, details))
        epoch, head, created, *read = details
        payload = epoch_payload(self._owner, terms.beginning.base if created else None)
        found = self._found(key, terms.names, head, read)
        return Taken(key, epoch, head, bool(created), payload, found)

    async def _take(self, key: SessionKey, terms: Terms) -> list[Any]:
        """Return the answer of ``acquire.lua``.

        Raises:
            CorruptRecordError: The session's hash and its log contradict each other.

        """
        keys, new, now = self._names.session_keys(key), terms.beginning, time.time()
        names = terms.names
        take = _ACQUIRE(
            (keys.session, keys.log, keys.documents, keys.dead, keys.order),
            self._owner,
            encode_key(key),
            b"%.6f" % now,
            epoch_payload(self._owner, None),
            keys.seed,
            new.first,
            epoch_payload(self._owner, new.base),
            b"" if new.draft is None else msgspec.json.encode(new.draft),
            int(terms.create),
            int(terms.new),
            terms.given,
            b"" if terms.after is None else terms.after,
            _TAIL_BYTES,
            b"" if new.about is None else shown_of(new.about),
            b"*" if names is None else b"",
            *(names or ()),
        )
        calls, owner = [take], None if new.about is None else new.about.owner
        if terms.create or terms.after is not None:
            # Add it to the directory before and after: another process that deletes the session's
            # previous generation may remove it in between; if it does so later, it finds the new
            # one. What is in it already is no write, so who waits for a holder awaits no sync.
            index = RedisCall(b"ZADD", self._names.directory(key.tenant), 0, member_of(key))
            tenant = RedisCall(b"ZADD", self._names.tenants, 0, key.tenant)
            place = RedisCall(
                b"ZADD", self._names.recent(key.tenant), b"NX", now // STEP, member_of(key)
            )
            owned = owner_moves(self._names, key, None, owner)
            calls = [tenant, index, place, take, index, *owned]
        answer: list[Any] = (await self._link.write(calls))[calls.index(take)]
        if answer[0] in (b"ok", b"held"):
            *answer, shown = answer
            if owner is not None and listed_fields(shown).owner != owner:  # it is another's
                member = owned_member(owner, member_of(key))
                await self._link.write([RedisCall(b"ZREM", self._names.owned(key.tenant), member)])
        if answer[0] == b"damaged":
            reason = f"entry {answer[2].decode()} is not the last of {answer[1]} records"
            raise damage_error(key, "the log", reason)
        return answer

    def _found(
        self, key: SessionKey, names: Collection[str] | None, head: int, read: Sequence[Any]
    ) -> RestoreData | None:
        """Return what a restore needs; None if reading it by itself will say why it cannot."""
        waiting, manifest, parts, base, entries = read
        try:
            documents = documents_of(key, names, manifest, parts)
        except PerdureError:
            return None
        after, records = documents.log_after, None
        if after is not None and entries is not None:
            seed = self._names.session_keys(key).seed
            records = records_after(key, seed, max(after, base), head, entries)
        return RestoreData(documents, after or 0, records, waiting > 0)

    async def publish(self, key: SessionKey, epoch: int) -> None:
        """Make a draft a session, as its holder."""
        # Into the directory again: a process that was killed while deleting the id's session
        # before, or a rebuild that was under way, may have left it out.
        index = RedisCall(b"ZADD", self._names.directory(key.tenant), 0, member_of(key))
        call = _PUBLISH((self._names.session_keys(key).session,), epoch)
        reply, _ = await self._link.write([call, index])
        require_held(key, epoch, reply)

    async def release(self, key: SessionKey, epoch: int) -> None:
        await self._link.write([_RELEASE((self._names.session_keys(key).session,), epoch)])

    # heartbeat and news

    async def heartbeat(self) -> HeartbeatRequests:
        names = self._names.owner(self._owner)
        asks, _, beats = await self._link.send(
            [
                _BEAT(names[:2], _OWNER_TTL, *self._acknowledged),
                RedisCall(b"HINCRBY", self._names.beats, self._owner, 1),
                RedisCall(b"HGETALL", self._names.beats),
            ]
        )
        self._acknowledged = asks
        requests: dict[bytes, list[SessionKey]] = {HANDOVER: [], MAIL: []}
        for ask in asks[::2]:
            try:
                requests[ask[:1]].append(_keys.decode(ask[1:]))
            except (KeyError, msgspec.DecodeError, PerdureError):
                log_facts(
                    log, logging.WARNING, "a request to this owner cannot be read", size=len(ask)
                )
        others = {owner.decode(): int(n) for owner, n in beats.items() if owner != self._me}
        return HeartbeatRequests(tuple(requests[HANDOVER]), tuple(requests[MAIL]), others)

    async def ask(self, owner: str, what: bytes, key: SessionKey) -> None:
        """Ask an owner for something about a session, and wake it if it listens."""
        _, asks, channel = self._names.owner(owner)
        await self._link.write([_ASK((asks,), _OWNER_TTL, channel, what + encode_key(key))])

    async def wait_for_notification(self, timeout: float) -> None:
        if not self._listening:
            self._listening = True
            try:
                self._link.require_open().spawn(self._listen)
            except HostClosedError:  # the loop is ending, so the wait ends at its timeout
                self._listening = False
        with anyio.move_on_after(timeout):
            await self._notified.wait()
        self._notified = anyio.Event()

    async def _listen(self) -> None:
        """Set the event at each request. While there is no connection, heartbeats find requests."""
        channel = self._names.owner(self._owner)[2]
        failures = 0
        while True:
            try:
                async for _ in self._link.notifications(channel):
                    failures = 0
                    self._notified.set()
            except StoreUnavailableError:
                failures += 1
            pause = backoff(failures, base=_MIN_PAUSE, cap=_MAX_PAUSE, chance=random.random())
            await anyio.sleep(pause)


_OWNER_FIELDS = (b"beat", b"host", b"pid", b"process", b"closed")
_ACQUIRE = script("acquire")
_PUBLISH = script("publish")
_RELEASE = script("release")
_BEAT = script("beat")
_ASK = script("ask")
