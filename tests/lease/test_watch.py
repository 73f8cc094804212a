"""Owners that fall silent: what their sessions cost those who open them next."""

from __future__ import annotations

import anyio
import msgspec
import pytest

import perdure
from perdure import LeaseHeldError, LeaseLostError, LeaseOptions, Message, Shutdown, lease as module
from perdure.errors import StoreUnavailableError
from perdure.lease import OwnerWatch
from perdure.records.keys import SessionKey
from perdure.store import HeartbeatRequests, take_after
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests._virtual import BACKENDS, virtual
from tests.remote import Remote

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [virtual(b) for b in BACKENDS], ids=BACKENDS),
]

QUIET = Shutdown(signals=False)
KEYS = [SessionKey(f"s{place}") for place in range(5)]
TTL = LeaseOptions().ttl
HOUR = 3600.0


class Machine(Remote):
    """A store of another machine, which may be down."""

    def __init__(self, backing: MemoryBacking, *, tells: bool = True) -> None:
        super().__init__(MemoryStore(backing=backing))
        self.tells = tells
        """Whether a heartbeat brings those of others."""
        self.is_down = False

    async def heartbeat(self) -> HeartbeatRequests:
        if self.is_down:
            raise StoreUnavailableError("no writes now")
        asked = await super().heartbeat()
        return asked if self.tells else msgspec.structs.replace(asked, beats=None)


async def dead_holder(backing: MemoryBacking) -> MemoryStore:
    """Have an owner that holds all the sessions, and never beats."""
    store = MemoryStore(backing=backing)
    await store.open()
    for key in KEYS:
        await take_after(store, key, after=0)
    return store


async def open_all(sessions: perdure.SessionManager) -> list[float]:
    """Open all of them, and return how long each took."""
    took = []
    for key in KEYS:
        begun = anyio.current_time()
        await sessions.open(key.agent)
        took.append(anyio.current_time() - begun)
    return took


@pytest.mark.parametrize("later", [2 * TTL, HOUR])
async def test_what_a_dead_worker_held_is_free_at_once(later: float) -> None:
    backing = MemoryBacking()
    async with perdure.connect(Machine(backing), shutdown=QUIET) as sessions:
        await dead_holder(backing)
        await anyio.sleep(later)
        assert max(await open_all(sessions)) < 0.1


async def test_what_one_open_found_out_serves_all_others() -> None:
    backing = MemoryBacking()
    async with perdure.connect(Machine(backing, tells=False), shutdown=QUIET) as sessions:
        await dead_holder(backing)
        await anyio.sleep(HOUR)
        first, *others = await open_all(sessions)
    assert TTL <= first < TTL + 0.1
    assert max(others) < 0.1


async def test_a_silent_holder_is_no_reason_to_give_up() -> None:
    backing = MemoryBacking()
    async with perdure.connect(Machine(backing), shutdown=QUIET) as sessions:
        await dead_holder(backing)
        with pytest.raises(LeaseHeldError):
            await sessions.open("s0", on_held="raise")
        await anyio.sleep(2 * TTL)
        session = await sessions.open("s0", on_held="raise")
        assert session.epoch == 2


async def test_one_that_wakes_up_keeps_its_sessions() -> None:
    backing = MemoryBacking()
    async with perdure.connect(Machine(backing), shutdown=QUIET) as sessions:
        holder = await dead_holder(backing)
        await anyio.sleep(HOUR)
        await holder.heartbeat()
        with pytest.raises(LeaseHeldError):
            await sessions.open("s0", on_held="steal", wait=TTL - 1)


async def test_nobody_is_robbed_in_an_outage_nor_behind_it() -> None:
    """Whoever could not beat because nobody could is not dead."""
    backing = MemoryBacking()
    one, two = Machine(backing), Machine(backing)
    async with (
        perdure.connect(one, shutdown=QUIET) as mine,
        perdure.connect(two, shutdown=QUIET) as theirs,
    ):
        session = await mine.open("s0")
        await anyio.sleep(1.5 * TTL)
        one.is_down = two.is_down = True
        with pytest.raises(LeaseHeldError):
            await theirs.open("s0", on_held="steal", wait=3 * TTL)
        one.is_down = two.is_down = False
        with pytest.raises(LeaseHeldError):
            await theirs.open("s0", on_held="steal", wait=3 * TTL)
        session.append(Message.user("still mine"))
        await session.save()


class Moved:
    """A clock that is moved by hand, and a watch by it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watch = OwnerWatch(LeaseOptions(), lambda: self.now)

    def look(self, owner: str = "other", beat: int = 1) -> bool:
        return self.watch.note_beat(owner, beat, self.watch.counted())

    def run(self, seconds: float) -> None:
        """Beat as a manager does."""
        for _ in range(int(seconds / LeaseOptions().heartbeat)):
            self.now += LeaseOptions().heartbeat
            self.watch.renewed()


async def test_one_late_look_proves_nothing() -> None:
    moved = Moved()
    moved.look()
    moved.now += HOUR  # we were stopped
    assert not moved.look()
    moved.watch.renewed()
    assert not moved.look()
    moved.run(TTL)
    assert moved.look()


async def test_what_was_proven_outlasts_a_stop_of_ours() -> None:
    moved = Moved()
    moved.look()
    moved.run(TTL)
    assert moved.look()
    moved.now += HOUR
    assert moved.look()
    assert not moved.look(beat=2)


async def test_a_clock_that_goes_back_counts_for_nothing() -> None:
    moved = Moved()
    moved.run(TTL)
    moved.look()
    moved.now -= 1.5 * TTL
    assert not moved.look()
    moved.watch.renewed()
    moved.run(TTL)
    assert moved.look()


async def test_owners_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Moved()
    for place in range(50):
        moved.look(f"owner {place}")
    moved.run(3 * TTL)
    moved.watch.note_beats({"there": 1}, moved.watch.counted())
    assert not any(moved.look(f"owner {place}") for place in range(50))  # each is a new one
    monkeypatch.setattr(module, "_MOST", 10)
    moved = Moved()
    for place in range(50):
        moved.look(f"owner {place}")
    moved.run(TTL)
    known = [place for place in reversed(range(50)) if moved.look(f"owner {place}")]
    assert known == list(reversed(range(40, 50)))


async def test_a_session_that_is_lost_says_for_how_long_no_heartbeat_was_sent() -> None:
    backing = MemoryBacking()
    mine, other = Machine(backing), Machine(backing)
    async with (
        perdure.connect(mine, shutdown=QUIET) as sessions,
        perdure.connect(other, shutdown=QUIET) as others,
    ):
        session = await sessions.open("ada")
        mine.is_down = True
        await others.open("ada", wait=60)
        mine.is_down = False
        session.append(Message.user("Hello"))
        with pytest.raises(LeaseLostError):
            await session.save()
        with pytest.raises(LeaseLostError, match=r"sent no heartbeat for \d+ s: something blocked"):
            session.append(Message.user("Bye"))
        await session.discard_unsaved()
