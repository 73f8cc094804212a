"""The operations that a schedule is made of, and the themes that weigh them.

Each notes what it is about to append before it does, so that what is found in a log has always been announced. What an operation
learns that no concurrent one can explain, it notes as an error at once: a verification that fails, an exception that is no answer.
"""

from __future__ import annotations

import fcntl
import itertools
import random
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

import perdure
from perdure import Message, Retention, SessionManager
from perdure.cli.check import audit
from perdure.records.keys import SessionKey
from perdure.store import SessionQuery, Store
from perdure.transfer import backup, migrate, restore_backup, verify_backup
from tests.schedules.journal import DOUBT, HAPPENED, REFUSED, Journal
from tests.schedules.places import Place, wobble

WAIT = 1.0
"""Seconds that an operation waits for another process."""


@dataclass
class Theme:
    """Which operations, how often, on how many sessions."""

    name: str
    weights: dict[str, int]
    ids: tuple[str, ...] = ("a", "b")
    cancels: float = 0.1
    turns_before: int = 4
    """Turns of each session before anything is concurrent."""
    twin: float = 0.2
    """How often a second manager in this process takes part: another process, to the store."""
    other: float = 0.15
    """How often a second process does."""
    loose: float = 0.0
    """How often only a few operations run at once."""


ALL = (
    "append save turn close fork copy rename prune rollback checkpoint verify delete forget post scope migrate backup check memory read "
    "retract rebuild list"
).split()

THEMES = {
    one.name: one
    for one in (
        Theme(
            "turns",
            {
                "append": 4,
                "save": 4,
                "turn": 6,
                "named turn": 6,
                "failed turn": 2,
                "close": 3,
                "memory": 2,
                "read": 4,
                "retract": 1,
                "list": 1,
                "rebuild": 1,
            },
            cancels=0.2,
            other=0.3,
        ),
        Theme(
            "forks",
            {
                "fork": 5,
                "turn": 5,
                "append": 2,
                "prune": 3,
                "close": 2,
                "delete": 1,
                "read": 2,
                "check": 2,
                "memory": 2,
            },
        ),
        Theme(
            "pruned forks",
            {"fork": 4, "turn": 6, "prune": 6, "close": 2, "read": 1},
            ids=("a",),
            turns_before=5,
        ),
        Theme(
            "renames",
            {"rename": 4, "append": 6, "turn": 4, "save": 3, "read": 1, "close": 1},
            ids=("a",),
            cancels=0.03,
            twin=0.1,
            other=0.1,
        ),
        Theme(
            "copies",
            {"copy": 6, "delete": 3, "prune": 3, "read": 1, "turn": 1},
            ids=("a",),
            cancels=0.05,
            turns_before=6,
            loose=0.7,
        ),
        Theme(
            "checkpoints",
            {
                "checkpoint": 8,
                "rollback": 4,
                "verify": 6,
                "prune checkpoints": 3,
                "turn": 3,
                "append": 2,
                "memory": 2,
                "close": 1,
            },
            ids=("a",),
            cancels=0.25,
            twin=0.1,
            other=0.1,
        ),
        Theme(
            "gone",
            {
                "delete": 3,
                "forget": 2,
                "turn": 6,
                "append": 3,
                "post": 3,
                "close": 2,
                "read": 2,
                "check": 1,
                "fork": 1,
                "scope": 1,
            },
        ),
        Theme(
            "posts",
            {
                "post": 8,
                "turn": 3,
                "close": 3,
                "rename": 1,
                "delete": 1,
                "append": 2,
                "check": 1,
                "read": 1,
            },
            other=0.3,
            cancels=0.2,
        ),
        Theme(
            "moving",
            {
                "backup": 2,
                "migrate": 2,
                "turn": 5,
                "append": 2,
                "memory": 2,
                "prune": 1,
                "fork": 2,
                "delete": 1,
                "post": 1,
                "check": 1,
                "checkpoint": 1,
            },
            ids=("a", "b"),
        ),
        Theme(
            "scopes", {"scope": 8, "read scope": 4, "turn": 2, "check": 1, "forget": 1}, other=0.3
        ),
        Theme(
            "all",
            dict.fromkeys(ALL, 1)
            | {
                "turn": 4,
                "named turn": 2,
                "failed turn": 1,
                "append": 2,
                "prune checkpoints": 1,
                "read scope": 1,
            },
            ids=("a", "b", "c"),
            other=0.25,
        ),
    )
}


