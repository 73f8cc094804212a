from __future__ import annotations

import anyio
import pytest

from perdure import Autosave, Message, SessionClosedError
from perdure.errors import ConfigError
from perdure.testing.sandbox import ManualClock, Sandbox

HELLO = Message.user("Hello")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
async def sandbox(clock):
    async with Sandbox(clock=clock, autosave=Autosave(debounce=2, max_delay=10)) as sandbox:
        yield sandbox


@pytest.fixture
async def session(sandbox):
    return await sandbox.sessions.open("mia")


def watch(sandbox, event, clock):
    """Return a list that grows by the time of each such event."""
    times: list[float] = []
    sandbox.sessions.on(event, lambda _: times.append(clock()))
    return times


async def test_nothing_is_saved_before_its_time(session, clock):
    session.append(HELLO)
    await clock.advance(1.9)
    assert session.durable_version < session.version


async def test_a_change_is_saved_when_its_debounce_is_over(session, clock):
    session.append(HELLO)
    await clock.advance(2)
    assert session.durable_version == session.version


async def test_a_steady_stream_is_saved_at_the_ceiling(session, clock, sandbox):
    saved = watch(sandbox, "saved", clock)
    for _ in range(11):
        session.append(HELLO)
        await clock.advance(1)
    assert len(saved) == 1
    assert 9.9 <= saved[0] <= 10


async def test_everything_happens_at_its_own_time_in_one_long_step(sandbox, session, clock):
    saved = watch(sandbox, "saved", clock)
    slow = await sandbox.sessions.open("leo", autosave=Autosave(debounce=20, max_delay=20))
    session.append(HELLO)
    slow.append(HELLO)
    await clock.advance(60)
    assert [round(at) for at in saved] == [2, 20]
    assert clock() == 60


async def test_retries_keep_their_distances_while_the_store_is_down(sandbox, session, clock):
    failed = watch(sandbox, "save_failed", clock)
    session.append(HELLO)
    sandbox.store.down()
    await clock.advance(600)
    assert 1 < failed[0] <= 2
    assert failed == sorted(failed)
    assert 600 / 15 < len(failed) < 600
    sandbox.store.up()
    await clock.advance(15)
    assert session.durable_version == session.version


async def test_an_idle_session_has_left_memory_when_its_time_has_passed(sandbox, clock):
    closed = watch(sandbox, "closed", clock)
    async with sandbox.sessions.open("leo") as session:
        session.append(HELLO)
    await clock.advance(299)
    assert closed == []
    await clock.advance(11)
    assert len(closed) == 1
    with pytest.raises(SessionClosedError, match="idle"):
        session.append(HELLO)


async def test_a_session_in_use_is_not_idle(sandbox, session, clock):
    await clock.advance(3600)
    session.append(HELLO)
    assert session.version == 2
    assert sandbox.sessions.health().status == "ok"


async def test_work_between_two_steps_is_done_by_the_second(session, clock):
    for _ in range(3):
        session.append(HELLO)
        await clock.advance(5)
        assert session.durable_version == session.version


async def test_a_save_needs_no_clock(session, clock):
    session.append(HELLO)
    await session.save()
    assert clock() == 0


async def test_the_same_test_runs_the_same_way_again():
    runs = []
    for _ in range(2):
        clock = ManualClock()
        async with Sandbox(clock=clock) as sandbox:
            failed = watch(sandbox, "save_failed", clock)
            session = await sandbox.sessions.open("mia")
            sandbox.store.down()
            session.append(HELLO)
            await clock.advance(60)
        runs.append(failed)
    assert runs[0] == runs[1] != []


async def test_contributors_are_asked_before_advance_returns(sandbox, clock):
    async def contribute(session):
        await anyio.lowlevel.checkpoint()
        asked.append(session.id)

    asked: list[str] = []
    sandbox.sessions.on("before_save", contribute)
    session = await sandbox.sessions.open("ada")
    session.append(HELLO)
    await clock.advance(2)
    assert asked == ["ada"]
    assert session.durable_version == session.version


async def test_advance_waits_for_a_store_that_works_in_threads(tmp_path, clock):
    from perdure.stores.file import FileStore

    async with Sandbox(clock=clock, store=lambda: FileStore(tmp_path)) as sandbox:
        session = await sandbox.sessions.open("mia")
        session.append(HELLO)
        await clock.advance(2)
        assert session.durable_version == session.version
        sessions = await sandbox.reopen()
        assert (await sessions.open("mia")).context() == session.context()


async def test_a_manager_may_close_while_its_time_goes_on(sandbox, session, clock):
    session.append(HELLO)
    async with anyio.create_task_group() as group:
        group.start_soon(clock.advance, 100)
        group.start_soon(sandbox.sessions.aclose)
    assert session.durable_version == session.version
    assert clock() == 100


async def test_it_moves_without_a_manager():
    clock = ManualClock(100)
    await clock.advance(0.5)
    assert clock() == 100.5


async def test_it_drives_a_manager_that_came_after_a_crash(sandbox, clock):
    sessions = await sandbox.reopen()
    session = await sessions.open("mia")
    session.append(HELLO)
    await clock.advance(2)
    assert session.durable_version == session.version


async def test_two_who_move_it_at_once_do_not_turn_it_back(session, clock):
    session.append(HELLO)
    async with anyio.create_task_group() as group:
        group.start_soon(clock.advance, 10)
        group.start_soon(clock.advance, 5)
    assert clock() == 10


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan")])
async def test_it_does_not_go_back_nor_to_the_end_of_time(clock, seconds):
    with pytest.raises(ConfigError, match="advance"):
        await clock.advance(seconds)


async def test_advancing_does_not_wait_for_a_turn_that_somebody_else_has_to_end(
    sandbox, session, clock
):
    async with anyio.create_task_group() as group:
        async with session.turn():
            session.append(HELLO)
            group.start_soon(session.aclose)
            await anyio.wait_all_tasks_blocked()
            await clock.advance(30)
            assert session.durable_version == session.version
