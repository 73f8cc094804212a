"""Undo, retries by id, and what to do about records that the store will not take."""

from __future__ import annotations

import anyio
import pytest

from perdure import ConfigError, Message, SessionQuarantinedError, Shutdown, connect
from perdure.session.options import Limits
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore
from tests.session.conftest import Connect


def said(session: object) -> list[object]:
    return [message.content for message in session.context()]  # type: ignore[attr-defined]


async def shown(session: object) -> list[object]:
    return [item.value.content for item in await session.history()]  # type: ignore[attr-defined]


async def test_retract_takes_the_conversation_back_and_a_restart_agrees(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        kept = session.append(Message.user("one"))
        session.append(Message.assistant("two"), Message.user("three"))
        await session.retract(after=kept)
        session.append(Message.assistant("other"))
        assert said(session) == await shown(session) == ["one", "other"]
    async with again() as sessions, sessions.open("a") as session:
        assert said(session) == await shown(session) == ["one", "other"]


async def test_retracting_a_retraction_brings_the_rest_back(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        first = session.append(Message.user("one"))
        second = session.append(Message.user("two"))
        await session.retract(after=first)
        await session.retract(after=second)
        assert said(session) == await shown(session) == ["one", "two"]
        session.append(Message.user("three"))
    async with again() as sessions, sessions.open("a") as session:
        assert said(session) == await shown(session) == ["one", "two", "three"]


async def test_retractions_each_further_back_are_one_record_each(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        versions = [session.append(Message.user(str(number))) for number in range(6)]
        for number in (4, 3, 1):
            before = session.version
            await session.retract(after=versions[number])
            assert session.version == before + 1  # no copy of the context comes with it
            assert said(session) == [str(each) for each in range(number + 1)]
        other = session.append(Message.user("other"))
        session.append(Message.user("another"))
        await session.retract(after=other)
        await session.retract(after=versions[0])
        await session.retract(after=versions[3])  # back into what was retracted
        assert said(session) == await shown(session) == ["0", "1", "2", "3"]
    async with again() as sessions, sessions.open("a") as session:
        assert said(session) == await shown(session) == ["0", "1", "2", "3"]


async def test_retracting_behind_the_cut_brings_older_messages_back(again: Connect) -> None:
    limits = Limits(context_bytes=500)
    async with again(limits=limits) as sessions, sessions.open("a") as session:
        versions = [session.append(Message.user(f"message {n}")) for n in range(50)]
        assert "message 0" not in said(session)
        await session.retract(after=versions[1])
        assert said(session) == ["message 0", "message 1"]
    async with again(limits=limits) as sessions, sessions.open("a") as session:
        assert said(session) == ["message 0", "message 1"]


async def test_retracting_everything_leaves_nothing(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        session.append(Message.user("one"))
        await session.retract(after=0)
        assert said(session) == await shown(session) == []


async def test_retracting_to_a_record_that_is_not_there_is_refused(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        with pytest.raises(ConfigError, match="none at"):
            await session.retract(after=session.version + 1)


async def test_a_retry_with_the_same_id_is_the_same_turn(again: Connect) -> None:
    for attempt in range(3):
        async with again() as sessions, sessions.open("a") as session:
            async with session.turn("request-7") as turn:
                assert turn.replayed == (attempt > 0)
                assert turn.number == 1
                if not turn.replayed:
                    session.append(Message.user("once"))
            assert said(session) == ["once"]
            assert session.info.turns == 1


async def test_a_turn_that_was_interrupted_is_not_taken_for_done(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        with pytest.raises(RuntimeError):
            async with session.turn("request-7"):
                raise RuntimeError
        async with session.turn("request-7") as turn:
            assert not turn.replayed


async def quarantined(store: FaultyStore, session: object) -> None:
    session.append(Message.user("refused"))  # type: ignore[attr-defined]
    with pytest.raises(SessionQuarantinedError):
        await session.save()  # type: ignore[attr-defined]


async def test_discarding_is_a_way_out_of_quarantine() -> None:
    store = FaultyStore(MemoryStore(), fail_on="append_many", nth=2, how="permanent", times=3)
    async with connect(store, shutdown=Shutdown(signals=False)) as sessions:
        session = await sessions.open("a")
        session.append(Message.user("fine"))
        await session.save()
        await quarantined(store, session)
        assert [record.kind for record in session.unsaved()] == ["message"]
        assert await session.discard_unsaved() == 1
        assert said(session) == ["fine"]
        assert session.unsaved() == ()


async def test_retrying_is_a_way_out_once_the_cause_is_mended() -> None:
    backing = MemoryBacking()
    store = FaultyStore(
        MemoryStore(backing=backing), fail_on="append_many", nth=1, how="permanent", times=1
    )
    async with connect(store, shutdown=Shutdown(signals=False)) as sessions:
        session = await sessions.open("a")
        await quarantined(store, session)
        session.retry()
        with anyio.fail_after(60):
            await session.save()
        view = await sessions.load("a")
        assert view is not None
        assert said(view) == ["refused"]
