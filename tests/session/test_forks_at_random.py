"""Forks at random points of sessions that go meanwhile: each is whole and its own, or was refused."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from perdure import Message, PerdureError, Retention, SessionManager, Shutdown, connect
from perdure.cli.check import audit
from perdure.lease import LeaseOptions
from perdure.records.keys import SessionKey
from perdure.records.records import GAP, HOLDER_KINDS, Record
from perdure.session.copied import as_copied
from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests._virtual import BACKENDS, run
from tests.pausing import PausingStore

QUIET = Shutdown(signals=False, deadline=0.2, turn_grace=0, hard_grace=0.1)
LEASE = LeaseOptions(heartbeat=0.02, ttl=0.1)
ROUNDS = 20
"""Sessions that are forked; the deep run takes as many more as make a thousand forks."""
FORKS = 5

OLD = 60.0
"""Seconds after which a sweep takes a blob that nothing names."""


async def deleted_and_swept(sessions: SessionManager, id: str) -> None:
    await sessions.delete(id)
    for _ in range(3):
        reached: set[str] = set()
        for info in await sessions.list():
            reached |= (await audit(sessions._store, info.key)).reached
        await sessions._store.sweep("", reached, OLD)
        await anyio.sleep(OLD)


Act = Callable[[SessionManager, str], Awaitable[object]]
OTHERS: dict[str, Act] = {
    "delete": lambda sessions, id: sessions.delete(id),
    "prune": lambda sessions, id: sessions.prune(Retention(keep_turns=3), id=id),
    "rename": lambda sessions, id: sessions.rename(id, f"{id} renamed"),
    "forget": lambda sessions, id: sessions.forget(id),
    "go on": lambda sessions, id: filled(sessions, id, 3, "later"),
    "fork": lambda sessions, id: sessions.fork(id, f"{id} fork of its own"),
    "delete and sweep": deleted_and_swept,
    "nothing": lambda sessions, id: sessions.exists(id),
}


async def filled(sessions: SessionManager, id: str, turns: int, what: str) -> None:
    session = await sessions.open(id)
    for number in range(turns):
        async with session.turn(id=f"{what} {number}"):
            session.append(Message.user(f"{what} {number} " + "x" * (number % 7) * 100))
            session.memory.set(f"{what} {number % 3}", "y" * (number % 5) * 700)
            session.state.set("last", number)
    if turns:
        await session.checkpoints.create(what, state=["z" * 3000, what])
    await session.aclose()


async def log_of(store: Store, id: str) -> list[Record]:
    return [one async for chunk in store.read_log(SessionKey(id)) for one in chunk.records]


def is_a_beginning_of(ours: list[Record], theirs: list[Record], at: int) -> bool:
    """Whether a fork's log is its source's up to a record, where both have one."""
    first = max(ours[0].seq, theirs[0].seq) + 1
    copied = [(one.seq, *as_copied(one)) for one in theirs if first <= one.seq <= at]
    mine = [(one.seq, one.kind, one.payload, one.end) for one in ours if first <= one.seq <= at]
    whole = [one for one in mine if one[1] != GAP]
    return whole == [one for one in copied if one[1] != GAP] and (
        [one[0] for one in mine] == list(range(first, at + 1))
    )


class Round:
    """One session, its forks, and what becomes of it meanwhile."""

    backing: MemoryBacking

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.id = "a"
        self.made: dict[str, int] = {}

    def store(self) -> MemoryStore:
        return MemoryStore(backing=self.backing)

    async def run(self) -> None:
        dice = self.dice
        self.backing = MemoryBacking(clock=anyio.current_time)
        async with connect(self.store(), shutdown=QUIET, lease=LEASE) as sessions:
            await filled(sessions, self.id, dice.randint(3, 25), "one")
            if dice.random() < 0.4:
                await sessions.prune(Retention(keep_turns=dice.randint(1, 5)), id=self.id)
            if dice.random() < 0.4:
                await filled(sessions, self.id, dice.randint(1, 5), "two")
            before = await log_of(sessions._store.inner, self.id)
        await anyio.sleep(2 * OLD)
        ends = [one.seq for one in before[1:] if one.end and one.kind not in HOLDER_KINDS]
        killed = PausingStore(self.store())
        one = await connect(killed, shutdown=QUIET, lease=LEASE)
        async with connect(self.store(), shutdown=QUIET, lease=LEASE) as two:
            async with anyio.create_task_group() as group:
                for number in range(FORKS):
                    sessions = one if number % 2 else two
                    at = None if number == 0 else dice.choice(ends)
                    history = dice.choice(("full", "full", "context"))
                    group.start_soon(self.fork, sessions, f"fork {number}", at, history)
                other = dice.choice(sorted(OTHERS))
                group.start_soon(self.beside, two, other)
                await anyio.sleep(0)
                if dice.random() < 0.5:
                    killed.left = dice.randint(1, 40)
                    group.start_soon(self.kill, killed, group.cancel_scope)
            with contextlib.suppress(PerdureError):
                await one.aclose()
            await killed._store.aclose()
            await self.judge(two, before)

    async def fork(self, sessions: SessionManager, new: str, at: int | None, history: Any) -> None:
        for _ in range(self.dice.randint(0, 5)):
            await anyio.sleep(0)
        with contextlib.suppress(PerdureError):
            made = await sessions.fork(self.id, new, at=at, history=history)
            self.made[new] = made.at

    async def beside(self, sessions: SessionManager, other: str) -> None:
        for _ in range(self.dice.randint(0, 60)):
            await anyio.sleep(0)
        with contextlib.suppress(PerdureError):
            await OTHERS[other](sessions, self.id)

    async def kill(self, store: PausingStore, scope: anyio.CancelScope) -> None:
        await anyio.sleep(0.05)
        if store.left is not None and store.left < 0:
            scope.cancel()

    async def judge(self, sessions: SessionManager, before: list[Record]) -> None:
        raw = sessions._store.inner
        assert {found.owner for found in await raw.drafts("")} <= set(self.backing.owners)
        listed = {info.key.agent for info in await sessions.list()}
        for number in range(FORKS):
            new = f"fork {number}"
            view = await sessions.load(new)
            assert (new in listed) == (view is not None) == await sessions.exists(new)
            if new in self.made:
                assert view is not None, new
            if view is None:
                continue
            ours = await log_of(raw, new)
            holder = await raw.holder(SessionKey(new))
            assert holder is not None
            assert holder.draft is not None
            at = holder.draft.up_to
            assert self.made.get(new, at) == at
            if len(ours) > 1 and ours[1].seq <= at <= before[-1].seq:
                assert is_a_beginning_of(ours, before, at), (new, at)
            seen = await audit(sessions._store, SessionKey(new))
            assert [found.detail for found in seen.findings if found.problem] == []
        for number in range(FORKS):  # what a killed one has left is gone with the next open
            async with sessions.open(f"fork {number}", wait=20):
                pass
        assert await raw.drafts("") == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_forks_of_a_session_that_goes_are_whole_or_refused(backend: str) -> None:
    for seed in range(ROUNDS):
        run(backend, Round(seed).run)


@pytest.mark.deep
@pytest.mark.parametrize(("backend", "first"), [(one, n) for n, one in enumerate(BACKENDS)])
def test_a_thousand_forks_of_sessions_that_go_are_whole_or_refused(
    backend: str, first: int
) -> None:
    """Of each loop, every second round: the two run other orders in any case."""
    for seed in range(ROUNDS + first, 1000 // FORKS, len(BACKENDS)):
        run(backend, Round(seed).run)
