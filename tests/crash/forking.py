"""Fork sessions that go meanwhile, killed at any step: each fork is whole and its own, or refused.

A round has sessions of many records (`stories`). Two processes fork them, at any point and in both ways,
and are killed at calls of the store, or of the disk; what is done to the sources meanwhile is killed, too.
Another process looks all the time, by every door through which a session can be seen. In the end all forks
are compared with what their source was, as whoever wrote it knows; then the sources and all garbage go,
and they are compared once more.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import httpx

import perdure.inspector
from perdure import Limits, PerdureError, Retention, SessionManager, Shutdown, connect
from perdure.cli import main as command_line
from perdure.cli.check import audit
from perdure.errors import (
    CorruptRecordError,
    LeaseHeldError,
    SessionNotFoundError,
    StoreUnavailableError,
)
from perdure.lease import LeaseOptions
from perdure.records.keys import SessionKey
from perdure.records.records import HOLDER_KINDS
from perdure.session.copier import _Copier
from perdure.store import LogChunk, Outcome, Store
from perdure.stores.delegate import DelegatingStore
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryStore
from perdure.testing.faulty import _Intercepted
from perdure.transfer import migrate, restore_backup
from tests.crash import aging, places, stories, work
from tests.crash.forks import Child, Report
from tests.crash.hooks import Real, Tripwire
from tests.crash.scratch import scratch
from tests.crash.stories import Story
from tests.runners import run

SOURCES = 4
FORKS = 20
"""In a round."""
FORKERS = 2
CALLS = 40
"""Calls of the store in a fork, about."""
STEPS = ("acquire", "append_many", "put_blobs", "renew", "write_documents", "publish", "release")
"""Those of a fork that change something."""
STOPS = (
    ("acquire", False),
    ("acquire", True),
    ("append_many", False),
    ("append_many", True),
    ("renew", False),
    ("renew", True),
    ("write_documents", True),
    # What is done to the source now is seen by no look at it.
    *[("publish", False)] * 4,
    ("publish", True),
)
"""Before or behind which of them it may be stopped, while something is done to its source."""
STEPS_OF_CHANGES = (*STEPS, "delete", "remove_blobs", "trim", "drafts")
HELD = LeaseOptions(heartbeat=0.5, ttl=4.0)
AGAIN = 10
"""Tries of what is refused for a moment."""
PATIENT = 60.0
"""Seconds to wait for a dead owner to be known as such, on a slow machine."""
GRACE = "1"
"""Hours that a blob has to lie about before a sweep takes it."""
TOKEN = "of the one who looks"


def manager(store: Store) -> SessionManager:
    # All media are shown, so that the context says what was said.
    limits = Limits(context_media_tokens=10**9)
    quiet = Shutdown(signals=False)
    return connect(store, autosave=None, lease=HELD, shutdown=quiet, limits=limits)


# What is asked for, and where it ends


class Wanted(NamedTuple):
    """A fork to make."""

    id: str
    of: str
    """The source's id."""
    lives: tuple[Story, ...]
    """What the source is, and what it may be if it is made again."""
    at: int | str | None
    history: Literal["full", "context"]

    def seq_in(self, life: Story) -> int | None:
        """Return the last record that it has of a life of its source, None if that has none."""
        if isinstance(self.at, str):
            return life.turns.get(self.at)
        return life.head if self.at is None else self.at if self.at in life.lines else None

    def moments(self) -> list[tuple[Story, int]]:
        ends = [(life, self.seq_in(life)) for life in self.lives]
        return [(life, seq) for life, seq in ends if seq is not None]

    async def wrong_view(self, view: Any) -> list[str]:
        """Return what does not fit, if the session fits to no life of its source."""
        found = [await stories.of_view(life, seq, view) for life, seq in self.moments()]
        return min(found, key=len)


class Plan(NamedTuple):
    """What a round is going to do."""

    root: Path
    wanted: list[Wanted]
    acts: list[tuple[int, str, str]]
    """What is done to which source when so many forks have been asked for."""

    @property
    def pruned(self) -> set[str]:
        return {id for _, act, id in self.acts if act == "prune"}

    @property
    def forgotten(self) -> set[str]:
        """Whose blobs go before they do."""
        return {id for _, act, id in self.acts if act == "forget"}

    @property
    def made_again(self) -> set[str]:
        return {id for _, act, id in self.acts if act == "again"}


