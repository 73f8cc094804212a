"""What happens to a session while another thing is being done to it, or to one beside it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from perdure import Autosave, Limits, Message, Shutdown, connect
from perdure.errors import (
    CorruptRecordError,
    HistoryPrunedError,
    InvalidArgumentError,
    LeaseHeldError,
    LeaseLostError,
    NotStorableError,
    PerdureError,
    SessionError,
    SessionNotFoundError,
    SessionQuarantinedError,
    StoreUnavailableError,
)
from perdure.memory.documents import InboxTakenPayload
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE_KINDS, TAKEN
from perdure.session import prune as pruning
from perdure.session.manager import SessionManager
from perdure.session.retention import Retention
from perdure.session.stored import SessionStore
from perdure.store import Documents, Outcome, Status, take_after
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.pausing import PausingStore, meanwhile
from tests.session.lives import converse, said, told

pytestmark = pytest.mark.anyio

QUIET = Shutdown(signals=False)
P = SessionKey("p")


class Store(MemoryStore):
    """A store whose calls a test can do something before, or instead."""

    def __init__(self, backing: MemoryBacking | None = None) -> None:
        super().__init__(backing=backing or MemoryBacking())
        self.refuses: Status | None = None
        self.asked = anyio.Event()
        self.hooks: dict[str, Callable[[], Any]] = {}
        self.after: dict[str, Callable[[], Any]] = {}

    async def append_many(self, batches: Any) -> list[Outcome]:
        self.asked.set()
        await self._call(self.hooks, "append_many")
        if self.refuses is not None:
            return [Outcome(self.refuses, NotStorableError("no")) for _ in batches]
        outcomes = await super().append_many(batches)
        await self._call(self.after, "append_many")
        return outcomes

    async def read_documents(self, *args: Any) -> Documents:
        found = await super().read_documents(*args)
        await self._call(self.after, "read_documents")
        return found

    async def write_documents(self, *args: Any) -> None:
        await self._call(self.hooks, "write_documents")
        await super().write_documents(*args)

    async def trim(self, *args: Any) -> int:
        await self._call(self.hooks, "trim")
        return await super().trim(*args)

    async def _call(self, hooks: dict[str, Callable[[], Any]], name: str) -> None:
        hook = hooks.pop(name, None)
        if hook is not None:
            await hook()


async def stuck(sessions: SessionManager, store: Store) -> Any:
    """Return a session that is quarantined, with one record that the store has."""
    session = await sessions.open("a")
    session.append(Message.user("one"))
    await session.save()
    store.refuses = Status.PERMANENT
    session.append(Message.user("bad"))
    with contextlib.suppress(PerdureError):
        await session.save()
    store.refuses = None
    return session


async def test_what_is_appended_while_the_rest_is_discarded_goes_with_it() -> None:
    store = Store()
    async with connect(store, shutdown=QUIET) as sessions:
        session = await stuck(sessions, store)

        async def save() -> None:
            session.append(Message.user("two"))
            with pytest.raises(SessionQuarantinedError):
                await session.save()

        store.after["read_documents"] = save
        assert await session.discard_unsaved() == 2
        assert said(session) == ["one"]
        session.append(Message.user("three"))
        await session.save()
        assert said(session) == ["one", "three"]


async def test_what_is_sent_again_while_it_is_discarded_stays() -> None:
    store = Store()
    async with connect(store, shutdown=QUIET) as sessions:
        session = await stuck(sessions, store)

        async def send_again() -> None:
            session.retry()

        store.after["read_documents"] = send_again
        with pytest.raises(SessionError, match="only stuck sessions discard"):
            await session.discard_unsaved()
        await session.save()
        assert said(session) == ["one", "bad"]


async def test_nothing_is_discarded_before_the_store_was_read() -> None:
    """What a session holds is what is folded: it must never be ahead of its log."""
    store = Store()
    async with connect(store, shutdown=QUIET, limits=Limits(fold_records=2)) as sessions:
        session = await stuck(sessions, store)

        async def fail() -> None:
            raise StoreUnavailableError("a short outage")

        store.after["read_documents"] = fail
        with pytest.raises(StoreUnavailableError, match="a short outage"):
            await session.discard_unsaved()
        session.append(Message.user("two"))
        with pytest.raises(SessionQuarantinedError):
            await session.save()
        assert len(session.unsaved()) == 2
        assert await session.discard_unsaved() == 2
        for text in ("three", "four", "five"):
            session.append(Message.user(text))
            await session.save()
        assert said(session) == ["one", "three", "four", "five"]
        await session.aclose()
        session = await sessions.open("a")
        assert said(session) == ["one", "three", "four", "five"]
        report = await sessions.rebuild_working_context("a", dry_run=True)
        assert not report.wrong, report


async def test_a_save_whose_records_are_discarded_meanwhile_says_so() -> None:
    store = Store()
    sent, refused, asked, answered = (anyio.Event() for _ in range(4))

    class Contributor:
        name = "slow"
        version = 1

        async def capture(self) -> int:
            if sent.is_set():
                asked.set()
                await answered.wait()
            return 1

        async def restore(self, state: Any, context: Any) -> None: ...

    async def refuse() -> None:
        sent.set()
        await refused.wait()

    async with connect(store, shutdown=QUIET, autosave=None) as sessions:
        session = await sessions.open("a")
        await session.attach(Contributor())
        session.append(Message.user("one"))
        await session.save()

        async def save(text: str, error: type[PerdureError]) -> None:
            session.append(Message.user(text))
            with pytest.raises(error) as raised:
                await session.save()
            errors.append(raised.value)

        errors: list[PerdureError] = []
        store.refuses = Status.PERMANENT
        store.hooks["append_many"] = refuse
        async with anyio.create_task_group() as tasks:
            with anyio.fail_after(60):
                tasks.start_soon(save, "bad", SessionQuarantinedError)
                await sent.wait()
                tasks.start_soon(save, "two", SessionError)
                await asked.wait()
                refused.set()
                while not errors:
                    await checkpoint()
                store.refuses = None
                assert await session.discard_unsaved() == 2
                answered.set()
        assert "discarded while they were about to be saved" in str(errors[1])
        assert said(session) == ["one"]


async def test_a_turn_that_was_spilled_is_known_by_its_id(tmp_path: Path) -> None:
    spill = Shutdown(signals=False, deadline=0.5, turn_grace=0.1, spill=str(tmp_path / "spill"))
    store = Store()
    async with connect(store, shutdown=spill) as sessions:
        session = await sessions.open("a")
        await session.save()
        store.refuses, store.asked = Status.TRANSIENT, anyio.Event()

        async def pay() -> None:
            async with session.turn(id="req-1"):
                session.append(Message.user("paid"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pay)
            with anyio.fail_after(60):
                await store.asked.wait()
            tasks.cancel_scope.cancel()
    store.refuses = None
    async with connect(store, shutdown=spill) as sessions:
        session = await sessions.open("a")
        assert said(session) == ["paid"]
        async with session.turn(id="req-1") as turn:
            assert turn.replayed
        async with session.turn() as turn:
            assert turn.number == 2


async def test_forgetting_that_is_refused_costs_nothing() -> None:
    backing = MemoryBacking()
    rarely = Autosave(debounce=50, max_delay=60)
    there = connect(MemoryStore(backing=backing), shutdown=QUIET)
    here = connect(MemoryStore(backing=backing), shutdown=QUIET, autosave=rarely)
    async with there, here:
        await converse(there, "b", "one", tags=["t"])
        await converse(here, "a", "one", tags=["t"])
        await there.open("b")
        session = await here.open("a")
        session.append(Message.user("unsaved"))
        with pytest.raises(LeaseHeldError):
            await here.forget(tag="t", on_held="raise")
        async with here.open("a") as again:
            assert said(again) == ["one", "re one", "unsaved"]


async def test_forgetting_keeps_what_a_damaged_session_may_reach() -> None:
    store = Store()
    async with connect(store, shutdown=QUIET) as sessions:
        for id in ("a", "b"):
            session = await sessions.open(id)
            session.memory.set("big", "v" * 5000)
            await session.aclose()
        log = store.read_log

        async def damaged(key: SessionKey, **where: Any) -> AsyncGenerator[Any, None]:
            if key.agent == "b":
                raise CorruptRecordError("damaged")
            async for chunk in log(key, **where):
                yield chunk

        store.read_log = damaged  # type: ignore[method-assign]
        report = await sessions.forget(id="a")
        assert [one.why.partition(":")[0] for one in report.kept] == [
            "b cannot be read, and may reach it"
        ]
        store.read_log = log  # type: ignore[method-assign]
        session = await sessions.open("b")
        assert await session.memory.get("big") == "v" * 5000
        assert len(await store.blob_names("")) == 1


@pytest.mark.parametrize("opened", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("when", ["_base", "_rebase", "write_documents", "trim"])
async def test_a_fork_that_is_made_while_its_parent_is_pruned_keeps_its_history(
    when: str, opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    other = connect(MemoryStore(backing=store._backing), shutdown=QUIET)
    async with connect(store, shutdown=QUIET) as sessions, other:
        await converse(sessions, "p", "one", "two", "three")
        if opened:
            await sessions.open("p")

        async def fork() -> None:
            with contextlib.suppress(HistoryPrunedError, InvalidArgumentError):
                await other.fork("p", "c", at="turn one")

        if when.startswith("_"):
            real = getattr(pruning, when)

            async def before(*args: Any, **options: Any) -> Any:
                await fork()
                return await real(*args, **options)

            monkeypatch.setattr(pruning, when, before)
        else:
            store.hooks[when] = fork
        assert (await sessions.prune(Retention(keep_turns=1))).pruned
        assert await other.exists("c") == (when != "trim")
        if when != "trim":
            async with other.open("c") as child:
                assert said(child) == ["one", "re one"]
                assert len(await told(child)) == 2
                assert await child.memory.get("about one") == {"said": "one"}


async def test_nothing_is_pruned_before_the_manifest_says_so() -> None:
    store = Store()
    async with connect(store, shutdown=QUIET) as sessions:
        await converse(sessions, "p", "one", "two", "three")
        session = await sessions.open("p")
        before = await told(session)

        async def fails() -> None:
            raise StoreUnavailableError("full")

        async def then_fails() -> None:
            store.hooks["write_documents"] = fails

        store.hooks["write_documents"] = then_fails
        with pytest.raises(StoreUnavailableError, match="was not pruned"):
            await sessions.prune(Retention(keep_turns=1))
        assert not store.hooks
        first = [chunk async for chunk in store.read_log(P)][0].records[0]
        assert first.seq == 1
        assert len(before) == 6
    async with connect(store, shutdown=QUIET) as sessions:
        session = await sessions.open("p")
        assert said(session)[0] == "one"
        assert await session.memory.get("about one") == {"said": "one"}


async def test_what_is_posted_while_a_session_is_renamed_waits_at_its_new_name() -> None:
    store = PausingStore(MemoryStore())
    async with connect(store, shutdown=QUIET) as sessions:
        await converse(sessions, "p", "one")
        pause = store.pause("publish")

        async def late() -> None:
            await sessions.post("p", Message.user("late"))

        await meanwhile(pause, lambda: sessions.rename("p", "q"), late)
        async with sessions.open("q") as session:
            assert said(session) == ["one", "re one", "late"]


async def test_the_newest_of_several_prunings_counts_where_the_manifest_is_lost() -> None:
    store = Store()
    async with connect(store, shutdown=QUIET) as sessions:
        session = await sessions.open("p")
        for n, words in enumerate((["one", "two", "three"], ["four", "five"])):
            for word in words:
                async with session.turn(id=word):
                    session.append(Message.user(word))
            assert (await sessions.prune(Retention(keep_turns=1 + n))).pruned
    await store.open()
    base = await SessionStore(store).base_of(P)

    async def lost(*_: Any) -> Documents:
        return Documents()

    store.read_documents = lost  # type: ignore[method-assign]
    assert await SessionStore(store).base_of(P) == base


async def test_another_life_of_a_session_is_read_as_it_is() -> None:
    backing = MemoryBacking()
    here = connect(MemoryStore(backing=backing), shutdown=QUIET)
    there = connect(MemoryStore(backing=backing), shutdown=QUIET)
    thief = MemoryStore(backing=backing)
    async with here, there:
        session = await here.open("p")
        session.append(Message.user("first life"))
        await session.save()
        await thief.open()
        grant = await take_after(thief, P, after=session.epoch)
        await thief.delete(P, grant.epoch)
        await converse(there, "q", "other")
        await there.fork("q", "p")
        await converse(there, "p", "new")
        view = await here.load("p")
        assert view is not None
        assert said(view) == ["other", "re other", "new", "re new"]
        assert [text for _, text in await told(view)] == said(view)


async def test_a_large_post_is_taken_as_one_group() -> None:
    store = MemoryStore()
    async with connect(store, shutdown=QUIET) as sessions:
        await sessions.post("p", Message.user("before"), key="small")
        await sessions.post("p", *[Message.user(str(n)) for n in range(250)], key="large")
        await sessions.post("p", Message.user("behind"), key="last")
        all_taken = anyio.Event()

        def heard(event: Any) -> None:
            if "last" in event.posts:
                all_taken.set()

        sessions.on("posted", heard)
        session = await sessions.open("p")
        with anyio.fail_after(60):
            await all_taken.wait()
        assert said(session) == ["before", *map(str, range(250)), "behind"]
        await session.aclose()
    await store.open()
    records = [record async for chunk in store.read_log(P) for record in chunk.records]
    groups = [decode(one.payload, InboxTakenPayload).ops for one in records if one.kind == TAKEN]
    assert [len(ops) for ops in groups] == [1, 250, 1]
    assert sum(record.end for record in records if record.kind in MESSAGE_KINDS) == 0


async def test_pruning_brings_back_a_blob_before_the_log_loses_its_value() -> None:
    store = MemoryStore()
    async with connect(store, shutdown=QUIET) as sessions:
        session = await sessions.open("p")
        async with session.turn():
            session.memory.set("big", "v" * 5000)
        await session.aclose()
        session = await sessions.open("p")
        for word in ("one", "two"):  # not folded yet
            async with session.turn():
                session.append(Message.user(word))
        assert await store.remove_blobs("", await store.blob_names(""))
        assert (await sessions.prune(Retention(keep_turns=1))).pruned
        await session.aclose()
        assert await (await sessions.open("p")).memory.get("big") == "v" * 5000


async def test_a_session_that_is_deleted_while_it_is_rebuilt_is_not_there() -> None:
    backing = MemoryBacking()
    store = PausingStore(MemoryStore(backing=backing))
    async with (
        connect(store, shutdown=QUIET) as sessions,
        connect(MemoryStore(backing=backing), shutdown=QUIET) as other,
    ):
        await converse(sessions, "p", "one")
        pause = store.pause("acquire", after=True)

        async def rebuild() -> None:
            with pytest.raises(SessionNotFoundError, match="session p was deleted"):
                await sessions.rebuild_working_context("p")

        async def gone() -> None:
            backing.sessions[P].released = True  # as if this process were taken for dead
            await other.rename("p", "q")

        await meanwhile(pause, rebuild, gone)
        assert said(await other.load("q")) == ["one", "re one"]


async def test_a_session_that_is_taken_over_while_it_is_opened_is_lost_and_not_damaged() -> None:
    backing = MemoryBacking()
    store = PausingStore(MemoryStore(backing=backing))
    async with (
        connect(store, shutdown=QUIET) as sessions,
        connect(MemoryStore(backing=backing), shutdown=QUIET) as other,
    ):
        pause = store.pause("acquire", after=True)

        async def begin() -> None:
            session = await sessions.open("p")
            session.append(Message.user("late"))
            with pytest.raises(LeaseLostError, match="taken it over"):
                await session.save()
            await session.discard_unsaved()
            await session.aclose()

        async def take() -> None:
            backing.sessions[P].released = True  # as if this process were taken for dead
            await converse(other, "p", "one")

        await meanwhile(pause, begin, take)
        assert said(await sessions.open("p")) == ["one", "re one"]