class Refused(Exception):
    """A turn that is to be interrupted."""


class Actor:
    """What one manager's tasks act with.

    Args:
        manager: Connected.
        name: "main", "twin" or "other".
        place: Where, for stores of commands that run beside.
        ids: The sessions that most acts are about.

    """

    def __init__(
        self,
        manager: SessionManager,
        name: str,
        place: Place,
        journal: Journal,
        ids: Collection[str],
    ) -> None:
        self.manager = manager
        self.name = name
        self.place = place
        self.journal = journal
        self.ids = tuple(ids)

    async def act(
        self, name: str, who: str, number: str, dice: random.Random, ids: tuple[str, ...] = ()
    ) -> None:
        """Do one operation, and note how it went."""
        number = f"{who}:{number}"
        journal = self.journal
        doing = Doing(self, number, dice)
        ids = ids or self._ids(name, dice)
        detail = doing.detail(name)
        journal.note("begin", number, who, name, ids, detail)
        try:
            result = await getattr(doing, name.replace(" ", "_"))(*ids)
        except perdure.PerdureError as error:
            journal.note("end", number, REFUSED, f"{type(error).__name__}: {str(error)[:160]}")
            if isinstance(error, NEVER):
                journal.note(
                    "error", f"damage-claimed@{name}", number, f"{type(error).__name__}: {error}"
                )
        except Exception as error:
            journal.note("end", number, REFUSED, f"{type(error).__name__}: {str(error)[:160]}")
            journal.note("error", f"bare-error@{name}", number, traced(error))
        except BaseException as error:
            journal.note("end", number, DOUBT, type(error).__name__)
            raise
        else:
            journal.note("end", number, HAPPENED, result)

    def _ids(self, name: str, dice: random.Random) -> tuple[str, ...]:
        targets = [f"{one}{number}" for one in self.ids for number in (1, 2, 3)]
        known = [*self.ids] * 3
        if name not in ("append", "turn", "save") or dice.random() < 0.4:
            known += [act.ids[1] for act in self.journal.named("fork", "copy", "rename")]
        if name == "prune":
            known += [act.ids[1] for act in self.journal.named("fork", "copy")] * 4
        first = dice.choice(known)
        if name in ("fork", "copy", "rename"):
            second = dice.choice(targets)
            return (first, second if second != first else f"{first}x")
        if name in ("backup", "migrate", "check", "list", "scope", "read scope"):
            return ()
        return (first,)


NEVER = (
    perdure.CorruptRecordError,
    perdure.UnsupportedVersionError,
    perdure.AcknowledgedRecordsLostError,
    perdure.WrongLoopError,
    perdure.SessionQuarantinedError,
)
"""No schedule explains these: nothing was damaged, set back, or of another release."""


def traced(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))[-1500:]