class Death(NamedTuple):
    """Where a process is killed."""

    call: int
    """The one before or behind which it is."""
    of: str
    """A method of the store; "" for any, and "disk" for the calls that change that."""
    behind: bool = False
    stops: bool = False
    """It is stopped only, while something is done to the sources."""


def drawn_death(dice: random.Random, steps: Sequence[str], *, may_stop: bool = False) -> Death:
    """Draw a place to die in: one of the steps as likely as another, any call, or a disk's."""
    if may_stop and dice.random() < 0.5:
        return Death(1, *dice.choice(STOPS), stops=True)
    if places.chosen() == "file" and dice.random() < 0.3:
        return Death(dice.randint(1, 2 * CALLS), "disk")
    step = dice.choice(steps) if dice.random() < 0.7 else ""
    return Death(dice.randint(1, 2 if step else CALLS), step, dice.random() < 0.5)


class DyingStore(DelegatingStore):
    """Kill this process at a call."""

    def __init__(self, store: Store, report: Report) -> None:
        super().__init__(cast("Store", _Intercepted(store, self._call)))
        self._store = store
        self._report = report
        self.death: Death | None = None
        self._calls = 0

    def arm(self, death: Death) -> None:
        """Count from here on."""
        if death.of == "disk":
            Noted(death.call, self._report).install()
        else:
            self.death, self._calls = death, 0

    def _pass(self, method: str, *, behind: bool) -> None:
        death = self.death
        if death is None or method in {"heartbeat", "wait_for_notification"}:
            return
        if death.of not in ("", method):
            return
        self._calls += not behind
        if self._calls == death.call and behind == death.behind:
            place = f"{method} {'done' if behind else 'asked'}"
            self.death = None
            self._report("stopping" if death.stops else "dying", place)
            os.kill(os.getpid(), signal.SIGSTOP if death.stops else signal.SIGKILL)

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        self._pass(method, behind=False)
        result = await getattr(self._store, method)(*args, **options)
        self._pass(method, behind=True)
        return result

    async def append_many(self, batches: Any) -> list[Outcome]:
        return cast("list[Outcome]", await self._call("append_many", batches))

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        self._pass("read_log", behind=False)
        log = self._store.read_log(key, after=after, before=before, limit=limit, reverse=reverse)
        async with contextlib.aclosing(log):
            async for chunk in log:
                yield chunk
        self._pass("read_log", behind=True)


class Noted(Tripwire):
    """Kill this process at a call of the disk, and say which."""

    def __init__(self, at: int, report: Report) -> None:
        super().__init__(at, "kill torn" if at % 3 == 0 else "kill")
        self._report = report

    def _trip(self, name: str, real: Real, args: tuple[Any, ...]) -> None:
        self._report("dying", f"os.{name}")
        super()._trip(name, real, args)


# The processes


def in_process(program: Callable[[], Awaitable[None]]) -> None:
    run(work.RUNNER[0], program)  # type: ignore[arg-type]


@asynccontextmanager
async def connected(root: Path) -> AsyncGenerator[SessionManager, None]:
    async with manager(places.make(root, None)) as sessions:
        yield sessions


def prepare(root: Path, records: int, seed: int, into: Path) -> None:
    """Write the sources, and down what they are."""

    async def main() -> None:
        async with connected(root) as sessions:
            lives = {
                f"source {n}": tuple(
                    [
                        await stories.write(sessions, id, records, random.Random(f"{seed}/{id}"))
                        for id in (f"source {n}", again(f"source {n}"))
                    ]
                )
                for n in range(SOURCES)
            }
        into.write_bytes(pickle.dumps(lives))

    in_process(main)
    aging.age(root, only_set_aside=False)


def fork_all(root: Path, wanted: list[Wanted], deaths: list[Death | None], report: Report) -> None:
    """Make forks, one after the other, and die in one of them."""

    async def main() -> None:
        store = DyingStore(places.make(root, None), report)
        async with manager(store) as sessions:
            for one, death in zip(wanted, deaths, strict=True):
                if death is not None:
                    store.arm(death)
                report("asked", one.id)
                try:
                    made = await fork(sessions, one)
                except PerdureError as error:
                    report("refused", one.id, type(error).__name__, str(error))
                else:
                    report("made", one.id, made.at)

    in_process(main)


