"""When changes came: from a log, or made up."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

import perdure
from perdure import Autosave, Message
from perdure.records.records import EPOCH, MESSAGE, STATE, TURN, Record
from perdure.tuning import WorkloadChange, changes_of, made_up, observed, replay, workload_of
from perdure.tuning.measure import TENANT


def record(seq: int, kind: str, value: object) -> Record:
    return Record(seq, 1, kind, msgspec.json.encode(value), True)


def test_a_log_tells_when_it_was_written() -> None:
    found = changes_of(
        [
            record(1, EPOCH, {"at": 1.0}),
            record(2, TURN, {"phase": "begin", "at": 100.0}),
            record(3, MESSAGE, {"role": "user", "content": "hi", "created_at": 101.5}),
            record(4, STATE, {"name": "x", "value": 1}),  # says nothing: as the one before
            record(5, STATE, {"at": "some other thing"}),
            record(6, TURN, {"phase": "end", "at": 103.0}),
            record(7, MESSAGE, {"role": "user", "content": "late", "created_at": 50.0}),
        ]
    )
    assert [change.at for change in found] == [100.0, 101.5, 101.5, 101.5, 103.0, 103.0]
    assert [change.ends_turn for change in found] == [False, False, False, False, True, False]
    assert all(change.size > 0 for change in found)


def test_a_log_without_times_tells_nothing() -> None:
    assert changes_of([record(1, STATE, {"name": "x"})]) == []


def of(*sessions: list[float], ends_turn: bool = False) -> list[list[WorkloadChange]]:
    return [[WorkloadChange(at, 1, ends_turn) for at in times] for times in sessions]


def test_pauses_do_not_count() -> None:
    workload = workload_of([*of([1000.0, 1005.0, 90_000.0], [90_100.0]), []], "x")
    assert [change.at for change in workload.sessions[0]] == [0, 5, 65]
    assert workload.changes == 4


def test_no_session_is_active_after_the_end_of_the_recording() -> None:
    """Of 45 s, three sessions were there for 45, 35 and 40."""
    workload = workload_of(of([0.0, 20.0, 45.0], [10.0, 30.0], [5.0, 41.0, 44.0]), "x")
    # The first one changed last: the mean pause is added.
    assert workload.seconds == 45 + (20 + 25 + 20 + 36 + 3) / 5 + 35 + 40


def test_two_recordings_in_a_store_end_each_by_itself() -> None:
    one = of([0.0, 20.0, 40.0], [0.0, 30.0])
    later = [[change._replace(at=change.at + 90_000) for change in changes] for changes in one]
    single, double = workload_of(one, "x"), workload_of(one + later, "x")
    assert double.seconds == 2 * single.seconds


def test_a_session_that_went_quiet_counts_for_a_minute_more() -> None:
    workload = workload_of(of([0.0, 10.0], [0.0, 50.0, 100.0, 150.0]), "x")
    assert workload.seconds == 10 + 60 + 150 + (10 + 3 * 50) / 4


def test_a_session_alone_stays_active_as_long_as_it_pauses_after_such_a_change() -> None:
    asked = [WorkloadChange(0, 1), WorkloadChange(3, 1, ends_turn=True)]
    turns = [change._replace(at=change.at + 20 * n) for n in range(4) for change in asked]
    assert workload_of([turns], "x").seconds == 63 + 17
    assert workload_of([turns[:2]], "x").seconds == 3 + 60  # no pause is known


def test_turns_of_a_script_count_for_some_seconds() -> None:
    assert workload_of(of([0.0, 0.001, 0.002]), "x").seconds == 10


@given(st.integers(0, 100))
def test_made_up_agents_are_the_same_for_a_seed(seed: int) -> None:
    one, other = (made_up(sessions=2, seconds=120, seed=seed) for _ in range(2))
    assert one == other
    assert one.changes > 0
    for session in one.sessions:
        assert [change.at for change in session] == sorted(change.at for change in session)


async def test_a_store_s_sessions_are_its_workload(tmp_path: Path) -> None:
    """Forks with the history that they began with; nothing of the tuning's own sessions."""
    store = perdure.store_for(tmp_path / "store")
    async with perdure.connect(store) as sessions:
        for tenant in ("", "acme", TENANT):
            async with sessions.open("ada", tenant=tenant) as session, session.turn():
                session.append(Message.user("Hello"), Message.assistant("Hi"))
        await sessions.fork("ada", "bob")
        workload = await observed(store)
    assert len(workload.sessions) == 3
    assert all(any(change.ends_turn for change in changes) for changes in workload.sessions)
    assert workload.changes >= 12
    assert str(tmp_path) in workload.source


async def test_a_damaged_session_is_passed_over(tmp_path: Path) -> None:
    root = tmp_path / "store"
    async with perdure.connect(root) as sessions:
        for name in ("ada", "bob"):
            async with sessions.open(name) as session, session.turn():
                session.append(Message.user("Hello"), Message.user("there"))
    (log,) = root.glob("agents/ada/**/log/*.jsonl")
    log.write_bytes(log.read_bytes().replace(b"Hello", b"Jello"))
    store = perdure.store_for(root)
    await store.open()
    try:
        workload = await observed(store)
    finally:
        await store.aclose()
    assert len(workload.sessions) == 1


async def test_reading_ends_with_enough(tmp_path: Path) -> None:
    store = perdure.store_for(tmp_path / "store")
    async with perdure.connect(store) as sessions:
        for n in range(6):
            async with sessions.open(f"a{n}") as session, session.turn():
                session.append(*[Message.user("Hello")] * 8)
        assert len((await observed(store, most=12)).sessions) == 2


def test_nothing_is_an_empty_workload() -> None:
    workload = workload_of([], "nobody")
    assert (workload.changes, workload.size, workload.seconds) == (0, 0, 0)


@pytest.mark.parametrize("size", [1, 1000])
def test_the_size_is_the_average(size: int) -> None:
    assert workload_of([[WorkloadChange(0, size), WorkloadChange(1, size)]], "x").size == size


def test_a_recording_s_end_cuts_what_waits() -> None:
    """The second session waits with its change until the recording is over, not for a minute."""
    workload = workload_of(of([0.0, 20.0, 40.0], [0.0, 30.0], ends_turn=True), "x")
    patient = replay(workload, Autosave(debounce=60, max_delay=300, on_turn_end=False))
    assert patient.saves == 0
    end = 40 + (20 + 20 + 30) / 3
    assert workload.ends == (end, 40)
    assert patient.worst == end
    assert patient.lost * workload.seconds == pytest.approx(3 * end - 60 + 40 + 10)


async def test_the_sessions_of_a_day_are_drawn_by_chance(tmp_path: Path) -> None:
    """Those with the newest change are the ones that change most often."""
    store = perdure.store_for(tmp_path / "store")
    async with perdure.connect(store) as sessions:
        for n in range(20):
            async with sessions.open(f"a{n:02}") as session, session.turn():
                session.append(*[Message.user("x")] * (n + 1))
        workload = await observed(store, most=60)
    counts = [len(changes) for changes in workload.sessions]
    assert counts != sorted(counts, reverse=True)
    assert min(counts) < 10
