"""A story of several sessions on a store with a mind of its own, and what must hold in it.

`Story` is drawn by Hypothesis; ``tell`` lives it on an event loop in virtual time, and
``check`` says which invariant it broke.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.abc
from hypothesis import strategies as st

from perdure.autosave.options import Autosave, EngineOptions
from perdure.autosave.reports import ShutdownReport
from perdure.autosave.tracked import Tracked
from perdure.records.records import Entry
from tests.autosave.inline_store import DirectStore, Fault, InlineStore
from tests.autosave.rigs import Rig, rig, within

DEBOUNCE, MAX_DELAY = 2.0, 10.0
SESSIONS = 4
EPS = 1e-6

Op = tuple[float, str, int]


@dataclass(frozen=True)
class Story:
    """What happens, and how the store behaves."""

    ops: tuple[Op, ...]
    latency: tuple[float, ...] = (0.0,)
    faults: tuple[Fault, ...] = ()
    parallelism: int = 4
    queue_depth: int = 0
    batch_max: int = 64
    seed: int = 0

    @property
    def smooth(self) -> bool:
        """Whether the store is up, has a free slot for everybody, and nothing holds one back."""
        roomy = self.parallelism >= SESSIONS
        return roomy and not any(f != "ok" for f in self.faults) and not self.held

    @property
    def held(self) -> bool:
        """Whether something keeps a session from being saved."""
        return any(name in {"group", "job", "prepare", "big"} for _, name, _ in self.ops)


PLAIN = ["mark"] * 3 + ["drum"] * 3
PLAIN += ["pair", "turn", "burst", "save", "save", "wait", "retune", "write-through"]
PLAIN += ["cancelled save", "cancelled wait"]
ROUGH = [*PLAIN, "group", "job", "prepare", "big", "flush"]
FAULTS: list[Fault] = ["ok", "ok", "down", "unacked", "lost", "hang", "hang_applied", "raise"]


def _ops(names: list[str]) -> st.SearchStrategy[tuple[Op, ...]]:
    waits = st.one_of(st.just(0.0), st.floats(0.001, 3).map(lambda s: round(s, 3)))
    op = st.tuples(waits, st.sampled_from(names), st.integers(0, SESSIONS - 1))
    return st.lists(op, min_size=1, max_size=15).map(tuple)


_latency = st.lists(st.sampled_from([0.0, 0.01, 0.5, 4.0, 9.0]), min_size=1, max_size=5).map(tuple)
_seed = st.integers(0, 3)

smooth_stories = st.builds(Story, ops=_ops(PLAIN), latency=_latency, seed=_seed)
rough_stories = st.builds(
    Story,
    ops=_ops(ROUGH),
    latency=_latency,
    faults=st.lists(st.sampled_from(FAULTS), max_size=12).map(tuple),
    parallelism=st.sampled_from([1, 2, 4]),
    queue_depth=st.sampled_from([0, 1, 3]),
    batch_max=st.sampled_from([1, 3, 64]),
    seed=_seed,
)


PICKED = (
    Story(ops=((0.0, "drum", 0),)),
    Story(ops=((0.0, "turn", 1), (0.0, "burst", 1), (0.0, "drum", 0))),
    Story(
        ops=((0.0, "mark", 0), (0.0, "save", 0), (0.1, "mark", 0), (0.1, "save", 0)),
        latency=(0.5,),
    ),
    Story(ops=tuple((0.0, "turn", n) for n in range(4)), parallelism=1, batch_max=1),
    Story(ops=((0.0, "save", 0), (0.3, "mark", 0), (0.3, "job", 0), (0.0, "save", 0))),
    Story(ops=((0.0, "turn", 0), (0.0, "job", 0)), latency=(0.01,), parallelism=1, batch_max=1),
)
"""Stories that have been worth telling."""


@dataclass
class Told:
    """What came of a story."""

    rig: Rig
    sessions: list[Tracked]
    accepted: dict[Any, list[Entry]] = field(default_factory=dict)
    accepted_at: dict[tuple[Any, int], float] = field(default_factory=dict)
    prompt: list[tuple[Any, int, float]] = field(default_factory=list)
    """What is to be durable at once: a session, a version, and since when."""
    waiting: Counter[Any] = field(default_factory=Counter)
    """Who waits for what, as far as the story knows."""
    durable: dict[Any, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    report: ShutdownReport | None = None


def options(debounce: float | None) -> Autosave:
    return Autosave(debounce=debounce, max_delay=MAX_DELAY, max_bytes=4000, max_records=50)


async def tell(story: Story) -> Told:
    """Live a story until everything is saved and the engine has stopped."""
    make = DirectStore if story.batch_max == 1 else InlineStore
    store = make(
        latency=story.latency,
        faults=story.faults,
        parallelism=story.parallelism,
        queue_depth=story.queue_depth,
        batch_max=story.batch_max,
    )
    engine = EngineOptions(
        jitter=0.1 if story.seed else 0.0, eager=story.seed > 1, save_timeout=10.0
    )
    autosave = options(DEBOUNCE if story.seed < 3 else None)
    async with rig(store, autosave=autosave, engine=engine) as r:
        told = Told(r, [r.track(f"s{n}") for n in range(SESSIONS)])
        for t in told.sessions:
            watch(told, t)
        async with anyio.create_task_group() as group:
            for wait, name, n in story.ops:
                await anyio.sleep(wait)
                await play(told, name, told.sessions[n], group)
        told.report = await r.saver.aclose(within(1000.0, 1.0))
        check_end(told)
    return told


def watch(told: Told, t: Tracked) -> None:
    told.accepted[t.key] = []
    told.durable[t.key] = 0

    def saved(_: object, durable: int) -> None:
        if durable < told.durable[t.key]:
            told.problems.append(f"{t.key}: durable fell to {durable}")
        told.durable[t.key] = durable

    t.heard_by = SimpleNamespace(saved=saved, lost=lambda _: None, unused=lambda _: None)


def mark(told: Told, t: Tracked, count: int = 1, *, size: int = 0) -> None:
    rig = told.rig
    before = t.version
    version = rig.append(t, count, size=size)
    if version != before + count or t.version != version:
        told.problems.append(f"{t.key}: {count} records took version {before} to {version}")
    # A group's entries get their ends when it is over: compare payloads, and ends apart.
    told.accepted[t.key].extend(t.pending[len(t.pending) - count :])
    for seq in range(before + 1, version + 1):
        told.accepted_at[t.key, seq] = anyio.current_time()


async def play(told: Told, name: str, t: Tracked, group: anyio.abc.TaskGroup) -> None:
    """Do one thing; what waits for a save does so beside the story."""
    saver = told.rig.saver
    if name in ("mark", "pair", "big"):
        mark(told, t, 2 if name == "pair" else 1, size=5000 if name == "big" else 0)
    elif name == "drum":
        for _ in range(9):
            mark(told, t)
            await anyio.sleep(DEBOUNCE * 0.9)
        mark(told, t)
    elif name in ("turn", "burst"):
        mark(told, t, 1 if name == "turn" else 60)
        if name == "turn":
            saver.turn_ended(t)
        told.prompt.append((t.key, t.version, anyio.current_time()))
    elif name == "write-through":
        saver.tune_one(t, Autosave.write_through())
        await anyio.sleep(0.06)  # longer than the timer needs to take note
        mark(told, t)
        told.prompt.append((t.key, t.version, anyio.current_time()))
    elif name == "retune":
        saver.tune_one(t, options(0.5))
    elif name == "group":
        with saver.grouped(t):
            mark(told, t)
            mark(told, t)
    elif name == "prepare":
        t.before_capture = lambda: prepare(told, t)
        mark(told, t)
    else:
        group.start_soon(wait, told, name, t)


async def prepare(told: Told, t: Tracked) -> None:
    await anyio.sleep(0.2)
    if t.version % 3 == 0:
        mark(told, t)
    if t.version % 7 == 0:
        raise ValueError("a contributor's own fault")


async def wait(told: Told, name: str, t: Tracked) -> None:
    saver, version, began = told.rig.saver, t.version, anyio.current_time()
    told.waiting[t.key if name != "flush" else "all"] += 1
    if name == "job":
        mark(told, t)
        saver.turn_ended(t)
        await anyio.sleep(0.005)
        await saver.exclusive(t, lambda: job(told, t), urgent=version % 2 == 0)
    elif name == "flush":
        versions = {one: one.version for one in told.sessions}
        await saver.flush()
        for one, upto in versions.items():
            confirm(told, one, upto, "flush")
    elif name.startswith("cancelled"):
        with anyio.move_on_after(0.01):
            await (saver.save(t) if name.endswith("save") else saver.wait_durable(t))
    else:
        await (saver.save(t) if name == "save" else saver.wait_durable(t))
        confirm(told, t, version, name)
        if name == "save":
            told.prompt.append((t.key, version, began))
    told.waiting[t.key if name != "flush" else "all"] -= 1
    if len(t.waiters or ()) > told.waiting[t.key] + told.waiting["all"]:
        told.problems.append(f"{t.key}: a waiter that nobody is")


def confirm(told: Told, t: Tracked, version: int, what: str) -> None:
    if t.durable < version or told.rig.stored(t) < version:
        told.problems.append(f"{t.key}: {what} returned before {version} was durable: {t!r}")


async def job(told: Told, t: Tracked) -> None:
    calls = len(told.rig.store.calls)
    if t.inflight is not None:
        told.problems.append(f"{t.key}: a job while a save was with the store")
    await anyio.sleep(0.7)
    if any(batch.key == t.key for call in told.rig.store.calls[calls:] for batch in call):
        told.problems.append(f"{t.key}: a save began while a job had the session")


def check_end(told: Told) -> None:
    """What must hold whatever the store did: I1, I3 to I7, I9, I10."""
    r, problems = told.rig, told.problems
    problems += r.store.breaches
    # The watchdog mends what stalls, but nothing that is not broken on purpose may.
    # By its name: a mutant's events are other classes.
    problems += [event.reason for event in r.events if type(event).__name__ == "Stalled"]
    assert told.report is not None
    if not told.report.clean:
        problems.append(str(told.report))
    for t in told.sessions:
        log = r.store.logs.get(t.key, [])
        if [e.payload for e in log] != [e.payload for e in told.accepted[t.key]]:
            problems.append(f"{t.key}: accepted {len(told.accepted[t.key])}, stored {len(log)}")
        if log and not log[-1].end:
            problems.append(f"{t.key}: the log ends within a group")
        left = (t.pending, t.pending_bytes, t.captured_bytes, t.waiters, t.oldest_at, t.inflight)
        if any(bool(one) for one in left):
            problems.append(f"{t.key}: left over {left}")
    health = r.saver.health()
    if health.unsaved_bytes or health.unsaved:
        problems.append(f"unsaved after all: {health.unsaved_bytes} bytes, {health.unsaved}")


def check(story: Story, told: Told) -> None:
    """Raise if the story broke an invariant; I2 and promptness where it was smooth."""
    problems = list(told.problems)
    store = told.rig.store
    if story.smooth:
        for (key, seq), at in told.accepted_at.items():
            done, own = store.durable_at(key, seq)
            allowed = max(MAX_DELAY, store.remainder(key, at)) + own + EPS
            if done - at > allowed:
                problems.append(f"{key}: record {seq} took {done - at}, allowed are {allowed}")
        for key, version, at in told.prompt:
            done, own = store.durable_at(key, version) if version else (at, 0.0)
            allowed = store.remainder(key, at) + own + EPS
            if done - at > allowed:
                problems.append(f"{key}: {version} took {done - at}, allowed are {allowed}")
    if not any(fault != "ok" for fault in story.faults):
        sent, accepted = store.sent.total(), sum(map(len, told.accepted.values()))
        if sent != accepted:
            problems.append(f"{accepted} records, but {sent} were sent")
        longest = 2 * (SESSIONS + 1) * max(story.latency) + EPS
        if not story.held and told.report is not None and told.report.duration > longest:
            problems.append(f"stopping took {told.report.duration}, allowed are {longest}")
    assert not problems, "\n".join(problems)
