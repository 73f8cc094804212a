"""One episode: a fresh store, tasks that act on it at once, a process beside, and the judgment of what there is afterwards.

All that is drawn comes from the episode's seed. The order in which the loop runs tasks then depends on threads and on the other
process, so a seed repeats an episode as far as these let it; on ``memory`` stores, in one process, it does exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel

import perdure
from perdure import (
    Autosave,
    LeaseOptions,
    Limits,
    Message,
    SessionKey,
    SessionManager,
    SessionView,
    Shutdown,
)
from perdure.records.records import ENDING
from perdure.session.internals import kill
from perdure.store import SessionQuery, Store
from perdure.transfer import backup, migrate, restore_backup, verify_backup
from tests.schedules import oracle
from tests.schedules.acts import BARE, NEVER, THEMES, Actor, Theme, problems, traced
from tests.schedules.journal import DOUBT, Journal
from tests.schedules.oracle import Content, Failure, Found, Line
from tests.schedules.places import NoDocuments, Place, RestlessStore, lineage_of, wobble

LONGEST = 300.0
"""Seconds after which an episode that has not ended ends the whole run, which cannot go on."""
BOUND = 60.0
"""Seconds after which an operation counts as stuck; none takes more than a few."""


@dataclass
class Plan:
    """What is drawn for an episode before it begins."""

    seed: int
    theme: Theme
    backend: str
    restless: bool
    autosave: Autosave | None
    fold_records: int
    phases: int
    tasks: int
    acts: int
    twin: bool
    other: bool
    dies: bool
    """Whether the manager is killed at the end, and not closed."""
    beside: bool
    """Whether copies of the whole store are made and compared at the end."""
    skip: frozenset[str] = frozenset()
    """Acts that are left out: a failure without them has a shorter story."""
    salt: int = 0
    """Draws another order of the same acts."""

    @classmethod
    def of(cls, seed: int, themes: list[str], *, shared: bool) -> Plan:
        dice = random.Random(f"plan {seed}")
        theme = THEMES[dice.choice(themes)]
        loose = dice.random() < theme.loose
        return cls(
            seed=seed,
            theme=theme,
            backend="trio" if dice.random() < 0.15 else "asyncio",
            restless=dice.random() < 0.7,
            autosave=dice.choice(
                (
                    None,
                    Autosave(debounce=0.0, max_delay=0.0),
                    Autosave(debounce=0.004, max_delay=0.01),
                )
            ),
            fold_records=dice.choice((3, 8, 2000)),
            phases=dice.choice((1, 1, 2)),
            tasks=3 if loose else dice.choice((2, 3, 4)),
            acts=dice.choice((1, 2)) if loose else dice.choice((2, 4, 6)),
            twin=dice.random() < theme.twin,
            other=shared and dice.random() < theme.other,
            dies=dice.random() < 0.15,
            beside=dice.random() < (1.0 if theme.name == "moving" else 0.1),
        )

    def told(self) -> str:
        how = [self.theme.name, self.backend, f"{self.phases}×{self.tasks}×{self.acts}"]
        how += [
            name for name in ("restless", "twin", "other", "dies", "beside") if getattr(self, name)
        ]
        how += [
            "no autosave" if self.autosave is None else f"debounce={self.autosave.debounce}",
            f"fold_records={self.fold_records}",
        ]
        return ", ".join(how)


def connect(store: Store, plan: Plan) -> SessionManager:
    """Return a manager as each process of an episode has it."""
    return perdure.connect(
        store,
        autosave=plan.autosave,
        lease=LeaseOptions(heartbeat=0.1, ttl=0.6),
        shutdown=Shutdown(deadline=10, turn_grace=2, signals=False, spill=False),
        limits=Limits(fold_records=plan.fold_records),
    )


@dataclass
class Episode:
    """What became of one."""

    plan: Plan
    journal: Journal
    failures: list[Failure] = field(default_factory=list)
    stuck: bool = False
    """Whether something would not end even when it was cancelled: this process is of no more use."""


async def bounded(journal: Journal, act: str, name: str, do: Callable[[], Awaitable[Any]]) -> None:
    """End an operation that takes too long, and say so."""
    with anyio.move_on_after(BOUND) as scope:
        await do()
    if scope.cancelled_caught:
        journal.note("error", f"stuck@{name}", act, f"it had not ended after {BOUND} s")


async def in_tasks(actor: Actor, who: str, plan: Plan, phase: int, tasks: int) -> None:
    """Have several tasks act at once, and wait for them."""
    names, weights = zip(*plan.theme.weights.items(), strict=True)

    async def task(number: int) -> None:
        me = f"{who}.{number}"
        for place in range(plan.acts):
            dice = random.Random(f"{plan.seed} {phase} {me} {place}")
            await wobble(dice)
            name = dice.choices(names, weights)[0]
            if f"{me}:{phase}.{place}" in plan.skip:
                continue

            act = partial(actor.act, name, me, f"{phase}.{place}", dice)
            if dice.random() < plan.theme.cancels:
                turns = dice.choice((0, 1, 2, 3, 5, 8, 13, 21, 40, 80))
                act = partial(cancelled_after, act, turns, native=dice.random() < 0.5)
            await bounded(actor.journal, me, name, act)

    async with anyio.create_task_group() as group:
        for number in range(tasks):
            group.start_soon(task, number)


async def cancelled_after(act: Callable[[], Awaitable[None]], turns: int, *, native: bool) -> None:
    """Do something, and cancel it after some turns of the loop: by its scope or, on asyncio, natively."""
    if native and not _on_trio():
        doing = asyncio.ensure_future(act())
        for _ in range(turns):
            await asyncio.sleep(0)
        doing.cancel()
        try:
            await asyncio.wait([doing])
        except asyncio.CancelledError:
            doing.cancel()
            raise
        if not doing.cancelled() and (error := doing.exception()) is not None:
            raise error
        return
    async with anyio.create_task_group() as group:
        done = anyio.Event()

        async def cancel() -> None:
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            if not done.is_set():
                group.cancel_scope.cancel()

        group.start_soon(cancel)
        await act()
        done.set()


def _on_trio() -> bool:
    from perdure._lib.loop import on_trio

    return on_trio()


# A second process


class Other:
    """A process that acts on the same store, and may be stopped and killed."""

    def __init__(self, plan: Plan, place: Place, journal: Journal, phase: int) -> None:
        import multiprocessing

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.schedules.beside"])
        from tests.schedules import beside

        self._journal = journal
        self._in, out = context.Pipe(duplex=False)
        self._process = context.Process(
            target=beside.run, args=(out, plan, tuple(place), phase), daemon=True
        )
        self._process.start()
        out.close()
        self.name = f"other{phase}"
        self.killed = False

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def listen(self) -> None:
        """Take in what it has said."""
        with contextlib.suppress(EOFError, OSError):
            while self._in.poll():
                self._journal.take(self._in.recv())

    def signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)
                self._journal.note("note", f"{number.name} to {self.name}")
                self.killed = self.killed or number == signal.SIGKILL

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join()
        self.listen()
        self._in.close()


async def troubled(other: Other, dice: random.Random) -> None:
    """Listen to the process until it ends; stop it, let it go on, and kill it, at random."""
    fate = dice.choice(("none", "kill", "kill", "stop", "stop and kill"))
    until = anyio.current_time() + BOUND
    while not other._journal.acts and other.alive:
        await anyio.sleep(0.002)
    await anyio.sleep(dice.uniform(0.0, 0.12))
    if "stop" in fate:
        other.signal(signal.SIGSTOP)
        await anyio.sleep(dice.choice((0.02, 0.3, 1.0)))
        if "kill" not in fate:
            other.signal(signal.SIGCONT)
    if "kill" in fate:
        other.signal(signal.SIGKILL)
    while other.alive and anyio.current_time() < until:
        other.listen()
        await anyio.sleep(0.005)
    if other.alive and not other.killed:
        other._journal.note(
            "error", "stuck@process", other.name, f"it had not ended after {BOUND} s"
        )
    other.end()
    if other.killed:
        other._journal.note("closed", other.name, "killed")


# Reading what there is


async def read_logs(store: Store) -> dict[str, list[Line]]:
    """Return every log of a store, scopes left out."""
    whole = lineage_of(store)
    logs: dict[str, list[Line]] = {}
    for info in await store.sessions(SessionQuery(limit=1000)):
        if info.key.agent.startswith("perdure:"):
            continue
        logs[info.key.agent] = await read_log(whole, info.key)
    return logs


async def read_log(store: Store, key: SessionKey) -> list[Line]:
    lines: list[Line] = []
    async with contextlib.aclosing(store.read_log(key)) as log:
        async for chunk in log:
            lines += [
                Line(one.seq, one.epoch, one.kind, one.payload, one.end) for one in chunk.records
            ]
    return lines


async def content(view: SessionView | Any) -> Content:
    """Return what a session or a view shows."""
    context = [message.text for message in view.context()]
    history = [
        item.value.text
        for item in await view.history(limit=100_000)
        if isinstance(item.value, Message)
    ]
    memory = {key: await view.memory.get(key) for key in await view.memory.keys()}
    state = {key: await view.state.get(key) for key in await view.state.keys()}
    return Content(context, history, memory, state)


class Judge:
    """Reads everything in every way, and notes what cannot be read."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        journal: Journal,
        found: Found,
        tamper: Callable[[Store], Store],
    ) -> None:
        self._plan = plan
        self._place = place
        self._journal = journal
        self._found = found
        self._tamper = tamper
        self.failures: list[Failure] = []

    def _fail(self, label: str, id: str, text: str) -> None:
        self.failures.append(Failure(label, id, text))

    @contextlib.contextmanager
    def _noted(self, label: str, id: str, what: str) -> Any:
        try:
            yield
        except perdure.PerdureError as error:
            self._fail(label, id, f"{what} raised {type(error).__name__}: {error}")
        except Exception as error:  # whatever it is, it is no answer
            self._fail(f"bare-error@{what.partition('(')[0]}", id, f"{what} raised {traced(error)}")

    def _store(self, name: str = "main") -> Store:
        store = self._place.store(name)
        return self._tamper(store) if name == "main" else store

    async def note_seen(self, store: Store) -> None:
        """Keep what the logs have now: later it may be pruned."""
        whole = lineage_of(store)
        for info in await store.sessions(SessionQuery(limit=1000)):
            id = info.key.agent
            with contextlib.suppress(perdure.PerdureError):
                life = {line.seq: line for line in await read_log(whole, info.key)}
                lives = self._found.seen.setdefault(id, [])
                last = lives[-1] if lives else {}
                if lives and any(
                    seq in last and last[seq].payload == line.payload for seq, line in life.items()
                ):
                    last.update(life)
                else:
                    lives.append(life)

    async def live(self, manager: SessionManager, store: Store) -> None:
        """Compare sessions that are open with what the log and their unsaved records say."""
        logs = lineage_of(store)
        for info in await store.sessions(SessionQuery(limit=1000)):
            id = info.key.agent
            if id.startswith("perdure:") or any(
                id in one.ids and one.outcome == DOUBT for one in self._journal.acts.values()
            ):
                continue  # what was cancelled may go on
            try:
                async with manager.open(id, create=False, wait=2) as session:
                    context, pending, version = (
                        [one.text for one in session.context()],
                        session.unsaved(),
                        session.version,
                    )
                    log = [line for line in await read_log(logs, info.key) if line.seq <= version]
                    last = log[-1].seq if log else 0
                    log += [
                        Line(one.seq, one.epoch, one.kind, one.payload, one.end)
                        for one in pending
                        if one.seq > last
                    ]
                    whole = oracle.whole_log(self._found, id, log)
                    if whole is not None and (
                        how := oracle.fold(whole).difference(Content(context=context), "context")
                    ):
                        self._fail("live-differs", id, f"the open session {id}: {how}")
            except perdure.PerdureError as error:
                if isinstance(error, perdure.CorruptRecordError):
                    self._fail("damage-claimed@open", id, f"open({id}) raised {error}")

    async def everything(self) -> None:
        """Read it all as others would after the end of those that wrote."""
        plan, found = self._plan, self._found
        store = self._store()
        await store.open()
        told: set[str] = set()
        try:
            with self._noted("check-failed", "", "check"):
                for key, problem in await problems(store):
                    if problem.startswith("forget:"):
                        told.add(key)
                        continue
                    label = (
                        "bare-error@check" if problem.startswith(BARE) else self._check_label(key)
                    )
                    self._fail(label, key, f"check: {problem}")
            with self._noted("log-unreadable", "", "reading the logs"):
                found.logs = await self._logs(store)
                for id in told:
                    if not self._is_ending(id):
                        self._fail("check-false", id, f"check: {id} is not half forgotten")
        finally:
            await store.aclose()
        await self._views(found.views, lambda store: store, "view")
        await self._views(found.rebuilt, NoDocuments, "rebuild")
        if plan.beside:
            await self._moved()
        await self._opened()
        for label, about, text in self._journal.errors:
            if label == "damage-claimed@migrate" and self._is_beside_another(about):
                continue  # what the other one was just writing; at rest, `_moved` judges
            self._fail(self._told_label(label, about, text), about, text)
        self.failures += oracle.judge(self._journal, found)

    async def _logs(self, store: Store) -> dict[str, list[Line]]:
        logs: dict[str, list[Line]] = {}
        whole = lineage_of(store)
        for info in await store.sessions(SessionQuery(limit=1000)):
            id = info.key.agent
            if not id.startswith("perdure:"):
                with self._noted(self._label(id, "log-unreadable"), id, f"reading the log of {id}"):
                    logs[id] = await read_log(whole, info.key)
        return {id: log for id, log in logs.items() if log}

    def _label(self, id: str, label: str) -> str:
        return oracle.made_label(self._journal, id, label)

    def _is_beside_another(self, number: str) -> bool:
        """Whether an act had another one of its name beside it."""
        act = self._journal.acts[number]
        return any(
            other is not act and other.began < act.ended and act.began < other.ended
            for other in self._journal.acts.values()
            if other.name == act.name
        )

    def _told_label(self, label: str, about: str, text: str) -> str:
        """Name what was noted at once by what it turned out to be about."""
        if label == "check-false":
            return self._check_label(text.partition(":")[0])
        if label.startswith("damage-claimed@") and about in self._journal.acts:
            ids = self._journal.acts[about].ids
            return oracle.made_label(self._journal, ids[0], label) if ids else label
        if label == "lease-lost":
            renamed = any(
                about in one.ids for one in self._journal.acts.values() if one.name == "rename"
            )
            return "rename-lost" if renamed else "lease-lost"
        return label

    def _check_label(self, id: str) -> str:
        journal = self._journal
        if any(one.ids[1] == id for one in journal.named("copy")):
            return "copy-not-equal"
        pruned = {one.ids[0] for one in journal.named("prune")}
        if any(one.ids[1] == id for one in journal.named("fork")) and journal.kin(id) & pruned:
            return "fork-rebuild" if id in pruned else "fork-of-pruned"
        return "check-false"

    async def _views(
        self, into: dict[str, Content], around: Callable[[Store], Store], what: str
    ) -> None:
        plan = self._plan
        async with perdure.connect(
            around(self._store()), read_only=True, shutdown=Shutdown(signals=False)
        ) as manager:
            for id in sorted(self._found.logs):
                label = self._label(id, f"{what}-failed")
                if what == "rebuild" and label.startswith(("rebuild", "fork")):
                    label = oracle.rebuild_label(self._journal, id, self._found.logs[id])
                with self._noted(label, id, f"load({id}), {what}"):
                    view = await manager.load(id)
                    if view is None:
                        self._fail(
                            "view-differs", id, f"load({id}) says that there is none, {what}"
                        )
                        continue
                    into[id] = await content(view)
                    checked = await view.checkpoints.verify()
                    if not checked.ok and not self._is_ending(id):
                        label = self._check_label(id).replace("check-false", "verify-false")
                        self._fail(label, id, f"verify() of {id}, {what}: {checked.problems}")
        del plan

    async def _opened(self) -> None:
        """Open every session: what was posted comes in, and what is open is what the log says."""
        found, store = self._found, self._store()
        posted = {token.id for token in self._journal.tokens.values() if token.key}
        posted |= {act.ids[1] for act in self._journal.named("rename")} & set(found.logs)
        async with connect(store, self._plan) as manager:
            for id in sorted(posted | set(found.logs)):
                with self._noted(self._label(id, "open-failed"), id, f"open({id})"):
                    async with manager.open(id, wait=5) as session:
                        await session.save()
                        found.opened[id] = await content(session)
                        version = session.version
                    found.opened_logs[id] = [
                        line
                        for line in await read_log(lineage_of(store), SessionKey(id))
                        if line.seq <= version
                    ]

    async def _moved(self) -> None:
        """Back up, verify, restore and migrate the store at rest: what arrives is what there was."""
        stores = {name: self._store(name) for name in ("main", "backup", "restored", "moved")}
        for store in stores.values():
            await store.open()
        try:
            with self._noted("backup-failed", "", "backup"):
                done = await backup(stores["main"], stores["backup"], wait=5)
                for key, reason in done.failed.items():
                    self._fail("backup-failed", key, f"backup of {key}: {reason}")
                checked = await verify_backup(stores["backup"])
                for key, reason in checked.problems.items():
                    self._fail("backup-verify-false", key, f"backup --verify: {key}: {reason}")
            with self._noted("restore-failed", "", "restore-backup"):
                summary = await restore_backup(stores["backup"], stores["restored"], wait=5)
                for key, reason in summary.failed.items():
                    if not self._is_half_forgotten(key, reason):
                        self._fail("restore-failed", key, f"restore-backup of {key}: {reason}")
            with self._noted("migrate-failed", "", "migrate"):
                moved = await migrate(stores["main"], stores["moved"], wait=5)
                for key, reason in moved.failed.items():
                    if not self._is_half_forgotten(key, reason):
                        self._fail("migrate-stuck", key, f"migrate of {key}: {reason}")
        finally:
            for store in stores.values():
                await store.aclose()
        failed = {one.id for one in self.failures}
        for name in ("restored", "moved"):
            async with perdure.connect(
                self._store(name), read_only=True, shutdown=Shutdown(signals=False)
            ) as manager:
                there = {info.key.agent for info in await manager.list(limit=1000)}
                for id, view in self._found.views.items():
                    if id in failed or self._is_ending(id):
                        continue
                    with self._noted(f"{name}-differs", id, f"load({id}) of what was {name}"):
                        copy = await manager.load(id)
                        how = (
                            "there is none"
                            if copy is None
                            else view.difference(await content(copy))
                        )
                        if how and (
                            copy is not None
                            or any(line.kind != "epoch" for line in self._found.logs[id])
                        ):
                            self._fail(f"{name}-differs", id, f"{id} as {name}: {how}")
                for id in there - set(self._found.logs):
                    self._fail(f"{name}-differs", id, f"{id} was {name}, and is not there any more")

    def _is_ending(self, id: str) -> bool:
        """Whether a forgetting of this session was cut off: it is not moved, so as not to stay."""
        log = self._found.logs.get(id)
        return log is not None and log[-1].kind == ENDING

    def _is_half_forgotten(self, id: str, reason: str) -> bool:
        return "forget it again" in reason and self._is_ending(id)


