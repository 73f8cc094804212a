"""The core against a small model: any order of whatever can happen, without any event loop."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from perdure.autosave.core import Core, Save
from perdure.autosave.options import DEBOUNCE, INHERIT, Autosave, EngineOptions, Inherit
from perdure.autosave.schedule import SLOT
from perdure.autosave.tracked import NEVER, OVERHEAD, Tracked, Waiter
from perdure.errors import PerdureError
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Entry
from perdure.store import Capabilities, Outcome, Status

SESSIONS = 3
SETTINGS = [
    INHERIT,
    None,
    Autosave(max_delay=5.0),
    *(Autosave(debounce=debounce, max_delay=5.0) for debounce in (0.0, 0.07, 1.0)),
]
session = st.integers(0, SESSIONS - 1)


class Waiting:
    """A caller that waits for a version."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self) -> None:
        """Wake it."""


@dataclass
class Model:
    """What one session should be: lists of what was accepted, and how far it is."""

    accepted: list[bytes]
    times: list[float]
    durable: int = 0
    captured: int | None = None
    end: str | None = None
    given_up: bool = False


class CoreMachine(RuleBasedStateMachine):
    """Whatever happens, in whatever order, the core agrees with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        rng = random.Random(1)
        self.core = Core(
            autosave=Autosave(debounce=2.0, max_delay=10.0, max_records=20),
            engine=EngineOptions(
                dirty_soft=1200, dirty_hard=2400, backoff_cap=4.0, batch_bytes=600
            ),
            capabilities=Capabilities(durability="memory", batch_max=2, parallelism=1),
            chance=rng.random,
        )
        self.sessions = [
            self.core.track(SessionKey(str(n)), epoch=1, head=0, now=0.0) for n in range(SESSIONS)
        ]
        self.models = [Model([], []) for _ in range(SESSIONS)]
        self.manager_s: Autosave | None = self.core.autosave
        self.own: list[Autosave | Inherit | None] = [INHERIT] * SESSIONS
        self.in_flight: list[Save] = []
        self.waiters: list[tuple[int, Waiting, Waiter]] = []
        self.woken: set[object] = set()

    def pick(self, n: int) -> tuple[Tracked, Model]:
        return self.sessions[n], self.models[n]

    # what callers do

    @rule(n=session, count=st.integers(1, 3), size=st.sampled_from([0, 50, 400]))
    def append(self, n: int, count: int, size: int) -> None:
        t, model = self.pick(n)
        entries = tuple(
            Entry(MESSAGE, b'"%d%s"' % (self.count + i, b"x" * size)) for i in range(count)
        )
        self.count += count
        before = (t.version, t.pending_bytes, self.core.registry.dirty_bytes)
        try:
            version = self.core.append(t, entries, self.now)
        except PerdureError:
            assert (t.version, t.pending_bytes, self.core.registry.dirty_bytes) == before
            blocked = self.core.registry.dirty_bytes >= 2400
            assert blocked or self.core.registry.overdue or model.end == "lost"
            return
        assert model.end != "lost"
        model.accepted += [entry.payload for entry in entries]
        model.times += [self.now] * count
        assert version == len(model.accepted)

    @rule(n=session, counts=st.lists(st.integers(1, 3), max_size=3))
    def group(self, n: int, counts: list[int]) -> None:
        t, _ = self.pick(n)
        before = t.version
        self.core.hold(t)
        for count in counts:
            self.append(n, count, 50)
        self.core.group(t, before)
        self.core.release(t, self.now)
        ends = [entry.end for entry in t.pending[before - t.durable :]]
        assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)

    @rule(n=session)
    def end_turn(self, n: int) -> None:
        self.core.schedule.make_due(self.sessions[n], self.now)

    @rule(n=session)
    def save(self, n: int) -> None:
        t, model = self.pick(n)
        if model.end is None and t.version > t.durable:
            waiter = Waiting(t.version)
            self.waiters.append((n, waiter, t.add_waiter(t.version, waiter)))
            alone = self.core.capture_alone(t, t.version)
            if alone is None:
                self.core.schedule.make_urgent(t, t.version, self.now)
            else:
                self.captured(alone)

    @rule(n=session)
    def end_turn_alone(self, n: int) -> None:
        alone = self.core.capture_alone(self.sessions[n], 0)
        if alone is not None:
            assert self.sessions[n].retry_at == 0
            self.captured(alone)

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def give_up_waiting(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.waiters))
        n, _, waiter = chosen
        self.sessions[n].drop_waiter(waiter)
        self.waiters.remove(chosen)

    @rule(n=session, setting=st.sampled_from(SETTINGS))
    def tune_one(self, n: int, setting: Autosave | Inherit | None) -> None:
        self.core.tune_one(self.sessions[n], setting)
        self.own[n] = setting

    @rule(setting=st.sampled_from(SETTINGS[1:]))
    def tune(self, setting: Autosave | None) -> None:
        self.core.tune(setting)
        self.manager_s = setting

    @rule(utilization=st.sampled_from([0.0, 1.0]))
    def fit_the_debounce(self, utilization: float) -> None:
        self.core.schedule.control(utilization)

    @rule()
    def flush(self) -> None:
        self.core.schedule.flush(self.core.registry.unsaved, self.now)

    # what the driver does

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 2.0, 11.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(100):
            if not self.core.schedule.advance(self.now, 2):
                return
        raise AssertionError("advance does not come to an end")

    @rule(n=session, count=st.integers(1, 3), size=st.sampled_from([0, 400]))
    def save_at_once(self, n: int, count: int, size: int) -> None:
        self.append(n, count, size)
        self.save(n)
        self.capture()

    @rule(n=session, count=st.integers(1, 3), status=st.sampled_from([Status.OK, *Status]))
    def save_through(self, n: int, count: int, status: Status) -> None:
        self.save_at_once(n, count, 0)
        for save in list(self.in_flight):
            self.completes(save, status)

    @rule()
    def capture(self) -> None:
        saves, unprepared = self.core.capture(self.now)
        assert unprepared == []
        for save in saves:
            self.captured(save)

    def captured(self, save: Save) -> None:
        model = self.models[self.sessions.index(save.t)]
        assert model.captured is None, "two saves at a time"
        assert model.end is None
        assert not save.t.holds
        assert save.batch.first == model.durable + 1
        last = model.durable + len(save.batch.records)
        assert last <= len(model.accepted)
        sent = [entry.payload for entry in save.batch.records]
        assert sent == model.accepted[model.durable : last]
        assert save.batch.records[-1].end
        model.captured = last
        self.in_flight.append(save)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), status=st.sampled_from([Status.OK, Status.OK, *Status]))
    def complete(self, data: st.DataObject, status: Status) -> None:
        self.completes(data.draw(st.sampled_from(self.in_flight)), status)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        save = data.draw(st.sampled_from(self.in_flight))
        t, model = self.pick(self.sessions.index(save.t))
        if not model.given_up:
            model.given_up = True
            before = t.attempt
            self.core.give_up(t, TimeoutError("no answer"), self.now)
            self.core.answered(well=False, error=None, now=self.now)
            assert t.attempt == before + (model.end is None)
            assert model.end is not None or t.doubt_to >= (model.captured or 0)

    def completes(self, save: Save, status: Status) -> None:
        self.in_flight.remove(save)
        n = self.sessions.index(save.t)
        t, model = self.pick(n)
        was_lost = model.end == "lost"
        was_given_up, model.given_up = model.given_up, False
        attempt = t.attempt
        woken = self.core.completed(t, Outcome(status, ValueError("why")), self.now, 0.1)
        well = status in {Status.OK, Status.PERMANENT, Status.CONFLICT}
        self.core.answered(well=well, error=None, now=self.now)
        self.woken.update(woken)
        count = len(save.batch.records)
        assert model.captured is not None
        if status is Status.OK:
            model.durable = model.captured
        elif status is Status.CONFLICT:
            model.end = "lost"
        elif status is Status.PERMANENT and not was_lost:
            one_group = sum(entry.end for entry in save.batch.records) == 1
            model.end = "quarantined" if one_group else None
            assert one_group or 0 < t.narrow < count
        model.captured = None
        if was_given_up and model.end is None and status in {Status.TRANSIENT, Status.IN_DOUBT}:
            assert t.attempt == attempt, "one failure was counted twice"
        reached = [waiter.version for _, waiter, _ in self.waiters if waiter in woken]
        assert all(version <= t.durable for version in reached) or t.end is not None

    @rule(n=session)
    def hold_or_release(self, n: int) -> None:
        t = self.sessions[n]
        if t.holds:
            self.core.release(t, self.now)
        else:
            self.core.hold(t)

    @rule(n=session)
    def lose(self, n: int) -> None:
        t, model = self.pick(n)
        self.woken.update(self.core.lose(t))
        model.end = "lost"

    @rule(n=session)
    def leave_quarantine(self, n: int) -> None:
        t, model = self.pick(n)
        if model.end == "quarantined":
            self.core.retry(t, self.now)
            model.end = None

    @rule(n=session)
    def discard(self, n: int) -> None:
        t, model = self.pick(n)
        if model.end in ("quarantined", "lost"):
            assert self.core.discard(t) == len(model.accepted) - model.durable
            del model.accepted[model.durable :], model.times[model.durable :]
            model.captured = None if model.captured is None else model.durable
            model.end = None if model.end == "quarantined" else "lost"

    # what always holds

    @invariant()
    def numbers_agree(self) -> None:
        for t, model in zip(self.sessions, self.models, strict=True):
            assert (t.version, t.durable) == (len(model.accepted), model.durable)
            assert t.inflight == model.captured
            assert t.given_up is model.given_up
            assert not t.given_up or t.ticket == 0, "it would be sent while it is in doubt"
            assert t.durable <= (t.version if t.inflight is None else t.inflight) <= t.version
            assert (t.end and t.end.value) == model.end
            assert [entry.payload for entry in t.pending] == model.accepted[model.durable :]
            assert t.pending_bytes == sum(len(e.payload) + OVERHEAD for e in t.pending)
            assert (t.oldest_at is None) is (t.version == t.durable)
            assert t.oldest_at is None or t.oldest_at <= model.times[model.durable]
            captured = model.durable if model.captured is None else model.captured
            fresh = model.times[captured:]
            assert t.first_at is None or t.first_at <= self.now
            assert (t.first_at is None) is not bool(fresh)
            assert t.first_at is None or t.first_at <= fresh[0]

    @invariant()
    def a_setting_that_was_given_is_in_force(self) -> None:
        at_once = self.core.schedule.draining or self.core.registry.rising
        for t, own in zip([None, *self.sessions], [INHERIT, *self.own], strict=True):
            status = self.core.status(t)
            setting = self.manager_s if isinstance(own, Inherit) else own
            assert status.setting == setting
            assert status.inherited is (t is not None and own is INHERIT)
            if setting is None or status.in_force is None:
                assert status.in_force is setting
            elif not at_once:
                assert status.in_force.max_delay == setting.max_delay
                quiet = status.in_force.debounce
                assert quiet is not None
                assert quiet == setting.debounce or setting.debounce is None
                assert quiet <= min(DEBOUNCE, setting.max_delay) or setting.debounce is not None

    @invariant()
    def registers_agree(self) -> None:
        registry = self.core.registry
        unsaved = {t for t in self.sessions if t.version > t.durable and t.end is None}
        assert set(registry.unsaved) == unsaved
        ended = {t for t in self.sessions if t.end is not None}
        undecided = {t for t in ended if t.quarantined or t.version > t.durable}
        assert undecided <= set(registry.stuck) <= ended
        assert set(registry.failed) == {t for t in self.sessions if t.attempt}
        counted = [t.pending_bytes for t in self.sessions if t.end is None or t.end.value != "lost"]
        assert registry.dirty_bytes == sum(counted)
        given_up = sum(model.given_up for model in self.models)
        assert self.core.in_flight == len(self.in_flight) - given_up
        assert len(self.core.schedule.ready) == sum(t.ticket > 0 for t in self.sessions)

    def looked_at(self, t: Tracked) -> float:
        """Return when a session with changes is checked next; never, if it is in no queue."""
        schedule = self.core.schedule
        if t.ticket or t in schedule._review:
            return self.now
        if t in schedule._fresh:
            return schedule._fresh_until
        return t.slot * SLOT

    @invariant()
    def nothing_is_forgotten(self) -> None:
        schedule = self.core.schedule
        for t in self.core.registry.unsaved:
            if t.inflight is not None or t.holds or t.preparing:
                continue
            assert t.first_at is not None
            # One that was fitted to the store's load since may be shorter than when it was armed.
            fitted, schedule.debounce = schedule.debounce, DEBOUNCE
            due, at = schedule.due_at(t, t.first_at, self.now), self.looked_at(t)
            schedule.debounce = fitted
            if due < NEVER * SLOT:
                assert at <= max(due, self.now) + 1e-9, (
                    f"{t!r} is due at {due}, and nobody will look"
                )
                waits = t.ticket or t in schedule._review or t in schedule._fresh
                assert waits or t in schedule.wheel._buckets[t.slot]
            else:
                assert t.options is None

    @invariant()
    def waiters_wait_for_what_is_to_come(self) -> None:
        assert sum(len(t.waiters or ()) for t in self.sessions) == sum(
            waiter not in self.woken for _, waiter, _ in self.waiters
        )
        for n, waiter, _ in self.waiters:
            gone = waiter in self.woken
            assert gone or self.sessions[n].durable < waiter.version

    def teardown(self) -> None:
        """With the store well again, everything that can be saved is."""
        for t in self.sessions:
            while t.holds:
                self.core.release(t, self.now)
        for save in self.in_flight:
            self.core.completed(save.t, Outcome(Status.OK), self.now, 0.1)
        self.core.schedule.drain(self.core.registry.unsaved, self.now)
        for _ in range(2000):
            if not self.core.registry.unsaved:
                break
            self.now += 0.2
            while self.core.schedule.advance(self.now, 2):
                pass
            for save in self.core.capture(self.now)[0]:
                self.core.completed(save.t, Outcome(Status.OK), self.now, 0.1)
                self.core.answered(well=True, error=None, now=self.now)
        assert not self.core.registry.unsaved


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
