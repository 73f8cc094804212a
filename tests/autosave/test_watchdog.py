"""The watchdog: the engine is broken on purpose, which is told, and saving goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

from perdure.autosave import events
from perdure.autosave.core import Core
from perdure.autosave.jobs import StateCapture
from perdure.autosave.options import Autosave, EngineOptions
from perdure.autosave.tracked import Tracked
from perdure.store import Outcome
from tests.autosave.inline_store import DirectStore, InlineStore
from tests.autosave.rigs import Clock, Rig, rig
from tests.autosave.test_driver import block

LOOKS = 15.0
"""Seconds within which the watchdog has looked twice, and what it started has run."""


class Breaker:
    """Breaks the host: for as long as it is broken, no task begins."""

    def __init__(self, r: Rig) -> None:
        self._host = r.host
        self._spawn = r.host.spawn
        self.asked: list[Callable[..., Any]] = []

    def refuse(self, error: Exception) -> None:
        def spawn(fn: Callable[..., Any], *args: object) -> None:
            raise error

        self._host.spawn = spawn  # type: ignore[assignment]

    def refuse_of(self, owner: type, error: Exception) -> None:
        """Refuse only what an object of this type has done."""

        def spawn(fn: Callable[..., Any], *args: object) -> None:
            if isinstance(getattr(fn, "__self__", None), owner):
                raise error
            self._spawn(fn, *args)

        self._host.spawn = spawn  # type: ignore[assignment]

    def swallow(self) -> None:
        """Take what is to be started, and never start it."""
        self._host.spawn = lambda fn, *args: self.asked.append(fn)  # type: ignore[assignment]

    def mend(self) -> None:
        self._host.spawn = self._spawn


async def unsaved(r: Rig) -> Tracked:
    t = r.track()
    r.append(t)
    return t


def is_well(r: Rig) -> bool:
    return r.saver.health().status == "ok" and r.saver.health().reasons == ()


async def test_a_task_that_cannot_be_started_is_told_at_once_and_tried_again() -> None:
    async with rig() as r:
        broken = Breaker(r)
        broken.refuse(RuntimeError("no task today"))
        t = await unsaved(r)  # accepted all the same
        health = r.saver.health()
        assert health.status == "failing"
        assert "no task today" in health.reasons[0]
        await anyio.sleep(60)
        assert r.stored(t) == 0
        assert r.saver.health().status == "failing"
        broken.mend()
        await anyio.sleep(LOOKS)
        assert r.stored(t) == 1
        assert is_well(r)


async def test_saving_that_has_stalled_is_told_once_and_when_it_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig() as r:
        broken = Breaker(r)
        broken.swallow()
        t = await unsaved(r)
        await anyio.sleep(120)
        health = r.saver.health()
        assert (health.status, r.stored(t)) == ("failing", 0)
        assert "session a: due, unsaved for" in health.reasons[0]
        assert len(broken.asked) > 10  # it was tried again, and again
        broken.mend()
        await anyio.sleep(LOOKS)
        assert r.stored(t) == 1
        assert is_well(r)
        assert [one.sessions for one in r.of(events.Stalled)] == [1]
        assert len(r.of(events.Resumed)) == 1
        logged = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert [one.levelname for one in logged] == ["ERROR", "WARNING"]


async def test_a_save_whose_task_does_not_begin_is_sent_by_another_one() -> None:
    async with rig() as r:
        t = r.track()
        broken = Breaker(r)
        broken.swallow()

        async def mend() -> None:
            await anyio.sleep(1)
            broken.mend()

        r.append(t)
        async with anyio.create_task_group() as group:
            group.start_soon(mend)
            assert await r.saver.save(t) == 1
        assert r.stored(t) == 1
        assert [event.in_doubt for event in r.of(events.SaveFailed)] == [False]


async def test_saving_outlasts_a_failure_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(InlineStore(parallelism=2)) as r:
        sessions = [r.track(name) for name in "abcd"]
        capture = Core.capture
        dying = ["one", "two"]

        def die(core: Core, now: float) -> Any:
            if dying:
                raise MemoryError(dying.pop())
            return capture(core, now)

        monkeypatch.setattr(Core, "capture", die)
        for t in sessions:
            r.append(t)
        await anyio.sleep(12 + LOOKS)
        assert [r.stored(t) for t in sessions] == [1, 1, 1, 1]
        assert is_well(r)


@pytest.mark.parametrize("seconds", [4.8, 5.0, 5.4, 5.9])
async def test_a_loop_that_was_blocked_until_the_look_is_no_stall(
    seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The alarm passed in time; what it wakes gets a turn before anybody says that it has not."""
    async with rig(autosave=Autosave(debounce=0.1, max_delay=1.0)) as r:
        t = await unsaved(r)
        await anyio.sleep(0.01)
        block(r, seconds)
        await anyio.sleep(LOOKS)
        assert r.stored(t) == 1
        assert r.of(events.Stalled) == []
        assert "stalled" not in caplog.text
        assert is_well(r)


