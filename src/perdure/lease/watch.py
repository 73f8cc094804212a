"""The watch of owners: which of them have not renewed their heartbeat for the lease's ttl.

One watch for a connected manager. Each own heartbeat brings the counters of other owners, each look
at a session its holder's. So by the time somebody opens a session, it is mostly known whether
its holder is silent, and what one open has found out serves all others.

A counter proves nothing about when it was written, so only this process's clock counts, and only
as long as its own heartbeats arrive: while it was stopped, or the store took no writes,
others could not be seen beating, or could not beat. Checked against a model, which also says
what each rule is for (tests/properties/watch_model.py). Should a live owner be taken over all
the same, the store's fence keeps its records from being lost or doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import msgspec

from perdure.lease.terms import Lease
from perdure.model.keys import SessionKey
from perdure.store import Asked, Holder, Store

__all__ = ["OwnerWatch", "beat", "look"]

_GAP = 1.75
"""Heartbeats between two own ones from which on the time between them does not count. Whoever
fails to beat in as long an outage does so again within the ttl, if that is four heartbeats."""
_FORGET = 2
"""Ttls after which an owner is forgotten that heartbeats do not tell of, and nobody looked at."""
_MOST = 10_000
"""Owners that are remembered."""


class _Seen(msgspec.Struct):
    """An owner's counter, in time that counts."""

    beat: int
    since: float
    looked: float
    silent: bool = False


@final
class OwnerWatch:
    """What one process has seen of the heartbeats of others.

    Args:
        lease: The heartbeat's terms.
        clock: A monotonic clock.

    """

    def __init__(self, lease: Lease, clock: Callable[[], float]) -> None:
        self.clock: Callable[[], float] = clock
        self._ttl = lease.ttl
        self._gap = _GAP * lease.heartbeat
        self._beaten = clock()
        self._counted = 0.0
        self._seen: dict[str, _Seen] = {}

    def attended(self) -> float:
        """Return the seconds that count by now. Asked for before each look."""
        since = self.clock() - self._beaten
        return self._counted + since if 0 <= since < self._gap else self._counted

    def beaten(self) -> None:
        """Note that an own heartbeat has arrived."""
        self._counted = self.attended()
        self._beaten = self.clock()

    def saw(self, owner: str, beat: int, asked: float) -> bool:
        """Note an owner's counter; return whether the owner is silent.

        Args:
            owner: Whose counter.
            beat: The counter, as it was read after ``asked``.
            asked: What ``attended`` was before the look.

        """
        seen = self._seen.get(owner)
        now = self.attended()
        if seen is None or seen.beat != beat:
            if seen is None and len(self._seen) >= _MOST:
                del self._seen[next(iter(self._seen))]
            seen = self._seen[owner] = _Seen(beat, now, now)
        # Once proven, it holds for as long as the counter is the same, whatever was missed.
        seen.silent = seen.silent or asked - seen.since >= self._ttl
        seen.looked = now
        return seen.silent

    def saw_all(self, beats: Mapping[str, int], asked: float) -> None:
        """Note what a heartbeat told of other owners; forget those that are gone."""
        for owner, counter in beats.items():
            self.saw(owner, counter, asked)
        before = self.attended() - _FORGET * self._ttl
        gone = [owner for owner, seen in self._seen.items() if seen.looked < before]
        for owner in gone:
            del self._seen[owner]


async def beat(store: Store, watch: OwnerWatch) -> Asked:
    """Renew this owner's heartbeat, and note what it tells of others."""
    began = watch.attended()
    asked = await store.heartbeat()
    watch.beaten()
    if asked.beats is not None:
        watch.saw_all(asked.beats, began)
    return asked


async def look(store: Store, key: SessionKey, watch: OwnerWatch) -> tuple[Holder | None, bool]:
    """Say who has a session, and whether that owner is silent."""
    began = watch.attended()
    holder = await store.holder(key)
    if holder is None:
        return None, False
    return holder, watch.saw(holder.listed or holder.owner, holder.beat, began)