async def fork(sessions: SessionManager, one: Wanted) -> Any:
    options: Any = {"at": one.at, "history": one.history}
    try:
        return await sessions.fork(one.of, one.id, **options)
    except SessionNotFoundError:
        return await sessions.fork(renamed(one.of), one.id, **options)


def renamed(id: str) -> str:
    return f"{id} renamed"


def again(id: str) -> str:
    return f"{id} again"


async def made_again(sessions: SessionManager, id: str) -> None:
    """Have another session under an id."""
    if await sessions.exists(again(id)):
        await sessions.delete(id)
        await sessions.rename(again(id), id)


ACTS: dict[str, Callable[[SessionManager, str, random.Random], Awaitable[object]]] = {
    "again": lambda sessions, id, _: made_again(sessions, id),
    "delete": lambda sessions, id, _: sessions.delete(id),
    "forget": lambda sessions, id, _: sessions.forget(id),
    "rename": lambda sessions, id, _: sessions.rename(id, renamed(id)),
    "prune": lambda sessions, id, dice: sessions.prune(
        Retention(keep_turns=dice.randint(0, 60)), id=id, on_held="handover", wait=10.0
    ),
}
FATES: tuple[tuple[str, ...], ...] = (
    (),
    ("prune",),
    ("delete", "sweep"),
    ("forget",),
    ("rename",),
    ("rename", "sweep"),
    ("prune", "prune", "delete", "sweep", "sweep"),
    ("prune", "rename"),
    ("again",),
    ("again", "prune"),
    ("prune", "again", "sweep"),
    ("prune", "forget", "sweep"),
)
"""What becomes of a source, one after the other."""


def change(plan: Plan, act: str, id: str, seed: int, death: Death | None, report: Report) -> None:
    """Do something to a source, and die in it."""
    root = plan.root
    dice = random.Random(seed)
    if act == "sweep":
        if death is not None and death.of == "disk":
            Noted(death.call, report).install()
        sweep(root, report, but=plan.forgotten)
        return

    async def main() -> None:
        store = DyingStore(places.make(root, None), report)
        async with manager(store) as sessions:
            if death is not None:
                store.arm(death)
            for _ in range(AGAIN):
                try:
                    await ACTS[act](sessions, id, dice)
                except StoreUnavailableError:  # a session was pruned while it was read
                    continue
                except PerdureError as error:
                    report("not done", type(error).__name__)
                break

    in_process(main)


def told(words: list[str]) -> tuple[int, str, str]:
    """Run the command line; return its status, what it says, and what it says of errors."""
    data, errors = io.BytesIO(), io.StringIO()
    said = io.TextIOWrapper(data, write_through=True)  # JSON goes to its buffer
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        status = command_line(words)
    return status, data.getvalue().decode(), errors.getvalue()


def checked(root: Path, *words: str, but: Collection[str]) -> list[str]:
    """Check a store; return the problems, but for those of sessions that are being forgotten."""
    _, said, _ = told(["check", *words, "--json", "--store", places.url(root)])
    found = json.loads(said)
    if "sessions" not in found:
        is_busy = found["error"]["type"] == StoreUnavailableError.__name__
        return [] if is_busy else [said]
    return [
        f"{seen['agent']}: {finding['detail']}"
        for seen in found["sessions"]
        for finding in seen["findings"]
        if finding.get("level", "problem") == "problem" and seen["agent"] not in but
    ]


def dead_drafts(root: Path) -> set[tuple[str, int]]:
    """Return the drafts of processes that are known to be dead, with their epochs."""
    found: set[tuple[str, int]] = set()

    async def main() -> None:
        async with connected(root) as sessions:
            store = sessions._store.inner
            for draft in await store.drafts(""):
                holder = await store.holder(draft.key)
                if holder is not None and holder.alive is False and holder.epoch == draft.epoch:
                    found.add((draft.key.agent, draft.epoch))

    in_process(main)
    return found