PATIENT = Autosave(debounce=30.0, max_delay=120.0)


@pytest.mark.parametrize("setting", [PATIENT, Autosave(debounce=60.0, max_delay=60.0)])
async def test_a_long_debounce_is_no_stall(setting: Autosave) -> None:
    async with rig(autosave=setting, engine=EngineOptions(jitter=0.0)) as r:
        t, busy = r.track("quiet"), r.track("busy")
        await anyio.sleep(0.1)
        r.append(t)
        for second in range(1, 70):
            r.append(busy)
            await anyio.sleep(0.5)
            r.saver.turn_ended(busy)
            await anyio.sleep(0.5)
            assert is_well(r)
            assert r.stored(t) == (second > (setting.debounce or 0))
        assert r.of(events.Stalled) == []


async def test_the_end_of_a_turn_is_watched_where_nothing_else_saves() -> None:
    async with rig(autosave=None) as r:
        broken = Breaker(r)
        broken.swallow()
        t = await unsaved(r)
        r.saver.turn_ended(t)
        await anyio.sleep(120)
        assert r.saver.health().status == "failing"
        broken.mend()
        await anyio.sleep(60)
        assert r.stored(t) == 1
        assert is_well(r)


@pytest.mark.parametrize("how", ["refuse", "swallow"])
async def test_the_end_of_a_turn_is_saved_again_where_nothing_else_saves(how: str) -> None:
    """Its save could not begin; no timer and no caller asks for another one."""
    async with rig(autosave=None) as r:
        broken = Breaker(r)
        broken.refuse(RuntimeError("not now")) if how == "refuse" else broken.swallow()
        t = await unsaved(r)
        r.saver.turn_ended(t)
        broken.mend()
        await anyio.sleep(120)
        assert r.stored(t) == 1
        assert is_well(r)


@pytest.mark.parametrize("faults", [["down"], ["lost"], ["down", "lost", "down"]])
async def test_the_end_of_a_turn_outlasts_failures_where_nothing_else_saves(
    faults: list[str],
) -> None:
    async with rig(InlineStore(faults=faults), autosave=None) as r:
        t = await unsaved(r)
        r.saver.turn_ended(t)
        await anyio.sleep(120)
        assert r.stored(t) == 1
        r.append(t)  # which is not the end of a turn
        await anyio.sleep(120)
        assert r.stored(t) == 1


async def test_a_timer_that_is_gone_is_noticed_long_before_anything_is_late() -> None:
    async with rig(autosave=PATIENT) as r:
        broken = Breaker(r)
        broken.swallow()
        t = await unsaved(r)
        await anyio.sleep(LOOKS)
        assert r.saver.health().status == "failing"
        assert "its timer has not fired" in r.saver.health().reasons[0]
        broken.mend()
        await anyio.sleep(30.1 - LOOKS)
        assert r.stored(t) == 1
        assert is_well(r)


@pytest.mark.parametrize("trouble", ["down", "stuck"])
async def test_a_store_that_does_not_answer_is_no_stall(trouble: str) -> None:
    async with rig() as r:
        t = r.track()
        setattr(r.store, trouble, True)
        r.append(t)
        await anyio.sleep(200)
        assert r.saver.health().status == "degraded"
        assert r.of(events.Stalled) == []
        setattr(r.store, trouble, False)
        await anyio.sleep(30)
        assert r.stored(t) == 1


async def test_a_saturated_store_is_no_stall() -> None:
    store = InlineStore(latency=(8.0,), parallelism=1, batch_max=1)
    async with rig(store, autosave=Autosave(debounce=1, max_delay=2)) as r:
        sessions = [r.track(f"s{n}") for n in range(12)]
        for t in sessions:
            r.append(t)
        await anyio.sleep(100)
        assert [r.stored(t) for t in sessions] == [1] * 12
        assert r.of(events.Stalled) == []


