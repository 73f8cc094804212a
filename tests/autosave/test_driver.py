"""What the engine does for its callers, in virtual time."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from perdure.autosave import events
from perdure.autosave.core import size_of
from perdure.autosave.options import DEBOUNCE, Autosave, EngineOptions
from perdure.autosave.schedule import BUSY, Schedule
from perdure.autosave.tracked import State, Tracked
from perdure.errors import (
    LeaseLostError,
    SessionClosedError,
    SessionError,
    SessionQuarantinedError,
    StoreUnavailableError,
    UnsavedChangesError,
)
from tests.autosave.inline_store import InlineStore
from tests.autosave.rigs import CALM, PLAIN, Clock, Rig, entry, rig, within


def starts(r: Rig, t: Tracked) -> list[float]:
    return [round(write.began, 6) for write in r.store.writes.get(t.key, [])]


# when


async def test_changes_within_the_debounce_are_one_save() -> None:
    async with rig() as r:
        t, zero = r.track(), anyio.current_time()
        for _ in range(4):
            r.append(t)
            await anyio.sleep(1.5)
        await anyio.sleep(10)
        assert starts(r, t) == [round(zero + 6.5, 6)]
        assert r.stored(t) == 4


async def test_a_stream_without_pauses_is_saved_every_longest_delay() -> None:
    async with rig() as r:
        t, zero = r.track(), anyio.current_time()
        for _ in range(25):
            r.append(t)
            await anyio.sleep(0.9)
        assert starts(r, t) == [round(zero + 10, 6), round(zero + 20.8, 6)]


async def test_a_clean_session_is_not_saved() -> None:
    async with rig() as r:
        t = r.track()
        assert await r.saver.save(t) == 0
        await r.saver.flush()
        r.saver.turn_ended(t)
        r.saver.append(t, ())
        await anyio.sleep(100)
        assert r.store.calls == []


async def test_as_much_as_max_bytes_is_saved_at_once_each_time() -> None:
    """What an earlier save has taken counts no more, nor does anything else of it."""
    size = size_of([entry(size=100)])
    async with rig(autosave=Autosave(debounce=60.0, max_delay=60.0, max_bytes=2 * size)) as r:
        t, zero = r.track(), anyio.current_time()
        for number in range(1, 4):
            r.append(t, size=100)
            await anyio.sleep(1)
            assert len(r.store.calls) == number - 1
            r.append(t, size=100)
            assert await r.saver.wait_durable(t) == 2 * number
            assert anyio.current_time() == zero + number


async def test_save_does_not_wait_for_the_debounce() -> None:
    async with rig() as r:
        t, zero = r.track(), anyio.current_time()
        r.append(t)
        assert await r.saver.save(t) == 1
        assert anyio.current_time() == zero


async def test_waiting_does_not_hurry_a_save() -> None:
    async with rig() as r:
        t, zero = r.track(), anyio.current_time()
        r.append(t)
        assert await r.saver.wait_durable(t) == 1
        assert anyio.current_time() == pytest.approx(zero + 2, abs=0.06)


async def test_saves_that_are_asked_for_together_are_one_batch() -> None:
    async with rig() as r:
        sessions = [r.track(str(n)) for n in range(20)]
        async with anyio.create_task_group() as group:
            for t in sessions:
                r.append(t)
                group.start_soon(r.saver.save, t)
        assert sum(len(call) for call in r.store.calls) == 20
        assert len(r.store.calls) <= 2


async def two_saves_each(sessions: int) -> list[int]:
    """Return the sizes of the batches."""
    async with rig(InlineStore(parallelism=1, batch_max=2, latency=(1.0,))) as r:

        async def talk(t: Tracked) -> None:
            for _ in range(2):
                r.append(t)
                await r.saver.save(t)

        async with anyio.create_task_group() as group:
            for n in range(sessions):
                group.start_soon(talk, r.track(str(n)))
        return [len(call) for call in r.store.calls]


async def test_a_full_batch_waits_for_nobody() -> None:
    sizes = await two_saves_each(4)
    assert sizes == [1, 2, 2, 2, 1]


async def test_many_callers_are_woken_a_few_at_a_time() -> None:
    steps = 0
    woken: dict[int, int] = {}

    async def count() -> None:
        nonlocal steps
        while True:
            steps += 1
            await checkpoint()

    async def save(r: Rig, t: Tracked) -> None:
        r.append(t)
        await r.saver.save(t)
        woken[steps] = woken.get(steps, 0) + 1

    async with rig(InlineStore(parallelism=1, batch_max=64)) as r:
        async with anyio.create_task_group() as counting:
            counting.start_soon(count)
            async with anyio.create_task_group() as group:
                for n in range(64):
                    group.start_soon(save, r, r.track(str(n)))
            counting.cancel_scope.cancel()
        assert [len(call) for call in r.store.calls] == [1, 63]
    assert sum(woken.values()) == 64
    assert max(woken.values()) <= 16


@pytest.mark.deep
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio runs its tasks in any order
async def test_less_than_a_full_batch_lets_others_join() -> None:
    sizes = await two_saves_each(3)
    assert sizes == [1, 2, 2, 1]


async def test_a_batch_waits_in_the_store_s_queue_once_it_is_half_full() -> None:
    store = InlineStore(parallelism=1, queue_depth=1, batch_max=4, latency=(0.0,))
    async with rig(store) as r:
        sessions = [r.track(str(n)) for n in range(4)]

        async def begun(t: Tracked) -> list[int]:
            r.append(t)
            group.start_soon(r.saver.save, t)
            await anyio.sleep(0.1)
            return [len(call) for call in store.calls]

        async with anyio.create_task_group() as group:
            r.append(sessions[0])
            await r.saver.save(sessions[0])  # so that it is known to be fast
            store.latency = [1.0]
            assert await begun(sessions[0]) == [1, 1]
            assert await begun(sessions[1]) == [1, 1]
            assert await begun(sessions[2]) == [1, 1, 2]
            assert await begun(sessions[3]) == [1, 1, 2]
        assert [len(call) for call in store.calls] == [1, 1, 2, 1]


async def test_nothing_waits_in_the_queue_of_a_slow_store() -> None:
    """What waits there counts against the timeout, and delays its own repetition."""
    store = InlineStore(parallelism=1, queue_depth=3, batch_max=2, latency=(6.0,))
    async with rig(store, engine=EngineOptions(save_timeout=10.0)) as r:
        async with anyio.create_task_group() as group:
            for n in range(6):
                t = r.track(str(n))
                r.append(t)
                group.start_soon(r.saver.save, t)
        assert [len(call) for call in store.calls] == [1, 2, 2, 1]


async def test_a_turn_s_end_saves_unless_told_otherwise() -> None:
    async with rig() as r:
        eager = r.track("eager")
        patient = r.track("patient", autosave=Autosave(on_turn_end=False))
        for t in (eager, patient):
            r.append(t)
            r.saver.turn_ended(t)
        await anyio.sleep(0.1)
        assert (r.stored(eager), r.stored(patient)) == (1, 0)


async def test_without_timers_only_boundaries_save() -> None:
    async with rig(autosave=None) as r:
        t = r.track()
        r.append(t)
        await anyio.sleep(1000)
        assert r.stored(t) == 0
        r.saver.turn_ended(t)
        await anyio.sleep(0.1)
        assert r.stored(t) == 1
        r.append(t)
        await r.saver.flush()
        assert r.stored(t) == 2
        r.append(t)
        assert (await r.saver.aclose(within(1, 0))).clean


async def test_a_flush_waits_for_what_was_there_and_nothing_later() -> None:
    async with rig(InlineStore(latency=(1.0,)), autosave=None) as r:
        t = r.track()
        r.append(t)
        zero = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(r.saver.flush)
            await anyio.sleep(0.5)
            r.append(t)
        assert anyio.current_time() == zero + 1
        assert (r.stored(t), t.durable, t.version) == (1, 1, 2)


async def test_tuning_takes_effect_on_what_is_unsaved() -> None:
    async with rig(autosave=Autosave(debounce=20, max_delay=30)) as r:
        mine, other = r.track("mine"), r.track("other", autosave=Autosave(debounce=20))
        r.append(mine)
        r.append(other)
        r.saver.tune(Autosave(debounce=1, max_delay=2))
        await anyio.sleep(1.1)
        assert (r.stored(mine), r.stored(other)) == (1, 0)
        r.saver.tune_one(other, Autosave(debounce=3, max_delay=3))
        await anyio.sleep(2)
        assert r.stored(other) == 1


async def test_an_idle_store_shortens_the_debounce() -> None:
    async with rig(autosave=Autosave(), engine=EngineOptions(jitter=0)) as r:
        t = r.track()
        for _ in range(30):
            r.append(t)
            await anyio.sleep(5)
        r.append(t)
        zero = anyio.current_time()
        await r.saver.wait_durable(t)
        assert 0.05 <= anyio.current_time() - zero < 1.0


# groups


async def test_what_is_appended_in_a_group_is_saved_at_once_and_as_one() -> None:
    async with rig(autosave=Autosave.write_through()) as r:
        t = r.track()
        with r.saver.grouped(t):
            r.append(t, 2)
            r.append(t)
        await r.saver.wait_durable(t)
        assert [one.end for one in r.store.logs[t.key]] == [False, False, True]


async def test_a_group_behind_a_save_in_flight_is_one() -> None:
    async with rig(autosave=Autosave.write_through()) as r:
        t = r.track()
        r.append(t)
        await anyio.lowlevel.checkpoint()
        assert t.inflight == 1
        with r.saver.grouped(t):
            r.append(t)
            r.append(t)
        await r.saver.wait_durable(t)
        assert [one.end for one in r.store.logs[t.key]] == [True, False, True]


async def test_groups_within_a_group_are_one() -> None:
    async with rig() as r:
        t = r.track()
        with r.saver.grouped(t):
            r.append(t)
            with r.saver.grouped(t):
                r.append(t)
            r.append(t)
        await r.saver.save(t)
        assert [one.end for one in r.store.logs[t.key]] == [False, False, True]


async def test_what_a_group_has_accepted_before_it_fails_is_one() -> None:
    async with rig() as r:
        t = r.track()
        with pytest.raises(ZeroDivisionError), r.saver.grouped(t):
            r.append(t)
            r.append(t)
            _ = 1 / 0
        await r.saver.save(t)
        assert [one.end for one in r.store.logs[t.key]] == [False, True]


# what goes wrong


async def test_an_outage_is_three_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "perdure.autosave")
    async with rig() as r:
        sessions = [r.track(str(n)) for n in range(10)]
        r.store.down = True
        for t in sessions:
            r.append(t)
            await anyio.sleep(1)
        await anyio.sleep(600)
        assert r.saver.health().breaker == "open"
        r.store.down = False
        await anyio.sleep(60)
        assert r.saver.health().status == "ok"
    failed, down, works = [record.message for record in caplog.records]
    assert failed.startswith("autosave failed, and is retried (session=0, attempt=1, ")
    assert failed.endswith("): down")
    assert down == "the store counts as down, unsaved changes pile up (unsaved=4): down"
    assert works == "autosave works again"
    assert not any(record.exc_info for record in caplog.records)  # debug has the tracebacks


async def test_a_store_that_is_down_gets_probes_only() -> None:
    async with rig() as r:
        sessions = [r.track(str(n)) for n in range(100)]
        r.store.down = True
        for t in sessions:
            r.append(t)
        await anyio.sleep(60)
        before = len(r.store.calls)
        await anyio.sleep(100)
        probes = r.store.calls[before:]
        assert 20 <= len(probes) <= 41
        assert {len(call) for call in probes} == {1}
        r.store.down = False
        await r.saver.flush()
        assert sum(map(r.stored, sessions)) == 100
        sizes = [len(call) for call in r.store.calls[before + len(probes) :]]
        assert sizes[:4] == [1, 2, 4, 8]


async def test_what_is_with_the_store_makes_nothing_full() -> None:
    calm = Autosave(debounce=5.0, max_delay=20.0, max_bytes=1500)
    async with rig(InlineStore(latency=(2.0,)), autosave=calm) as r:
        t, zero = r.track(), anyio.current_time()
        r.append(t, size=2000)  # full: it goes at once, and is under way for two seconds
        await anyio.sleep(1)
        r.append(t, size=10)
        await r.saver.wait_durable(t)
        assert anyio.current_time() >= zero + 6
        assert len(r.store.calls) == 2


async def test_a_record_by_itself_is_a_group_whatever_it_says() -> None:
    async with rig() as r:
        t = r.track()
        r.saver.append(t, (entry(1)._replace(end=False),))
        assert await r.saver.save(t) == 1
        assert [one.end for one in r.store.logs[t.key]] == [True]


@pytest.mark.parametrize("busy", [BUSY, 1.0])
def test_a_store_that_was_busy_for_long_shortens_the_debounce_as_soon_as_it_is_idle(
    busy: float,
) -> None:
    schedule = Schedule(PLAIN, lambda: 0.5)
    for _ in range(100):
        schedule.control(busy)
    assert schedule.debounce == DEBOUNCE
    schedule.control(0.0)
    assert schedule.debounce < DEBOUNCE


SLOWLY = EngineOptions(
    jitter=0, eager=False, backoff_base=40.0, backoff_cap=40.0, breaker_failures=99
)
"""A failed save is tried again after a long time; the store's own health does not count."""


