"""A fork is a copy: whole or not there, its own, and no other session's business."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure import (
    InvalidArgumentError,
    LeaseHeldError,
    LeaseLostError,
    Message,
    Retention,
    SessionError,
    SessionManager,
    SessionNotFoundError,
    Shutdown,
    StoreUnavailableError,
    connect,
    store_for,
)
from perdure.cli.check import audit
from perdure.lease import LeaseOptions, OwnerWatch
from perdure.memory.documents import TurnPayload
from perdure.memory.ledger import change_entry
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.messages import encode_message
from perdure.records.posts import DeadLetter, PendingItem
from perdure.records.records import (
    ADMITTED,
    APPROVAL,
    BASE,
    EFFECT,
    EPOCH,
    FORK,
    GAP,
    TURN,
    Entry,
    Record,
)
from perdure.session.copier import copy_session, remove_drafts
from perdure.session.internals import accept, ledger_of
from perdure.session.options import Limits
from perdure.store import Batch, Draft, Status, Store, first_record, take_after
from perdure.stores import CompressedStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing import FaultyStore
from tests.pausing import PausingStore, meanwhile
from tests.remote import Remote
from tests.session.conftest import Connect, Place
from tests.session.lives import converse, looks, said, told

QUIET = Shutdown(signals=False)


async def look(sessions: SessionManager, id: str) -> dict[str, Any]:
    view = await sessions.load(id)
    assert view is not None
    return await looks(view)


async def log_of(store: Store, id: str) -> list[Record]:
    return [one async for chunk in store.read_log(SessionKey(id)) for one in chunk.records]


async def problems(sessions: SessionManager, id: str) -> list[str]:
    seen = await audit(sessions._store, SessionKey(id))
    return [found.detail for found in seen.findings if found.problem]


GONE: dict[str, Callable[[SessionManager], Awaitable[object]]] = {
    "delete": lambda sessions: sessions.delete("a"),
    "prune": lambda sessions: sessions.prune(Retention(keep_turns=1), id="a"),
    "rename": lambda sessions: sessions.rename("a", "b"),
    "forget": lambda sessions: sessions.forget("a"),
}


@pytest.mark.parametrize("gone", GONE)
async def test_what_becomes_of_a_session_changes_no_fork_of_it(place: Place, gone: str) -> None:
    async with connect(place(), shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one", "two", "three", "large " + "x" * 3000)
        await sessions.fork("a", "fork")
        await sessions.fork("a", "older", at="turn two")
        await sessions.copy("a", "copy")
        ids = ("fork", "older", "copy")
        before = {id: await look(sessions, id) for id in ids}
        logs = {id: await log_of(sessions._store, id) for id in ids}
        await GONE[gone](sessions)
        await sessions._store.sweep("", await reached(sessions, *ids), 0.0)
        await sessions._store.sweep("", await reached(sessions, *ids), 0.0)
        assert {id: await look(sessions, id) for id in ids} == before
        assert {id: await log_of(sessions._store, id) for id in ids} == logs
        assert [await problems(sessions, id) for id in ids] == [[], [], []]
    async with connect(place(), shutdown=QUIET) as sessions:
        for id in ids:
            async with sessions.open(id) as session:
                assert await looks(session) == before[id]
                session.append(Message.user("on"))
            assert (await sessions.rebuild_working_context(id, dry_run=True)).wrong == ()


async def reached(sessions: SessionManager, *ids: str) -> set[str]:
    names: set[str] = set()
    for id in ids:
        names |= (await audit(sessions._store, SessionKey(id))).reached
    return names


async def test_records_keep_their_numbers_and_refer_to_no_other_session(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one")
        await converse(sessions, "a", "two")
        forked = await sessions.fork("a", "fork")
        theirs, ours = [await log_of(sessions._store, id) for id in ("a", "fork")]
        assert forked.at == ours[-1].seq
        assert {one.epoch for one in ours} == {1}
        for their, our in zip(theirs[1:], ours[1:], strict=False):
            if their.kind == EPOCH:
                assert our.kind == GAP
            else:
                assert (our.seq, our.kind, our.payload) == (their.seq, their.kind, their.payload)
        assert not {one.kind for one in ours} & {BASE, FORK}
        assert not {one.kind for one in theirs} & {BASE, FORK}


@pytest.mark.parametrize("restarts", [1, 100])
async def test_a_session_that_was_killed_in_each_turn_is_copied_and_resumed(restarts: int) -> None:
    store, key, epoch = MemoryStore(), SessionKey("a"), 0
    await store.open()
    begun = TurnPayload(turn="cut", number=1, phase="begin", given=True)
    for number in range(restarts):
        grant = await take_after(store, key, after=epoch)
        epoch = grant.epoch
        attempt = Message.user(f"attempt {number}")
        entries = (Entry(TURN, encode(begun)), encode_message(attempt))
        (answer,) = await store.append_many([Batch(key, epoch, grant.head + 1, entries)])
        assert answer.status is Status.OK
    async with connect(store, shutdown=QUIET) as sessions:
        await sessions.copy("a", "copy")
        await sessions.fork("a", "fork")
        assert await look(sessions, "copy") == await look(sessions, "a")
        resumed = {}
        for id in ("a", "copy", "fork"):
            async with sessions.open(id) as session, session.turn(id="cut") as turn:
                resumed[id] = [message.text for message in turn.messages], said(session)
        assert resumed["a"][0][-1] == f"attempt {restarts - 1}"
        assert resumed["copy"] == resumed["fork"] == resumed["a"]


async def test_a_fork_ends_what_is_in_progress_and_a_copy_keeps_it(again: Connect) -> None:
    async with again() as sessions:
        session = await sessions.open("a")
        turn = session.turn(id="running")
        await turn.__aenter__()
        session.append(Message.user("question"))
        accept(session, tuple(change_entry(kind, "x", at=1.0) for kind in (ADMITTED, EFFECT)))
        accept(session, (change_entry(APPROVAL, "y", at=1.0),))
        await sessions.fork("a", "fork")
        await sessions.copy("a", "copy")
        await turn.__aexit__(None, None, None)
        await session.aclose()
        for id, is_kept in (("fork", False), ("copy", True)):
            async with sessions.open(id) as opened:
                assert said(opened) == ["question"]
                assert (await opened.history(limit=10))[-1].value.text == "question"
                async with opened.turn(id="running") as again_begun:
                    assert not again_begun.replayed
                    assert [one.text for one in again_begun.messages] == ["question"]
                assert ((await ledger_of(opened)).document() is not None) == is_kept
            assert (await sessions.rebuild_working_context(id, dry_run=True)).wrong == ()


async def test_checkpoints_hold_in_a_fork_and_go_back_there(place: Place) -> None:
    large = {"list": [f"item {number}" for number in range(3000)]}
    async with connect(place(), shutdown=QUIET) as sessions:
        async with sessions.open("a") as session:
            for number in range(3):
                session.append(Message.user(str(number)))
                await session.checkpoints.create(f"own {number}")
            await session.checkpoints.create("given", state=large)
            await session.checkpoints.create("given and pruned", state=[*large["list"], "more"])
            await session.checkpoints.prune(keep=[1, 2, 4])
        async with sessions.open("a") as session:
            await sessions.fork("a", "fork")
        await sessions.delete("a")
        await sessions._store.sweep("", await reached(sessions, "fork"), 0.0)
        await sessions._store.sweep("", await reached(sessions, "fork"), 0.0)
        async with sessions.open("fork") as session:
            found = await session.checkpoints.verify()
            assert (found.problems, found.unchecked) == ((), ()), found
            assert [one.id for one in await session.checkpoints.states()] == [1, 2, 4]
            restored = await session.checkpoints.restore(4)
            assert restored is not None
            assert restored.state == large
            await session.checkpoints.rollback(1)
            assert said(session) == ["0"]
            made = await session.checkpoints.create("later")
            assert made.id > 5
            assert (await session.checkpoints.verify()).problems == ()


async def test_a_fork_of_what_was_pruned_can_be_checked_pruned_and_rebuilt(place: Place) -> None:
    async with connect(place(), shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one", "large " + "x" * 3000, "three", "four")
        await sessions.prune(Retention(keep_turns=2), id="a")
        was = await look(sessions, "a")
        await sessions.fork("a", "fork")
        await sessions.fork("fork", "fork of it")
        await sessions.delete("a")
    for _ in range(2):  # the first epoch says what it begins with, and stays
        async with connect(place(), shutdown=QUIET) as sessions:
            for id in ("fork", "fork of it"):
                async with sessions.open(id) as session:
                    assert await looks(session) == was
                assert await problems(sessions, id) == []
    async with connect(place(), shutdown=QUIET) as sessions:
        first = await first_record(sessions._store.inner.read_log(SessionKey("fork")))
        assert first is not None
        assert first.kind == EPOCH
        assert (await sessions.prune(Retention(keep_turns=1), id="fork")).pruned
        assert (await sessions.prune(Retention(keep_turns=1), id="fork")).pruned == ()
        assert (await look(sessions, "fork"))["said"] == was["said"]
        assert await look(sessions, "fork of it") == was
        for id in ("fork", "fork of it"):
            await sessions.rebuild_working_context(id)
            assert (await look(sessions, id))["said"] == was["said"]
            assert await problems(sessions, id) == []


async def test_posts_and_dead_letters_stay_with_the_source(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one")
        store = sessions._store
        letter = DeadLetter(PendingItem("bad/0", "message", b"{}", 0.0), "refused", 1, 0.0)
        async with sessions.open("a") as session:
            await store.ack(SessionKey("a"), session.epoch, dead=[letter])
            await session.aclose()
        await sessions.post("a", Message.user("posted"))
        await sessions.post("fork", Message.user("for the fork"))
        await sessions.fork("a", "fork")
        async with sessions.open("fork") as session:
            assert said(session) == ["one", "re one", "for the fork"]
        assert await store.dead_letters(SessionKey("fork")) == []
        assert [one.item.op_id for one in await store.dead_letters(SessionKey("a"))] == ["bad/0"]
        async with sessions.open("a") as session:
            assert said(session) == ["one", "re one", "posted"]


# answers that are lost, and processes that are killed


async def test_nobody_sees_a_fork_that_is_being_made(place: Place) -> None:
    """At each call of it: in no list, not to be loaded, of the same process or another one."""
    nth, done = 0, False
    while not done:
        nth += 1
        store = PausingStore(place())
        async with (
            connect(store, shutdown=QUIET) as one,
            connect(place(), shutdown=QUIET) as two,
        ):
            if nth == 1:
                await converse(one, "a", "one", "large " + "x" * 3000)
            was, id = await look(one, "a"), f"fork {nth}"
            pause = store.pause(None, nth=nth)
            ended = anyio.Event()

            async def begin() -> None:
                await one.fork("a", id)  # noqa: B023
                ended.set()  # noqa: B023

            async with anyio.create_task_group() as group:
                group.start_soon(begin)
                while not (pause.reached.is_set() or ended.is_set()):
                    await anyio.sleep(0.001)
                done = ended.is_set()
                for sessions in () if done else (two,):
                    view = await sessions.load(id)
                    assert view is None or await looks(view) == was
                    listed = [info.key.agent for info in await sessions.list()]
                    assert (id in listed) == (view is not None)
                    assert await sessions.exists(id) == (view is not None)
                pause.go()
            assert await look(two, id) == was
    assert nth > 10


async def test_an_answer_that_was_lost_is_given_again(place: Place) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as one, connect(place(), shutdown=QUIET) as two:
        await converse(one, "a", "one")
        pause = store.pause("publish", after=True)
        async with anyio.create_task_group() as group:
            group.start_soon(one.fork, "a", "fork")
            await pause.reached.wait()
            group.cancel_scope.cancel()
        forked = await two.fork("a", "fork")
        pause.go()
        assert await look(two, "fork") == await look(two, "a")
        async with two.open("a") as session:  # which begins an epoch
            session.append(Message.user("more"))
        assert await two.fork("a", "fork", at=forked.at) == forked
        with pytest.raises(SessionError, match="fork exists"):
            await two.fork("a", "fork")
        await converse(two, "fork", "own")
        with pytest.raises(SessionError, match="fork exists"):
            await two.fork("a", "fork", at=forked.at)
        await two.prune(Retention(keep_turns=0), id="fork")  # with all that was copied
        with pytest.raises(SessionError, match="fork exists"):
            await two.fork("a", "fork", at=forked.at)


async def test_a_fork_that_was_killed_leaves_the_id_to_the_next_open(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.session.copier.LEAVING", 0.05)
    quiet = Shutdown(signals=False, deadline=0.2, turn_grace=0)
    store = PausingStore(place())
    async with connect(place(), shutdown=QUIET) as two:
        await converse(two, "a", "one")
        one = await connect(store, shutdown=quiet)
        pause = store.pause("publish")
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(one.fork, "a", "fork")
                await pause.reached.wait()
                assert [info.key.agent for info in await two._store.drafts("")] == ["fork"]
                store.left = 0  # from here on it hears nothing
                scope.cancel()
        await store._store.aclose()  # as a process that ends
        await two.post("fork", Message.user("posted"))
        assert not await two.exists("fork")
        async with two.open("fork", wait=20) as session:
            assert said(session) == ["posted"]
        assert await two._store.drafts("") == []


# across stores


async def test_a_session_is_copied_into_another_store_with_its_blobs() -> None:
    source, target = MemoryStore(), MemoryStore(backing=MemoryBacking())
    await target.open()
    async with connect(source, shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one", "large " + "x" * 3000)
        async with sessions.open("a") as session:
            await session.checkpoints.create("given", state=["y" * 50_000])
            session.append(Message.user("last"))
        was = await look(sessions, "a")
        records = await log_of(source, "a")
        draft = Draft(
            source=SessionKey("a"),
            generation=records[-1].epoch,
            up_to=records[-1].seq,
            purpose="migrate",
        )
        done = await copy_session(
            source,
            SessionKey("a"),
            target,
            SessionKey("a"),
            draft=draft,
            watch=OwnerWatch(LeaseOptions(), anyio.current_time),
            limits=Limits(),
        )
        assert (done.head, done.lost) == (records[-1].seq, [])
        assert done.blobs > 2
    async with connect(target, shutdown=QUIET) as sessions:
        assert await look(sessions, "a") == was
        assert await problems(sessions, "a") == []
        async with sessions.open("a") as session:
            restored = await session.checkpoints.restore(1)
            assert restored is not None
            assert restored.state == ["y" * 50_000]
            assert (await session.checkpoints.verify()).problems == ()


async def test_a_source_that_is_made_again_meanwhile_is_not_mixed_with_the_new_one(
    place: Place,
) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as one, connect(place(), shutdown=QUIET) as two:
        await converse(two, "a", "one", "two")
        pause = store.pause("write_documents")

        async def begin() -> None:
            with pytest.raises(SessionNotFoundError):
                await one.fork("a", "fork")

        async def again() -> None:
            await two.delete("a")
            await converse(two, "a", "other", "history", "of", "it")

        await meanwhile(pause, begin, again)
        assert not await two.exists("fork")
        assert await two._store.drafts("") == []


async def test_a_fork_whose_draft_goes_with_its_source_says_that_the_source_went(
    place: Place,
) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as first, connect(place(), shutdown=QUIET) as second:
        await converse(first, "a", "one")
        pause = store.pause("write_documents", lambda key, *_: key == SessionKey("new"))

        async def make() -> None:
            with pytest.raises(SessionNotFoundError, match="was deleted while new was made of it"):
                await first.fork("a", "new")

        await meanwhile(pause, make, lambda: second.forget(id="a"))
        assert [info.key.agent for info in await second.list()] == []


async def test_a_source_that_is_pruned_meanwhile_is_copied_as_it_is_then(place: Place) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as one, connect(place(), shutdown=QUIET) as two:
        await converse(two, "a", "one", "two", "three")
        pause = store.pause("write_documents")

        async def prune() -> None:
            assert (await two.prune(Retention(keep_turns=1), id="a")).pruned

        await meanwhile(pause, lambda: one.fork("a", "fork"), prune)
        assert await look(two, "fork") == await look(two, "a")
        assert await told(await two.load("fork")) == await told(await two.load("a"))


# forks that leave the history behind


async def test_a_fork_of_the_context_has_all_but_the_history(place: Place) -> None:
    async with connect(place(), shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one", "two", "large " + "x" * 3000)
        async with sessions.open("a") as session:
            await session.checkpoints.create("own")
            await session.checkpoints.create("given", state=["y" * 5000])
            session.append(Message.user("last"))
            await session.aclose()
        was = await look(sessions, "a")
        made = await sessions.fork("a", "fork", history="context")
        assert await sessions.fork("a", "fork", history="context") == made
        with pytest.raises(SessionError, match="fork exists"):
            await sessions.fork("a", "fork")
        await sessions.forget("a")
    for _ in range(2):
        async with connect(place(), shutdown=QUIET) as sessions:
            assert await look(sessions, "fork") == {**was, "told": []}
            assert await problems(sessions, "fork") == []
            assert (await sessions.rebuild_working_context("fork", dry_run=True)).wrong == ()
            assert "fork" in [info.key.agent for info in await sessions.list()]
    async with connect(place(), shutdown=QUIET) as sessions, sessions.open("fork") as session:
        assert [one.id for one in await session.checkpoints.states()] == [2]
        restored = await session.checkpoints.restore(2)
        assert restored is not None
        assert restored.state == ["y" * 5000]
        session.append(Message.user("on"))
        own = await session.checkpoints.create("own again")
        session.append(Message.user("and on"))
        assert own.id == 3
        found = await session.checkpoints.verify()
        assert (found.problems, found.unchecked) == ((), ())
        await session.checkpoints.rollback(3)
        assert said(session) == [*was["said"], "on"]
        async with session.turn(id="turn one") as turn:
            assert turn.replayed
    async with connect(place(), shutdown=QUIET) as sessions:
        await sessions.fork("fork", "fork of it")
        await sessions.fork("fork", "context of it", history="context")
        for id in ("fork of it", "context of it"):
            assert (await look(sessions, id))["said"] == [*was["said"], "on"]
            assert await problems(sessions, id) == []


async def test_a_fork_of_an_earlier_context_is_as_the_session_was_then(place: Place) -> None:
    async with connect(place(), shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one")
        async with sessions.open("a") as session:
            at, was = session.version, said(session)
        await converse(sessions, "a", "two", "three")
        assert (await sessions.fork("a", "fork", at=at, history="context")).at <= at
        assert (await look(sessions, "fork"))["said"] == was
        async with sessions.open("fork") as session:
            assert session.info.turns == 1
            session.append(Message.user("on"))
            await session.retract(after=at)
            assert said(session) == was


async def test_a_part_that_no_fork_takes_is_refused(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one")
        with pytest.raises(InvalidArgumentError, match="choose full or context"):
            await sessions.fork("a", "fork", history="half")  # type: ignore[arg-type]


async def test_what_is_unsaved_follows_a_context_without_its_history() -> None:
    backing = MemoryBacking()
    one = await connect(MemoryStore(backing=backing), autosave=None, shutdown=QUIET)
    two = await connect(MemoryStore(backing=backing), shutdown=QUIET)
    session = await one.open("a")
    session.append(Message.user("saved"))
    await session.save()
    session.append(Message.user("unsaved"))
    backing.sessions[session.key].released = True  # as one that was taken to be dead
    async with two.open("a"):
        with pytest.raises(LeaseLostError):
            await session.save()
        await session.fork_unsaved("mine", history="context")
    view = await two.load("mine")
    assert said(view) == ["saved", "unsaved"]
    assert [text for _, text in await told(view)] == ["unsaved"]
    await two.aclose()
    await one.aclose()


async def test_blobs_of_a_fork_that_is_being_made_are_not_swept_with_its_source() -> None:
    now, old = 0.0, 3600.0
    backing = MemoryBacking(clock=lambda: now)
    store = PausingStore(MemoryStore(backing=backing))
    two = connect(MemoryStore(backing=backing), shutdown=QUIET)
    async with connect(store, shutdown=QUIET) as one, two:
        await converse(one, "a", "large " + "x" * 3000)
        async with one.open("a") as session:
            await session.checkpoints.create("given", state=["y" * 50_000])
            session.append(Message.user("last"))
            await session.aclose()
        was = await look(one, "a")
        now += old
        pause = store.pause("publish")

        async def delete_and_sweep() -> None:
            nonlocal now
            await two.delete("a")
            await two._store.sweep("", set(), old)
            now += old
            await two._store.sweep("", set(), old)

        await meanwhile(pause, lambda: one.fork("a", "fork"), delete_and_sweep)
        await two._store.sweep("", await reached(two, "fork"), old)
        assert await look(two, "fork") == was
        assert await problems(two, "fork") == []
        async with two.open("fork") as session:
            restored = await session.checkpoints.restore(1)
            assert restored is not None
            assert restored.state == ["y" * 50_000]


@pytest.mark.parametrize("is_compressed", [False, True], ids=["encrypted", "compressed"])
async def test_copies_in_stores_that_transform_what_they_keep(
    is_compressed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_KEY", "ab" * 32)

    def place() -> Store:
        if is_compressed:
            return CompressedStore(store_for(tmp_path / "data"))
        return store_for(f"encrypted+{(tmp_path / 'data').as_uri()}")

    async with connect(place(), shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one", "two", "large " + "x" * 3000)
        session = await sessions.open("a")
        turn = session.turn(id="running")
        await turn.__aenter__()
        session.append(Message.user("question"))
        await sessions.fork("a", "fork")
        await sessions.fork("a", "context", history="context")
        await sessions.copy("a", "copy")
        await turn.__aexit__(None, None, None)
        await session.aclose()
        await sessions.prune(Retention(keep_turns=1), id="a")
        await sessions.fork("a", "of the rest")
        await sessions.rename("copy", "renamed")
        before = {id: await look(sessions, id) for id in ("fork", "context", "renamed")}
        await sessions.delete("a")
    async with connect(place(), shutdown=QUIET) as sessions:
        for id, was in before.items():
            assert await look(sessions, id) == was
        for id in (*before, "of the rest"):
            async with sessions.open(id) as session:
                assert said(session)[-1] == "question"
                session.append(Message.user("on"))
            assert await problems(sessions, id) == []
            await sessions.rebuild_working_context(id)
            assert said(await sessions.load(id))[-2:] == ["question", "on"]


async def test_what_was_to_be_forgotten_can_be_opened_or_forgotten_again(place: Place) -> None:
    store = FaultyStore(place(), fail_on="delete")
    async with connect(store, shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one")
        with pytest.raises(StoreUnavailableError):
            await sessions.forget(id="a")
        with pytest.raises(
            StoreUnavailableError, match=r"forget it again \(if it is opened instead, it may"
        ):
            await sessions.fork("a", "fork")
        async with sessions.open("a") as session:
            before = said(session)
        await sessions.fork("a", "fork")
        assert said(await sessions.load("fork")) == before == ["one", "re one"]
        assert (await sessions.forget(id="a")).sessions == (SessionKey("a"),)


async def test_who_wants_a_copy_that_is_just_being_made_is_told_so(place: Place) -> None:
    theirs, new = place(), SessionKey("new")
    await theirs.open()
    async with connect(place(), shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one")
        draft = Draft(source=SessionKey("a"), generation=1, up_to=1, purpose="fork")
        grant = await take_after(theirs, new, after=0, draft=draft)
        told = "new is just being made by .*: try again in a moment"
        with pytest.raises(LeaseHeldError, match=told):
            await sessions.fork("a", "new")
        with pytest.raises(LeaseHeldError, match=told):
            await sessions.open("new", wait=0.0)
        await theirs.release(new, grant.epoch)
    await theirs.aclose()


async def test_a_draft_of_an_owner_that_nobody_sees_is_removed_once_it_is_silent() -> None:
    backing, now = MemoryBacking(), 0.0
    theirs, ours = MemoryStore(backing=backing), Remote(MemoryStore(backing=backing))
    await theirs.open()
    await ours.open()
    draft = Draft(source=SessionKey("a"), generation=1, up_to=1, purpose="fork")
    await take_after(theirs, SessionKey("fork"), after=0, draft=draft)
    options = LeaseOptions()
    watch = OwnerWatch(options, lambda: now)
    for _ in range(20):
        now += options.heartbeat
        watch.renewed()
        await theirs.heartbeat()
        assert await remove_drafts(ours, "", watch) == []
    for _ in range(20):
        now += options.heartbeat
        watch.renewed()
        removed = await remove_drafts(ours, "", watch)
        if removed:
            break
    assert [found.key for found in removed] == [SessionKey("fork")]
    assert await ours.drafts("") == []
    await theirs.aclose()
    await ours.aclose()
