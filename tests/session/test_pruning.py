"""Pruning: history goes, and the session stays what it is."""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path

import anyio
import pytest

from perdure import Message, Shutdown, connect, export_state, import_state, store_for
from perdure.agent import MemoryManager
from perdure.cli.check import audit
from perdure.errors import HistoryPrunedError, InvalidArgumentError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.session.manager import SessionManager
from perdure.session.options import Limits
from perdure.session.prune import PruneReport
from perdure.session.retention import Retention
from perdure.store import Documents, Store, take_after
from perdure.stores.delegate import DelegatingStore
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore, SwitchedStore
from tests.pausing import PausingStore, meanwhile, reached_or_ended
from tests.session.conftest import Connect, Place
from tests.session.lives import converse, looks, said, told

QUIET = Shutdown(signals=False)


async def ids(sessions: SessionManager) -> list[str]:
    return [info.key.agent for info in await sessions.list()]


async def test_old_turns_go_and_nothing_else_does(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one", "two")
        await converse(sessions, "a", "three", "four")
        before = await looks(await sessions.load("a"))
        dry = await sessions.prune(Retention(keep_turns=1), dry_run=True)
        assert await looks(await sessions.load("a")) == before
        report = await sessions.prune(Retention(keep_turns=1))
        [pruned] = report.pruned
        assert (str(pruned.key), pruned.turns) == ("a", 3)
        assert [one.cut for one in dry.pruned] == [pruned.cut]
        after = await looks(await sessions.load("a"))
        kept = [(seq, text) for seq, text in before["told"] if seq > pruned.cut]
        assert after == {**before, "told": kept}
        assert [text for _, text in kept] == ["four", "re four"]
        assert (await sessions.prune(Retention(keep_turns=1))).pruned == ()
    async with again() as sessions, sessions.open("a") as session:
        assert await looks(session) == after
        async with session.turn(id="turn one") as turn:
            assert turn.replayed
            with pytest.raises(HistoryPrunedError, match="records of turn 'turn one' any more"):
                _ = turn.messages
        async with session.turn(id="turn four") as turn:
            assert [message.text for message in turn.messages] == ["four", "re four"]
        async with session.turn(id="turn five"):
            session.append(Message.user("five"))
        assert said(session)[-2:] == ["re four", "five"]
    async with again() as sessions:
        assert (await sessions.prune(Retention(keep_turns=0), id="a")).pruned
        found = await sessions.load("a")
        assert await told(found) == []
        assert said(found)[-1] == "five"
        assert await found.memory.get("about one") == {"said": "one"}  # type: ignore[union-attr]


async def test_a_session_that_was_never_folded_is_pruned_whole(again: Connect) -> None:
    async with again() as sessions:
        session = await sessions.open("a", owner="ada")
        for text in ("one", "two"):
            async with session.turn():
                session.append(Message.user(text))
                session.memory.set(text, 1)
        await sessions.copy("a", "copy")
        await sessions.fork("a", "fork")
        before = await looks(await sessions.load("a"))
        for id in ("a", "copy", "fork"):
            [pruned] = (await sessions.prune(Retention(keep_turns=1), id=id)).pruned
            view = await sessions.load(id)
            told = [one for one in before["told"] if one[0] > pruned.cut]
            assert await looks(view) == {**before, "told": told}
            assert view is not None
            assert view.info.metadata.owner == "ada"
    async with again() as sessions:
        for id in ("a", "copy", "fork"):
            async with sessions.open(id) as session:
                assert {**await looks(session), "told": 0} == {**before, "told": 0}


async def test_an_open_session_is_pruned_under_its_users(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one", "two")
        async with sessions.open("a") as session:
            session.append(Message.user("unsaved"))
            before = await looks(session)
            report = await sessions.prune(Retention(keep_turns=0))
            assert len(report.pruned) == 1
            after = await looks(session)
            assert after == {**before, "told": before["told"][-1:]}
            session.append(Message.user("on"))
            await session.save()
        assert said(await sessions.load("a"))[-2:] == ["unsaved", "on"]
    async with again() as sessions, sessions.open("a") as session:
        assert said(session)[:2] == ["one", "re one"]


async def test_a_fork_at_what_was_pruned_says_where_that_ends(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one")
        async with sessions.open("a") as session:
            checkpoint = await session.checkpoints.create("early")
        await converse(sessions, "a", "two", "three")
        async with sessions.open("a") as session:
            await session.checkpoints.prune(keep=0)
        await sessions.prune(Retention(keep_turns=1), id="a")
        for at, named in ((3, "record 3"), ("turn one", "turn one"), (checkpoint, "early")):
            with pytest.raises(HistoryPrunedError, match=named) as caught:
                await sessions.fork("a", "b", at=at)
            ends = re.search(r"up to record (\d+)", str(caught.value))
            assert ends is not None
            with pytest.raises(HistoryPrunedError):
                await sessions.fork("a", "b", at=int(ends[1]))
            await sessions.fork("a", f"after {named}", at=int(ends[1]) + 1)
        async with sessions.open("a") as session, session.turn("runs"):
            with pytest.raises(InvalidArgumentError, match="no turn 'runs' that is over"):
                await sessions.fork("a", "b", at="runs")
        assert not await sessions.exists("b")


async def test_forks_keep_what_was_pruned(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one", "two")
        await sessions.fork("a", "early", at="turn one")
        await sessions.fork("a", "late")
        before = {id: await looks(await sessions.load(id)) for id in ("early", "late")}
        await converse(sessions, "a", "three")
        await sessions.prune(Retention(keep_turns=1), id="a")
        for id, look in before.items():
            assert await looks(await sessions.load(id)) == look
        await sessions.fork("a", "after")
        assert said(await sessions.load("after")) == said(await sessions.load("a"))
        await sessions.copy("a", "copy")
        assert await looks(await sessions.load("copy")) == await looks(await sessions.load("a"))
        await sessions.prune(Retention(keep_turns=0), id="late")
        assert await told(await sessions.load("late")) == []
        assert said(await sessions.load("late")) == before["late"]["said"]
        await sessions.delete("a")
        after = {id: await looks(await sessions.load(id)) for id in ("early", "after", "copy")}
        assert after["early"] == before["early"]
    async with again() as sessions:
        for id, look in after.items():
            async with sessions.open(id) as session:
                assert await looks(session) == look


@pytest.mark.parametrize("lost", ["documents", "documents and manifest"])
async def test_documents_are_made_anew_from_what_a_pruning_kept(tmp_path: Path, lost: str) -> None:
    place = tmp_path / "data"
    async with connect(place, shutdown=QUIET) as sessions:
        for text in ("one", "two", "three", "four"):
            await converse(sessions, "a", text)
        await sessions.prune(Retention(keep_turns=1))
        await converse(sessions, "a", "five")
        before = await looks(await sessions.load("a"))
    folder = Path(FileStore(place).folder_of(SessionKey("a")))
    assert list((folder / "log").glob("*.start"))
    for name in ("session.json", "memory.json", "working_context_snapshot.json", "state/last.json"):
        (folder / name).write_text("damaged")
    if lost == "documents and manifest":
        for file in folder.glob("manifest-*"):
            file.unlink()
    async with connect(place, shutdown=QUIET) as sessions:
        assert await looks(await sessions.load("a")) == before
        async with sessions.open("a") as session:
            assert await looks(session) == before
            before["told"].append((session.append(Message.user("on")), "on"))
            before["said"].append("on")
            before["messages"] += 1
    async with connect(place, shutdown=QUIET) as sessions, sessions.open("a") as session:
        assert await looks(session) == before
        assert session.restore_report.damaged == ()


async def test_one_session_that_is_damaged_keeps_no_other_from_being_pruned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "data"
    async with connect(place, shutdown=QUIET) as sessions:
        for id in ("a", "b", "c"):
            for text in ("one", "two"):
                await converse(sessions, id, text)
    for log in (Path(FileStore(place).folder_of(SessionKey("b"))) / "log").glob("*.jsonl"):
        log.write_bytes(log.read_bytes().replace(b"one", b"eno"))
    async with connect(place, shutdown=QUIET) as sessions:
        report = await sessions.prune(Retention(keep_turns=1))
    assert [one.key.agent for one in report.pruned] == ["a", "c"]
    assert [key.agent for key in report.damaged] == ["b"]
    assert "not pruned" in caplog.text


async def test_an_export_of_a_pruned_session_brings_it_back(again: Connect) -> None:
    async with again() as sessions:
        session = await sessions.open("a", owner="ada", tags=["x"])
        session.memory.set("large", "x" * 5000)
        session.state.set("typed", {"when": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)})
        await session.aclose()
        await converse(sessions, "a", "one", "two", "three")
        await sessions.prune(Retention(keep_turns=1))
        before = await looks(await sessions.load("a"))
        state = await export_state(sessions, "a")
        assert state is not None
        await import_state(sessions, state, id="b")
        plain = await export_state(sessions, "a", log=False)
        assert plain is not None
        assert plain.memory is not None
        assert "large" in {entry.key for entry in plain.memory.entries}
    async with again() as sessions, sessions.open("b") as imported:
        after = await looks(imported)
        for name in ("said", "memory", "state", "title", "turns"):
            assert after[name] == before[name], name
        assert imported.info.metadata.owner == "ada"
        async with imported.turn(id="turn one") as turn:
            assert turn.replayed


async def test_the_file_store_gets_smaller(tmp_path: Path) -> None:
    place = tmp_path / "data"

    def logged() -> int:
        return sum(file.stat().st_size for file in place.rglob("log/*.jsonl"))

    async with connect(place, shutdown=QUIET) as sessions:
        for _ in range(20):
            async with sessions.open("a") as session:
                async with session.turn():
                    session.append(Message.user("x" * 20_000))
                await session.aclose()
        before = logged()
        report = await sessions.prune(Retention(keep_turns=5))
        assert logged() < before / 2
        assert report.pruned[0].bytes > before / 2
        assert len(await told(await sessions.load("a"))) == 5


async def test_a_turn_without_an_end_is_over_when_the_next_one_begins(again: Connect) -> None:
    async with again() as sessions:
        async with sessions.open("a") as session:
            memory = MemoryManager(session)
            for number in range(4):
                memory.ingest_user_message(Message.user(f"message {number}"), f"t{number}")
            await session.save()
        (pruned,) = (await sessions.prune(Retention(keep_turns=1))).pruned
        assert pruned.turns == 2  # the newest has not ended
        view = await sessions.load("a")
        assert view is not None
        assert [item.value.text for item in await view.history()] == ["message 2", "message 3"]


@pytest.mark.parametrize("keep_turns", [0, 1])
@pytest.mark.parametrize("resume", [False, True])
async def test_a_cut_turn_that_may_be_tried_again_keeps_its_newest_attempt(
    again: Connect, keep_turns: int, resume: bool
) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one")
        session = await sessions.open("a")
        for text, going_on in (("Q", False), ("Q", False), ("half an", True)):
            with pytest.raises(ConnectionError):
                async with session.turn("request-17", resume=going_on):
                    session.append(Message.user(text))
                    raise ConnectionError
        assert (await sessions.prune(Retention(keep_turns=keep_turns), id="a")).pruned
        async with session.turn("request-17", resume=resume) as turn:
            assert [message.text for message in turn.messages] == ["Q", "half an"]
            assert turn.resumed is resume
            if not resume:
                session.append(Message.user("Q"))
        assert said(session) == ["one", "re one", "Q", *["half an"] * resume]
        assert (await sessions.prune(Retention(keep_turns=0), id="a")).pruned
        assert await told(session) == []


async def test_retracting_everything_of_a_pruned_session_needs_no_history(again: Connect) -> None:
    small = Limits(context_bytes=500)
    async with again(limits=small) as sessions:
        async with sessions.open("a") as session:
            for number in range(50):
                async with session.turn():
                    session.append(Message.user(f"message {number}"))
        report = await sessions.prune(Retention(keep_turns=2))
        assert report.pruned
        async with sessions.open("a") as session:
            await session.retract(after=0)
            session.append(Message.user("new"))
            assert [message.text for message in session.context()] == ["new"]
    async with again(limits=small) as sessions:
        view = await sessions.load("a")
        assert view is not None
        assert [message.text for message in view.context()] == ["new"]


async def test_retracting_behind_a_pruning(again: Connect) -> None:
    limits = Limits(context_bytes=700)  # two messages
    texts = ["1" * 200, "2" * 200, "3" * 200, "4" * 200]
    async with again(limits=limits) as sessions:
        await converse(sessions, "a", *texts)
        whole = await told(await sessions.load("a"))
        [pruned] = (await sessions.prune(Retention(keep_turns=2))).pruned
        async with sessions.open("a") as session:
            with pytest.raises(HistoryPrunedError, match="pruned up to record"):
                await session.retract(after=whole[0][0])
            end_of_three = next(seq for seq, text in whole if text == f"re {texts[2]}")
            assert pruned.cut < end_of_three
            await session.retract(after=end_of_three)
            assert said(session) == [texts[2], f"re {texts[2]}"]
            end_of_two = next(seq for seq, text in whole if text == f"re {texts[1]}")
            await session.retract(after=max(pruned.cut, end_of_two))
            assert said(session) == [texts[1], f"re {texts[1]}"]


async def test_sessions_expire_by_their_last_use() -> None:
    now = [0.0]
    backing = MemoryBacking(clock=lambda: now[0])
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        await converse(sessions, "old", "one")
        await converse(sessions, "old but open", "two")
        await sessions.open("old but open")
        now[0] = 4e9  # long after the real time, by which the age is measured
        await converse(sessions, "young", "three")
        dry = await sessions.prune(Retention(expire_days=90), dry_run=True)
        assert [str(key) for key in dry.expired] == ["old"]
        assert len(await ids(sessions)) == 3
        report = await sessions.prune(Retention(expire_days=90))
        assert report.expired == dry.expired
        assert await ids(sessions) == ["old but open", "young"]


async def test_what_expires_at_once_is_looked_after_at_once() -> None:
    """Each session is read a few times, however many others expire with it."""
    counts = list[int]()
    for n in (5, 20):
        now = [0.0]
        backing = MemoryBacking(clock=lambda: now[0])  # noqa: B023
        store = _Reads(MemoryStore(backing=backing))
        async with connect(store, shutdown=QUIET) as sessions:
            for number in range(n):
                async with sessions.open(f"old {number}") as session:
                    session.memory.set("large", str(number) * 100_000)
                    await session.aclose()
            now[0] = 4e9  # long after the real time, by which the age is measured
            store.reads = 0
            report = await sessions.prune(Retention(expire_days=90))
            assert len(report.expired) == n
            assert not any(backing.blobs.values())
            counts.append(store.reads)
    assert counts[1] <= 5 * counts[0]


async def test_what_expires_is_taken_from_a_process_that_has_it_open() -> None:
    now = [0.0]
    backing = MemoryBacking(clock=lambda: now[0])
    one = await connect(MemoryStore(backing=backing), shutdown=QUIET)
    two = await connect(MemoryStore(backing=backing), shutdown=QUIET)
    for id in ("free", "held", "open there"):
        await converse(one, id, "one")
    await two.open("open there")
    held = await two.open("held")
    now[0] = 4e9  # long after the real time, by which the age is measured
    async with held.turn():
        raised = await one.prune(Retention(expire_days=90), on_held="raise")
        assert [str(key) for key in raised.expired] == ["free"]
        assert [str(key) for key in raised.held] == ["held", "open there"]
        report = await one.prune(Retention(expire_days=90), on_held="handover", wait=0.5)
        assert [str(key) for key in report.expired] == ["open there"]
        assert [str(key) for key in report.held] == ["held"]
    await two.aclose()
    await one.aclose()


async def test_what_is_taken_over_while_it_expires_is_left_alone_and_named() -> None:
    now, key = [0.0], SessionKey("a")
    backing = MemoryBacking(clock=lambda: now[0])
    store, other = PausingStore(MemoryStore(backing=backing)), MemoryStore(backing=backing)
    async with connect(store, shutdown=QUIET) as sessions:
        for id in ("a", "b", "z"):
            now[0] = 4e9 if id == "z" else 0.0  # long after the real time, which counts
            async with sessions.open(id) as session:
                session.memory.set("large", id * 100_000)
                await session.aclose()

        async def take_over() -> None:
            await other.open()
            holder = await other.holder(key)
            assert holder is not None
            await take_after(other, key, after=holder.epoch)

        pause = store.pause("read_log", lambda key: key == SessionKey("z"))
        expire = Retention(expire_days=90)
        report = await meanwhile(pause, lambda: sessions.prune(expire), take_over)
        assert [str(key) for key in report.held] == ["a"]
        assert [str(key) for key in report.expired] == ["b"]
        assert len(backing.blobs[""]) == 2
        await other.aclose()


class _Reads(DelegatingStore):
    """Count the reads of sessions."""

    reads = 0

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        self.reads += 1
        return await self.inner.read_documents(key, names)


async def test_a_default_session_expires_with_the_last_of_its_agents_sessions() -> None:
    """S4-7: it keeps the values that all of them share, though nobody may talk in it any more."""
    now = [0.0]
    backing = MemoryBacking(clock=lambda: now[0])
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        for name in ("default", "long ago"):
            await converse(sessions, "gus", "one", session=name)
        await converse(sessions, "ann", "one")
        now[0] = 4e9  # long after the real time, by which the age is measured
        await converse(sessions, "gus", "one", session="today")
        report = await sessions.prune(Retention(expire_days=90))
        assert [str(key) for key in report.expired] == ["ann", "gus/long ago"]
        await sessions.delete("gus", session="today")
        report = await sessions.prune(Retention(expire_days=90))
        assert [str(key) for key in report.expired] == ["gus"]


async def test_what_another_process_holds_is_left_alone_and_named() -> None:
    backing = MemoryBacking()
    one = await connect(MemoryStore(backing=backing), shutdown=QUIET)
    two = await connect(MemoryStore(backing=backing), shutdown=QUIET)
    await converse(one, "a", "one", "two")
    await converse(one, "b", "one", "two")
    theirs = await two.open("a")
    report = await one.prune(Retention(keep_turns=1))
    assert [str(key) for key in report.held] == ["a"]
    assert [str(one.key) for one in report.pruned] == ["b"]
    theirs.append(Message.user("on"))
    await theirs.save()
    await two.aclose()
    await one.aclose()


@pytest.mark.parametrize("open_here", [True, False])
@pytest.mark.parametrize("step", ["second fold", "trim"])
async def test_a_pruning_that_failed_is_completed_by_pruning_again(
    step: str, open_here: bool, tmp_path: Path
) -> None:
    place = tmp_path / "data"
    async with connect(place, shutdown=QUIET) as sessions:
        for text in ("one", "two", "three"):
            await converse(sessions, "a", text)
    fold = step == "second fold"
    method, nth = ("write_documents", 2) if fold else ("trim", 1)
    store = FaultyStore(FileStore(place), fail_on=method, nth=nth)
    async with connect(store, shutdown=QUIET) as sessions:
        if open_here:
            await sessions.open("a")
        before = await looks(await sessions.load("a"))
        failed = "was not pruned: try again" if fold and open_here else "was made to fail"
        with pytest.raises(StoreUnavailableError, match=failed):
            await sessions.prune(Retention(keep_turns=1), id="a")
        assert store.injected == 1
        seen = await looks(await sessions.load("a"))
        assert seen == (before if fold else {**before, "told": before["told"][-2:]})
        assert "re one" in await stored(store)
        [pruned] = (await sessions.prune(Retention(keep_turns=1), id="a")).pruned
        assert pruned.cut < before["told"][-2][0]
        assert "re one" not in await stored(store)
        after = {**before, "told": before["told"][-2:]}
        assert await looks(await sessions.load("a")) == after
        for _ in range(2):
            assert (await sessions.prune(Retention(keep_turns=1), id="a")).pruned == ()
        async with sessions.open("a") as session:
            assert await looks(session) == after
    async with connect(place, shutdown=QUIET) as sessions, sessions.open("a") as session:
        assert await looks(session) == after


async def stored(store: Store) -> str:
    """Return what a store has of the session's own log."""
    log = store.read_log(SessionKey("a"))
    return "".join([record.payload.decode() async for chunk in log for record in chunk.records])


async def test_a_session_that_was_pruned_is_looked_after_once_and_not_each_time(
    tmp_path: Path,
) -> None:
    store = FaultyStore(FileStore(tmp_path / "data"), times=0)
    async with connect(store, shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one", "two")
        counts = []
        for _ in range(4):
            store.calls.clear()
            await sessions.prune(Retention(keep_turns=1))
            counts.append(store.calls["acquire"])
        assert counts[0] > 0
        assert counts[1:] == [1, 0, 0]  # its first file also has records that stay


@pytest.mark.parametrize("open_here", [True, False])
async def test_what_could_not_be_folded_is_not_pruned(open_here: bool) -> None:
    store = SwitchedStore(MemoryStore())
    async with connect(store, shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one")
        session = await sessions.open("a")
        await session.aclose()  # as of here there are documents
        store.fail_next("write_documents", times=1000)
        await converse(sessions, "a", "two", "three")
        if open_here:
            await sessions.open("a")
        before = await looks(await sessions.load("a"))
        with pytest.raises(StoreUnavailableError):
            await sessions.prune(Retention(keep_turns=0), id="a")
        store.up()
        assert await looks(await sessions.load("a")) == before


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("other", ["delete", "rename", "takeover"])
async def test_a_prune_that_loses_a_race_blames_nobody_and_brings_nothing_back(
    other: str, is_open: bool
) -> None:
    backing, nth, done = MemoryBacking(), 0, False
    store, elsewhere = PausingStore(MemoryStore(backing=backing)), MemoryStore(backing=backing)
    reports: list[PruneReport] = []

    async def prune(sessions: SessionManager, id: str) -> None:
        reports.append(await sessions.prune(Retention(keep_turns=1), id=id))

    async def meets(sessions: SessionManager, id: str) -> None:
        if other == "delete":
            await sessions.delete(id)
        elif other == "rename":
            await sessions.rename(id, f"new {id}")
        else:  # as after a pause of this process
            holder = await elsewhere.holder(SessionKey(id))
            await take_after(elsewhere, SessionKey(id), after=holder.epoch if holder else 0)

    async with connect(store, shutdown=QUIET) as sessions:
        await elsewhere.open()
        while not done:
            nth += 1
            id = f"a{nth}"
            await converse(sessions, id, "one", "two", "three")
            if is_open:
                await sessions.open(id)
            pause = store.pause(None, nth=nth)
            async with anyio.create_task_group() as group:
                done = await reached_or_ended(pause, group, lambda: prune(sessions, id))  # noqa: B023
                group.start_soon(meets, sessions, id)
                await anyio.wait_all_tasks_blocked()
                pause.go()
            if other == "delete":
                assert not await sessions.exists(id), nth
        for lost in sessions.lost:  # at most the prune's own record
            assert await lost.discard_unsaved() == 1
    assert len(reports) == nth
    outcomes = {(bool(one.pruned), bool(one.held)) for one in reports}
    assert outcomes == {(True, False), (False, other == "takeover")}


async def is_what_its_log_says(sessions: SessionManager, *ids: str) -> None:
    """Require that each session's documents are what a rebuild from its log would make of them."""
    for id in ids:
        assert (await sessions.rebuild_working_context(id, dry_run=True)).wrong == (), id


@pytest.mark.parametrize("pruned_before", [False, True])
@pytest.mark.parametrize("keep", [1, 3])  # of the fork's own two turns, or into its parent's
async def test_a_fork_that_is_pruned_stays_what_it_is_and_so_does_its_rebuild(
    again: Connect, keep: int, pruned_before: bool
) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one", "two", "three", "four")
    async with again() as sessions:
        if pruned_before:
            await sessions.prune(Retention(keep_turns=3), id="a")
        await sessions.fork("a", "fork")
    async with again() as sessions:
        await converse(sessions, "fork", "five", "six")
    async with again() as sessions:
        await sessions.fork("fork", "fork of it")
        await converse(sessions, "fork of it", "seven")
        before = {id: await looks(await sessions.load(id)) for id in ("a", "fork", "fork of it")}
        [pruned] = (await sessions.prune(Retention(keep_turns=keep), id="fork")).pruned
        for id, was in before.items():
            told = [one for one in was["told"] if id != "fork" or one[0] > pruned.cut]
            assert await looks(await sessions.load(id)) == {**was, "told": told}, id
        await is_what_its_log_says(sessions, *before)
        for id in before:
            await sessions.rebuild_working_context(id)
            assert said(await sessions.load(id)) == before[id]["said"], id


async def test_what_comes_of_a_pruned_session_is_what_its_own_log_says(again: Connect) -> None:
    async with again() as sessions:
        await converse(sessions, "a", "one", "two", "three")
    async with again() as sessions:
        await sessions.prune(Retention(keep_turns=1), id="a")
        before = await looks(await sessions.load("a"))
        await sessions.fork("a", "fork")
        await sessions.fork("fork", "of the fork")
        await sessions.copy("fork", "copy")
        await sessions.copy("of the fork", "other")
        await sessions.rename("other", "renamed")
        ids = ("a", "fork", "of the fork", "copy", "renamed")
        for id in ids:
            assert await looks(await sessions.load(id)) == before, id
        await is_what_its_log_says(sessions, *ids)
    async with again() as sessions:
        for id in ids[1:]:
            await converse(sessions, id, "four")
            async with sessions.open(id) as session:
                checkpoint = await session.checkpoints.create("here")
                assert (await session.checkpoints.verify()).ok
                assert await session.checkpoints.restore(checkpoint.id)
                await session.retract(after=1)  # beyond what the log has
                assert said(session) == []
                await session.checkpoints.rollback(checkpoint.id)
                assert said(session) == [*before["said"], "four", "re four"]
        await is_what_its_log_says(sessions, *ids)


async def test_a_prune_that_another_one_overtakes_does_not_set_the_cut_back(place: Place) -> None:
    store, other, texts = PausingStore(place()), place(), [str(n) for n in range(8)]
    async with connect(store, shutdown=QUIET) as first, connect(other, shutdown=QUIET) as second:
        await converse(first, "a", *texts)
        pause = store.pause("acquire")  # it has decided what to cut

        report = await meanwhile(
            pause,
            lambda: first.prune(Retention(keep_turns=4), id="a"),
            lambda: second.prune(Retention(keep_turns=1), id="a"),
        )
        assert report.pruned == ()
        seen = await audit(other, SessionKey("a"))
        assert [found.detail for found in seen.findings if found.problem] == []
        before = await looks(await second.load("a"))
        assert [text for _, text in before["told"]] == ["7", "re 7"]
        await second.rebuild_working_context("a")
        assert await looks(await second.load("a")) == before


async def test_a_session_that_is_made_anew_is_not_cut_where_the_deleted_one_was_to_be(
    place: Place,
) -> None:
    store = PausingStore(place())
    async with connect(store, shutdown=QUIET) as first, connect(place(), shutdown=QUIET) as second:
        await converse(first, "a", *[str(n) for n in range(8)])
        pause = store.pause("acquire")

        async def again() -> None:
            await second.delete("a")
            await converse(second, "a", *[f"again {n}" for n in range(8)])

        report = await meanwhile(pause, lambda: first.prune(Retention(keep_turns=1), id="a"), again)
        assert (report.pruned, report.damaged) == ((), ())
        assert len(await told(await second.load("a"))) == 16
        assert (await first.prune(Retention(keep_turns=1), id="a")).pruned
        assert len(await told(await second.load("a"))) == 2


async def test_a_prune_is_not_refused_since_its_session_is_folded_meanwhile(place: Place) -> None:
    store, limits, late = PausingStore(place()), Limits(fold_records=4), [str(n) for n in range(40)]
    async with connect(store, shutdown=QUIET, limits=limits) as sessions:
        await converse(sessions, "a", "one", "two", "three")
        async with sessions.open("a") as session:
            announced = store.pause("append_many", after=True)

            async def go_on() -> None:
                session.append(*map(Message.user, late[:20]))
                announced.go()  # the cut is durable, and does not count yet
                await session.save()
                session.append(*map(Message.user, late[20:]))
                await session.save()

            prune = partial(sessions.prune, Retention(keep_turns=1), id="a")
            report = await meanwhile(announced, prune, go_on)
            assert [str(pruned.key) for pruned in report.pruned] == ["a"]
            kept = await looks(session)
            assert [text for _, text in kept["told"]] == ["three", "re three", *late]
    async with connect(place(), shutdown=QUIET) as sessions:
        assert await looks(await sessions.load("a")) == kept
        await is_what_its_log_says(sessions, "a")


@pytest.mark.parametrize("kind", ["memory", "file", "sqlite"])
async def test_what_a_pruning_failed_to_remove_goes_at_the_next_open(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.stores.file.log.SEGMENT_BYTES", 500)
    backing = MemoryBacking()
    url = f"{tmp_path}/store" if kind == "file" else f"sqlite:///{tmp_path}/store.db"
    place = partial(MemoryStore, backing=backing) if kind == "memory" else partial(store_for, url)
    async with connect(place(), shutdown=QUIET) as sessions:
        for text in ("secret", "two", "three", "four"):
            await converse(sessions, "a", text)
    failing = FaultyStore(place(), fail_on="trim")
    async with connect(failing, shutdown=QUIET) as sessions:
        with pytest.raises(StoreUnavailableError):
            await sessions.prune(Retention(keep_turns=1))
    for _ in range(2):
        store = place()
        async with connect(store, shutdown=QUIET) as sessions:
            await (await sessions.open("a")).aclose()
            log = [chunk async for chunk in store.read_log(SessionKey("a"))]
            assert b"secret" not in b"".join(one.payload for chunk in log for one in chunk.records)
            assert said(await sessions.load("a"))[-1] == "re four"
