"""What holds when a story ends badly: shutdown with the store down, takeovers, crashes, overload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from hypothesis import given, settings, strategies as st

from perdure._lib.loop import loop_clock
from perdure._lib.tasks import Host
from perdure.autosave.engine import Autosaver
from perdure.autosave.options import Autosave, EngineOptions
from perdure.autosave.tracked import State, Tracked
from perdure.errors import LeaseLostError, PerdureError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.store import Outcome
from tests import _virtual
from tests.autosave.inline_store import DirectStore, Fault, InlineStore
from tests.autosave.rigs import CALM, PLAIN, Rig, entry, rig, within

EACH_LOOP = pytest.mark.parametrize("backend", _virtual.BACKENDS)


@dataclass(frozen=True)
class Ending:
    """Appends to three sessions, and a store that is at its worst when the engine stops."""

    ops: tuple[tuple[float, int, bool], ...]
    """How long to wait, which session, whether to save it beside the story."""
    latency: tuple[float, ...]
    faults: tuple[Fault, ...]
    then: str
    deadline: float
    taken: int | None
    """The session that another process takes over before the end."""
    poisoned: int | None
    """The session whose second record is refused for good."""
    direct: bool = False
    """Whether the store takes a save without a worker."""


endings = st.builds(
    Ending,
    ops=st.lists(
        st.tuples(st.sampled_from([0.0, 0.3, 2.5]), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=12,
    ).map(tuple),
    latency=st.lists(st.sampled_from([0.0, 0.2, 3.0]), min_size=1, max_size=4).map(tuple),
    faults=st.lists(
        st.sampled_from(["ok", "ok", "down", "unacked", "lost", "hang", "hang_applied"]), max_size=8
    ).map(tuple),
    then=st.sampled_from(["up", "down", "stuck"]),
    deadline=st.sampled_from([0.0, 1.0, 30.0]),
    taken=st.sampled_from([None, 0]),
    poisoned=st.sampled_from([None, 1]),
    direct=st.booleans(),
)


async def live(ending: Ending) -> int:
    """Live it, and return how many sessions refused a record afterwards."""
    make = DirectStore if ending.direct else InlineStore
    store = make(latency=ending.latency, faults=ending.faults, parallelism=2)
    async with rig(store, engine=EngineOptions(jitter=0.0, save_timeout=5.0)) as r:
        sessions = [r.track(str(n)) for n in range(3)]
        if ending.poisoned is not None:
            store.poison.add((sessions[ending.poisoned].key, 2))
        async with anyio.create_task_group() as group:
            for wait, n, save in ending.ops:
                await anyio.sleep(wait)
                append_if_open(r, sessions[n])
                if save:
                    group.start_soon(save_if_it_can, r, sessions[n])
            if ending.taken is not None:
                store.epochs[sessions[ending.taken].key] = 2
            store.down, store.stuck = ending.then == "down", ending.then == "stuck"
            began = anyio.current_time()
            report = await r.saver.aclose(within(ending.deadline, 1.0))
            assert anyio.current_time() - began <= ending.deadline + 1.0 + 1e-6
        calls = len(store.calls)
        accounted(r, sessions, report)
        store.down = store.stuck = False
        await anyio.sleep(1000)
        assert len(store.calls) == calls, "a save began behind the report"
        for t in sessions:
            with pytest.raises(PerdureError):
                r.append(t)
        return len(sessions)


def append_if_open(r: Rig, t: Tracked) -> None:
    try:
        r.append(t)
    except LeaseLostError:
        assert t.state is State.LOST


async def save_if_it_can(r: Rig, t: Tracked) -> None:
    version = t.version
    try:
        await r.saver.save(t)
    except PerdureError:
        return
    assert t.durable >= version
    assert r.stored(t) >= version


def accounted(r: Rig, sessions: list[Tracked], report: Any) -> None:
    """Every record is durable, or in exactly one list; what the store has beyond is in doubt."""
    listed = {one.key: one for one in report.not_durable}
    assert len(listed) == len(report.not_durable)
    assert report.clean is not bool(listed)
    for t in sessions:
        log = [record.payload for record in r.store.logs.get(t.key, [])]
        one = listed.get(t.key)
        assert (t.version > t.durable) is (one is not None)
        assert len(log) >= t.durable
        assert log[t.durable :] == [entry.payload for entry in t.pending[: len(log) - t.durable]]
        if one is not None:
            assert (one.version, one.durable) == (t.version, t.durable)
            assert len(log) <= one.in_doubt_to <= one.version
            assert (one in report.in_doubt) or len(log) == t.durable or t.end is not None
    assert all(one.state == "lost" for one in report.lost)
    assert all(one.state == "quarantined" for one in report.quarantined)


@EACH_LOOP
@settings(max_examples=120)
@given(ending=endings)
def test_a_shutdown_accounts_for_every_record(backend: str, ending: Ending) -> None:
    assert _virtual.run(backend, live, ending) == 3


# I12


@EACH_LOOP
def test_a_lost_session_is_never_written_again(backend: str) -> None:
    async def main() -> None:
        store = InlineStore(latency=(0.5,))
        async with rig(store) as r:
            t, other = r.track("a"), r.track("b")
            r.append(t)
            await r.saver.save(t)
            store.epochs[t.key] = 2
            r.append(t)
            r.append(other)
            with pytest.raises(LeaseLostError):
                await r.saver.save(t)
            assert t.state is State.LOST
            assert len(t.pending) == 1
            with pytest.raises(LeaseLostError):
                r.append(t)
            with pytest.raises(LeaseLostError):
                await r.saver.wait_durable(t)
            await r.saver.flush()
            assert other.clean
            report = await r.saver.aclose(within(10, 1))
            assert [one.key for one in report.lost] == [t.key]

    _virtual.run(backend, main)


# I13


@EACH_LOOP
@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=30),
    policy=st.sampled_from(["backpressure", "reject"]),
)
def test_unsaved_bytes_stay_within_the_limit(backend: str, sizes: list[int], policy: str) -> None:
    stored, refused = _virtual.run(backend, overload, sizes, policy)
    assert stored == len(sizes) - refused


async def overload(sizes: list[int], policy: str) -> tuple[int, int]:
    """Append to a store that is down; return how many were stored, and how many refused."""
    engine = EngineOptions(
        jitter=0.0,
        dirty_soft=1000,
        dirty_hard=2000,
        outage_policy=policy,
        backpressure_timeout=20.0,
    )
    store = InlineStore(latency=(1.0,), parallelism=1)
    async with rig(store, engine=engine) as r:
        sessions = [r.track(str(n)) for n in range(3)]
        store.down = True
        refused: list[Exception] = []
        blocked = 0

        async def write(t: Tracked, size: int) -> None:
            nonlocal blocked
            began = anyio.current_time()
            try:
                await r.saver.room(t)
                blocked += anyio.current_time() > began
                r.append(t, size=size)
            except StoreUnavailableError as error:
                refused.append(error)
            dirty = r.saver.health().unsaved_bytes
            assert dirty <= 2000 + (1 + blocked) * (max(sizes) + 120)
            assert dirty == sum(t.pending_bytes for t in sessions)

        async with anyio.create_task_group() as group:
            for n, size in enumerate(sizes):
                await anyio.sleep(0.01)
                group.start_soon(write, sessions[n % 3], size)
            await anyio.sleep(10)
            store.down = False
        if policy == "backpressure":
            assert refused == []
        await r.saver.flush()
        assert r.saver.health().unsaved_bytes == 0
        return sum(map(r.stored, sessions)), len(refused)


# I14


@EACH_LOOP
@settings(max_examples=30)
@given(
    order=st.permutations(range(12)),
    urgent=st.sets(st.integers(0, 11), max_size=8),
    batch_max=st.sampled_from([1, 4]),
)
def test_the_earliest_deadline_starts_first_and_savers_get_half(
    backend: str, order: list[int], urgent: set[int], batch_max: int
) -> None:
    async def main() -> None:
        store = InlineStore(latency=(1.0,), parallelism=1, batch_max=batch_max)
        engine = EngineOptions(jitter=0.0, eager=False, save_timeout=100.0)
        async with rig(store, autosave=Autosave(debounce=2.0, max_delay=2.0), engine=engine) as r:
            blocker, sessions = r.track("blocker"), [r.track(str(n)) for n in range(12)]
            for n in order:
                r.append(sessions[n])
                await anyio.sleep(0.1)
            store.latency = [20.0] + [1.0] * 20
            r.append(blocker)
            async with anyio.create_task_group() as group:
                group.start_soon(r.saver.save, blocker)
                await anyio.sleep(5)
                for n in sorted(urgent):
                    group.start_soon(r.saver.save, sessions[n])
            await r.saver.flush()
            started = [
                [int(batch.key.agent) for batch in call if batch.key != blocker.key]
                for call in store.calls
            ]
            flat = [n for call in started for n in call]
            rank = {n: place for place, n in enumerate(order)}
            hurried = [n for n in flat if n in urgent]
            calm = [n for n in flat if n not in urgent]
            assert calm == sorted(calm, key=rank.__getitem__)
            assert hurried == sorted(hurried, key=rank.__getitem__)
            assert sorted(flat) == list(range(12))
            before_the_last_calm_one = flat[: flat.index(calm[-1])] if calm else []
            ahead = 0
            for n in before_the_last_calm_one:
                ahead += 1 if n in urgent else -1
                assert ahead <= 1, flat

    _virtual.run(backend, main)


# I15


class Killed(BaseException):
    """The process is gone: nothing after this counts."""


class KillingStore(InlineStore):
    """Kills at the n-th step of its work, before or after a write."""

    def __init__(self, at: int) -> None:
        super().__init__(latency=(0.3,), parallelism=2)
        self.left = at
        self.killed = anyio.Event()

    async def append_many(self, batches: Any) -> list[Outcome]:
        self.step()
        outcomes = await super().append_many(batches)
        self.step()
        return outcomes

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.killed.set()
            raise Killed


@EACH_LOOP
def test_a_kill_at_any_step_keeps_what_was_acknowledged(
    backend: str,
) -> None:
    survived = False
    at = 0
    while not survived:
        survived = run_to_the_kill(backend, at)
        at += 1
    assert at > 10


def run_to_the_kill(backend: str, at: int) -> bool:
    acknowledged: dict[SessionKey, int] = {}
    accepted: dict[SessionKey, list[bytes]] = {}
    stores: list[KillingStore] = []

    async def talk(saver: Autosaver, t: Tracked, late: float) -> None:
        await anyio.sleep(late)
        for n in range(4):
            record = entry(n)
            saver.append(t, (record,))
            accepted.setdefault(t.key, []).append(record.payload)
            if n % 2:
                acknowledged[t.key] = await saver.save(t)
            await anyio.sleep(1.1)

    async def main() -> bool:
        store = KillingStore(at)
        stores.append(store)
        host = Host()
        await host.start()
        saver = Autosaver(
            store,  # type: ignore[arg-type]
            host,
            autosave=CALM,
            engine=PLAIN,
            clock=loop_clock(),
        )
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                await store.killed.wait()
                group.cancel_scope.cancel()

            async def body() -> None:
                async with anyio.create_task_group() as talks:
                    for n in range(3):
                        t = saver.track(SessionKey(str(n)), epoch=1, head=0)
                        talks.start_soon(talk, saver, t, n * 0.4)
                await saver.aclose(within(100, 1))
                group.cancel_scope.cancel()

            group.start_soon(watch)
            group.start_soon(body)
        await host.aclose()
        return not store.killed.is_set()

    survived = False
    try:
        survived = _virtual.run(backend, main)
    except BaseException as error:
        # Trio passes a crash of the host on to whoever runs the loop.
        if not stores[0].killed.is_set() or isinstance(error, AssertionError):
            raise
    for key, version in acknowledged.items():
        assert len(stores[0].logs[key]) >= version
    for key, log in stores[0].logs.items():
        assert [record.payload for record in log] == accepted[key][: len(log)]
    return survived