def sweep(root: Path, report: Report, *, but: Collection[str] = ()) -> None:
    """Collect garbage twice, with a day between."""
    dead = dead_drafts(root)
    for _ in range(2):
        for problem in checked(root, "--gc", "--grace", GRACE, but=but):
            report("problem", f"check --gc: {problem}")
        aging.age(root, only_set_aside=True)
    for id, epoch in sorted(dead):
        if (id, epoch) in dead_drafts(root):
            report("problem", f"{id} is a draft after check --gc")
        report("drafts gone", "check --gc")


# Whoever looks meanwhile


class Looker:
    """Looks at all sessions, and knows what each fork has to be, if there is one."""

    def __init__(self, plan: Plan, seed: int, report: Report) -> None:
        self._plan = plan
        self._root = plan.root
        self._wanted = {one.id: one for one in plan.wanted}
        self._dice = random.Random(seed)
        self._report = report
        self._whole: set[str] = set()
        """Forks that were there: they stay."""

    def look_until(self, stop: Path) -> None:
        doors: list[tuple[int, Callable[[str], None] | Callable[[SessionManager, str], Any]]] = [
            (8, self.list),
            (8, self.load),
            (3, self.open),
            (5, self.forget),
            (4, self.inspector),
            (3, self.show),
            (1, self.check),
            (1, self.backup),
            (1, self.migrate),
        ]
        ids = sorted(self._wanted)
        while not stop.exists():
            (door,) = self._dice.choices([door for _, door in doors], [often for often, _ in doors])
            self._see(door, self._dice.choice(ids))
            self._report("looked", door.__name__)

    def _see(self, door: Any, id: str) -> None:
        if door in (self.show, self.check, self.backup):
            door(id)
            return

        async def main() -> None:
            async with connected(self._root) as sessions:
                try:
                    await door(sessions, id)
                except StoreUnavailableError:
                    self._report("not now", door.__name__)

        in_process(main)

    def _wrong(self, door: str, id: str, what: object) -> None:
        self._report("problem", f"{door} shows {id}, which {what}")

    async def _judge(self, door: str, id: str, view: Any, *, elsewhere: bool = False) -> None:
        one = self._wanted[id]
        if is_blank(view):
            if id in self._whole and not elsewhere:
                self._wrong(door, id, "was there, and is not any more")
            return
        if wrong := await one.wrong_view(view):
            self._wrong(door, id, wrong)
        elif not elsewhere:
            self._whole.add(id)

    async def list(self, sessions: SessionManager, _: str) -> None:
        listed = {info.key.agent: info for info in await sessions.list()}
        for id in listed.keys() & self._wanted.keys():
            view = await sessions.load(id)
            await self._judge("list", id, view)
            if not is_blank(view):
                await self._described(sessions, id, view, listed[id])
        for id in self._whole - listed.keys():
            self._wrong("list", id, "was there, and is not listed any more")

    async def _described(self, sessions: SessionManager, id: str, view: Any, info: Any) -> None:
        """A fork is listed with what is said about it, from the first moment on."""
        title = view.info.metadata.title
        if info.title != title:  # it may have come since
            (info,) = [found for found in await sessions.list(prefix=id) if found.key == info.key]
        if info.title != title:
            self._wrong("list", id, f"is listed as {info.title}, {title}")

    async def load(self, sessions: SessionManager, id: str) -> None:
        await self._judge("load", id, await sessions.load(id))

    async def open(self, sessions: SessionManager, id: str) -> None:
        with contextlib.suppress(LeaseHeldError):
            async with sessions.open(id, on_held="raise", wait=0) as session:
                await self._judge("open", id, session)
                await session.aclose()

    async def forget(self, sessions: SessionManager, id: str) -> None:
        found = await sessions.forget(id, dry_run=True)
        one = self._wanted[id]
        life, seq = one.moments()[0]
        least = seq - life.first
        changed = self._plan.pruned | self._plan.made_again
        if one.history == "full" and one.of not in changed:
            if found.sessions and BLANK < found.records < least:
                self._wrong("forget", id, f"has {found.records} records, of {least}")

    async def inspector(self, sessions: SessionManager, id: str) -> None:
        one = self._wanted[id]
        app = perdure.inspector.app(sessions, token=TOKEN)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://localhost:8000",
            headers={"authorization": f"Bearer {TOKEN}"},
        ) as http:
            listed = (await http.get("/?format=json")).json()["sessions"]
            for info in listed:
                if (seen := info["key"]["agent"]) in self._wanted:
                    await self._judge("inspector", seen, await sessions.load(seen))
            for page in ("/session", "/context", "/states", "/checkpoints", "/restore"):
                answer = await http.get(page, params={"agent": id, "format": "json"})
                if answer.status_code not in (200, 404):
                    self._wrong("inspector", id, f"{page}: {answer.text}")
                elif page == "/states" and answer.status_code == 200:
                    names = {found["key"] for found in answer.json()["states"]}
                    known = [life.at(seq).states.keys() for life, seq in one.moments()]
                    if names and names not in known:
                        self._wrong("inspector", id, f"has the states {names}")

    async def migrate(self, sessions: SessionManager, _: str) -> None:
        target = MemoryStore()
        await target.open()
        done = await migrate(sessions._store.inner, target)
        for key, why in done.failed.items():
            if key not in self._plan.forgotten:
                self._wrong("migrate", key, why)
        async with manager(target) as there:
            for id in self._wanted:
                await self._judge("migrate", id, await there.load(id), elsewhere=True)

    def show(self, id: str) -> None:
        status, said, errors = told(["show", id, "--json", "--store", places.url(self._root)])
        if status:
            if "there is no session" not in errors:
                self._wrong("show", id, errors)
            return
        shown, one = json.loads(said), self._wanted[id]
        known = [life.at(seq).memory.keys() for life, seq in one.moments()]
        if shown["messages"] and set(shown["memory"]) not in known:
            self._wrong("show", id, f"remembers {shown['memory']}")

    def check(self, _: str) -> None:
        for problem in checked(self._root, but=self._plan.forgotten):
            self._wrong("check", "a session", problem)

    def backup(self, _: str) -> None:
        backup = str(self._root.parent / "backup")
        status, said, errors = told(["backup", places.url(self._root), backup, "--verify"])
        if status:
            self._wrong("backup", "a session", said + errors)