class Overheard(logging.Handler):
    """Keeps what is logged as an error.

    Args:
        journal: Where to.
        may_be_stopped: Whether a process may stand still for longer than its lease: then another one takes its sessions over, which
            it finds out when it goes on.

    """

    def __init__(self, journal: Journal, *, may_be_stopped: bool) -> None:
        super().__init__(logging.ERROR)
        self._journal = journal
        self._may_be_stopped = may_be_stopped

    def emit(self, record: logging.LogRecord) -> None:
        said = str(record.msg)
        if said.startswith("stopped with sessions"):
            return  # what is raised then, or that it was killed, is judged
        error = record.exc_info[1] if record.exc_info else None
        text = self.format(record)[-1500:]
        if "another process has taken it over" in said:
            if not self._may_be_stopped:
                self._journal.note("error", "lease-lost", record.__dict__["session"], text)
            return
        kind = f": {type(error).__name__}" if error is not None else ""
        if isinstance(error, perdure.PerdureError) and not isinstance(error, NEVER):
            kind = " with an ordinary answer"
        self._journal.note("error", f"error-log: {said.splitlines()[0][:60]}{kind}", "", text)


async def play(
    plan: Plan, place: Place, journal: Journal, tamper: Callable[[Store], Store]
) -> list[Failure]:
    """Run the phases of an episode, and judge it."""
    found = Found()
    judge = Judge(plan, place, journal, found, tamper)

    def store(name: str) -> Store:
        made = place.store("main")
        return (
            RestlessStore(made, random.Random(f"{plan.seed} {name} {plan.salt}"))
            if plan.restless
            else made
        )

    mine = store("main")
    main = await connect(mine, plan)
    twin = await connect(store("twin"), plan) if plan.twin else None
    actors = [Actor(main, "main", place, journal, plan.theme.ids)]
    if twin is not None:
        actors.append(Actor(twin, "twin", place, journal, plan.theme.ids))
    for id in plan.theme.ids:
        before = random.Random(f"{plan.seed} before {id}")
        for step in range(before.randint(0, plan.theme.turns_before)):
            name, own = (
                before.choice(("turn", "turn", "named turn", "memory")),
                random.Random(before.random()),
            )
            if f"before:{id}.{step}" not in plan.skip:
                await actors[0].act(name, "before", f"{id}.{step}", own, (id,))
    for phase in range(plan.phases):
        await judge.note_seen(mine)
        other = Other(plan, place, journal, phase) if plan.other else None
        async with anyio.create_task_group() as group:
            if other is not None:
                group.start_soon(troubled, other, random.Random(f"{plan.seed} trouble {phase}"))
            for actor in actors:
                tasks = plan.tasks if len(actors) == 1 else (plan.tasks + 1) // 2
                group.start_soon(in_tasks, actor, actor.name, plan, phase, tasks)
        if twin is None and other is None:
            await judge.live(main, mine)
        await judge.note_seen(mine)
    await _closed(journal, "twin", twin, dies=False)
    await _closed(journal, "main", main, dies=plan.dies)
    await judge.everything()
    return judge.failures


