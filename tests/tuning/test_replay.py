"""What a replay says of a setting is what autosave does with it."""

from __future__ import annotations

from itertools import pairwise

import anyio
import pytest
from hypothesis import given, strategies as st

from perdure import Autosave
from perdure.autosave.tracked import Tracked
from perdure.tuning import Workload, WorkloadChange, made_up, replay, workload_of
from perdure.tuning.advice import label
from tests import _virtual
from tests.autosave.inline_store import InlineStore
from tests.autosave.rigs import Rig, rig

SLOT = 0.05
SETTINGS = [
    Autosave(debounce=quiet, max_delay=longest)
    for quiet, longest in [(0, 0), (0.5, 2), (2, 10), (5, 15), (30, 30), (None, 30), (None, 1)]
]

settings = st.tuples(st.floats(0, 20), st.floats(0, 20)).map(
    lambda pair: Autosave(debounce=min(pair), max_delay=max(pair))
)
sessions = st.lists(
    st.builds(WorkloadChange, st.floats(0, 600), st.integers(1, 5000), st.booleans()),
    min_size=1,
    max_size=30,
).map(lambda changes: sorted(changes, key=lambda change: change.at))
workloads = st.lists(sessions, max_size=4).map(lambda found: workload_of(found, "found"))


async def live(r: Rig, t: Tracked, session: tuple[WorkloadChange, ...]) -> None:
    """Do to a session what the workload says, at its times."""
    for change in session:
        await anyio.sleep_until(change.at)
        r.append(t, size=change.size)
        if change.ends_turn:
            r.saver.turn_ended(t)


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
@pytest.mark.parametrize("autosave", SETTINGS, ids=label)
@pytest.mark.parametrize("debounce", [2.0, 0.4])
def test_a_replay_is_what_the_engine_does(
    backend: str, autosave: Autosave, debounce: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same saves, and each record durable at the same time, to two slots of the wheel."""
    workload = made_up(sessions=4, seconds=400, seed=7)
    store = InlineStore(latency=(0.01,), parallelism=64)
    monkeypatch.setattr("perdure.autosave.schedule.DEBOUNCE", debounce)

    async def run() -> list[float]:
        async with rig(store, autosave=autosave) as r:
            tracked = [r.track(str(n)) for n in range(len(workload.sessions))]
            async with anyio.create_task_group() as group:
                for t, session in zip(tracked, workload.sessions, strict=True):
                    group.start_soon(live, r, t, session)
            await anyio.sleep(60)
            return [
                store.durable_at(t.key, seq)[0] - change.at
                for t, session in zip(tracked, workload.sessions, strict=True)
                for seq, change in enumerate(session, 1)
            ]

    ages = _virtual.run(backend, run)
    said = replay(workload, autosave, save_time=0.01, debounce=debounce)
    writes = sum(map(len, store.writes.values()))
    assert said.saves * workload.seconds == pytest.approx(writes)
    ends = sum(change.ends_turn for session in workload.sessions for change in session)
    timed = 0 if autosave.debounce == 0 else writes - ends  # what is due at once needs no timer
    assert said.timed * workload.seconds == pytest.approx(timed, abs=3)
    assert said.worst == pytest.approx(max(ages), abs=2 * SLOT)
    assert said.lost * workload.seconds == pytest.approx(sum(ages), abs=2 * SLOT * len(ages))


@given(workloads, settings, st.sampled_from([0.0, 0.01, 1.0]))
def test_nothing_waits_longer_than_the_setting_says(
    workload: Workload, autosave: Autosave, save_time: float
) -> None:
    cost = replay(workload, autosave, save_time=save_time)
    # A save may have to wait for the one before it.
    assert cost.worst <= autosave.max_delay + 2 * save_time + 1e-6
    assert 0 <= cost.p99 <= cost.worst
    assert 0 <= cost.exposed <= 1
    assert (cost.lost > 0) == (cost.worst > 0)
    assert cost.saves * workload.seconds <= workload.changes + 1e-6


@given(st.lists(st.integers(0, 600), min_size=1, unique=True).map(sorted))
def test_each_change_at_once_is_a_save_each(times: list[int]) -> None:
    workload = workload_of([[WorkloadChange(at, 10) for at in times]], "found")
    cost = replay(workload, Autosave.write_through())
    assert cost.saves * workload.seconds == pytest.approx(len(times))
    assert cost.lost == cost.exposed == cost.worst == 0


def test_a_turn_s_end_saves_only_where_it_shall() -> None:
    workload = workload_of(
        [[WorkloadChange(0, 10), WorkloadChange(1, 10, ends_turn=True)]], "one turn"
    )
    assert replay(workload, Autosave(debounce=5, max_delay=5)).worst == 1
    patient = Autosave(debounce=5, max_delay=5, on_turn_end=False)
    assert replay(workload, patient).worst == pytest.approx(5, abs=SLOT)


def test_longer_delays_save_less_and_risk_more() -> None:
    workload = made_up(sessions=20)
    costs = [
        replay(workload, Autosave(debounce=debounce, max_delay=longest))
        for debounce, longest in [(0, 0), (0.5, 2), (2, 10), (10, 60), (30, 120)]
    ]
    for safer, thriftier in pairwise(costs):
        assert safer.saves > thriftier.saves
        assert safer.lost < thriftier.lost
        assert safer.exposed < thriftier.exposed
        assert safer.bytes == thriftier.bytes  # only operations are spared


def test_no_workload_costs_nothing() -> None:
    cost = replay(workload_of([], "nobody"), Autosave())
    assert (cost.saves, cost.bytes, cost.lost, cost.worst) == (0, 0, 0, 0)