BLANK = 12
"""Records of a session that was only opened, at most: of epochs."""


def is_blank(view: Any) -> bool:
    """Whether there is no session, or one that was only opened."""
    return view is None or (not view.context() and not view.info.messages)


# Whoever judges, when all others have gone


class Judge:
    """Compares what is left with what was told."""

    def __init__(
        self,
        plan: Plan,
        made: dict[str, int],
        seed: int,
        report: Report,
    ) -> None:
        self._plan = plan
        self._root = plan.root
        self._wanted = plan.wanted
        self._made = made
        self._dice = random.Random(seed)
        self._report = report
        self._there: set[str] = set()

    def judge(self) -> None:
        in_process(self._before)
        sweep(self._root, self._report)
        in_process(self._without_drafts)
        aging.age(self._root, only_set_aside=False)
        sweep(self._root, self._report)
        in_process(self._after)

    async def _before(self) -> None:
        """Judge the forks; then drafts go, by an open of the id or with what they are made of."""
        async with connected(self._root) as sessions:
            await self._forks(sessions, "when all had gone")
            await self._backed_up()
            store = sessions._store.inner
            left = await store.drafts("")
            self._report("drafts", len(left))
            for found in left:
                way = self._dice.choice(("open", "forget", "check --gc", "check --gc"))
                id = found.key.agent
                if way == "open":
                    async with sessions.open(id, wait=PATIENT) as session:
                        if not is_blank(session):
                            self._wrong(id, "was a draft, and opens with something")
                        await session.aclose()
                elif way == "forget" and await sessions.exists(found.draft.source.agent):
                    await sessions.forget(found.draft.source.agent, wait=PATIENT)
                else:
                    continue
                self._report("drafts gone", way)
                if id in {one.key.agent for one in await store.drafts("")}:
                    self._wrong(id, f"is a draft after {way}")

    async def _without_drafts(self) -> None:
        """See that a sweep took the other drafts; then let the sources go."""
        async with connected(self._root) as sessions:
            store = sessions._store.inner
            for found in await store.drafts(""):
                holder, id = await store.holder(found.key), found.key.agent
                if holder is None or holder.alive is not None:
                    self._wrong(id, "is a draft after check --gc")
                    continue
                # A server that does not see processes knows of silence only, in time: an open does.
                self._report("drafts left", id)
                async with sessions.open(id, wait=PATIENT) as session:
                    await session.aclose()
            if await store.drafts(""):
                self._wrong("something", "is a draft after the next open of its id")
            sources = {one.of for one in self._wanted}
            for id in sorted(sources | {*map(renamed, sources), *map(again, sources)}):
                act = sessions.delete if self._dice.random() < 0.5 else sessions.forget
                await act(id, wait=PATIENT)

    async def _after(self) -> None:
        async with connected(self._root) as sessions:
            await self._forks(sessions, "without its source")

    async def _forks(self, sessions: SessionManager, when: str) -> None:
        listed = {info.key.agent for info in await sessions.list()}
        for one in self._wanted:
            view = await sessions.load(one.id)
            if (one.id in listed) != (view is not None):
                holder = await sessions._store.inner.holder(SessionKey(one.id))
                # An open of a new id that was killed before its first record is listed on files.
                is_begun = holder is not None and not holder.deleted and holder.draft is None
                if one.id not in listed or not is_begun:
                    self._wrong(one.id, f"is listed: {one.id in listed}, {when}, {holder}")
            if is_blank(view):
                if one.id in self._made or one.id in self._there:
                    self._wrong(one.id, f"is not there, {when}")
                continue
            self._there.add(one.id)
            for what in await self._fork(sessions, one, view):
                self._wrong(one.id, f"{what}, {when}")
        self._report("whole", len(self._there))

    async def _fork(self, sessions: SessionManager, one: Wanted, view: Any) -> list[str]:
        store, key, is_full = sessions._store.inner, SessionKey(one.id), one.history == "full"
        holder = await store.holder(key)
        assert holder is not None
        assert holder.draft is not None
        at = holder.draft.up_to
        log = await stories.log_of(store, key)
        seen = await audit(sessions._store, key)
        found: list[list[str]] = []
        for life, seq in one.moments():
            wrong = []
            if self._made.get(one.id, at) != at or (at < seq if one.at is None else at != seq):
                wrong.append(f"ends at {at}, asked: {seq}, told: {self._made.get(one.id)}")
            if is_full:
                wrong += stories.of_log(life, at, log, pruned=one.of in self._plan.pruned)
            elif log[0].seq != at + 1 or log[0].kind not in HOLDER_KINDS:
                wrong.append(f"begins with record {log[0].seq}, a {log[0].kind}, behind {at}")
            wrong += await stories.of_view(life, at, view)
            wrong += await stories.of_blobs(life, at, view, store, full=is_full)
            found.append(wrong)
        wrong = min(found, key=len)
        return wrong + [f"has a problem: {finding.detail}" for finding in seen.problems]

    async def _backed_up(self) -> None:
        """Look at what the last backup has."""
        place = self._root.parent / "backup"
        if not place.exists():
            return
        source, target = FileStore(place), MemoryStore()
        await source.open()
        await target.open()
        await restore_backup(source, target)
        await source.aclose()
        async with manager(target) as restored:
            for one in self._wanted:
                view = await restored.load(one.id)
                if not is_blank(view) and (wrong := await one.wrong_view(view)):
                    self._wrong(one.id, f"is in the backup, and {wrong}")

    def _wrong(self, id: str, what: object) -> None:
        self._report("problem", f"{id} {what}")


