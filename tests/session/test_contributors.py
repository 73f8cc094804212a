"""State that others own, kept with a session (S2-1; C5)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

from perdure import (
    ConfigError,
    EngineOptions,
    Message,
    Session,
    UnsupportedVersionError,
    connect,
)
from perdure.events import Closed
from perdure.lease import LeaseOptions
from perdure.records.records import STATE
from perdure.session.internals import store_below, store_of
from perdure.session.manager import SessionManager
from perdure.session.options import Limits
from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing import ManualClock, SwitchedStore
from perdure.types import RestoreContext
from tests.session.conftest import Connect
from tests.session.test_manager import QUIET
from tests.session.test_meanwhile import Store as Hooked


class Counter:
    """A contributor that counts."""

    def __init__(self, name: str = "counter", *, version: int = 1, count: int = 0) -> None:
        self.name = name
        self.version = version
        self.state: Any = {"count": count} if count else None
        self.captures = 0
        self.restored: list[tuple[Any, int]] = []

    async def capture(self) -> Any:
        await anyio.lowlevel.checkpoint()
        self.captures += 1
        return self.state

    async def restore(self, state: Any, context: RestoreContext) -> None:
        await anyio.lowlevel.checkpoint()
        self.restored.append((state, context.stored_version))
        self.state = state


class Migrating(Counter):
    def migrate(self, state: Any, from_version: int) -> Any:
        return {**state, f"from-{from_version}": True}


class AsyncMigrating(Counter):
    async def migrate(self, state: Any, from_version: int) -> Any:
        await anyio.lowlevel.checkpoint()
        return {**state, f"from-{from_version}": True}


async def states_of(session: Session) -> list[Any]:
    """Return the records that contributors have written, as plain values."""
    await session.save()
    records = []
    async for chunk in store_of(session).read_log(session.key):
        records += [one for one in chunk.records if one.kind == STATE]
    return records


async def test_a_state_comes_back_when_its_contributor_is_attached(again: Connect) -> None:
    """S2-1: the state of plugins is a part of the session."""
    async with again() as sessions, sessions.open("a") as session:
        await session.attach(Counter(count=3))
        await session.save()
    async with again() as sessions, sessions.open("a") as session:
        counter = Counter()
        await session.attach(counter)
        assert counter.restored == [({"count": 3}, 1)]


async def test_a_contributor_without_a_stored_state_is_not_restored(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        counter = Counter()
        await session.attach(counter)
        assert counter.restored == []


async def test_a_turn_saves_what_changed_in_it_and_the_end_of_the_manager_the_rest(
    again: Connect,
) -> None:
    async with again(autosave=None) as sessions, sessions.open("a") as session:
        counter = Counter()
        await session.attach(counter)
        async with session.turn():
            counter.state = {"count": 1}
        view = await sessions.load("a")
        assert view is not None
        assert session.durable_version == session.version
        counter.state = {"count": 2}  # and nothing is appended after it
    async with again() as sessions, sessions.open("a") as session:
        counter = Counter()
        await session.attach(counter)
        assert counter.state == {"count": 2}


async def test_an_unchanged_state_writes_nothing(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        counter = Counter(count=1)
        await session.attach(counter)
        for _ in range(3):
            session.append(Message.user("x"))
            await session.save()
        assert counter.captures >= 3
        assert len(await states_of(session)) == 1
    async with again() as sessions, sessions.open("a") as session:
        await session.attach(Counter())
        session.append(Message.user("x"))
        assert len(await states_of(session)) == 1


async def test_an_unknown_contributors_state_is_carried_through_folds(again: Connect) -> None:
    """C5, defect i: what nobody claims is not dropped at the next save."""
    state = {"entries": [{"key": "k", "of_a_later_release": 1.0}], "config": {}}
    async with again() as sessions, sessions.open("a") as session:
        foreign = Counter("foreign", version=7)
        foreign.state = state
        await session.attach(foreign)
    for _ in range(3):  # opened, changed, folded and closed by those who do not know it
        async with again() as sessions:
            session = await sessions.open("a")
            await session.attach(Counter(count=1))
            session.append(Message.user("x"))
            await session.aclose()
    async with again() as sessions, sessions.open("a") as session:
        foreign = Counter("foreign", version=7)
        await session.attach(foreign)
        assert foreign.restored == [(state, 7)]


async def test_a_plugins_file_holds_its_state_and_nothing_else(again: Connect) -> None:
    """S2-6: plugins/<name>.json, readable."""
    async with again() as sessions:
        session = await sessions.open("a")
        counter = Counter("in_context_memory", version=2)
        counter.state = {"entries": [], "config": {}}
        await session.attach(counter)
        await session.aclose()
        found = await store_below(sessions).read_documents(
            session.key, {"plugins/in_context_memory.json"}
        )
        document = found.found["plugins/in_context_memory.json"]
        assert document.data == b'{\n  "entries": [],\n  "config": {}\n}'


@pytest.mark.parametrize("kind", [Migrating, AsyncMigrating])
async def test_an_older_state_is_migrated_step_by_step(again: Connect, kind: Any) -> None:
    async with again() as sessions, sessions.open("a") as session:
        await session.attach(Counter(count=1))
    async with again() as sessions, sessions.open("a") as session:
        counter = kind(version=3)
        await session.attach(counter)
        wanted = {"count": 1, "from-1": True, "from-2": True}
        assert counter.restored == [(wanted, 1)]
        await session.save()
    async with again() as sessions, sessions.open("a") as session:
        counter = kind(version=3)
        await session.attach(counter)
        assert counter.restored == [(wanted, 3)]


@pytest.mark.parametrize(
    ("version", "says"), [(1, r"reads up to 1"), (3, r"migrate\(state, from_version\)")]
)
async def test_a_state_that_cannot_be_read_is_left_as_it_is(
    again: Connect, version: int, says: str
) -> None:
    async with again() as sessions, sessions.open("a") as session:
        await session.attach(Counter(count=1, version=2))
    async with again() as sessions, sessions.open("a") as session:
        with pytest.raises(UnsupportedVersionError, match=says):
            await session.attach(Counter(count=9, version=version))
        session.append(Message.user("x"))
    async with again() as sessions, sessions.open("a") as session:
        counter = Counter(version=2)
        await session.attach(counter)
        assert counter.restored == [({"count": 1}, 2)]


async def test_two_of_one_name_are_refused_and_the_same_twice_is_one(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        counter = Counter()
        attachment = await session.attach(counter)
        assert await session.attach(counter) is attachment
        with pytest.raises(ConfigError, match="another name"):
            await session.attach(Counter())
        attachment.detach()
        await session.attach(Counter())


@pytest.mark.parametrize("name", ["", "a/b", 5])
async def test_a_name_that_is_none_is_refused(again: Connect, name: Any) -> None:
    async with again() as sessions, sessions.open("a") as session:
        with pytest.raises(ConfigError, match="name"):
            await session.attach(Counter(name))


async def test_a_version_that_is_none_is_refused(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        with pytest.raises(ConfigError, match="version=0"):
            await session.attach(Counter(version=0))


async def test_one_that_fails_or_is_late_keeps_nobody_from_being_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The save goes on, with the others' states, and the log names who failed."""

    class Failing(Counter):
        async def capture(self) -> Any:
            raise RuntimeError("broken")

    class Stuck(Counter):
        async def capture(self) -> Any:
            await anyio.sleep_forever()

    backing = MemoryBacking()
    engine = EngineOptions(capture_timeout=0.02)
    store = MemoryStore(backing=backing)
    with caplog.at_level(logging.WARNING, "perdure"):
        async with connect(store, engine=engine, shutdown=QUIET) as sessions:
            session = await sessions.open("a")
            await session.attach(Failing("failing"))
            await session.attach(Counter("good", count=5))
            session.append(Message.user("x"))
            await session.save()
            await session.attach(Stuck("stuck"))
            good = Counter("late but good", count=6)
            await session.attach(good)
            await session.save()
            assert session.durable_version == session.version
    text = caplog.text
    assert "raised by the contributor 'failing'" in text
    (late,) = {
        tuple(one.__dict__["contributors"])
        for one in caplog.records
        if "contributors" in one.__dict__
    }
    assert "stuck" in late
    assert "late but good" not in late
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        session = await sessions.open("a")
        for name, count in (("good", 5), ("late but good", 6)):
            counter = Counter(name)
            await session.attach(counter)
            assert counter.state == {"count": count}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # on trio nothing but a scope raises it
