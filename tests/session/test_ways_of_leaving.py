"""Each way in which a session leaves memory does what its row of the table says, and no more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import get_args

import anyio
import pytest

from perdure import (
    LeaseLostError,
    Message,
    Session,
    SessionClosedError,
    SessionManager,
    SessionNotFoundError,
    Shutdown,
    connect,
)
from perdure.errors import PerdureError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.session.internals import close_unsaved, let_go
from perdure.session.lifecycle import LEAVES, Why
from perdure.session.runtime import SessionClosed
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests._virtual import BACKENDS, run
from tests.asking import ask
from tests.session.test_lost import steal

QUIET = Shutdown(signals=False, deadline=20, turn_grace=5, hard_grace=1)
ERRORS: dict[Why, type[PerdureError]] = {
    "idle": SessionClosedError,
    "handover": LeaseLostError,
    "close": SessionClosedError,
    "drop": SessionClosedError,
    "rename": SessionClosedError,
    "lost": LeaseLostError,
    "deleted": SessionNotFoundError,
    "shutdown": SessionClosedError,
}
WHYS: tuple[Why, ...] = get_args(Why)


class Noting(DelegatingStore):
    """A store that notes what is folded and released of "a"."""

    def __init__(self, backing: MemoryBacking) -> None:
        super().__init__(MemoryStore(backing=backing))
        self.folds = self.releases = 0

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        self.folds += key.agent == "a"
        await super().write_documents(key, documents, manifest)

    async def release(self, key: SessionKey, epoch: int) -> None:
        self.releases += key.agent == "a"
        await super().release(key, epoch)


async def lose(session: Session, backing: MemoryBacking) -> None:
    await steal(backing)
    with pytest.raises(LeaseLostError):
        await session.save()


async def drop(session: Session) -> None:
    await session.__aexit__(None, None, None)
    await close_unsaved(session)


async def leave(why: Why, sessions: SessionManager, session: Session, at: MemoryBacking) -> None:
    acts: dict[Why, Callable[[], Awaitable[object]]] = {
        "idle": lambda: let_go(session),
        "handover": lambda: ask(at, "a"),
        "close": session.aclose,
        "drop": lambda: drop(session),
        "rename": lambda: sessions.rename("a", "b"),
        "lost": lambda: lose(session, at),
        "deleted": lambda: sessions.delete("a"),
        "shutdown": sessions.aclose,
    }
    await acts[why]()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("why", WHYS)
def test_a_session_leaves_as_the_table_says(why: Why, backend: str) -> None:
    row, backing = LEAVES[why], MemoryBacking()
    store, told = Noting(backing), list[str]()

    async def main() -> None:
        async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
            (await sessions.open("a")).append(Message.user("folded" * 1000))
        sessions = await connect(store, autosave=None, shutdown=QUIET)
        sessions.on("closed", lambda facts: told.append(_why(facts)))
        session = await sessions.open("a")
        session.append(Message.user("saved"))
        await session.save()
        session.append(Message.user("unsaved"))
        if row.unsaved == "refused":
            await leave(why, sessions, session, backing)
            assert session.is_writable
            await session.save()
            sessions._check().lifecycle.pin(session)  # `let_go` was one of it
        await leave(why, sessions, session, backing)
        with anyio.fail_after(60):
            while session.is_writable:
                await anyio.sleep(0.01)
            while row.event and not told:
                await anyio.sleep(0.01)
        with pytest.raises(ERRORS[why]):
            session.append(Message.user("late"))
        if why != "deleted":  # saved before, where it can be: a deletion may yet be refused
            is_saved = row.unsaved in ("saved", "refused") or why == "shutdown"
            assert (session.durable_version == session.version) is is_saved
        assert len(sessions.lost) == (why == "lost")
        assert told == [row.event] * bool(row.event)
        await sessions.aclose()

    run(backend, main)
    assert store.releases == (row.lease == "released")
    assert store.folds == (row.fold == "always")  # the tail is short


def _why(facts: object) -> str:
    assert isinstance(facts, SessionClosed)
    return facts.why


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("why", ["handover", "close", "rename", "deleted"])
def test_turns_come_first_where_the_table_says_so(why: Why, backend: str) -> None:
    backing = MemoryBacking()

    async def main() -> None:
        async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
            session = await sessions.open("a")
            begun, ended = anyio.Event(), anyio.Event()

            async def turn() -> None:
                async with session.turn():
                    session.append(Message.user("in a turn"))
                    begun.set()
                    await ended.wait()
                    if LEAVES[why].turns == "first":
                        assert session.is_writable
                        session.append(Message.user("at its end"))

            async def end() -> None:
                await begun.wait()
                await leave(why, sessions, session, backing)

            async with anyio.create_task_group() as group:
                group.start_soon(end)
                with anyio.CancelScope() as scope:  # a turn of what was deleted raises at its end
                    try:
                        async with anyio.create_task_group() as turns:
                            turns.start_soon(turn)
                            await begun.wait()
                            await anyio.sleep(1)
                            assert session.is_writable is (LEAVES[why].turns == "first")
                            ended.set()
                    except* SessionNotFoundError:
                        assert why == "deleted"
                assert not scope.cancel_called
            with anyio.fail_after(60):
                while session.is_writable:
                    await anyio.sleep(0.01)

    run(backend, main)


def test_no_other_way_out_is_in_the_table() -> None:
    assert tuple(LEAVES) == WHYS
    assert LEAVES["lost"]._replace(event="") == ("ignored", "kept", "never", "kept", "")