# A round


class Forker:
    """A process that makes forks, and another one when it was killed."""

    def __init__(self, root: Path, wanted: list[Wanted], dice: random.Random) -> None:
        self._root = root
        self._left = wanted
        self._dice = dice
        self._child: Child | None = None
        self._given: list[Wanted] = []
        self.events: list[Any] = []
        self.is_stopped = False
        self.waits_for = 0
        """How much is to be done to its source before it goes on, while it is stopped."""

    @property
    def source(self) -> str:
        """That of the fork that it is making."""
        id = next(event[1] for event in reversed(self._heard()) if event[0] == "asked")
        return next(one.of for one in self._given if one.id == id)

    @property
    def asked(self) -> int:
        return sum(event[0] == "asked" for event in (*self.events, *self._heard()))

    def _heard(self) -> list[Any]:
        return [] if self._child is None else self._child.events

    def goes_on(self) -> bool:
        """Listen, or begin anew; False when it is through."""
        child = self._child
        if child is None:
            if not self._left:
                return False
            self._given = self._left
            root, given = self._root, self._left
            deaths = [self._death() for _ in given]
            self._child = Child(lambda report: fork_all(root, given, deaths, report))
        elif self.is_stopped:
            pass
        elif not child.listen_on():
            self._ended(child)
        elif child.events and child.events[-1][0] == "stopping" and child.wait_stopped():
            self.is_stopped, self.waits_for = True, self._dice.randint(1, 3)
        return True

    def go_on(self) -> None:
        """Let it go on that was stopped."""
        assert self._child is not None
        self.is_stopped = False
        self._child.events.append(["goes on"])
        self._child.go_on()

    def _death(self) -> Death | None:
        return drawn_death(self._dice, STEPS, may_stop=True) if self._dice.random() < 0.4 else None

    def _ended(self, child: Child) -> None:
        events = child.wait()
        if child.status and not child.was_killed:
            events.append(["problem", f"a forker ended with status {child.status}"])
        asked = [event[1] for event in events if event[0] == "asked"]
        answered = {event[1] for event in events if event[0] in ("made", "refused")}
        self._left = [one for one in self._given if one.id not in asked]
        if child.was_killed and asked and asked[-1] not in answered and self._dice.random() < 0.4:
            self._left = [one for one in self._given if one.id == asked[-1]] + self._left
        self.events += [*events, *([["killed"]] if child.was_killed else [])]
        self._child = None