async def test_one_that_awaits_what_was_cancelled_has_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Awaiting(Counter):
        async def capture(self) -> Any:
            raise asyncio.CancelledError

    async with connect("memory:", shutdown=QUIET) as sessions, sessions.open("a") as session:
        await session.attach(Awaiting("awaiting"))
        session.append(Message.user("x"))
        await session.save()
    assert "raised by the contributor 'awaiting'" in caplog.text


async def test_the_end_of_a_turn_asks_once() -> None:
    async with connect("memory:", shutdown=QUIET) as sessions, sessions.open("a") as session:
        counter = Counter(count=1)
        await session.attach(counter)
        async with session.turn():
            session.append(Message.user("x"))
        assert counter.captures == 1


async def test_a_turn_whose_end_is_cancelled_is_saved_all_the_same() -> None:
    asked, answered = anyio.Event(), anyio.Event()

    class Slow(Counter):
        async def capture(self) -> Any:
            asked.set()
            await answered.wait()
            return {"count": 1}

    async with connect("memory:", shutdown=QUIET) as sessions, sessions.open("a") as session:
        await session.attach(Slow())

        async def turn(*, task_status: TaskStatus[anyio.CancelScope]) -> None:
            with anyio.CancelScope() as scope:
                task_status.started(scope)
                async with session.turn():
                    session.append(Message.user("x"))

        async with anyio.create_task_group() as tasks:
            scope = await tasks.start(turn)
            await asked.wait()
            scope.cancel()
        assert scope.cancelled_caught
        answered.set()
        with anyio.fail_after(60):
            await session.wait_durable()
        view = await sessions.load("a")
        assert view is not None
        assert [message.text for message in view.context()] == ["x"]


