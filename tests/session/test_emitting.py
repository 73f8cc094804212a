"""The output gate: what a turn emits goes out when everything before it is durable, or not at all."""

from __future__ import annotations

import pytest

from perdure import LeaseLostError, Message, SessionQuarantinedError, Shutdown, connect
from perdure.session.session import Session
from perdure.store import take_after
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import SwitchedStore
from tests.session.conftest import Connect

QUIET = Shutdown(signals=False)


class Sender:
    """Who sends what it is given, and notes how much of the session was durable then."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.sent: list[tuple[str, int]] = []

    def now(self, item: str) -> None:
        self.sent.append((item, self.session.durable_version))

    async def soon(self, item: str) -> None:
        self.now(item)


async def test_what_is_emitted_goes_out_behind_its_save(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("a") as session:
        sender = Sender(session)
        async with session.turn() as turn:
            first = session.append(Message.user("one"))
            await turn.emit("a plain function", sender.now)
            second = session.append(Message.assistant("two"))
            await turn.emit("an async one", sender.soon)
        assert sender.sent == [("a plain function", first), ("an async one", second)]


async def test_nothing_is_emitted_that_the_store_refuses() -> None:
    store = SwitchedStore(MemoryStore())
    async with connect(store, autosave=None, shutdown=QUIET) as sessions:
        session = await sessions.open("a")
        await session.save()
        sender = Sender(session)
        store.fail_next(how="permanent", times=10)
        with pytest.raises(SessionQuarantinedError):
            async with session.turn() as turn:
                session.append(Message.user("refused"))
                await turn.emit("never", sender.now)
        assert sender.sent == []
        await session.discard_unsaved()


async def test_nothing_is_emitted_for_a_session_that_somebody_else_has() -> None:
    backing = MemoryBacking()
    async with connect(MemoryStore(backing=backing), autosave=None, shutdown=QUIET) as sessions:
        session = await sessions.open("a")
        await session.save()
        sender = Sender(session)
        thief = MemoryStore(backing=backing)
        await thief.open()
        with pytest.raises(LeaseLostError):
            async with session.turn() as turn:
                session.append(Message.user("too late"))
                await take_after(thief, session.key, after=session.epoch)
                await turn.emit("never", sender.now)
        assert sender.sent == []
        await session.discard_unsaved()