class Changer:
    """A process for each thing that is done to the sources, when it is due."""

    def __init__(self, plan: Plan, dice: random.Random) -> None:
        self._plan = plan
        self._left = sorted(plan.acts)
        self._dice = dice
        self._child: Child | None = None
        self._act = (0, "", "")
        self.events: list[Any] = []

    def has_more(self, id: str) -> bool:
        """Whether anything more is to be done to a source."""
        return any(of == id for _, _, of in self._left)

    def goes_on(self, asked: int, stopped: Forker | None) -> bool:
        """Listen, or begin what is due, or is to be done to what is forked; False when it is through."""
        child = self._child
        if child is not None:
            if not child.listen_on():
                self._ended(child, stopped)
            return True
        due = [act for act in self._left if act[0] <= asked]
        if stopped is not None:
            due = [act for act in self._left if act[2] == stopped.source]
        if due:
            self._begin(due[0])
        return bool(self._left)

    def _begin(self, act: tuple[int, str, str]) -> None:
        dice, plan = self._dice, self._plan
        _, what, id = self._act = act
        death = drawn_death(dice, STEPS_OF_CHANGES)
        if what == "sweep" and places.chosen() == "file":
            death = Death(dice.randint(1, CALLS), "disk")
        dies, seed = death if dice.random() < 0.4 else None, dice.getrandbits(32)
        self.events.append(["changed", what])
        self._child = Child(lambda report: change(plan, what, id, seed, dies, report))

    def _ended(self, child: Child, stopped: Forker | None) -> None:
        self.events += child.wait()
        if child.status and not child.was_killed:
            self.events.append(["problem", f"a changer ended with status {child.status}"])
        if child.was_killed:
            self.events.append(["killed"])
        # Somebody comes back to most of what was begun; to be forgotten is always asked again.
        is_left = self._act[1] != "forget" and self._dice.random() < 0.3
        if not child.was_killed or is_left:
            self._left.remove(self._act)
            if stopped is not None:
                stopped.waits_for -= 1
        self._child = None


