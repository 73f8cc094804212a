"""Each method of a store hangs while a manager is stopped, in each of the ways that it can be.

In all of them it has ended by its deadline, everything that could be saved is, and the report
says what became of every record. `tests.sigterm.hanging` does the same to processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import anyio
import pytest

from perdure import Message, SessionClosedError, SessionManager, Shutdown, connect
from perdure._lib import signals
from perdure._lib.loop import loop_clock
from perdure.autosave.reports import ShutdownReport
from perdure.records.keys import SessionKey
from perdure.session import shutdown
from perdure.session.internals import parts_of
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests._virtual import BACKENDS, VirtualLoop, run
from tests.hanging import EVERY, HELD, METHODS, Hanging
from tests.images import part, png

SHUTDOWN = Shutdown(signals=False, deadline=20, turn_grace=5, hard_grace=1)


class Ended(NamedTuple):
    """How it went."""

    seconds: float
    """From what stopped it to the end."""
    report: ShutdownReport | None
    versions: dict[SessionKey, int]
    """Of the sessions, when it was stopped."""


IDS = ("saved", "unsaved", "turn", "image")


async def busy(
    sessions: SessionManager, store: Hanging, ids: Iterable[str]
) -> dict[SessionKey, int]:
    """Have sessions that are saved, unsaved, in a turn, and with an image; then the store hangs."""
    opened = {}
    for id in ids:
        session = opened[id] = await sessions.open(id)
        session.append(Message.user("one"))
        await session.save()
        if id != "saved":
            session.append(Message.user("two"))
        if id == "image":
            session.append(Message.user([part(png(100_000))]))
        if id == "turn":
            await session.turn().__aenter__()  # it never ends
            session.append(Message.user("in a turn"))
    store.hangs = True
    sessions._check().runtime.host.spawn(load, sessions)
    return {session.key: session.version for session in opened.values()}


async def load(sessions: SessionManager) -> None:
    """Open one more, which may hang, and is cut then."""
    with contextlib.suppress(SessionClosedError):
        await sessions.open("late")


Trigger = Callable[[SessionManager], Awaitable[object]]


async def by_aclose(sessions: SessionManager) -> None:
    await sessions.aclose()


async def by_aclose_twice(sessions: SessionManager) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(sessions.aclose)
        group.start_soon(sessions.aclose)


async def by_aclose_in_a_cancelled_scope(sessions: SessionManager) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await sessions.aclose()


async def by_sigterm(sessions: SessionManager) -> None:
    """What its handler does; the body goes on, whatever it is told."""
    parts = sessions._connected
    assert parts is not None
    watch = parts.signals
    watch._cancel = bool
    assert watch.drain()
    watch.received = True
    assert watch.begin() == SHUTDOWN.deadline + SHUTDOWN.hard_grace
    watch.end()
    await parts.closing.done.wait()


async def by_the_loops_end(sessions: SessionManager) -> None:
    """Return, and leave it open."""


TRIGGERS: list[Trigger] = [
    by_aclose,
    by_aclose_twice,
    by_aclose_in_a_cancelled_scope,
    by_sigterm,
    by_the_loops_end,
]


def stopped(backend: str, trigger: Trigger, store: Hanging, ids: Iterable[str] = IDS) -> Ended:
    connected: list[SessionManager] = []
    began: list[float] = []
    clocks: list[Callable[[], float]] = []
    versions: dict[SessionKey, int] = {}

    async def main() -> None:
        sessions = await connect(store, autosave=None, shutdown=SHUTDOWN)
        connected.append(sessions)
        versions.update(await busy(sessions, store, ids))
        clocks.append(loop_clock())
        began.append(clocks[0]())
        await trigger(sessions)

    run(backend, main)
    return Ended(clocks[0]() - began[0], connected[0].shutdown_report, versions)


def judge(ended: Ended, backing: MemoryBacking, method: str, unsaved: set[str]) -> None:
    assert ended.seconds <= SHUTDOWN.deadline + SHUTDOWN.hard_grace + 1e-6, method
    assert ended.report is not None, method
    heads = anyio.run(heads_of, backing, list(ended.versions))
    listed = {one.key: one for one in ended.report.not_durable}
    assert len(listed) == len(ended.report.not_durable), method
    assert {key.agent for key in listed} == unsaved, method
    for key, version in ended.versions.items():
        if key in listed:
            assert listed[key].version >= version, method
            assert heads[key] >= listed[key].durable, method
        else:  # the turn, which did not end, was cut
            assert heads[key] >= version, method


async def heads_of(backing: MemoryBacking, keys: list[SessionKey]) -> dict[SessionKey, int]:
    store = MemoryStore(backing=backing)
    await store.open()
    try:
        return {key: await store.head(key) for key in keys}
    finally:
        await store.aclose()


def unsaved_by(method: str) -> set[str]:
    if method in ("append_many", EVERY, HELD):
        return set(IDS[1:])
    return {"image"} if method == "put_blobs" else set()


@pytest.fixture(autouse=True)
def no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "end_process", lambda: None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trigger", TRIGGERS)
def test_whatever_hangs_a_manager_has_stopped_by_its_deadline(
    trigger: Trigger, backend: str
) -> None:
    for method in (*METHODS, EVERY, HELD):
        backing = MemoryBacking()
        ended = stopped(backend, trigger, Hanging(MemoryStore(backing=backing), method))
        judge(ended, backing, method, unsaved_by(method))


def test_whatever_hangs_the_interpreters_exit_ends_by_the_deadline() -> None:
    for method in (*METHODS, EVERY, HELD):
        backing = MemoryBacking()
        judge(
            at_exit(Hanging(MemoryStore(backing=backing), method)),
            backing,
            method,
            unsaved_by(method),
        )


def at_exit(store: Hanging) -> Ended:
    """Stop a loop with an open manager, and do what the interpreter has done at its end."""
    loop = VirtualLoop()

    async def main() -> tuple[SessionManager, dict[SessionKey, int]]:
        sessions = await connect(store, autosave=None, shutdown=SHUTDOWN)
        return sessions, await busy(sessions, store, IDS)

    try:
        sessions, versions = loop.run_until_complete(main())
        began = loop.time()
        assert sessions._connected is not None
        shutdown._close([sessions._connected.at_exit])
        while loop.is_running():  # on a busy machine: its time is over, and its thread not done
            time.sleep(0.01)
        return Ended(loop.time() - began, sessions.shutdown_report, versions)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trigger", TRIGGERS)
def test_sessions_that_hang_in_all_slots_cost_the_others_nothing(
    trigger: Trigger, backend: str
) -> None:
    backing = MemoryBacking()
    hung = [f"hung{number}" for number in range(MemoryStore().capabilities.parallelism)]
    healthy = [f"healthy{number}" for number in range(40)]
    store = Hanging(MemoryStore(backing=backing), "append_many", only="hung")
    ended = stopped(backend, trigger, store, [*hung, *healthy])
    judge(ended, backing, "append_many", set(hung))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_shields_itself_beside_delays_no_close(backend: str) -> None:
    async def stubborn() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(1000)

    async def main() -> None:
        sessions = await connect("memory:", shutdown=SHUTDOWN)
        parts_of(sessions).runtime.host.spawn(stubborn)
        await anyio.wait_all_tasks_blocked()
        began = anyio.current_time()
        assert (await sessions.aclose()).clean
        assert anyio.current_time() - began <= SHUTDOWN.deadline + SHUTDOWN.hard_grace

    run(backend, main)
