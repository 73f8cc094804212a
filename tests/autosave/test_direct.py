"""A store that takes a save without a task gets it at once, and may answer late."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from perdure.autosave.core import Core
from perdure.autosave.deadline import Deadline
from perdure.autosave.events import Saved, SaveFailed
from perdure.autosave.options import Autosave, EngineOptions
from perdure.autosave.tracked import State, Tracked
from perdure.errors import SessionQuarantinedError
from tests.autosave.inline_store import DirectStore, Fault
from tests.autosave.rigs import CALM, PLAIN, Rig, rig, within


def direct(
    faults: Sequence[Fault] = (), engine: EngineOptions = PLAIN, **options: Any
) -> AbstractAsyncContextManager[Rig]:
    return rig(DirectStore(faults=faults, **{"batch_max": 1, **options}), engine=engine)


async def test_a_save_needs_no_task() -> None:
    async with direct() as r:
        t = r.track()
        for count in (1, 3, 2):
            version = r.append(t, count)
            assert await r.saver.save(t) == version
        assert (r.stored(t), r.store.begun) == (6, 3)  # type: ignore[attr-defined]
        assert [event.durable for event in r.of(Saved)] == [1, 4, 6]


async def test_a_save_is_an_event_only_while_somebody_listens() -> None:
    async with direct() as r:
        t = r.track()
        for wanted in (True, False, True):
            r.saver.report_saves(wanted=wanted)
            r.append(t)
            await r.saver.save(t)
        assert [event.durable for event in r.of(Saved)] == [1, 3]


async def test_several_savers_of_a_session_take_turns() -> None:
    async with direct(latency=(0.5,)) as r:
        t = r.track()

        async def say() -> None:
            version = r.append(t)
            assert await r.saver.save(t) >= version

        async with anyio.create_task_group() as group:
            for _ in range(9):
                group.start_soon(say)
        assert r.stored(t) == 9


async def test_more_sessions_than_the_store_takes_at_once_are_all_saved() -> None:
    async with direct(latency=(0.1, 0.3), parallelism=3) as r:
        tracked = [r.track(f"s{n}") for n in range(20)]

        async def say(t: Any) -> None:
            for _ in range(4):
                version = r.append(t)
                assert await r.saver.save(t) >= version

        async with anyio.create_task_group() as group:
            for t in tracked:
                group.start_soon(say, t)
        assert [r.stored(t) for t in tracked] == [4] * 20
        assert r.store.begun == len(r.store.calls)  # type: ignore[attr-defined]  # no task


@pytest.mark.parametrize("fault", ["down", "unacked", "lost", "raise", "hang", "hang_applied"])
async def test_what_fails_is_sent_again(fault: Fault) -> None:
    async with direct(
        [fault], engine=EngineOptions(jitter=0.0, eager=False, save_timeout=5.0)
    ) as r:
        t = r.track()
        version = r.append(t, 2)
        assert await r.saver.save(t) == version
        r.append(t)
        await r.saver.save(t)
        assert (r.stored(t), t.durable) == (3, 3)
        assert len(r.of(SaveFailed)) == 1


async def test_a_caller_that_gives_up_changes_nothing() -> None:
    async with direct(latency=(3.0,)) as r:
        t = r.track()
        version = r.append(t)
        with anyio.move_on_after(1.0) as scope:
            await r.saver.save(t)
        assert scope.cancelled_caught
        assert await r.saver.wait_durable(t, version) == version
        assert len(r.store.calls) == 1


async def test_a_refused_record_puts_the_session_aside() -> None:
    async with direct() as r:
        t = r.track()
        r.append(t)
        await r.saver.save(t)
        r.store.poison.add((t.key, 2))
        r.append(t)
        with pytest.raises(SessionQuarantinedError):
            await r.saver.save(t)
        assert r.stored(t) == 1


async def test_closing_waits_for_what_is_under_way() -> None:
    async with direct(latency=(2.0,)) as r:
        t = r.track()
        r.append(t)
        with anyio.move_on_after(0.5):
            await r.saver.save(t)
        report = await r.saver.aclose(within(10, 1))
        assert (report.clean, r.stored(t)) == (True, 1)


async def test_closing_does_not_wait_for_ever() -> None:
    async with direct(["hang"], hangs=1e6) as r:
        t = r.track()
        r.append(t)
        with anyio.move_on_after(0.5):
            await r.saver.save(t)
        report = await r.saver.aclose(within(3, 1))
        assert not report.clean
        assert t.durable == 0


async def test_a_loop_that_ends_leaves_no_save_behind() -> None:
    async with direct(latency=(5.0,)) as r:
        t = r.track()
        r.append(t)
        with anyio.move_on_after(0.5):
            await r.saver.save(t)
        await r.host.aclose()
        assert t.inflight is None


@pytest.mark.parametrize(("fault", "applied"), [("hang", False), ("hang_applied", True)])
async def test_a_late_answer_settles_what_was_given_up(fault: Fault, applied: bool) -> None:
    """Nothing of the session is sent before it, and what it says is not sent again."""
    engine = EngineOptions(jitter=0.0, eager=False, save_timeout=5.0)
    async with direct([fault], engine=engine, hangs=60.0) as r:
        t, began = r.track(), anyio.current_time()
        r.append(t, 2)
        async with anyio.create_task_group() as group:
            group.start_soon(r.saver.save, t)
            await anyio.sleep(50)
            assert len(r.store.calls) == 1
            assert (t.durable, t.state) == (0, State.FAILED)
            assert r.saver.health().unsaved == {"failed": 1}
            r.append(t)
        assert anyio.current_time() - began == pytest.approx(60, abs=0.1)
        assert t.durable >= 2
        await r.saver.save(t)
        assert (r.stored(t), t.durable) == (3, 3)
        assert r.store.sent[t.key] == (3 if applied else 5)
        assert [event.in_doubt for event in r.of(SaveFailed)] == [True]
        assert await r.outlasts_an_outage()


async def test_a_late_refusal_is_asked_for_again_within_the_time_of_a_save() -> None:
    """It does not say why: what is sent again has its time, also if the store hangs then."""
    engine = EngineOptions(jitter=0.0, eager=False, save_timeout=5.0)
    async with direct(["ok", "hang"], engine=engine, hangs=30.0, latency=(20.0, *[0.1] * 9)) as r:
        t, other = r.track("a"), r.track("b")
        r.store.poison.add((t.key, 1))
        r.append(t)
        r.saver.turn_ended(t)
        await anyio.sleep(30)
        assert len(r.store.calls) == 2
        await r.saver.save(other)
        await anyio.sleep(10)
        assert r.saver.health().unsaved == {"failed": 1}
        await anyio.sleep(40)
        assert t.state is State.QUARANTINED
        assert r.stored(t) == 0


async def test_a_save_that_is_never_answered_is_reported_in_doubt() -> None:
    engine = EngineOptions(jitter=0.0, eager=False, save_timeout=5.0)
    async with direct(["hang_applied"], engine=engine, hangs=1e6) as r:
        t, began = r.track(), anyio.current_time()
        r.append(t, 2)
        r.saver.turn_ended(t)
        await anyio.sleep(30)
        r.append(t)
        report = await r.saver.aclose(within(3, 1))
        assert anyio.current_time() - began <= 34 + 1e-6
        (left,) = report.in_doubt
        assert (left.durable, left.in_doubt_to, left.version) == (0, 2, 3)
        assert len(r.store.calls) == 1


async def test_a_job_does_not_wait_for_a_save_that_was_given_up() -> None:
    async def job() -> str:
        return "done"

    engine = EngineOptions(jitter=0.0, eager=False, save_timeout=5.0)
    async with direct(["hang"], engine=engine, hangs=100.0) as r:
        t, other = r.track("a"), r.track("b")
        r.append(t)
        r.saver.turn_ended(t)
        await anyio.sleep(1)
        with anyio.fail_after(10):
            assert await r.saver.exclusive(t, job) is None
            assert await r.saver.exclusive(t, job, urgent=True) is None
            assert await r.saver.exclusive(other, job) == "done"
        await anyio.sleep(200)
        assert await r.saver.exclusive(t, job) == "done"


@pytest.mark.parametrize(
    ("owner", "method", "at_entry", "is_launched"),
    [
        (Core, "capture_alone", False, False),
        (DirectStore, "begin_append", True, False),
        (DirectStore, "begin_append", True, True),
        (DirectStore, "begin_append", False, False),
        (DirectStore, "begin_append", False, True),
    ],
)
async def test_a_save_that_an_interrupt_cuts_off_is_in_doubt_and_sent_again(
    owner: type, method: str, at_entry: bool, is_launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is captured, before the store has it, or behind that."""
    act, interrupts = getattr(owner, method), [KeyboardInterrupt("now")]

    def interrupted(*args: object) -> object:
        if not interrupts:
            return act(*args)
        if not at_entry:
            act(*args)
        raise interrupts.pop()

    monkeypatch.setattr(owner, method, interrupted)
    options = Autosave(max_records=1) if is_launched else CALM
    store = DirectStore(latency=(0.1,), batch_max=1, queues=True)
    async with rig(store, engine=PLAIN, autosave=options) as r:
        t = r.track()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # either may be the one
            r.append(t)
            await r.saver.save(t)
        assert t.inflight is None
        (failed,) = r.of(SaveFailed)
        assert failed.in_doubt
        assert "KeyboardInterrupt('now') came while it was sent" in str(failed.error)
        assert await r.saver.save(t) == 1
        assert r.stored(t) == 1
        assert r.saver.health().reasons == ()
        assert await r.outlasts_an_outage()


async def test_a_session_hears_of_its_capture_before_its_records_leave_memory() -> None:
    async with direct(batch_max=64) as r:
        sessions = [r.track(f"s{n}") for n in range(40)]
        held: dict[str, int] = {}

        def hears(t: Tracked) -> None:
            held[t.key.agent] = len(t.pending)

        for t in sessions:
            t.of, t.heard_by = t, SimpleNamespace(captured=hears, saved=lambda *_: None)
            r.append(t)
        # Its time is over at once: answers are settled all together.
        now = anyio.current_time()
        await r.saver.aclose(Deadline(now, now, now + 1))
        stored = [t for t in sessions if t.durable]
        assert stored
        assert [held.get(t.key.agent) for t in stored] == [1] * len(stored)
