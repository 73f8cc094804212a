"""Sessions that were lost with records unsaved: nothing of them is forgotten silently."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import anyio
import pytest

import perdure.sync
from perdure import (
    LeaseLostError,
    Message,
    Session,
    SessionManager,
    Shutdown,
    StoreUnavailableError,
    UnsavedChangesError,
    connect,
)
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore

QUIET = Shutdown(signals=False)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="perdure")


def said(session: object) -> list[object]:
    return [message.content for message in session.context()]  # type: ignore[attr-defined]


async def steal(backing: MemoryBacking, *, write: str | None = "theirs") -> None:
    """Take "a" over as if its holder were dead, and go on with it."""
    (key,) = [key for key in backing.sessions if key.agent == "a"]
    backing.sessions[key].released = True
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as other:
        session = await other.open("a")
        if write is not None:
            session.append(Message.user(write))


async def lose(sessions: SessionManager, backing: MemoryBacking) -> Session:
    """Have "a" lost with two records unsaved."""
    session = await sessions.open("a")
    session.append(Message.user("saved"))
    await session.save()
    session.append(Message.user("unsaved 1"), Message.user("unsaved 2"))
    await steal(backing)
    with pytest.raises(LeaseLostError, match=r"fork_unsaved\(new_id\).*discard_unsaved\(\)"):
        await session.save()
    with pytest.raises(LeaseLostError, match=r"fork_unsaved\(new_id\).*discard_unsaved\(\)"):
        session.append(Message.user("refused"))
    return session


def managed(backing: MemoryBacking, shutdown: Shutdown = QUIET) -> SessionManager:
    return connect(MemoryStore(backing=backing), autosave=None, shutdown=shutdown)


async def test_what_was_lost_is_named_until_the_end() -> None:
    backing = MemoryBacking()
    sessions = await managed(backing)
    session = await lose(sessions, backing)
    health = sessions.health()
    assert health.status == "degraded"
    assert health.lost == {"a": 2}
    assert any("sessions.lost" in reason for reason in health.reasons)
    assert health.unsaved == {"lost": 1}
    assert len(session.unsaved()) == 2
    async with sessions.open("a") as again:  # what others have done changes nothing
        assert said(again) == ["saved", "theirs"]
    assert sessions.health().lost == {"a": 2}
    with pytest.raises(UnsavedChangesError, match="taken over by another process") as raised:
        await sessions.__aexit__(None, None, None)
    report = raised.value.facts["report"]
    assert not report.clean
    assert [(one.key.agent, one.records) for one in report.lost] == [("a", 2)]
    (lost,) = sessions.lost
    assert len(lost.unsaved()) == 2


async def test_a_takeover_that_only_the_shutdown_finds_is_named_too() -> None:
    backing = MemoryBacking()
    sessions = await managed(backing)
    session = await sessions.open("a")
    session.append(Message.user("unsaved"))
    await steal(backing)
    report = await sessions.aclose()
    assert not report.clean
    assert [one.records for one in report.lost] == [1]


@pytest.mark.parametrize("through", ["session", "manager"])
@pytest.mark.parametrize("how", ["fork", "discard"])
async def test_deciding_ends_it(through: str, how: str) -> None:
    backing = MemoryBacking()
    async with managed(backing) as sessions:
        session = await lose(sessions, backing)
        one = session if through == "session" else sessions.lost[0]
        if how == "fork":
            forked = await one.fork_unsaved("mine")
            assert forked.key.agent == "mine"
            async with sessions.open("mine") as mine:
                assert said(mine) == ["saved", "unsaved 1", "unsaved 2"]
        else:
            assert await one.discard_unsaved() == 2
            assert one.unsaved() == session.unsaved() == ()
        assert sessions.health().status == "ok"
        assert sessions.health().lost == {}
        assert sessions.lost == ()


async def test_a_cut_attempt_is_whole_in_what_the_unsaved_records_begin() -> None:
    backing = MemoryBacking()
    async with managed(backing) as sessions:
        session = await sessions.open("a")
        session.append(Message.user("before"))
        with pytest.raises(LeaseLostError):
            async with session.turn("request-17"):
                session.append(Message.user("Q"))
                await session.save()
                session.append(Message.assistant("half an"))
                await steal(backing)
                await session.save()
        await session.fork_unsaved("mine")
        async with sessions.open("mine") as mine:
            assert said(mine) == ["before", "Q", "half an"]
            async with mine.turn("request-17") as turn:
                assert [message.text for message in turn.messages] == ["Q", "half an"]
                assert said(mine) == ["before"]


def alive() -> list[Session]:
    return [one for one in gc.get_objects() if type(one) is Session and one.id == "a"]


@pytest.mark.deep
async def test_only_the_records_stay_in_memory() -> None:
    others = alive()  # which other tests have left to the collector
    backing = MemoryBacking()
    sessions = await managed(backing)
    await lose(sessions, backing)
    gc.collect()
    assert [one for one in alive() if not any(one is other for other in others)] == []
    (lost,) = sessions.lost
    assert lost.id == "a"
    assert [record.seq for record in lost.unsaved()] == [lost.version - 1, lost.version]
    await lost.fork_unsaved("mine")
    assert (await sessions.aclose()).clean


async def test_a_lost_session_is_not_closed_as_if_all_were_saved() -> None:
    backing = MemoryBacking()
    async with managed(backing) as sessions:
        session = await lose(sessions, backing)
        with pytest.raises(LeaseLostError, match=r"2 records unsaved here.*fork_unsaved\(new_id\)"):
            await session.aclose()
        await session.discard_unsaved()
        await session.aclose()
        await sessions.open("a")


async def test_nothing_is_kept_of_a_session_that_was_lost_with_all_saved() -> None:
    backing = MemoryBacking()
    async with managed(backing) as sessions:
        session = await sessions.open("a")
        session.append(Message.user("saved"))
        await session.save()
        await steal(backing)
        session.append(Message.user("unsaved"))
        with pytest.raises(LeaseLostError):
            await session.save()
        await session.discard_unsaved()
        assert sessions.health().status == "ok"


async def test_what_was_lost_is_spilled_and_replayed_where_nobody_has_written(
    tmp_path: Path,
) -> None:
    backing = MemoryBacking()
    spilling = Shutdown(signals=False, spill=str(tmp_path))
    sessions = await managed(backing, spilling)
    session = await sessions.open("a")
    session.append(Message.user("saved"))
    await session.save()
    session.append(Message.user("unsaved"))
    await steal(backing, write=None)
    with pytest.raises(LeaseLostError):
        await session.save()
    report = await sessions.aclose()
    assert report.clean
    assert report.lost == ()
    assert [one.records for one in report.spilled] == [1]
    async with managed(backing, spilling) as sessions, sessions.open("a") as session:
        assert said(session) == ["saved", "unsaved"]


async def test_what_was_lost_is_spilled_and_kept_where_others_have_written(tmp_path: Path) -> None:
    backing = MemoryBacking()
    spilling = Shutdown(signals=False, spill=str(tmp_path))
    sessions = await managed(backing, spilling)
    await lose(sessions, backing)
    assert (await sessions.aclose()).clean
    (file,) = tmp_path.iterdir()
    assert b"unsaved 2" in file.read_bytes()
    async with managed(backing, spilling) as sessions, sessions.open("a") as session:
        assert said(session) == ["saved", "theirs"]
        assert file.name in str(session.restore_report)


async def test_forgetting_a_session_forgets_what_was_lost_of_it() -> None:
    backing = MemoryBacking()
    async with managed(backing) as sessions:
        await lose(sessions, backing)
        await sessions.forget(id="a")
        assert sessions.lost == ()


def test_blocking_code_decides_as_well() -> None:
    backing = MemoryBacking()
    with perdure.sync.connect(
        MemoryStore(backing=backing), autosave=None, shutdown=QUIET
    ) as sessions:
        session = sessions.open("a")
        session.append(Message.user("saved"))
        session.save()
        session.append(Message.user("unsaved"))
        backing.sessions[session.key].released = True
        with perdure.sync.connect(MemoryStore(backing=backing), shutdown=QUIET) as other:
            other.open("a")
        with pytest.raises(LeaseLostError):
            session.save()
        (lost,) = sessions.lost
        assert (lost.id, lost.key, lost.epoch) == ("a", session.key, session.epoch)
        assert isinstance(lost.error, LeaseLostError)
        assert lost.version - lost.durable_version == len(lost.unsaved()) == 1
        lost.fork_unsaved("mine")
        assert sessions.health().lost == {}
        lost.discard_unsaved()


async def test_a_takeover_whose_answer_was_lost_is_found_out_by_open() -> None:
    backing = MemoryBacking()
    store = FaultyStore(MemoryStore(backing=backing), fail_on="acquire", how="in_doubt_applied")
    async with connect(store, shutdown=QUIET) as sessions:
        async with sessions.open("a") as session:
            session.append(Message.user("Hello"))
            await session.save()
    assert store.injected == 1


async def test_open_asks_a_store_that_is_down_no_more_than_twice() -> None:
    store = FaultyStore(MemoryStore(), fail_on="acquire", how="transient", times=10)
    async with connect(store, shutdown=QUIET) as sessions:
        with pytest.raises(StoreUnavailableError):
            await sessions.open("a")
        assert store.calls["acquire"] == 2


async def test_a_fork_that_nobody_waits_for_any_more_decides_what_was_lost_too() -> None:
    backing = MemoryBacking()
    async with managed(backing) as sessions:
        session = await lose(sessions, backing)
        with anyio.move_on_after(0):
            await session.fork_unsaved("kept")
        with anyio.fail_after(60):
            while sessions.health().lost:
                await anyio.sleep(0.005)
        async with sessions.open("kept", create=False) as kept:
            assert said(kept) == ["saved", "unsaved 1", "unsaved 2"]