def one_round(top: Path, forks: int, records: int, dice: random.Random) -> list[Any]:
    """Fork the sessions of a store, and return all that was told."""
    root, told_of, stop = top / "store", top / "stories", top / "stop"
    seeds = [dice.getrandbits(32) for _ in range(3)]
    prepared = Child(lambda _: prepare(root, records, seeds[0], told_of))
    if prepared.wait() or prepared.status:
        return [*prepared.events, ["problem", "no sources"]]
    lives: dict[str, tuple[Story, ...]] = pickle.loads(told_of.read_bytes())
    sources = sorted(lives)
    wanted = []
    for number in range(forks):
        source = dice.choice(sources)
        wanted.append(drawn(f"fork {number}", source, lives[source], dice))
    acts = []
    for id in sources:
        fate = dice.choice(FATES)
        dues = sorted(dice.randint(1, forks) for _ in fate)
        acts += [(due, act, id) for due, act in zip(dues, fate, strict=True)]
    plan = Plan(root, wanted, acts)
    looker = Child(lambda report: Looker(plan, seeds[1], report).look_until(stop))
    forkers = [Forker(root, wanted[at::FORKERS], dice) for at in range(FORKERS)]
    changer = Changer(plan, dice)
    forking = changing = True
    while forking or changing:
        forking = sum(forker.goes_on() for forker in forkers) > 0
        asked = sum(forker.asked for forker in forkers) if forking else forks
        stopped = next((forker for forker in forkers if forker.is_stopped), None)
        changing = changer.goes_on(asked, stopped)
        for forker in forkers:
            if forker.is_stopped and (forker.waits_for <= 0 or not changer.has_more(forker.source)):
                forker.go_on()
        looker.listen_on()
    stop.touch()
    events = [event for forker in forkers for event in forker.events] + changer.events
    made = {event[1]: event[2] for event in events if event[0] == "made"}
    events += looker.wait()
    judge = Child(lambda report: Judge(plan, made, seeds[2], report).judge())
    events += judge.wait()
    for name, child in (("looker", looker), ("judge", judge)):
        if child.status:
            events.append(["problem", f"the {name} ended with status {child.status}"])
    return events


def drawn(id: str, of: str, lives: tuple[Story, ...], dice: random.Random) -> Wanted:
    """Draw a fork at the end of a session, at a record, or at a turn's end."""
    story = lives[0]
    points = [seq for seq in story.points() if story.at(seq).said]
    turns = [turn for turn, seq in story.turns.items() if seq in points]
    at = dice.choice((None, dice.choice(points), dice.choice(points), dice.choice(turns)))
    return Wanted(id, of, lives, at, dice.choice(("full", "full", "context")))


UNEXPECTED = {CorruptRecordError.__name__}
"""Refusals that speak of damage, where there is none."""


def be_hasty() -> None:
    """Break the copier: from here on, in this process, it publishes what it has not written yet."""
    write = _Copier.write

    async def hasty(self: _Copier, more: Any) -> None:
        await self._target.publish(self._new, self._writer.grant.epoch)
        await write(self, more)

    _Copier.write = hasty  # type: ignore[method-assign]


def forks(
    *, forks: int, records: int = 1000, seed: int = 0, hasty: bool = False
) -> dict[str, object]:
    """Make so many forks, a round of them in each store."""
    if hasty:
        be_hasty()
    dice = random.Random(seed)
    refused, kills, stops = Counter[str](), Counter[str](), Counter[str]()
    looks, changes = Counter[str](), Counter[str]()
    drafts, gone, count = 0, Counter[str](), Counter[str]()
    problems: list[str] = []
    for begin in range(0, forks, FORKS):
        with scratch() as top:
            events = one_round(top, min(FORKS, forks - begin), records, dice)
        dying = ""
        for what, *rest in events:
            count[what] += 1
            if what == "refused":
                refused[rest[1]] += 1
                if rest[1] in UNEXPECTED:
                    problems.append(f"round {begin // FORKS}: {rest[0]} was refused: {rest[2]}")
            elif what == "dying":
                dying = rest[0]
            elif what == "killed":
                kills[dying] += 1
            elif what == "stopping":
                stops[rest[0]] += 1
            elif what == "looked":
                looks[rest[0]] += 1
            elif what == "changed":
                changes[rest[0]] += 1
            elif what == "drafts":
                drafts += rest[0]
            elif what == "drafts gone":
                gone[rest[0]] += 1
            elif what == "problem":
                problems.append(f"round {begin // FORKS}: {rest[0]}")
    return {
        "store": places.chosen(),
        "seed": seed,
        "forks": forks,
        "asked": count["asked"],
        "acknowledged": count["made"],
        "refused": dict(refused),
        "killed": count["killed"],
        "kills": dict(sorted(kills.items())),
        "stopped": dict(sorted(stops.items())),
        "changes": dict(changes),
        "looks": dict(looks),
        "not_now": count["not now"],
        "drafts": drafts,
        "drafts_gone": dict(gone),
        "drafts_left_by_gc": count["drafts left"],
        "problems": problems,
    }