@pytest.mark.parametrize("ends", [False, True], ids=["within a turn", "turns end"])
async def test_a_failed_session_waits_for_its_backoff_whatever_is_appended(ends: bool) -> None:
    async with rig(engine=SLOWLY) as r:
        t = r.track()
        r.store.down = True
        for _ in range(60):
            r.append(t)
            if ends:
                r.saver.turn_ended(t)
            await anyio.sleep(1)
        assert 1 <= len(r.store.calls) <= 12
        r.store.down = False


@pytest.mark.parametrize("way", ["alone", "queued"])
async def test_whoever_waits_for_a_save_waits_for_no_backoff(way: str) -> None:
    async with rig(InlineStore(faults=["down"]), engine=SLOWLY) as r:
        t, zero = r.track(), anyio.current_time()
        if way == "queued":  # whose contributors are asked passes no queue by
            t.before_capture = partial(anyio.sleep, 0)
        r.append(t)
        await anyio.sleep(2.1)
        (failed,) = r.of(events.SaveFailed)
        assert failed.retry_in > 1
        assert await r.saver.save(t) == 1
        assert anyio.current_time() < zero + 2.2


@pytest.mark.parametrize("way", ["alone", "queued"])
async def test_a_refused_group_is_looked_for_without_the_backoff_of_a_failure(way: str) -> None:
    async with rig(InlineStore(faults=["down"]), engine=SLOWLY) as r:
        t = r.track()
        if way == "queued":
            t.before_capture = partial(anyio.sleep, 0)
        r.store.poison.add((t.key, 3))
        for _ in range(4):
            r.append(t)
        r.saver.turn_ended(t)
        await anyio.sleep(0.1)
        assert len(r.of(events.SaveFailed)) == 1
        asked = anyio.current_time()
        with pytest.raises(SessionQuarantinedError, match="record 3"):
            await r.saver.save(t)
        assert (anyio.current_time(), t.durable) == (asked, 2)