async def test_a_state_that_cannot_be_stored_is_reported_and_the_save_goes_on(
    again: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async with again() as sessions, sessions.open("a") as session:
        counter = Counter("odd")
        counter.state = {"a": object()}
        await session.attach(counter)
        session.append(Message.user("x"))
        await session.save()
        assert session.durable_version == session.version
    assert "cannot be stored" in caplog.text


async def test_a_change_between_turns_can_be_told(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        counter = Counter()
        attachment = await session.attach(counter)
        before = session.version
        counter.state = {"count": 1}
        attachment.changed()
        with anyio.fail_after(60):
            while session.version == before:
                await anyio.sleep(0)
            receipt = await session.wait_durable()
        assert receipt.version == session.version == before + 1


async def test_many_changes_are_asked_for_together(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("a") as session:
        counter = Counter()
        attachment = await session.attach(counter)
        for count in range(1, 1001):
            counter.state = {"count": count}
            attachment.changed()
        with anyio.fail_after(10):
            while not counter.captures:
                await anyio.sleep(0)
        counter.state = {"count": 0}
        attachment.changed()  # while the others are being asked for, or behind it
        await anyio.wait_all_tasks_blocked()
        assert counter.captures <= 3
        assert [record.payload for record in session.unsaved()][-1].endswith(b'"count":0}}')


async def test_a_flush_asks_for_what_changed_where_nothing_was_appended(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("a") as session:
        counter = Counter()
        await session.attach(counter)
        counter.state, before = {"count": 7}, session.version
        await sessions.flush()
        assert session.durable_version == session.version == before + 1


async def test_a_detached_contributor_is_not_asked_and_its_state_stays(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        counter = Counter(count=1)
        attachment = await session.attach(counter)
        await session.save()
        asked = counter.captures
        attachment.detach()
        counter.state = {"count": 2}
        await session.save()
        assert counter.captures == asked
    async with again() as sessions, sessions.open("a") as session:
        counter = Counter()
        await session.attach(counter)
        assert counter.state == {"count": 1}


async def test_a_restore_that_fails_attaches_nobody_and_changes_nothing(again: Connect) -> None:
    class Broken(Counter):
        async def restore(self, state: Any, context: RestoreContext) -> None:
            raise RuntimeError("broken")

    async with again() as sessions, sessions.open("a") as session:
        await session.attach(Counter(count=1))
    async with again() as sessions, sessions.open("a") as session:
        broken = Broken(count=9)
        with pytest.raises(RuntimeError, match="broken"):
            await session.attach(broken)
        await session.save()
        assert broken.captures == 0
        counter = Counter()
        await session.attach(counter)
        assert counter.state == {"count": 1}


async def test_before_a_session_leaves_memory_its_contributors_are_asked() -> None:
    """Nothing was appended, nobody holds it: it may not be forgotten with what it had."""
    clock = ManualClock()
    async with manager(MemoryStore(), clock) as sessions:
        closed: list[Closed] = []
        sessions.on("closed", closed.append)
        async with sessions.open("a") as session:
            counter = Counter()
            await session.attach(counter)
            session.append(Message.user("x"))
            await session.save()
        counter.state = {"count": 4}
        await clock.advance(1000)
        assert closed == []
        assert session.version > session.durable_version
        await sessions.flush()
        await clock.advance(1000)
        assert [(str(one.key), one.why) for one in closed] == [("a", "hibernated")]
        again = Counter()
        async with sessions.open("a") as session:
            await session.attach(again)
        assert again.state == {"count": 4}


async def test_a_state_that_changed_while_its_session_closes_is_saved() -> None:
    store = Hooked()
    async with connect(store, shutdown=QUIET, autosave=None) as sessions:
        session = await sessions.open("a")
        counter = Counter(count=1)
        await session.attach(counter)
        session.append(Message.user("first"))

        async def change() -> None:
            session.append(Message.user("while the first is on its way"))
            counter.state = {"count": 2}

        store.after["append_many"] = change
        await session.aclose()
        again = Counter()
        async with sessions.open("a") as session:
            await session.attach(again)
            assert len(session.context()) == 2
        assert again.state == {"count": 2}


def manager(store: Store, clock: ManualClock) -> SessionManager:
    return SessionManager(
        store, autosave=None, lease=LeaseOptions(), shutdown=QUIET, limits=Limits(), clock=clock
    )


async def test_after_a_discard_the_state_is_written_whole_again() -> None:
    store = SwitchedStore(MemoryStore())
    async with connect(store, shutdown=QUIET, autosave=None) as sessions:
        session = await sessions.open("a")
        counter = Counter()
        await session.attach(counter)
        await session.save()
        store.fail_next(how="permanent", times=5)
        counter.state = {"count": 1}
        with pytest.raises(Exception, match="permanently"):
            await session.save()
        assert await session.discard_unsaved() == 1
        store.up()
        await session.save()
        assert session.durable_version == session.version
        assert len(await states_of(session)) == 1
