"""Who may write: epochs given by script, one heartbeat for each owner, and asks that arrive.

A session's hash names its holder's epoch and owner; the owner's own hash has its heartbeat,
and says which process it is, so that a process of this machine that has ended is known to be
dead at once. What is asked of an owner stays until it was heard: an answer to a heartbeat that
gets lost is given again with the next.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Sequence
from typing import final

import anyio
import msgspec

from perdure._lib.backoff import backoff
from perdure._lib.host import HostClosedError
from perdure._lib.ids import first_beat
from perdure._lib.locks import has_ended, this_process
from perdure._lib.platform import host_name
from perdure.errors import LeaseHeldError, PerdureError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.store import HeartbeatRequests, HeldLease, LeaseState
from perdure.stores.redis.connection import RedisCall, RedisLink, script
from perdure.stores.redis.entries import damaged
from perdure.stores.redis.layout import KeyNames, member_of, written_key

_KEPT = 7 * 24 * 3600
"""Seconds after its last heartbeat for which an owner is remembered."""
_HANDOVER, _MAIL = b"h", b"m"
_PAUSE, _LONGEST = 0.25, 15.0
"""Seconds between two attempts to listen."""

log: logging.Logger = logging.getLogger("perdure")

_keys: msgspec.json.Decoder[SessionKey] = msgspec.json.Decoder(SessionKey)


@final
class Leases:
    """The leases of all sessions, and this store as one of their owners."""

    def __init__(self, link: RedisLink, names: KeyNames, owner: str) -> None:
        self._link = link
        self._names = names
        self._owner = owner
        self._me = owner.encode()
        self._heard: list[bytes] = []
        self._listening = False
        self._bell = anyio.Event()

    async def enter(self) -> None:
        """Become known as an owner."""
        self._heard, self._listening, self._bell = [], False, anyio.Event()
        name = self._names.owner(self._owner)[0]
        said = ("host", host_name(), "pid", os.getpid(), "process", this_process())
        calls = [RedisCall(b"HSET", name, *said), RedisCall(b"HDEL", name, b"closed")]
        counter = RedisCall(b"HINCRBY", self._names.beats, self._owner, first_beat())
        *_, known = await self._link.send(
            [
                *calls,
                RedisCall(b"EXPIRE", name, _KEPT),
                counter,
                RedisCall(b"HKEYS", self._names.beats),
            ]
        )
        await self._forget(known)

    async def _forget(self, known: Sequence[bytes]) -> None:
        """Drop the counters of owners that are not remembered any more."""
        names = [self._names.owner(one.decode())[0] for one in known]
        there = await self._link.send([RedisCall(b"EXISTS", name) for name in names])
        gone = [one for one, is_there in zip(known, there, strict=True) if not is_there]
        if gone:
            await self._link.send([RedisCall(b"HDEL", self._names.beats, *gone)])

    async def leave(self) -> None:
        """Say that this owner writes no more, if the server can be told."""
        name = self._names.owner(self._owner)[0]
        left = RedisCall(b"HDEL", self._names.beats, self._owner)
        await self._link.send([RedisCall(b"HSET", name, b"closed", 1), left])

    async def holder(self, key: SessionKey) -> LeaseState | None:
        session = self._names.places(key).session
        ((epoch, owner, released, deleted),) = await self._link.send(
            [RedisCall(b"HMGET", session, b"e", b"o", b"r", b"d")]
        )
        if epoch is None:
            return None
        if not epoch.isdigit() or owner is None:
            raise damaged(key, "the hash", "its epoch is no number, or it has no owner")
        name = owner.decode()
        (old, host, pid, process, closed), beat = await self._link.send(
            [
                RedisCall(b"HMGET", self._names.owner(name)[0], *_SAID),
                RedisCall(b"HGET", self._names.beats, name),
            ]
        )
        return LeaseState(
            epoch=int(epoch),
            owner=name,
            released=released is not None,
            alive=self._alive(name, process, closed=closed is not None),
            beat=int(beat or old or 0),
            deleted=deleted is not None,
            host=(host or b"").decode(),
            pid=int(pid or 0),
        )

    def _alive(self, owner: str, process: bytes | None, *, closed: bool) -> bool | None:
        if owner == self._owner:
            return True
        if closed or has_ended((process or b"").decode()):
            return False
        return None

    async def acquire(self, key: SessionKey, after: int) -> HeldLease:
        places = self._names.places(key)
        payload = msgspec.json.encode({"owner": self._owner})
        now = b"%.3f" % time.time()
        take = _ACQUIRE(places[:2], after, self._owner, written_key(key), now, payload, places.seed)
        # In the directory before and after: whoever deletes the session's last life meanwhile may
        # take it out between the two, and looks whether there is a new one if it comes behind.
        index = RedisCall(b"ZADD", self._names.directory(key.tenant), 0, member_of(key))
        tenant = RedisCall(b"ZADD", self._names.tenants, 0, key.tenant)
        word, *said = (await self._link.write([tenant, index, take, index]))[2]
        if word == b"held":
            message = (
                f"{key} is at epoch {said[0]}, not {after}: look again who holds it, then ask "
                "for a handover or wait"
            )
            raise LeaseHeldError(message, key=key, epoch=said[0])
        if word == b"damaged":
            why = f"entry {said[1].decode()} does not fit it, with the session at record {said[0]}"
            raise damaged(key, "the log", why)
        epoch, head = said
        return HeldLease(key, epoch, head, created=head == 1)

    async def release(self, key: SessionKey, epoch: int) -> None:
        await self._link.write([_RELEASE((self._names.places(key).session,), epoch)])

    # heartbeat and news

    async def heartbeat(self) -> HeartbeatRequests:
        names = self._names.owner(self._owner)
        asks, _, beats = await self._link.send(
            [
                _BEAT(names[:2], _KEPT, *self._heard),
                RedisCall(b"HINCRBY", self._names.beats, self._owner, 1),
                RedisCall(b"HGETALL", self._names.beats),
            ]
        )
        self._heard = asks
        found: dict[bytes, list[SessionKey]] = {_HANDOVER: [], _MAIL: []}
        for ask in asks[::2]:
            try:
                found[ask[:1]].append(_keys.decode(ask[1:]))
            except (KeyError, msgspec.DecodeError, PerdureError):
                log.warning(
                    "something asked of this owner cannot be read", extra={"size": len(ask)}
                )
        others = {one.decode(): int(n) for one, n in beats.items() if one != self._me}
        return HeartbeatRequests(tuple(found[_HANDOVER]), tuple(found[_MAIL]), others)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        """Ask the holder for the session."""
        await self._ask(holder.owner, _HANDOVER + written_key(key))

    async def tell_of_mail(self, key: SessionKey, owner: str) -> None:
        """Tell the holder that something waits for it."""
        await self._ask(owner, _MAIL + written_key(key))

    async def _ask(self, owner: str, ask: bytes) -> None:
        _, asks, channel = self._names.owner(owner)
        await self._link.write([_ASK((asks,), _KEPT, channel, ask)])

    async def news(self, at_most: float) -> None:
        if not self._listening:
            self._listening = True
            try:
                self._link.require_open().spawn(self._listen)
            except HostClosedError:  # the loop is ending: nobody is to be woken
                self._listening = False
        with anyio.move_on_after(at_most):
            await self._bell.wait()
        self._bell = anyio.Event()

    async def _listen(self) -> None:
        """Hear of asks as they come. While there is no connection, heartbeats find them."""
        channel = self._names.owner(self._owner)[2]
        failures = 0
        while True:
            try:
                async for _ in self._link.pushed(channel):
                    failures = 0
                    self._bell.set()
            except StoreUnavailableError:
                failures += 1
            pause = backoff(failures, base=_PAUSE, cap=_LONGEST, chance=random.random())
            await anyio.sleep(pause)


_SAID = (b"beat", b"host", b"pid", b"process", b"closed")
_ACQUIRE = script("acquire")
_RELEASE = script("release")
_BEAT = script("beat")
_ASK = script("ask")
