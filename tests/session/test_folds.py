"""Folds of open sessions: taken from memory, equal to what the log folds to, and never in the way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from hypothesis import given, settings, strategies as st

from perdure import Limits, Message, Session, Shutdown, connect
from perdure.records.keys import SessionKey
from perdure.session.lifecycle import MOST_EPOCHS, REST
from perdure.store import LogChunk
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests._virtual import BACKENDS, run

QUIET = Shutdown(signals=False)
ACTS = ["talk", "turn", "named turn", "cut turn", "retract", "memory", "state", "label", "save"]


class ReadsCounted(MemoryStore):
    """Counts the reads of a log."""

    log_reads = 0

    def read_log(self, key: SessionKey, **options: Any) -> AsyncIterator[LogChunk]:  # type: ignore[override]
        self.log_reads += 1
        return super().read_log(key, **options)


async def act(session: Session, what: str, number: int) -> None:
    text = f"{what} {number}"
    if what == "talk":
        session.append(Message.user(text), Message.assistant(text))
    elif what == "turn":
        async with session.turn():
            session.append(Message.user(text))
    elif what == "named turn":
        async with session.turn(f"request-{number}"):
            session.append(Message.user(text))
    elif what == "cut turn":
        with pytest.raises(ZeroDivisionError):
            async with session.turn(f"request-{number}"):
                session.append(Message.user(text))
                raise ZeroDivisionError
    elif what == "retract":
        await session.retract(after=session.version // 2)
    elif what == "memory":
        session.memory.set(f"k{number % 3}", text)
    elif what == "state":
        session.state.set(f"plan-{number % 3}", {"step": number})
    elif what == "label":
        session.describe(title=text, tags=[what], number=number)
    elif what == "save":
        await session.save()


def test_documents_folded_from_memory_are_what_the_log_folds_to() -> None:
    @settings(max_examples=60)
    @given(st.lists(st.sampled_from(ACTS), min_size=1, max_size=25), st.integers(1, 12))
    def check(acts: list[str], often: int) -> None:
        anyio.run(differences, acts, often)

    check()


async def differences(acts: list[str], often: int) -> None:
    backing = MemoryBacking()
    limits = Limits(fold_records=often, context_bytes=1500)
    for half in (acts[::2], acts[1::2]):
        async with (
            connect(MemoryStore(backing=backing), shutdown=QUIET, limits=limits) as sessions,
            sessions.open("a") as session,
        ):
            for number, what in enumerate(half):
                await act(session, what, number)
                await session.save()
            report = await sessions.rebuild_working_context("a", dry_run=True)
            assert report.wrong == ()
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        report = await sessions.rebuild_working_context("a", dry_run=True)
        assert report.wrong == ()


async def test_a_fold_of_a_session_at_rest_reads_no_records() -> None:
    store = ReadsCounted()
    folds: list[Any] = []
    async with connect(store, shutdown=QUIET, limits=Limits(fold_records=10)) as sessions:
        sessions.on("folded", folds.append)
        session = await sessions.open("a")
        opened = store.log_reads
        for number in range(30):
            await act(session, ACTS[number % 4], number)
            await session.save()
            await anyio.wait_all_tasks_blocked()
        await session.aclose()
        assert len(folds) > 3
        assert store.log_reads == opened


async def test_a_save_does_not_wait_while_a_fold_is_computed() -> None:
    computing, may_end = anyio.Event(), anyio.Event()

    class Slow(MemoryStore):
        async def read_documents(self, key: SessionKey, names: Any = None) -> Any:
            if self.is_slow:
                computing.set()
                await may_end.wait()
            return await super().read_documents(key, names)

        is_slow = False

    store = Slow()
    async with connect(store, shutdown=QUIET, limits=Limits(fold_records=3)) as sessions:
        session = await sessions.open("a")
        store.is_slow = True
        for number in range(5):
            session.append(Message.user(str(number)))
            await session.save()
        with anyio.fail_after(30):
            await computing.wait()
        session.append(Message.user("meanwhile"))
        with anyio.fail_after(30):
            await session.save()
        store.is_slow = False
        may_end.set()
        await session.aclose()
    async with connect(store, shutdown=QUIET) as sessions:
        view = await sessions.load("a")
        assert view is not None
        assert view.restore_report.source == "snapshot"


async def test_what_came_during_a_fold_is_folded_at_the_close() -> None:
    """Records that are not durable when a fold begins are not in it."""
    backing = MemoryBacking()
    for _ in range(10):
        async with connect(
            MemoryStore(backing=backing), shutdown=QUIET, limits=Limits(fold_records=10)
        ) as sessions:
            session = await sessions.open("a")
            for number in range(33):
                await act(session, "turn", number)
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        view = await sessions.load("a")
        assert view is not None
        assert view.restore_report.source == "snapshot"


async def test_opening_a_session_very_often_without_a_change_does_not_slow_it_down() -> None:
    backing = MemoryBacking()
    for round in range(3 * MOST_EPOCHS):
        async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
            session = await sessions.open("ada")
            if not round:
                session.append(Message.user("a"))
            assert session.restore_report.records_read <= MOST_EPOCHS
            assert len(session.context()) == 1


async def folds_of_a_busy_session(changes: int, *, rest: float = 0.0) -> tuple[list[int], int]:
    """Return what the folds were as of, and the newest record; it never rests, but at the end."""
    folds: list[Any] = []
    async with connect(MemoryStore(), shutdown=QUIET, limits=Limits(fold_records=100)) as sessions:
        sessions.on("folded", folds.append)
        session = await sessions.open("a")
        for number in range(changes):
            await act(session, "memory", number)
            await session.save()
            await anyio.sleep(REST / 2)
        await anyio.sleep(rest)
        return [fold.as_of_seq for fold in folds], session.version


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fold_waits_until_the_session_is_at_rest(backend: str) -> None:
    # From the 120th change on a fold is due, whatever its phase.
    assert run(backend, folds_of_a_busy_session, 140)[0] == []
    folds, newest = run(backend, folds_of_a_busy_session, 140, rest=3 * REST)
    assert folds == [newest]


async def folds_while_it_is_looked_at() -> tuple[list[int], int]:
    """Return what the folds were as of, and the newest record, of a session opened all the time."""
    folds: list[Any] = []
    async with connect(MemoryStore(), shutdown=QUIET, limits=Limits(fold_records=100)) as sessions:
        sessions.on("folded", folds.append)
        async with sessions.open("a") as session:
            for number in range(140):
                await act(session, "memory", number)
            await session.save()
        for _ in range(40):
            async with sessions.open("a"):
                await anyio.sleep(REST / 2)
        return [fold.as_of_seq for fold in folds], session.version


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_only_looks_at_a_session_does_not_keep_it_from_its_fold(backend: str) -> None:
    folds, newest = run(backend, folds_while_it_is_looked_at)
    assert folds == [newest]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_session_that_never_rests_is_folded_when_its_tail_is_long(backend: str) -> None:
    folds, _ = run(backend, folds_of_a_busy_session, 400)
    assert len(folds) == 2
    assert 150 <= folds[0] <= 1.2 * 150 + 2


async def test_a_session_that_never_rests_is_folded_from_memory() -> None:
    store = ReadsCounted()
    folds: list[Any] = []
    async with connect(store, shutdown=QUIET, limits=Limits(fold_records=10)) as sessions:
        sessions.on("folded", folds.append)
        session = await sessions.open("a")
        opened = store.log_reads
        for number in range(100):
            await act(session, "turn", number)
        await session.aclose()
        assert len(folds) > 3
        assert store.log_reads == opened


async def test_a_fold_that_cannot_begin_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connect("memory:", shutdown=QUIET, limits=Limits(fold_records=5)) as sessions:
        folded: list[SessionKey] = []
        failed: list[SessionKey] = []
        sessions.on("folded", lambda event: folded.append(event.key))
        sessions.on("fold_failed", lambda event: failed.append(event.key))
        opened = [await sessions.open(f"a{number}") for number in range(4)]
        durable_tail = Session._durable_tail

        def broken(session: Session) -> Any:
            if session is opened[0]:
                raise MemoryError
            return durable_tail(session)

        monkeypatch.setattr(Session, "_durable_tail", broken)
        for session in opened:
            session.append(*(Message.user(str(n)) for n in range(20)))
            await session.save()
        with anyio.fail_after(10):
            while len(folded) < 3 or not failed:
                await anyio.sleep(REST / 2)
        assert sorted(folded) == [session.key for session in opened[1:]]
        assert set(failed) == {opened[0].key}
        monkeypatch.undo()