async def test_a_process_that_ends_tries_again_within_seconds() -> None:
    store = InlineStore(faults=["down", "down"])
    async with rig(store, engine=SLOWLY) as r:
        sessions = [r.track(str(n)) for n in range(2)]
        for t in sessions:
            r.append(t)
        report = await r.saver.aclose(within(5, 1))
        assert report.clean
        assert all(event.retry_in <= 1 for event in r.of(events.SaveFailed))
        assert len(store.calls) >= 3


async def test_a_warning_about_the_store_is_told_at_once_and_once() -> None:
    async with rig() as r:
        for reasons, count in ((("a", "b"), 2), (("a", "b"), 2), (("b", "c"), 3), ((), 3)):
            r.saver.warn(reasons)
            assert [event.reason for event in r.of(events.StoreWarned)] == ["a", "b", "c"][:count]
            assert r.saver.health().reasons == reasons
        r.saver.warn(("a",))
        assert [event.reason for event in r.of(events.StoreWarned)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("flushes", [False, True])
async def test_what_comes_while_the_engine_drains_is_saved_at_once(flushes: bool) -> None:
    async with rig() as r:
        t, began = r.track(), anyio.current_time()
        r.saver.begin_drain()
        for version in (1, 2):
            if flushes:
                assert await r.saver.flush()
                await anyio.sleep(1)
                began = anyio.current_time()
            r.append(t)
            assert await r.saver.wait_durable(t) == version
        assert anyio.current_time() == began


async def test_a_job_holds_back_a_save_that_is_due_already() -> None:
    """It had its place among those that wait for the store when the job began."""
    async with rig(InlineStore(parallelism=1, batch_max=1, latency=(5.0,))) as r:
        first, t = r.track("first"), r.track("t")
        ran: list[int] = []

        async def job() -> None:
            await anyio.sleep(30)
            ran.append(len(r.store.calls))

        r.append(first)
        async with anyio.create_task_group() as group:
            group.start_soon(r.saver.save, first)
            await anyio.sleep(1)
            r.append(t)
            r.saver.turn_ended(t)
            await anyio.sleep(1)
            await r.saver.exclusive(t, job, urgent=True)
            assert ran == [1]
        assert await r.saver.save(t) == 1


async def test_what_was_in_doubt_once_stays_so_until_it_is_known() -> None:
    """Five records got no answer; what gets none the next time is less of them."""
    store = InlineStore(faults=["lost", "ok", "lost", *["down"] * 99])
    async with rig(store) as r:
        t = r.track()
        r.store.poison.add((t.key, 5))
        for _ in range(5):
            r.append(t)
        await anyio.sleep(30)
        assert [len(call[0].records) for call in store.calls][:3] == [5, 5, 2]
        report = await r.saver.aclose(within(0, 0))
        assert [one.in_doubt_to for one in report.in_doubt] == [5]


async def test_a_save_that_hangs_is_given_up_and_sent_again() -> None:
    store = InlineStore(faults=["hang_applied", "hang"])
    async with rig(store) as r:
        t, zero = r.track(), anyio.current_time()
        r.append(t)
        assert await r.saver.save(t) == 1
        assert 20 <= anyio.current_time() - zero < 22
        failed = r.of(events.SaveFailed)
        assert [event.in_doubt for event in failed] == [True, True]
        assert all("did not answer within" in str(event.error) for event in failed)


async def test_an_engine_that_stops_takes_nothing_more() -> None:
    async with rig(InlineStore(latency=(5.0,))) as r:
        t = r.track()
        r.append(t)
        async with anyio.create_task_group() as group:
            group.start_soon(partial(r.saver.aclose, within(20.0, 1.0)))
            await anyio.sleep(1)
            with pytest.raises(SessionClosedError):
                r.append(t)
        assert r.stored(t) == 1


async def test_an_engine_whose_time_is_over_begins_no_save() -> None:
    async with rig(InlineStore(parallelism=1, batch_max=1)) as r:
        r.store.stuck = True
        sessions = [r.track(str(n)) for n in range(3)]
        for t in sessions:
            r.append(t)
        report = await r.saver.aclose(within(1, 30))
        assert not report.clean
        assert len(r.store.calls) == 1


@pytest.mark.parametrize("hard_grace", [0.5, 2.0])
async def test_a_save_that_runs_at_the_deadline_has_the_hard_grace(hard_grace: float) -> None:
    async with rig(InlineStore(latency=(2.5,))) as r:
        t = r.track()
        r.append(t)
        began = anyio.current_time()
        report = await r.saver.aclose(within(1, hard_grace))
        assert anyio.current_time() - began <= 1 + hard_grace
        assert report.clean is (hard_grace > 1.5)
        if not report.clean:
            assert "before the manager was closed" in str(r.of(events.SaveFailed)[-1].error)


async def test_a_refused_group_is_quarantined_and_those_before_it_are_saved() -> None:
    async with rig() as r:
        t, other = r.track(), r.track("other")
        r.store.poison.add((t.key, 6))
        for _ in range(9):
            r.append(t)
        r.append(other)
        with pytest.raises(SessionQuarantinedError, match="record 6"):
            await r.saver.save(t)
        assert (r.stored(t), t.state) == (5, State.QUARANTINED)
        assert await r.saver.save(other) == 1
        assert r.append(t) == 10
        with pytest.raises(SessionQuarantinedError):
            await r.saver.wait_durable(t, 6)
        (event,) = r.of(events.Quarantined)
        assert (event.seq, event.unsaved) == (6, 4)


async def test_quarantine_holds_no_more_than_its_share() -> None:
    async with rig(engine=EngineOptions(quarantine_bytes=500)) as r:
        t = r.track()
        r.store.poison.add((t.key, 1))
        r.append(t)
        with pytest.raises(SessionQuarantinedError):
            await r.saver.save(t)
        with pytest.raises(SessionQuarantinedError, match="refuses record 1"):
            for _ in range(20):
                r.append(t)
        assert t.pending_bytes < 700


@pytest.mark.parametrize("autosave", [CALM, None], ids=["timed", "without timers"])
async def test_retry_sends_a_quarantined_session_again_at_once(autosave: Autosave | None) -> None:
    async with rig(autosave=autosave) as r:
        t = r.track()
        r.store.poison.add((t.key, 1))
        for _ in range(3):
            r.append(t)
        with pytest.raises(SessionQuarantinedError):
            await r.saver.save(t)
        r.store.poison.clear()
        asked, calls = anyio.current_time(), len(r.store.calls)
        r.saver.retry(t)
        assert await r.saver.wait_durable(t) == 3
        assert (anyio.current_time(), len(r.store.calls)) == (asked, calls + 1)
        assert r.saver.health().status == "ok"


async def test_retry_waits_for_no_backoff() -> None:
    async with rig(InlineStore(faults=["down"]), engine=SLOWLY) as r:
        t = r.track()
        r.append(t)
        await anyio.sleep(3)
        (failed,) = r.of(events.SaveFailed)
        assert failed.retry_in > 1
        asked = anyio.current_time()
        r.saver.retry(t)
        assert await r.saver.wait_durable(t) == 1
        assert anyio.current_time() == asked


async def test_discard_forgets_and_goes_on_behind_what_is_durable() -> None:
    async with rig() as r:
        t = r.track()
        r.append(t)
        await r.saver.save(t)
        r.store.poison.add((t.key, 2))
        r.append(t, 3)
        with pytest.raises(SessionQuarantinedError):
            await r.saver.save(t)
        assert r.saver.discard(t) == 3
        assert (t.state, r.saver.health().unsaved_bytes) == (State.CLEAN, 0)
        r.store.poison.clear()
        assert r.append(t) == 2
        assert await r.saver.save(t) == 2
        with pytest.raises(SessionError, match="clean"):
            r.saver.discard(t)


async def test_what_was_discarded_counts_no_more_and_hurries_nothing() -> None:
    async with rig() as r:
        t = r.track()
        for _ in range(2):
            r.store.poison.add((t.key, 1))
            r.append(t, 3)
            with pytest.raises(SessionQuarantinedError):
                await r.saver.save(t)
            r.append(t)
            r.saver.turn_ended(t)
            assert r.saver.discard(t) == 4
            assert (r.saver.health().unsaved_bytes, t.last_error) == (0, None)
        r.store.poison.clear()
        zero = anyio.current_time()
        r.append(t)
        assert await r.saver.wait_durable(t) == 1
        assert anyio.current_time() == pytest.approx(zero + 2, abs=0.06)


async def test_a_late_answer_of_what_was_discarded_makes_nothing_durable() -> None:
    async with rig(InlineStore(latency=(5.0,))) as r:
        t = r.track()
        r.append(t, 3)
        await anyio.sleep(3)
        assert t.inflight == 3
        r.saver.lose(t)
        assert r.saver.discard(t) == 3
        await anyio.sleep(10)
        assert (t.durable, t.version, r.saver.health().unsaved_bytes) == (0, 0, 0)


async def test_one_session_that_spoils_a_batch_does_not_stop_the_others() -> None:
    async with rig() as r:
        sessions = [r.track(str(n)) for n in range(8)]
        r.store.spoiled.add(sessions[5].key)
        for t in sessions:
            r.append(t)
        await r.saver.flush()
        states = [t.state for t in sessions]
        assert states == [State.CLEAN] * 5 + [State.QUARANTINED] + [State.CLEAN] * 2


async def test_a_long_backlog_is_saved_in_parts() -> None:
    async with rig(engine=EngineOptions(jitter=0, batch_bytes=1000)) as r:
        t = r.track()
        for _ in range(10):
            r.append(t, 2, size=200)
        assert await r.saver.save(t) == 20
        assert [len(call[0].records) for call in r.store.calls] == [2] * 10


async def test_the_rest_of_a_backlog_waits_for_no_debounce() -> None:
    """It was due for its size, and a part of it went into the first batch."""
    calm = Autosave(debounce=2.0, max_delay=10.0, max_bytes=1500)
    async with rig(autosave=calm, engine=EngineOptions(jitter=0, batch_bytes=1000)) as r:
        t, zero = r.track(), anyio.current_time()
        for _ in range(3):
            r.append(t, 2, size=200)
        await r.saver.wait_durable(t, 6)
        assert anyio.current_time() < zero + 1
        assert len(r.store.calls) == 3


async def test_a_batch_takes_no_further_session_beyond_its_bytes() -> None:
    async with rig(engine=EngineOptions(jitter=0, batch_bytes=1000)) as r:
        sessions = [r.track(str(n)) for n in range(6)]
        for t in sessions:
            r.append(t, size=600)
        await r.saver.flush()
        assert [len(call) for call in r.store.calls] == [2, 2, 2]


async def test_a_hook_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("the hook's own")

    async with rig() as r:
        t = r.track()
        t.heard_by = SimpleNamespace(saved=fail)
        r.append(t)
        assert await r.saver.save(t) == 1
        assert r.append(t) == 2
        assert await r.saver.save(t) == 2
    assert "a hook failed" in caplog.text


async def test_a_lost_session_tells_its_owner() -> None:
    told: list[str] = []
    async with rig() as r:
        t = r.track()
        t.heard_by = SimpleNamespace(lost=lambda _: told.append("lost"))
        r.append(t)
        r.saver.lose(t)
        r.saver.lose(t)
        assert told == ["lost"]
        assert r.saver.health().unsaved_bytes == 0
        r.saver.untrack(t)
        await anyio.sleep(100)
        assert r.store.calls == []


# pressure


async def test_above_the_soft_limit_nothing_waits_for_its_debounce() -> None:
    async with rig(engine=EngineOptions(jitter=0, eager=False, dirty_soft=1000)) as r:
        sessions = [r.track(str(n)) for n in range(4)]
        for t in sessions:
            r.append(t, size=300)
        await anyio.sleep(0.1)
        assert r.stored(sessions[0]) == 0 or len(r.of(events.Degraded)) == 1
        r.append(sessions[0])
        await anyio.sleep(0.1)
        assert all(r.stored(t) for t in sessions)
        (event,) = r.of(events.Degraded)
        assert not event.blocking
        r.append(sessions[1])
        await anyio.sleep(1)
        assert r.stored(sessions[1]) == 1


async def test_reject_raises_and_says_why() -> None:
    engine = EngineOptions(dirty_soft=100, dirty_hard=500, outage_policy="reject")
    async with rig(engine=engine) as r:
        t = r.track()
        r.store.down = True
        for _ in range(5):
            r.append(t, size=30)
        await anyio.sleep(30)
        with pytest.raises(StoreUnavailableError, match="bytes are unsaved") as caught:
            r.append(t, size=20)
        assert isinstance(caught.value.__cause__, StoreUnavailableError)
        with pytest.raises(StoreUnavailableError):
            await r.saver.room(t)
        assert r.saver.health().status == "failing"


async def test_room_comes_when_the_store_is_back() -> None:
    async with rig(engine=EngineOptions(dirty_soft=100, dirty_hard=500)) as r:
        t = r.track()
        r.store.down = True
        for _ in range(5):
            r.append(t, size=30)
        with pytest.raises(StoreUnavailableError):
            r.append(t, size=20)
        async with anyio.create_task_group() as group:
            group.start_soon(r.saver.room, t)
            await anyio.sleep(5)
            assert r.append if t.granted else True
            assert not t.granted
            r.store.down = False
        assert t.granted
        assert r.append(t, size=20) == 6


async def test_what_is_discarded_makes_room() -> None:
    async with rig(engine=EngineOptions(dirty_soft=100, dirty_hard=200)) as r:
        t, other = r.track(), r.track("other")
        r.store.poison.add((t.key, 1))
        r.append(t, size=200)
        with pytest.raises(SessionQuarantinedError):
            await r.saver.save(t)
        with pytest.raises(StoreUnavailableError):
            r.append(other)
        async with anyio.create_task_group() as group:
            group.start_soon(r.saver.room, other)
            await anyio.sleep(5)
            assert not other.granted
            asked = anyio.current_time()
            assert r.saver.discard(t) == 1
        assert other.granted
        assert anyio.current_time() == asked
        assert r.append(other) == 1


async def test_no_room_in_time_is_an_error() -> None:
    async with rig(engine=EngineOptions(dirty_soft=1, dirty_hard=50, backpressure_timeout=7)) as r:
        t, zero = r.track(), anyio.current_time()
        r.store.down = True
        r.append(t)
        with pytest.raises(StoreUnavailableError):
            await r.saver.room(t)
        assert anyio.current_time() == zero + 7


async def test_a_failing_session_s_age_blocks_until_it_is_saved() -> None:
    async with rig(engine=EngineOptions(max_unsaved_age=50, outage_policy="reject")) as r:
        t = r.track()
        r.store.down = True
        r.append(t)
        await anyio.sleep(40)
        r.append(t)
        await anyio.sleep(30)
        with pytest.raises(StoreUnavailableError):
            r.append(t)
        assert r.of(events.Degraded)[-1].blocking
        r.store.down = False
        await r.saver.flush()
        assert r.append(t) == 3


async def test_the_last_failing_session_that_goes_lets_the_others_append_again() -> None:
    async with rig(engine=EngineOptions(max_unsaved_age=50, backpressure_timeout=60)) as r:
        gone, other = r.track("gone"), r.track("other")
        r.store.down = True
        r.append(gone)
        await anyio.sleep(70)
        with pytest.raises(StoreUnavailableError):
            r.append(other)
        async with anyio.create_task_group() as group:
            group.start_soon(r.saver.room, other)
            await r.saver.abandon(gone)
        r.store.down = False
        r.append(other)
        assert await r.saver.save(other) == 1


async def test_continue_never_blocks() -> None:
    engine = EngineOptions(dirty_soft=1, dirty_hard=1, max_unsaved_age=1, outage_policy="continue")
    async with rig(engine=engine) as r:
        t = r.track()
        r.store.down = True
        for n in range(1, 50):
            await r.saver.room(t)
            assert r.append(t) == n
            await anyio.sleep(1)


# coming and going


async def test_untrack_refuses_what_may_still_be_saved() -> None:
    async with rig() as r:
        t = r.track()
        r.append(t)
        with pytest.raises(UnsavedChangesError, match="1 records"):
            r.saver.untrack(t)
        await r.saver.save(t)
        r.saver.untrack(t)
        with pytest.raises(SessionClosedError):
            r.append(t)
        assert r.saver.health().sessions == 0


async def test_abandon_waits_for_a_save_under_way_and_writes_no_more() -> None:
    async with rig(InlineStore(latency=(3.0,))) as r:
        t, zero = r.track(), anyio.current_time()
        r.append(t)
        r.saver.turn_ended(t)
        await anyio.sleep(1)
        r.append(t)
        await r.saver.abandon(t)
        assert anyio.current_time() == zero + 3
        await anyio.sleep(100)
        assert r.stored(t) == 1
        assert r.saver.health().unsaved_bytes == 0


async def test_a_sealed_session_can_still_be_saved() -> None:
    async with rig() as r:
        t, other = r.track(), r.track("other")
        r.append(t)
        r.saver.seal(t)
        with pytest.raises(SessionClosedError):
            r.append(t)
        assert not t.writable
        assert r.append(other) == 1
        assert await r.saver.save(t) == 1


async def test_a_session_is_idle_even_where_nothing_was_ever_appended() -> None:
    async with rig(engine=EngineOptions(jitter=0, hibernate_after=60)) as r:
        quiet, called = r.track("quiet"), list[str]()
        quiet.heard_by = SimpleNamespace(unused=lambda _: called.append("quiet"))
        await anyio.sleep(80)
        assert called == ["quiet"]


async def test_an_unused_session_is_reported_idle() -> None:
    async with rig(engine=EngineOptions(jitter=0, hibernate_after=60)) as r:
        quiet, busy, pinned, dirty = (
            r.track(name) for name in ("quiet", "busy", "pinned", "dirty")
        )
        called: list[str] = []
        for t in (quiet, busy, pinned, dirty):
            t.of = t.key.agent
            t.heard_by = SimpleNamespace(captured=bool, saved=lambda *_: None, unused=called.append)
        pinned.pins = 1
        r.saver.tune_one(dirty, None)
        r.append(dirty)
        for _ in range(8):
            r.append(busy)
            await anyio.sleep(10)
        assert called == ["quiet"]
        pinned.pins = 0
        r.saver.touch(pinned)
        await anyio.sleep(55)
        assert "pinned" not in called
        await anyio.sleep(75)
        assert set(called) == {"quiet", "busy", "pinned"}


async def test_a_blocked_loop_is_reported_once() -> None:
    async with rig() as r:
        t = r.track()
        for _ in range(2):
            r.append(t)
            await anyio.sleep(0.1)
            block(r, 30.0)
            await anyio.sleep(0.1)
            await r.saver.wait_durable(t)
        (event,) = r.of(events.LoopBlocked)
        assert event.delay == pytest.approx(28, abs=0.5)


def block(r: Rig, seconds: float) -> None:
    """Let the clock go on without the loop, as a call does that blocks."""
    import asyncio

    import trio

    if trio.lowlevel.in_trio_run():
        clock: Any = trio.lowlevel.current_clock()
        clock.jump(seconds)
    else:
        loop: Any = asyncio.get_running_loop()
        loop.jump(seconds)


@pytest.mark.parametrize("way", ["close", "flush"])
async def test_a_deadline_holds_on_a_loop_whose_steps_are_long(way: str) -> None:
    """A task that is woken in each step, as by a large batch that is settled, is not cancelled."""
    async with rig(InlineStore(parallelism=1, batch_max=256)) as r:
        sessions = [r.track(str(n)) for n in range(256)]
        for t in sessions:
            r.append(t)

        async def keep_busy() -> None:
            while True:
                block(r, 0.02)
                await checkpoint()

        async with anyio.create_task_group() as others:
            others.start_soon(keep_busy)
            began = anyio.current_time()
            if way == "flush":
                await r.saver.flush(0.1)
            else:
                report = await r.saver.aclose(within(0.1, 0.1))
                assert not report.unsaved
                assert not report.in_doubt
            assert anyio.current_time() - began < 0.3
            others.cancel_scope.cancel()


async def test_the_host_s_end_is_the_engine_s() -> None:
    async with rig() as r:
        t = r.track()
        r.append(t)
        await r.host.aclose()
        with pytest.raises(SessionClosedError):
            for _ in range(2):
                r.append(t)
        report = await r.saver.aclose(within(1, 0))
        assert [one.key for one in report.unsaved] == [t.key]


# jobs


@asynccontextmanager
async def busy_store() -> Any:
    async with rig(InlineStore(latency=(2.0,))) as r:
        yield r


async def test_a_job_waits_for_the_save_under_way_and_holds_the_next() -> None:
    async with busy_store() as r:
        t, zero = r.track(), anyio.current_time()
        r.append(t)
        r.saver.turn_ended(t)
        await anyio.sleep(0.5)

        async def job() -> float:
            began = anyio.current_time() - zero
            r.append(t)
            r.saver.turn_ended(t)
            await anyio.sleep(3)
            return began

        assert await r.saver.exclusive(t, job) == 2.0
        await r.saver.wait_durable(t)
        assert starts(r, t) == [round(zero, 6), round(zero + 5, 6)]


async def test_a_job_survives_its_caller() -> None:
    async with rig() as r:
        t, done = r.track(), anyio.Event()

        async def job() -> None:
            await anyio.sleep(1)
            done.set()

        began = anyio.current_time()
        with anyio.move_on_after(0.5) as scope:
            await r.saver.exclusive(t, job)
        assert scope.cancelled_caught
        await done.wait()
        assert anyio.current_time() == began + 1  # the clock is virtual


async def test_jobs_go_one_at_a_time_and_use_a_fifth_of_the_time() -> None:
    async with rig() as r:
        spans: list[tuple[float, float]] = []

        async def job() -> None:
            began = anyio.current_time()
            await anyio.sleep(1)
            spans.append((began, anyio.current_time()))

        async with anyio.create_task_group() as group:
            for n in range(5):
                group.start_soon(r.saver.exclusive, r.track(str(n)), job)
        spans.sort()
        assert all(after[0] >= before[1] for before, after in zip(spans, spans[1:], strict=False))
        assert spans[-1][1] - spans[0][0] >= 3 * 5


async def test_an_urgent_job_does_not_wait_for_the_lane() -> None:
    async with rig() as r:
        zero = anyio.current_time()

        async def job() -> float:
            await anyio.sleep(1)
            return anyio.current_time() - zero

        async with anyio.create_task_group() as group:
            for n in range(5):
                group.start_soon(r.saver.exclusive, r.track(str(n)), job)
            assert await r.saver.exclusive(r.track("urgent"), job, urgent=True) == 1.0


async def test_jobs_are_refused_in_outage_and_drain() -> None:
    async def job() -> str:
        return "done"

    async with rig() as r:
        t = r.track()
        r.saver.begin_drain()
        assert await r.saver.exclusive(t, job) is None
        assert await r.saver.exclusive(t, job, urgent=True) == "done"
    async with rig(engine=EngineOptions(breaker_failures=1)) as r:
        t = r.track()
        r.store.down = True
        r.append(t)
        await anyio.sleep(3)
        assert await r.saver.exclusive(t, job) is None


async def test_a_job_that_takes_too_long_gives_its_session_back() -> None:
    async with rig() as r:
        t = r.track()
        r.append(t)
        with pytest.raises(StoreUnavailableError, match="longer than 60"):
            await r.saver.exclusive(t, anyio.sleep_forever)
        assert await r.saver.save(t) == 1


async def test_a_job_s_error_is_its_caller_s() -> None:
    async def job() -> None:
        raise LookupError("the job's own")

    async with rig() as r:
        t = r.track()
        with pytest.raises(LookupError):
            await r.saver.exclusive(t, job)
        r.append(t)
        assert await r.saver.save(t) == 1


# contributors


async def test_contributors_are_asked_before_a_due_save() -> None:
    async with rig() as r:
        t = r.track()

        async def contribute() -> None:
            await anyio.sleep(0.5)
            r.append(t)

        t.before_capture = contribute
        r.append(t)
        await anyio.sleep(3)
        assert r.stored(t) == 2
        assert len(r.store.calls) == 1


async def test_a_slow_contributor_delays_nobody_else() -> None:
    async with rig() as r:
        slow, other = r.track("slow"), r.track("other")
        slow.before_capture = anyio.sleep_forever
        zero = anyio.current_time()
        r.append(slow)
        r.append(other)
        await r.saver.flush(1.0)
        assert (r.stored(slow), r.stored(other)) == (0, 1)
        await r.saver.wait_durable(slow)
        assert anyio.current_time() == zero + 5
        (event,) = r.of(events.CaptureFailed)
        assert isinstance(event.error, TimeoutError)


async def test_save_asks_contributors_of_a_clean_session_too() -> None:
    async with rig() as r:
        t = r.track()
        state = ["one"]

        async def contribute() -> None:
            if state:
                state.pop()
                r.append(t)

        t.before_capture = contribute
        assert await r.saver.save(t) == 1
        assert await r.saver.save(t) == 1
        assert len(r.store.calls) == 1


async def test_the_last_state_is_asked_for_when_the_engine_stops() -> None:
    async with rig() as r:
        sessions = [r.track(str(n)) for n in range(40)]
        for t in sessions:
            t.before_capture = lambda t=t: contribute(r, t)  # type: ignore[misc]
        report = await r.saver.aclose(within(10, 0))
        assert report.clean
        assert all(r.stored(t) == 1 for t in sessions)


async def test_records_do_not_wait_for_contributors_that_hang_while_the_engine_stops() -> None:
    async with rig() as r:
        sessions = [r.track(str(n)) for n in range(200)]
        for t in sessions:
            t.before_capture = anyio.sleep_forever
            r.append(t)
        quiet = r.track("quiet")
        quiet.before_capture = anyio.sleep_forever
        report = await r.saver.aclose(within(20, 1))
        assert report.clean
        assert all(r.stored(t) == 1 for t in sessions)


async def contribute(r: Rig, t: Tracked) -> None:
    await anyio.sleep(0.1)
    if t.version == 0:
        r.append(t)


# the end


async def test_stopping_twice_gives_the_same_report() -> None:
    async with rig() as r:
        t = r.track()
        r.append(t)
        reports: list[Any] = []

        async def stop() -> None:
            reports.append(await r.saver.aclose(within(5, 1)))

        async with anyio.create_task_group() as group:
            group.start_soon(stop)
            group.start_soon(stop)
        assert reports[0] is reports[1]
        assert (reports[0].clean, reports[0].saved) == (True, 1)


async def test_a_cancelled_stop_goes_on() -> None:
    async with rig(InlineStore(latency=(3.0,))) as r:
        t = r.track()
        r.append(t)
        with anyio.move_on_after(1):
            await r.saver.aclose(within(10, 1))
        report = await r.saver.aclose(within(10, 1))
        assert report.clean
        assert r.stored(t) == 1


async def test_nobody_waits_in_vain_when_the_engine_stops() -> None:
    async with rig() as r:
        t = r.track()
        r.store.down = True
        r.append(t)
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                with pytest.raises(SessionClosedError):
                    await r.saver.save(t)

            group.start_soon(wait)
            await anyio.sleep(1)
            await r.saver.aclose(within(1, 0))
        with pytest.raises(SessionClosedError):
            await r.saver.save(t)


async def test_the_plain_engine_needs_no_timer_while_nothing_is_dirty() -> None:
    clock = Clock()
    async with rig(engine=PLAIN, clock=clock) as r:
        r.track()
        await anyio.sleep(0.1)
        reads = clock.reads
        await anyio.sleep(100)
        assert clock.reads == reads


async def test_the_report_tells_what_is_refused_lost_or_only_late_and_for_how_long() -> None:
    async with rig() as r:
        refused, lost, late = r.track("refused"), r.track("lost"), r.track("late")
        r.store.poison.add((refused.key, 1))
        r.append(refused)
        with pytest.raises(SessionQuarantinedError):
            await r.saver.save(refused)
        r.append(lost)
        r.saver.lose(lost)
        r.saver.lose(lost)
        r.append(late)
        await anyio.sleep(1.5)
        r.store.down = True
        report = await r.saver.aclose(within(1, 0))
        assert [one.key for one in report.quarantined] == [refused.key]
        assert [one.key for one in report.lost] == [lost.key]
        (one,) = report.unsaved
        assert (one.key, one.oldest_age) == (late.key, pytest.approx(2.5, abs=0.1))


async def test_what_is_lost_presses_on_nobody_and_counts_once() -> None:
    async with rig() as r:
        lost, other = r.track("lost"), r.track("other")
        r.append(lost, size=500)
        r.append(other, size=300)
        r.saver.lose(lost)
        r.saver.untrack(lost)
        assert r.saver.health().unsaved_bytes == other.pending_bytes > 300


@pytest.mark.parametrize(("outage", "at_most"), [(1.0, 1.0), (4.0, 4.0), (120.0, 5.0)])
async def test_saving_goes_on_soon_after_an_outage(outage: float, at_most: float) -> None:
    async with rig(engine=EngineOptions(), autosave=Autosave(debounce=0.1, max_delay=1.0)) as r:
        sessions = [r.track(f"s{n}") for n in range(20)]
        r.store.down = True
        for t in sessions:
            r.append(t)
        await anyio.sleep(outage)
        assert r.saver.health().status == "degraded"
        r.store.down = False
        with anyio.fail_after(at_most + 0.5):
            for t in sessions:
                await r.saver.wait_durable(t)
        assert r.saver.health().status == "ok"


async def test_one_group_of_many_records_is_due_at_once() -> None:
    async with rig(autosave=Autosave(debounce=60.0, max_delay=60.0, max_records=3)) as r:
        t = r.track()
        r.append(t, 5)
        await anyio.sleep(1.0)
        assert r.stored(t) == 5


async def test_an_urgent_job_of_a_lost_session_does_not_run() -> None:
    async with rig() as r:
        t = r.track()
        r.append(t)
        r.saver.lose(t)
        ran: list[bool] = []

        async def job() -> None:
            ran.append(True)

        assert await r.saver.exclusive(t, job, urgent=True) is None
        assert ran == []


async def test_a_session_that_is_with_the_store_is_in_no_queue() -> None:
    async with rig(InlineStore(latency=(8.0,))) as r:
        t = r.track()
        r.append(t)
        async with anyio.create_task_group() as group:
            group.start_soon(r.saver.save, t)
            await anyio.sleep(1)
            r.append(t)
            assert (t.inflight, t.ticket) == (1, 0)
            await anyio.sleep(5)  # past the debounce
            assert (t.inflight, t.ticket, len(r.store.calls)) == (1, 0, 1)
        await r.saver.save(t)
        assert [len(batches) for batches in r.store.calls] == [1, 1]


async def test_an_answer_that_comes_late_decides_nothing_about_the_other_records() -> None:
    async with rig(InlineStore(latency=(5.0,))) as r:
        t = r.track()
        r.append(t)
        async with anyio.create_task_group() as group:
            group.start_soon(fails, r, t)
            await anyio.sleep(1)
            r.append(t)
            r.saver.lose(t)
            await anyio.sleep(5)  # the first is in the log by now
            assert (t.durable, t.version) == (1, 2)
            assert t.undecided
            assert r.saver.lost == [t]


async def fails(r: Rig, t: Tracked) -> None:
    with pytest.raises(LeaseLostError):
        await r.saver.save(t)