class Doing:
    """One operation of one task."""

    def __init__(self, actor: Actor, number: str, dice: random.Random) -> None:
        self._actor = actor
        self._number = number
        self._dice = dice
        self._journal = actor.journal
        self._manager = actor.manager
        self._texts = itertools.count(1)
        self._drawn: Any = None

    def detail(self, name: str) -> str:
        """Draw what the operation needs besides ids, and say it."""
        dice = self._dice
        if name == "named turn":
            self._drawn = dice.choice(("r1", "r2", "r3"))
        elif name == "prune":
            self._drawn = dice.choice((0, 1, 2, 3))
            return f"keep_turns={self._drawn}"
        elif name == "prune checkpoints":
            self._drawn = dice.choice((1, 2, 3))
            return f"keep={self._drawn}"
        elif name == "fork":
            self._drawn = (
                None if dice.random() < 0.7 else dice.choice(("r1", "r2", "turn_0001", "turn_0002"))
            )
            return f"at={self._drawn}"
        elif name == "scope":
            self._drawn = dice.choice(("k1", "k2"))
        return str(self._drawn or "")

    def _note(self, kind: str, *facts: Any) -> None:
        self._journal.note(kind, *facts)

    def _error(self, label: str, text: str) -> None:
        self._note("error", label, self._number, text)

    def _new_texts(self, many: int) -> list[str]:
        return [f"{self._number}.{next(self._texts)}" for _ in range(many)]

    def _append(self, session: Any, many: int | None = None) -> None:
        texts = self._new_texts(many or self._dice.choice((1, 1, 2, 3)))
        self._note("intend", self._number, self._actor.name, session.id, texts, "")
        version = session.append(*map(Message.user, texts))
        self._note("accept", texts, session.epoch, version)

    def _durable(self, session: Any, version: int) -> None:
        self._note("durable", session.id, session.epoch, version)

    def _open(self, id: str, **options: Any) -> Any:
        return self._manager.open(id, wait=WAIT, **options)

    # sessions

    async def append(self, id: str) -> None:
        async with self._open(id) as session:
            self._append(session)
            if self._dice.random() < 0.3:
                await wobble(self._dice)
                self._append(session)

    async def save(self, id: str) -> None:
        async with self._open(id) as session:
            self._append(session)
            receipt = await session.save()
            self._durable(session, receipt.version)

    async def turn(self, id: str) -> None:
        async with self._open(id) as session:
            async with session.turn():
                self._append(session)
                await wobble(self._dice)
                if self._dice.random() < 0.3:
                    self._append(session)
                done = session.version
            self._durable(session, done)

    async def named_turn(self, id: str) -> str:
        async with self._open(id) as session:
            done = 0
            async with session.turn(self._drawn) as turn:
                if not turn.replayed:
                    self._append(session)
                    await wobble(self._dice)
                    self._append(session)
                    done = session.version
            self._durable(session, done)
            return "replayed" if turn.replayed else ""

    async def failed_turn(self, id: str) -> str:
        async with self._open(id) as session:
            try:
                async with session.turn(self._dice.choice(("r1", "r2", None))) as turn:
                    if turn.replayed:
                        return "replayed"
                    self._append(session)
                    await wobble(self._dice)
                    raise Refused
            except Refused:
                return "interrupted"

    async def close(self, id: str) -> None:
        session = await self._open(id, create=False)
        version = session.version
        await session.aclose()
        if session.durable_version < version:
            self._error(
                "close-unsaved",
                f"aclose() of {id} returned with records {session.durable_version + 1} to {version} unsaved",
            )
        self._durable(session, session.durable_version)

    async def memory(self, id: str) -> None:
        async with self._open(id) as session:
            session.memory.set(self._dice.choice("xyz"), {"by": self._number})
            await wobble(self._dice)
            session.state.set(self._dice.choice("st"), [self._number])
            if self._dice.random() < 0.2:
                session.memory.drop(self._dice.choice("xyz"))
            await session.save()

    async def retract(self, id: str) -> None:
        async with self._open(id, create=False) as session:
            await session.retract(after=max(session.version - self._dice.choice((1, 2, 4)), 0))
            await session.save()

    async def read(self, id: str) -> list[str] | None:
        view = await self._manager.load(id)
        if view is None:
            return None
        return [message.text for message in view.context()]

    async def rebuild(self, id: str) -> list[str]:
        report = await self._manager.rebuild_working_context(id, dry_run=self._dice.random() < 0.5)
        return [str(report)[:200]]

    async def list(self) -> int:
        return len(await self._manager.list())

    async def fork(self, id: str, new: str) -> int:
        return (await self._manager.fork(id, new, at=self._drawn)).at

    async def copy(self, id: str, new: str) -> int:
        return (await self._manager.copy(id, new)).at

    async def rename(self, id: str, new: str) -> int:
        return (await self._manager.rename(id, new, wait=WAIT)).at

    async def delete(self, id: str) -> bool:
        return await self._manager.delete(id, wait=WAIT)

    async def forget(self, id: str) -> int:
        return len((await self._manager.forget(id, wait=WAIT)).sessions)

    async def prune(self, id: str) -> str:
        report = await self._manager.prune(Retention(keep_turns=self._drawn), id=id)
        if report.damaged:
            self._error("damage-claimed@prune", f"prune names {report.damaged} as damaged")
        return f"cut={[one.cut for one in report.pruned]} held={len(report.held)}"

    async def post(self, id: str) -> str:
        key = self._dice.choice((None, None, f"post-{self._dice.randrange(3)}-{id}"))
        texts = [f"{self._number}.post"] if key is None else [f"{key}.{at}" for at in (1, 2)]
        if texts[0] not in self._journal.tokens:
            self._note("intend", self._number, self._actor.name, id, texts, key or self._number)
        await self._manager.post(id, *map(Message.user, texts), key=key)
        self._note("posted", texts)
        return key or ""

    # checkpoints

    async def checkpoint(self, id: str) -> int:
        async with self._open(id) as session:
            if self._dice.random() < 0.7:
                self._append(session, 1)
            state = (
                None
                if self._dice.random() < 0.6
                else {"n": self._number, "pad": self._number * 200}
            )
            made = await session.checkpoints.create(self._number, state=state)
            self._durable(session, made.event_seq)
            return made.id

    async def rollback(self, id: str) -> str | None:
        async with self._open(id, create=False) as session:
            known = await session.checkpoints.states()
            if not known:
                return None
            to = self._dice.choice((known[-1], self._dice.choice(known)))
            self._note("result", self._number, f"to {to.id} ({to.label})")
            done = await session.checkpoints.rollback(to.id)
            return f"to {to.id} ({to.label}) as {done.checkpoint.id}"

    async def verify(self, id: str) -> str | None:
        async with AsyncExitStack() as stack:
            if self._dice.random() < 0.7:
                source = await stack.enter_async_context(self._open(id, create=False))
            else:
                source = await self._manager.load(id)
            if source is None:
                return None
            found = await source.checkpoints.verify()
        if not found.ok:
            self._error("verify-false", f"verify() of {id}: {found.problems}")
        return f"{found.checkpoints} checkpoints"

    async def prune_checkpoints(self, id: str) -> list[int]:
        async with self._open(id, create=False) as session:
            return list(await session.checkpoints.prune(keep=self._drawn))

    # scopes

    async def scope(self) -> None:
        scope = self._manager.scope("user:one", wait=WAIT)
        if self._dice.random() < 0.5:
            await scope.set(self._drawn, self._number)
        else:
            async with scope.edit() as values:
                values[self._drawn] = self._number

    async def read_scope(self) -> dict[str, Any]:
        return await self._manager.scope("user:one").values()

    # the whole store, as a command would: with stores of its own

    async def _beside(self, *names: str) -> list[Store]:
        stores = [self._actor.place.store(name) for name in names]
        opened: list[Store] = []
        try:
            for store in stores:
                await store.open()
                opened.append(store)
        except BaseException:
            await _close(opened)
            raise
        return stores

    async def backup(self) -> str:
        source, target = stores = await self._beside("main", "backup")
        try:
            done = await backup(source, target, wait=WAIT)
            report = await verify_backup(target)
        finally:
            await _close(stores)
        for key, problem in report.problems.items():
            self._error("backup-verify-false", f"{key}: {problem}")
        return self._moved("backup", done)

    def _moved(self, name: str, done: Any) -> str:
        for key, reason in done.failed.items():
            if any(
                word in reason for word in ("damaged", "are missing", "does not exist any more")
            ):
                self._error(f"damage-claimed@{name}", f"{key}: {reason}")
        return f"{done.sessions} sessions, {done.failed}"

    async def migrate(self) -> str:
        # One at a time into a target, as its documentation asks; a killed process lets go of it.
        with Path(f"{self._actor.place.root}.migrating").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return "another one runs"
            stores = await self._beside("main", "moved")
            try:
                done = await migrate(*stores, wait=WAIT)
            finally:
                await _close(stores)
        return self._moved("migrate", done)

    async def check(self) -> str:
        stores = await self._beside("main")
        try:
            found = await problems(stores[0])
        finally:
            await _close(stores)
        for key, problem in found:
            if problem.startswith("forget:"):
                continue  # judged at rest
            self._error(
                "bare-error@check" if problem.startswith(BARE) else "check-false",
                f"{key}: {problem}",
            )
        return f"{len(found)} problems"


async def _close(stores: list[Store]) -> None:
    with anyio.CancelScope(shield=True):
        for store in stores:
            await store.aclose()


BARE = "check itself failed:"


async def problems(store: Store) -> list[tuple[str, str]]:
    """Return what `check` calls a problem, by the session's id."""
    found = []
    for tenant in await store.tenants():
        for info in await store.sessions(SessionQuery(tenant=tenant, limit=1000)):
            try:
                seen = await audit(store, info.key)
            except perdure.CorruptRecordError as error:
                found.append((info.key.agent, f"log: {error}"))
                continue
            except perdure.PerdureError:
                raise
            except Exception as error:
                found.append((info.key.agent, f"{BARE} {traced(error)}"))
                continue
            found += [(info.key.agent, f"{one.what}: {one.detail}") for one in seen.problems]
    return found


Beside = Callable[..., Awaitable[None]]
__all__ = ["THEMES", "Actor", "SessionKey", "Theme", "problems", "restore_backup"]