async def test_a_job_that_holds_a_session_for_its_time_is_no_stall() -> None:
    async with rig(engine=EngineOptions(jitter=0.0, eager=False, exclusive_timeout=40)) as r:
        t = r.track()
        async with anyio.create_task_group() as group:
            group.start_soon(r.saver.exclusive, t, lambda: anyio.sleep(39))
            await anyio.sleep(1)
            r.append(t)
        await anyio.sleep(5)
        assert r.stored(t) == 1
        assert r.of(events.Stalled) == []


async def test_nothing_looks_while_nothing_is_unsaved() -> None:
    clock = Clock()
    async with rig(clock=clock) as r:
        t = await unsaved(r)
        await r.saver.save(t)
        await anyio.sleep(LOOKS)
        reads = clock.reads
        await anyio.sleep(100)
        assert clock.reads == reads


async def test_a_loop_that_does_not_run_is_told() -> None:
    clock = Clock()
    async with rig(clock=clock) as r:
        await unsaved(r)
        clock.ahead = 30.0
        assert r.saver.health().reasons == ()
        clock.ahead = 60.0
        (reason,) = r.saver.health().reasons
        assert "has not run the timer" in reason


async def test_a_breaker_that_is_open_is_no_stall() -> None:
    engine = EngineOptions(jitter=0.0, eager=False, breaker_failures=1, breaker_reset=600.0)
    async with rig(InlineStore(faults=["down"] * 50), engine=engine) as r:
        first, second = r.track("a"), r.track("b")
        r.append(first)
        with anyio.move_on_after(1.0):
            await r.saver.save(first)
        r.append(second)
        await anyio.sleep(60.0)
        assert r.of(events.Stalled) == []


def cut_off_as_it_is_answered(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, interrupts = DirectStore.begin_append, [KeyboardInterrupt()]

    def interrupted(store: DirectStore, batches: Any, done: Any) -> bool:
        def then(outcomes: Sequence[Outcome]) -> None:
            clock.interrupt = interrupts.pop() if interrupts else None
            done(outcomes)

        return begin(store, batches, then)

    monkeypatch.setattr(DirectStore, "begin_append", interrupted)


def cut_off_as_it_is_captured(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Core.capture

    def interrupted(core: Core, now: float) -> None:
        monkeypatch.setattr(Core, "capture", capture)
        capture(core, now)
        core.in_flight = 0  # nor was it counted
        raise KeyboardInterrupt

    monkeypatch.setattr(Core, "capture", interrupted)


def cut_off_at(step: str) -> Callable[[Clock, pytest.MonkeyPatch], None]:
    """A Ctrl-C as a step of the core begins, the first time."""

    def cut_off(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        act, interrupts = getattr(Core, step), [KeyboardInterrupt()]

        def interrupted(*args: Any) -> Any:
            if interrupts:
                raise interrupts.pop()
            return act(*args)

        monkeypatch.setattr(Core, step, interrupted)

    return cut_off


@pytest.mark.parametrize(
    ("store", "cut_off"),
    [
        (DirectStore, cut_off_as_it_is_answered),
        (InlineStore, cut_off_as_it_is_captured),
        pytest.param(DirectStore, cut_off_at("_take"), id="between the queue and the capture"),
        pytest.param(DirectStore, cut_off_at("_ok"), id="as an answer is applied"),
    ],
)
async def test_a_save_that_is_cut_off_is_settled(
    store: Any, cut_off: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    cut_off(clock, monkeypatch)
    async with rig(store(), clock=clock) as r:
        r.host.on_exit = lambda error: None
        t, other = r.track("a"), r.track("b")
        r.append(t)
        for _ in range(20):  # others are served all the time
            r.append(other)
            await anyio.sleep(1)
        assert (r.stored(t), t.durable, t.inflight) == (1, 1, None)
        assert r.of(events.Stalled) == []
        assert is_well(r)
        assert await r.outlasts_an_outage()


async def test_contributors_whose_task_could_not_be_started_are_asked_later() -> None:
    async with rig() as r:
        t = r.track()
        asked: list[str] = []

        async def contribute() -> None:
            asked.append("a")

        t.before_capture = contribute
        broken = Breaker(r)
        broken.refuse_of(StateCapture, RuntimeError("no task today"))
        r.append(t)
        await anyio.sleep(10)
        assert (r.stored(t), t.preparing) == (0, True)
        broken.mend()
        await anyio.sleep(LOOKS)
        assert (r.stored(t), asked) == (1, ["a"])
        assert is_well(r)