async def _closed(
    journal: Journal, name: str, manager: SessionManager | None, *, dies: bool
) -> None:
    if manager is None:
        return
    with anyio.move_on_after(BOUND) as scope:
        if dies:
            await kill(manager)
            journal.note("closed", name, "killed")
            return
        try:
            report = await manager.aclose()
            report.raise_if_unsaved()
        except perdure.PerdureError as error:
            journal.note("closed", name, f"{type(error).__name__}: {error}")
            if not isinstance(error, perdure.UnsavedChangesError) or not report.lost:
                journal.note("error", "unsaved-at-close", name, f"{type(error).__name__}: {error}")
        else:
            journal.note("closed", name, "clean")
    if scope.cancelled_caught:
        journal.note("error", "stuck@aclose", name, f"it had not ended after {BOUND} s")


def _overdue(plan: Plan, journal: Journal) -> None:
    """End this process: something blocks the loop, or does not end although it was cancelled."""
    print(
        f"STUCK: seed {plan.seed} ({plan.told()}) has not ended after {LONGEST} s; these had not ended:"
    )
    for act in list(journal.acts.values()):
        if act.left == float("inf"):
            print("   ", act.told())
    sys.stdout.flush()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


def unchanged(store: Store) -> Store:
    return store


def run(plan: Plan, place: Place, *, tamper: Callable[[Store], Store] = unchanged) -> Episode:
    """Run one episode at a fresh place, and remove the place."""
    journal = Journal()
    overheard = Overheard(journal, may_be_stopped=plan.other)
    loggers = [logging.getLogger(name) for name in ("perdure", "asyncio")]
    levels = [one.level for one in loggers]
    for logger in loggers:
        logger.addHandler(overheard)
        logger.propagate = False
        logger.setLevel(logging.ERROR)
    overdue = threading.Timer(LONGEST, _overdue, (plan, journal))
    overdue.daemon = True
    overdue.start()
    try:
        if plan.backend == "trio":
            failures = anyio.run(play, plan, place, journal, tamper, backend="trio")
        else:
            failures = asyncio.run(play(plan, place, journal, tamper))
    except Exception as error:
        failures = [Failure("bare-error@episode", "", traced(error))]
    finally:
        overdue.cancel()
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(overheard)
            logger.propagate = True
            logger.setLevel(level)
        place.remove()
    return Episode(plan, journal, failures)
